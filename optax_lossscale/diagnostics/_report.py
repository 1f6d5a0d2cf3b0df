"""One verdict: does training make progress, and if not, what to do about it."""

import collections
import enum
import textwrap
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
from optax_lossscale.diagnostics._common import check_host, named_leaves, power
from optax_lossscale.diagnostics._metrics import numbers_of
from optax_lossscale.diagnostics._nonfinite import NonfiniteGradient, find_nonfinite

# From these numbers of steps on, training is not healthy.
STUCK_STEPS = 100
SKIPPED_STEPS = 1000
# Up to this many skips in a row are usual at the start: halving 2**24 down to 1.
START_UP = 24
# How many leaves a report names.
ARRAYS_SHOWN = 3
# The states of rules whose `good_steps` counts from 0 at each new scale. A field of
# this name in other states means what its author wants.
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


# Advice of several reasons. A report leaves out what does not apply.
TRACE = (
    "Run diagnostics.trace_numerics(loss_fn, params, batch, state=state) with the "
    "arguments of a skipped step. It names the line where inf or nan begins."
)
AGAIN = f"If they continue: {TRACE}"
RETRIED = (
    "See why retries did not help: the loss is not finite, all retries are used up, "
    "minimize is not called, or the rule keeps the scale (min_scale, hysteresis)."
)
FROZEN = (
    "If the trace finds nothing at this scale, make sure that value_and_grad and "
    "get_scaled_loss are called inside the step, with the state that the update gets: "
    "a function made once before the loop keeps the first scale, and so does a second "
    "state. With scale_as_parameter, see "
    "whether the scale among the parameters is finite: report(state, params)."
)
UPDATE = (
    "See by diagnostics.describe_nonfinite(grads) whether the skipped gradients are "
    "finite. If they are, your rule skips them for a reason of its own: its update "
    "says why."
)
PLACES = (
    "for inf and nan in data and parameters, and for an overflow in the forward pass. "
    "No loss scale helps there."
)
GO_ON = "Then go on from here: skipped steps change neither parameters nor inner state."
KEEPS = "check_loss=True skips such steps without lowering the scale."
BAD_BATCHES = f"If now and then a batch has a loss of nan or inf: {KEEPS}"
ALL_ADVICE = (
    RETRIED,
    TRACE,
    FROZEN,
    "If you add gradients up yourself, start each step with zeros, also after a skip: "
    "an inf stays in the sum.",
    f"If the loss is not finite, look {PLACES} {KEEPS}",
    "If the loss is finite, compute in float32 what overflows, clip gradients, lower "
    "the learning rate, or lower a high scale (fixed, min_scale or initial_scale).",
    GO_ON,
)
# Of each reason the diagnosis, and what to do, one step after the other. {skips} is
# "The last 2 steps were skipped: their gradients were not finite", for example.
WORDS = {
    Reason.NOT_FINITE: (
        "Not finite: {leaves}. {diagnosis}",
        "Restore a checkpoint in which they are finite. Before the first step, "
        "initialize them anew.",
        "Keep parameters of float16 in float32 and cast them in the loss function: no "
        "step sees that a large value is inf once it is rounded.",
        "Take a rule that skips: dynamic, or FixedLossScale(..., skip_nonfinite=True). "
        "For updates that are not finite, chain "
        "optax.apply_if_finite(optax.identity(), 5) after the inner optimizer. Keep "
        "returned statistics by select_applied.",
    ),
    Reason.DAMAGED_SCALE: (
        "The loss scale is damaged: it is not a number from 2^-126 to 2^126. If it is "
        "inf or nan, the next step begins anew at the initial_scale of the rule.",
        "Restore an earlier checkpoint, or begin the scale anew: state._replace("
        "loss_scale_state=optimizer.init(params).loss_scale_state).",
    ),
    Reason.LOSS: ("{skips}.", TRACE, f"Look {PLACES}", GO_ON),
    Reason.LOSS_OR_GRADIENTS: ("{skips}.", UPDATE, *ALL_ADVICE),
    Reason.FIXED_SCALE: (
        "{skips} at this fixed loss scale.",
        *ALL_ADVICE,
    ),
    Reason.AT_MINIMUM: (
        "{skips}, though the loss scale cannot go lower.",
        *ALL_ADVICE,
    ),
    Reason.RETRIES_FAILED: (
        "{skips}, in spite of retries.",
        *ALL_ADVICE,
    ),
    Reason.LONG_OVERFLOW: (
        "{skips}, for longer than is usual.",
        *ALL_ADVICE,
    ),
    Reason.RULE: ("{skips}.", UPDATE, AGAIN, *ALL_ADVICE),
    Reason.OVERFLOW: (
        "{skips}. A few skips in a row are usual at the start, and a single "
        "one later, when the loss scale has grown too high.",
        AGAIN,
    ),
    Reason.VETO: (
        "The last step was vetoed by skip_if. It counts as skipped, and check_health "
        "allows any number of vetoes.",
    ),
    Reason.LOW_SCALE: (
        "The last step was applied, but the loss scale is too low to help.",
        "Unless you chose it, run diagnostics.trace_numerics(loss_fn, params, batch, "
        "scale=2.0**15). It names the line that overflows at that scale, if one does.",
        BAD_BATCHES,
    ),
    Reason.APPLIED: ("The last step was applied.",),
    Reason.REPEATED: ("No step was skipped. Passes repeated instead: {retries}.",),
    Reason.NEW_SCALE: ("No step has been taken yet, or the scale has just grown.",),
    Reason.UNCHECKED: (
        "No step was skipped. The state does not tell more: a fixed loss scale checks "
        "no gradients, unless it has skip_nonfinite=True.",
        "Pass the parameters, report(state, params), to see whether they are finite.",
    ),
    Reason.NONE_SKIPPED: ("No step was skipped.",),
}
# Why steps were skipped: by a rule of this package, and by any other.
CAUSES = {
    _state.GRADIENTS: "{0} gradients were not finite",
    _state.LOSS: "{0} loss was not finite",
    _state.GRADIENTS | _state.LOSS: "{0} loss or gradients were not finite",
}
OTHER_CAUSES = CAUSES | {
    _state.GRADIENTS: "the rule did not let {0} gradients pass",
    _state.GRADIENTS | _state.LOSS: (
        "{0} loss was not finite, or the rule did not let {0} gradients pass"
    ),
}
# Advice on leaves that are not finite.
SCALE = (
    "If {0} is the scale of scale_as_parameter, no step leads back from inf or nan. "
    "Write {0} = optimizer.current_loss_scale(state), with the LossScaleOptimizer."
)
BEGUN = "Restore a checkpoint, unless the optimizer begins with inf, as lbfgs does."
# What no state tells: the loss, gradients that were never scaled, and a forward pass
# whose overflow a later line hides.
NOTHING = (
    "What to do: nothing, as far as the state tells. If the loss does not fall, see "
    "that the gradients come from optimizer.value_and_grad or minimize, and run "
    "diagnostics.trace_numerics(loss_fn, params, batch, state=state)."
)
STATISTICS = (
    " If the evaluation alone is nan, see that select_applied keeps returned batch "
    "statistics of skipped steps."
)


