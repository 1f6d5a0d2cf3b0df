"""The fixed loss scale: what is particular to it."""

import jax.numpy as jnp

from optax_lossscale import FixedLossScale, FixedLossScaleState


def test_is_tensorflows():
    scale = FixedLossScale(1024)
    state, should_apply = scale.update(jnp.nan, scale.init())
    assert should_apply
    assert state == FixedLossScaleState(1024)
    assert scale.get_config() == {"loss_scale_value": 1024.0, "skip_nonfinite": False}
    state, should_apply = FixedLossScale(1024, True).update(jnp.nan, state)
    assert not should_apply
