"""What guards against bad steps do. `python -m benchmarks.guards`.

Trains a network in bfloat16 with bad steps, under the guards of MaxText and Levanter,
`optax.apply_if_finite`, gradient clipping and this package, and compares each with a
run that never had these steps. Writes `results/guards.json`. A word chooses the guards
with it: `python -m benchmarks.guards ours`. The two peers are installed without their
dependencies, on Python 3.12 or later:

pip install --no-deps maxtext==0.2.5 marin-levanter==0.2.227.dev40316220070
"""

import ast
import dataclasses
from collections.abc import Callable
from importlib import resources
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree
from rich.progress import track

from benchmarks import report
from benchmarks.tasks import perceptron
from optax_lossscale import FixedLossScale, LossScaleOptimizer

RESULTS = report.RESULTS / "guards.json"
STEPS, SEEDS = 400, 5
CLIP = optax.clip_by_global_norm(1.0)  # as in most trainers


def peer(package: str, file: str, *names: str, **scope: Any) -> dict[str, Any]:
    """Runs some definitions of an installed file, without its dozens of imports."""
    try:
        tree = ast.parse((resources.files(package) / file).read_text())
    except ModuleNotFoundError as error:
        raise SystemExit(f"{error}.\n\n{__doc__}") from None
    code = [ast.unparse(x) for x in tree.body if getattr(x, "name", None) in names]
    scope |= {"jax": jax, "jnp": jnp, "optax": optax}
    exec("\n".join(["from __future__ import annotations", *code]), scope)
    return scope


def maxtext(inner: Any) -> Any:
    """Returns the guard of MaxText, with the numbers of its configuration."""
    names = "skip_step_on_spikes", "_compute_rolling_stats"
    return peer("maxtext", "optimizers/optimizers.py", *names)[names[0]](
        inner, 128, 6.0
    )


def levanter(inner: Any) -> Any:
    """Returns the guard of Levanter, with the numbers that it has by default."""
    names = "SkipStepConfig", "SkipStepState", "tree_flatten_one_level_with_keys"
    scope = vars(jax.tree_util) | vars(dataclasses) | {"levanter": mock.MagicMock()}
    scope["is_jax_array_like"] = lambda x: isinstance(x, jax.Array)
    for file in ("utils/tree_utils.py", "optim/skipstep.py"):
        scope = peer("levanter", file, *names, **scope)
    return scope["SkipStepConfig"]().wrap(inner)


def skipping(inner: Any) -> LossScaleOptimizer:
    """Returns our optimizer, which skips what is not finite."""
    return LossScaleOptimizer(inner, FixedLossScale(1.0, skip_nonfinite=True))


class Guard(NamedTuple):
    """Statistics of the logarithms of the loss and of the gradient norm.

    Attributes:
      mean: Their means over the last applied steps.
      variance: Their variances.
      steps: How many steps were applied.
      vetoes: How many were vetoed in a row.
    """

    mean: jax.Array
    variance: jax.Array
    steps: jax.Array
    vetoes: jax.Array


def is_outlier(guard: Guard, seen: jax.Array) -> jax.Array:
    """Tells whether a logarithm is more than 6 deviations above its mean."""
    limit = guard.mean + 6 * jnp.sqrt(jnp.maximum(guard.variance, 0.01))
    is_ready = (guard.steps >= 20) & (guard.vetoes < 20)
    return jnp.any(seen > jnp.where(is_ready, limit, 88.0))  # float32 ends at exp(88)


def learn(guard: Guard, seen: jax.Array, is_applied: jax.Array) -> Guard:
    """Returns the statistics with those of an applied step."""
    steps = 1 + jnp.where(guard.vetoes < 20, guard.steps, 0.0)
    rate, off = 1 / jnp.minimum(steps, 128), seen - guard.mean
    variance = (1 - rate) * (guard.variance + rate * off**2)
    new = Guard(guard.mean + rate * off, variance, steps, jnp.zeros(2))
    is_finite = jnp.isfinite(seen)
    vetoes = guard.vetoes + (is_outlier(guard, seen) & is_finite)
    old = guard._replace(vetoes=jnp.where(is_applied, 0.0, vetoes))
    use = is_applied & is_finite
    return jax.tree.map(lambda new, old: jnp.where(use, new, old), new, old)


def guarded(inner: Any) -> Any:
    """Returns our optimizer with a guard that vetoes outliers."""
    optimizer = skipping(inner)

    def init(params):
        return optimizer.init(params), Guard(*jnp.zeros((4, 2)))

    def update(grads, state, params, *, loss, grad_norm):
        state, guard = state
        seen = jnp.log(jnp.stack([loss, grad_norm]))
        veto = is_outlier(guard, seen)
        updates, state = optimizer.update(grads, state, params, skip_if=veto)
        return updates, (state, learn(guard, seen, state.last_step_applied))

    return optax.GradientTransformationExtraArgs(init, update)


