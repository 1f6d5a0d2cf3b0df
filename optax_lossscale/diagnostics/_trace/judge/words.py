"""The message of a finding, from a small record: the event, the reason, the advice."""

import math
from collections.abc import Iterable
from typing import NamedTuple

from optax_lossscale._autocast.choices import ONE_LAYER
from optax_lossscale._tree import is_half
from optax_lossscale.diagnostics import _common
from optax_lossscale.diagnostics._bits import limits_of
from optax_lossscale.diagnostics._trace.judge.findings import (
    Cause,
    FindingKind,
    NumericFinding,
)
from optax_lossscale.diagnostics._trace.run import (
    NumericOperation,
    NumericRange,
    named,
    spacing,
)

# A scale that is at most this many bits too high comes down within a few skipped steps.
USUAL_BITS = 4
# Smaller errors, relative to the largest number, do not matter by themselves.
SMALL = 0.005
CAST_PRIMITIVES = ("convert_element_type", "reduce_precision")


class Fault(NamedTuple):
    """The fault of an operation that is wrong at every loss scale.

    Attributes:
      kind: The kind of the finding.
      operation: The operation.
      cause: Its cause.
      sources: The operations of other lines that have to change as well, in order of
        execution.
      dtype: The dtype to judge.
      is_autocast: Whether `autocast` made the program.
      products: How many matrix products its line computes in the forward pass.
    """

    kind: FindingKind
    operation: NumericOperation
    cause: Cause = Cause.UNKNOWN
    sources: tuple[NumericOperation, ...] = ()
    dtype: str = "float16"
    is_autocast: bool = True
    products: int = 1


def power(scale: float) -> str:
    """Writes a number as a power of two, but for 1."""
    return "1" if scale == 1 else _common.power(scale)


def kinds_of(numbers: NumericRange) -> str:
    """Returns "inf", "nan" or both; "overflow" in a run in which there is neither."""
    kinds = ["inf"] * (numbers.infs > 0) + ["nan"] * (numbers.nans > 0)
    return " and ".join(kinds) or "overflow"


def begins(operation: NumericOperation) -> str:
    """Returns "inf begins", "inf and nan begin" and the like."""
    kinds = kinds_of(operation.output)
    return f"{kinds} begin{'s' * (' and ' not in kinds)}"


def lines_to_pass(operations: Iterable[NumericOperation], is_autocast: bool) -> str:
    """Returns how to keep lines in float32 by `autocast`; "" if that is no way."""
    own = (x.own for x in operations)
    names = list(dict.fromkeys(named(*x[:2], "") for x in own if x[1]))
    is_cell = any(x.startswith("In[") for x in names)
    if not names or is_cell or not is_autocast:
        return ""
    text = ", ".join(f'"{x}"' for x in names)
    return f"float32={text}" if len(names) == 1 else f"float32=[{text}]"


def event_of(fault: Fault) -> str:
    """Returns the event: "3% of the gradients are flushed to zero"."""
    result, is_backward = fault.operation.output, fault.operation.phase == "backward"
    is_too = result.float32_nonfinite > 0 and fault.cause is not Cause.FLOAT32_RANGE
    share = f" for {_common.percent(result.flushed)} of the numbers"
    return fault.kind.event.format(
        begins=begins(fault.operation),
        too=", in float32 too" * is_too,
        noun="gradients" if is_backward else "results",
        flushed=result.flushed,
        share=share * bool(result.flushed),
        error=result.error,
        magnified=", and other lines magnify that" * (result.error < SMALL),
    )


def why_of(fault: Fault) -> str:
    """Returns the reason: "The largest would be 2^17.3; float16 ends at 2^16."."""
    operation, result = fault.operation, fault.operation.output
    step, top = spacing(operation) or (0, 0)
    ends = is_half(result.dtype) and math.log2(limits_of(result.dtype).overflow)
    halves = (x.dtype for x in (result, *operation.inputs) if is_half(x.dtype))
    places = [x.place for x in fault.sources] or ["this line"]
    why = fault.cause.value.why.format(
        noun="gradient" if operation.phase == "backward" else "result",
        size=math.log2(result.float32_largest or 1),
        **{"dtype": result.dtype, "end": ends, "at": places[0]},
        **{"half": next(halves, fault.dtype), "step": power(2.0**step), "top": top},
    )
    by_hand = fault.cause.value.by_hand
    return why if fault.is_autocast or not by_hand else f"{why} {by_hand}"


