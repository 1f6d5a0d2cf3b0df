"""A loss scale that tolerates a share of non-finite steps."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_lossscale import _check as check
from optax_lossscale._rules.base import AdaptiveLossScale, count_in_range


class TolerantLossScaleState(NamedTuple):
    """The state of a tolerant loss scale.

    Attributes:
      loss_scale: f32[], the current loss scale.
      good_steps: i32[], consecutive finite steps since the scale last grew or a
        step was last skipped.
      steps: i32[], steps since the scale last grew or backed off.
      nonfinite_steps: i32[], non-finite steps since the scale last backed off.
    """

    loss_scale: jax.Array
    good_steps: jax.Array
    steps: jax.Array
    nonfinite_steps: jax.Array


@dataclasses.dataclass(frozen=True)
class TolerantLossScale(AdaptiveLossScale):
    """A dynamic loss scale that tolerates a few non-finite steps.

    Every non-finite step is skipped, but the scale backs off only if there were too
    many: if the non-finite steps since it last backed off, divided by all steps since
    it last changed, reach `tolerance`. An occasional overflow, from an unusual batch,
    does not cost a whole growth interval. Per step:

        finite:     good_steps += 1; steps += 1
                    if good_steps >= growth_interval:
                        loss_scale = min(loss_scale * growth_factor, max_scale)
                        good_steps = steps = 0
        non-finite: good_steps = 0; steps += 1; nonfinite_steps += 1
                    if nonfinite_steps / steps >= tolerance:
                        loss_scale = max(loss_scale * backoff_factor, min_scale)
                        steps = nonfinite_steps = 0

    This is fairseq's rule, where growth resets `steps` but not `nonfinite_steps`.
    fairseq raises an error at the minimum; this scale stays there. It is always a
    finite number in [min_scale, max_scale].

    Args:
      tolerance: The share of non-finite steps at which the scale backs off, from 0
        to 1. With 0 it backs off after each, as in `DynamicLossScale`. With a higher
        tolerance, a scale that has become too high falls later: after k finite
        steps, tolerance / (1 - tolerance) * k steps are skipped first.
      initial_scale: The first scale.
      growth_interval: Consecutive finite steps before the scale grows.
      growth_factor: Multiplies the scale when it grows; above 1. Powers of two keep
        scaling exact.
      backoff_factor: Multiplies the scale when it backs off; between 0 and 1.
      min_scale: The scale never falls below this.
      max_scale: The scale never rises above this. The default is the largest
        power of two whose reciprocal is a normal float32 number.

    Raises:
      ValueError: If an argument is out of its range.
      TypeError: If an argument is of the wrong type, an array for example.

    Examples:
      >>> import jax.numpy as jnp
      >>> from optax_lossscale import TolerantLossScale
      >>> scale = TolerantLossScale(0.5, initial_scale=8.0)
      >>> state = scale.init()
      >>> for gradient in [1.0, 1.0, jnp.inf, jnp.inf, 1.0]:
      ...     state, should_apply = scale.update(gradient, state)
      ...     print(scale(state), bool(should_apply))
      8.0 True
      8.0 True
      8.0 False
      4.0 False
      4.0 True

    References:
      `DynamicLossScaler`, fairseq, `fairseq/optim/dynamic_loss_scaler.py`.
    """

    tolerance: float
    initial_scale: float = 2.0**15
    growth_interval: int = 2000
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    min_scale: float = 1.0
    max_scale: float = 2.0**126

    _checks = check.FACTORS | {"tolerance": check.share}

    def init(self) -> TolerantLossScaleState:
        """Returns the initial state; see the base class."""
        return TolerantLossScaleState(
            loss_scale=jnp.asarray(self.initial_scale, jnp.float32),
            good_steps=jnp.zeros((), jnp.int32),
            steps=jnp.zeros((), jnp.int32),
            nonfinite_steps=jnp.zeros((), jnp.int32),
        )

    def _advance(self, scale, state, finite, largest):
        good_steps = count_in_range(state.good_steps, self.growth_interval - 1)
        steps = count_in_range(state.steps)
        nonfinite_steps = count_in_range(state.nonfinite_steps)
        # With more steps than these, growth_interval in a row would have been finite,
        # and the scale would have grown. A larger restored count could keep the scale
        # from ever backing off.
        most = self.growth_interval * jnp.float32(nonfinite_steps)
        most += jnp.float32(good_steps)
        steps = jnp.where(jnp.float32(steps) > most, most.astype(jnp.int32), steps)
        good_steps = jnp.where(finite, good_steps + 1, 0)
        steps = optax.safe_increment(steps)
        one_more = optax.safe_increment(nonfinite_steps)
        nonfinite_steps = jnp.where(finite, nonfinite_steps, one_more)
        grow = good_steps >= self.growth_interval
        # A share of exactly the tolerance must back off, but in float32 0.15 * 100 is
        # above 15, and GPUs divide inexactly: require a millionth less.
        enough = jnp.float32(self.tolerance * (1 - 1e-6)) * jnp.float32(steps)
        back_off = ~finite & (jnp.float32(nonfinite_steps) >= enough)
        grown, lower = scale * self.growth_factor, scale * self.backoff_factor
        return TolerantLossScaleState(
            loss_scale=jnp.where(grow, grown, jnp.where(back_off, lower, scale)),
            good_steps=jnp.where(grow, 0, good_steps),
            steps=jnp.where(grow | back_off, 0, steps),
            nonfinite_steps=jnp.where(back_off, 0, nonfinite_steps),
        )
