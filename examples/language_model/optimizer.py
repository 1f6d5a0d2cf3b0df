"""The optimizer: clipping, AdamW, an average of the parameters, and loss scaling."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from examples.language_model.config import Config
from optax_lossscale import (
    DynamicLossScale,
    FixedLossScale,
    HeadroomLossScale,
    LossScaleOptimizer,
    TolerantLossScale,
)

RULES = {
    "fixed": FixedLossScale(2.0**15, skip_nonfinite=True),
    "dynamic": DynamicLossScale(),
    "tolerant": TolerantLossScale(0.05),
    "headroom": HeadroomLossScale(),
}


def make_optimizer(config: Config) -> optax.GradientTransformationExtraArgs:
    """Returns the optimizer of a run, a `LossScaleOptimizer` unless it scales no loss.

    `LossScaleOptimizer` is outermost. A step that it skips changes nothing inside: no
    moment, no average of the parameters, and no count of the schedule.
    """
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=config.learning_rate,
        warmup_steps=config.warmup_steps,
        decay_steps=max(config.steps, config.warmup_steps + 1),
        end_value=0.1 * config.learning_rate,
    )
    inner = optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(schedule, b2=0.95, weight_decay=config.weight_decay, mask=decays),
        average_parameters(config.average_decay),
    )
    if config.loss_scale == "none":
        return inner
    rule = RULES[config.loss_scale]
    recorded = optax.chain(record_largest(), inner)
    return LossScaleOptimizer(recorded, rule, retries=config.retries)


def decays(params: Any) -> Any:
    """Tells which parameters decay: neither biases nor the scales of layer norms.

    By name, because biases of stacked blocks also have two dimensions.
    """
    return jax.tree.map_with_path(
        lambda path, _: path[-1].key in ("kernel", "embedding"), params
    )


class LargestState(NamedTuple):
    """The state of `record_largest`.

    Attributes:
      largest: f32[], the magnitude of the largest gradient of the last step.
    """

    largest: jax.Array


def record_largest() -> optax.GradientTransformation:
    """Records the largest gradient; the first part of a chain."""

    def init(params):
        return LargestState(jnp.float32(0))

    def update(updates, state, params=None):
        return updates, LargestState(optax.tree.norm(updates, ord="inf"))

    return optax.GradientTransformation(init, update)


class AverageState(NamedTuple):
    """The state of `average_parameters`.

    Attributes:
      updates: i32[], their number.
      average: The averaged parameters.
    """

    updates: jax.Array
    average: Any


def average_parameters(decay: float) -> optax.GradientTransformation:
    """Keeps an exponential average of the parameters; the last part of a chain.

    Early averages are over fewer steps, as in TensorFlow: the decay of the n-th update
    is at most (1 + n) / (10 + n).
    """

    def init(params):
        return AverageState(jnp.int32(0), jax.tree.map(jnp.copy, params))

    def update(updates, state, params=None):
        if params is None:
            raise ValueError("average_parameters needs the parameters: pass params.")
        n = state.updates
        rate = 1 - jnp.minimum(decay, (1 + n) / (10 + n))
        new_params = optax.apply_updates(params, updates)
        average = optax.incremental_update(new_params, state.average, rate)
        return updates, AverageState(n + 1, average)

    return optax.GradientTransformation(init, update)


def averaged_parameters(opt_state: Any) -> Any:
    """Returns the averaged parameters of an optimizer's state."""
    return optax.tree.get(opt_state, "average")
