"""`skip_if` skips a step for a reason of the user's."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import INF, NAN, assert_same_bits, every_wrap, relaxed
from meshes import PARTS, WHOLE, over_devices
from ways import by_minimize, every_way

from optax_lossscale import DynamicLossScale, LossScaleOptimizer

PARAMS = {"w": np.array([0.5, -0.0], np.float32), "b": np.float32(-3)}
ONE = jax.device_put(np.float32(1))


def step_of(way, optimizer):
    """Returns a step whose gradients are all the same number."""

    def step(params, state, factor, flag):
        grads = jax.tree.map(lambda x: jnp.full_like(x, factor), params)
        return way(optimizer, params, state, ONE, grads, skip_if=flag)

    return step


@every_way
def test_a_veto_keeps_all_but_the_scale(way):
    rule = DynamicLossScale(16.0, growth_interval=3, min_scale=8.0)
    optimizer = LossScaleOptimizer(relaxed(optax.adam(0.1)), rule)
    step = jax.jit(step_of(way, optimizer))
    params, state = PARAMS, optimizer.init(PARAMS)
    # Of each step: the gradient, the flag, and the scale and the counters after it.
    for factor, flag, scale, *expected in [
        (1, None, 16, True, 0, 0, 0),
        (1, False, 16, True, 0, 0, 0),
        (1, True, 32, False, 1, 0, 0),
        (INF, False, 16, False, 2, 1, 0),
        (NAN, False, 8, False, 3, 2, 0),
        (1, True, 8, False, 4, 2, 0),
        (INF, True, 8, False, 5, 3, 1),
        (1, True, 8, False, 6, 3, 1),
        (1, True, 8, False, 7, 3, 1),
        (1, True, 16, False, 8, 3, 1),
        (1, False, 16, True, 8, 0, 0),
    ]:
        factor = jnp.float32(factor)
        before, (params, state) = (params, state), step(params, state, factor, flag)
        assert optimizer.current_loss_scale(state) == scale
        assert list(state[2:6]) == expected
        if not state.last_step_applied:
            kept = before[0], before[1].inner_state
            assert_same_bits((params, state.inner_state), kept)
        elif flag is not None:
            assert_same_bits((params, state), step(*before, factor, None))
    assert state.inner_state[0].count == 3


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@every_way
def test_without_jit_in_any_dtype_at_a_fixed_scale(way, dtype):
    optimizer = LossScaleOptimizer(optax.sgd(0.5, 0.9), 8)
    step = step_of(way, optimizer)
    params = jax.tree.map(lambda x: x.astype(dtype), PARAMS)
    state = optimizer.init(params)
    for flag in (True, np.True_, jnp.array(True)):
        kept, after = step(params, state, ONE, flag)
        assert_same_bits((kept, after.inner_state), (params, state.inner_state))
        assert after[2:6] == (False, 1, 0, 0)
    for flag in (False, np.False_, jnp.array(False)):
        taken, after = step(params, state, ONE, flag)
        assert taken["w"].tolist() == [0.0, -0.5]
        assert after[2:6] == (True, 0, 0, 0)


@every_wrap
def test_is_asked_once_after_the_retries(wrap):
    rule, seen = DynamicLossScale(2.0**20), []
    optimizer = LossScaleOptimizer(optax.sgd(0.5), rule, retries=8)

    def skip_if(out, grads):
        jax.debug.callback(lambda *args: seen.append(args), out, grads)
        return out[0] > 2

    def loss_fn(param, x):
        return param.astype(jnp.float16).astype(jnp.float32) * x, {"aux": x}

    step = functools.partial(optimizer.minimize, loss_fn, has_aux=True, skip_if=skip_if)
    step, start = wrap(step), optimizer.init(ONE)
    for x, new, *expected in [(4, 1, 7, 1, 0), (2, 0, 6, 0, 0), (64, 1, 8, 1, 1)]:
        param, state, _ = step(ONE, start, ONE * x)
        skipped = state.skipped_steps, state.consecutive_skipped_steps
        assert (param, [state.retries, *skipped]) == (new, expected)
    jax.effects_barrier()
    assert seen == [((x, {"aux": x}), g) for x, g in ((4, 4), (2, 2), (64, INF))]


def test_one_device_of_eight():
    optimizer = LossScaleOptimizer(optax.sgd(0.5), 8, axis_name="batch")

    @over_devices(PARTS, (PARTS, WHOLE, WHOLE))
    def step(param, flag):
        state = optimizer.init(param)
        param, state = optimizer.apply_gradients(param, param, state, skip_if=flag[0])
        return param, state.skipped_steps, state.skip_reasons

    params, no = jnp.arange(8, dtype=jnp.float32), jnp.zeros(8, bool)
    for flags, factor, skipped in ((no, 0.5, 0), (no.at[5].set(True), 1, 1)):
        new, count, reasons = step(params, flags)
        assert (new.tolist(), count) == ((params * factor).tolist(), skipped)
        assert reasons == 4 * skipped


def test_each_member_has_a_veto_of_its_own():
    optimizer = LossScaleOptimizer(optax.sgd(0.5), DynamicLossScale(8.0))
    flags = jnp.array([True, False])
    step = jax.jit(jax.vmap(step_of(by_minimize, optimizer), (None, None, 0, 0)))
    params, state = step(PARAMS, optimizer.init(PARAMS), jnp.ones(2), flags)
    assert params["b"].tolist() == [-3, -3.5]
    assert state.skipped_steps.tolist() == [1, 0]
    assert state.skip_reasons.tolist() == [4, 0]