class Report(NamedTuple):
    """The result of `report` and `check_health`. Print it.

    A report about many members or devices says how many of them skipped steps, and
    for which reasons. Its numbers are those of the worst one.

    Attributes:
      healthy: Whether training makes progress, as far as the state tells.
      diagnosis: How things stand, or what is wrong.
      advice: What to do, one step after the other. Empty if there is nothing to do.
      loss_scale: The loss scale that the state holds.
      skipped_steps: Steps skipped so far, including vetoes by `skip_if`.
      consecutive_skipped_steps: Steps skipped since one was applied, without vetoes.
      stuck_steps: How many of these consecutive steps were skipped although the scale
        was at its minimum (for a rule without `min_scale`: although it did not fall).
      nonfinite_loss_steps: Steps skipped so far because of the loss; None without
        `check_loss`.
      retries: Passes that were repeated so far; None without `retries`.
      member: The index of the worst member, `(2,)` for example; `()` if the state
        belongs to one. `jax.tree.map(lambda x: x[result.member], state)` is its state.
      reason: The reason of the verdict as a short name, a `str` to compare and to log.
        Parameters or scale: "not_finite", "damaged_scale". Skipped steps: "loss" (which
        explains all), "loss_or_gradients", "fixed_scale", "at_minimum" (of the scale),
        "retries_failed", "long_overflow", "rule" (one of your own did not let the
        gradients pass), "overflow" (a few, as is usual), "veto". The last step was
        applied: "low_scale", "applied". No step was skipped: "repeated" (passes were),
        "new_scale" (no step at this scale yet), "unchecked" (by a fixed scale),
        "none_skipped".

    Examples:
      >>> import jax.numpy as jnp
      >>> import optax
      >>> from optax_lossscale import LossScaleOptimizer, diagnostics
      >>> optimizer = LossScaleOptimizer(optax.adam(0.1))
      >>> result = diagnostics.report(optimizer.init(jnp.ones(3)))
      >>> print(result.healthy, result.reason, result.loss_scale)
      True new_scale 32768.0
      >>> result
      No step has been taken yet, or the scale has just grown.
        loss scale       32768 (2^15)
        skipped steps    0
      What to do: nothing, as far as the state tells. If the loss does not fall, see
      that the gradients come from optimizer.value_and_grad or minimize, and run
      diagnostics.trace_numerics(loss_fn, params, batch, state=state).
    """

    healthy: bool
    diagnosis: str
    advice: tuple[str, ...]
    loss_scale: float
    skipped_steps: int
    consecutive_skipped_steps: int
    stuck_steps: int
    nonfinite_loss_steps: int | None
    retries: int | None
    member: tuple[int, ...]
    reason: str

    def __repr__(self):
        stuck, loss = self.stuck_steps, self.nonfinite_loss_steps
        log2 = f" ({power(self.loss_scale)})" if _is_valid(self.loss_scale) else ""
        in_a_row = self.consecutive_skipped_steps
        of_which = f", of which {in_a_row} in a row" if in_a_row else ""
        rows = {
            "loss scale": f"{self.loss_scale:.10g}{log2}",
            "skipped steps": f"{self.skipped_steps}{of_which}",
            "stuck steps": stuck and f"{stuck} of these",
            "loss not finite": loss and f"{loss} steps",
            "repeated passes": self.retries,
        }
        lines = textwrap.wrap(self.diagnosis, 79)
        lines += [f"  {name:15}  {text}" for name, text in rows.items() if text]
        nothing = NOTHING + STATISTICS * bool(self.skipped_steps)
        lines += ["What to do:"] if self.advice else textwrap.wrap(nothing, 79)
        for number, item in enumerate(self.advice, start=1):
            lines += textwrap.wrap(f"{number}. {item}", 79, subsequent_indent="   ")
        return "\n".join(lines)


