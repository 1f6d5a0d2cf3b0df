"""One verdict: does training make progress, and if not, what to do about it."""

import textwrap
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale import _check as check
from optax_lossscale._rules.fixed import FixedLossScaleState
from optax_lossscale._state import find_state
from optax_lossscale._tree import is_array, is_inexact
from optax_lossscale.diagnostics._common import check_host, named_leaves, power
from optax_lossscale.diagnostics._metrics import metrics
from optax_lossscale.diagnostics._nonfinite import NonfiniteGradient, find_nonfinite

# From these numbers of steps on, training is not healthy.
STUCK_STEPS = 100
SKIPPED_STEPS = 1000
# Up to this many skips in a row are usual at the start: halving 2**24 down to 1.
START_UP = 24
# How many leaves a report names.
ARRAYS_SHOWN = 3
# The traces of a skip for a non-finite gradient, in the state of a rule that has these
# fields. A skip because of the loss leaves the state as it was.
MARKS = {"good_steps": 0, "overflowed": True}

DAMAGED = (
    "The loss scale is damaged: it is not a number from 2^-126 to 2^126. If it is inf "
    "or nan, the next step begins anew at the initial_scale of the rule.",
    "Restore an earlier checkpoint, or begin the scale anew: state._replace("
    "loss_scale_state=optimizer.init(params).loss_scale_state).",
)
RESTORE = (
    "Restore a checkpoint in which they are finite. Before the first step, initialize "
    "them anew.",
    "Keep parameters of float16 in float32 and cast them in the loss function: no step "
    "sees that a large value is inf once it is rounded.",
    "Take a rule that skips: dynamic, or FixedLossScale(..., skip_nonfinite=True). For "
    "updates that are not finite, chain optax.apply_if_finite(optax.identity(), 5) "
    "after the inner optimizer. Keep returned statistics by select_applied.",
)
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
TRACE = (
    "Run diagnostics.trace_numerics(loss_fn, params, batch, state=state) with the "
    "arguments of a skipped step. It names the line where inf or nan begins."
)
RETRIED = (
    "See why retries did not help: the loss is not finite, all retries are used up, "
    "minimize is not called, or the rule keeps the scale (min_scale, hysteresis)."
)
SUM = (
    "If you add gradients up yourself, start each step with zeros, also after a skip: "
    "an inf stays in the sum."
)
FROZEN = (
    "If the trace finds nothing at this scale, make sure that value_and_grad and "
    "get_scaled_loss are called inside the step, with the state that the update gets: "
    "a function made once before the loop keeps the first scale, and so does a second "
    "state. With scale_as_parameter, see "
    "whether the scale among the parameters is finite: report(state, params)."
)
LOSS, GRADIENTS, GO_ON = (
    "If the loss is not finite, look for inf and nan in data and parameters, and for "
    "an overflow in the forward pass. No loss scale helps there.",
    "If the loss is finite, compute in float32 what overflows, clip gradients, lower "
    "the learning rate, or lower a high scale (fixed, min_scale or initial_scale).",
    "Then go on from here: skipped steps change neither parameters nor inner state.",
)
VETOED = "The last step was vetoed by skip_if."
ANY_NUMBER = "It counts as skipped, and check_health allows any number of vetoes."


