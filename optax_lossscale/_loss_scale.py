"""Loss scales: hyperparameters, state and rule."""

import abc
import dataclasses
import functools
from collections.abc import Hashable
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import optax

from optax_lossscale._check import (
    LARGEST_SCALE,
    SMALLEST_SCALE,
    check_bool,
    check_count,
    check_dynamics,
    check_scale,
)
from optax_lossscale._tree import all_finite


class LossScale(abc.ABC):
    """The base of all loss scales: hyperparameters and a rule, no arrays.

    Loss scaling multiplies the loss by a scale and divides the gradients by it:

        loss = ...
        loss *= loss_scale
        grads = gradients(loss, params)
        grads /= loss_scale

    Mathematically this has no effect. In float16 small gradients underflow without.

    A subclass is a frozen dataclass whose fields are its hyperparameters. It
    defines `init` and `update`; `get_config`, `from_config`, equality and hash
    follow from the fields. Everything that changes during training is in the
    state, a pytree with at least the field `loss_scale: f32[]`. (No hyperparameter
    may be named `loss_scale`: that is the method which reads the state.) Where it has
    hyperparameters `min_scale` and `max_scale`, they bound the scale that is read.

    Attributes:
      skip_nonfinite: False promises that `update` never asks to skip a step, and
        no check and no branch is compiled then.

    Examples:
      A scale that only ever backs off:

      >>> import dataclasses
      >>> import jax.numpy as jnp
      >>> from optax_lossscale import LossScale, LossScaleOptimizer, all_finite
      >>> from typing import NamedTuple
      >>> class State(NamedTuple):
      ...     loss_scale: jnp.ndarray
      >>> @dataclasses.dataclass(frozen=True)
      ... class BackoffOnly(LossScale):
      ...     initial_scale: float = 2.0**24
      ...
      ...     def init(self):
      ...         return State(jnp.float32(self.initial_scale))
      ...
      ...     def update(self, grads, state, *, axis_name=None):
      ...         finite = all_finite(grads, axis_name=axis_name)
      ...         lower = jnp.maximum(self(state) / 2, 1.0)
      ...         return State(jnp.where(finite, self(state), lower)), finite
      >>> scale = BackoffOnly()
      >>> state, should_apply = scale.update(jnp.array(jnp.inf), scale.init())
      >>> float(scale(state)), bool(should_apply)
      (8388608.0, False)
      >>> BackoffOnly.from_config(scale.get_config()) == scale
      True

    References:
      Micikevicius et al., [Mixed Precision Training](https://arxiv.org/abs/1710.03740),
      2018; `tf.mixed_precision.experimental.LossScale`, TensorFlow 2.4.
    """

    skip_nonfinite = True

    @abc.abstractmethod
    def init(self) -> Any:
        """Returns the initial state.

        Returns:
          A pytree of strongly typed arrays, one of them `loss_scale: f32[]`.
        """

    @abc.abstractmethod
    def update(
        self, grads: Any, state: Any, *, axis_name: Hashable | None = None
    ) -> tuple[Any, jax.Array]:
        """Advances the loss scale by one step.

        Args:
          grads: Unscaled gradients, any pytree. None and integer leaves are
            ignored; without any leaves the gradients count as finite.
          state: What `init` or `update` returned.
          axis_name: A name, or tuple of names, of mapped axes. The finiteness
            flag is reduced over them, so that all devices decide the same.

        Returns:
          The new state, of the same structure, shapes and dtypes; and
          `should_apply_gradients: bool[]`, False if this step is to be skipped.
        """

    def loss_scale(self, state: Any) -> jax.Array:
        """Returns the current loss scale, from which `update` starts too.

        Args:
          state: What `init` or `update` returned. Its scale may be out of bounds, if it
            was restored or set by hand.

        Returns:
          f32[], the number that the loss is multiplied by: at least `min_scale` (of
          nan too) and at most `max_scale`, or 2**-126 and 2**126 without such bounds.
        """
        # One leaf, even where a framework (Flax nnx) has boxed the array.
        (loss_scale,) = jax.tree.leaves(state.loss_scale)
        return bounded(self, jnp.asarray(loss_scale, jnp.float32))

    @property
    def _bounds(self) -> tuple[float, float]:
        low = getattr(self, "min_scale", None) or SMALLEST_SCALE
        high = getattr(self, "max_scale", None) or LARGEST_SCALE
        return max(float(low), SMALLEST_SCALE), min(float(high), LARGEST_SCALE)

    def __call__(self, state: Any) -> jax.Array:
        """Returns the current loss scale: the same as `loss_scale(state)`."""
        return self.loss_scale(state)

    def get_config(self) -> dict[str, Any]:
        """Returns the hyperparameters as a dictionary of plain Python values.

        Returns:
          A dictionary that `from_config` takes, and JSON can store.

        Raises:
          TypeError: If a subclass is not a dataclass: its fields are not known.
        """
        if "__dataclass_fields__" not in type(self).__dict__:
            raise TypeError(
                f"{type(self).__name__} must be decorated with "
                f"@dataclasses.dataclass(frozen=True), or define get_config itself."
            )
        return {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)  # pyright: ignore[reportArgumentType]
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Makes a loss scale from its configuration.

        Args:
          config: What `get_config` returned.

        Returns:
          A loss scale equal to the one that `config` came from.

        Raises:
          TypeError: If `config` has a key that is no hyperparameter.
          ValueError: If a hyperparameter is out of its range.
        """
        return cls(**config)


class FixedLossScaleState(NamedTuple):
    """The state of a fixed loss scale.

    Attributes:
      loss_scale: f32[], the loss scale: always the hyperparameter.
    """

    loss_scale: jax.Array


@dataclasses.dataclass(frozen=True)
class FixedLossScale(LossScale):
    """A loss scale that never changes.

    The scale is `loss_scale_value`, whatever the state holds: setting it by
    `optax.tree.set(state, loss_scale=...)`, or restoring another, has no effect.

    Args:
      loss_scale_value: The scale, at least 1.
      skip_nonfinite: Whether steps with non-finite gradients are skipped. If
        False, as in TensorFlow, gradients are not even checked, and a non-finite
        one reaches the parameters.

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
        value = check_scale("loss_scale_value", self.loss_scale_value, at_least=1.0)
        object.__setattr__(self, "loss_scale_value", value)
        check_bool("skip_nonfinite", self.skip_nonfinite)

    @property
    def _bounds(self) -> tuple[float, float]:
        return self.loss_scale_value, self.loss_scale_value

    def init(self) -> FixedLossScaleState:
        """Returns the initial state; see the base class."""
        return FixedLossScaleState(jnp.asarray(self.loss_scale_value, jnp.float32))

    def update(
        self,
        grads: Any,
        state: FixedLossScaleState,
        *,
        axis_name: Hashable | None = None,
    ) -> tuple[FixedLossScaleState, jax.Array]:
        """Returns the state of `init`, in the shape of `state`; see the base class."""
        state = FixedLossScaleState(self.loss_scale(state))
        if not self.skip_nonfinite:
            return state, all_finite(None)
        return state, all_finite(grads, axis_name=axis_name)


