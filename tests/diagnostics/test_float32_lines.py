"""`float32_lines` proposes the lines that a person would choose, and no other."""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import exhaustive_but
from jax import lax
from tracing import TWO, Casts, by_hand, errors, half, line_of, total

from optax_lossscale import autocast
from optax_lossscale.diagnostics import float32_lines, trace_numerics

CLOSE = 0.01


def normal(*shape, std=1.0):
    rng = np.random.default_rng(sum(shape))
    return jnp.asarray(std * rng.standard_normal(shape), jnp.float32)


def distance(x):
    return jnp.mean(jnp.square(x.astype(jnp.float32) - X))


# `test_trace_effect.py` has programs with one fault. Here are larger ones.
# `cast(x, n)` casts to float32 if the line with the comment `NAME n` is promoted.


def two_faults(cast, w, x):
    """A sum that overflows, in the loss, and a small variance, in jax.checkpoint."""

    @jax.checkpoint
    def layer(x, w):
        x = cast(x @ w * 2.0**-9, 1)
        x = x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)  # two_faults 1
        return cast(x)

    x = layer(cast(x), cast(w))
    many = jnp.square(cast(x, 2) * 64).sum()  # two_faults 2
    return distance(x) + jnp.log(cast(many, 2).astype(jnp.float32))


def two_in_a_scan(cast, w, x):
    def body(x, w):
        x = cast(jnp.tanh(x @ w) * 3000)
        size = jnp.square(cast(x, 1)).sum(-1, keepdims=True)  # two_in_a_scan 1
        x = cast(x, 2) / jnp.sqrt(cast(size, 2))  # two_in_a_scan 2
        x = cast(cast(x), 3) + 3000  # two_in_a_scan 3
        x = cast(x, 4) - 3000  # two_in_a_scan 4
        return cast(x), None

    x, _ = lax.scan(body, cast(x), cast(jnp.stack([w, w.T])))
    return distance(x)


def three_faults(cast, w, x):
    x, w = cast(x), cast(w)
    size = jnp.square(cast(x * 200, 1)).mean(-1, keepdims=True)  # three_faults 1
    y = cast(x * 200, 2) / jnp.sqrt(cast(size, 2))  # three_faults 2
    ratio = jnp.exp(cast(cast(y) @ w * 10, 3))  # three_faults 3
    ratio = jnp.log(cast(ratio, 4) + 1)  # three_faults 4
    z = cast(cast(ratio), 5) + 2000  # three_faults 5
    z = cast(z, 6) - 2000  # three_faults 6
    return distance(cast(z))


X, W = normal(8, 6), normal(6, 6, std=0.4)
# The lines that a person would choose.
CASES = {
    two_faults: [1, 2],
    two_in_a_scan: [1, 2, 3, 4],
    three_faults: [1, 2, 3, 4, 5, 6],
}


@pytest.mark.parametrize("loss_fn", exhaustive_but(CASES, [two_faults]))
def test_the_lines_that_a_person_would_choose(loss_fn):
    found = float32_lines(partial(loss_fn, Casts()), W, X, scale=2.0**4)
    chosen = CASES[loss_fn]
    marks = {line_of(f"{loss_fn.__name__} {n}", __file__): n for n in chosen}
    assert [marks.get(x.line, str(x)) for x in found.lines] == chosen, str(found)
    assert found.verified
    assert max(found.loss_error, found.gradient_error) < CLOSE
    for x in found.lines:
        assert x.file == __file__
        assert x.function.startswith(loss_fn.__name__)
    # The lines are right, and none can be left out.
    truth = by_hand(partial(loss_fn, Casts(jnp.float32)), W, X)(1.0)
    for promoted in (chosen, *([n for n in chosen if n != left] for left in chosen)):
        run = by_hand(partial(loss_fn, Casts(repaired=promoted)), W, X)
        agrees = np.max(errors(run(2.0**4), truth)) < CLOSE
        assert agrees == (promoted == chosen), promoted


def two_products(w, x):
    h = x @ (w * 1e5)  # two_products 1
    h = jnp.tanh(h * 1e-6) @ w
    h = (h * 300) @ (h * 300).T  # two_products 2
    return jnp.mean(jax.nn.softmax(h / 1e5)[:, 0] * x[:, 0])


@pytest.mark.parametrize("given", exhaustive_but([False, True], [True]))
def test_lines_of_autocast_are_verified_by_autocast(given):
    x, w = X * 10, W
    marks = [line_of(f"two_products {n}", __file__) for n in (1, 2)]
    names = [f"{Path(__file__).name}:{line}" for line in marks]
    # Lines that are in float32 already are proposed again.
    found = float32_lines(autocast(two_products, float32=names * given), w, x)
    assert [x.line for x in found.lines] == marks, str(found)
    assert found.verified
    truth = by_hand(two_products, w, x)(1.0)
    for lines in (names, names[:1], names[1:]):
        run = by_hand(autocast(two_products, float32=lines), w, x)
        found_errors = errors(run(found.scale), truth)
        assert (np.max(found_errors) < CLOSE) == (lines == names), lines
        if lines == names:
            expected = found.loss_error, found.gradient_error
            assert np.allclose(found_errors, expected, rtol=0.1, atol=1e-5)


