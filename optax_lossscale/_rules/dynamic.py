"""A loss scale that grows after finite steps and backs off after non-finite ones."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from optax_lossscale import _check as check
from optax_lossscale._rules.base import AdaptiveLossScale, count_in_range


class DynamicLossScaleState(NamedTuple):
    """The state of a dynamic loss scale.

    Attributes:
      loss_scale: f32[], the current loss scale.
      good_steps: i32[], consecutive finite steps since the scale last changed or
        a step was last skipped.
      hysteresis_left: i32[], non-finite steps until the scale backs off; None with
        `hysteresis=1`, where it backs off after each.
    """

    loss_scale: jax.Array
    good_steps: jax.Array
    hysteresis_left: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class DynamicLossScale(AdaptiveLossScale):
    """A loss scale that finds the largest safe value by itself.

    It grows after `growth_interval` consecutive finite steps and backs off after
    a non-finite step, which is skipped. Per step:

        finite:     good_steps += 1
                    if good_steps >= growth_interval:
                        loss_scale = min(loss_scale * growth_factor, max_scale)
                        good_steps = 0
                    if it grew (or consecutive_hysteresis):
                        hysteresis_left = hysteresis
        non-finite: good_steps = 0
                    hysteresis_left = max(hysteresis_left - 1, 0)
                    if hysteresis_left == 0:
                        loss_scale = max(loss_scale * backoff_factor, min_scale)

    The scale is always a finite number in [min_scale, max_scale]. With
    `hysteresis=1` this is the rule of TensorFlow, Keras, PyTorch and jmp, and of Flax
    with `growth_interval + 1`. With more hysteresis it is Megatron's and DeepSpeed's.

    Args:
      initial_scale: The first scale. Too high costs a few skipped steps at the
        start; too low costs many steps of lost gradients.
      growth_interval: Consecutive finite steps before the scale grows.
      growth_factor: Multiplies the scale when it grows; above 1. Powers of two keep
        scaling exact.
      backoff_factor: Multiplies the scale when it backs off; between 0 and 1.
      min_scale: The scale never falls below this.
      max_scale: The scale never rises above this. The default is the largest
        power of two whose reciprocal is a normal float32 number.
      hysteresis: Non-finite steps before the scale backs off.
      consecutive_hysteresis: Whether every finite step restores the hysteresis,
        so that only consecutive non-finite steps count. By default only growth
        restores it.

    Raises:
      ValueError: If an argument is out of its range.
      TypeError: If an argument is of the wrong type, an array for example.

    Examples:
      >>> import jax.numpy as jnp
      >>> from optax_lossscale import DynamicLossScale
      >>> scale = DynamicLossScale(initial_scale=8.0, growth_interval=2)
      >>> state = scale.init()
      >>> for gradient in [1.0, 1.0, jnp.inf, 1.0]:
      ...     state, should_apply = scale.update(gradient, state)
      ...     print(scale(state), bool(should_apply))
      8.0 True
      16.0 True
      8.0 False
      8.0 True

    References:
      Micikevicius et al., [Mixed Precision Training](https://arxiv.org/abs/1710.03740),
      2018, section 3.2;
      `tf.mixed_precision.experimental.DynamicLossScale`, TensorFlow 2.4;
      `DynamicGradScaler`, Megatron-LM, for the hysteresis.
    """

    initial_scale: float = 2.0**15
    growth_interval: int = 2000
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    min_scale: float = 1.0
    max_scale: float = 2.0**126
    hysteresis: int = 1
    consecutive_hysteresis: bool = False

    _checks = check.FACTORS | {
        "hysteresis": check.count,
        "consecutive_hysteresis": check.boolean,
    }

    def init(self) -> DynamicLossScaleState:
        """Returns the initial state; see the base class."""
        counts = self.hysteresis > 1
        return DynamicLossScaleState(
            loss_scale=jnp.asarray(self.initial_scale, jnp.float32),
            good_steps=jnp.zeros((), jnp.int32),
            hysteresis_left=jnp.asarray(self.hysteresis, jnp.int32) if counts else None,
        )

    def _advance(self, scale, state, finite, largest):
        good_steps = count_in_range(state.good_steps, self.growth_interval - 1)
        good_steps = jnp.where(finite, good_steps + 1, 0)
        grow = good_steps >= self.growth_interval
        left, back_off = self._count_down(state.hysteresis_left, finite, grow)
        grown, lower = scale * self.growth_factor, scale * self.backoff_factor
        return DynamicLossScaleState(
            loss_scale=jnp.where(grow, grown, jnp.where(back_off, lower, scale)),
            good_steps=jnp.where(grow, 0, good_steps),
            hysteresis_left=left,
        )

    def _count_down(self, left, finite, grow):
        """Returns the hysteresis that is left, and whether the scale backs off."""
        if self.hysteresis == 1:
            return None, ~finite
        left = self.hysteresis if left is None else left
        left = count_in_range(left, self.hysteresis)
        left = jnp.where(finite, left, jnp.maximum(left - 1, 0))
        restore = finite if self.consecutive_hysteresis else grow
        return jnp.where(restore, self.hysteresis, left), ~finite & (left == 0)
