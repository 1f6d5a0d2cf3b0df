"""Compares the rules for the loss scale: `python -m benchmarks.rules`.

Trains three small networks in float16 with each rule. At every tenth step it measures
how far the scale is from the oracle: the largest power of two with which that step does
not overflow, found by computing the gradients with other scales. It then replays the
gradients of whole runs with other arguments of the headroom rule. Writes
`results/rules.json`.
"""

import functools
import json
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

# Arguments of the headroom rule, varied one at a time around their defaults.
SWEEP = {
    "min_margin": [0.0, 0.5, 1.0, 2.0],
    "hysteresis": [0.0, 0.5, 1.0, 2.0],
    "release_steps": [3, 10, 30, 100, 300],
    "growth_interval": [50, 200, 2000, 5000],
}
# The number of seeds of the sweep, which needs the oracle of every step.
SWEEP_SEEDS = 2
# The rules are also replayed with an oracle that is lower by so many bits, as if the
# gradients of activations, which the rules do not see, were so much larger.
UNSEEN = 4
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
      every: The number of steps between measurements of `oracle`, `underflow` and
        `largest`, which need several gradients.
      retries: That of the optimizer.

    Returns:
      For every step, `loss`, `scale` (its log2) and `skipped`. For every measured step,
      `oracle`, `underflow` and `largest` (log2 of the largest gradient).
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
        largest = jnp.max(jnp.array([abs(x).max() for x in jax.tree.leaves(scaled)]))
        measured = {
            "oracle": find_oracle(task, params, batch),
            "underflow": underflowed(exact, scaled),
            "largest": jnp.log2(largest / scale),
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


def summarize(run: dict[str, np.ndarray], every: int) -> dict[str, list[float]]:
    """Returns the numbers by which rules are compared, one per seed."""
    above = run["oracle"] - run["scale"][:, ::every]
    tail = run["loss"][:, -len(run["loss"][0]) // 10 :]
    return {
        "skipped": run["skipped"].sum(1).tolist(),
        "underflow": run["underflow"].mean(1).tolist(),
        "distance": abs(above).mean(1).tolist(),
        "final_loss": np.nanmean(tail, 1).tolist(),
        "changes": (np.diff(run["scale"]) != 0).sum(1).tolist(),
    }


@functools.partial(jax.jit, static_argnums=0)
@functools.partial(jax.vmap, in_axes=(None, 0, 0))
def replay(rule: LossScale, largest: jax.Array, oracle: jax.Array) -> Any:
    """Runs a rule on recorded gradients, which overflow at scales above the oracle."""

    def step(state, recorded):
        largest, oracle = recorded
        scale = jnp.log2(rule(state))
        grads = jnp.where(scale > oracle, jnp.inf, jnp.exp2(largest))
        state, applied = rule.update(grads, state)
        return state, (scale, ~applied)

    return jax.lax.scan(step, rule.init(), (largest, oracle))[1]


def summarize_replay(rule: LossScale, run: dict[str, np.ndarray]) -> dict[str, float]:
    """Returns the numbers by which replays are compared, as means over the seeds."""
    scale, skipped = map(np.asarray, replay(rule, run["largest"], run["oracle"]))
    return {
        "skipped": float(skipped.sum(1).mean()),
        "distance": float(abs(run["oracle"] - scale).mean()),
        "changes": float((np.diff(scale) != 0).sum(1).mean()),
    }


def compare(task: Task, seeds: int, every: int) -> dict[str, Any]:
    """Trains a task with every rule, and replays its gradients."""
    found: dict[str, Any] = {"rules": {}, "curves": {}, "sweep": {}}
    keys = jax.vmap(jax.random.key)(jnp.arange(seeds))
    for name, rule in RULES.items():
        run = jax.tree.map(np.asarray, train(task, rule, keys, every))
        found["rules"][name] = summarize(run, every)
        found["curves"][name] = {
            "scale": run["scale"][0, ::every].tolist(),
            "oracle": run["oracle"][0].tolist(),
        }
    run = train(task, RULES["dynamic"], keys[:SWEEP_SEEDS], 1)
    run = {name: np.array(values) for name, values in run.items()}
    # The largest gradient of a skipped step is unknown: take the previous one.
    for row in run["largest"]:
        for i in np.flatnonzero(~np.isfinite(row)):
            row[i] = row[i - 1] if i else 0.0
    found["range"] = (run["largest"].max(1) - run["largest"].min(1)).tolist()
    for name, values in SWEEP.items():
        rules = {str(value): HeadroomLossScale(**{name: value}) for value in values}
        found["sweep"][name] = {k: summarize_replay(r, run) for k, r in rules.items()}
    run["oracle"] = run["oracle"] - UNSEEN
    found["unseen"] = {k: summarize_replay(rule, run) for k, rule in RULES.items()}
    return found


def main() -> None:
    """Runs the whole experiment, and writes its results."""
    report.parser("benchmarks.rules", __doc__).parse_args()
    steps, seeds = 1000, 5
    tasks = [make(steps) for make in TASKS]
    found = {task.name: compare(task, seeds, 10) for task in track(tasks, "training")}
    found = {"steps": steps, "seeds": seeds, "tasks": found}
    RESULTS.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