def test_the_state_of_a_loop():
    def loss_fn(cast, w, x):
        def step(h, _):
            return h + 1e-3 * jnp.tanh(h @ cast(w)), None

        return total(jnp.square(lax.scan(step, cast(x, 1), length=300)[0]))

    found = float32_lines(partial(loss_fn, Casts()), jnp.eye(4), normal(3, 4, std=4))
    assert found.verified
    fixes = " ".join(x.fix for x in found.lines)
    assert "keep the state of the loop in float32" in fixes, str(found)


def test_a_scale_that_float32_can_bear():
    """Where all is zero in float16, nothing overflows at any scale."""

    def loss_fn(w, x, size):
        h = (x @ w) * size  # all are zero
        return jnp.mean((h @ w / size) ** 2)

    args = W, X, jnp.float32(1e-8)
    found = float32_lines(autocast(loss_fn), *args)
    assert found.verified, str(found)
    mended = by_hand(autocast(loss_fn, float32=found), *args)
    truth = by_hand(loss_fn, *args)(1.0)
    assert np.max(errors(mended(found.scale), truth)) < CLOSE


@pytest.mark.parametrize("scale", exhaustive_but([1.0, None], []))
def test_a_healthy_program_needs_no_line(scale):
    def loss_fn(w, cast=half):
        scores = jnp.where(X[:, :1] > X[:, 0], cast(X) @ cast(w) @ cast(X).T, -6e4)
        return distance(jax.nn.softmax(scores) @ cast(X))

    found = float32_lines(loss_fn, W, scale=scale)
    assert (found.lines, found.verified) == ([], True)
    assert "No line needs float32" in str(found)
    assert found.scale == (scale or trace_numerics(loss_fn, W).largest_scale)
    truth = by_hand(partial(loss_fn, cast=lambda x: x), W)(1.0)
    assert max(errors(by_hand(loss_fn, W)(found.scale), truth)) < CLOSE


def test_it_says_why_no_line_helps():
    def loss_fn(w):
        return total(jnp.sqrt(jnp.maximum(half(w), 0)))  # sqrt

    found = float32_lines(loss_fn, jnp.array([0.0, 2.0]))
    assert (found.lines, found.verified) == ([], False)
    assert f"{Path(__file__).name}:{line_of('sqrt', __file__)}" in found.message
    assert "float32 too" in found.message


def test_what_is_printed():
    def loss_fn(w):
        return total(jnp.exp(half(w) * 7.0) / 4000)  # printed

    found = float32_lines(loss_fn, TWO, scale=1.0)
    (line,) = found.lines
    assert line.line == line_of("printed", __file__)
    assert (found.scale, found.verified) == (1.0, True)
    text = str(found)
    assert "return total(jnp.exp(half(w) * 7.0) / 4000)  # printed" in text
    assert "cast back with .astype(jnp.float16)" in " ".join(text.split())
    assert "2^20.2" in text  # exp(14)
    assert max(map(len, text.splitlines())) <= 79


@pytest.mark.parametrize(
    ("error", "match", "options"),
    [
        (ValueError, "state or scale", {"scale": 1.0, "state": TWO}),
        (ValueError, "scale", {"scale": 0.0}),
        (ValueError, "tolerance", {"tolerance": 2.0}),
        (ValueError, "dtype", {"dtype": "float32"}),
        (TypeError, "has_aux", {"has_aux": 1}),
    ],
)
def test_wrong_arguments(error, match, options):
    with pytest.raises(error, match=match):
        float32_lines(lambda w: total(half(w)), TWO, **options)


def test_under_jit():
    with pytest.raises(TypeError, match="float32_lines"):
        jax.jit(lambda w: float32_lines(lambda w: total(half(w)), w).scale)(TWO)


def test_tolerance_and_other_dtypes():
    def loss_fn(w):
        return jnp.mean(w.astype("bfloat16").astype(jnp.float32))  # cast

    params = jnp.full(3, 1 + 2.0**-8 * 1.1)
    with pytest.raises(ValueError, match="bfloat16"):
        float32_lines(loss_fn, params)
    assert float32_lines(loss_fn, params, dtype="bfloat16").lines == []
    strict = float32_lines(loss_fn, params, dtype="bfloat16", tolerance=1e-3)
    assert [x.line for x in strict.lines] == [line_of("cast", __file__)]
    assert strict.loss_error < 1e-3
