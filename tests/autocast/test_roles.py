"""Parameters and data: only what is made of parameters is a part of a layer."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from casting import dtypes, normal
from flax import nnx
from jax import lax

from optax_lossscale import autocast


class P(NamedTuple):
    """Parameters: two matrices, a bias, an offset, a matrix that multiplies nothing."""

    w: Any
    v: Any
    b: Any
    t: Any
    m: Any

    def __call__(self, x):
        return ((x @ self.w + self.b) * 0.5) @ self.v

    def method(self, x):
        return self(x)


PARAMS = P(
    normal(8, 8) / 3,
    normal(8, 8, seed=1) / 3,
    normal(8),
    1000 + normal(8),
    normal(16, 8),
)
X, D = normal(16, 8), normal(8, seed=2)


def dtype_of(f, *args):
    """Returns the dtype that `f(p, *args) * 0.5` is held in, before a product."""
    cast = autocast(lambda p, *args: (f(p, *args) * 0.5) @ p.v)
    return dtypes(cast, *args, names=["mul"])[-1]


def rms(h):
    return h * lax.rsqrt(jnp.square(h).mean(-1, keepdims=True) + 1e-5)


def gated(h):
    return h * jax.nn.sigmoid(h.mean(-1, keepdims=True))


def masked(x):
    return (x > 0).astype(jnp.float32)


def repeated(step, h):
    return lax.scan(lambda h, _: (step(h), None), h, length=2)[0]


DATA = {
    "a mean of the batch plus a product": lambda p, x, d: x.mean(0) + x @ p.w,
    "the last value plus a product": lambda p, x, d: x[:, -1:] + x @ p.w,
    "a vector of data plus a product": lambda p, x, d: x @ p.w + d,
    "a vector that a call subtracted": lambda p, x, d: (
        jax.jit(lambda h, w, d: h @ w + d)(jax.jit(jnp.subtract)(x, d), p.w, d)
    ),
    "known positions plus a product": lambda p, x, d: x @ p.w + jnp.arange(8.0),
    "a product times a vector of data": lambda p, x, d: (x @ p.w) * d,
    "a product times a column of data": lambda p, x, d: (x @ p.w) * x[:, :1],
    "a norm times data": lambda p, x, d: rms(x @ p.w) * d,
    "a norm plus data": lambda p, x, d: rms(x @ p.w) * p.b + d,
    "a norm plus a table of parameters":
        lambda p, x, d: (rms((x @ p.w).reshape(2, 8, 8)) * p.b + p.v).reshape(16, 8),
    "an offset of data by a parameter": lambda p, x, d: (x - p.t) @ p.w + p.t,
    "an offset in a call":
        lambda p, x, d: jax.jit(lambda x, t: jnp.abs(x - t))(x, p.t) @ p.w + p.t,
    "an offset through a loop":
        lambda p, x, d: lax.scan(lambda _, x: (None, x - p.t), None, x)[1] @ p.w + p.t,
    "what is made of an offset of data": lambda p, x, d: (x - p.t) @ p.w + 2 * p.t,
    "a parameter that another one takes to data":
        lambda p, x, d: (x - p.t * p.b) @ p.w + p.b,
    "a gate of its own mean": lambda p, x, d: gated(x @ p.w) * p.b + p.b,
    "an envelope of its own squares": lambda p, x, d: (
        (lambda h: h * jnp.exp(-jnp.square(h).sum(-1, keepdims=True)))(x @ p.w)
    ),
    "a mask times a million": lambda p, x, d: x @ p.w * (masked(x) * 100 * 100 * 100),
    "a mask plus a tiny number": lambda p, x, d: x @ p.w * (masked(x) + 1e-8),
    "a mask of two large numbers": lambda p, x, d: x @ p.w * jnp.where(x > 0, 1e6, 1.0),
    "a decay of data in a loop": lambda p, x, d: repeated(lambda h: h * d, x @ p.w),
    "a learned decay in a loop": lambda p, x, d: repeated(lambda h: h * p.b, x @ p.w),
    "one learned decay in a loop":
        lambda p, x, d: repeated(lambda h: h * p.b[0], x @ p.w),
    "a learned decay in a call in a loop":
        lambda p, x, d: repeated(lambda h: jax.jit(jnp.multiply)(h, p.b), x @ p.w),
    "a step size of data":
        lambda p, x, d: repeated(lambda h: h + x[:, :1] * (x @ p.w), x @ p.w),
}  # fmt: skip
PARTS = {
    "a bias that an L2 term reads first":
        lambda p, x, d: [x.mean() + jnp.sum(p.b**2), x @ p.w + p.b][1],
    "a bias that is found finite first":
        lambda p, x, d: jnp.where(jnp.isfinite(p.b).all(), x @ p.w + p.b, 0),
    "a bias and its distance to an offset": lambda p, x, d: (
        [(x - p.t).mean() + jnp.sum((p.b - p.t) ** 2), x @ p.w + p.b][1]
    ),
    "a bias of parameters and numbers":
        lambda p, x, d: x @ p.w + jnp.where(jnp.arange(8) < 4, p.b * p.t, 0),
    "a bias behind a barrier with data":
        lambda p, x, d: (lambda p, x: x @ p.w + p.b)(*lax.optimization_barrier((p, x))),
    "a bias in calls of a call": lambda p, x, d: (
        jax.jit(lambda p, x: jax.checkpoint(lambda p, x: x @ p.w + p.b)(p, x))(p, x)
    ),
    "biases of stacked layers":
        lambda p, x, d: lax.scan(lambda h, b: (h @ p.w + b, None), x @ p.w, p.m)[0],
    "a gain of a norm in a loop":
        lambda p, x, d: repeated(lambda h: rms(h) * p.b, x @ p.w),
    "one number after a product in a loop":
        lambda p, x, d: repeated(lambda h: h + jax.nn.relu(h @ p.w) * p.b[0], x @ p.w),
    "a mask that is scaled": lambda p, x, d: x @ p.w * ((1 - masked(x)) / 0.9),
    "a mask that is selected": lambda p, x, d: x @ p.w * jnp.where(x > 0, 1.0, 0.5),
}  # fmt: skip


@pytest.mark.parametrize("f", DATA.values(), ids=DATA)
def test_data_never_gives_way(f):
    assert dtype_of(f, PARAMS, X, D) == "float32"


@pytest.mark.parametrize("f", PARTS.values(), ids=PARTS)
def test_parameters_give_way(f):
    assert dtype_of(f, PARAMS, X, D) == "float16"


@pytest.mark.parametrize("first", ["plain", "data"])
def test_the_order_of_two_calls_decides_nothing(first):
    helper = jax.jit(lambda h, w, b: h @ w + b)
    plain = jax.jit(lambda p, x, d: helper(x, p.w, p.b))
    data = jax.jit(lambda p, x, d: helper(x, p.w, d))

    def f(p, x, d):
        calls = [("plain", plain), ("data", data)][:: 1 if first == "plain" else -1]
        found = {name: (call(p, x, d) * 0.5) @ p.v for name, call in calls}
        return found["plain"], found["data"]

    found = dtypes(autocast(f), PARAMS, X, D, names=["mul"])
    wanted = {"plain": "float16", "data": "float32"}
    assert found == [wanted[first], *(wanted[x] for x in wanted if x != first)]


def apply(p, x):
    return p(x)


class Model(nnx.Module):
    def __init__(self):
        self.w, self.b = nnx.Param(PARAMS.w), nnx.Param(PARAMS.b)

    def __call__(self, x):
        return ((x @ self.w[...] + self.b[...]) * 0.5) @ self.w[...]

    method = __call__


WAYS = {
    "a function of parameters": (lambda: apply, (PARAMS, X), "float16"),
    "parameters after what is no array": (
        lambda: lambda static, p, x: apply(p, x), (None, PARAMS, X), "float16"),
    "a model": (lambda: PARAMS, (X,), "float16"),
    "a method": (lambda: PARAMS.method, (X,), "float16"),
    "a partial": (lambda: functools.partial(apply, PARAMS), (X,), "float16"),
    "a partial of data": (
        lambda: functools.partial(lambda p, *, x: p(x), x=X), (PARAMS,), "float16"),
    "a partial of a method": (
        lambda: functools.partial(PARAMS.method), (X,), "float16"),
    "a module": (Model, (X,), "float16"),
    "a method of a module": (lambda: Model().method, (X,), "float16"),
    "a module that comes second": (lambda: lambda x, m: m(x), (X, Model()), "float16"),
    "parameters that come second": (lambda: lambda x, p: p(x), (X, PARAMS), "float32"),
    "parameters that it closes over": (lambda: lambda x: PARAMS(x), (X,), "float32"),
}  # fmt: skip


@pytest.mark.parametrize(("make", "args", "dtype"), WAYS.values(), ids=WAYS)
def test_whose_arrays_are_the_parameters(make, args, dtype):
    assert dtypes(autocast(make()), *args, names=["mul"])[0] == dtype


def test_a_batch_before_a_module_is_data():
    f = lambda x, m: ((x.mean(0) + x @ m.w[...]) * 0.5) @ m.w[...]  # noqa: E731
    assert dtypes(autocast(f), X, Model(), names=["mul"])[-1] == "float32"


class Counts(Model):
    def __call__(self, x):
        self.b[...] += 1
        return super().__call__(x)


def test_a_module_that_is_called_may_change():
    model = Counts()
    autocast(model)(X)
    np.testing.assert_array_equal(model.b[...], PARAMS.b + 1)


def reads(u, p):
    """Makes that a result is not read in float32 alone."""
    return 0 * jnp.mean(u * p.v[0])


def mean_of_the_batch(p, x):
    u = (x - 1000) @ p.w * 0.01 + x.mean(0)
    return jnp.mean((u - x.mean(0)) ** 2) * 1e4 + reads(u, p)


def norm_plus_a_table(p, x, t):
    u = rms(x @ p.w) * p.b + t
    return jnp.mean((u - t) ** 2) + reads(u, p)


def envelope(p, x):
    h = 4 * x @ p.w
    u = h * jnp.exp(-jnp.square(h).sum(-1, keepdims=True))
    return jnp.mean(jnp.log(jnp.abs(u) + 1e-30)) + jnp.mean(jnp.tanh(u @ p.v))


def decay(p, x, a):
    h, y = x @ p.w + 4, x @ p.w
    step = lambda h, _: (a * h + (1 - a) * y, None)  # noqa: E731
    return jnp.mean((lax.scan(step, h, length=500)[0] - y) ** 2)


def rollout(p, x, mean, deviation):
    for _ in range(2):
        z = (x - mean) * (1 / deviation)
        x = x + (jnp.tanh(z @ p.w) @ p.v) * deviation
    return jnp.mean(((x - mean) * (1 / deviation)) ** 2)


def mask_of_a_million(p, x):
    u = (x @ p.w) * (masked(x) * 100 * 100 * 100)
    return jnp.mean(jnp.abs(u * p.v[1])) + jnp.mean(jnp.abs(u + p.v[0]))


IN_VALUE = {
    mean_of_the_batch: (1000 + X,),
    norm_plus_a_table: (X, 1000 + normal(16, 8)),
    envelope: (X,),
    decay: (X, np.full(8, 0.999, np.float32)),
    rollout: (
        1e6 + 1e5 * X, np.full(8, 1e6, np.float32), np.full(8, 1e5, np.float32)
    ),
    mask_of_a_million: (X,),
}  # fmt: skip


@pytest.mark.parametrize("f", IN_VALUE, ids=lambda f: f.__name__)
def test_data_is_right_in_value(f):
    args = PARAMS, *IN_VALUE[f]
    assert float(jax.jit(autocast(f))(*args)) == pytest.approx(
        float(jax.jit(f)(*args)), rel=0.02
    )