class Report(NamedTuple):
    """The result of `report` and `check_health`. Print it.

    A report about many members or devices says how many of them skipped steps. Its
    numbers are those of the worst one.

    Attributes:
      healthy: Whether training makes progress, as far as the state tells.
      diagnosis: How things stand, or what is wrong.
      advice: What to do, one step after the other. Empty if there is nothing to do.
      loss_scale: The loss scale that the state holds.
      skipped_steps: Steps skipped so far, including vetoes by `skip_if`.
      consecutive_skipped_steps: Steps skipped since one was applied, without vetoes.
      stuck_steps: How many of these consecutive steps were skipped although the scale
        could not have been lower.
      nonfinite_loss_steps: Steps skipped so far because of the loss; None without
        `check_loss`.
      retries: Passes that were repeated so far; None without `retries`.
      member: The index of the worst member, `(2,)` for example; `()` if the state
        belongs to one. `jax.tree.map(lambda x: x[result.member], state)` is its state.

    Examples:
      >>> import jax.numpy as jnp
      >>> import optax
      >>> from optax_lossscale import LossScaleOptimizer, diagnostics
      >>> optimizer = LossScaleOptimizer(optax.adam(0.1))
      >>> result = diagnostics.report(optimizer.init(jnp.ones(3)))
      >>> result.healthy, result.loss_scale, result.skipped_steps
      (True, 32768.0, 0)
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

    def __repr__(self):
        stuck, loss = self.stuck_steps, self.nonfinite_loss_steps
        log2 = f" ({power(self.loss_scale)})" if _is_valid(self.loss_scale) else ""
        in_a_row = self.consecutive_skipped_steps
        of_which = f", of which {in_a_row} in a row" if in_a_row else ""
        rows = {
            "loss scale": f"{self.loss_scale:.10g}{log2}",
            "skipped steps": f"{self.skipped_steps}{of_which}",
            "at lowest scale": stuck and f"{stuck} of these",
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
    - The rule. So the report does not know whether a fixed scale skips steps at all,
      and takes a veto (`skip_if`) right after an overflow at a fixed scale for another
      overflow. It shows the scale as it is: if you restored it or set it by hand, it
      may be out of the bounds, to which `optimizer.current_loss_scale(state)` clips it.
    - Gradients far below the range of float16. Those of 2**-60 are zero until a dynamic
      scale has doubled about 20 times, which takes 40,000 steps by default. If the loss
      does not fall, ask `suggest_loss_scale` for a higher scale.

    Args:
      state: The state after a step; a pytree that holds one
        `LossScaleOptimizerState`. If it belongs to many members (`jax.vmap`) or
        devices (`jax.pmap`), the report says how many skipped steps, and is about the
        worst of them: one with a damaged scale, one that is not finite, the nearest to
        one of these limits, or else the one with the most skipped steps, then with the
        most retries, then with the lowest scale. An array with first axes as long as
        theirs counts as theirs.
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
    state = find_state(state)
    check_host("report (or check_health)", (state, params))
    read, members = _read_worst(state, params)
    if not _is_valid(read["loss_scale"]):
        diagnosis, *advice = DAMAGED
    elif read["consecutive_skipped_steps"]:
        diagnosis, *advice = _judge_skips(read)
    else:
        diagnosis, *advice = _judge(read, params is not None)
    diagnosis = members + diagnosis
    nonfinite = [] if params is None else _find_nonfinite(params, state.inner_state)
    # Some optimizers begin with inf; none begins with nan.
    is_broken = any(x.nans or x.name.startswith("params") for x in nonfinite)
    if nonfinite:
        more = f"; and {len(nonfinite) - ARRAYS_SHOWN} more" * (
            len(nonfinite) > ARRAYS_SHOWN
        )
        names = "; ".join(map(str, nonfinite[:ARRAYS_SHOWN]))
        diagnosis = f"Not finite: {names}{more}. {diagnosis}"
        advice = RESTORE if is_broken else [BEGUN, *advice]
        # A lost scale keeps all else as it was.
        broken = [x for x in nonfinite if x.name.startswith("params")]
        if [(x.shape, x.dtype) for x in broken] == [((), "float32")]:
            advice = [SCALE.format(broken[0].name), *advice]
    is_healthy = read["measure"] < 1 and not is_broken
    numbers = map(read.get, Report._fields[3:])
    return Report._make([is_healthy, diagnosis, tuple(advice), *numbers])


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
    named = jax.device_get(metrics(state))
    shape = np.shape(named["skipped_steps"])
    # Another field of a rule may have a shape of its own.
    named = {k: x for k, x in named.items() if np.shape(x) in ((), shape)}
    named = {k: np.broadcast_to(x, shape).ravel() for k, x in named.items()}
    scale, skipped = named["loss_scale"], named["skipped_steps"]
    # Take the member that is nearest to a limit, or furthest beyond it.
    stuck, in_a_row = named["stuck_steps"], named["consecutive_skipped_steps"]
    measure = np.maximum(stuck / STUCK_STEPS, in_a_row / SKIPPED_STEPS)
    is_valid, is_broken = _is_valid(scale), _is_broken(params, state, shape)
    named["measure"] = np.where(is_valid & ~is_broken, measure, np.inf)
    # Of several, the one that lost most.
    retries = named.get("retries", skipped)
    worst = np.lexsort((scale, -retries, -skipped, -named["measure"], is_valid))[0]
    read: dict[str, Any] = {name: x[worst].item() for name, x in named.items()}
    read["is_fixed"] = isinstance(state.loss_scale_state, FixedLossScaleState)
    read["is_marked"] = all(read.get(name, x) == x for name, x in MARKS.items())
    read["member"] = tuple(map(int, np.unravel_index(worst, shape)))
    ever, last = np.sum(skipped > 0), np.sum(named["last_step_applied"] == 0)
    members = (
        f"Members that skipped steps: {ever} of {scale.size}; the last step: {last}."
    )
    members += f" The worst is member {list(read['member'])}. "
    return read, members if shape else ""


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


def _loss_skips(read: dict[str, Any]) -> tuple[int, int]:
    """Returns how many of the steps in a row their loss explains: at least, at most."""
    in_a_row = read["consecutive_skipped_steps"]
    total = read.get("nonfinite_loss_steps", 0)
    most = min(total, in_a_row - read["stuck_steps"])
    # At a fixed scale every step with a non-finite gradient counts as stuck.
    if read["is_fixed"] or not read["is_marked"]:
        return most, most
    return max(0, total - (read["skipped_steps"] - in_a_row)), most


def _judge(read: dict[str, Any], has_params: bool) -> list[str]:
    """Returns a diagnosis of a step that was applied or vetoed, and the advice."""
    if not read["last_step_applied"]:
        return [f"{VETOED} {ANY_NUMBER}"]
    skipped, retries = read["skipped_steps"], read.get("retries")
    if (skipped or retries) and read["loss_scale"] <= 1 and not read["is_fixed"]:
        return [
            "The last step was applied, but the loss scale is too low to help.",
            "Unless you chose it, run diagnostics.trace_numerics(loss_fn, params, "
            "batch, scale=2.0**15). It names the line that overflows at that scale.",
        ]
    if skipped:
        return ["The last step was applied.", *[RETRIED] * (retries == 0)]
    if retries:
        return [f"No step was skipped. Overflows that cost no batch: {retries}."]
    if read.get("good_steps") == 0:
        return ["No step has been taken yet, or the scale has just grown."]
    if has_params or not read["is_fixed"]:
        return ["No step was skipped."]
    return [
        "No step was skipped. The state does not tell more: a fixed loss scale checks "
        "no gradients, unless it has skip_nonfinite=True.",
        "Pass the parameters, report(state, params), to see whether they are finite.",
    ]


def _judge_skips(read: dict[str, Any]) -> list[str]:
    """Returns a diagnosis of the steps that were just skipped, and the advice."""
    in_a_row, stuck = read["consecutive_skipped_steps"], read["stuck_steps"]
    least, most = _loss_skips(read)
    steps = f"The last {in_a_row} steps were skipped: their"
    if in_a_row == 1:
        steps = "The last step was skipped: its"
    if not (most or read["is_marked"]):  # The gradients of the last step were finite.
        steps = f"{VETOED} Before it, t{steps[1:]}"
    if least == in_a_row:
        return [f"{steps} loss was not finite.", TRACE, LOSS, GO_ON]
    steps += " loss or gradients were" if most else " gradients were"
    if in_a_row <= START_UP and not stuck and "retries" not in read:
        return [
            f"{steps} not finite. A few skips in a row are usual at the start, and a "
            "single one later, when the loss scale has grown too high.",
            *([f"If they continue: {TRACE}"] if in_a_row > 1 else []),
        ]
    retried = [RETRIED] if "retries" in read else []
    # The scale fell for so long that the step may not use it.
    frozen = [FROZEN] if in_a_row - most > START_UP and in_a_row > stuck else []
    though = ", in spite of retries" if retried else ", for longer than is usual"
    if stuck:
        though = ", though the loss scale cannot go lower"
    if read["is_fixed"]:
        though = " at this fixed loss scale"
    advice = [*retried, TRACE, *frozen, SUM, LOSS, GRADIENTS, GO_ON]
    return [f"{steps} not finite{though}.", *advice]


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
