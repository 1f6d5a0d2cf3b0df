"""`float32_lines` proposes the lines that a person would choose, and no other."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arithmetic import TWO, by_hand, half, relative_errors, total
from faults import W, X
from helpers import exhaustive_but
from tracing import line_of

from optax_lossscale import autocast
from optax_lossscale.diagnostics import float32_lines, trace_numerics
from optax_lossscale.diagnostics._trace import proposal
from optax_lossscale.diagnostics._trace.measure import statistics

CLOSE = 0.01
HERE = Path(__file__).name


def error_with(lines, loss_fn, *args, scale):
    """Returns the larger error with lines in float32: of loss and gradients."""
    run = by_hand(autocast(loss_fn, float32=lines), *args)
    return np.max(relative_errors(run(scale), by_hand(loss_fn, *args)(1.0)))


def two_products(w, x):
    h = x @ (w * 1e5)  # two_products 1
    h = jnp.tanh(h * 1e-6) @ w
    h = (h * 300) @ (h * 300).T  # two_products 2
    return jnp.mean(jax.nn.softmax(h / 1e5)[:, 0] * x[:, 0])


@pytest.mark.parametrize("given", exhaustive_but([False, True], [True]))
def test_lines_are_verified_by_autocast(given):
    x, w = X * 10, W
    marks = [line_of(f"two_products {n}", __file__) for n in (1, 2)]
    names = [f"{HERE}:{line}" for line in marks]
    # Lines that are in float32 already are proposed again.
    found = float32_lines(autocast(two_products, float32=names * given), w, x)
    assert [x.line for x in found.lines] == marks, str(found)
    assert found.verified
    assert all(x.function == "two_products" for x in found.lines)
    exact = by_hand(two_products, w, x)(1.0)
    for lines in (names, names[:1], names[1:]):
        run = by_hand(autocast(two_products, float32=lines), w, x)
        errors = relative_errors(run(found.scale), exact)
        assert (max(errors) < CLOSE) == (lines == names), lines
        if lines == names:
            reported = found.loss_error, found.gradient_error
            assert np.allclose(errors, reported, rtol=0.1, atol=1e-5)
    text = str(found)
    assert "h = (h * 300) @ (h * 300).T  # two_products 2" in text
    assert "it reads numbers up to" in text or "float16 ends at 2^16" in text
    assert max(map(len, text.splitlines())) <= 79


def in_a_loop(w, x):
    @jax.checkpoint
    def body(h, _):
        h = (h @ w * 3e4) @ w  # in_a_loop
        return jnp.tanh(h / 3e4), None

    return jnp.mean(jnp.square(jax.lax.scan(body, x, length=3)[0] - X))


@pytest.mark.filterwarnings("ignore:autocast computes nothing")
@pytest.mark.exhaustive
def test_a_line_in_a_loop_and_a_checkpoint():
    found = float32_lines(autocast(in_a_loop), W, 3 * X, scale=2.0**4)
    assert [x.line for x in found.lines] == [line_of("in_a_loop", __file__)]
    assert found.verified
    assert error_with(found, in_a_loop, W, 3 * X, scale=2.0**4) < CLOSE


@pytest.mark.exhaustive
def test_a_scale_that_float32_can_bear():
    """Where all is zero in float16, nothing overflows at any scale."""

    def loss_fn(w, x, size):
        h = (x @ w) * size  # all are zero
        return jnp.mean((h @ w / size) ** 2)

    args = W, X, jnp.float32(1e-8)
    found = float32_lines(autocast(loss_fn), *args)
    assert found.verified, str(found)
    assert error_with(found, loss_fn, *args, scale=found.scale) < CLOSE


@pytest.mark.parametrize("scale", exhaustive_but([1.0, None], [None]))
def test_a_healthy_program_needs_no_line(scale):
    def loss_fn(w):
        scores = jnp.where(X[:, :1] > X[:, 0], X @ w @ X.T, -6e4)
        return jnp.mean(jnp.square(jax.nn.softmax(scores) @ X - X))

    found = float32_lines(autocast(loss_fn), W, scale=scale)
    assert (found.lines, found.verified) == ([], True)
    assert "No line needs float32 at the loss scale" in str(found)
    assert ("the largest that fits" in str(found)) == (scale is None)
    assert found.scale == (scale or trace_numerics(autocast(loss_fn), W).largest_scale)
    assert error_with([], loss_fn, W, scale=found.scale) < CLOSE


@pytest.mark.parametrize(
    ("real", "wide"),
    [
        (np.float16([[0, 1], [2, 3]]), np.float32([[1e-8, 1.001], [2.001, 3]])),
        (np.array([3, 4], jnp.bfloat16), np.float32([3.01, 4.01])),
        (np.complex64([3j, 4]), np.complex64([3.01j, 4.01])),
        (np.float32(3e38), np.float32(2e38)),
        (np.float32([np.inf, 1]), np.float32([1, 1])),
        (np.float32([]), np.float32([])),
    ],
)
def test_norms_on_the_host_are_those_of_a_trace(real, wide):
    norms = np.array(statistics.norms(real, wide)[:3])
    on_host = proposal._norms(np.asarray(real), wide)
    are_finite = np.isfinite(norms)
    np.testing.assert_array_equal(np.isfinite(on_host), are_finite)
    np.testing.assert_allclose(
        np.array(on_host)[are_finite], norms[are_finite], rtol=1e-5
    )


def test_it_says_why_no_line_helps():
    def loss_fn(w):
        return jnp.sum(jnp.sqrt(jnp.maximum(w @ w, 0)))  # sqrt

    found = float32_lines(autocast(loss_fn), jnp.zeros((2, 2)))
    assert (found.lines, found.verified) == ([], False)
    assert "in float32, too, the loss or the gradients are not finite" in found.message
    assert f"{HERE}:{line_of('sqrt', __file__)}" in found.message
    assert "inf begins here, in float32 too" in found.message
    assert "a second jnp.where" in found.message


def test_tolerance():
    def loss_fn(w):
        return jnp.mean(w @ jnp.ones((3, 1)))  # product

    params = jnp.full((1, 3), 1 + 2.0**-8 * 1.1)
    loss_fn = autocast(loss_fn, jnp.bfloat16)
    with pytest.raises(ValueError, match="Pass dtype='bfloat16'"):
        float32_lines(loss_fn, params)
    assert float32_lines(loss_fn, params, dtype="bfloat16").lines == []
    strict = float32_lines(loss_fn, params, dtype="bfloat16", tolerance=1e-3)
    assert [x.line for x in strict.lines] == [line_of("product", __file__)]
    assert strict.loss_error < 1e-3


def cast_by_hand(w):
    w = half(w * 2)  # by hand
    return total(w @ w)


@pytest.mark.parametrize(
    ("loss_fn", "match"),
    [
        (cast_by_hand, r"arithmetic.py:\d+, in half: remove its casts.*trace_numerics"),
        (lambda w: jnp.sum(w @ w), r"float32_lines\(autocast\(loss_fn\)"),
        (
            lambda w: autocast(lambda w: jnp.sum(w @ w))(w),
            r"pass the function inside, float32_lines\(autocast\(f\)",
        ),
    ],
)
def test_it_is_for_autocast(loss_fn, match):
    with pytest.raises(TypeError, match=f"loss_fn must be autocast.*{match}"):
        float32_lines(loss_fn, jnp.eye(2))


@pytest.mark.parametrize(
    ("error", "match", "options"),
    [
        (ValueError, "Pass state or scale", {"scale": 1.0, "state": TWO}),
        (ValueError, "tolerance must be from 0 to 1", {"tolerance": 2.0}),
        (TypeError, "has_aux must be True or", {"has_aux": 1}),
    ],
)
def test_wrong_arguments(error, match, options):
    with pytest.raises(error, match=match):
        float32_lines(autocast(lambda w: jnp.sum(w @ w)), jnp.eye(2), **options)
