"""Which trainings need loss scaling? `python -m benchmarks.need`.

Trains four small networks in float32, and in float16 without and with loss scaling:
three with batches of ordinary size, and a detector with growing batches. Writes
`results/need.json`.
"""

import functools
import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.progress import track

from benchmarks import report
from benchmarks.tasks import TASKS, Task, detector
from optax_lossscale import DynamicLossScale, FixedLossScale, LossScaleOptimizer

RESULTS = report.RESULTS / "need.json"

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


def table(results: dict[str, Any]) -> str:
    """Returns a Markdown table of the mean losses over the seeds."""
    cells = []
    for name, losses in results["tasks"].items():
        title = re.sub(r"\^(\d+)", r"<sup>\1</sup>", name)
        cells.append([title, *(f"{np.mean(losses[way]):#.3g}" for way in WAYS)])
    return report.table(["loss at the end", *WAYS], cells)


def main() -> None:
    """Runs the whole experiment, and writes its results."""
    report.parser("benchmarks.need", __doc__).parse_args()
    tasks = [make(2 * STEPS) for make in TASKS]
    tasks += [detector(STEPS, size) for size in SIZES]
    losses = {task.name: {way: [] for way in WAYS} for task in tasks}
    cases = list(itertools.product(tasks, WAYS, range(3)))
    for task, way, seed in track(cases, "training"):
        losses[task.name][way].append(final_loss(task, way, seed))
    results = {**report.about(), "tasks": losses}
    print(table(results))
    report.save(RESULTS, results)


if __name__ == "__main__":
    main()
