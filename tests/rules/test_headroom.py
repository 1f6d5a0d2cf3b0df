"""The headroom loss scale: its rule against the reference, and what it is for."""

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from helpers import scan_updates, signature
from hypothesis import given

from optax_lossscale import (
    DynamicLossScale,
    HeadroomLossScale,
    HeadroomLossScaleState,
    LossScaleOptimizer,
)

magnitudes = st.integers(-60, 20).map(lambda n: 2.0 ** (n / 2) * 1.1)
gradients = st.lists(magnitudes | st.sampled_from([0.0, np.inf, np.nan]), max_size=30)
configs = st.fixed_dictionaries(
    {
        "initial_scale": st.sampled_from([2.0, 2.0**10]),
        "min_margin": st.sampled_from([0.0, 0.5, 3.0]),
        "growth_interval": st.integers(1, 5),
        "release_steps": st.sampled_from([1, 3, 50]),
        "hysteresis": st.sampled_from([0.0, 0.3, 1.0]),
        "min_scale": st.just(0.25),
        "max_scale": st.just(2.0**24),
    }
)


def run(scale, grads):
    return scan_updates(scale, jnp.array(grads, jnp.float32))


@given(configs, gradients)
def test_is_the_reference_in_a_jitted_scan(config, grads):
    states, should_apply = run(HeadroomLossScale(**config), grads)
    rule = reference.Headroom(**config)
    assert should_apply.tolist() == np.isfinite(grads).tolist()
    for step, grad in enumerate(grads):
        room = rule.step(grad)
        actual = float(np.log2(states.loss_scale[step]))
        if actual != rule.exponent:
            # Within a rounding error of a whole number of bits both are right.
            rooms = np.array([room, room - rule.hysteresis])
            assert np.any(abs(rooms - np.round(rooms)) < 1e-4), (step, rooms, actual)
            assert abs(actual - rule.exponent) == 1
            rule.exponent = actual
        assert np.isclose(states.margin[step], rule.margin, atol=1e-3)
        assert np.isclose(states.peak[step], rule.peak, atol=1e-3)


@given(configs, gradients)
def test_scales_are_powers_of_two_within_bounds(config, grads):
    scales = run(HeadroomLossScale(**config), grads)[0].loss_scale
    assert np.all((scales >= 0.25) & (scales <= 2.0**24))
    assert np.all(np.frexp(scales)[0] == 0.5)


def test_steps_down_before_gradients_that_grow_overflow():
    grads = np.float32(2.0 ** np.linspace(-8, 8, 400))
    states, _ = run(HeadroomLossScale(), grads)
    # What the next gradient is multiplied by.
    assert np.all(grads[1:] * states.loss_scale[:-1] < 65504)
    dynamic, _ = run(DynamicLossScale(), grads)
    assert not np.all(grads[1:] * dynamic.loss_scale[:-1] < 65504)


def test_rises_as_gradients_shrink():
    grads = np.float32(2.0 ** np.linspace(0, -10, 1000))
    states, _ = run(HeadroomLossScale(), grads)
    room = 16 - np.log2(grads * states.loss_scale)
    assert np.all(room[300:] < 5)


def test_follows_the_dynamic_rule_where_gradients_stay():
    """With an unseen limit: one overflow in each growth interval."""

    @jax.jit
    def step(state, _):
        grad = jnp.where(scale(state) > 2.0**10, jnp.inf, 0.9)
        state, should_apply = scale.update(grad, state)
        return state, (scale(state), should_apply)

    scale = HeadroomLossScale(growth_interval=50, hysteresis=0)
    _, (scales, applied) = jax.lax.scan(step, scale.init(), length=1000)
    assert np.all(scales[20:] >= 2.0**10)
    assert int(np.sum(~applied[:20])) == 5
    assert 18 <= int(np.sum(~applied[20:])) <= 21


def test_rounding_does_not_halve_the_scale_that_it_keeps():
    scale = HeadroomLossScale(release_steps=1, hysteresis=0)
    for grad in 2.0 ** np.linspace(-3, -2, 97):
        states, _ = run(scale, [grad, np.inf, np.inf, grad])
        assert states.loss_scale[3] == states.loss_scale[2] == states.loss_scale[0] / 4


def test_learns_the_margin_from_what_did_not_overflow():
    scale = HeadroomLossScale(initial_scale=2.0**13, release_steps=1)
    # Nothing that the gradients show explains it: four bits more are needed.
    states, _ = run(scale, [0.9] * 3 + [np.inf] * 4 + [0.9])
    assert states.loss_scale.tolist()[2:] == [2.0**n for n in (14, 13, 12, 11, 10, 10)]
    assert np.isclose(states.margin[-1], 16 - np.log2(0.9) - 10, atol=2e-3)
    # Here it is the gradients that have grown, and the margin remains.
    states, _ = run(scale, [0.9] * 3 + [np.inf] * 4 + [20.0])
    assert states.loss_scale[-1] == 2.0**10
    assert np.isclose(states.margin[-1], 16 - np.log2(20.0) - 10, atol=2e-3)


def test_does_not_flutter():
    rng = np.random.default_rng(0)
    grads = 2.0 ** rng.normal(-5, 0.3, 1000)
    states, _ = run(HeadroomLossScale(), grads)
    assert np.sum(np.diff(states.loss_scale[300:]) != 0) <= 4


