"""Measures what `trace_numerics` costs, next to a training step."""

import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import optax

from benchmarks import report
from benchmarks.measure import cpu_seconds, peak_bytes
from benchmarks.workloads import Workload, transformer
from optax_lossscale import LossScaleOptimizer
from optax_lossscale.diagnostics._trace.program import make_call, make_program

NAME = "trace_numerics"
SCALE = 2.0**10


def measure(workload: Workload, rounds: int) -> dict[str, Any]:
    """Returns the ratios of a trace to a step: time, memory, and time to compile."""
    optimizer = LossScaleOptimizer(optax.adam(1e-3), "dynamic")
    params, batch = workload.init(), workload.batches()[0]
    state = optimizer.init(params)

    def step(params, state, batch):
        return optimizer.minimize(workload.loss_fn, params, state, *batch)

    def compile_step():
        return jax.jit(step).lower(params, state, batch).compile()

    def compile_trace():
        call = make_call(workload.loss_fn, params, batch, {}, False)
        return make_program(call, "float16")

    pairs = [(cpu_seconds(compile_step), cpu_seconds(compile_trace)) for _ in range(2)]
    compiling = [min(pair[i][0] for pair in pairs) for i in range(2)]
    (_, plain), (_, traced) = pairs[-1]

    def seconds(function):
        start = time.perf_counter()
        jax.block_until_ready(function())
        return time.perf_counter() - start

    ratios = []
    for _ in range(rounds + 1):
        base = seconds(lambda: plain(params, state, batch))
        ratios.append(seconds(lambda: traced.run(SCALE)[0].maxima) / base)
    return {
        "workload": workload.name,
        "operations": len(traced.sites),
        "time": float(np.median(ratios[1:])),
        "memory": peak_bytes(traced.compiled) / peak_bytes(plain),
        "compile": compiling[1] / compiling[0],
        "compile_s": compiling[1],
    }


def full_report(results: dict[str, Any]) -> str:
    """Returns a Markdown page with all results."""
    names = ("time", "memory", "compile")
    cells = [
        [row["workload"], str(row["operations"]), *(f"{row[x]:.1f}" for x in names)]
        for row in results["rows"]
    ]
    header = ["network", "operations", *(f"{name} / step" for name in names)]
    return (
        report.heading("What trace_numerics costs", results)
        + "\nOne run of the program of `trace_numerics`, next to one training step\n"
        "with Adam and a dynamic loss scale. Times to compile are CPU times, summed\n"
        "over threads. A trace runs its program two to four times, to find the\n"
        f"largest loss scale.\n\n{report.table(header, cells)}"
    )


def rows(*, quick: bool) -> Iterator[dict[str, Any]]:
    """Measures two networks, or a small one if `quick`."""
    sizes = [(1, 32, 32, 2)] if quick else [(2, 128, 128, 16), (4, 128, 128, 16)]
    for size in sizes:
        yield measure(transformer(*size), 2 if quick else 15)
