"""What a trace says of a program before it is compiled."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from tracing import half, program_of, total

from optax_lossscale.diagnostics._trace.trace import summarize

EYE = np.eye(2, dtype=np.float32)


def summary(loss_fn, *args):
    """Returns what is said of the program, before it is compiled."""
    return summarize(program_of(loss_fn, *args), "")


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
