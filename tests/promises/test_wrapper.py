"""`LossScaleOptimizer` takes, the very steps of a wrapper in 60 lines of Optax."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_same_bits

from optax_lossscale import DynamicLossScale, LossScaleOptimizer, autocast

pytestmark = pytest.mark.usefixtures("standard_dtype_promotion")


class DynamicLossScaleState(NamedTuple):
    """State of `dynamic_loss_scale`."""

    loss_scale: jax.Array  # f32[], multiplies the loss of the next step
    good_steps: jax.Array  # i32[], finite steps since the scale changed
    total_skipped: jax.Array  # i32[]
    inner_state: optax.OptState


def dynamic_loss_scale(
    inner: optax.GradientTransformation, growth_interval: int = 2000
) -> optax.GradientTransformationExtraArgs:
    """Unscales gradients, skips steps with inf or nan, and adapts the loss scale.

    Differentiate the loss times `optax.tree.get(state, "loss_scale")`. In a step that
    is skipped the updates are zero, and the inner state stays as it was.

    Args:
      inner: The transformation to wrap. It sees unscaled gradients.
      growth_interval: Finite steps in a row before the scale is doubled.

    Returns:
      A `GradientTransformationExtraArgs` that takes gradients of the scaled loss.

    References:
      `Mixed Precision Training <https://arxiv.org/abs/1710.03740>`_, 2018
    """
    inner = optax.with_extra_args_support(inner)

    def init_fn(params):
        scale, zero = jnp.float32(2.0**15), jnp.zeros([], jnp.int32)
        return DynamicLossScaleState(scale, zero, zero, inner.init(params))

    def update_fn(updates, state, params=None, **extra_args):
        scale = state.loss_scale
        updates = jax.tree.map(lambda g: g.astype(jnp.float32) / scale, updates)
        flags = [jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(updates)]
        finite = jnp.all(jnp.array(flags))

        def do_update():
            return inner.update(updates, state.inner_state, params, **extra_args)

        def skip_update():
            return optax.tree.zeros_like(updates), state.inner_state

        updates, inner_state = jax.lax.cond(finite, do_update, skip_update)
        good_steps = jnp.where(finite, state.good_steps + 1, 0)
        grow = good_steps >= growth_interval
        scale = jnp.where(grow, 2 * scale, jnp.where(finite, scale, scale / 2))
        skipped = optax.safe_increment(state.total_skipped)
        return updates, DynamicLossScaleState(
            loss_scale=jnp.clip(scale, 1.0, 2.0**126),
            good_steps=jnp.where(grow, 0, good_steps),
            total_skipped=jnp.where(finite, state.total_skipped, skipped),
            inner_state=inner_state,
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def test_each_step_of_a_training_is_that_of_the_wrapper():
    x = jax.random.normal(jax.random.key(0), (256, 16))
    y = jnp.sin(x @ jnp.linspace(-1, 1, 16))
    keys = jax.random.split(jax.random.key(1))
    start = {
        "first": jax.random.normal(keys[0], (16, 64)) / 4,
        "last": jax.random.normal(keys[1], (64,)) / 8,
    }

    @autocast
    def loss_fn(params, x, y):
        return jnp.mean((jnp.tanh(x @ params["first"]) @ params["last"] - y) ** 2)

    adam = optax.adam(2.0**-7)  # exact products: fused or not, they round alike
    transform = dynamic_loss_scale(adam, growth_interval=3)
    optimizer = LossScaleOptimizer(adam, DynamicLossScale(growth_interval=3))

    def step_of_optax(params, state):
        def scaled_loss_fn(params):
            return loss_fn(params, x, y) * optax.tree.get(state, "loss_scale")

        grads = jax.grad(scaled_loss_fn)(params)
        updates, state = transform.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def step_of_ours(params, state):
        return optimizer.minimize(loss_fn, params, state, x, y)[:2]

    def train(step, state):
        carry = lambda carry, _: [step(*carry)] * 2  # noqa: E731
        return jax.jit(lambda: jax.lax.scan(carry, (start, state), length=200)[1])()

    params, theirs = train(step_of_optax, transform.init(start))
    found, ours = train(step_of_ours, optimizer.init(start))
    expected = params, theirs.inner_state, theirs.loss_scale, theirs.good_steps
    rule = ours.loss_scale_state
    results = found, ours.inner_state, rule.loss_scale, rule.good_steps
    assert_same_bits(results, expected)
    np.testing.assert_array_equal(ours.skipped_steps, theirs.total_skipped)
    # One step in five overflows, and it learns.
    assert 30 < ours.skipped_steps[-1] < 50
    last, loss = jax.tree.map(lambda x: np.asarray(x)[-1], found), jax.jit(loss_fn)
    assert loss(last, x, y) < 0.01 * loss(start, x, y)
