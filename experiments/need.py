"""Which trainings need loss scaling? `python -m experiments.need`.

Trains four small networks in float32, and in float16 without and with loss scaling:
three with batches of ordinary size, and a detector with growing batches. Writes
`results/need.json`.
"""

import argparse
import functools
import re
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import Progress

from benchmarks import report
from experiments.tasks import TASKS, Task, detector
from optax_lossscale import DynamicLossScale, FixedLossScale, LossScaleOptimizer

RESULTS = Path(__file__).parent / "results" / "need.json"

# The dtype and the rule of each way. A scale of 1 means no scaling.
WAYS = {
    "float32": (jnp.float32, FixedLossScale(1.0)),
    "float16, unscaled": (jnp.float16, FixedLossScale(1.0)),
    "float16, dynamic": (jnp.float16, DynamicLossScale()),
}
STEPS, SIZES = 150, (2**10, 2**12, 2**14, 2**16)


def final_loss(task: Task, way: str, seed: int) -> float:
    """Trains once, and returns the mean loss of the last tenth of the steps."""
    dtype, rule = WAYS[way]
    optimizer = LossScaleOptimizer(task.optimizer, rule)
    first, rest = jax.random.split(jax.random.key(seed))

    @functools.partial(jax.jit, donate_argnums=0)
    def step(carry, key):
        params, state = carry
        loss_fn = functools.partial(task.loss_fn, dtype=dtype)
        *carry, loss = optimizer.minimize(loss_fn, params, state, task.batch(key))
        return carry, loss

    params = task.init(first)
    carry, losses = [params, optimizer.init(params)], []
    for key in jax.random.split(rest, task.steps):
        carry, loss = step(carry, key)
        losses.append(loss)
    return float(np.mean(losses[-task.steps // 10 :]))


def compare(tasks: list[Task], seeds: int) -> dict[str, Any]:
    """Runs the whole experiment, with a progress bar if run in a terminal."""
    found = {**report.about(), "tasks": {}}
    console, hidden = Console(stderr=True), not sys.stderr.isatty()
    with Progress(console=console, transient=True, disable=hidden) as progress:
        bar = progress.add_task("", total=len(tasks) * len(WAYS) * seeds)
        for task in tasks:
            losses = found["tasks"][task.name] = {name: [] for name in WAYS}
            for way in WAYS:
                progress.update(bar, description=f"{task.name}: {way}")
                for seed in range(seeds):
                    losses[way].append(final_loss(task, way, seed))
                    progress.advance(bar)
    return found


def table(found: dict[str, Any]) -> str:
    """Returns a Markdown table of the mean losses over the seeds."""
    cells = [
        [
            re.sub(r"\^(\d+)", r"<sup>\1</sup>", name),
            *(f"{np.mean(losses[way]):#.3g}" for way in WAYS),
        ]
        for name, losses in found["tasks"].items()
    ]
    return report.table(["loss at the end", *WAYS], cells)


def main() -> None:
    """Parses the arguments, runs the experiment and writes its results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="10 steps, one seed")
    parser.add_argument(
        "--out", type=Path, default=RESULTS, help="the JSON file to write"
    )
    options = parser.parse_args()
    steps, seeds = (10, 1) if options.quick else (STEPS, 3)
    tasks = [make(2 * steps) for make in TASKS]
    tasks += [detector(steps, size) for size in SIZES]
    found = compare(tasks, seeds)
    print(table(found))
    report.save(options.out, found)


if __name__ == "__main__":
    main()
