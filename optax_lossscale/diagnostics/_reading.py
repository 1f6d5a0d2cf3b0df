"""A state as plain numbers, those of the worst of its members, and the reason."""

import enum
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale import _check as check, _state
from optax_lossscale._rules.dynamic import DynamicLossScaleState
from optax_lossscale._rules.fixed import FixedLossScaleState
from optax_lossscale._rules.headroom import HeadroomLossScaleState
from optax_lossscale._rules.tolerant import TolerantLossScaleState
from optax_lossscale._tree import is_array, is_inexact, unbox
from optax_lossscale.diagnostics._common import named_leaves
from optax_lossscale.diagnostics._metrics import numbers_of
from optax_lossscale.diagnostics._nonfinite import NonfiniteGradient, find_nonfinite

# From these numbers of steps on, training is not healthy.
STUCK_STEPS = 100
SKIPPED_STEPS = 1000
# Up to this many skips in a row are usual at the start: halving 2**24 down to 1.
START_UP = 24
# The states of rules whose `good_steps` counts from 0 at each new scale. In the state
# of another rule, a field of this name may mean anything.
COUNTING = DynamicLossScaleState, TolerantLossScaleState
# The states of rules that skip a step if, and only if, its gradients are not finite.
# Other rules have reasons of their own.
OURS = *COUNTING, FixedLossScaleState, HeadroomLossScaleState


class Reason(enum.StrEnum):
    """The reason of a verdict. Of skips in a row, the worse comes first."""

    NOT_FINITE = enum.auto()
    DAMAGED_SCALE = enum.auto()
    LOSS = enum.auto()
    LOSS_OR_GRADIENTS = enum.auto()
    FIXED_SCALE = enum.auto()
    AT_MINIMUM = enum.auto()
    RETRIES_FAILED = enum.auto()
    LONG_OVERFLOW = enum.auto()
    RULE = enum.auto()
    OVERFLOW = enum.auto()
    VETO = enum.auto()
    LOW_SCALE = enum.auto()
    APPLIED = enum.auto()
    REPEATED = enum.auto()
    NEW_SCALE = enum.auto()
    UNCHECKED = enum.auto()
    NONE_SKIPPED = enum.auto()

    # A record that holds it prints as one of plain strings.
    __repr__ = str.__repr__


