"""The largest loss scale of a trace: it fits, and twice that does not."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from arithmetic import TWO, half, total
from helpers import exhaustive_but

from optax_lossscale import DynamicLossScale, LossScaleOptimizer, autocast
from optax_lossscale.diagnostics import trace_numerics

CASES = list(itertools.product([-20, 0, 20], [1.0, 1.5, 65504 / 2**15]))


@pytest.mark.parametrize("case", exhaustive_but(CASES, CASES[::4]), ids=str)
def test_the_largest_scale_of_a_product(case):
    power, factor = case

    def loss_fn(w):
        return total(half(w) * (half(w) * 0 + factor)) * 2.0**power

    largest = trace_numerics(loss_fn, jnp.ones(2), scale=3.0).largest_scale
    # The gradient is factor * 2**power * scale, and the dtype ends below 2**16.
    assert largest == 2.0 ** (15 - power)
    for scale in (largest, 2 * largest):
        grads = jax.grad(lambda w, s=scale: loss_fn(w) * s)(jnp.ones(2))
        assert np.isfinite(grads).all() == (scale == largest)


def test_the_advice_of_a_scale_below_1():
    @autocast
    def loss_fn(w):
        return jnp.mean((jnp.ones((4, 2)) @ w - 1e5) ** 2)

    trace = trace_numerics(loss_fn, jnp.ones((2, 1)))
    pattern = r"DynamicLossScale\(2.0\*\*(.*), min_scale=2.0\*\*(.*)\)"
    ((first, lowest),) = re.findall(pattern, trace.findings[0].message)
    rule = DynamicLossScale(2.0 ** int(first), min_scale=2.0 ** int(lowest))
    for options, skipped in (({}, 3), ({"loss_scale": rule}, 0)):
        optimizer = LossScaleOptimizer(optax.sgd(0.1), **options)
        opt_state = optimizer.init(params := jnp.ones((2, 1)))
        if not options:
            opt_state = optax.tree.set(opt_state, loss_scale=jnp.float32(1))
        for _ in range(3):
            params, opt_state, _ = optimizer.minimize(loss_fn, params, opt_state)
        assert opt_state.skipped_steps == skipped


def test_nothing_overflows_at_any_scale():
    trace = trace_numerics(lambda w: total(half(w) * jnp.float16(0)), jnp.ones(2))
    assert trace.largest_scale == 2.0**15
    trace = trace_numerics(lambda w: jnp.float32(0) * jnp.sum(w), jnp.ones(2))
    assert trace.largest_scale == 2.0**126


def test_no_scale_fits_two_lines_of_autocast():
    def loss_fn(w, v):
        large = jnp.sum(jnp.ones((16, 2)) @ w) * 3e3
        return large + 1e-9 * jnp.sum(jnp.square(jnp.ones((16, 2)) @ v))

    arguments = jnp.ones((2, 4)), jnp.ones((2, 4))
    trace = trace_numerics(lambda p: autocast(loss_fn)(*p), arguments)
    message = trace.findings[0].message
    assert trace.findings[0].kind == "no_scale", message
    (line,) = re.findall(r'float32="(.*?)"', message)
    repaired = trace_numerics(lambda p: autocast(loss_fn, float32=line)(*p), arguments)
    scale = repaired.largest_scale
    assert scale > 2.0**20 * trace.largest_scale
    last = trace_numerics(
        lambda p: autocast(loss_fn, float32=line)(*p), arguments, scale=scale
    )
    assert last.findings[0].kind == "fine", str(last)


def test_a_loss_in_half_precision_overflows_by_itself():
    trace = trace_numerics(lambda w: jnp.sum(half(w)), TWO, scale=2.0**20)
    (finding,) = trace.findings
    assert (finding.kind, trace.largest_scale) == ("scale_too_high", 2.0**15)
    assert "gradient of the loss itself: return the loss in float32" in finding.message
