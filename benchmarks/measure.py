"""Measures the time of a system relative to that of the plain step, in turns."""

import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

from benchmarks import hlo
from benchmarks.systems import PLAIN, System, lower
from benchmarks.workloads import Workload


def cpu_seconds(function: Callable[[], Any]) -> tuple[float, Any]:
    """Returns the processor time of a call, and its result.

    It is the sum over threads and the processes that they wait for: a compiler may call
    an assembler. Caches are emptied first. It depends little on what else runs.
    """
    jax.clear_caches()
    start = sum(os.times()[:4])
    result = function()
    return sum(os.times()[:4]) - start, result


class Running:
    """A compiled step, its parameters and its state."""

    def __init__(self, system: System, params: Any, batches: list):
        params = jax.device_put(params)
        state = system.init(params)
        self.batches = batches
        self.compiled = lower(system, params, state, *batches[0]).compile()
        self.carry = (params, jax.tree.leaves(state))

    def round(self) -> float:
        """Runs a step on every batch, and returns the time in seconds."""
        start = time.perf_counter()
        for batch in self.batches:
            *self.carry, _ = self.compiled(*self.carry, *batch)
        jax.block_until_ready(self.carry)
        return time.perf_counter() - start


def compare(plain: Running, scaled: Running, seconds: float) -> dict[str, Any]:
    """Runs both in turns for `seconds`, and for at least ten rounds each.

    Returns:
      A dictionary. `ratio` is the median of the ratios of neighboring rounds, `spread`
      their 10th and 90th percentiles. Other entries describe the compiled step.
    """
    for _ in range(5):  # The first steps may overflow.
        scaled.round()
    plain.round()
    theirs, ours = [], []
    start = time.perf_counter()
    while len(ours) < 10 or time.perf_counter() - start < seconds:
        theirs.append(plain.round())
        ours.append(scaled.round())
    ratios = sorted(b / a for a, b in zip(theirs, ours, strict=True))
    return {
        "ratio": statistics.median(ratios),
        "spread": [ratios[len(ratios) // 10], ratios[-1 - len(ratios) // 10]],
        "rounds": len(ratios),
        "plain_s": statistics.median(theirs) / len(plain.batches),
        "temp_bytes": scaled.compiled.memory_analysis().temp_size_in_bytes,
        "kernels": hlo.parse(scaled.compiled.as_text()).kernels(),
    }


def measure(
    workload: Workload, seconds: float, only: str = ""
) -> Iterator[dict[str, Any]]:
    """Yields a row for each system whose name contains `only`, the plain one first.

    The plain step is also compared with itself, which shows how noisy the machine is.
    """
    params, batches = jax.device_get(workload.init()), workload.batches()
    systems = workload.systems()

    def running(system):
        return Running(system, params, batches)

    of, baseline = "", None
    for name, make in systems.items():
        if only not in name and name != PLAIN:
            continue
        system = make()
        if of != system.baseline:
            of, baseline = system.baseline, running(systems[system.baseline]())
        yield {
            "workload": workload.name,
            "column": workload.column,
            "given": workload.given,
            "system": name,
            "baseline": of,
            **compare(baseline, running(system), seconds),
        }