def test_zeros_let_it_grow_as_slowly_as_the_dynamic_one():
    scale = HeadroomLossScale(growth_interval=50, hysteresis=0)
    states, should_apply = run(scale, [0.0] * 500)
    assert np.all(should_apply)
    dynamic, _ = run(DynamicLossScale(growth_interval=50), [0.0] * 500)
    ratio = np.log2(states.loss_scale / dynamic.loss_scale)
    assert np.all(abs(ratio) <= 1)


@pytest.mark.parametrize("interval", [10**8, 2**31 - 1])
def test_the_longest_intervals_release_margin_and_peak_in_every_step(interval):
    scale = HeadroomLossScale(growth_interval=interval, release_steps=interval)
    state = scale.init()._replace(margin=jnp.float32(9.0), peak=jnp.float32(-3.0))
    for gradient in (0.0, 2.0**-10):
        after = state
        for _ in range(3):
            before, (after, _) = after, scale.update(gradient, after)
            # 1e-8 less is the same in float32.
            assert before.margin - 2e-6 < after.margin < before.margin
            assert before.peak - 2e-6 < after.peak < before.peak


def test_short_intervals_release_by_what_they_say():
    scale = HeadroomLossScale(growth_interval=4, release_steps=2)
    state = scale.init()._replace(margin=jnp.float32(9.0), peak=jnp.float32(-3.0))
    for gradient, peak in ((0.0, -3.25), (2.0**-10, -6.5), (1.0, 0.0)):
        after, _ = scale.update(gradient, state)
        assert (after.margin, after.peak) == (8.75, peak)


def test_extreme_gradients_stay_within_bounds():
    largest = np.finfo(np.float32).max
    for grads in ([1e-38], [1e-45], [largest], [1e-38, largest, np.inf] * 5):
        states, _ = run(HeadroomLossScale(release_steps=1), grads)
        assert np.all((states.loss_scale >= 1) & (states.loss_scale <= 2.0**126))
        assert np.all(np.isfinite(states.peak) & np.isfinite(states.margin))


def test_a_storm_ends_at_the_minimum_and_recovers():
    scale = HeadroomLossScale(growth_interval=20)
    states, should_apply = run(scale, [np.nan] * 300 + [0.9] * 400)
    assert states.loss_scale[299] == 1
    assert not np.any(should_apply[:300])
    assert states.loss_scale[-1] == 2.0**14


def test_a_tree_without_numbers_tells_nothing():
    scale = HeadroomLossScale()
    state, should_apply = scale.update({"a": None, "n": jnp.int32(3)}, scale.init())
    assert state.loss_scale == 2.0**15
    assert bool(should_apply)


@pytest.mark.parametrize("field", ["loss_scale", "peak", "margin"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e30, -1e30, 0.0])
def test_a_state_restored_out_of_bounds_heals(field, bad):
    scale = HeadroomLossScale(
        max_scale=2.0**20, growth_interval=1, release_steps=1, hysteresis=0
    )
    for first in (jnp.inf, 0.0, 0.9):
        state = scale.init()._replace(**{field: jnp.float32(bad)})
        for gradient in [first] + [0.9] * 300:
            state, _ = scale.update(gradient, state)
            assert 1 <= state.loss_scale <= 2.0**20
        assert float(state.loss_scale) == 2.0**15


def test_a_state_of_python_numbers_becomes_one_of_arrays():
    scale = HeadroomLossScale()
    after, _ = scale.update(0.7, HeadroomLossScaleState(8.0, 0.0, 1.0, False))
    assert signature(after) == signature(scale.init())


@pytest.mark.parametrize(
    ("name", "bad", "error"),
    [
        ("min_margin", -1.0, ValueError),
        ("min_margin", np.inf, ValueError),
        ("growth_interval", 0, ValueError),
        ("release_steps", 0, ValueError),
        ("hysteresis", -0.5, ValueError),
        ("max_scale", 2.0**127, ValueError),
        ("initial_scale", 0.5, ValueError),
        ("dtype", "float32", ValueError),
        ("dtype", None, ValueError),
        ("release_steps", True, TypeError),
        ("hysteresis", "1", TypeError),
    ],
)
def test_refuses(name, bad, error):
    with pytest.raises(error, match=name) as raised:
        HeadroomLossScale(**{name: bad})
    assert repr(bad) in str(raised.value)


def test_configuration_round_trips():
    scale = HeadroomLossScale(dtype=jnp.float8_e5m2, min_margin=2)
    assert scale.get_config()["dtype"] == "float8_e5m2"
    assert HeadroomLossScale.from_config(scale.get_config()) == scale


def test_drives_an_optimizer():
    optimizer = LossScaleOptimizer(optax.sgd(0.5), "headroom")
    assert optimizer.dynamic
    assert optimizer.dynamic_growth_steps == HeadroomLossScale().growth_interval
    params = jnp.float32(1)
    state = optimizer.init(params)
    step = jax.jit(lambda p, s: optimizer.minimize(lambda p: 6.0 * p**2, p, s))
    params, state, _ = step(params, state)
    assert optimizer.current_loss_scale(state) < 2.0**15
    assert optimizer.dynamic_counter(state) is None
