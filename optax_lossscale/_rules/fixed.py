"""A loss scale that never changes."""

import dataclasses
from collections.abc import Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_lossscale import _check as check
from optax_lossscale._rules.base import LossScale
from optax_lossscale._scaling import all_finite


class FixedLossScaleState(NamedTuple):
    """The state of a fixed loss scale.

    Attributes:
      loss_scale: f32[], `loss_scale_value`. Other values are ignored.
    """

    loss_scale: jax.Array


@dataclasses.dataclass(frozen=True)
class FixedLossScale(LossScale):
    """A loss scale that never changes.

    The scale is `loss_scale_value`. The state cannot change it: setting it with
    `optax.tree.set(state, loss_scale=...)` or restoring another has no effect.

    Args:
      loss_scale_value: The scale, at least 1.
      skip_nonfinite: Whether to skip steps with non-finite gradients. If False, as
        in TensorFlow, gradients are not checked, and non-finite ones reach the
        parameters.

    Raises:
      ValueError: If `loss_scale_value` is below 1, above 2**126 or not finite.
      TypeError: If an argument is of the wrong type.

    Examples:
      >>> from optax_lossscale import FixedLossScale
      >>> scale = FixedLossScale(1024)
      >>> state, should_apply = scale.update({"w": float("nan")}, scale.init())
      >>> float(scale(state)), bool(should_apply)
      (1024.0, True)

    References:
      `tf.mixed_precision.experimental.FixedLossScale`, TensorFlow 2.4.
    """

    loss_scale_value: float
    skip_nonfinite: bool = False

    def __post_init__(self):
        value = check.fixed_scale("loss_scale_value", self.loss_scale_value)
        object.__setattr__(self, "loss_scale_value", value)
        check.boolean("skip_nonfinite", self.skip_nonfinite)

    @property
    def _bounds(self) -> tuple[float, float]:
        return self.loss_scale_value, self.loss_scale_value

    def init(self) -> FixedLossScaleState:
        """Returns the initial state; see the base class."""
        return FixedLossScaleState(jnp.asarray(self.loss_scale_value, jnp.float32))

    def update(
        self, grads: Any, state: Any, *, axis_name: Hashable | None = None
    ) -> tuple[FixedLossScaleState, jax.Array]:
        """Returns the initial state, a scale for each member; see the base class."""
        state = FixedLossScaleState(self(state))
        if not self.skip_nonfinite:
            return state, all_finite(None)
        return state, all_finite(grads, axis_name=axis_name)
