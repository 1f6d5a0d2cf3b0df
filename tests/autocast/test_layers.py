"""What wins and what gives way: the dtype of a result, for each clause of the rule."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from casting import dtypes, equations, normal
from jax import export, lax

from optax_lossscale import autocast
from optax_lossscale._autocast.layers import Layers


class P(NamedTuple):
    """Parameters: a matrix, a vector, and a matrix that is no factor of a product."""

    w: Any
    b: Any
    m: Any


PARAMS, X = P(normal(8, 8), normal(8), normal(8, 8, seed=1)), normal(16, 8)


def dtype_of(f):
    """Returns the dtype that the result of a function is held in, before a product."""
    cast = autocast(lambda p, x: (f(p, x) * 0.5) @ p.w)
    return dtypes(cast, PARAMS, X, names=["mul"])[-1]


def instance(p, h, like=None, gain=None, bias=None):
    """Returns a norm with gain and bias, with the statistics of `h` or of another."""
    like = h if like is None else like
    gain, bias = 1 + p.b if gain is None else gain, p.b if bias is None else bias
    mean, size = like.mean(-1, keepdims=True), like.var(-1, keepdims=True)
    return (h - mean) * lax.rsqrt(size + 1e-5) * gain + bias


def gain_first(p, h):
    """The same, as Flax and Haiku multiply."""
    factor = lax.rsqrt(h.var(-1, keepdims=True) + 1e-5) * (1 + p.b)
    return (h - h.mean(-1, keepdims=True)) * factor + p.b


def root_mean_square(p, h):
    return h * lax.rsqrt(jnp.square(h).mean(-1, keepdims=True)) * p.b


def by_einsum(p, h):
    """The same, as MaxText multiplies."""
    h = h * lax.rsqrt(jnp.square(h).mean(-1, keepdims=True) + 1e-6)
    return jnp.einsum("...k,k->...k", h, p.b)


def rows(h):
    """Returns the squares of each row, added up."""
    return jnp.square(h).sum(-1, keepdims=True)


def from_moments(h):
    """Returns a norm whose statistics two calls make."""
    moments = jax.jit(lambda h: (h.mean(-1, keepdims=True), rows(h) / 8))(h)
    scale = jax.jit(lambda mean, square: lax.rsqrt(square - mean**2 + 1e-5))(*moments)
    return (h - moments[0]) * scale


def of_product(f):
    return lambda p, x: f(x @ p.w)


def helped(p, h):
    return jax.jit(lambda w, h, b: h @ w + b)(p.w, h, p.b)


def pairs(h):
    return h.reshape(2, 8, 8)


@pytest.mark.parametrize(
    ("f", "dtype"),
    [
        (lambda p, x: x + x @ p.w, "float32"),
        (lambda p, x: 2 * x + x @ p.w, "float32"),
        (lambda p, x: jnp.where(x > 0, x, x @ p.w) + x @ p.w, "float32"),
        (lambda p, x: jnp.broadcast_to(x[0], x.shape) + x[0] * (x @ p.w), "float32"),
        (lambda p, x: jnp.concatenate([x[:8], (x @ p.w)[8:]]) + x @ p.w, "float32"),
        (lambda p, x: x @ p.w + p.b, "float16"),
        (lambda p, x: x @ p.w + jnp.broadcast_to(p.b, (1, 8)), "float16"),
        (lambda p, x: x @ p.w + 3.0, "float16"),
        (lambda p, x: x @ p.w + jnp.sin(x), "float32"),
        (lambda p, x: x @ p.w + (1 + jnp.tanh(x)) / 2, "float32"),
        (lambda p, x: x @ p.w + 3 * jnp.sin(x), "float32"),
        (lambda p, x: x @ p.w + p.b * jnp.sin(x), "float32"),
        (lambda p, x: x @ p.w + p.w[jnp.arange(16) % 8], "float32"),
        (lambda p, x: x @ p.w + 16 * p.w[jnp.arange(16) % 8], "float32"),
        (lambda p, x: x @ p.w + x[:, :1] * p.b, "float32"),
        (lambda p, x: x @ p.w + jnp.outer(x[:, 0], p.b), "float32"),
        (lambda p, x: x @ p.w + (jnp.sum(x, -1, keepdims=True) + p.b), "float32"),
        (lambda p, x: x @ p.w + (x @ p.w) @ p.w, "float16"),
        # A bias has one dimension, follows a product, and meets data in layers alone.
        (lambda p, x: pairs(2 * (x @ p.w) + x @ p.w) + p.b, "float16"),
        (lambda p, x: jax.nn.relu(x @ p.w) + p.b, "float32"),
        (lambda p, x: x @ p.w[:, :1] + p.b, "float32"),
        (lambda p, x: (pairs(x @ p.w) + p.m).reshape(16, 8), "float32"),
        (lambda p, x: jax.nn.relu(x @ p.w + p.b) @ p.w + p.b, "float16"),
        (lambda p, x: (x + p.b) @ p.w + p.b, "float32"),
        (lambda p, x: helped(p, helped(p, x)), "float16"),
        (lambda p, x: helped(p, x + p.b), "float32"),
        (lambda p, x: jax.jit(jnp.subtract)(x, p.b) @ p.w + p.b, "float32"),
        (lambda p, x: x[:1] @ p.w + p.b, "float16"),
        (lambda p, x: x[0] @ p.w + p.b, "float16"),
        # A gain belongs to a norm, or is one number. LayerScale promotes.
        (lambda p, x: jax.nn.relu(x @ p.w) * p.b, "float32"),
        (lambda p, x: (pairs(x @ p.w) * p.m).reshape(16, 8), "float32"),
        (lambda p, x: x @ p.w * p.b[0], "float16"),
        (lambda p, x: x @ p.w * jnp.exp(p.b).sum(), "float16"),
        (lambda p, x: x @ p.w * p.b[:1], "float32"),
        (lambda p, x: x @ p.w * x[0, 0], "float32"),
        # prelu: one slope, or one for each channel.
        (lambda p, x: jnp.where(x @ p.w > 0, x @ p.w, p.b[0] * (x @ p.w)), "float16"),
        (lambda p, x: jnp.where(x @ p.w > 0, x @ p.w, p.b * (x @ p.w)), "float32"),
        # A mask has two known numbers, and is a factor.
        (lambda p, x: x * (x @ p.w), "float32"),
        (lambda p, x: (1 - (x > 0).astype("float32")) * (x @ p.w), "float16"),
        (lambda p, x: (x > 0).astype("float32") * (x @ p.w[:, :1]), "float16"),
        (lambda p, x: x @ p.w + (x > 0).astype("float32"), "float32"),
        (lambda p, x: x @ p.w * x.astype("int8").astype("float32"), "float32"),
        # A norm is as wide as its operand, if the statistics are its own.
        (lambda p, x: instance(p, x @ p.w), "float16"),
        (lambda p, x: instance(p, x @ p.w + p.b), "float16"),
        (lambda p, x: instance(p, x @ p.w + x), "float32"),
        (lambda p, x: instance(p, x @ p.w, like=x), "float32"),
        (lambda p, x: (lambda h: h * jnp.exp(h))(x @ p.w), "float32"),
        (lambda p, x: from_moments(x @ p.w), "float16"),
        # A norm undoes the size of its operand.
        (of_product(lambda h: h * (1 / jnp.sqrt(rows(h)))), "float16"),
        (of_product(lambda h: h * rows(h) ** -0.5), "float16"),
        (of_product(lambda h: h * (1 / jnp.abs(h).sum(-1, keepdims=True))), "float16"),
        (of_product(lambda h: h * h.mean(-1, keepdims=True)), "float32"),
        (of_product(lambda h: h * (h.mean(0) * h.std(0))), "float32"),
        (of_product(lambda h: h * rows(h)), "float32"),
        (of_product(lambda h: h * (1 / rows(h))), "float32"),
        (of_product(lambda h: h * (jnp.sqrt(rows(h)) * rows(h) ** -0.5)), "float32"),
        (lambda p, x: (x @ p.w) * ((x @ p.w).mean(0) * p.b), "float32"),
        (lambda p, x: instance(p, x @ p.w, gain=x), "float32"),
        (lambda p, x: instance(p, x @ p.w, bias=x), "float32"),
        (lambda p, x: instance(p, (x + p.b) @ p.w, bias=p.b), "float32"),
        (lambda p, x: gain_first(p, jax.nn.relu(x @ p.w)), "float16"),
        (lambda p, x: gain_first(p, x), "float32"),
        (lambda p, x: root_mean_square(p, x @ p.w), "float16"),
        (lambda p, x: root_mean_square(p, x), "float32"),
        # A norm has one gain.
        (lambda p, x: root_mean_square(p, x @ p.w) * p.b, "float32"),
        (lambda p, x: root_mean_square(p, x @ p.w) * p.b[0], "float16"),
        (lambda p, x: instance(p, x @ p.w) * p.b, "float32"),
        (lambda p, x: instance(p, instance(p, x @ p.w)), "float16"),
        (lambda p, x: root_mean_square(p, root_mean_square(p, x @ p.w)), "float16"),
        (lambda p, x: root_mean_square(p, (x @ p.w + p.b) * p.b[0]), "float16"),
        (lambda p, x: gain_first(p, root_mean_square(p, x @ p.w)), "float16"),
        (lambda p, x: gain_first(p, x @ p.w) * p.b, "float32"),
        (lambda p, x: jnp.tanh(instance(p, x @ p.w)) * p.b, "float32"),
        # einsum multiplies: it adds up nothing.
        (lambda p, x: by_einsum(p, x @ p.w), "float16"),
        (lambda p, x: by_einsum(p, x), "float32"),
        (lambda p, x: jnp.einsum("...k,k->...k", x @ p.w, p.b), "float32"),
        (lambda p, x: jnp.einsum("bk,bk->bk", x @ p.w, 0.5 * (x @ p.w)), "float16"),
        (lambda p, x: jnp.einsum("bk,->bk", x @ p.w, p.b[0]), "float16"),
        (lambda p, x: jnp.einsum("bk,b->bk", x @ p.w, x[:, 0]), "float32"),
        (lambda p, x: x @ p.w - (x @ p.w).mean(0), "float32"),
        # A filled array is an array in a sum; a function of half precision gives way.
        (lambda p, x: x @ p.w + jnp.full((16, 8), 2.0), "float32"),
        (lambda p, x: x @ p.w - jnp.full((16, 8), 2.0), "float32"),
        (lambda p, x: x @ p.w - jnp.zeros((16, 8)), "float16"),
        (lambda p, x: x @ p.w * jnp.full((16, 8), 2.0), "float16"),
        (lambda p, x: jnp.tanh(x @ p.w) + x @ p.w, "float16"),
    ],
)  # fmt: skip
def test_what_wins_and_what_gives_way(f, dtype):
    assert dtype_of(f) == dtype


def test_a_norm_is_rounded_once():
    cast = autocast(lambda p, x: instance(p, x @ p.w) @ p.w)
    casts = equations(cast, PARAMS, X, names=["convert_element_type"])
    types = [(x.outvars[0].aval.dtype, x.outvars[0].aval.shape) for x in casts]
    assert types.count((jnp.float16, (16, 8))) == 2  # x, and the result of the norm


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "complex64", "int32"])
@jax.numpy_dtype_promotion("standard")
def test_a_norm_of_another_dtype_stays_as_it_is(dtype):
    def f(p, x):
        h = (x @ p.w).astype(dtype)
        return h * (h * jnp.conj(h)).sum(-1, keepdims=True)

    cast = jax.make_jaxpr(autocast(f))(PARAMS, X)
    assert [x.dtype for x in cast.out_avals] == [dtype]
    assert dtypes(autocast(f), PARAMS, X, names=["mul"]) == [dtype, dtype]


def averages(n, decay):
    """Lowers an average that is unrolled over n steps: in float32, by `autocast`."""

    def f(p, x):
        u, a = x @ p.w, jax.nn.sigmoid(decay(p))
        h = u[0]
        for y in u:
            h = a * h + (1 - a) * y
        return jnp.mean((h @ p.w) ** 2)

    x = jnp.ones((n, 8))
    return [jax.jit(jax.value_and_grad(g)).lower(PARAMS, x) for g in (f, autocast(f))]


def lines(compiled):
    return compiled.as_text().count("\n")


@pytest.mark.parametrize("decay", [lambda p: p.b, lambda p: p.b[0]])
def test_an_average_that_is_unrolled_grows_with_its_steps(decay):
    few, more, many = (
        np.array(list(map(lines, averages(n, decay)))) for n in (4, 8, 12)
    )
    assert list(many - more) == list(more - few)  # As many lines for each step.
    plain, cast = more - few
    assert cast < 1.7 * plain


@pytest.mark.parametrize(
    ("n", "times"), [(12, 1.4), pytest.param(80, 1.25, marks=pytest.mark.exhaustive)]
)
def test_an_average_that_is_unrolled_compiles_to_little_more_than_in_float32(n, times):
    plain, cast = (lines(x.compile()) for x in averages(n, lambda p: p.b))
    assert cast < times * plain


@pytest.mark.exhaustive
@pytest.mark.parametrize("decay", [0.9, np.full(16, 0.9, np.float32)])
def test_an_average_of_batches_compiles_to_a_tenth_more_at_most(decay):
    def f(p, x):
        inputs = (x @ p["w"]).reshape(24, 8, 16)
        h = inputs[0]
        for y in inputs:
            h = p["decay"] * h + (1 - p["decay"]) * y
        return jnp.mean(h**2)

    params = {"w": jnp.eye(16), "decay": jnp.asarray(decay, jnp.float32)}
    x = jnp.ones((24 * 8, 16))
    plain, cast = (
        lines(jax.jit(jax.value_and_grad(g)).lower(params, x).compile())
        for g in (f, autocast(f))
    )
    assert cast < 1.1 * plain


def test_the_gradient_of_a_gain_without_dimensions_is_a_sum_in_float32():
    def f(a, x, w):
        return jnp.mean(((x @ w) * a) @ w)

    x, w = jnp.ones((4096, 2)), jnp.eye(2)
    grad = jax.grad(lambda a: 2.0**15 * autocast(f)(a, x, w))(jnp.float32(8))
    assert float(grad) == 2.0**15
    sums = equations(jax.grad(autocast(f)), jnp.float32(8), x, w, names=["reduce_sum"])
    assert {x.outvars[0].aval.dtype for x in sums} == {jnp.dtype("float32")}


def test_layers_of_a_symbolic_batch():
    (b,) = export.symbolic_shape("b")
    x = jax.ShapeDtypeStruct((b, 8), jnp.float32)
    for f in (instance, gain_first, root_mean_square):
        cast = autocast(lambda p, x, f=f: f(p, p.b + x @ p.w) @ p.w)
        assert dtypes(cast, PARAMS, x) == ["float16", "float16"]


def nested(depth, f):
    """Returns a function in as many calls, each of which scales its argument."""
    for _ in range(depth):
        f = jax.jit(lambda h, f=f: f(2 * h))
    return f


def test_calls_in_calls_are_looked_at_once(monkeypatch):
    """The statistic of a norm is found through all calls, each followed once."""
    found, follow = [], Layers._note_made_of

    def counted(layers, step, *about):
        found.append(step)
        follow(layers, step, *about)

    monkeypatch.setattr(Layers, "_note_made_of", counted)

    def looked_at(depth):
        found.clear()
        size = nested(depth, lambda h: jnp.square(h).mean(-1, keepdims=True))
        norm = lambda p, x: (lambda h: h * lax.rsqrt(size(h)) * p.b)(x @ p.w)  # noqa: E731
        assert dtype_of(norm) == "float16"
        return len(found)

    counts = {depth: looked_at(depth) for depth in (10, 20, 40)}
    assert counts[40] - counts[20] == 2 * (counts[20] - counts[10])
