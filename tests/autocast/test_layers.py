"""What wins and what gives way: the dtype of a result, for each clause of the rule."""

import jax
import jax.numpy as jnp
import pytest
from casting import dtypes, equations, normal
from jax import lax

from optax_lossscale import autocast


def dtype_of(f, *args):
    """Returns the dtype that the result of a function is held in, before a product."""
    return dtypes(autocast(lambda w, x: (f(w, x) * 0.5) @ w), *args, names=["mul"])[-1]


B, SQUARE = normal(8), normal(8, 8)


def instance(h, like=None, gain=1 + B, bias=B):
    """Returns a norm with gain and bias, with the statistics of `h` or of another."""
    like = h if like is None else like
    mean, size = like.mean(-1, keepdims=True), like.var(-1, keepdims=True)
    return (h - mean) * lax.rsqrt(size + 1e-5) * gain + bias


def gain_first(h):
    """The same, as Flax and Haiku multiply."""
    factor = lax.rsqrt(h.var(-1, keepdims=True) + 1e-5) * (1 + B)
    return (h - h.mean(-1, keepdims=True)) * factor + B


def root_mean_square(h):
    return h * lax.rsqrt(jnp.square(h).mean(-1, keepdims=True)) * B


def helped(w, h):
    return jax.jit(lambda w, h, b: h @ w + b)(w, h, B)


def pairs(h):
    return h.reshape(2, 8, 8)


@pytest.mark.parametrize(
    ("f", "dtype"),
    [
        (lambda w, x: x + x @ w, "float32"),
        (lambda w, x: 2 * x + x @ w, "float32"),
        (lambda w, x: jnp.where(x > 0, x, x @ w) + x @ w, "float32"),
        (lambda w, x: jnp.broadcast_to(x[0], x.shape) + x[0] * (x @ w), "float32"),
        (lambda w, x: jnp.concatenate([x[:8], (x @ w)[8:]]) + x @ w, "float32"),
        (lambda w, x: x @ w + B, "float16"),
        (lambda w, x: x @ w + jnp.broadcast_to(B, (1, 8)), "float16"),
        (lambda w, x: x @ w + 3.0, "float16"),
        (lambda w, x: x @ w + jnp.sin(x), "float32"),
        (lambda w, x: x @ w + (1 + jnp.tanh(x)) / 2, "float32"),
        (lambda w, x: x @ w + 3 * jnp.sin(x), "float32"),
        (lambda w, x: x @ w + B * jnp.sin(x), "float32"),
        (lambda w, x: x @ w + w[jnp.arange(16) % 8], "float32"),
        (lambda w, x: x @ w + 16 * w[jnp.arange(16) % 8], "float32"),
        (lambda w, x: x @ w + x[:, :1] * B, "float32"),
        (lambda w, x: x @ w + jnp.outer(x[:, 0], B), "float32"),
        (lambda w, x: x @ w + (jnp.sum(x, -1, keepdims=True) + B), "float32"),
        (lambda w, x: x @ w + (x @ w) @ w, "float16"),
        # A bias has one dimension, follows a product, and is nothing else.
        (lambda w, x: pairs(2 * (x @ w) + x @ w) + B, "float16"),
        (lambda w, x: jax.nn.relu(x @ w) + B, "float32"),
        (lambda w, x: x @ w[:, :1] + B, "float32"),
        (lambda w, x: (pairs(x @ w) + SQUARE).reshape(16, 8), "float32"),
        (lambda w, x: jax.nn.relu(x @ w + B) @ w + B, "float16"),
        (lambda w, x: (x + B) @ w + B, "float32"),
        (lambda w, x: helped(w, helped(w, x)), "float16"),
        (lambda w, x: helped(w, x + B), "float32"),
        (lambda w, x: jax.jit(jnp.multiply)(x, B) @ w + B, "float32"),
        # A gain is smaller; a mask was a bool, and is a factor.
        (lambda w, x: jax.nn.relu(x @ w) * B, "float16"),
        (lambda w, x: (pairs(x @ w) * SQUARE).reshape(16, 8), "float16"),
        (lambda w, x: x * (x @ w), "float32"),
        (lambda w, x: (1 - (x > 0).astype("float32")) * (x @ w), "float16"),
        (lambda w, x: (x > 0).astype("float32") * (x @ w[:, :1]), "float16"),
        (lambda w, x: x @ w + (x > 0).astype("float32"), "float32"),
        (lambda w, x: x @ w * x.astype("int8").astype("float32"), "float32"),
        # A norm is as wide as its operand, if the statistics are its own.
        (lambda w, x: instance(x @ w), "float16"),
        (lambda w, x: instance(x @ w + B), "float16"),
        (lambda w, x: instance(x @ w + x), "float32"),
        (lambda w, x: instance(x @ w, like=x), "float32"),
        (lambda w, x: (lambda h: h * jnp.exp(h))(x @ w), "float32"),
        (lambda w, x: instance(x @ w, gain=x), "float32"),
        (lambda w, x: instance(x @ w, bias=x), "float32"),
        (lambda w, x: instance((x + B) @ w, bias=B), "float32"),
        (lambda w, x: gain_first(jax.nn.relu(x @ w)), "float16"),
        (lambda w, x: gain_first(x), "float32"),
        (lambda w, x: root_mean_square(x @ w), "float16"),
        (lambda w, x: root_mean_square(x), "float32"),
        (lambda w, x: x @ w - (x @ w).mean(0), "float32"),
        # A filled array is an array in a sum; a function of half precision gives way.
        (lambda w, x: x @ w + jnp.full((16, 8), 2.0), "float32"),
        (lambda w, x: x @ w - jnp.full((16, 8), 2.0), "float32"),
        (lambda w, x: x @ w - jnp.zeros((16, 8)), "float16"),
        (lambda w, x: x @ w * jnp.full((16, 8), 2.0), "float16"),
        (lambda w, x: jnp.tanh(x @ w) + x @ w, "float16"),
    ],
)  # fmt: skip
def test_what_wins_and_what_gives_way(f, dtype):
    assert dtype_of(f, normal(8, 8), normal(16, 8)) == dtype


def test_a_norm_is_rounded_once():
    cast = autocast(lambda w, x: instance(x @ w) @ w)
    args = normal(8, 8), normal(16, 8)
    casts = equations(cast, *args, names=["convert_element_type"])
    types = [(x.outvars[0].aval.dtype, x.outvars[0].aval.shape) for x in casts]
    assert types.count((jnp.float16, (16, 8))) == 2  # x, and the result of the norm
