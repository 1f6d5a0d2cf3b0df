"""The dynamic loss scale: what is particular to it, and which values are refused."""

import fractions
import functools
import math

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import OUT_OF_BOUNDS, replay, signature
from hypothesis import assume, given

from optax_lossscale import (
    DynamicLossScale,
    FixedLossScale,
    LossScaleOptimizer,
    LossScaleState,
    TolerantLossScale,
)


def test_growth_is_not_a_step_late():
    states, _ = replay(DynamicLossScale(8.0, growth_interval=3), [True] * 6)
    assert states.loss_scale.tolist() == [8, 8, 16, 16, 16, 32]
    assert states.good_steps.tolist() == [1, 2, 0, 1, 2, 0]


def test_minimum_survives_jit_and_tree_map():
    scale = DynamicLossScale(1.0, min_scale=0.25)
    state = jax.tree.map(lambda x: x, scale.init())
    update = jax.jit(scale.update)
    for _ in range(5):
        state, _ = update(jnp.inf, state)
    assert state.loss_scale == 0.25


def test_an_endless_storm_of_nans_ends_at_the_minimum():
    scale = DynamicLossScale(min_scale=2.0**-126)
    states, _ = replay(scale, [False] * 300)
    assert states.loss_scale[-1] == 2.0**-126
    assert jnp.all(states.loss_scale > 0)


def test_endless_growth_ends_at_the_maximum():
    states, _ = replay(DynamicLossScale(growth_interval=1), [True] * 300)
    assert states.loss_scale[-1] == 2.0**126
    assert jnp.isfinite(states.loss_scale).all()


def test_hysteresis_of_megatron_and_deepspeed():
    run = [False, False, True, False, True, True, False]
    states, _ = replay(DynamicLossScale(16.0, 2, hysteresis=2), run)
    # Used up once, it stays used up until the scale grows.
    assert states.loss_scale.tolist() == [16, 8, 8, 4, 4, 8, 8]
    assert states.hysteresis_left.tolist() == [1, 0, 0, 0, 0, 2, 1]


def test_consecutive_hysteresis_is_restored_by_any_finite_step():
    scale = DynamicLossScale(16.0, hysteresis=2, consecutive_hysteresis=True)
    states, _ = replay(scale, [False, True, False, True, False, False])
    assert states.loss_scale.tolist() == [16, 16, 16, 16, 16, 8]


def test_a_counter_restored_beyond_the_interval_still_grows():
    scale = DynamicLossScale(8.0, growth_interval=3)
    state = scale.init()._replace(good_steps=jnp.int32(100))
    state, _ = scale.update(1.0, state)
    assert (state.loss_scale, state.good_steps) == (16, 0)


def test_a_counter_at_the_end_of_int32_does_not_wrap():
    scale = DynamicLossScale(8.0, growth_interval=2**31 - 1)
    state = scale.init()._replace(good_steps=jnp.int32(2**31 - 1))
    state, _ = scale.update(1.0, state)
    assert (state.loss_scale, state.good_steps) == (16, 0)


@pytest.mark.parametrize("restored", OUT_OF_BOUNDS)
def test_a_scale_set_by_hand_loses_no_gradient(restored):
    optimizer = LossScaleOptimizer(optax.sgd(0.5))
    params = jnp.array([1.0, 2.0], jnp.float32)
    state = optax.tree.set(optimizer.init(params), loss_scale=jnp.float32(restored))

    def loss_fn(params):
        return 1e-3 * jnp.sum(params**2)

    grads = optimizer.value_and_grad(loss_fn, state)(params)[1]
    np.testing.assert_allclose(grads, 2e-3 * params, rtol=1e-6)
    step = jax.jit(functools.partial(optimizer.minimize, loss_fn))
    after, state, _ = step(params, state)
    np.testing.assert_allclose(after, params - 1e-3 * params, rtol=1e-6)
    assert 1 <= optimizer.current_loss_scale(state) <= 2.0**126


@pytest.mark.parametrize("set_by_hand", [128, 128.0, np.float64(128), jnp.int32(128)])
def test_a_scale_set_by_hand_becomes_float32(set_by_hand):
    scale = DynamicLossScale()
    state = scale.init()._replace(loss_scale=set_by_hand)
    assert scale(state).dtype == jnp.float32
    after, _ = scale.update(1.0, state)
    assert signature(after) == signature(scale.init())
    assert after.loss_scale == 128


def test_normalizes_what_numbers_it_takes():
    scale = DynamicLossScale(
        np.float32(16), np.int64(3), fractions.Fraction(2), min_scale=2, hysteresis=2.0
    )
    assert scale == DynamicLossScale(16.0, 3, 2.0, min_scale=2.0, hysteresis=2)
    assert type(scale.growth_interval) is int
    assert type(scale.initial_scale) is float