def report(state: Any, params: Any = None) -> Report:
    """Says how loss scaling is doing, and what to do next.

    Print it on the host, between steps: it waits for the state. With `params` it also
    names the leaves that are not finite.

    Training is not healthy, and `check_health` raises an error, if

    - 100 steps in a row were skipped although the scale was at its minimum (for a rule
      without `min_scale`, such as `FixedLossScale`: although the scale did not fall);
    - 1,000 steps in a row were skipped for any reason but `skip_if`;
    - the loss scale is nan, or not between 2**-126 and 2**126;
    - `params` are given, and are not finite, or the inner state holds nan.

    The state does not tell everything:

    - The loss function. If that divides by an overflow, as a norm may, it returns zeros
      and finite gradients, and training stops unnoticed: `trace_numerics` finds that.
      Nor does the state tell whether a trainer scales the loss.
    - The rule. So the report does not know whether a fixed scale skips steps at all. It
      shows the scale as it is: if you restored it or set it by hand, it may be out of
      the bounds, to which `optimizer.current_loss_scale(state)` clips it. And it takes
      a rule for one of this package if its state is: give a rule that skips finite
      gradients a state of its own, and the report does not call them non-finite.
    - Gradients far below the range of float16. Those of 2**-60 are zero until a dynamic
      scale has doubled about 20 times, which takes 40,000 steps by default. If the loss
      does not fall, ask `suggest_loss_scale` for a higher scale.

    Args:
      state: The state after a step; a pytree that holds one
        `LossScaleOptimizerState`. If it belongs to many members (`jax.vmap`) or
        devices (`jax.pmap`), the report says how many skipped steps, and is about the
        worst of them: one with a damaged scale, one that is not finite, one beyond
        these limits, or else one that skips steps now, of which the `reason` in
        `Report` that stands first is the worst. Then come the nearest to a limit, the
        most skipped steps, the most retries and the lowest scale. An array with first
        axes as long as theirs counts as theirs.
      params: The parameters, batch statistics or a model: any pytree. Of each leaf that
        is not finite, in the inner state as well, the report counts inf and nan. These
        reach parameters of float16 when a new value is rounded, and batch statistics
        from the forward pass, although gradients are checked. An inf in the inner state
        counts as healthy, because some optimizers begin with it.

    Returns:
      A `Report`. Print it, or read its numbers.

    Raises:
      ValueError: If `state` holds no such state, or several.
      TypeError: Under a transformation of JAX, such as `jax.jit`; if `params` has
        leaves, but no array among them.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import optax
      >>> from optax_lossscale import LossScaleOptimizer, diagnostics
      >>> optimizer = LossScaleOptimizer(optax.sgd(0.1))
      >>> params = {"b": jnp.zeros(2), "w": jnp.ones(2)}
      >>> state = optimizer.init(params)
      >>> grads = {"b": jnp.ones(2), "w": jnp.array([1.0, jnp.inf])}
      >>> for _ in range(3):
      ...     _, state = optimizer.update(grads, state, params)
      >>> print(diagnostics.report(state))
      The last 3 steps were skipped: their gradients were not finite. A few skips in
      a row are usual at the start, and a single one later, when the loss scale has
      grown too high.
        loss scale       4096 (2^12)
        skipped steps    3, of which 3 in a row
      What to do:
      1. If they continue: Run diagnostics.trace_numerics(loss_fn, params, batch,
         state=state) with the arguments of a skipped step. It names the line where
         inf or nan begins.

      Of three members:

      >>> members = jax.vmap(lambda _: optimizer.init(params))(jnp.arange(3))
      >>> grads = {"b": jnp.ones((3, 2)), "w": jnp.ones((3, 2)).at[1, 0].set(jnp.nan)}
      >>> _, members = jax.vmap(lambda g, s: optimizer.update(g, s))(grads, members)
      >>> print(diagnostics.report(members))
      Members that skipped steps: 1 of 3; the last step: 1. The worst is member [1].
      The last step was skipped: its gradients were not finite. A few skips in a row
      are usual at the start, and a single one later, when the loss scale has grown
      too high.
        loss scale       16384 (2^14)
        skipped steps    1, of which 1 in a row
      What to do: nothing, as far as the state tells. If the loss does not fall, see
      that the gradients come from optimizer.value_and_grad or minimize, and run
      diagnostics.trace_numerics(loss_fn, params, batch, state=state). If the
      evaluation alone is nan, see that select_applied keeps returned batch
      statistics of skipped steps.
    """
    state = _state.find_state(state)
    check_host("report (or check_health)", (state, params))
    read, members = _read_worst(state, params)
    reason = read["reason"]
    template, *advice = WORDS[reason]
    skips = _skips(read) if read["consecutive_skipped_steps"] else ""
    diagnosis = members + template.format(skips=skips, retries=read.get("retries"))
    unfit = _unfit(read)
    advice = [item for item in advice if item not in unfit]
    nonfinite = [] if params is None else _find_nonfinite(params, state.inner_state)
    # Some optimizers begin with inf; none begins with nan.
    is_broken = any(x.nans or x.name.startswith("params") for x in nonfinite)
    if nonfinite:
        template, *restore = WORDS[Reason.NOT_FINITE]
        more = f"; and {len(nonfinite) - ARRAYS_SHOWN} more" * (
            len(nonfinite) > ARRAYS_SHOWN
        )
        leaves = "; ".join(map(str, nonfinite[:ARRAYS_SHOWN])) + more
        diagnosis = template.format(leaves=leaves, diagnosis=diagnosis)
        advice = restore if is_broken else [BEGUN, *advice]
        # A lost scale keeps all else as it was.
        broken = [x for x in nonfinite if x.name.startswith("params")]
        if [(x.shape, x.dtype) for x in broken] == [((), "float32")]:
            advice = [SCALE.format(broken[0].name), *advice]
    if is_broken:
        reason = Reason.NOT_FINITE
    is_healthy = read["measure"] < 1 and not is_broken
    numbers = map(read.get, Report._fields[3:-1])
    return Report._make([is_healthy, diagnosis, tuple(advice), *numbers, reason])


