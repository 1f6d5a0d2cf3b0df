"""The LogMax loss scale: what is particular to it."""

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import scan_updates

from optax_lossscale import LogMaxLossScale


def runs_of(scale, grads):
    return scan_updates(scale, jnp.array(grads, jnp.float32))


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
