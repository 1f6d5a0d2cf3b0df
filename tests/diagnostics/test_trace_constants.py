"""What the trace says about constants, and about the dtypes of matrix products."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arithmetic import by_hand, half, mean, relative_errors, total
from faulty_decisions import W, X
from helpers import exhaustive_but
from jax import lax
from tracing import line_of

from optax_lossscale import autocast
from optax_lossscale._jaxprs import parts
from optax_lossscale._jaxprs.parts import bind
from optax_lossscale.diagnostics import trace_numerics
from optax_lossscale.diagnostics._trace.measure.twin import bind_wide, rounded

CLOSE = 0.01


def product(x, w, kind="float16"):
    name = f"F16_F16_F{jnp.dtype(kind).itemsize * 8}"
    return jnp.dot(  # algorithm
        x, w, precision=lax.DotAlgorithmPreset[name], preferred_element_type=kind
    )


def test_the_twin_of_an_algorithm():
    def loss_fn(w):
        y = product(half(X) * 300, half(w) * 300)
        return total(y.astype(jnp.float32) * 2.0**-16)

    trace = trace_numerics(loss_fn, W)
    truth = jnp.sum((X * 300) @ (W * 300) * 2.0**-16)
    assert np.isclose(trace.float32_loss, truth, rtol=1e-2)
    assert trace.findings[0].operation.line == line_of("algorithm", __file__)
    assert "in float32 too" not in str(trace)


@pytest.mark.parametrize("kind", ["float16", "float32"])
def test_an_algorithm_in_float32(kind):
    """Not all devices have both; the twin needs neither."""
    (equation,) = jax.make_jaxpr(partial(product, kind=kind))(half(X), half(W)).eqns
    (found,) = bind_wide(equation, [X, W])
    assert found.dtype == jnp.float32
    assert np.allclose(found, X @ W, rtol=1e-5)


def multiplied(x, w):
    return x @ w


def convolved(x, w):
    return lax.conv(x[None, None], w[None, None], (1, 1), "SAME")


@pytest.mark.parametrize("function", [multiplied, convolved])
def test_the_twin_of_a_product_in_half_has_no_tf32(function):
    """A GPU takes TF32 by default, a TPU bfloat16."""
    *_, equation = jax.make_jaxpr(function)(half(X), half(W)).eqns
    shapes = [jax.ShapeDtypeStruct(x.aval.shape, jnp.float32) for x in equation.invars]
    program = jax.make_jaxpr(lambda *args: bind_wide(equation, args))(*shapes)
    assert program.eqns[0].params["precision"] == (lax.Precision.HIGHEST,) * 2


def on_a_tpu(monkeypatch):
    """Rounds the operands of products in float32 to bfloat16, as a TPU does."""

    def rounding(equation, args, params=None):
        params = equation.params if params is None else params
        highest = (lax.Precision.HIGHEST,) * 2
        if equation.primitive.name == "dot_general" and params["precision"] != highest:
            args = [rounded(x, "bfloat16") for x in args]
        return bind(equation, args, params)

    monkeypatch.setattr(parts, "bind", rounding)


def after_a_product_in_half(w):
    return jnp.mean(jnp.tanh((half(X) @ half(w)).astype(jnp.float32)))


def after_a_product_in_float32(w):
    y = half(X).astype(jnp.float32) @ w
    return jnp.mean(jnp.tanh(half(y)).astype(jnp.float32))


@pytest.mark.parametrize(
    "loss_fn", [after_a_product_in_half, after_a_product_in_float32]
)
def test_the_twin_has_the_products_of_the_device(loss_fn, monkeypatch):
    on_a_tpu(monkeypatch)
    (finding,) = trace_numerics(loss_fn, W, scale=2.0**8).findings
    assert finding.kind == "fine", finding


# What `autocast` makes is compared with the function itself.


def moving_average(w, x):
    def body(h, _):
        h = (x @ w) * 0.001 + h * 0.9999  # moving_average
        return h, None

    return mean(jnp.square(lax.scan(body, x @ w, length=100)[0]))


def products(w, x):
    h = x @ w
    return mean(
        jnp.square(lax.scan(lambda h, _: (h * 0.9999, None), h, length=4000)[0])
    )


def thresholds(w, x):
    h = (x @ w) @ w
    one = jnp.ones_like(x) @ jnp.full_like(w, 1.0003 / len(w))  # 1 in float16
    return mean(jnp.where(one > 1, h * 3, jnp.sin(h))) + mean(
        h.argmax(-1).astype(jnp.float32) * h[:, 0]
    )


def iterations(w, x):
    h = jnp.abs(x @ w) * 1e-3
    one = (jnp.ones_like(x) @ jnp.full_like(w, 1.0003 / len(w)))[0, 0]  # 1 in float16
    h = lax.while_loop(
        lambda h: jnp.sum(h) < 100 * one**2000, lambda h: h * 1.3, lax.stop_gradient(h)
    )
    return mean(h * (x @ w))


AUTOCAST = [moving_average, products, thresholds, iterations]


@pytest.mark.parametrize("loss_fn", exhaustive_but(AUTOCAST, [iterations]))
def test_the_twin_of_autocast_is_the_function(loss_fn):
    trace = trace_numerics(lambda *args: autocast(loss_fn)(*args), W, X)
    truth = by_hand(loss_fn, W, X)(1.0)
    assert np.isclose(trace.float32_loss, truth[0], rtol=1e-5)
    error = np.max(relative_errors(by_hand(autocast(loss_fn), W, X)(1.0), truth))
    assert (trace.findings[0].kind == "fine") == (error < CLOSE), str(trace)