def check_health(state: Any, params: Any = None) -> Report:
    """Raises an error if training makes no progress, and says what to do.

    A compiled step cannot raise an error, so training may skip every step unnoticed.
    Call this on the host from time to time, for example when you log losses. It waits
    for the state and copies a few numbers to the host.

    `diagnostics.report` gives the same verdict and raises no error. For limits of your
    own, compare the numbers of that report.

    Args:
      state: The state after a step; a pytree that holds one
        `LossScaleOptimizerState`. Of many members or devices the worst one counts.
      params: The parameters, batch statistics or a model: any pytree. If it is given,
        it must be finite as well, and the inner state must hold no nan.

    Returns:
      A `diagnostics.Report`, which is healthy.

    Raises:
      FloatingPointError: If training is not healthy, by the limits of
        `diagnostics.report`. The message is the report.
      TypeError: Under a transformation of JAX, such as `jax.jit`; if `params` has
        leaves, but no array among them.
      ValueError: If `state` holds none or several of these states.

    Examples:
      >>> import jax.numpy as jnp
      >>> import optax
      >>> from optax_lossscale import LossScaleOptimizer
      >>> from optax_lossscale.diagnostics import check_health
      >>> optimizer = LossScaleOptimizer(optax.sgd(0.1), initial_scale=2.0)
      >>> params = jnp.ones(3)
      >>> state = optimizer.init(params)
      >>> for _ in range(5):
      ...     _, state = optimizer.update(params * jnp.nan, state)
      >>> result = check_health(state)
      >>> result.stuck_steps, result.consecutive_skipped_steps
      (4, 5)
    """
    result = report(state, params)
    if not result.healthy:
        raise FloatingPointError(str(result))
    return result


