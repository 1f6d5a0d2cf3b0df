"""The dynamic loss scale: what is particular to it."""

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits, replay

from optax_lossscale import DynamicLossScale


@pytest.mark.parametrize(("finite", "end"), [(False, 2.0**-126), (True, 2.0**126)])
def test_endless_storms_and_growth_end_at_the_bounds(finite, end):
    scale = DynamicLossScale(growth_interval=1, min_scale=2.0**-126)
    states, _ = replay(scale, [finite] * 300)
    assert states.loss_scale[-1] == end
    assert np.all((states.loss_scale > 0) & np.isfinite(states.loss_scale))


@pytest.mark.parametrize("interval", [3, 2**31 - 1])
def test_a_counter_restored_beyond_the_interval_still_grows(interval):
    scale = DynamicLossScale(8.0, growth_interval=interval)
    state = scale.init()._replace(good_steps=jnp.int32(2**31 - 1))
    state, _ = scale.update(1.0, state)
    assert (state.loss_scale, state.good_steps) == (16, 0)


@pytest.mark.parametrize("saved", [1, 2])
def test_update_makes_the_hysteresis_that_a_restored_state_lacks(saved):
    state = DynamicLossScale(16.0, hysteresis=saved).init()
    rule = DynamicLossScale(16.0, hysteresis=3 - saved)
    after, _ = rule.update(jnp.nan, state)
    assert_same_bits(after, rule.update(jnp.nan, rule.init())[0])