not_numbers = st.sampled_from(
    [True, False, "8", None, [8.0], 1j, np.ones(()), np.ones(2), b"8"]
)
bad_scales = st.one_of(
    st.sampled_from([0, -0.0, math.inf, -math.inf, math.nan, 1e-46, 2.0**-127]),
    st.sampled_from([2.0**127, 1e39, 10**400]),
    st.floats(max_value=0),
)
bad_counts = st.one_of(
    st.integers(max_value=0),
    st.sampled_from([0.5, 1.5, math.nan, math.inf, 2**31, 2**40]),
)
BAD_VALUES = {
    "initial_scale": bad_scales,
    "min_scale": bad_scales,
    "max_scale": bad_scales,
    "growth_interval": bad_counts,
    "hysteresis": bad_counts,
    # The last two of each are 1, or 0, in float32 alone.
    "growth_factor": st.floats(max_value=1.0)
    | st.sampled_from([math.inf, math.nan, 1 + 1e-9, 1 + 2.0**-24]),
    "backoff_factor": st.floats(max_value=0)
    | st.floats(min_value=1)
    | st.sampled_from([math.nan, 1 - 1e-8, 1e-46]),
    "consecutive_hysteresis": st.nothing(),
}


@given(st.data())
def test_dynamic_refuses_invalid_values(data):
    name = data.draw(st.sampled_from([n for n in BAD_VALUES if n[0] != "c"]))
    value = data.draw(BAD_VALUES[name])
    with pytest.raises(ValueError, match=name) as error:
        DynamicLossScale(**{name: value})
    assert repr(value) in str(error.value)


def test_the_smallest_factors_that_it_takes_do_change_the_scale():
    factors = {"growth_factor": 1 + 2.0**-23, "backoff_factor": 1 - 2.0**-24}
    for initial in (2.0**15, np.float32(2.0**15 * 1.3), np.nextafter(np.float32(2), 1)):
        for rule in (DynamicLossScale, functools.partial(TolerantLossScale, 0)):
            scale = rule(initial_scale=initial, growth_interval=1, **factors)
            grown, _ = scale.update(1.0, scale.init())
            lower, _ = scale.update(jnp.nan, scale.init())
            assert lower.loss_scale < initial < grown.loss_scale
    for factor in (1 + 1e-9, 1 - 1e-8):
        name = "growth_factor" if factor > 1 else "backoff_factor"
        for rule in (DynamicLossScale, functools.partial(TolerantLossScale, 0)):
            with pytest.raises(ValueError, match=rf"{name}.*float32.*usual.*{factor}"):
                rule(**{name: factor})


@given(st.data())
def test_dynamic_refuses_invalid_types(data):
    name = data.draw(st.sampled_from(list(BAD_VALUES)))
    value = data.draw(not_numbers)
    assume(name != "consecutive_hysteresis" or not isinstance(value, bool))
    with pytest.raises(TypeError, match=name) as error:
        DynamicLossScale(**{name: value})
    assert repr(value) in str(error.value)


def test_refuses_jax_arrays():
    with pytest.raises(TypeError, match="growth_factor"):
        DynamicLossScale(growth_factor=jnp.float32(2))
    with pytest.raises(TypeError, match="loss_scale_value"):
        FixedLossScale(jnp.float32(2))


@pytest.mark.parametrize("half", [np.float16, jnp.float16, jnp.bfloat16])
def test_refuses_scales_of_half_precision(half):
    for name in ("initial_scale", "min_scale", "max_scale"):
        with pytest.raises(ValueError, match=f"{name} must not be of half precision"):
            DynamicLossScale(**{name: half(8)})
    with pytest.raises(ValueError, match=r"loss_scale_value.*Pass a Python float"):
        FixedLossScale(half(8))


@pytest.mark.parametrize(
    "bounds", [{"initial_scale": 0.5}, {"max_scale": 8.0}, {"min_scale": 2.0**16}]
)
def test_dynamic_refuses_an_initial_scale_out_of_bounds(bounds):
    with pytest.raises(ValueError, match="initial_scale must lie between") as error:
        DynamicLossScale(**bounds)
    assert repr(next(iter(bounds.values()))) in str(error.value)


def test_from_config_refuses_unknown_keys():
    with pytest.raises(TypeError, match="increment_period"):
        DynamicLossScale.from_config({"increment_period": 3})


def test_state_has_the_documented_fields():
    assert LossScaleState._fields == ("loss_scale", "good_steps", "hysteresis_left")
    state = DynamicLossScale(hysteresis=3).init()
    assert [x.dtype.name for x in state] == ["float32", "int32", "int32"]
    assert state == LossScaleState(2.0**15, 0, 3)
