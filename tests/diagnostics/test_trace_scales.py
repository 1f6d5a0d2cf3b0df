"""The largest loss scale of a trace, compared with one found by bisection."""

import faulty_transformer
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tracing import half, run_eagerly, total

from optax_lossscale.diagnostics import trace_numerics

X = jnp.linspace(-1, 1, 48, dtype=jnp.float16).reshape(6, 8)


def deep(params):
    """A perceptron, with a loss of a small weight."""
    hidden = jnp.tanh(X @ half(params[0]))
    return 2.0**-20 * total(jnp.square(hidden @ half(params[1])))


def recurrent(params):
    """A scan with a gated state."""

    def step(state, x):
        gate = jax.nn.sigmoid(state @ half(params[0]) + x)
        state = gate * state + (1 - gate) * jnp.tanh(state @ half(params[1]))
        return state, total(state)

    return jax.lax.scan(step, X[0], X)[1].mean()


def weights(std):
    random = np.random.default_rng(0)
    return jnp.asarray(std * random.standard_normal((2, 8, 8)), jnp.float32)


def transformer(params):
    sound = faulty_transformer.plant(None)
    return sound.loss_fn(params, *sound.args)


def overflows(closed, scale, args):
    """Whether any result of the backward pass is not finite, operation by operation."""
    (variable, *_), is_backward = closed.jaxpr.invars, False
    for equation, found in run_eagerly(closed.jaxpr, closed.consts, [scale, *args]):
        floats = [x for x in found if jnp.issubdtype(x.dtype, jnp.floating)]
        if is_backward and not all(bool(jnp.isfinite(x).all()) for x in floats):
            return True
        is_backward |= any(x is variable for x in equation.invars)
    return False


@pytest.mark.parametrize(
    ("loss_fn", "params"),
    [
        (deep, weights(0.3)),
        pytest.param(deep, weights(2.0), marks=pytest.mark.exhaustive),
        pytest.param(recurrent, weights(0.3), marks=pytest.mark.exhaustive),
        pytest.param(recurrent, weights(2.0), marks=pytest.mark.exhaustive),
        pytest.param(transformer, None, marks=pytest.mark.exhaustive),
    ],
)
def test_the_largest_scale_is_the_bisected_one(loss_fn, params):
    params = faulty_transformer.plant(None).params if params is None else params

    def scaled(scale, params):
        return jax.grad(lambda p: loss_fn(p) * scale)(params)

    jaxpr = jax.make_jaxpr(scaled)(jnp.float32(1), params)
    low, high = 0, 64
    while high - low > 1:
        middle = (low + high) // 2
        scale = jnp.float32(2.0**middle)
        bad = overflows(jaxpr, scale, jax.tree.leaves(params))
        low, high = (low, middle) if bad else (middle, high)
    assert trace_numerics(loss_fn, params).largest_scale == 2.0**low


@pytest.mark.parametrize("factor", [1.0, 1.5, 65504 / 2**15])
@pytest.mark.parametrize("power", [-20, 0, 20])
def test_the_largest_scale_of_a_product(power, factor):
    def loss_fn(w):
        return total(half(w) * (half(w) * 0 + factor)) * 2.0**power

    largest = trace_numerics(loss_fn, jnp.ones(2), scale=3.0).largest_scale
    # The gradient is factor * 2**power * scale, and the dtype ends below 2**16.
    assert largest == 2.0 ** (15 - power)
    for scale in (largest, 2 * largest):
        grads = jax.grad(lambda w, s=scale: loss_fn(w) * s)(jnp.ones(2))
        assert np.isfinite(grads).all() == (scale == largest)


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
    assert trace.findings[0].operation.in_rule


def test_nothing_overflows_at_any_scale():
    trace = trace_numerics(lambda w: total(half(w) * jnp.float16(0)), jnp.ones(2))
    assert trace.largest_scale == 2.0**15
    trace = trace_numerics(lambda w: jnp.float32(0) * jnp.sum(w), jnp.ones(2))
    assert trace.largest_scale == 2.0**126


def test_no_scale_fits_two_branches():
    def loss_fn(params):
        w, v = map(half, params)
        tiny = jnp.float16(2.0**-14)
        return total(w) * 64.0 + total(v * tiny * tiny * tiny)

    trace = trace_numerics(loss_fn, (jnp.ones(2), jnp.ones(2)))
    (found,) = (x for x in trace.findings if x.kind == "no_scale")
    assert trace.largest_scale == 2.0**9
    # At that scale, the third product is 2**(9 - 42); normal numbers begin at 2**-14.
    assert found.bits == 19
    assert "a scale of its own" in found.message
    assert found.other.output.dtype == "float16"
