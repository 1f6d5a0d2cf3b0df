"""The verdict: what breaks, why, and what to do, the most urgent first."""

import itertools
import math

import jax.numpy as jnp
import numpy as np

from optax_lossscale.diagnostics._trace import equations
from optax_lossscale.diagnostics._trace.findings import (
    NumericFinding,
    begins,
    kinds_of,
    log2_of,
    power,
)
from optax_lossscale.diagnostics._trace.operations import Run
from optax_lossscale.diagnostics._trace.search import headroom
from optax_lossscale.diagnostics._trace.values import Key

# How many lines to name of each kind.
SHOWN = 3
# A smaller share of gradients that are flushed to zero is not worth a word.
LOST = 0.01
# A scale that is at most this many bits too high comes down within a few skipped steps.
USUAL_BITS = 4
# Results agree with float32 if they differ by less, relative to the largest.
CLOSE = 0.1
DOMAIN = "An input is outside of the domain of the function."
HARMLESS = " The loss and the gradients of this batch agree with float32 all the same."


def find_all(run: Run, best: Run | None) -> list[NumericFinding]:
    """Returns what was found, what to fix first.

    Args:
      run: The run at the scale in question.
      best: The run at the largest scale with which nothing in the backward pass
        overflows; None if there is no such scale.
    """
    forward, arguments = _forward(run), _nonfinite_arguments(run)
    starts = run.origins("forward")
    if starts and run.bad_operands(starts[0]):
        # The first nan was made from an inf: that of an argument, if there is one.
        forward = arguments or forward
    is_factual = run.program.judged is None
    harmless = is_factual and best is not None and _is_harmless(best)
    urgent = [] if harmless else forward or arguments
    if urgent:
        return urgent
    found = [x._replace(message=x.message + HARMLESS) for x in forward]
    found = [*_backward(run, best), *found]
    if not found and (best is None or not np.isfinite(run.losses).all()):
        bad = (k for k in run.keys if run.site(k).primitive and run.is_bad(k))
        found = [_describe(run, key) for key in itertools.islice(bad, 1)]
    if found:
        return found
    room = f" The largest loss scale is {power(best.scale)}." if best else ""
    fine = f"Nothing overflows, and no gradients are lost.{room}"
    return [NumericFinding("fine", fine)]


def _distinct_lines(run: Run, keys: list[Key]) -> list[Key]:
    """Returns the first site of each line."""
    found: dict[object, Key] = {}
    for key in keys:
        site = run.site(key)
        found.setdefault((site.source, site.scope, site.source.line or key), key)
    return list(found.values())


# Arguments and the forward pass, where no loss scale helps.


def _nonfinite_arguments(run: Run) -> list[NumericFinding]:
    """Finds inf or nan in the arguments, if a gradient is not finite either."""
    arguments = (k for k in run.keys if run.site(k).phase == "argument")
    bad = [k for k in arguments if not run.range(k).is_finite]
    if not bad or all(run.range(k).is_finite for k in run.gradients):
        return []
    (name,) = bad[0]
    readers = (k for k in run.keys if any(bad[0] in x for x in run.site(k).inputs))
    operation = next(map(run.operation, readers), None)
    used = "" if operation is None else f" It is first used at {operation}."
    more = "" if len(bad) == 1 else f" (and {len(bad) - 1} more)"
    if bad[0] in run.program.parameters:
        kind = "parameter"
        fix = (
            "Restore a checkpoint, and find the step that was applied though its "
            "gradients were not finite."
        )
    else:
        kind, fix = "argument", "Look for the bad example in the data."
    message = (
        f"The {kind} {name}{more} held {kinds_of(run, bad[0])} before anything was "
        f"computed.{used} No loss scale helps. {fix}"
    )
    return [NumericFinding("nonfinite_argument", message, operation)]


