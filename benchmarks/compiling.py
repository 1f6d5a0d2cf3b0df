"""Measures what loss scaling adds to the time to compile a transformer.

`python -m benchmarks.compiling` compiles for the CPU, and for a TPU v5e and an H100 as
`benchmarks.compiled` does, and for these two also a larger transformer. Adds
to `results/compiling.json`. Arguments name some of these parts: `CPU "H100, scanned"`.
"""

import functools
import itertools
from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.compiled import CPU, H100, TPU, compile_step, device
from benchmarks.measure import cpu_seconds
from benchmarks.retries import COMPILED, repeating
from benchmarks.systems import PLAIN
from benchmarks.workloads import transformer

RESULTS = report.RESULTS / "compiling.json"
ROUNDS = 5
RETRIES = "minimize, retries=24"
OURS = (PLAIN, "minimize", RETRIES, "with_loss_scale, update")
OTHERS = ("update", "minimize, fixed scale", "flax DynamicScale", "jmp", "mpx")


def compare(part: str) -> dict[str, dict[str, Any]] | None:
    """Compiles systems in turns; returns None if the compiler is not installed.

    Returns:
      By system, the processor times, and the median over the rounds of their ratios to
      those of the plain step.
    """
    target, _, scanned = part.partition(", ")
    if (on := device(target)) is None:
        return None
    workload = COMPILED["transformer, scanned"]() if scanned else transformer()
    systems = workload.systems() | {RETRIES: functools.partial(repeating, workload)}
    compile_step(workload, systems[PLAIN](), on)  # loads the compiler
    times = {name: [] for name in (OURS if scanned else OURS + OTHERS)}
    for _, name in itertools.product(range(ROUNDS), times):
        compile_ = functools.partial(compile_step, workload, systems[name](), on)
        times[name].append(cpu_seconds(compile_)[0])
    return {
        name: {"seconds": s, "ratio": float(np.median(np.divide(s, times[PLAIN])))}
        for name, s in times.items()
    }


LARGER = f"{TPU}, scanned", f"{H100}, scanned"
PARTS = {part: functools.partial(compare, part) for part in (TPU, H100, CPU, *LARGER)}


def main() -> None:
    """Compiles for all targets, or those that are named, and writes the results."""
    results = report.measure_parts("benchmarks.compiling", __doc__, PARTS, RESULTS)
    print(report.compiling_table(results))


if __name__ == "__main__":
    main()
