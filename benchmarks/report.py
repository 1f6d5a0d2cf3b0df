"""Results as JSON and as Markdown tables."""

import argparse
import contextlib
import itertools
import json
import os
import platform
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.systems import PLAIN, PLAIN_KERAS
from examples.common.command_line import OneLineParser

RESULTS = Path(__file__).with_name("results")
_PACKAGES = ["jax", "jaxlib", "optax", "flax", "jmp", "mixed_precision_for_JAX"]
_PACKAGES += ["keras", "libtpu", "jax-cuda12-plugin"]


def parser(name: str, text: str | None, arguments: str = "") -> argparse.ArgumentParser:
    """Returns the parser of a script, whose help is the docstring of the script."""
    return OneLineParser(f"python -m {name}", arguments, description=text)


def versions() -> dict[str, str]:
    """Returns the versions of Python and the packages."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def machine() -> dict[str, Any]:
    """Returns a description of the machine."""
    device = jax.devices()[0]
    kind = device.device_kind
    if device.platform == "cpu":
        cpuinfo = Path("/proc/cpuinfo")
        lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
        names = [line.split(": ")[1] for line in lines if line.startswith("model name")]
        kind = f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores"
    return {"platform": device.platform, "device": kind, "system": platform.system()}


def about() -> dict[str, Any]:
    """Returns the first entries of results: the machine and the versions."""
    return {"machine": machine(), "versions": versions()}


def load(path: Path) -> dict[str, Any]:
    """Reads results; returns an empty dictionary if there is no file."""
    return json.loads(path.read_text()) if path.exists() else {}


def save(path: Path, results: dict[str, Any]) -> None:
    """Writes results."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")


def read_csv(path: Path) -> np.ndarray:
    """Reads the logs of a training; an empty field is nan."""
    return np.genfromtxt(path, delimiter=",", names=True)


def table(header: list[str], rows: list[list[str]]) -> str:
    """Returns a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def by_workload(results: dict[str, Any]) -> dict[str, dict[str, dict[str, Any]]]:
    """Returns the rows of results by workload and system."""
    found = {}
    for row in results["rows"]:
        found.setdefault(row["workload"], {})[row["system"]] = row
    return found


def _megabytes(number: float) -> str:
    return f"{number / 1e6:,.1f}"


def full_report(results: dict[str, Any]) -> str:
    """Returns a Markdown page with all results, a table per workload."""
    machine = results["machine"]
    packages = ", ".join(f"{k} {v}" for k, v in results["versions"].items())
    text = f"# Benchmarks on {machine['device']} ({machine['system']})\n\n"
    text += "Steps of plain Optax, of this package and of its peers, timed in turns.\n"
    text += f"\n{packages}\n"
    header = ["system", "time / plain", "10% to 90%", "rounds", "ms"]
    header += ["compile / plain", "temporary MB", "peak MB", "kernels"]
    for workload, systems in by_workload(results).items():
        plain = systems[PLAIN]["plain_s"]
        text += f"\n## {workload}\n\nPlain: {1e3 * plain:.3g} ms a step.\n\n"
        rows = [
            [
                name,
                f"{row['ratio']:.2f}",
                "{:.2f} to {:.2f}".format(*row["spread"]),
                str(row["rounds"]),
                f"{1e3 * row['step_s']:.3g}",
                f"{row['compile_ratio']:.2f}",
                _megabytes(row["temp_bytes"]),
                _megabytes(row["peak_bytes"]),
                str(row["kernels"]),
            ]
            for name, row in systems.items()
        ]
        text += table(header, rows)
    return text


def _ratios(systems: dict[str, dict[str, Any]], key: str = "ratio") -> dict[str, float]:
    """Returns the ratios of a workload by system, with the default `skip` alone."""
    return {
        name.removesuffix(", auto"): row[key]
        for name, row in systems.items()
        if name not in (PLAIN, PLAIN_KERAS) and not name.endswith((", where", ", cond"))
    }


def _ratio_table(
    title: str, columns: dict[str, dict[str, float]], names: Iterable[str] = ()
) -> str:
    """Returns a table of ratios: a row for each system, or for those in `names`."""
    rows = [
        [name, *(f"{r[name]:.2f}" if name in r else "" for r in columns.values())]
        for name in names or dict.fromkeys(itertools.chain(*columns.values()))
    ]
    return table([title, *columns], rows)


def timing_tables(results: dict[str, Any]) -> list[str]:
    """Returns a table of optimizer steps, and one of training steps.

    Each has a column per main workload.
    """
    tables = {}
    for systems in by_workload(results).values():
        column, given = (systems[PLAIN][key] for key in ("column", "given"))
        key = "compile_ratio" if column.startswith("compile") else "ratio"
        if column:
            title = f"{'optimizer' if given else 'training'} step / plain"
            tables.setdefault(title, {})[column] = _ratios(systems, key)
    return [_ratio_table(*titled) for titled in tables.items()]


def compiled_tables(results: dict[str, Any]) -> list[str]:
    """Returns a table of the compiled steps for each target."""
    tables = []
    for target, found in results.items():
        rows = []
        for row in found["rows"]:
            name, ratio = row["system"].removesuffix(", auto"), f"{row['ratio']:.3f}"
            sizes = [_megabytes(row[key]) for key in ("temp_bytes", "copied_bytes")]
            if not name.endswith(", where"):  # the same as "auto" here
                rows.append([name, ratio, *sizes])
        header = [f"compiled for {target}", "bytes / plain", "temporary MB"]
        tables.append(table([*header, "copied MB"], rows))
    return tables


def summary_table(cpu: dict[str, Any], compiled: dict[str, Any]) -> str:
    """Returns the main ratios: times of training, and bytes of Adam's step."""
    workloads = {x[PLAIN]["column"]: x for x in by_workload(cpu).values()}
    columns = {f"time, {x}": _ratios(workloads[x]) for x in ("MLP", "transformer")}
    columns["compile, transformer"] = _ratios(workloads["transformer"], "compile_ratio")
    for target, found in compiled.items():
        steps = {
            row["system"].replace(" of unscaled", ""): row for row in found["rows"]
        }
        columns[f"bytes, {target}"] = _ratios(steps)
    names = ["minimize", "update", "with_loss_scale, update", "minimize, fixed scale"]
    return _ratio_table("ratio to plain Optax", columns, names)


def replace_tables(page: str, tables: list[str]) -> str:
    """Returns a page with these tables in place of those with the same first title."""
    for new in tables:
        head = new[: new.index(" |") + 2]
        if head in page:
            start = page.index(head)
            page = page[:start] + new + page[page.index("\n\n", start) + 1 :]
    return page