def _is_valid(scale: Any) -> Any:
    """Whether a scale, or each of several, is finite and within the bounds."""
    return (scale >= check.SMALLEST_SCALE) & (scale <= check.LARGEST_SCALE)


def _read_worst(state: Any, params: Any) -> tuple[dict[str, Any], str]:
    """Returns the numbers of the worst member, and a sentence about all members."""
    rule_state = state.loss_scale_state
    named = numbers_of(state._replace(inner_state=None, loss_scale_state=None))
    named["loss_scale"] = jnp.asarray(unbox(rule_state.loss_scale), jnp.float32)
    if type(rule_state) in COUNTING:
        named["good_steps"] = jnp.asarray(unbox(rule_state.good_steps))
    named = jax.device_get(named)
    shape = np.shape(named["skipped_steps"])
    named = {k: np.broadcast_to(x, shape).ravel() for k, x in named.items()}
    scale, skipped = named["loss_scale"], named["skipped_steps"]
    # How near each member is to a limit, or how far beyond it.
    stuck, in_a_row = named["stuck_steps"], named["consecutive_skipped_steps"]
    measure = np.maximum(stuck / STUCK_STEPS, in_a_row / SKIPPED_STEPS)
    is_valid, is_broken = _is_valid(scale), _is_broken(params, state, shape)
    named["measure"] = np.where(is_valid & ~is_broken, measure, np.inf)
    facts = {
        "is_fixed": type(rule_state) is FixedLossScaleState,
        "is_ours": type(rule_state) in OURS,
        "has_params": params is not None,
    }

    def read_at(indices):
        columns = [x[indices].tolist() for x in named.values()]
        rows = zip(*columns, strict=True)
        return [facts | dict(zip(named, row, strict=True)) for row in rows]

    # Of several, take the one that lost most. Reasons rank those that skip steps now.
    skips = np.flatnonzero(named["last_step_applied"] == 0)
    reasons = [_reason(read) for read in read_at(skips)]
    order, ranks = {x: i for i, x in enumerate(Reason)}, np.full(scale.size, np.inf)
    ranks[skips] = [order[x] for x in reasons]
    ranks[in_a_row == 0] = np.inf  # A veto is no loss.
    measure, retries = named["measure"], named.get("retries", skipped)
    beyond = np.where(measure < 1, 0, measure)
    keys = scale, -retries, -skipped, -measure, ranks, -beyond, is_valid
    worst = np.lexsort(keys)[0]
    (read,) = read_at([worst])
    read["reason"] = _reason(read)
    read["member"] = tuple(map(int, np.unravel_index(worst, shape)))
    return read, _members(skipped, reasons, read["member"]) if shape else ""