class Reading(NamedTuple):
    """The numbers of a state.

    Attributes:
      loss_scale: The loss scale that the state holds.
      last_step_applied, skipped_steps, consecutive_skipped_steps, stuck_steps,
        nonfinite_loss_steps, retries: See `LossScaleOptimizerState`.
      skip_reasons: See there; 0 in a state from before this field.
      good_steps: Steps at this scale; None if the rule does not count them.
      measure: How near training is to a limit: from 1 on it is not healthy.
      is_fixed: Whether the scale is fixed.
      is_ours: Whether the rule is one of this package.
      has_params: Whether parameters were given.
    """

    loss_scale: float
    last_step_applied: bool
    skipped_steps: int
    consecutive_skipped_steps: int
    stuck_steps: int
    measure: float
    is_fixed: bool
    is_ours: bool
    has_params: bool
    nonfinite_loss_steps: int | None = None
    retries: int | None = None
    skip_reasons: int = 0
    good_steps: int | None = None

    @property
    def causes(self) -> int:
        """Why steps in a row were skipped, or may have been: a sum of bits."""
        causes = self.skip_reasons & (_state.GRADIENTS | _state.LOSS)
        if causes:
            return causes
        # Of a state from before this field, its counters tell how many the loss
        # explains.
        in_a_row = self.consecutive_skipped_steps
        least = (self.nonfinite_loss_steps or 0) - (self.skipped_steps - in_a_row)
        by_loss = _state.LOSS * (self._most_by_loss > 0)
        return by_loss | _state.GRADIENTS * (least < in_a_row)

    @property
    def _most_by_loss(self) -> int:
        """How many of the steps in a row the loss may explain."""
        most = self.consecutive_skipped_steps - self.stuck_steps
        return min(self.nonfinite_loss_steps or 0, most)

    @property
    def are_few(self) -> bool:
        """Whether so many skips in a row are usual, while the scale falls."""
        is_long = self.consecutive_skipped_steps > START_UP
        return not (is_long or self.stuck_steps or self.retries is not None)

    @property
    def is_frozen(self) -> bool:
        """Whether the scale fell for so long that the step may not use it."""
        in_a_row = self.consecutive_skipped_steps
        by_gradients = in_a_row - self._most_by_loss
        return by_gradients > START_UP and in_a_row > self.stuck_steps

    @property
    def reason(self) -> Reason:
        """The reason of a verdict on the state alone."""
        if not is_valid(self.loss_scale):
            return Reason.DAMAGED_SCALE
        if self.consecutive_skipped_steps:
            return self._reason_of_skips
        if not self.last_step_applied:
            return Reason.VETO
        is_low = self.loss_scale <= 1 and not self.is_fixed
        if (self.skipped_steps or self.retries) and is_low:
            return Reason.LOW_SCALE
        if self.skipped_steps:
            return Reason.APPLIED
        if self.retries:
            return Reason.REPEATED
        if self.good_steps == 0:
            return Reason.NEW_SCALE
        if self.is_fixed and not self.has_params:
            return Reason.UNCHECKED
        return Reason.NONE_SKIPPED

    @property
    def _reason_of_skips(self) -> Reason:
        """The reason of a verdict on steps that were just skipped in a row."""
        if self.causes & _state.LOSS:
            is_loss = self.causes == _state.LOSS
            return Reason.LOSS if is_loss else Reason.LOSS_OR_GRADIENTS
        if not self.is_ours:
            return Reason.RULE
        if self.are_few:
            return Reason.OVERFLOW
        if self.is_fixed:
            return Reason.FIXED_SCALE
        if self.stuck_steps:
            return Reason.AT_MINIMUM
        is_long = self.retries is None
        return Reason.LONG_OVERFLOW if is_long else Reason.RETRIES_FAILED


class Members(NamedTuple):
    """Several members or devices, and the worst of them.

    Attributes:
      shape: The shape of their state's numbers; () of one.
      worst: The index of the worst member; () of one.
      reading: The numbers of the worst.
      skipped_ever: How many members skipped a step.
      reasons: The reasons of those that skipped the last step.
    """

    shape: tuple[int, ...]
    worst: tuple[int, ...]
    reading: Reading
    skipped_ever: int
    reasons: list[Reason]


def is_valid(scale: Any) -> Any:
    """Whether a scale, or each of several, is finite and within the bounds."""
    return (scale >= check.SMALLEST_SCALE) & (scale <= check.LARGEST_SCALE)


def read(state: Any, params: Any) -> Members:
    """Reads a state of one member, or of many."""
    rule_state = state.loss_scale_state
    columns = numbers_of(state._replace(inner_state=None, loss_scale_state=None))
    columns["loss_scale"] = jnp.asarray(unbox(rule_state.loss_scale), jnp.float32)
    if type(rule_state) in COUNTING:
        columns["good_steps"] = jnp.asarray(unbox(rule_state.good_steps))
    columns = jax.device_get(columns)
    shape = np.shape(columns["skipped_steps"])
    columns = {k: np.broadcast_to(x, shape).ravel() for k, x in columns.items()}
    columns["measure"] = _measure(columns, _is_broken(params, state, shape))

    def readings(indices):
        rows = zip(*(x[indices].tolist() for x in columns.values()), strict=True)
        return [
            Reading(
                **dict(zip(columns, row, strict=True)),
                is_fixed=type(rule_state) is FixedLossScaleState,
                is_ours=type(rule_state) in OURS,
                has_params=params is not None,
            )
            for row in rows
        ]

    # Reasons rank the members that skip steps now.
    skips = np.flatnonzero(columns["last_step_applied"] == 0)
    reasons = [x.reason for x in readings(skips)]
    worst = _worst(columns, skips, reasons)
    return Members(
        shape=shape,
        worst=tuple(map(int, np.unravel_index(worst, shape))),
        reading=readings([worst])[0],
        skipped_ever=int((columns["skipped_steps"] > 0).sum()),
        reasons=reasons,
    )


