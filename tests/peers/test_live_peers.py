"""Flax and Optax next to ours: the same gradients, step by step."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import peers
import pytest
from flax.training.dynamic_scale import DynamicScale
from helpers import INF, NAN, assert_same_bits, exhaustive_but, signature

from optax_lossscale import LossScaleOptimizer

pytestmark = pytest.mark.usefixtures("standard_dtype_promotion")
# The large one overflows by itself once the scale is large, and only then.
GRADIENTS = [1.0, 0.5, -2.0, 2.0**100, INF, -INF, NAN]
FINITE_MOSTLY = [0.3, 0.2, 0.2, 0.2, 0.04, 0.03, 0.03]
LEARNING_RATE = 0.25


def loss_fn(param, gradient):
    return param * gradient


def train(step, state):
    """Takes the same 60 steps of 100 runs: a scan for each, all in one jitted call."""
    random = np.random.default_rng(0)
    gradients = random.choice(np.float32(GRADIENTS), (100, 60), p=FINITE_MOSTLY)

    @jax.jit
    @jax.vmap
    def run(gradients):
        return jax.lax.scan(step, (jnp.float32(1), state), gradients)[1]

    return run(gradients)


FLAX = [
    {"scale": 8.0, "growth_interval": 1},
    {"scale": 2.0**26, "growth_interval": 0, "minimum_scale": 2.0**24},
    {"growth_interval": 2, "growth_factor": 8.0, "backoff_factor": 0.25},
    {"scale": 4.0, "growth_interval": 5, "minimum_scale": None},
]


@pytest.mark.parametrize("arguments", exhaustive_but(FLAX, FLAX[:1]), ids=repr)
def test_flax(arguments):
    theirs = DynamicScale(**arguments)
    theirs = theirs.replace(fin_steps=jnp.int32(0), scale=jnp.float32(theirs.scale))
    ours = LossScaleOptimizer(optax.sgd(LEARNING_RATE), peers.flax(**arguments))

    def their_step(carry, gradient):
        param, scaler = carry
        scaler, finite, _, grad = scaler.value_and_grad(loss_fn)(param, gradient)
        param = jnp.where(finite, param - LEARNING_RATE * grad, param)
        return (param, scaler), (param, scaler.scale, finite)

    def our_step(carry, gradient):
        param, state, _ = ours.minimize(loss_fn, *carry, gradient)
        scale = ours.current_loss_scale(state)
        return (param, state), (param, scale, state.last_step_applied)

    wanted = train(their_step, theirs)
    assert_same_bits(train(our_step, ours.init(jnp.float32(1))), wanted)
    # The gradients have put the scale to the test.
    _, scale, applied = map(np.array, wanted)
    assert 0.02 < np.mean(~applied) < 0.9
    assert np.any(np.diff(scale) > 0)
    assert np.any(np.diff(scale) < 0)


def test_apply_if_finite():
    inner = optax.adam(LEARNING_RATE)
    theirs = optax.apply_if_finite(inner, 1000)
    ours = LossScaleOptimizer(inner, peers.optax_apply_if_finite(1000))

    def their_step(carry, gradient):
        param, state = carry
        updates, state = theirs.update(gradient, state, param)
        carry = optax.apply_updates(param, updates), state
        counts = state.notfinite_count, state.total_notfinite
        return carry, (carry[0], state.inner_state, state.last_finite, *counts)

    def our_step(carry, gradient):
        param, state = ours.apply_gradients(gradient, *carry)
        counts = state.consecutive_skipped_steps, state.skipped_steps
        told = state.inner_state, state.last_step_applied, *counts
        return (param, state), (param, *told)

    one = jnp.float32(1)
    wanted, found = train(their_step, theirs.init(one)), train(our_step, ours.init(one))
    assert signature(found) == signature(wanted)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        # Compiled, the two programs may be fused differently; flags and counts agree.
        inexact = jnp.issubdtype(x.dtype, jnp.inexact)
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5 if inexact else 0)
    assert wanted[3].max() > 1


def test_defaults_are_those_of_flax():
    names, theirs = inspect.signature(peers.flax).parameters, DynamicScale()
    assert peers.flax(**{name: getattr(theirs, name) for name in names}) == peers.flax()
