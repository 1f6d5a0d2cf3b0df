"""What all functions of the diagnostics refuse: tracers, wide dtypes, wrong scales."""

import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import INF, NAN

from optax_lossscale import LossScaleOptimizer, autocast, diagnostics
from optax_lossscale.diagnostics import (
    float32_lines,
    plot_exponents,
    suggest_loss_scale,
    trace_numerics,
    underflow_stats,
)

W = np.eye(2, dtype=np.float32)
FUNCTIONS = {k: x for k, x in vars(diagnostics).items() if inspect.isfunction(x)}


@autocast
def loss_fn(w):
    return jnp.sum(w @ w)


def with_parameter(name):
    """Returns the names of the functions that have a parameter of this name."""
    return {k for k, x in FUNCTIONS.items() if name in inspect.signature(x).parameters}


ON_HOST = {
    "check_health": lambda w, state: diagnostics.check_health(state),
    "compare": lambda w, state: diagnostics.compare(loss_fn, w),
    "describe_nonfinite": lambda w, state: diagnostics.describe_nonfinite(w),
    "float32_lines": lambda w, state: float32_lines(loss_fn, w),
    "plot_exponents": lambda w, state: plot_exponents(w, 1.0),
    "plot_history": lambda w, state: diagnostics.plot_history([{"loss_scale": w}]),
    "report": lambda w, state: diagnostics.report(state),
    "trace_numerics": lambda w, state: trace_numerics(loss_fn, w),
}
ANYWHERE = {"exponent_histogram", "metrics", "nonfinite_leaves", "underflow_stats"}
ANYWHERE |= {"suggest_loss_scale"}


@pytest.mark.parametrize("name", ON_HOST)
def test_under_jit_it_names_itself_and_the_fix(name):
    state = LossScaleOptimizer(optax.sgd(0.1)).init(W)
    match = rf"{name}.* is for the host, to wait for numbers: call it outside of jit"
    with pytest.raises(TypeError, match=match):
        jax.jit(ON_HOST[name])(W, state)


def test_every_function_is_for_the_host_or_for_anywhere():
    assert FUNCTIONS.keys() == ON_HOST.keys() | ANYWHERE


DTYPES = {
    "float32_lines": lambda dtype: float32_lines(loss_fn, W, dtype=dtype),
    "plot_exponents": lambda dtype: plot_exponents(W, 1.0, dtype=dtype),
    "suggest_loss_scale": lambda dtype: suggest_loss_scale(W, dtype),
    "trace_numerics": lambda dtype: trace_numerics(loss_fn, W, dtype=dtype),
    "underflow_stats": lambda dtype: underflow_stats(W, 1.0, dtype),
}
STATES = {
    "float32_lines": lambda state: float32_lines(loss_fn, W, state=state),
    "plot_exponents": lambda state: plot_exponents(W, state),
    "trace_numerics": lambda state: trace_numerics(loss_fn, W, state=state),
    "underflow_stats": lambda state: underflow_stats(W, state),
}


@pytest.mark.parametrize("call", DTYPES.values(), ids=DTYPES)
def test_a_dtype_is_a_narrow_one_of_floats(call):
    for dtype, error, words in [
        (
            "float32",
            ValueError,
            "be a floating-point dtype of .* as float16 or bfloat16",
        ),
        ("int8", ValueError, "be a floating-point dtype of at most 16 bits"),
        ("float8_e8m0fnu", ValueError, "have a zero"),
        ("fp16", TypeError, 'be a dtype or its name, as "float16" or "bfloat16"'),
    ]:
        with pytest.raises(error, match=f"^dtype must {words}.* got '{dtype}'"):
            call(dtype)


def test_a_rule_of_autocast_that_closes_over_an_argument():
    @autocast
    def closing(w, x):
        double = jax.custom_jvp(lambda w: 2 * (x @ w))
        double.defjvp(lambda p, t: (double(*p), 2 * (x @ t[0])))
        return jnp.mean(double(w) ** 2)

    match = "test_arguments.py.* rule of derivatives .jax.custom_jvp.* closes over"
    with pytest.raises(TypeError, match=match):
        trace_numerics(closing, W, W)
    with pytest.raises(TypeError, match=match):
        float32_lines(closing, W, W)


@pytest.mark.parametrize("call", STATES.values(), ids=STATES)
def test_a_state_is_one_or_a_scale_within_the_bounds(call):
    for scale in (0, -1.0, INF, NAN, 2.0**127):
        got = re.escape(f"got {scale!r}.")
        with pytest.raises(ValueError, match=f"^state must be from 2.* {got}"):
            call(scale)
    for state in ({}, True, {"w": W}):
        with pytest.raises(ValueError, match="exactly one LossScaleOptimizerState"):
            call(state)
    init = LossScaleOptimizer(optax.sgd(0.1)).init
    with pytest.raises(ValueError, match="state belongs to many members"):
        call(jax.vmap(init)(W))


def test_the_functions_with_these_parameters():
    assert with_parameter("dtype") == DTYPES.keys()
    others = {"check_health", "metrics", "report"}
    assert with_parameter("state") == STATES.keys() | others


@pytest.mark.parametrize("function", [trace_numerics, float32_lines])
def test_a_state_in_the_place_of_the_scale(function):
    state = LossScaleOptimizer(optax.sgd(0.1)).init(W)
    words = "scale must be a number, got a state. Pass that as state="
    with pytest.raises(TypeError, match=words):
        function(loss_fn, W, scale=state)
