"""Advice of `trace_numerics` that mends, or none; and underflow before rounding."""

import itertools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import exhaustive_but
from tracing import TWO, by_hand, errors, half, line_of, total

from optax_lossscale import autocast
from optax_lossscale.diagnostics import trace_numerics

HERE = Path(__file__).name


# Three programs by hand. `mended` computes the lines in float32 that the trace names.


def bad_in_float32_too(w, mended=False):
    x = jnp.maximum(half(w), 0)
    return total(
        jnp.where(x > 0, jnp.log(jnp.where(x > 0, x, 1) if mended else x), 0.0)
    )


def divided_by_what_was_flushed(w, mended=False):
    h = half(w) * jnp.float16(3e-5)
    h = h.astype(jnp.float32) if mended else h
    s = jnp.sum(h * h)  # all are flushed
    return total(h / s)  # divided


def one_minus_what_rounds_to_one(w, mended=False):
    w = w if mended else half(w)
    q = jax.nn.sigmoid(w)  # rounds to one
    return -total(jnp.log(1 - q))  # logarithm


def test_float32_is_no_advice_where_it_is_nan_too():
    w = jnp.array([-1.0, 2.0])
    finding = trace_numerics(bad_in_float32_too, w).findings[0]
    assert "in float32 too" in finding.message
    assert "jnp.log(jnp.where(x > 0, x, 1))" in finding.message
    assert "this line in float32" not in finding.message
    assert not np.isfinite(by_hand(bad_in_float32_too, w)(1.0)[1]).all()
    mended = trace_numerics(lambda w: bad_in_float32_too(w, mended=True), w)
    assert mended.findings[0].kind == "fine"


FLUSHED = np.array(
    [5e-4, *np.linspace(0.7, 2, 7)], np.float32
)  # One number of h is flushed, too.
LINES = {
    divided_by_what_was_flushed: (FLUSHED, "all are flushed", "divided"),
    one_minus_what_rounds_to_one: (
        np.array([0.0, 12.0], np.float32),
        "rounds to one",
        "logarithm",
    ),
}


@pytest.mark.parametrize("loss_fn", LINES)
def test_zeros_that_float32_would_not_have(loss_fn):
    w, made, breaks = LINES[loss_fn]
    trace = trace_numerics(loss_fn, w)
    finding = trace.findings[0]
    assert finding.operation.line == line_of(breaks, __file__)
    assert finding.other.line == line_of(made, __file__)
    place = f"{HERE}:{line_of(made, __file__)}"
    assert re.search(f"float32 would not have.*{place}", finding.message)
    assert re.search(f"compute .*{place}.*, and this line in float32", finding.message)
    loss, _ = by_hand(lambda w: loss_fn(w, mended=True), w)(1.0)
    assert np.isfinite(loss)
    assert np.isclose(loss, trace.float32_loss, rtol=1e-2)


# A perceptron, whose gradients are all zero without a scale.


def normal(i, *shape):
    return jax.random.normal(jax.random.key(i), shape)


def make_perceptron(
    depth=2, activation="relu", size=1e-9, batch=32, width=16, fault=None
):
    sizes = [8, *[width] * depth, 1]
    pairs = enumerate(itertools.pairwise(sizes))
    params = [(normal(i, *s) / s[0] ** 0.5, jnp.zeros(s[1])) for i, s in pairs]
    x = normal(10, batch, 8)

    def loss_fn(params, x, y):
        h = x
        for w, b in params[:-1]:
            h = getattr(jax.nn, activation)(h @ w + b)
        if fault:
            h = (h + 3000) @ jnp.eye(width) - 3000  # real fault
        w, b = params[-1]
        return jnp.mean((h @ w + b - y) ** 2) * size

    return loss_fn, params, x, jnp.sin(2 * x[:, :1])


CHANGES = [
    {}, {"depth": 1}, {"depth": 6}, {"depth": 3, "activation": "tanh"},
    *({"activation": x} for x in ("gelu", "sigmoid", "softplus", "elu")),
    *({"size": x} for x in (1e-8, 1e-20)), {"activation": "silu", "size": 1e-15},
    *({"batch": x} for x in (8, 1024)), *({"width": x} for x in (4, 64)),
]  # fmt: skip


@pytest.mark.parametrize("changes", exhaustive_but(CHANGES, [{"depth": 1}]), ids=str)
def test_underflow_comes_before_rounding(changes):
    loss_fn, *args = make_perceptron(**changes)
    trace = trace_numerics(autocast(loss_fn), *args, scale=1.0)
    text = " ".join(str(trace).split())
    assert trace.findings[0].kind == "underflow", text
    assert "flushed to zero" in text
    assert "No loss scale" not in text
    (exponent,) = re.findall(r"initial_scale=2.0\*\*(\d+)", text)
    truth = by_hand(loss_fn, *args)(1.0)
    run = by_hand(autocast(loss_fn), *args)
    _, before = errors(run(1.0), truth)
    _, after = errors(run(2.0 ** int(exponent)), truth)
    assert before > 0.5
    assert after < 0.1


@pytest.mark.exhaustive
def test_a_fault_beside_an_underflow_is_named_second():
    loss_fn, *args = make_perceptron(fault=True)
    trace = trace_numerics(autocast(loss_fn), *args, scale=1.0)
    first, *_, last = trace.findings
    assert (first.kind, last.kind) == ("underflow", "precision"), str(trace)
    assert f"{HERE}:{line_of('real fault', __file__)}" in last.message
    assert "No loss scale" not in str(trace)


def test_an_error_that_no_scale_changes():
    def loss_fn(w):
        h = half(w) + 2000
        return total(jnp.square(h - 2000))  # cancels

    trace = trace_numerics(loss_fn, TWO * 0.3)
    (finding,) = trace.findings
    assert finding.kind == "precision"
    assert "No loss scale helps" in finding.message
    assert finding.operation.line == line_of("cancels", __file__)