def advice_of(fault: Fault) -> str:
    """Returns the advice: "compute this line in float32, by autocast(...)"."""
    cause, operation, sources = fault.cause.value, fault.operation, fault.sources
    if cause.guard:
        return cause.guard
    is_own = operation.own[:2] == (operation.file, operation.line)
    line = "this line" if is_own else f"the call at {named(*operation.own)}"
    passed = lines_to_pass([*sources, operation], fault.is_autocast)
    passed = f", by autocast(loss_fn, {passed})" if passed else ""
    places = "; ".join(dict.fromkeys(x.place for x in sources))
    if places and cause.is_before:
        passed = passed or ", and cast nothing in between"
        return f"compute {places}, and {line} in float32{passed}"
    is_float32 = operation.dtype == "float32"
    text = f"{'keep' if is_float32 else 'compute'} {line} in float32"
    is_cast = operation.primitive in CAST_PRIMITIVES and not fault.is_autocast
    text += " without a cast back" * (is_cast and fault.cause is Cause.RANGE)
    if places:
        is_before = fault.kind == FindingKind.PRECISION
        others = "lines that feed it" if is_before else "others that read this number"
        text += f", and the {others}: {places}"
    text += passed
    text += f", or {cause.instead}" * bool(cause.instead)
    if places and passed:
        text += ". diagnostics.float32_lines finds the fewest lines that it takes"
    # A line that calls a whole model is more than one wants.
    is_more = passed and fault.products > 1
    return f"{text}. {ONE_LAYER.removesuffix('.')}" if is_more else text


def explain(fault: Fault, scale: float | None = None) -> NumericFinding:
    """Says in a finding the event, the reason and the advice.

    Args:
      fault: The fault.
      scale: The scale that mends another fault, named before, but not this one; None if
        no scale changes anything.
    """
    text, advice = f"{fault.operation}: {event_of(fault)}", advice_of(fault)
    if fault.kind == FindingKind.DECISION:
        text += f": chosen among numbers that {fault.dtype} cannot tell apart; if "
        text += "training is fine, leave it."
        halves = [x for x in fault.operation.inputs if is_half(x.dtype)]
        text += f" If not, {advice}." * bool(fault.sources or halves)
        return NumericFinding(fault.kind, text, fault.operation)
    if scale is None:
        text = f"{text}. {why_of(fault)}".strip() + f" No loss scale helps: {advice}."
    else:
        text = f"At the loss scale {power(scale)}, too: {text}. {why_of(fault)}".strip()
        text += f" {advice[0].upper()}{advice[1:]}."
    others = fault.sources if fault.cause.value.is_before else ()
    return NumericFinding(fault.kind, text, fault.operation, next(iter(others), None))


def nonfinite_argument(
    name: str, more: int, is_parameter: bool, held: str, operation: NumericOperation
) -> NumericFinding:
    """Says that an argument held inf or nan, and so many others."""
    kind = "argument"
    fix = (
        "Look for the bad example in the data. Keep batch statistics of skipped steps "
        "out by select_applied"
    )
    if is_parameter:
        kind, fix = "parameter", "Restore a checkpoint from before"
    others = f" (and {more} more)" if more else ""
    text = (
        f"The {kind} {name}{others} held {held} before anything was computed. It is "
        f"first used by: {operation}. No loss scale helps. {fix}."
    )
    return NumericFinding(FindingKind.NONFINITE_ARGUMENT, text, operation)


def in_float32(
    operation: NumericOperation, cause: Cause, is_hidden: bool
) -> NumericFinding:
    """Says that float32 makes inf or nan where half precision does not.

    Args:
      operation: The operation where it does.
      cause: The cause.
      is_hidden: Whether half precision has finite numbers there; otherwise its inf or
        nan begins earlier.
    """
    what = "float32 itself makes inf or nan here"
    if is_hidden:
        what = "float32 makes inf or nan here, and rounded inputs hide it"
    why, advice = cause.value.why, cause.value.guard
    text = f"{operation}: {what}. {why} No loss scale helps: {advice}."
    kind = FindingKind.of_nonfinite(operation.phase)
    return NumericFinding(kind, text, operation)


def huge_loss(loss: float, dtype: str) -> str:
    """Says that the loss in float32 is itself beyond the range of a dtype."""
    return (
        f"In float32, too, the loss is {loss:.3g}, beyond {dtype}: if it grew from "
        "step to step, the run diverges, and a lower learning rate comes first."
    )


def slow_solver(
    operation: NumericOperation, dtype: str, stands_still: bool
) -> NumericFinding:
    """Says that a loop that solves takes more iterations than in float32.

    Args:
      operation: The loop; its largest number is how many iterations it takes.
      dtype: The dtype to judge.
      stands_still: Whether its numbers never reach the tolerance.
    """
    count, wide = operation.output.largest, operation.output.float32_largest
    text = f"{operation.name} at {operation.place}: this loop takes {count:.0f} "
    text += f"iterations, in float32 {wide:.0f}"
    if stands_still:
        text += f": in {dtype} its numbers never reach the tolerance. Compute the loop "
        text += "in float32."
    else:
        text += f". If that is its limit, {dtype} does not reach the tolerance: "
        text += "compute the loop in float32."
    return NumericFinding(FindingKind.DECISION, text, operation)


def constant_loss(loss: float) -> NumericFinding:
    """Says that the loss is inf or nan, and depends on nothing."""
    text = f"The loss is {loss:g}, a constant: nothing in it depends on an argument."
    return NumericFinding(FindingKind.FORWARD, text)


