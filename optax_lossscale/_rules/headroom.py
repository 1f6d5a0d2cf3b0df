"""A loss scale that follows the room above the largest gradient."""

import dataclasses
import math
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from optax_lossscale import _check as check
from optax_lossscale._rules.base import AdaptiveLossScale
from optax_lossscale._scaling import exact_exp2
from optax_lossscale._tree import unbox


class HeadroomLossScaleState(NamedTuple):
    """The state of a headroom loss scale.

    Attributes:
      loss_scale: f32[], the current loss scale.
      peak: f32[], log2 of the largest recent gradient.
      margin: f32[], bits to leave free above the peak.
      overflowed: bool[], whether the last step was not finite.
    """

    loss_scale: jax.Array
    peak: jax.Array
    margin: jax.Array
    overflowed: jax.Array


@dataclasses.dataclass(frozen=True)
class HeadroomLossScale(AdaptiveLossScale):
    """A loss scale that leaves room above the largest gradient, and learns how much.

    `DynamicLossScale` adapts the scale; this rule adapts a margin: the bits between
    the largest gradient and the overflow of the dtype. The scale then follows the
    gradients at once, up and down, mostly before they overflow. The rule does not see
    the next batch, nor the gradients of activations, and the margin leaves room for
    them. An overflow proves that the margin was too small. Per step:

        finite:     x = log2(largest gradient)
                    peak = max(x, peak - (peak - x) / release_steps)
                    if the last step was finite:
                        margin = max(margin - 1 / growth_interval, min_margin)
                    else:
                        margin = max(margin, limit - peak - log2(loss_scale))
                    highest = limit - peak - margin
                    loss_scale = 2**clip(log2(loss_scale),
                                         floor(highest - hysteresis_bits),
                                         floor(highest))
        non-finite: loss_scale = loss_scale / 2

    where `limit` is the exponent at which `dtype` overflows. After overflows the rule
    keeps the first scale that does not overflow, and widens the margin to the room
    that this scale leaves. If the gradients have grown, the peak has risen with them,
    and the margin stays. All-zero gradients have no logarithm: then the peak falls as
    the margin does.

    Args:
      initial_scale: The first scale.
      dtype: The dtype of the gradients: "float16", or "float8_e5m2".
      min_margin: The initial and smallest margin, in bits. If rare batches have
        gradients that are up to 2**n times as large as usual, the rule skips a few
        steps until it has learned that; with n + 1 it skips none.
      growth_interval: Finite steps in which the margin shrinks by one bit.
      release_steps: The time constant, in steps, with which the peak falls to smaller
        gradients. It rises to larger ones at once.
      hysteresis_bits: Bits that the gradients may fall before the scale grows, so that
        it does not oscillate.
      min_scale: The scale never falls below this.
      max_scale: The scale never rises above this. The default is the largest
        power of two whose reciprocal is a normal float32 number.

    Raises:
      ValueError: If an argument is out of its range.
      TypeError: If an argument is of the wrong type, an array for example.

    Examples:
      >>> import jax.numpy as jnp
      >>> from optax_lossscale import HeadroomLossScale
      >>> scale = HeadroomLossScale(min_margin=1, release_steps=1)
      >>> state = scale.init()
      >>> for gradient in [0.01, 0.01, jnp.inf, 0.01, 0.1]:
      ...     state, should_apply = scale.update(gradient, state)
      ...     print(int(scale(state)), bool(should_apply))
      2097152 True
      2097152 True
      1048576 False
      1048576 True
      65536 True

    References:
      Micikevicius et al., [Mixed Precision Training](https://arxiv.org/abs/1710.03740),
      2018, section 3.2, which chooses a constant scale from the largest gradient, if
      that is known. This rule is our own.
    """

    initial_scale: float = 2.0**15
    dtype: str = "float16"
    min_margin: float = 1.0
    growth_interval: int = 2000
    release_steps: int = 100
    hysteresis_bits: float = 0.5
    min_scale: float = 1.0
    max_scale: float = 2.0**126

    _needs_largest = True
    _checks: ClassVar = {
        "dtype": check.dtype,
        "min_margin": check.bits,
        "release_steps": check.count,
        "hysteresis_bits": check.bits,
    }

    def init(self) -> HeadroomLossScaleState:
        """Returns the initial state; see the base class."""
        # The peak at which the first scale is the highest allowed.
        margins = self.min_margin + math.log2(self.initial_scale)
        peak = jnp.finfo(self.dtype).maxexp - margins
        return HeadroomLossScaleState(
            loss_scale=jnp.asarray(self.initial_scale, jnp.float32),
            peak=jnp.asarray(peak, jnp.float32),
            margin=jnp.asarray(self.min_margin, jnp.float32),
            overflowed=jnp.zeros((), bool),
        )

    def _advance(self, scale, state, finite, largest):
        limit, exponent = jnp.finfo(self.dtype).maxexp, jnp.log2(scale)
        old_margin = _value_in_range(state.margin, self.min_margin, self.min_margin)
        old_peak = _value_in_range(state.peak, -256.0, limit - old_margin - exponent)
        overflowed = jnp.asarray(unbox(state.overflowed), bool)

        nonzero = largest > 0
        x = jnp.log2(jnp.where(nonzero, largest, 1.0))
        released = _lower(old_peak, (old_peak - x) / self.release_steps)
        sunk = _lower(old_peak, 1 / self.growth_interval)
        peak = jnp.where(nonzero, jnp.maximum(x, released), jnp.maximum(sunk, -256.0))
        # Leave 2**-10 bits of slack: otherwise rounding could floor the exponent one
        # too low and halve a scale that should be kept.
        left = limit - peak - exponent - 2.0**-10
        shrunk = _lower(old_margin, 1 / self.growth_interval)
        margin = jnp.where(overflowed, jnp.maximum(left, old_margin), shrunk)
        margin = jnp.minimum(jnp.maximum(margin, self.min_margin), 256.0)

        highest = limit - peak - margin
        lower, upper = jnp.floor(highest - self.hysteresis_bits), jnp.floor(highest)
        followed = lax.clamp(exact_exp2(lower), scale, exact_exp2(upper))
        return HeadroomLossScaleState(
            loss_scale=jnp.where(finite, followed, scale / 2),
            peak=jnp.where(finite, peak, old_peak),
            margin=jnp.where(finite, margin, old_margin),
            overflowed=~finite,
        )


def _value_in_range(x: Any, low: float, otherwise: Any) -> jax.Array:
    """Returns a scalar of a state, or `otherwise` if it is nan or out of range."""
    x = jnp.asarray(unbox(x), jnp.float32)
    return jnp.where((x >= low) & (x <= 256.0), x, otherwise)


def _lower(x: jax.Array, step: Any) -> jax.Array:
    """Returns `x - step`, or the next float32 below `x` if the step is too small."""
    # 1 - 1e-8 is 1 in float32: the margin would never shrink.
    return jnp.minimum(x - step, jnp.nextafter(x, jnp.float32(-jnp.inf)))