def _members(skipped: Any, reasons: list[Reason], member: tuple[int, ...]) -> str:
    """Says how many of several members skipped steps, why, and which is the worst.

    Args:
      skipped: i32[n], how many steps each of them skipped.
      reasons: The reasons of those that skipped the last step.
      member: The index of the worst.
    """
    ever = f"{(skipped > 0).sum()} of {skipped.size}"
    counts = collections.Counter(reasons)
    which = ", ".join(f"{counts[x]} {x}" for x in Reason if counts[x])
    why = f" ({which})" if len(counts) > 1 else ""
    return (
        f"Members that skipped steps: {ever}; the last step: {len(reasons)}{why}. "
        f"The worst is member {list(member)}. "
    )


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


def _causes(read: dict[str, Any]) -> int:
    """Returns why steps in a row were skipped, or may have been: a sum of bits."""
    causes = read.get("skip_reasons", 0) & (_state.GRADIENTS | _state.LOSS)
    if causes:
        return causes
    # Of a state from before this field, its counters tell how many the loss explains.
    in_a_row = read["consecutive_skipped_steps"]
    total = read.get("nonfinite_loss_steps", 0)
    least = total - (read["skipped_steps"] - in_a_row)
    most = _most_by_loss(read)
    return _state.LOSS * (most > 0) | _state.GRADIENTS * (least < in_a_row)


def _most_by_loss(read: dict[str, Any]) -> int:
    """Returns how many of the steps in a row the loss may explain."""
    in_a_row, stuck = read["consecutive_skipped_steps"], read["stuck_steps"]
    return min(read.get("nonfinite_loss_steps", 0), in_a_row - stuck)


