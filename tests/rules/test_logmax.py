"""The LogMax loss scale: its rule against the reference, and its repaired defects."""

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from helpers import scan_updates, signature
from hypothesis import given

from optax_lossscale import LogMaxLossScale, LogMaxLossScaleState, LossScaleOptimizer

# Away from powers of two, around which float32 and double round apart.
magnitudes = st.integers(-60, 20).map(lambda n: 2.0 ** (n / 2) * 1.1)
gradients = st.lists(magnitudes | st.sampled_from([0.0, np.inf, np.nan]), max_size=30)
configs = st.fixed_dictionaries(
    {
        "initial_scale": st.sampled_from([2.0, 2.0**10]),
        "mean_decay": st.sampled_from([0.0, 0.5, 0.99]),
        "variance_decay": st.sampled_from([0.5, 0.999]),
        "deviations": st.sampled_from([0.0, 3.09]),
        "growth_interval": st.integers(1, 4),
        "min_scale": st.just(0.25),
        "max_scale": st.just(2.0**24),
    }
)


def runs_of(scale, grads):
    return scan_updates(scale, jnp.array(grads, jnp.float32))


def check(config, grads, states, should_apply, *, powers_of_two):
    """Compares the scales with the reference, which is shown what they were."""
    rule = reference.LogMax(**config)
    for step, grad in enumerate(grads):
        room, ceiling = rule.step(grad)
        actual = float(states.loss_scale[step])
        # Within a rounding error of a power of two both are right.
        near = {2.0**room, 2.0 ** (room - 1e-3), 2.0 ** (room + 1e-3)}
        if powers_of_two and rule.seen:
            near = {2.0 ** np.floor(np.log2(x)) for x in near}
        allowed = [max(min(x, ceiling), rule.min_scale) for x in near]
        assert np.isclose(allowed, actual, rtol=1e-3).any(), (step, allowed, actual)
        assert bool(should_apply[step]) == np.isfinite(grad)
        assert states.good_steps[step] == rule.good_steps
        rule.loss_scale = actual


@given(configs, gradients, st.booleans())
def test_is_the_reference_in_a_jitted_scan(config, grads, powers_of_two):
    scale = LogMaxLossScale(**config, powers_of_two=powers_of_two)
    check(config, grads, *runs_of(scale, grads), powers_of_two=powers_of_two)


@given(configs, gradients)
def test_scales_are_powers_of_two_within_bounds(config, grads):
    scales = runs_of(LogMaxLossScale(**config), grads)[0].loss_scale
    assert np.all((scales >= 0.25) & (scales <= 2.0**24))
    assert np.all(np.frexp(scales)[0] == 0.5)


def test_keeps_deviations_between_the_mean_and_the_limit():
    logs = np.random.default_rng(0).normal(-5, 2, 4000)
    states, _ = runs_of(LogMaxLossScale(powers_of_two=False), 2.0**logs)
    room = np.log2(states.loss_scale[-1000:])
    assert abs(np.mean(room) - (16 + 5 - 3.09 * 2)) < 0.5
    # One gradient in a thousand is larger than that: hardly any overflows.
    assert np.mean(logs[-1000:] + room > 16) < 0.01


def test_an_overflow_halves_the_scale_until_the_interval_has_passed():
    scale = LogMaxLossScale(growth_interval=50)
    states, _ = runs_of(scale, [0.7] * 100 + [np.inf] + [0.7] * 60)
    scales = np.log2(states.loss_scale)
    assert np.all(scales[:100] == 16)
    assert np.all(scales[100:150] == 15)
    assert np.all(scales[150:] == 16)


def test_the_slowest_mean_that_it_takes_still_moves():
    decays = {"mean_decay": 1 - 2.0**-20, "variance_decay": 1 - 2.0**-20}
    scale = LogMaxLossScale(**decays)
    state = scale.init()._replace(
        observations=jnp.int32(2**31 - 1),
        mean=jnp.float32(-9),
        slow_mean=jnp.float32(-9),
    )
    for gradient in (2.0**-8, 2.0**-10):
        after, _ = scale.update(gradient, state)
        assert (after.mean < -9) == (gradient < 2.0**-9)
        assert after.mean != state.mean
        assert 0 < after.variance < 1


def test_a_storm_does_not_pin_the_scale():
    scale = LogMaxLossScale(growth_interval=10)
    states, _ = runs_of(scale, [0.7] * 100 + [np.nan] * 500 + [0.7] * 170)
    assert states.loss_scale[599] == 1
    assert states.loss_scale[-1] == 2.0**16


