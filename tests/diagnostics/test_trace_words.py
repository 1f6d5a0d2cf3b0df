"""What the findings of `trace_numerics` say."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from tracing import TWO, half, program_of, total

from optax_lossscale.diagnostics import trace_numerics
from optax_lossscale.diagnostics._trace.trace import summarize

EYE = np.eye(2, dtype=np.float32)


def said(loss_fn, *args, **options):
    """Returns what is printed, as one line."""
    return " ".join(str(trace_numerics(loss_fn, *args, **options)).split())


def summary(loss_fn, *args):
    """Returns what is said of the program, before it is compiled."""
    return summarize(program_of(loss_fn, *args), "")


def test_an_exp_that_overflows_in_float32_for_some_inputs():
    text = said(lambda w: total(jnp.exp(half(w) * 40)), jnp.array([0.3, 0.5, 3.0]))
    assert "too large for float32 as well" in text
    assert "compute this line" not in text


def test_an_underflow_names_the_scale_to_pass():
    def loss_fn(w):
        return total(jnp.sin(half(w))) * 2.0**-26

    trace = trace_numerics(loss_fn, TWO)
    text = " ".join(str(trace).split())
    (exponent,) = re.findall(r"initial_scale=2.0\*\*(\d+)", text)
    assert "of the gradients are flushed" in text
    assert 2.0 ** int(exponent) == trace.largest_scale
    grads = jax.grad(lambda w: loss_fn(w) * trace.largest_scale)(TWO)
    truth = jnp.cos(TWO) * 2.0**-26 * trace.largest_scale
    assert np.allclose(grads, truth, rtol=0.01)


def test_the_spacing_of_a_running_sum():
    def loss_fn(w):
        sums = jnp.cumsum(half(w)) - jnp.arange(3000, dtype=jnp.float16)
        return total(jnp.square(sums.astype(jnp.float32)))

    text = said(loss_fn, jnp.full(3000, 1.01))
    assert "spacing of 2^1 at 2^11" in text


def test_a_safe_norm():
    def loss_fn(w, cast=half):
        return optax.safe_norm(cast(w), 1e-6).astype(jnp.float32)

    trace = trace_numerics(loss_fn, TWO * 1e-5)
    assert np.isclose(trace.float32_loss, loss_fn(TWO * 1e-5, jnp.asarray), rtol=1e-3)
    assert "of the results are flushed to zero" in trace.findings[0].message


@pytest.mark.parametrize(("own", "count"), [("float32", 0), ("float16", 2)])
def test_how_much_computes_in_the_dtype(own, count):
    def loss_fn(params, x):
        with jax.numpy_dtype_promotion("standard"):
            return total(x.astype(jnp.float16) @ params["w"].astype(own))

    text = summary(loss_fn, {"w": EYE}, EYE)
    assert text.startswith(f"{count} of 2 matrix products")


def test_ragged_products_compute_in_the_dtype():
    def loss_fn(w):
        sizes = jnp.array([1, 1], jnp.int32)
        return total(lax.ragged_dot(half(w), half(w)[None].repeat(2, 0), sizes))

    assert summary(loss_fn, EYE).startswith("3 of 3 ")


def test_a_result_that_is_cast_on_purpose():
    def loss_fn(w):
        return total(half(w @ w) @ half(w))

    # Its gradient comes from a cast, but nothing was promoted.
    assert "float32" not in summary(loss_fn, EYE)
