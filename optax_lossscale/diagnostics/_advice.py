"""The words of a report: of each reason the diagnosis and the advice."""

import collections
from typing import NamedTuple

import numpy as np

from optax_lossscale import _state
from optax_lossscale.diagnostics._reading import Broken, Members, Reading, Reason

# How many leaves a report names.
ARRAYS_SHOWN = 3
# Advice of several reasons. A report leaves out advice that does not apply.
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
    "state. With scale_as_parameter, see whether the scale among the parameters is "
    "finite: report(state, params)."
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
# Of each reason the diagnosis, and the advice, one step after the other. {skips} is
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
# The causes of skips: of a rule of this package, and of any other.
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
# No state tells of the loss, of gradients that were never scaled, or of a forward pass
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


class Words(NamedTuple):
    """A diagnosis, and the advice, one step after the other."""

    diagnosis: str
    advice: tuple[str, ...]


def words_of(members: Members, broken: Broken) -> Words:
    """Returns the diagnosis and the advice on a state, and on its leaves."""
    reading = members.reading
    template, *advice = WORDS[reason := reading.reason]
    skips = _skips(reading) if reading.consecutive_skipped_steps else ""
    diagnosis = template.format(skips=skips, retries=reading.retries)
    unfit = _unfit(reading, reason)
    words = Words(
        (_members(members) if members.shape else "") + diagnosis,
        tuple(x for x in advice if x not in unfit),
    )
    return _with_leaves(words, broken) if broken.leaves else words


def _with_leaves(words: Words, broken: Broken) -> Words:
    """Puts words about leaves that are not finite before those about the state."""
    template, *restore = WORDS[Reason.NOT_FINITE]
    leaves = "; ".join(map(str, broken.leaves[:ARRAYS_SHOWN]))
    more = len(broken.leaves) - ARRAYS_SHOWN
    if more > 0:
        leaves += f"; and {more} more"
    diagnosis = template.format(leaves=leaves, diagnosis=words.diagnosis)
    advice = restore if broken.is_unhealthy else [BEGUN, *words.advice]
    if broken.scale:
        advice = [SCALE.format(broken.scale), *advice]
    return Words(diagnosis, tuple(advice))


def _members(members: Members) -> str:
    """Says how many of several members skipped steps, why, and which is the worst."""
    size = int(np.prod(members.shape))
    counts = collections.Counter(members.reasons)
    which = ", ".join(f"{counts[x]} {x}" for x in Reason if counts[x])
    why = f" ({which})" if len(counts) > 1 else ""
    return (
        f"Members that skipped steps: {members.skipped_ever} of {size}; the last step: "
        f"{len(members.reasons)}{why}. The worst is member {list(members.worst)}. "
    )


def _skips(reading: Reading) -> str:
    """Begins a sentence about the steps that were skipped in a row."""
    in_a_row = reading.consecutive_skipped_steps
    is_one = in_a_row == 1
    sentences = CAUSES if reading.is_ours else OTHER_CAUSES
    why = sentences[reading.causes].format("its" if is_one else "their")
    steps = "last step was" if is_one else f"last {in_a_row} steps were"
    start = "The"
    if not reading.skip_reasons:
        # Of a state from before this field nobody knows which skip came last.
        start = "Apart from vetoes, the"
    elif reading.skip_reasons & _state.VETO:
        start = "The last step was vetoed by skip_if. Before it, the"
    return f"{start} {steps} skipped: {why}"


def _unfit(reading: Reading, reason: Reason) -> set[str]:
    """Returns the advice that does not apply."""
    is_several = reading.consecutive_skipped_steps > 1
    fits = {
        UPDATE: not reading.is_ours and (is_several or not reading.are_few),
        AGAIN: reading.are_few and is_several,
        RETRIED: reading.retries is not None,
        FROZEN: reading.is_frozen,
    }
    if reason is Reason.RULE and reading.are_few:
        fits |= dict.fromkeys(ALL_ADVICE, False)
    return {item for item, applies in fits.items() if not applies}
