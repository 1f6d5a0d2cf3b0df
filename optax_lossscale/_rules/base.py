"""The base classes of the rules."""

import abc
import dataclasses
import functools
from collections.abc import Callable, Hashable
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optax_lossscale import _check as check
from optax_lossscale._scaling import all_finite, largest_magnitude
from optax_lossscale._tree import filled_like, unbox


def types_of_state(rule: "LossScale") -> Any:
    """Returns the state of a rule, with types in place of arrays."""
    return (_types if has_hash(rule) else _types.__wrapped__)(rule)


def has_hash(x: Any) -> bool:
    """Whether a rule has a hash; with a list among its fields it has none."""
    try:
        hash(x)
    except TypeError:
        return False
    return True


# Each eager step asks for them.
@functools.lru_cache(maxsize=64)
def _types(rule):
    return jax.eval_shape(rule.init)


class LossScale(abc.ABC):
    """The base class of all rules, which hold hyperparameters but no arrays.

    Loss scaling multiplies the loss by a scale and divides the gradients by it:

        loss = ...
        loss *= loss_scale
        grads = gradients(loss, params)
        grads /= loss_scale

    Mathematically this has no effect, but without it small gradients underflow in
    float16.

    A subclass is a frozen dataclass whose fields are its hyperparameters. It
    defines `init` and `update`; `get_config`, `from_config`, equality and hash
    follow from the fields. Everything that changes during training is in the
    state, a named tuple with at least the field `loss_scale: f32[]`. `metrics` returns
    its other scalars by name, and `dynamic_counter` one that is called `good_steps`.

    You choose the names of the fields, but some have a meaning. `min_scale` and
    `max_scale` bound the scale. The properties `initial_scale` and
    `dynamic_growth_steps` of the optimizer are `initial_scale` and `growth_interval` of
    the rule. `check_health` counts a skipped step as stuck if the scale was at
    `min_scale`; without that field, if the scale did not fall.

    Attributes:
      skip_nonfinite: False promises that `update` never asks to skip a step. Then
        no check and no branch is compiled.

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
          A named tuple of strongly typed arrays, one of them `loss_scale: f32[]`.
        """

    @abc.abstractmethod
    def update(
        self, grads: Any, state: Any, *, axis_name: Hashable | None = None
    ) -> tuple[Any, jax.Array]:
        """Advances the loss scale by one step.

        Args:
          grads: Unscaled gradients, any pytree. None and integer leaves are
            ignored; a tree without leaves counts as finite.
          state: The state from `init`, or from the last `update`.
          axis_name: A name, or tuple of names, of mapped axes. The finiteness
            flag is reduced over them, so that all devices decide the same.

        Returns:
          The new state, of the same structure, shapes and dtypes; and
          `should_apply_gradients: bool[]`, False if this step must be skipped.
        """

    def __call__(self, state: Any) -> jax.Array:
        """Returns the current loss scale, from which `update` also starts.

        Args:
          state: The state from `init` or `update`. A scale that you restored or set by
            hand may be out of bounds.

        Returns:
          f32[], the number that multiplies the loss: at least `min_scale` and at most
          `max_scale`, or 2**-126 and 2**126 without these. In place of inf or nan it
          is the first scale, `initial_scale`.
        """
        low, high = self._bounds
        first = low if low == high else self._first_scale
        scale = jnp.asarray(unbox(state.loss_scale), jnp.float32)
        return _scale_in_range(scale, low, high, min(max(first, low), high))

    @property
    def _first_scale(self) -> float:
        first = getattr(self, "initial_scale", None)
        if first is None:
            with jax.ensure_compile_time_eval():
                first = unbox(self.init().loss_scale)
        return float(first)

    @property
    def _bounds(self) -> tuple[float, float]:
        least, greatest = check.SMALLEST_SCALE, check.LARGEST_SCALE
        low = getattr(self, "min_scale", None) or least
        high = getattr(self, "max_scale", None) or greatest
        return max(float(low), least), min(float(high), greatest)

    def _is_at_minimum(self, scale: jax.Array, new_scale: jax.Array) -> jax.Array:
        """Whether the scale of a skipped step could not have been lower."""
        min_scale = getattr(self, "min_scale", None)
        if min_scale is None:
            return new_scale >= scale
        return scale <= filled_like(scale, min_scale)

    def get_config(self) -> dict[str, Any]:
        """Returns the hyperparameters as a dictionary of plain Python values.

        Returns:
          A dictionary that `from_config` takes, and JSON can store.

        Raises:
          TypeError: If a subclass is no dataclass, so that its fields are unknown.
        """
        fields = dataclasses.fields(self)  # pyright: ignore[reportArgumentType]
        return {field.name: getattr(self, field.name) for field in fields}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Makes a rule from its configuration.

        Args:
          config: The dictionary from `get_config`.

        Returns:
          A rule that equals the original one.

        Raises:
          TypeError: If `config` has a key that is not a hyperparameter.
          ValueError: If a hyperparameter is out of its range.
        """
        return cls(**config)


class AdaptiveLossScale(LossScale):
    """The base class of the rules of this package that adapt the scale.

    A subclass has the fields below among its hyperparameters, a check for each
    hyperparameter of its own in `_checks`, and the methods `init` and `_advance`.
    """

    initial_scale: float
    min_scale: float
    max_scale: float
    growth_interval: int
    _checks: ClassVar[dict[str, Callable[[str, Any], Any]]]
    _needs_largest: ClassVar[bool] = False

    def __post_init__(self):
        scales = dict.fromkeys(("initial_scale", "min_scale", "max_scale"), check.scale)
        checks = {**scales, "growth_interval": check.count, **self._checks}
        for name, convert in checks.items():
            # The dataclass is frozen.
            object.__setattr__(self, name, convert(name, getattr(self, name)))
        if not self.min_scale <= self.initial_scale <= self.max_scale:
            raise ValueError(
                f"initial_scale must lie between min_scale and max_scale, got {self}."
            )

    @abc.abstractmethod
    def _advance(
        self, scale: jax.Array, state: Any, finite: jax.Array, largest: Any
    ) -> Any:
        """Returns the state after a step.

        Args:
          scale: f32[], the scale before it, within the bounds.
          state: The state before it. If it was restored, its arrays may be boxed, of
            other dtypes and out of range.
          finite: bool[], whether the gradients of the step are finite.
          largest: f32[], their largest magnitude, meaningless unless `finite`; None
            unless `_needs_largest`.

        Returns:
          A state as `init` returns it. Its scale may be out of bounds.
        """

    def update(
        self, grads: Any, state: Any, *, axis_name: Hashable | None = None
    ) -> tuple[Any, jax.Array]:
        """Advances the loss scale by one step; see the base class."""
        finite = all_finite(grads, axis_name=axis_name)
        largest = None
        if self._needs_largest:
            largest = largest_magnitude(grads, axis_name=axis_name)
        return self._advance_within_bounds(state, finite, largest), finite

    # Compiled, so that an eager call transfers no constants to the device.
    @functools.partial(jax.jit, static_argnums=0, inline=True)
    def _advance_within_bounds(self, state, finite, largest):
        new = self._advance(self(state), state, finite, largest)
        low, high = map(np.float32, self._bounds)  # A large growth_factor leads to inf.
        return new._replace(loss_scale=lax.clamp(low, new.loss_scale, high))


def count_in_range(count: Any, greatest: int = 2**31 - 1) -> jax.Array:
    """Returns a counter of a state, which may be restored, as i32[] in its range."""
    count = jnp.asarray(unbox(count), jnp.int32)
    return jnp.minimum(jnp.maximum(count, 0), greatest)


# Compiled, so that an eager call transfers no constants to the device.
@functools.partial(jax.jit, static_argnums=(1, 2, 3), inline=True)
def _scale_in_range(
    scale: jax.Array, low: float, high: float, first: float
) -> jax.Array:
    if low == high:  # A fixed scale is a constant.
        return jnp.full_like(scale, low)
    within = lax.clamp(np.float32(low), scale, np.float32(high))
    return jnp.where(jnp.isfinite(scale), within, first)
