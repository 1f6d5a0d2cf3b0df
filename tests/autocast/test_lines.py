"""`float32=`: lines that stay in float32, and what the diagnostics say of them."""

import re

import jax
import jax.numpy as jnp
import pytest
from casting import errors, normal, products
from jax import lax
from tracing import line_of

from optax_lossscale import autocast
from optax_lossscale.diagnostics import float32_lines, trace_numerics

X, W = normal(16, 8), normal(8, 8, scale=0.4)


def loss_fn(w, x):
    h = x @ w  # plain
    h, _ = lax.scan(lambda h, _: (jnp.tanh(h @ w), None), h, length=3)  # scan
    h = jax.jit(lambda h: h @ w)(h)  # jit
    h = jax.checkpoint(lambda h: h @ w)(h)  # checkpoint
    return jnp.mean(helper(h, w) ** 2)


def helper(h, w):
    return jax.nn.relu(h) @ w  # helper


MARKS = ["plain", "scan", "jit", "checkpoint", "helper"]


@pytest.mark.parametrize("mark", MARKS)
def test_a_line_and_its_derivative(mark):
    line = f"autocast/test_lines.py:{line_of(mark, __file__)}"
    found = [
        x for kinds in products(autocast(loss_fn, float32=line), W, X) for x in kinds
    ]
    # Forward and backward, but `x` has no gradient; a checkpoint computes it again.
    counts = {"plain": 2}
    assert found.count("float32") == counts.get(mark, 3)
    assert found.count("float16") == len(found) - found.count("float32")


def test_all_lines():
    lines = [f"{__file__}:{line_of(mark, __file__)}" for mark in MARKS]
    cast = autocast(loss_fn, float32=lines)
    with pytest.warns(UserWarning, match="float32= covers all of its products"):
        found = products(cast, W, X)
    assert all(x == {"float32"} for x in found)
    loss = cast(W, X)  # It warns once.
    assert jnp.allclose(loss, loss_fn(W, X), rtol=1e-6)


def test_a_line_that_matches_nothing_warns():
    with pytest.warns(UserWarning, match=r"float32 .* test_lines.py:3"):
        autocast(loss_fn, float32=["test_lines.py:3"])(W, X)
    with pytest.warns(UserWarning, match=r"float32 .* lines.py"):
        autocast(loss_fn, float32=f"lines.py:{line_of('plain', __file__)}")(W, X)


def test_lines_are_added_to_those_of_a_decorated_function():
    first, second = (f"test_lines.py:{line_of(x, __file__)}" for x in MARKS[:2])
    written = autocast(loss_fn, jnp.bfloat16, float32=first)
    found = products(autocast(written, float32=second), W, X)
    assert found == products(autocast(loss_fn, float32=[first, second]), W, X)

    class Model:
        loss = autocast(lambda self, w, x: loss_fn(w, x), float32=first)

    found = products(autocast(Model().loss, float32=second), W, X)
    assert found == products(autocast(loss_fn, float32=[first, second]), W, X)


def forgotten(w, x):
    h = x.astype(jnp.float16) @ w.astype(jnp.float16)  # by hand
    h = jnp.exp(30 * h)  # too large
    return jnp.mean(h.astype(jnp.float32))


@pytest.mark.filterwarnings("ignore:autocast computes nothing")
def test_casts_by_hand_are_named():
    line = f"test_lines.py:{line_of('too large', __file__)}"
    with pytest.warns(UserWarning, match=f"casts nothing: {line}.*remove its casts"):
        assert not jnp.isfinite(autocast(forgotten, float32=line)(W, X))
    place = f"test_lines.py:{line_of('by hand', __file__)}"
    text = f"autocast casts nothing: {place} multiplies float16 by itself"
    assert text in " ".join(str(trace_numerics(autocast(forgotten), W, X)).split())
    with pytest.raises(TypeError, match=f"{place}, in forgotten: remove its casts"):
        float32_lines(autocast(forgotten), W, X)
    assert "by itself" not in str(trace_numerics(forgotten, W, X))
    assert "by itself" not in str(trace_numerics(autocast(loss_fn), W, X))


def test_a_jitted_function_that_ran_before_is_still_autocast():
    jitted, x, w = jax.jit(autocast(overflowing)), 10 * X, 10 * W
    jitted(w, x)
    for _ in range(2):
        message = trace_numerics(jitted, w, x).findings[0].message
        assert f'test_lines.py:{line_of("beyond", __file__)}")' in message


def overflowing(w, x):
    h = x @ w
    h = h @ (5000 * w)  # beyond
    return jnp.mean(jax.nn.softmax(h / 1e5) ** 2)


def poisoned(w, x):
    h = jnp.where(x > 0, 0.0, jnp.nan)  # library
    return jnp.mean((x + h) @ w)


def test_the_diagnostics_name_the_lines_of_the_user():
    x, w = 10 * X, 10 * W
    trace = trace_numerics(autocast(overflowing), w, x)
    line = line_of("beyond", __file__)
    assert f"matrix product at autocast/test_lines.py:{line}, in ov" in str(trace)
    assert trace.computes_in_dtype
    (advised,) = re.findall(r'float32="(.*?)"', trace.findings[0].message)
    mended = autocast(overflowing, float32=advised)
    assert jnp.isfinite(mended(w, x))
    assert abs(trace.float32_loss / float(overflowing(w, x)) - 1) < 1e-4

    # JAX keeps the jaxpr of a library's function, without the lines of its callers.
    trace = trace_numerics(autocast(poisoned), w, x)
    line = line_of("library", __file__)
    assert trace.findings[0].operation.line == line, str(trace)


def test_the_lines_mend_it():
    x, w, line = 10 * X, 10 * W, line_of("beyond", __file__)
    lines = float32_lines(autocast(overflowing), w, x)
    assert lines.verified
    assert line in [x.line for x in lines.lines]
    mended = autocast(overflowing, float32=lines)
    found, wanted = (
        jax.jit(jax.value_and_grad(f))(w, x) for f in (mended, overflowing)
    )
    assert errors(found, wanted) < 0.02
