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


def make_train(mesh, loss_fn, optimizer, convert):
    """Makes a function that takes three steps with a batch.

    It returns the parameters, the state and the losses.
    """

    @jax.jit
    def steps(params, x):
        def step(carry, x):
            params, state = carry
            params, state, loss = optimizer.minimize(loss_fn, params, state, x)
            return (params, state), loss

        params = convert(params)
        carry = params, optimizer.init(params)
        (params, state), losses = lax.scan(step, carry, jnp.stack([x, x, x]))
        return params, state, losses

    def train(x=X):
        params = jax.device_put(make_params(), NamedSharding(mesh, P()))
        return steps(params, jax.device_put(x, NamedSharding(mesh, P("batch"))))

    return train


@functools.cache
def expected():
    """Returns the parameters and the losses of the inner optimizer on one device."""
    step = jax.jit(plain_step(loss_fn, INNER))
    params, losses = make_params(), []
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

    train = make_train(mesh, reducing, OPTIMIZERS[name], lambda params: params)
    params, _, losses = train()
    assert_close((params, losses), expected(), rtol=1e-5, atol=1e-6)


@needs_factors
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_caller_reduces(mesh, name):
    train = make_train(mesh, loss_fn, OPTIMIZERS[name], reduced)
    params, state, losses = train()
    assert_close((params, losses), expected(), rtol=1e-5, atol=1e-6)
    assert state.skipped_steps == 0
    # The next step, too, sums as this one.
    assert jax.typeof(params["w"]).sharding.spec.reduced == {"batch"}
    # An overflow on one device.
    bad = X.copy()
    bad[5, 3] = np.inf
    params, state, _ = train(bad)
    assert_close(params, make_params(), rtol=0)
    assert state.skipped_steps == 3


@needs_factors
def test_retries_of_gradients_that_are_not_summed(mesh):
    params, state, _ = make_train(mesh, half_loss_fn, OPTIMIZERS["retries"], reduced)()
    assert (state.skipped_steps, int(state.retries) > 0) == (0, True)
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
