"""Gradients that JAX has not summed over devices yet: the type `unreduced`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import WRAPS, exhaustive_but, plain_step
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P, reshard

from optax_lossscale import (
    DynamicLossScale,
    HeadroomLossScale,
    LossScaleOptimizer,
    all_finite,
)

needs_factors = pytest.mark.skipif(
    not hasattr(P, "partitions"), reason="JAX 0.8 multiplies no unreduced arrays"
)
pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")

INNER = optax.chain(optax.add_decayed_weights(0.125), optax.sgd(0.125, 0.9))
RULE = DynamicLossScale(2.0**20)
OPTIMIZERS = {
    "once": LossScaleOptimizer(INNER, RULE),
    "retries": LossScaleOptimizer(INNER, RULE, retries=24),
    "headroom": LossScaleOptimizer(INNER, HeadroomLossScale(2.0**20)),
}
W = np.linspace(-1, 1, 24, dtype=np.float32).reshape(8, 3)
X = np.linspace(-1, 2, 128, dtype=np.float32).reshape(16, 8)


@pytest.fixture
def mesh():
    mesh = jax.make_mesh((8,), ("batch",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        yield mesh


def reduced(tree):
    return jax.tree.map(lambda x: reshard(x, P(reduced={"batch"})), tree)


def loss_fn(params, x):
    # JAX multiplies matrices of this type, and adds no biases.
    return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] - 1) ** 2)


def half_loss_fn(params, x):
    """Overflows at a scale of 2**20."""
    return loss_fn(*optax.tree.cast((params, x), jnp.float16)).astype(jnp.float32)


def make_params():
    return {"w": W, "v": 2 * np.eye(3, dtype=np.float32)}


def train(mesh, loss_fn, optimizer, convert=lambda params: params):
    """Takes three steps, and one that overflows on one device.

    Returns:
      The parameters, the state, and the losses of the first three steps.
    """
    batches = np.stack([X] * 4)
    batches[3, 5, 3] = np.inf

    def step(carry, x):
        params, state, loss = optimizer.minimize(loss_fn, *carry, x)
        return (params, state), loss

    @jax.jit
    def steps(params, batches):
        params = convert(params)
        return lax.scan(step, (params, optimizer.init(params)), batches)

    params = jax.device_put(make_params(), NamedSharding(mesh, P()))
    batches = jax.device_put(batches, NamedSharding(mesh, P(None, "batch")))
    (params, state), losses = steps(params, batches)
    assert state.skipped_steps == 1
    return params, state, losses[:3]


@functools.cache
def expected():
    """Returns the parameters and the losses of the inner optimizer on one device."""
    step, params, losses = jax.jit(plain_step(loss_fn, INNER)), make_params(), []
    state = INNER.init(params)
    for _ in range(3):
        params, state, loss = step(params, state, X)
        losses.append(loss)
    return params, np.array(losses)


def assert_close(got, wanted, **options):
    for x, y in zip(*map(jax.tree.leaves, (got, wanted)), strict=True):
        np.testing.assert_allclose(*jax.device_get((x, y)), **options)


@pytest.mark.parametrize("name", exhaustive_but(OPTIMIZERS, ["once"]))
def test_the_loss_function_reduces(mesh, name):
    def reducing(params, x):
        return loss_fn(reduced(params), x)

    params, _, losses = train(mesh, reducing, OPTIMIZERS[name])
    assert_close((params, losses), expected(), rtol=1e-5, atol=1e-6)


@needs_factors
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_caller_reduces(mesh, name):
    params, _, losses = train(mesh, loss_fn, OPTIMIZERS[name], convert=reduced)
    assert_close((params, losses), expected(), rtol=1e-5, atol=1e-6)
    # The next step, too, sums as this one.
    assert jax.typeof(params["w"]).sharding.spec.reduced == {"batch"}


@needs_factors
def test_retries_of_gradients_that_are_not_summed(mesh):
    params, state, _ = train(mesh, half_loss_fn, OPTIMIZERS["retries"], convert=reduced)
    assert int(state.retries) > 0
    assert_close(params, expected()[0], atol=0.02)


@needs_factors
@pytest.mark.parametrize("wrap", exhaustive_but(WRAPS.values(), [jax.jit]), ids=WRAPS)
def test_value_and_grad_returns_the_types_of_jax(mesh, wrap):
    optimizer = OPTIMIZERS["once"]

    def gradients(params, x):
        """Returns the sums and the updates of two micro-batches."""
        state, params = optimizer.init(params), reduced(params)
        grads = [
            optimizer.value_and_grad(loss_fn, state)(params, x)[1] for x in (x, 2 * x)
        ]
        assert jax.typeof(grads[0]["w"]).sharding.spec.unreduced == {"batch"}
        total = jax.tree.map(jnp.add, *grads)
        updates, state = optimizer.update(total, state, params)
        sums = jax.tree.map(lambda x: reshard(x, P()), total)
        wanted, _ = optimizer.update(sums, optimizer.init(params), params)
        return sums, updates, wanted, all_finite(total)

    params = jax.device_put(make_params(), NamedSharding(mesh, P()))
    x = jax.device_put(X, NamedSharding(mesh, P("batch")))
    sums, updates, wanted, finite = wrap(gradients)(params, x)
    plain = [jax.grad(loss_fn)(params, x) for x in (x, 2 * x)]
    assert_close(sums, jax.tree.map(jnp.add, *plain), rtol=1e-5)
    assert_close(updates, wanted, rtol=0)
    assert finite