def too_high(
    operation: NumericOperation, scale: float, largest: float, is_alone: bool
) -> NumericFinding:
    """Says that the backward pass overflows at a scale, but not at the largest.

    Args:
      operation: The operation that overflows.
      scale: The scale.
      largest: The largest with which it does not.
      is_alone: Whether all is fine at the largest scale.
    """
    size, would, more = operation.output.float32_largest, "", ""
    if size and operation.output.dtype != "float32":
        would = f" (it would be 2^{math.log2(size):.1f})"
    if not operation.line:
        more = " This is the gradient of the loss itself: return the loss in float32."
    elif is_alone and largest < 1:
        more = f" Start below 1: {start_at(largest)}."
    elif is_alone and scale <= largest * 2**USUAL_BITS:
        more = (
            " Nothing is wrong: this is usual after the scale has grown. A dynamic "
            "scale skips the step and lowers itself."
        )
    elif is_alone:
        more = " Start at a lower loss scale, or let a dynamic one come down."
    text = (
        f"{operation}: {begins(operation)} here{would}, at the loss scale "
        f"{power(scale)}. The largest scale with which nothing in the backward pass "
        f"overflows is {power(largest)}.{more}"
    )
    return NumericFinding(FindingKind.SCALE_TOO_HIGH, text, operation)


def start_at(scale: float) -> str:
    """Writes how to begin at a scale: below 1, a rule has to allow it."""
    exponent = round(math.log2(scale))
    if exponent >= 0:
        return f"initial_scale=2.0**{exponent}"
    return (
        f"DynamicLossScale(2.0**{exponent}, min_scale=2.0**{max(exponent - 4, -126)})"
    )


def underflow(
    operation: NumericOperation,
    scale: float,
    largest: float,
    shares: tuple[float, float],
    errors: tuple[float, float],
    is_first: bool,
) -> NumericFinding:
    """Says that a larger scale mends gradients.

    Args:
      operation: Where they are lost.
      scale: The scale.
      largest: The largest scale with which nothing overflows.
      shares: The shares that are flushed to zero here, at the two scales.
      errors: How far the gradients of the parameters are off, at the two scales.
      is_first: Whether it is the first of such findings, with the advice.
    """
    first, second = map(power, (scale, largest))
    what = f"{shares[0]:.0%} of the gradients are flushed to zero at the loss scale "
    what += f"{first}, and {shares[1]:.0%} at {second}"
    if not shares[0]:
        off = list(map(_common.percent, errors))
        what = f"the gradients are too small to be precise: {off[0]} off at the loss "
        what += f"scale {first}, and {off[1]} at {second}"
    text = f"{operation}: {what}"
    if is_first:
        text += ", the largest with which nothing in the backward pass overflows. Use "
        text += f"that: {start_at(largest)}"
    return NumericFinding(FindingKind.UNDERFLOW, f"{text}.", operation)


def no_scale(
    overflows: NumericOperation,
    vanishes: NumericOperation,
    largest: float,
    bits: int,
    is_autocast: bool,
) -> NumericFinding:
    """Says that of two operations one overflows and the other vanishes.

    Args:
      overflows: The operation that overflows above the largest scale.
      vanishes: The operation that is flushed to zero there.
      largest: That scale.
      bits: How many bits a scale would have to be larger.
      is_autocast: Whether `autocast` made the program.
    """
    result, lines = vanishes.output, lines_to_pass([overflows], is_autocast)
    passed = f"the first, by autocast(loss_fn, {lines})," if lines else "one of the two"
    text = (
        f"No loss scale fits both: above {power(largest)}, {overflows} overflows; at "
        f"that scale {result.flushed:.0%} of the results of {vanishes} are flushed to "
        f"zero, and the largest is 2^{math.log2(result.float32_largest):.1f}. They are "
        f"{bits} bits apart. Keep {passed} in float32, with those that feed it "
        "(diagnostics.float32_lines finds them), or give the loss that feeds the "
        "second a scale of its own."
    )
    return NumericFinding(FindingKind.NO_SCALE, text, overflows, vanishes)


def fine(
    errors: str,
    largest: float | None,
    swallowed: NumericOperation | None = None,
    is_near: bool = True,
) -> NumericFinding:
    """Says that the gradients agree with float32.

    Args:
      errors: How far the loss and the gradients are off, in words.
      largest: The largest loss scale; None if there is none.
      swallowed: Where inf or nan begins that changes nothing; None if nowhere.
      is_near: Whether they agree by themselves, and not only as far as the parameters
        and the data in half precision let them.
    """
    text = f"Fine: the gradients agree with float32 ({errors})."
    if not is_near:
        text = f"Fine: with its inputs rounded, float32 is as far off ({errors})."
    if largest is not None:
        text += f" The largest loss scale is {power(largest)}."
    if swallowed is not None:
        kinds = kinds_of(swallowed.output)
        text += f" The {kinds} at {swallowed.place} changes nothing."
    return NumericFinding(FindingKind.FINE, text)