def _measure(columns: dict[str, np.ndarray], is_broken: np.ndarray) -> np.ndarray:
    """Returns how near each member is to a limit, or how far beyond it, f64[n]."""
    stuck, in_a_row = columns["stuck_steps"], columns["consecutive_skipped_steps"]
    measure = np.maximum(stuck / STUCK_STEPS, in_a_row / SKIPPED_STEPS)
    return np.where(is_valid(columns["loss_scale"]) & ~is_broken, measure, np.inf)


def _worst(
    columns: dict[str, np.ndarray], skips: np.ndarray, reasons: list[Reason]
) -> int:
    """Returns the index of the member that lost most.

    Args:
      columns: The numbers of all members, by their names.
      skips: The indices of those that skipped the last step.
      reasons: Their reasons.
    """
    scale, skipped = columns["loss_scale"], columns["skipped_steps"]
    order, ranks = {x: i for i, x in enumerate(Reason)}, np.full(scale.size, np.inf)
    ranks[skips] = [order[x] for x in reasons]
    ranks[columns["consecutive_skipped_steps"] == 0] = np.inf  # A veto is no loss.
    measure, retries = columns["measure"], columns.get("retries", skipped)
    beyond = np.where(measure < 1, 0, measure)
    # The last of these keys decides first.
    keys = scale, -retries, -skipped, -measure, ranks, -beyond, is_valid(scale)
    return np.lexsort(keys)[0]


def _is_broken(params: Any, state: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Whether numbers of each of several members make it unhealthy, bool[n]."""
    broken = np.zeros(shape, bool)
    if params is None:
        return broken.ravel()
    # Some optimizers begin with inf; none begins with nan.
    parts = (params, jnp.isfinite), (state.inner_state, lambda x: ~jnp.isnan(x))
    for tree, is_sound in parts:
        for x in named_leaves(tree, "").values():
            if shape and x.shape[: len(shape)] == shape:
                broken |= ~np.asarray(is_sound(x).all(range(len(shape), x.ndim)))
    return broken.ravel()


class Broken(NamedTuple):
    """The leaves of parameters and inner state that are not finite.

    Attributes:
      leaves: All of them.
      is_unhealthy: Whether they make training unhealthy: parameters do, and nan. Some
        optimizers begin with inf; none begins with nan.
      scale: The name of the loss scale among the parameters, if that alone may be lost;
        "" otherwise.
    """

    leaves: list[NonfiniteGradient]
    is_unhealthy: bool
    scale: str


def read_leaves(params: Any, inner_state: Any) -> Broken:
    """Finds the leaves that are not finite; none if `params` is None."""
    if params is None:
        return Broken([], is_unhealthy=False, scale="")
    leaves = jax.tree.leaves(params)
    if leaves and not any(is_array(x) or is_inexact(x) for x in leaves):
        raise TypeError(
            "params must hold arrays: parameters, batch statistics, a model of Equinox "
            f"or Flax nnx (or its nnx.state), got {type(params).__name__} without any."
        )
    named = named_leaves(params, "params") | named_leaves(inner_state, "inner_state")
    found = find_nonfinite(named)
    among_params = [x for x in found if x.name.startswith("params")]
    # A lost scale keeps all else as it was.
    is_scale = [(x.shape, x.dtype) for x in among_params] == [((), "float32")]
    is_unhealthy = any(x.nans for x in found) or bool(among_params)
    return Broken(found, is_unhealthy, among_params[0].name if is_scale else "")
