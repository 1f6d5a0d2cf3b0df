"""The fixed loss scale: what is particular to it."""

import jax
import jax.numpy as jnp
import pytest
from helpers import OUT_OF_BOUNDS, signature

from optax_lossscale import FixedLossScale, FixedLossScaleState


def test_is_tensorflows():
    scale = FixedLossScale(1024)
    state, should_apply = scale.update(jnp.nan, scale.init())
    assert should_apply
    assert state == FixedLossScaleState(1024)
    assert scale.get_config() == {"loss_scale_value": 1024.0, "skip_nonfinite": False}
    state, should_apply = FixedLossScale(1024, True).update(jnp.nan, state)
    assert not should_apply


@pytest.mark.parametrize("restored", [*OUT_OF_BOUNDS, 1.0, 64.0])
def test_is_the_hyperparameter_whatever_a_state_says(restored):
    scale = FixedLossScale(8.0, True)
    state = FixedLossScaleState(jnp.float32(restored))
    assert scale(state) == jax.jit(scale)(state) == 8
    for gradient in (1.0, jnp.nan):
        after, _ = scale.update(gradient, state)
        assert signature(after) == signature(scale.init())
        assert after.loss_scale == 8
