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


def boxed(x):
    """Returns an array in a box, as Flax nnx has it."""
    return {"value": x}


class TestFixedScaleInAStateThatSaysOtherwise:
    @pytest.mark.parametrize("skip", [False, True])
    @pytest.mark.parametrize("restored", [*OUT_OF_BOUNDS, 1.0, 64.0])
    def test_is_the_hyperparameter(self, restored, skip):
        scale = FixedLossScale(8.0, skip)
        state = FixedLossScaleState(jnp.float32(restored))
        assert scale(state) == jax.jit(scale)(state) == 8
        for gradient in (1.0, jnp.nan):
            after, _ = scale.update(gradient, state)
            assert signature(after) == signature(scale.init())
            assert after.loss_scale == 8

    def test_is_of_the_shape_of_the_state(self):
        scale, several = FixedLossScale(8.0), jnp.array([jnp.nan, 8, jnp.inf])
        assert scale(FixedLossScaleState(several)).tolist() == [8, 8, 8]
        assert scale(FixedLossScaleState(boxed(several))).tolist() == [8, 8, 8]
        assert scale(FixedLossScaleState(128)) == 8
        states = FixedLossScaleState(several)
        assert jax.vmap(scale)(states).tolist() == [8, 8, 8]
        after, _ = jax.vmap(scale.update)(jnp.ones(3), states)
        assert after.loss_scale.tolist() == [8, 8, 8]
