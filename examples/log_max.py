"""LogMax, the loss scale of OpenSeq2Seq, as a rule of one's own.

The rule (https://arxiv.org/abs/1805.10387) assumes that the logarithm of the largest
gradient of a step is normally distributed. It leaves room for 3.09 standard
deviations below the overflow of float16, so that one step in a thousand overflows:
`LossScaleOptimizer(inner, LogMax())`.

Until the first overflow the scale is that of OpenSeq2Seq; a test compares the two.
After it, OpenSeq2Seq counts the overflow as a gradient of 2**65536, and so keeps the
scale at its minimum for thousands of steps. Gradients that are all zero make its scale
nan. Here neither of the two enters the statistics, and an overflow lowers the ceiling.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_lossscale import LossScale, all_finite


class LogMaxState(NamedTuple):
    """The state of the rule."""

    loss_scale: jax.Array  # f32[]
    ceiling: jax.Array  # f32[], an upper limit; an overflow lowers it
    steps: jax.Array  # i32[], steps in the statistics
    mean: jax.Array  # f32[], of the logarithm
    slow_mean: jax.Array  # f32[], the same over more steps
    variance: jax.Array  # f32[], around slow_mean


@dataclasses.dataclass(frozen=True)
class LogMax(LossScale):
    """Leaves room for some standard deviations below the overflow of float16."""

    initial_scale: float = 1.0
    mean_decay: float = 0.99
    variance_decay: float = 0.999
    deviations: float = 3.09
    growth_interval: int = 200
    min_scale: float = 1.0
    max_scale: float = 2.0**24

    def init(self):
        """Makes a state that has seen no gradient."""
        scale, ceiling = jnp.float32(self.initial_scale), jnp.float32(self.max_scale)
        zero = jnp.float32(0)
        return LogMaxState(scale, ceiling, jnp.int32(0), zero, zero, zero)

    def update(self, grads, state, *, axis_name=None):
        """Learns the largest gradient, and sets the scale by it."""
        finite = all_finite(grads, axis_name=axis_name)
        largest = optax.tree.norm(grads, ord=jnp.inf)
        if axis_name is not None:
            largest = jax.lax.pmax(largest, axis_name)
        seen = finite & (largest > 0)  # inf and 0 have no logarithm to learn from
        x = jnp.log2(jnp.where(seen, largest, 1.0))
        steps = jnp.where(seen, optax.safe_increment(state.steps), state.steps)

        # The first step has all the weight.
        kept = jnp.array([self.mean_decay, self.variance_decay], jnp.float32)
        share = (1 - kept) / (1 - kept ** jnp.float32(steps))
        fast, slow = jnp.where(seen, share, 0.0)
        mean = state.mean + fast * (x - state.mean)
        away = x - state.slow_mean
        variance = (1 - slow) * (state.variance + slow * away**2)
        room = 16 - mean - self.deviations * jnp.sqrt(variance)
        scale = jnp.where(steps > 0, jnp.exp2(room), self(state))

        # An overflow halves the scale. In growth_interval steps it doubles again.
        grown = state.ceiling * 2 ** (1 / self.growth_interval)
        ceiling = jnp.where(finite, grown, self(state) / 2)
        ceiling = jnp.clip(ceiling, self.min_scale, self.max_scale)
        scale = jnp.maximum(jnp.minimum(scale, ceiling), self.min_scale)
        slow_mean = state.slow_mean + slow * away
        return LogMaxState(scale, ceiling, steps, mean, slow_mean, variance), finite
