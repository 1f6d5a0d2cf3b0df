"""Measures the time of a system relative to that of the plain step, in turns."""

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

from benchmarks import hlo
from benchmarks.systems import PLAIN, System, lower
from benchmarks.workloads import Workload


def cpu_seconds(function: Callable[[], Any]) -> tuple[float, Any]:
    """Returns the processor time of a call, summed over threads, and its result.

    Caches are emptied first. Processor time depends little on what else runs.
    """
    jax.clear_caches()
    start = time.process_time()
    result = function()
    return time.process_time() - start, result


def peak_bytes(compiled: Any) -> int:
    """Returns the memory that a program needs, as the compiler has planned it."""
    memory = compiled.memory_analysis()
    return (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
    )


class Running:
    """A compiled step, its parameters and its state.

    It is compiled twice with empty caches, or once if that takes very long, and the
    shorter time counts.
    """

    def __init__(self, system: System, params: Any, batches: list, seconds: float):
        params = jax.device_put(params)
        state = system.init(params)
        self.batches = batches
        times = []
        while len(times) < 2 and sum(times) < 5 * seconds:
            jax.clear_caches()
            start = time.perf_counter()
            self.compiled = lower(system, params, state, *batches[0]).compile()
            times.append(time.perf_counter() - start)
        self.compile_time = min(times)
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
        "step_s": statistics.median(ours) / len(plain.batches),
        "compile_ratio": scaled.compile_time / plain.compile_time,
        "temp_bytes": scaled.compiled.memory_analysis().temp_size_in_bytes,
        "peak_bytes": peak_bytes(scaled.compiled),
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
        return Running(system, params, batches, seconds)

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
