"""Measures the time to trace and compile a step, by the number of leaves."""

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from benchmarks import report
from benchmarks.systems import OPTIMIZERS, PLAIN
from optax_lossscale import (
    DynamicLossScale,
    HeadroomLossScale,
    LogMaxLossScale,
    LossScaleOptimizer,
    TolerantLossScale,
    all_finite,
)

NAME = "compile time"
SHAPE = (8,)
RULES = {
    "dynamic": DynamicLossScale(),
    "tolerant": TolerantLossScale(0.05),
    "headroom": HeadroomLossScale(),
    "logmax": LogMaxLossScale(),
}


class Program(NamedTuple):
    """A program to compile.

    Attributes:
      name: Its name in tables.
      function: The function to compile.
      arguments: Its arguments.
      baseline: The name of the program without loss scaling, if it has one.
    """

    name: str
    function: Callable[..., Any]
    arguments: tuple
    baseline: str = ""


def make_programs(leaves: int) -> list[Program]:
    """Returns steps of Optax, the same steps with loss scaling, and their parts."""
    grads = [jnp.ones(SHAPE, jnp.float32)] * leaves
    programs = []
    for optimizer in ("sgd", "adam"):
        inner = OPTIMIZERS[optimizer]()

        def plain_step(grads, params, state, inner=inner):
            updates, state = inner.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        plain = f"{optimizer}: {PLAIN}"
        arguments = (grads, grads, inner.init(grads))
        programs.append(Program(plain, plain_step, arguments, plain))
        for name, rule in RULES.items():
            scaled = LossScaleOptimizer(inner, rule)
            name = f"{optimizer}: apply_gradients, {name}"
            arguments = (grads, grads, scaled.init(grads))
            programs.append(Program(name, scaled.apply_gradients, arguments, plain))
    programs.append(Program("part: all_finite", all_finite, (grads,)))
    for name, rule in RULES.items():
        arguments = (grads, rule.init())
        programs.append(Program(f"part: update, {name}", rule.update, arguments))
    return programs


def cpu_seconds(function: Callable[[], Any]) -> tuple[float, Any]:
    """Returns the CPU time of a call, summed over threads, and its result."""
    jax.clear_caches()
    start = time.process_time()
    result = function()
    return time.process_time() - start, result


def compile_time(program: Program) -> float:
    """Returns the CPU seconds, summed over threads, to trace and compile.

    Caches are emptied first. CPU time depends little on what else the machine does.
    """
    lower = jax.jit(program.function).lower
    return cpu_seconds(lambda: lower(*program.arguments).compile())[0]


def measure(leaves: int, repeats: int) -> Iterator[dict[str, Any]]:
    """Yields a row per program: the minimum of its times, measured in turns."""
    programs = make_programs(leaves)
    rounds = [[compile_time(program) for program in programs] for _ in range(repeats)]
    names = [program.name for program in programs]
    least = dict(zip(names, map(min, zip(*rounds, strict=True)), strict=True))
    for name, _, _, baseline in programs:
        ratio = least[name] / least[baseline] if baseline else None
        row = {"program": name, "leaves": leaves, "seconds": least[name]}
        yield {**row, "ratio": ratio}


def full_report(results: dict[str, Any]) -> str:
    """Returns a Markdown page with all results."""
    by_program = {}
    for row in results["rows"]:
        by_program.setdefault(row["program"], []).append(row)
    header = [str(row["leaves"]) for row in next(iter(by_program.values()))]

    def table(title, cell):
        lines = [[name, *map(cell, rows)] for name, rows in by_program.items()]
        return report.table([title, *header], [line for line in lines if any(line[1:])])

    ratios = table(
        "time / plain, by leaves",
        lambda row: f"{row['ratio']:.2f}" if row["ratio"] else "",
    )
    milliseconds = table(
        "ms per leaf, by leaves",
        lambda row: f"{1e3 * row['seconds'] / row['leaves']:.2f}",
    )
    return (
        report.heading("Time to trace and compile", results)
        + "\nSteps and their parts, on leaves of 8 numbers. Times are CPU times,\n"
        "summed over threads. Where the time per leaf does not rise, compile time\n"
        f"is linear in the number of leaves.\n\n{ratios}\n{milliseconds}"
    )


def rows(*, quick: bool) -> Iterator[dict[str, Any]]:
    """Measures with few leaves, and with many unless `quick`."""
    for leaves in (10, 20) if quick else (100, 200, 400, 800, 1600):
        yield from measure(leaves, repeats=1 if quick else 2)