def _forward(run: Run) -> list[NumericFinding]:
    """Says where inf and nan begin in the forward pass."""
    keys = run.origins("forward")
    if keys and not run.bad_operands(keys[0]):
        # A nan made from an inf is a consequence, not a cause.
        keys = [key for key in keys if not run.bad_operands(key)]
    keys = _distinct_lines(run, keys)[:SHOWN]
    found = [_describe(run, key) for key in keys]
    known = {run.site(key).source for key in keys}
    later = [
        key
        for key in run.keys
        if run.site(key).phase == "forward"
        and run.site(key).primitive
        and run.exceeds(key)
        and run.site(key).source not in known
    ]
    if found and later:
        later = _distinct_lines(run, later)[:SHOWN]
        lines = (f"{run.operation(k).place} (2^{log2_of(run, k):.1f})" for k in later)
        message = "These lines have results that do not fit either: "
        message += "; ".join(lines) + "."
        kind, operation = found[0].kind, run.operation(later[0])
        found.append(NumericFinding(kind, message, operation))
    return found


def _is_harmless(run: Run) -> bool:
    """Whether the loss and the gradients of a run agree with float32."""
    results = map(run.range, run.gradients)
    agree = math.isclose(*run.losses, rel_tol=CLOSE)
    return agree and all(x.is_finite and x.error < CLOSE for x in results)


def _describe(run: Run, key: Key) -> NumericFinding:
    """Says why an operation of the forward pass makes inf or nan."""
    operation, found = run.operation(key), run.range(key)
    limits = run.limit(key)
    is_half = equations.is_half(jnp.dtype(found.dtype))
    text = f"{operation}: {begins(run, key)} here"
    bits, cause = None, _why(run, key)
    if limits is not None and run.exceeds(key):
        needed, end = log2_of(run, key), math.log2(limits.overflow)
        bits = needed - end
        name = run.program.judged or found.dtype
        text += (
            f". The largest result would be 2^{needed:.1f}; {name} ends at "
            f"2^{end:.0f}. No loss scale helps, since this is the forward pass: "
            f"{'compute' if is_half else 'keep'} this line in float32, or make its "
            "inputs smaller."
        )
    elif is_half and found.infs and not cause:
        # What fits into float32 would exceed the limits of half precision.
        text += (
            ". The result is too large for float32 as well. No loss scale helps: make "
            "the inputs of this line smaller, for example by subtracting the maximum "
            "before jnp.exp."
        )
    elif is_half:
        text += (
            f", and it is no overflow. {cause or DOMAIN} No loss scale helps: compute "
            "this line in float32."
        )
    else:
        text += (
            f". {cause or DOMAIN} No loss scale helps, and this line is in "
            f"{found.dtype} already: keep its inputs inside the domain of the "
            "operation and of its derivative. Add an epsilon, or guard sqrt, norm and "
            "division with a second jnp.where."
        )
    kind = "would_overflow" if found.is_finite else "forward"
    return NumericFinding(kind, text, operation, bits=bits)


def _why(run: Run, key: Key) -> str | None:
    """Explains an operation that makes inf or nan, if inf or zeros go into it."""
    inputs = run.operands(key)
    flushed = max(inputs, key=lambda k: run.range(k).flushed, default=None)
    if run.bad_operands(key) or not all(map(math.isfinite, run.site(key).constants)):
        return (
            "An input holds inf, and inf - inf, inf / inf and 0 * inf are nan. (A "
            "constant like -1e9 is -inf in float16.)"
        )
    if flushed is not None and run.range(flushed).flushed:
        origin = run.operation(_flushed_first(run, flushed))
        return (
            "Its input holds zeros that float32 would not have: they were flushed at "
            f"{origin.place}."
        )
    if any(run.range(k).zeros for k in inputs):
        return (
            "An input holds zeros. (A constant below 2^-25, like 1e-8, is zero in "
            "float16.)"
        )
    return None


def _flushed_first(run: Run, key: Key) -> Key:
    """Returns the operation from which flushed zeros come."""
    while True:
        lost = [
            k for k in run.operands(key) if run.range(k).flushed and run.operands(k)
        ]
        if not lost:
            return key
        key = max(lost, key=lambda k: run.range(k).flushed)


# The backward pass, which the loss scale moves up and down.


