"""The tolerant loss scale: its rule against the reference, and what it refuses."""

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from helpers import replay, signature
from hypothesis import given

from optax_lossscale import (
    DynamicLossScale,
    LossScaleOptimizer,
    TolerantLossScale,
    TolerantLossScaleState,
)

F, T = False, True
finite_runs = st.lists(st.booleans(), max_size=40)
configs = st.fixed_dictionaries(
    {
        "tolerance": st.integers(0, 20).map(lambda n: n / 20),
        "initial_scale": st.sampled_from([0.5, 8.0, 16.0]),
        "growth_interval": st.integers(1, 5),
        "growth_factor": st.sampled_from([2.0, 8.0]),
        "backoff_factor": st.sampled_from([0.5, 0.125]),
        "min_scale": st.just(0.25),
        "max_scale": st.just(2.0**10),
    }
)


@given(configs, finite_runs)
def test_is_the_reference_in_a_jitted_scan(config, run):
    states, should_apply = replay(TolerantLossScale(**config), run)
    rule = reference.Tolerant(**config)
    assert states.loss_scale.tolist() == [rule.step(finite) for finite in run]
    assert should_apply.tolist() == run


@given(configs, finite_runs)
def test_is_the_reference_step_by_step(config, run):
    scale, rule = TolerantLossScale(**config), reference.Tolerant(**config)
    state = scale.init()
    for finite in run:
        state, should_apply = scale.update(1.0 if finite else jnp.nan, state)
        assert scale(state) == rule.step(finite)
        assert bool(should_apply) is finite


@given(finite_runs)
def test_without_tolerance_it_is_the_dynamic_one(run):
    arguments = {"initial_scale": 16.0, "growth_interval": 3}
    tolerant, _ = replay(TolerantLossScale(0, **arguments), run)
    dynamic, _ = replay(DynamicLossScale(**arguments), run)
    assert tolerant.loss_scale.tolist() == dynamic.loss_scale.tolist()


def test_growth_forgets_steps_but_not_overflows():
    scale = TolerantLossScale(0.5, initial_scale=8.0, growth_interval=3)
    # One of three is tolerated before growth, two of three are not after it.
    states, _ = replay(scale, [T, T, F, T, T, T, T, T, F])
    assert states.loss_scale.tolist() == [8, 8, 8, 8, 8, 16, 16, 16, 8]
    assert states.steps.tolist() == [1, 2, 3, 4, 5, 0, 1, 2, 0]
    assert states.nonfinite_steps.tolist() == [0, 0, 1, 1, 1, 1, 1, 1, 0]


# In float32 0.15 * 100 is above 15, and 0.09 * 300 above 27.
@pytest.mark.parametrize(("bad", "steps"), [(15, 100), (27, 300), (7, 10)])
def test_a_share_of_exactly_the_tolerance_counts(bad, steps):
    scale = TolerantLossScale(bad / steps, initial_scale=8.0)
    states, _ = replay(scale, [T] * (steps - bad) + [F] * bad)
    assert states.loss_scale.tolist() == [8] * (steps - 1) + [4]
    states, _ = replay(scale, [T] * (steps - bad + 1) + [F] * bad)
    assert states.loss_scale.tolist() == [8] * (steps + 1)


def test_counters_saturate():
    scale = TolerantLossScale(0.5, growth_interval=2**31 - 1)
    top = jnp.int32(2**31 - 1)
    state = TolerantLossScaleState(jnp.float32(8), top, top, top)
    finite, _ = scale.update(1.0, state)
    assert (finite.loss_scale, finite.steps, finite.nonfinite_steps) == (16, 0, top)
    state = state._replace(nonfinite_steps=jnp.int32(0))
    skipped, _ = scale.update(jnp.nan, state)
    assert (skipped.loss_scale, skipped.steps, skipped.nonfinite_steps) == (8, top, 1)


def test_a_scale_restored_out_of_bounds_comes_back_within():
    scale = TolerantLossScale(0.5, max_scale=2.0**20)
    for restored in (0.0, 2.0**40, np.inf, np.nan):
        state = scale.init()._replace(loss_scale=jnp.float32(restored))
        for gradient in (1.0, jnp.inf):
            after, _ = scale.update(gradient, state)
            assert 1 <= after.loss_scale <= 2.0**20


def test_a_state_of_python_numbers_becomes_one_of_arrays():
    scale = TolerantLossScale(0.5)
    after, _ = scale.update(jnp.nan, TolerantLossScaleState(8.0, 0, 0, 0))
    assert signature(after) == signature(scale.init())


def test_all_devices_decide_alike():
    scale = TolerantLossScale(0.5, initial_scale=8.0)

    def update(grad):
        return scale.update(grad, scale.init(), axis_name="devices")

    grads = jnp.array([1.0, jnp.nan])
    state, should_apply = jax.vmap(update, axis_name="devices")(grads)
    assert state.loss_scale.tolist() == [4, 4]
    assert should_apply.tolist() == [False, False]


@pytest.mark.parametrize("bad", [-0.1, 1.1, 5, np.nan, np.inf])
def test_refuses_what_is_no_share(bad):
    with pytest.raises(ValueError, match="tolerance") as error:
        TolerantLossScale(bad)
    assert repr(bad) in str(error.value)


def test_refuses_what_the_dynamic_one_refuses():
    for name, bad in {
        "initial_scale": 0.5,
        "growth_interval": 0,
        "growth_factor": 1.0,
        "backoff_factor": 1.0,
        "min_scale": 0.0,
        "max_scale": np.inf,
    }.items():
        with pytest.raises(ValueError, match=name) as error:
            TolerantLossScale(0.5, **{name: bad})
        assert repr(bad) in str(error.value)
    for bad in (None, "0.5", True, jnp.float32(0.5)):
        with pytest.raises(TypeError, match="tolerance"):
            TolerantLossScale(bad)


def test_drives_an_optimizer():
    optimizer = LossScaleOptimizer(optax.sgd(0.5), TolerantLossScale(0.5))
    assert optimizer.dynamic
    assert optimizer.initial_scale == 2.0**15
    state = optimizer.init(jnp.float32(1))
    assert optimizer.dynamic_counter(state) == 0
