"""A loss scale from the statistics of the largest gradient."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_lossscale import _check as check
from optax_lossscale._rules.base import AdaptiveLossScale
from optax_lossscale._scaling import exact_exp2, overflow_exponent


class LogMaxLossScaleState(NamedTuple):
    """The state of a LogMax loss scale.

    Attributes:
      loss_scale: f32[], the current loss scale.
      good_steps: i32[], consecutive finite steps since the ceiling last rose or a
        step was last skipped.
      ceiling: f32[], the upper limit of the scale, lowered by overflows.
      observations: i32[], steps seen, except those whose gradients were not finite or
        all zero. Stays at its maximum.
      mean: f32[], running mean of log2 of the largest gradient.
      slow_mean: f32[], the same mean over more steps.
      variance: f32[], running variance around `slow_mean`.
    """

    loss_scale: jax.Array
    good_steps: jax.Array
    ceiling: jax.Array
    observations: jax.Array
    mean: jax.Array
    slow_mean: jax.Array
    variance: jax.Array


@dataclasses.dataclass(frozen=True)
class LogMaxLossScale(AdaptiveLossScale):
    """A loss scale that keeps overflows unlikely, given the gradients seen so far.

    The rule assumes that the logarithm of the largest gradient is normally distributed,
    and sets the scale so that gradients overflow with a given probability. Per step:

        finite:     x = log2(largest gradient)          (not if all are zero)
                    mean = running mean of x, with decay mean_decay
                    deviation = running standard deviation of x, with variance_decay
                    good_steps += 1
                    if good_steps >= growth_interval:
                        ceiling = min(ceiling * 2, max_scale); good_steps = 0
        non-finite: ceiling = loss_scale / 2; good_steps = 0
        both:       room = limit - mean - deviations * deviation
                    loss_scale = min(2**floor(room), ceiling), within the bounds

    where `limit` is the exponent at which `dtype` overflows.

    This is OpenSeq2Seq's rule with a ceiling. There an overflow enters the running
    moments as a gradient of 2**65536, which holds the scale at its minimum for
    thousands of steps, and all-zero gradients make the scale nan. Here neither enters
    the moments: an overflow lowers the ceiling and so halves the scale.

    Args:
      initial_scale: The first scale; the second follows from the first gradients.
      dtype: What gradients are computed in: "float16", or "float8_e5m2".
      mean_decay: The decay of the running mean, at least 0 and at most 1 - 2**-20.
      variance_decay: The decay of the running variance.
      deviations: Standard deviations between the mean and the overflow. With 3.09,
        one step in 1000 is beyond them if the logarithms are normally distributed.
      growth_interval: Consecutive finite steps before the ceiling doubles.
      powers_of_two: Whether to round the scale down to a power of two, so that scaling
        is exact. The first scale and the bounds are not rounded.
      min_scale: The scale never falls below this.
      max_scale: The scale never rises above this. The default is the largest
        power of two whose reciprocal is a normal float32 number.

    Raises:
      ValueError: If an argument is out of its range.
      TypeError: If an argument is of the wrong type, an array for example.

    Examples:
      >>> import jax.numpy as jnp
      >>> from optax_lossscale import LogMaxLossScale
      >>> scale = LogMaxLossScale(growth_interval=2)
      >>> state = scale.init()
      >>> for gradient in [0.75, 0.75, jnp.inf, 0.75, 0.75, 0.01]:
      ...     state, should_apply = scale.update(gradient, state)
      ...     print(int(scale(state)), bool(should_apply))
      65536 True
      65536 True
      32768 False
      32768 True
      65536 True
      512 True

    References:
      Kuchaiev et al., [Mixed-Precision Training for NLP and Speech Recognition with
      OpenSeq2Seq](https://arxiv.org/abs/1805.10387), 2018;
      `LogMaxScaler`, OpenSeq2Seq,
      `open_seq2seq/optimizers/automatic_loss_scaler.py`.
    """

    initial_scale: float = 2.0**15
    dtype: str = "float16"
    mean_decay: float = 0.99
    variance_decay: float = 0.999
    deviations: float = 3.09
    growth_interval: int = 200
    powers_of_two: bool = True
    min_scale: float = 1.0
    max_scale: float = 2.0**126

    _needs_largest = True

    def __post_init__(self):
        self._check(
            dtype=check.dtype,
            mean_decay=check.decay,
            variance_decay=check.decay,
            deviations=check.bits,
            powers_of_two=check.boolean,
        )

    def _initial(self) -> LogMaxLossScaleState:
        # One buffer for each field: donating a buffer twice is an error.
        return LogMaxLossScaleState(
            loss_scale=jnp.asarray(self.initial_scale, jnp.float32),
            good_steps=jnp.zeros((), jnp.int32),
            ceiling=jnp.asarray(self.max_scale, jnp.float32),
            observations=jnp.zeros((), jnp.int32),
            mean=jnp.zeros((), jnp.float32),
            slow_mean=jnp.zeros((), jnp.float32),
            variance=jnp.zeros((), jnp.float32),
        )

    def _advance(self, state, finite, largest):
        scale = state.loss_scale
        # A restored state may be out of range or nan: then forget its statistics.
        ceiling = self._clip(jnp.fmin(state.ceiling, self.max_scale))
        known = (abs(state.mean) <= 256) & (abs(state.slow_mean) <= 256)
        known &= (state.variance >= 0) & (state.variance <= 2.0**18)
        mean, slow_mean, variance = (
            jnp.where(known, x, 0.0)
            for x in (state.mean, state.slow_mean, state.variance)
        )
        observations = jnp.where(known, jnp.maximum(state.observations, 0), 0)

        good_steps = optax.safe_increment(jnp.maximum(state.good_steps, 0))
        good_steps = jnp.where(finite, good_steps, 0)
        grow = good_steps >= self.growth_interval
        ceiling = self._clip(jnp.where(grow, ceiling * 2, ceiling))
        ceiling = jnp.where(finite, ceiling, self._clip(scale / 2))

        seen = finite & (largest > 0)
        x = jnp.log2(jnp.where(seen, largest, 1.0))
        observations = jnp.where(seen, optax.safe_increment(observations), observations)
        # The first observation has all the weight.
        fast = jnp.where(seen, _weight_of_last(self.mean_decay, observations), 0.0)
        slow = jnp.where(seen, _weight_of_last(self.variance_decay, observations), 0.0)
        mean += fast * (x - mean)
        away = x - slow_mean
        slow_mean += slow * away
        variance = (1 - slow) * (variance + slow * away * away)

        deviation = jnp.sqrt(variance)
        room = overflow_exponent(self.dtype) - mean - self.deviations * deviation
        room = jnp.fmin(jnp.fmax(room, -126.0), 126.0)
        proposed = exact_exp2(jnp.floor(room)) if self.powers_of_two else jnp.exp2(room)
        # Keep the scale until there is an observation.
        proposed = jnp.where(observations > 0, proposed, scale)
        return LogMaxLossScaleState(
            loss_scale=jnp.fmin(proposed, ceiling),
            good_steps=jnp.where(grow, 0, good_steps),
            ceiling=ceiling,
            observations=observations,
            mean=mean,
            slow_mean=slow_mean,
            variance=variance,
        )


def _weight_of_last(decay: float, observations: jax.Array) -> jax.Array:
    """Returns the weight of the last observation in a bias-corrected running mean."""
    kept = jnp.float32(decay)
    count = jnp.maximum(observations, 1).astype(jnp.float32)
    return (1 - kept) / (1 - kept**count)