def _backward(run: Run, best: Run | None) -> list[NumericFinding]:
    """Says what overflows or underflows in the backward pass."""
    origins = run.origins("backward")
    if best is None:
        return [_at_every_scale(run, k) for k in _distinct_lines(run, origins)[:SHOWN]]
    conflict = _conflict(best)
    found = [_too_high(run, origins[0], best, conflict is None)] if origins else []
    return found + ([conflict] if conflict else _underflow(run, best))


def _at_every_scale(run: Run, key: Key) -> NumericFinding:
    operation = run.operation(key)
    message = (
        f"{operation}: {begins(run, key)} here at every loss scale. Compute "
        "this line, or its derivative, in float32."
    )
    return NumericFinding("backward", message, operation)


def _too_high(run: Run, key: Key, best: Run, alone: bool) -> NumericFinding:
    operation = run.operation(key)
    would = ""
    if math.isfinite(headroom(run, key)):
        would = f" (it would be 2^{log2_of(run, key):.1f})"
    text = (
        f"{operation}: {begins(run, key)} here{would}, at the loss scale "
        f"{power(run.scale)}. The largest scale with which nothing in the backward "
        f"pass overflows is {power(best.scale)}."
    )
    bits = math.log2(run.scale / best.scale)
    if not operation.line:
        text += (
            " This is the gradient of the loss itself, in the dtype of the loss: "
            "return the loss in float32."
        )
    elif alone and bits <= USUAL_BITS:
        text += (
            " Nothing is wrong: the scale is too high for this batch alone, which is "
            "usual after it has grown. A dynamic scale skips the step and lowers "
            "itself."
        )
    elif alone:
        text += " Start at a lower loss scale, or let a dynamic one come down."
    return NumericFinding("scale_too_high", text, operation, bits=bits)


def _lost(run: Run) -> float:
    """Returns the largest share of a parameter's gradient that is flushed."""
    return max((run.range(k).flushed for k in run.gradients), default=0.0)


def _losers(run: Run) -> list[Key]:
    """Returns where results of the backward pass are flushed, the most first."""
    gains: dict[Key, float] = {}
    for key in run.backward:
        if run.limit(key):
            shares = (run.range(k).flushed for k in run.operands(key))
            gain = run.range(key).flushed - max(shares, default=0.0)
            gains |= {key: gain} if gain >= LOST else {}
    return _distinct_lines(run, sorted(gains, key=lambda key: -gains[key]))


def _underflow(run: Run, best: Run) -> list[NumericFinding]:
    if _lost(run) < LOST:
        return []
    found = []
    for key in _losers(run)[:SHOWN]:
        operation = run.operation(key)
        message = (
            f"{operation}: {run.range(key).flushed:.0%} of the results are flushed to "
            f"zero at the loss scale {power(run.scale)}, and "
            f"{best.range(key).flushed:.0%} at {power(best.scale)}, the largest "
            "with which nothing in the backward pass overflows."
        )
        kind = "underflow" if run.range(key).zeros else "would_underflow"
        found.append(NumericFinding(kind, message, operation))
    return found


def _conflict(best: Run) -> NumericFinding | None:
    """Finds two operations that no loss scale fits."""
    if _lost(best) < LOST:
        return None
    missing = {}
    for key in _losers(best):
        limits = best.limit(key)
        if limits is not None and best.range(key).float32_largest < limits.normal:
            missing[key] = math.log2(limits.normal) - log2_of(best, key)
    if not missing:
        return None
    low = next(iter(missing))
    high = min(best.backward, key=lambda k: headroom(best, k))
    bits = math.ceil(missing[low])
    first, second = best.operation(high), best.operation(low)
    message = (
        f"No loss scale fits both: above {power(best.scale)}, {first} "
        f"overflows; at that scale {best.range(low).flushed:.0%} of the results of "
        f"{second} are flushed to zero, and the largest is 2^{log2_of(best, low):.1f}. "
        f"They are {bits} bits apart. Keep one of the two lines in float32, or give "
        "the loss that feeds the second a scale of its own."
    )
    return NumericFinding("no_scale", message, first, second, float(bits))