def test_zeros_change_nothing_but_the_count():
    scale = LogMaxLossScale()
    states, should_apply = runs_of(scale, [0.7] + [0.0] * 10 + [0.7])
    assert np.all(states.loss_scale == 2.0**16)
    assert states.observations.tolist() == [1] * 11 + [2]
    assert np.all(should_apply)
    states, _ = runs_of(scale, [0.0] * 10)
    assert np.all(states.loss_scale == 2.0**15)


def test_extreme_gradients_stay_within_bounds():
    largest = np.finfo(np.float32).max
    for grads in ([1e-38], [1e-45], [largest], [1e-38, largest] * 5):
        states, _ = runs_of(LogMaxLossScale(powers_of_two=False), grads)
        assert np.all((states.loss_scale >= 1) & (states.loss_scale <= 2.0**126))


def test_a_tree_without_numbers_tells_nothing():
    scale = LogMaxLossScale()
    state, should_apply = scale.update({"a": None, "n": jnp.int32(3)}, scale.init())
    assert state.loss_scale == 2.0**15
    assert state.observations == 0
    assert bool(should_apply)


@pytest.mark.parametrize("field", LogMaxLossScaleState._fields)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e30, -1e30])
def test_a_state_restored_out_of_bounds_heals(field, bad):
    decays = {"mean_decay": 0.5, "variance_decay": 0.5}
    scale = LogMaxLossScale(max_scale=2.0**20, growth_interval=10, **decays)
    state = scale.init()
    dtype = getattr(state, field).dtype
    if dtype == jnp.int32:
        if not np.isfinite(bad):
            pytest.skip("no such integer")
        bad = np.clip(bad, -(2**31), 2**31 - 1)
    state = state._replace(**{field: jnp.asarray(bad, dtype)})
    for gradient in [jnp.inf, 0.0] + [0.7] * 400:
        state, _ = scale.update(gradient, state)
        assert 1 <= state.loss_scale <= 2.0**20
    assert state.loss_scale == 2.0**16


def test_a_state_of_python_numbers_becomes_one_of_arrays():
    scale = LogMaxLossScale()
    after, _ = scale.update(0.7, LogMaxLossScaleState(8.0, 0, 2.0**20, 0, 0, 0, 0))
    assert signature(after) == signature(scale.init())


def test_counters_saturate():
    scale = LogMaxLossScale(growth_interval=2**31 - 1)
    top = jnp.int32(2**31 - 1)
    state = scale.init()._replace(observations=top, good_steps=top)
    after, _ = scale.update(0.7, state)
    assert after.observations == top
    assert after.loss_scale == 2.0**16 or after.loss_scale == 2.0**15


@pytest.mark.parametrize(
    ("name", "bad", "error"),
    [
        ("mean_decay", 1.0, ValueError),
        ("mean_decay", 1 - 1e-7, ValueError),
        ("variance_decay", 1 - 1e-9, ValueError),
        ("mean_decay", -0.1, ValueError),
        ("variance_decay", np.nan, ValueError),
        ("deviations", -1.0, ValueError),
        ("growth_interval", 0, ValueError),
        ("initial_scale", 0.5, ValueError),
        ("dtype", "float32", ValueError),
        ("dtype", "int8", ValueError),
        ("dtype", "half precision", TypeError),
        ("powers_of_two", 1, TypeError),
        ("mean_decay", "0.9", TypeError),
    ],
)
def test_refuses(name, bad, error):
    with pytest.raises(error, match=name) as raised:
        LogMaxLossScale(**{name: bad})
    assert repr(bad) in str(raised.value)


def test_configuration_round_trips():
    scale = LogMaxLossScale(dtype=jnp.float8_e5m2, deviations=2)
    assert scale.get_config()["dtype"] == "float8_e5m2"
    assert LogMaxLossScale.from_config(scale.get_config()) == scale


def test_drives_an_optimizer():
    optimizer = LossScaleOptimizer(optax.sgd(0.5), "logmax")
    assert optimizer.dynamic
    params = jnp.float32(1)
    state = optimizer.init(params)
    step = jax.jit(lambda p, s: optimizer.minimize(lambda p: 0.6 * p**2, p, s))
    params, state, _ = step(params, state)
    assert optimizer.current_loss_scale(state) == 2.0**15
    assert optimizer.dynamic_counter(state) == 1
