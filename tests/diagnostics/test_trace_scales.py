"""The largest loss scale of a trace, compared with one found by bisection."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from tracing import half, run_eagerly, total

from experiments.tasks import Task, digits, mean_loss, recurrent, transformer
from optax_lossscale import LossScaleOptimizer
from optax_lossscale.diagnostics import trace_numerics

POINTS, BETWEEN = 3, 60


def deep_perceptron(steps):
    """Eight layers, with a loss of a small weight."""
    dense = functools.partial(nn.Dense, dtype=jnp.float16)
    hidden = [layer for _ in range(7) for layer in (dense(80), nn.tanh)]
    network = nn.Sequential([*hidden, dense(10)])

    def loss_fn(params, batch, dtype):
        images, labels = batch
        return 2.0**-20 * mean_loss(network.apply(params, images), labels)

    def init(key):
        return network.init(key, jnp.zeros((1, 64)))

    return Task("deep perceptron", init, loss_fn, digits(), optax.adam(1e-3), steps)


def overflows(closed, scale, args):
    """Whether any result of the backward pass is not finite, operation by operation."""
    (variable, *_), is_backward = closed.jaxpr.invars, False
    for equation, found in run_eagerly(closed.jaxpr, closed.consts, [scale, *args]):
        floats = [x for x in found if jnp.issubdtype(x.dtype, jnp.floating)]
        if is_backward and not all(bool(jnp.isfinite(x).all()) for x in floats):
            return True
        is_backward |= any(x is variable for x in equation.invars)
    return False


@pytest.mark.exhaustive
@jax.numpy_dtype_promotion("standard")
@pytest.mark.parametrize("make", [deep_perceptron, transformer, recurrent])
def test_the_largest_scale_is_the_bisected_one(make):
    task = make(POINTS * BETWEEN)
    loss_fn = functools.partial(task.loss_fn, dtype=jnp.float16)
    optimizer = LossScaleOptimizer(task.optimizer, "dynamic")
    params = task.init(jax.random.key(0))
    state = optimizer.init(params)
    step = jax.jit(functools.partial(optimizer.minimize, loss_fn))
    keys = jax.random.split(jax.random.key(1), POINTS * BETWEEN)

    def scaled(scale, params, batch):
        return jax.grad(lambda p: loss_fn(p, batch) * scale)(params)

    found, wanted = [], []
    for i, key in enumerate(keys):
        batch = task.batch(key)
        if i % BETWEEN == 0:
            trace = trace_numerics(loss_fn, params, batch, state=state)
            found.append(trace.largest_scale)
            jaxpr = jax.make_jaxpr(scaled)(jnp.float32(1), params, batch)
            args = jax.tree.leaves((params, batch))
            low, high = 0, 64
            while high - low > 1:
                middle = (low + high) // 2
                bad = overflows(jaxpr, jnp.float32(2.0**middle), args)
                low, high = (low, middle) if bad else (middle, high)
            wanted.append(2.0**low)
        params, state, _ = step(params, state, batch)
    assert found == wanted
    assert len(set(found)) > 1 or make is transformer


@pytest.mark.parametrize("factor", [1.0, 1.5, 65504 / 2**15])
@pytest.mark.parametrize("power", [-20, 0, 20])
def test_the_largest_scale_of_a_product(power, factor):
    def loss_fn(w):
        return total(half(w) * (half(w) * 0 + factor)) * 2.0**power

    trace = trace_numerics(loss_fn, jnp.ones(2), scale=3.0)
    # The gradient is factor * 2**power * scale, and the dtype ends below 2**16.
    assert trace.largest_scale == 2.0 ** (15 - power)


def test_no_scale():
    @jax.custom_vjp
    def f(x):
        return x

    def backward(x, g):
        return (g + jnp.float16(65504) + x * jnp.float16(65504),)

    f.defvjp(lambda x: (x, x), backward)
    trace = trace_numerics(lambda w: total(f(half(w))), jnp.ones(2))
    assert trace.largest_scale is None
    assert trace.findings[0].kind == "backward"
    assert trace.findings[0].operation.function.endswith("backward")


def test_nothing_overflows_at_any_scale():
    trace = trace_numerics(lambda w: total(half(w) * jnp.float16(0)), jnp.ones(2))
    assert trace.largest_scale == 2.0**15
    trace = trace_numerics(lambda w: jnp.float32(0) * jnp.sum(w), jnp.ones(2))
    assert trace.largest_scale == 2.0**126


def test_no_scale_fits_two_branches():
    def loss_fn(w, v):
        large = total(half(w))
        tiny = jnp.float16(2.0**-14)
        small = total(half(v) * tiny * tiny * tiny)
        return large * 64.0 + small

    trace = trace_numerics(lambda p: loss_fn(*p), (jnp.ones(2), jnp.ones(2)))
    (found,) = (x for x in trace.findings if x.kind == "no_scale")
    assert trace.largest_scale == 2.0**9
    # At that scale, the third product is 2**(9 - 42); normal numbers begin at 2**-14.
    assert found.bits == 19
    assert "num_losses" in found.message
    assert found.other.output.dtype == "float16"
