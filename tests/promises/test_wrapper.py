"""`LossScaleOptimizer` takes, the very steps of a wrapper in 60 lines of Optax."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import INF, NAN, assert_same_bits

from optax_lossscale import DynamicLossScale, LossScaleOptimizer, autocast


@pytest.fixture(autouse=True)
def promotion():
    """Lets the wrapper compute as in a program of a user."""
    with jax.numpy_dtype_promotion("standard"):
        yield


class DynamicLossScaleState(NamedTuple):
    """State of `dynamic_loss_scale`."""

    loss_scale: jax.Array  # f32[], multiplies the loss of the next step
    good_steps: jax.Array  # i32[], finite steps since the scale changed
    total_skipped: jax.Array  # i32[]
    inner_state: optax.OptState


def dynamic_loss_scale(
    inner: optax.GradientTransformation,
    initial_scale: float = 2.0**15,
    growth_interval: int = 2000,
    min_scale: float = 1.0,
    max_scale: float = 2.0**126,
) -> optax.GradientTransformationExtraArgs:
    """Unscales gradients, skips steps with inf or nan, and adapts the loss scale.

    Differentiate the loss times `optax.tree.get(state, "loss_scale")`. In a step that
    is skipped the updates are zero, and the inner state stays as it was.

    Args:
      inner: The transformation to wrap. It sees unscaled gradients.
      initial_scale: The first scale, a power of two.
      growth_interval: Finite steps in a row before the scale is doubled.
      min_scale: The scale, halved after an overflow, never falls below this.
      max_scale: The scale never rises above this.

    Returns:
      A `GradientTransformationExtraArgs` that takes gradients of the scaled loss.

    References:
      `Mixed Precision Training <https://arxiv.org/abs/1710.03740>`_, 2018
    """
    inner = optax.with_extra_args_support(inner)

    def init_fn(params):
        scale, zero = jnp.asarray(initial_scale, jnp.float32), jnp.zeros([], jnp.int32)
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
            loss_scale=jnp.clip(scale, min_scale, max_scale),
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

    @jax.jit
    def step_of_optax(params, state):
        def scaled_loss_fn(params):
            return loss_fn(params, x, y) * optax.tree.get(state, "loss_scale")

        grads = jax.grad(scaled_loss_fn)(params)
        updates, state = transform.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    @jax.jit
    def step_of_ours(params, state):
        return optimizer.minimize(loss_fn, params, state, x, y)[:2]

    theirs, ours = (start, transform.init(start)), (start, optimizer.init(start))
    for _ in range(200):
        theirs, ours = step_of_optax(*theirs), step_of_ours(*ours)
        assert theirs[1].loss_scale == optimizer.current_loss_scale(ours[1])
        assert_same_bits(
            (theirs[0], theirs[1].inner_state), (ours[0], ours[1].inner_state)
        )
    # One step in five overflows, and it learns.
    assert 30 < ours[1].skipped_steps < 50
    assert loss_fn(ours[0], x, y) < 0.01 * loss_fn(start, x, y)


def test_any_run_of_inf_and_nan_is_that_of_the_wrapper_up_to_both_bounds():
    bounds, numbers = (2.0, 64.0), (8.0, 2)
    choice = np.random.default_rng(0).choice
    gradients = choice([1.0, 0.5, INF, -INF, NAN], 300, p=[0.4, 0.4, 0.1, 0.05, 0.05])
    transform = dynamic_loss_scale(optax.adam(0.1), *numbers, *bounds)
    rule = DynamicLossScale(*numbers, min_scale=bounds[0], max_scale=bounds[1])
    optimizer = LossScaleOptimizer(optax.adam(0.1), rule)
    one = jnp.float32(1)

    def step(carry, gradient):
        theirs, ours = carry
        updates, theirs = transform.update(gradient * theirs.loss_scale, theirs, one)
        wanted, ours = optimizer.update(gradient, ours, one)
        scales = theirs.loss_scale, optimizer.current_loss_scale(ours)
        return (theirs, ours), (updates, wanted, *scales)

    @jax.jit
    def run(gradients):
        start = transform.init(one), optimizer.init(one)
        return jax.lax.scan(step, start, gradients)

    (theirs, ours), (updates, wanted, *scales) = run(jnp.float32(gradients))
    assert_same_bits(*scales)
    assert (scales[0].min(), scales[0].max()) == bounds
    np.testing.assert_allclose(updates, wanted, rtol=1e-5, atol=1e-7)
    skipped = np.sum(~np.isfinite(gradients))
    assert theirs.total_skipped == ours.skipped_steps == skipped
