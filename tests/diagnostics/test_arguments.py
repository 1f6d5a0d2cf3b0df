"""Functions that wait for numbers say so under jit."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from optax_lossscale import LossScaleOptimizer, autocast, diagnostics


@autocast
def loss_fn(w):
    return jnp.sum(w @ w)


ON_HOST = {
    "check_health": lambda w, state: diagnostics.check_health(state),
    "compare": lambda w, state: diagnostics.compare(loss_fn, w),
    "describe_nonfinite": lambda w, state: diagnostics.describe_nonfinite(w),
    "float32_lines": lambda w, state: diagnostics.float32_lines(loss_fn, w),
    "plot_exponents": lambda w, state: diagnostics.plot_exponents(w, 1.0),
    "plot_history": lambda w, state: diagnostics.plot_history([{"loss_scale": w}]),
    "report": lambda w, state: diagnostics.report(state),
    "trace_numerics": lambda w, state: diagnostics.trace_numerics(loss_fn, w),
}
ANYWHERE = {"exponent_histogram", "metrics", "nonfinite_leaves", "underflow_stats"}
ANYWHERE |= {"suggest_loss_scale"}


@pytest.mark.parametrize("name", ON_HOST)
def test_names_itself_and_the_fix(name):
    w = np.eye(2, dtype=np.float32)
    state = LossScaleOptimizer(optax.sgd(0.1)).init(w)
    match = rf"{name}.* is for the host, to wait for numbers: call it outside of jit"
    with pytest.raises(TypeError, match=match):
        jax.jit(ON_HOST[name])(w, state)


def test_every_function_is_for_the_host_or_for_anywhere():
    functions = {k for k, x in vars(diagnostics).items() if inspect.isfunction(x)}
    assert functions == ON_HOST.keys() | ANYWHERE