class LossScaleState(NamedTuple):
    """The state of a dynamic loss scale.

    Attributes:
      loss_scale: f32[], the current loss scale.
      good_steps: i32[], consecutive finite steps since the scale last changed or
        a step was last skipped.
      hysteresis_left: i32[], non-finite steps until the scale backs off.
    """

    loss_scale: jax.Array
    good_steps: jax.Array
    hysteresis_left: jax.Array


@dataclasses.dataclass(frozen=True)
class DynamicLossScale(LossScale):
    """A loss scale that looks for the largest safe value by itself.

    It grows after `growth_interval` consecutive finite steps and backs off after
    a non-finite one, which is skipped. Per step:

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
    `hysteresis=1` this is the rule of TensorFlow, Keras, PyTorch and jmp; Flax's
    is the same with `growth_interval + 1`; with more, Megatron's and DeepSpeed's.

    Args:
      initial_scale: The first scale. Too high costs a few skipped steps at the
        start; too low costs many steps of lost gradients.
      growth_interval: Consecutive finite steps before the scale grows.
      growth_factor: What the scale is multiplied by then; above 1. Powers of two
        keep scaling exact.
      backoff_factor: What the scale is multiplied by after a non-finite step;
        between 0 and 1.
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

    def __post_init__(self):
        check_dynamics(self, hysteresis=check_count, consecutive_hysteresis=check_bool)

    def init(self) -> LossScaleState:
        """Returns the initial state; see the base class."""
        return LossScaleState(
            loss_scale=jnp.asarray(self.initial_scale, jnp.float32),
            good_steps=jnp.zeros((), jnp.int32),
            hysteresis_left=jnp.asarray(self.hysteresis, jnp.int32),
        )

    def update(
        self, grads: Any, state: LossScaleState, *, axis_name: Hashable | None = None
    ) -> tuple[LossScaleState, jax.Array]:
        """Advances the loss scale by one step; see the base class."""
        finite = all_finite(grads, axis_name=axis_name)
        return self._advance(state, finite), finite

    @functools.partial(jax.jit, static_argnums=0)
    def _advance(self, state: LossScaleState, finite: jax.Array) -> LossScaleState:
        # Restored counters may be out of range.
        good_steps = jnp.maximum(jnp.asarray(state.good_steps, jnp.int32), 0)
        left = jnp.asarray(state.hysteresis_left, jnp.int32)
        left = jnp.clip(left, 0, self.hysteresis)
        good_steps = jnp.where(finite, optax.safe_increment(good_steps), 0)
        grow = good_steps >= self.growth_interval
        restore = finite if self.consecutive_hysteresis else grow
        left = jnp.where(finite, left, jnp.maximum(left - 1, 0))
        back_off = ~finite & (left == 0)
        return LossScaleState(
            loss_scale=rescale(self, self.loss_scale(state), grow, back_off),
            good_steps=jnp.where(grow, 0, good_steps),
            hysteresis_left=jnp.where(restore, self.hysteresis, left),
        )


def rescale(
    rule: Any, scale: jax.Array, grow: jax.Array, back_off: jax.Array
) -> jax.Array:
    """Returns the scale after a step: grown, backed off, or neither, and in bounds."""
    scale = jnp.where(grow, scale * jnp.float32(rule.growth_factor), scale)
    scale = jnp.where(back_off, scale * jnp.float32(rule.backoff_factor), scale)
    return bounded(rule, scale)


def bounded(rule: LossScale, scale: jax.Array) -> jax.Array:
    """Returns the scale, within the bounds of the rule; the lower one if it is nan."""
    return _clip(scale, *rule._bounds)


# Compiled: an eager call transfers no constants to the device.
@functools.partial(jax.jit, static_argnums=(1, 2))
def _clip(scale: jax.Array, low: float, high: float) -> jax.Array:
    if low == high:  # of a fixed scale: a constant
        return jnp.full_like(scale, low)
    # fmax drops nan.
    return jnp.fmin(jnp.fmax(scale, jnp.float32(low)), jnp.float32(high))


def at_minimum(rule: Any, scale: jax.Array, new_scale: jax.Array) -> jax.Array:
    """Tells whether a step that was skipped could not have had a lower scale."""
    min_scale = getattr(rule, "min_scale", None)
    if min_scale is None:
        return new_scale >= scale
    return _at_most(scale, min_scale)


@functools.partial(jax.jit, static_argnums=1, inline=True)
def _at_most(scale, limit):
    return scale <= jnp.float32(limit)


def overflow_exponent(dtype: str) -> int:
    """Returns the exponent of the power of two from which on a dtype overflows."""
    return int(jnp.finfo(dtype).maxexp)


def power(exponent: jax.Array) -> jax.Array:
    """Returns two to a whole exponent, exactly, which exp2 need not; within bounds."""
    exponent = jnp.fmin(jnp.fmax(exponent, -126.0), 126.0)
    biased = (exponent.astype(jnp.int32) + 127) << 23
    return jax.lax.bitcast_convert_type(biased, jnp.float32)
