"""Compares the rules for the loss scale: `python -m benchmarks.rules`.

Trains three small networks in float16 with each rule. At every tenth step it measures
how far the scale is from the oracle: the largest power of two with which that step does
not overflow, found by computing the gradients with other scales. Writes
`results/rules.json`. A word chooses the tasks with it: `python -m benchmarks.rules
perceptron`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.progress import track

from benchmarks import report
from benchmarks.tasks import TASKS, Task
from optax_lossscale import (
    DynamicLossScale,
    HeadroomLossScale,
    LossScale,
    LossScaleOptimizer,
    all_finite,
)

RESULTS = report.RESULTS / "rules.json"

RULES: dict[str, LossScale] = {
    "dynamic": DynamicLossScale(),
    "dynamic, 200": DynamicLossScale(growth_interval=200),
    "headroom": HeadroomLossScale(),
}

STEPS, SEEDS, EVERY = 1000, 5, 10
NUMBERS = "skipped", "underflow", "distance", "final_loss", "changes"
# No scale is above 2**HIGHEST.
HIGHEST = 64


def gradients(task: Task, params: Any, batch: Any, scale: jax.Array, dtype: Any) -> Any:
    """Returns the scaled gradients of a batch."""
    return jax.grad(lambda p: task.loss_fn(p, batch, dtype) * scale)(params)


def find_oracle(task: Task, params: Any, batch: Any) -> jax.Array:
    """Returns log2 of the largest scale that does not overflow, found by bisection."""

    def halve(_, bounds):
        low, high = bounds
        middle = (low + high) // 2
        scale = jnp.exp2(middle.astype(jnp.float32))
        fits = all_finite(gradients(task, params, batch, scale, jnp.float16))
        return jnp.where(fits, middle, low), jnp.where(fits, high, middle)

    bounds = jnp.int32(0), jnp.int32(HIGHEST)
    return jax.lax.fori_loop(0, HIGHEST.bit_length() - 1, halve, bounds)[0]


def underflowed(exact: Any, scaled: Any) -> jax.Array:
    """Returns the share of nonzero gradients that are zero in others."""
    lost = jax.tree.map(lambda x, y: (x != 0) & (y == 0), exact, scaled)
    total = optax.tree.sum(jax.tree.map(lambda x: x != 0, exact))
    return optax.tree.sum(lost) / jnp.maximum(total, 1)


@functools.partial(jax.jit, static_argnums=(0, 1, 3, 4))
def train(
    task: Task, rule: LossScale, keys: jax.Array, every: int, retries: int = 0
) -> dict[str, Any]:
    """Trains once per key.

    Args:
      task: The task.
      rule: The rule for the loss scale.
      keys: The random keys of parameters and batches, which train in parallel.
      every: The number of steps between measurements of `oracle` and `underflow`, which
        need several gradients.
      retries: That of the optimizer.

    Returns:
      For every step, `loss`, `scale` (its log2) and `skipped`. For every measured step,
      `oracle` and `underflow`.
    """
    optimizer = LossScaleOptimizer(task.optimizer, rule, retries=retries)

    def step(carry, key):
        loss_fn = functools.partial(task.loss_fn, dtype=jnp.float16)
        *new, loss = optimizer.minimize(loss_fn, *carry, task.batch(key))
        before, after = (optimizer.current_loss_scale(x) for _, x in (carry, new))
        # Retries lower the scale of a step; a growth raises that of the next one.
        scale = jnp.log2(jnp.minimum(before, after) if retries else before)
        skipped = ~new[1].last_step_applied
        return tuple(new), {"loss": loss, "scale": scale, "skipped": skipped}

    def chunk(carry, keys):
        params, batch = carry[0], task.batch(keys[0])
        carry, steps = jax.lax.scan(step, carry, keys)
        scale = jnp.exp2(steps["scale"][0])
        exact = gradients(task, params, batch, jnp.float32(1), jnp.float32)
        scaled = gradients(task, params, batch, scale, jnp.float16)
        measured = {
            "oracle": find_oracle(task, params, batch),
            "underflow": underflowed(exact, scaled),
        }
        return carry, (measured, steps)

    def run(key):
        first, rest = jax.random.split(key)
        params = task.init(first)
        keys = jax.random.split(rest, (task.steps // every, every))
        start = params, optimizer.init(params)
        _, (measured, steps) = jax.lax.scan(chunk, start, keys)
        return measured | {name: x.reshape(-1) for name, x in steps.items()}

    return jax.vmap(run)(keys)


def summarize(run: dict[str, np.ndarray]) -> dict[str, list[float]]:
    """Returns the numbers by which rules are compared, one per seed."""
    above = run["oracle"] - run["scale"][:, ::EVERY]
    tail = run["loss"][:, -len(run["loss"][0]) // 10 :]
    numbers = (
        run["skipped"].sum(1),
        run["underflow"].mean(1),
        abs(above).mean(1),
        np.nanmean(tail, 1),
        (np.diff(run["scale"]) != 0).sum(1),
    )
    return {k: x.tolist() for k, x in zip(NUMBERS, numbers, strict=True)}


def compare(task: Task) -> dict[str, dict[str, list[float]]]:
    """Trains a task with every rule."""
    keys = jax.vmap(jax.random.key)(jnp.arange(SEEDS))
    runs = {name: train(task, rule, keys, EVERY) for name, rule in RULES.items()}
    return {name: summarize(jax.device_get(run)) for name, run in runs.items()}


def table(results: dict[str, Any]) -> str:
    """Returns a Markdown table: means over the seeds, for each task and rule."""
    cells = [
        [task, rule, *(f"{np.mean(values):.3g}" for values in row.values())]
        for task, rows in results["tasks"].items()
        for rule, row in rows.items()
    ]
    return report.table(["task", "rule", *NUMBERS], cells)


def main() -> None:
    """Trains, and writes the results."""
    parser = report.parser("benchmarks.rules", __doc__)
    parser.add_argument("word", nargs="?", default="", help="of the tasks to train")
    word = parser.parse_args().word
    tasks = [task for make in TASKS if word in (task := make(STEPS)).name]
    results = report.load(RESULTS) | {"steps": STEPS, "seeds": SEEDS}
    for task in track(tasks, "training"):
        results["tasks"][task.name] = compare(task)
    report.save(RESULTS, results)
    print(table(results))


if __name__ == "__main__":
    main()
