"""Measures how the cost grows with leaves, parameters, devices and options.

`python -m benchmarks.growth` takes an hour and needs `jax[tpu]`, for its compiler;
no TPU. With `jax[cuda12]` it also compiles for an H100. It writes
`results/growth.json`, and the tables and the figure of `docs/guide/growth.md`.
"""

import argparse
import functools
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
from rich.console import Console
from rich.progress import Progress

from benchmarks import report
from benchmarks.compiled import CPU, H100, TPU, device
from benchmarks.growth import chips, compiling, diagnostics, options, page, timing


def parts() -> dict[str, list[Callable[[], Iterator[dict[str, Any]]]]]:
    """Returns what is measured, by the name of the part."""
    make = functools.partial
    sizes = [*((n, 20) for n in compiling.PARAMETERS), *compiling.OTHER_SIZES]
    accelerators = [target for target in (TPU, H100) if device(target)]
    return {
        "compile": [
            make(compiling.by_leaves, CPU, optimizer, leaves)
            for optimizer in ("adam", "sgd")
            for leaves in compiling.LEAVES
        ],
        "accelerators": [
            make(compiling.by_leaves, target, "adam", leaves)
            for target in accelerators
            for leaves in compiling.ACCELERATOR_LEAVES
        ],
        "scanned": [make(compiling.scanned, x) for x in (CPU, *accelerators)],
        "sizes": [make(compiling.by_parameters, *size) for size in sizes],
        "times": [make(timing.by_size, *size) for size in timing.SIZES],
        "chips": [make(chips.on_chips, *topology) for topology in chips.TOPOLOGIES],
        "simulated": [make(chips.simulated, count) for count in chips.SIMULATED],
        "options": [make(options.measure, name) for name in options.make_options(1)],
        "diagnostics": [
            make(diagnostics.by_leaves, leaves) for leaves in compiling.LEAVES
        ],
        "trace": [make(diagnostics.by_layers, count) for count in diagnostics.LAYERS],
    }


def measure(name: str) -> None:
    """Measures a part, and saves each of its rows."""
    if name == "simulated":
        jax.config.update("jax_num_cpu_devices", max(chips.SIMULATED))
    found = report.load(page.RESULTS) | report.about() | {name: []}
    with Progress(console=Console(stderr=True)) as progress:
        for rows in progress.track(parts()[name], description=name):
            for row in rows():
                found[name].append(row)
                report.save(page.RESULTS, found)


def main() -> None:
    """Measures, and writes the results and the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.growth")
    parser.add_argument("--part", choices=list(parts()), help="measure only this part")
    chosen = parser.parse_args().part
    if chosen:
        measure(chosen)
    else:
        # Each has a process of its own, as only one of them simulates devices.
        for name in parts():
            command = [sys.executable, "-m", "benchmarks.growth", "--part", name]
            subprocess.run(command, check=True)
    page.write(report.load(page.RESULTS))


if __name__ == "__main__":
    main()
