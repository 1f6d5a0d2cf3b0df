"""The tolerant loss scale: what is particular to it."""

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import replay

from optax_lossscale import DynamicLossScale, TolerantLossScale, TolerantLossScaleState

F, T = False, True


def test_without_tolerance_it_is_the_dynamic_one():
    run = np.random.default_rng(0).random(1000) < 0.8
    arguments = {"initial_scale": 16.0, "growth_interval": 3}
    tolerant, _ = replay(TolerantLossScale(0, **arguments), run)
    dynamic, _ = replay(DynamicLossScale(**arguments), run)
    assert tolerant.loss_scale.tolist() == dynamic.loss_scale.tolist()
    assert len(set(dynamic.loss_scale.tolist())) > 5


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
