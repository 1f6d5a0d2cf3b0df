"""Every rule takes the steps of its reference: eager, and jitted in a scan."""

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from helpers import scan_updates
from hypothesis import given, settings

from optax_lossscale import DynamicLossScale, HeadroomLossScale, TolerantLossScale

# Away from powers of two, around which float32 and double round apart.
magnitudes = st.integers(-60, 20).map(lambda n: 2.0 ** (n / 2) * 1.1)
# Long rather than many: each example compiles a rule of its own.
gradients = st.lists(
    magnitudes | st.sampled_from([0.0, np.inf, np.nan]), min_size=20, max_size=40
)
BOUNDS = {"min_scale": st.just(0.25), "max_scale": st.just(2.0**24)}


@st.composite
def dynamic(draw):
    """Draws valid hyperparameters, powers of two and others, all the way out."""
    scales = st.one_of(
        st.integers(-126, 126).map(lambda k: 2.0**k), st.floats(1e-30, 1e30)
    )
    low, initial, high = sorted(draw(st.tuples(scales, scales, scales)))
    return {
        "initial_scale": initial,
        "growth_interval": draw(st.integers(1, 5) | st.just(2**31 - 1)),
        "growth_factor": draw(st.sampled_from([2.0, 4.0, 1.001, 2.0**100])),
        "backoff_factor": draw(st.sampled_from([0.5, 0.25, 0.999, 2.0**-100])),
        "min_scale": low,
        "max_scale": high,
        "hysteresis": draw(st.integers(1, 4)),
        "consecutive_hysteresis": draw(st.booleans()),
    }


tolerant = st.fixed_dictionaries(
    {
        **BOUNDS,
        "tolerance": st.integers(0, 20).map(lambda n: n / 20),
        "initial_scale": st.sampled_from([0.5, 8.0, 16.0]),
        "growth_interval": st.integers(1, 5),
        "growth_factor": st.sampled_from([2.0, 8.0]),
        "backoff_factor": st.sampled_from([0.5, 0.125]),
    }
)
headroom = st.fixed_dictionaries(
    {
        **BOUNDS,
        "initial_scale": st.sampled_from([2.0, 2.0**10]),
        "min_margin": st.sampled_from([0.0, 0.5, 3.0]),
        "growth_interval": st.integers(1, 5),
        "release_steps": st.sampled_from([1, 3, 50]),
        "hysteresis_bits": st.sampled_from([0.0, 0.3, 1.0]),
    }
)


def check_dynamic(config, grads, states):
    rule = reference.Dynamic(**config)
    expected = [rule.step(finite) for finite in np.isfinite(grads)]
    # Without hysteresis there is nothing left of it.
    fields = [field.tolist() for field in states if field is not None]
    assert list(zip(*fields, strict=True)) == [x[: len(fields)] for x in expected]
    assert len(fields) == 2 + (config["hysteresis"] > 1)


def check_tolerant(config, grads, states):
    rule = reference.Tolerant(**config)
    expected = [rule.step(finite) for finite in np.isfinite(grads)]
    assert states.loss_scale.tolist() == expected


def check_headroom(config, grads, states):
    rule = reference.Headroom(**config)
    for step, grad in enumerate(grads):
        room = rule.step(grad)
        actual = float(np.log2(states.loss_scale[step]))
        if actual != rule.exponent:
            # Within a rounding error of a whole number of bits both are right.
            rooms = np.array([room, room - rule.hysteresis_bits])
            assert np.any(abs(rooms - np.round(rooms)) < 1e-4), (step, rooms, actual)
            assert abs(actual - rule.exponent) == 1
            rule.exponent = actual
        assert np.isclose(states.margin[step], rule.margin, atol=1e-3)
        assert np.isclose(states.peak[step], rule.peak, atol=1e-3)
    assert np.all(np.frexp(states.loss_scale)[0] == 0.5)


KINDS = {
    "dynamic": (DynamicLossScale, dynamic(), check_dynamic),
    "tolerant": (TolerantLossScale, tolerant, check_tolerant),
    "headroom": (HeadroomLossScale, headroom, check_headroom),
}


def step_by_step(rule, grads):
    """Runs a rule as `scan_updates` does, but outside jit."""
    state, steps = rule.init(), []
    # A scalar is put on the device: to take it from an array there would compile.
    for grad in map(jnp.float32, grads):
        state, should_apply = rule.update({"w": grad, "none": None}, state)
        steps.append((state, should_apply))
    return jax.tree.map(lambda *x: np.stack(x), *steps)


@pytest.mark.parametrize(("make", "configs", "check"), KINDS.values(), ids=KINDS)
@settings(max_examples=8)
@given(st.data())
def test_is_the_reference(make, configs, check, data):
    config, grads = data.draw(configs), data.draw(gradients)
    rule = make(**config)
    low, high = map(np.float32, (config["min_scale"], config["max_scale"]))
    for run in (scan_updates, step_by_step):
        states, should_apply = run(rule, np.array(grads, np.float32))
        states = jax.tree.map(np.asarray, states)
        check(config, grads, states)
        assert should_apply.tolist() == np.isfinite(grads).tolist()
        assert np.all((low <= states.loss_scale) & (states.loss_scale <= high))