def _reason(read: dict[str, Any]) -> Reason:
    """Returns the reason of a verdict on the state alone."""
    if not _is_valid(read["loss_scale"]):
        return Reason.DAMAGED_SCALE
    if read["consecutive_skipped_steps"]:
        return _reason_of_skips(read)
    if not read["last_step_applied"]:
        return Reason.VETO
    skipped, retries = read["skipped_steps"], read.get("retries")
    if (skipped or retries) and read["loss_scale"] <= 1 and not read["is_fixed"]:
        return Reason.LOW_SCALE
    if skipped:
        return Reason.APPLIED
    if retries:
        return Reason.REPEATED
    if read.get("good_steps") == 0:
        return Reason.NEW_SCALE
    if read["is_fixed"] and not read["has_params"]:
        return Reason.UNCHECKED
    return Reason.NONE_SKIPPED


def _reason_of_skips(read: dict[str, Any]) -> Reason:
    """Returns the reason of a verdict on steps that were just skipped in a row."""
    causes = _causes(read)
    if causes & _state.LOSS:
        is_loss = causes == _state.LOSS
        return Reason.LOSS if is_loss else Reason.LOSS_OR_GRADIENTS
    if not read["is_ours"]:
        return Reason.RULE
    if _are_few(read):
        return Reason.OVERFLOW
    if read["is_fixed"]:
        return Reason.FIXED_SCALE
    if read["stuck_steps"]:
        return Reason.AT_MINIMUM
    return Reason.RETRIES_FAILED if "retries" in read else Reason.LONG_OVERFLOW


def _are_few(read: dict[str, Any]) -> bool:
    """Whether so many skips in a row are usual, while the scale falls."""
    is_long = read["consecutive_skipped_steps"] > START_UP
    return not (is_long or read["stuck_steps"] or "retries" in read)


def _skips(read: dict[str, Any]) -> str:
    """Begins a sentence about the steps that were skipped in a row."""
    in_a_row, reasons = read["consecutive_skipped_steps"], read.get("skip_reasons", 0)
    is_one = in_a_row == 1
    sentences = CAUSES if read["is_ours"] else OTHER_CAUSES
    why = sentences[_causes(read)].format("its" if is_one else "their")
    steps = "last step was" if is_one else f"last {in_a_row} steps were"
    start = "The"
    if not reasons:  # Of a state from before this field. Nobody knows which came last.
        start = "Apart from vetoes, the"
    elif reasons & _state.VETO:
        start = "The last step was vetoed by skip_if. Before it, the"
    return f"{start} {steps} skipped: {why}"


def _unfit(read: dict[str, Any]) -> set[str]:
    """Returns the advice that does not apply."""
    in_a_row, are_few = read["consecutive_skipped_steps"], _are_few(read)
    # The scale fell for so long that the step may not use it.
    by_gradients = in_a_row - _most_by_loss(read)
    is_frozen = by_gradients > START_UP and in_a_row > read["stuck_steps"]
    fits = {
        UPDATE: not read["is_ours"] and (in_a_row > 1 or not are_few),
        AGAIN: are_few and in_a_row > 1,
        RETRIED: "retries" in read,
        FROZEN: is_frozen,
    }
    if read["reason"] is Reason.RULE and are_few:
        fits |= dict.fromkeys(ALL_ADVICE, False)
    return {item for item, applies in fits.items() if not applies}


def _find_nonfinite(params: Any, inner_state: Any) -> list[NonfiniteGradient]:
    """Describes the leaves of parameters and inner state that are not finite."""
    leaves = jax.tree.leaves(params)
    if leaves and not any(is_array(x) or is_inexact(x) for x in leaves):
        raise TypeError(
            "params must hold arrays: parameters, batch statistics, a model of Equinox "
            f"or Flax nnx (or its nnx.state), got {type(params).__name__} without any."
        )
    named = named_leaves(params, "params") | named_leaves(inner_state, "inner_state")
    return find_nonfinite(named)
