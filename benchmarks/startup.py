"""Measures the time to import the packages and to take the first step."""

import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks import report

NAME = "startup"
SCRIPT = """
import time

start = time.perf_counter()
import jax
import jax.numpy as jnp
import optax
{imports}
imported = time.perf_counter() - start
x = jnp.ones((256, 16))
y = jnp.ones(256)
params = {{"w": jnp.zeros(16), "b": jnp.zeros(())}}


def loss_fn(params, x, y):
    params, x = optax.tree.cast((params, x), jnp.float16)
    predictions = x @ params["w"] + params["b"]
    return jnp.mean((predictions.astype(jnp.float32) - y) ** 2)


optimizer = {optimizer}
opt_state = optimizer.init(params)


@jax.jit
def train_step(params, opt_state, x, y):
    {step}


jax.block_until_ready(train_step(params, opt_state, x, y))
print(imported, time.perf_counter() - start)
"""
PROGRAMS = {
    "optax": SCRIPT.format(
        imports="",
        optimizer="optax.adam(5e-2)",
        step="""\
loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss""",
    ),
    "optax_lossscale": SCRIPT.format(
        imports="from optax_lossscale import LossScaleOptimizer",
        optimizer="LossScaleOptimizer(optax.adam(5e-2))",
        step="return optimizer.minimize(loss_fn, params, opt_state, x, y)",
    ),
}


def measure(repeats: int) -> list[dict[str, Any]]:
    """Runs the programs in turns, each in new processes; returns a row for each."""
    times: dict[str, list[list[float]]] = {name: [] for name in PROGRAMS}
    folder = str(Path(__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": folder}
    for _ in range(repeats):
        for name, code in PROGRAMS.items():
            command = [sys.executable, "-c", code]
            result = subprocess.run(
                command, env=environment, capture_output=True, text=True, check=True
            )
            times[name].append([float(x) for x in result.stdout.split()])
    rows = []
    for name, found in times.items():
        imported, first_step = map(statistics.median, zip(*found, strict=True))
        rows.append({"program": name, "import_s": imported, "first_step_s": first_step})
    return rows


def full_report(results: dict[str, Any]) -> str:
    """Returns a Markdown page with all results."""
    rows = [
        [row["program"], f"{row['import_s']:.2f}", f"{row['first_step_s']:.2f}"]
        for row in results["rows"]
    ]
    header = ["program", "seconds to import", "seconds to the end of the first step"]
    return (
        report.heading("Startup", results)
        + "\nA script like that of the README, with and without loss scaling, each in\n"
        + f"new processes, in turns. Medians.\n\n{report.table(header, rows)}"
    )


def rows(*, quick: bool) -> list[dict[str, Any]]:
    """Measures; runs each program only once if `quick`."""
    return measure(1 if quick else 9)
