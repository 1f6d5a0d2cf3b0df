"""Measures how long steps take to trace and compile, by the number of leaves."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
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
    """What is compiled.

    Attributes:
      name: What it is called in tables.
      function: What is compiled.
      arguments: What it is called with.
      baseline: The name of the program without loss scaling, if it has one.
    """

    name: str
    function: Callable[..., Any]
    arguments: tuple
    baseline: str = ""


def make_programs(leaves: int) -> list[Program]:
    """Returns Optax's steps, the same with loss scaling, and the parts of these."""
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


def compile_time(program: Program) -> float:
    """Returns the seconds that tracing and compiling take, with empty caches.

    They are of the processor, all threads together, and depend little on what else the
    machine does.
    """
    jax.clear_caches()
    start = time.process_time()
    jax.jit(program.function).lower(*program.arguments).compile()
    return time.process_time() - start


def measure(leaves: int, repeats: int) -> Iterator[dict[str, Any]]:
    """Yields a row for each program: its least time of some, measured in turns."""
    programs = make_programs(leaves)
    rounds = [[compile_time(program) for program in programs] for _ in range(repeats)]
    names = [program.name for program in programs]
    least = dict(zip(names, map(min, zip(*rounds, strict=True)), strict=True))
    for name, _, _, baseline in programs:
        ratio = least[name] / least[baseline] if baseline else None
        row = {"program": name, "leaves": leaves, "seconds": least[name]}
        yield {**row, "ratio": ratio}


def full_report(results: dict[str, Any]) -> str:
    """Returns all that was measured, as a page."""
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
        "ms for each leaf, by leaves",
        lambda row: f"{1e3 * row['seconds'] / row['leaves']:.2f}",
    )
    return (
        report.heading("Time to trace and compile", results)
        + "\nSteps, and parts of them, on leaves of 8 numbers. It is the time of the "
        "processor, all\nthreads together. Where the time for each leaf does not rise, "
        f"compiling is linear.\n\n{ratios}\n{milliseconds}"
    )


def run(path: Path, *, quick: bool) -> str:
    """Measures, writes JSON and a page with the tables, and returns the page.

    Args:
      path: Where to, without a suffix.
      quick: Whether to measure a small part.
    """
    results = {"machine": report.machine(), "versions": report.versions(), "rows": []}
    for leaves in (10, 20) if quick else (100, 200, 400, 800, 1600):
        results["rows"] += measure(leaves, repeats=1 if quick else 2)
        report.save(path.with_suffix(".json"), results)
    page = full_report(results)
    path.with_suffix(".md").write_text(page)
    return page