WAYS: dict[str, Callable[[Any], Any]] = {
    "no guard": lambda inner: inner,
    "ours, skip": skipping,
    "ours, skip and clipping": lambda inner: skipping(optax.chain(CLIP, inner)),
    "ours, skip and guard": guarded,
    "clipping": lambda inner: optax.chain(CLIP, inner),
    "`apply_if_finite`": lambda inner: optax.apply_if_finite(inner, 5),
    "MaxText": maxtext,
    "Levanter": levanter,
}
# Factors of the loss and of the gradients in bad steps, and in steps that all are good.
BAD = {
    "nan in step 5": {5: np.nan},
    "nan in step 200": {200: np.nan},
    "inf gradients, finite loss": {200: np.inf},
    "one spike of 100 times": {200: 100},
    "a second of 30, ten steps later": {200: 100, 210: 30},
}
GOOD = {
    "growth by 1000, all steps good": np.geomspace(1, 1000, STEPS),
    "100 times from step 200 on, all good": np.where(np.arange(STEPS) < 200, 1, 100),
}


def make_training(wrap: Callable[[Any], Any]) -> Callable[..., Any]:
    """Returns a compiled training under a guard.

    It takes a seed, the factors of all steps, and which steps to leave out. It returns
    the parameters in the end, which steps changed them, and the loss of each step.
    """
    task = perceptron(STEPS)
    optimizer = wrap(optax.with_extra_args_support(optax.adam(3e-4)))

    def step(carry, inputs):
        key, factor, leave_out = inputs
        params, state = carry
        grad_fn = jax.value_and_grad(task.loss_fn)
        loss, grads = grad_fn(params, task.batch(key), jnp.bfloat16)
        grads = jax.tree.map(lambda g: jnp.where(g == 0, g, factor * g), grads)
        shown = jnp.where(jnp.isinf(factor), loss, factor * loss)
        seen = {"loss": shown, "grad_norm": optax.tree.norm(grads)}
        updates, state = optimizer.update(grads, state, params, **seen)
        new = optax.apply_updates(params, updates), state
        is_changed = jnp.any(ravel_pytree(new[0])[0] != ravel_pytree(params)[0])
        new = jax.tree.map(lambda old, new: jnp.where(leave_out, old, new), carry, new)
        return new, (is_changed, loss)

    @jax.jit
    def train(seed, factors, leave_out):
        first, rest = jax.random.split(jax.random.key(seed))
        params = task.init(first)
        start = params, optimizer.init(params)
        inputs = jax.random.split(rest, STEPS), factors, leave_out
        (params, _), steps = jax.lax.scan(step, start, inputs)
        return ravel_pytree(params)[0], *steps

    return train


def judge(train: Callable[..., Any], name: str, seed: int) -> dict[str, Any]:
    """Compares a training with one of the same program without the bad steps."""
    factors = np.array(GOOD.get(name, np.ones(STEPS)), np.float32)
    bad = np.zeros(STEPS, bool)
    for i, factor in BAD.get(name, {}).items():
        factors[i], bad[i] = factor, True
    params, changed, loss = map(np.asarray, train(seed, factors, np.zeros_like(bad)))
    truth, _, true_loss = map(np.asarray, train(seed, factors, bad))
    ratio = loss[220:].mean() / true_loss[220:].mean()
    return {
        "applied": int(changed[bad].sum()),
        "lost": int((~changed[~bad]).sum()),
        "same bits": bool((params == truth).all()),
        "loss": None if np.isnan(ratio) else round(float(ratio), 3),
    }


def cell(seeds: list[dict[str, Any]]) -> str:
    """Says what became of a training, in the marks that the page explains."""
    applied, lost, same, loss = zip(*(seed.values() for seed in seeds), strict=True)
    if None in loss:
        return "✗"
    said = [f"+{span(applied)}"] * any(applied) + [f"\u2212{span(lost)}"] * any(lost)
    return " ".join(said + [f"\u00d7{span(loss)}"] * (not all(same))) or "✓"


def span(values: tuple[float, ...]) -> str:
    """Returns the range of some numbers."""
    return " to ".join(dict.fromkeys(f"{x:.3g}" for x in (min(values), max(values))))


def table(results: dict[str, Any]) -> str:
    """Returns a Markdown table: a row for each case, a column for each guard."""
    cases = results["cases"].items()
    rows = [[name, *(cell(ways[way]) for way in WAYS)] for name, ways in cases]
    return report.table(["what happens", *WAYS], rows)


def main() -> None:
    """Trains, and writes the results."""
    parser = report.parser("benchmarks.guards", __doc__)
    parser.add_argument("word", nargs="?", default="", help="of the guards to train")
    word = parser.parse_args().word
    chosen = {way: wrap for way, wrap in WAYS.items() if word in way}
    results = report.load(RESULTS) | report.about()
    for way, wrap in track(chosen.items(), "training"):
        train = make_training(wrap)
        for name, row in results["cases"].items():
            row[way] = [judge(train, name, seed) for seed in range(SEEDS)]
    report.save(RESULTS, results)
    print(table(results))


if __name__ == "__main__":
    main()
