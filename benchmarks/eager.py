"""Measures a step that nobody compiles: `python -m benchmarks.eager`.

Each way to train runs in turns with plain Optax. It takes a minute, and writes
`results/eager.json`.
"""

import statistics
import time
from typing import Any

import jax
from rich.progress import track

from benchmarks import report
from benchmarks.systems import OPTIMIZERS, System, in_two, minimize, plain
from benchmarks.workloads import mlp

RESULTS = report.RESULTS / "eager.json"
TURNS, STEPS = 9, 10


def seconds_of(system: System, params: Any, batch: Any) -> float:
    """Returns the processor time of some steps, the first of which compile nothing."""
    carry = params, system.init(params)
    start = time.process_time()
    for _ in range(STEPS):
        *carry, _ = system.step(*carry, *batch)
    jax.block_until_ready(carry)
    return time.process_time() - start


def row(layers: int, is_compiled: bool) -> dict[str, Any]:
    """Returns the medians of the ratios to plain Optax."""
    workload = mlp(layers=layers, width=64)
    inner, params = OPTIMIZERS["adam"], workload.init()
    batch = workload.batches()[0]
    loss_fn = jax.jit(workload.loss_fn) if is_compiled else workload.loss_fn
    ways = {
        "minimize": minimize(inner, loss_fn),
        "value_and_grad, update": in_two(inner, loss_fn),
    }
    unscaled = plain(inner, loss_fn)
    for system in (unscaled, *ways.values()):
        seconds_of(system, params, batch)
    ratios: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(TURNS):
        base = seconds_of(unscaled, params, batch)
        for name, system in ways.items():
            ratios[name].append(seconds_of(system, params, batch) / base)
    about = {"leaves": layers, "loss": "compiled" if is_compiled else "eager"}
    return about | {name: round(statistics.median(x), 2) for name, x in ratios.items()}


def main() -> None:
    """Runs the benchmark."""
    report.parser("benchmarks.eager", __doc__).parse_args()
    cases = [(n, is_compiled) for n in (2, 10) for is_compiled in (False, True)]
    rows = [row(*case) for case in track(cases, "eager steps")]
    report.save(RESULTS, {**report.about(), "rows": rows})
    print(f"Wrote {RESULTS}")


if __name__ == "__main__":
    main()
