"""The verdict: what breaks, why, and what to do, the most urgent first.

It rests on the effect: as long as the loss and the gradients agree with float32, all is
fine. If they do not, it goes from the wrong results up to the line where that begins.
"""

import linecache
import math
import re

import jax.numpy as jnp

from optax_lossscale.diagnostics._trace import equations
from optax_lossscale.diagnostics._trace.effect import LOST, Effect
from optax_lossscale.diagnostics._trace.findings import (
    NumericFinding,
    begins,
    kinds_of,
    log2_of,
    power,
)
from optax_lossscale.diagnostics._trace.operations import Run
from optax_lossscale.diagnostics._trace.search import Search, headroom
from optax_lossscale.diagnostics._trace.values import Key

# How many lines to name of each kind.
SHOWN = 3
# A scale that is at most this many bits too high comes down within a few skipped steps.
USUAL_BITS = 4
DOMAIN = "An input is outside of the domain of the function."
# They make large numbers of small ones.
INVERSE = ("div", "rsqrt", "pow", "integer_pow", "log", "log1p")
SUMS = ("add", "sub", "add_any", "reduce_sum", "cumsum", "scatter-add", "psum")
NUMBER = re.compile(r"(?<![\w.])\d*\.?\d+(?:e-?\d+)?", re.IGNORECASE)


def find_all(search: Search) -> list[NumericFinding]:
    """Returns what was found, what to fix first."""
    run, best = search.run, search.best
    effect = search.effect(run)
    if run.program.judged:
        found = _would(search)
    elif effect.is_fine and best is not None:
        found = []
    else:
        found = _nonfinite_arguments(run) or _wrong(search, effect)
    return found or [_fine(search, effect)]


def _fine(search: Search, effect: Effect) -> NumericFinding:
    run, best = search.run, search.best
    room = f" The largest loss scale is {power(best.scale)}." if best else ""
    if run.program.judged:
        dtype = run.program.judged
        text = (
            f"Nothing would overflow in {dtype}, and no gradients would be lost.{room}"
        )
        return NumericFinding("fine", text)
    text = f"Fine: the loss and the gradients agree with float32 ({effect}).{room}"
    swallowed = next((k for k in run.origins() if not run.range(k).is_finite), None)
    if swallowed is not None:
        operation = run.operation(swallowed)
        text += f" The {kinds_of(run, swallowed)} at {operation.place} changes nothing."
    return NumericFinding("fine", text)


def _wrong(search: Search, effect: Effect) -> list[NumericFinding]:
    """Says why the loss or the gradients are not those of float32."""
    run, best = search.run, search.best
    losses = run.inputs(run.program.loss)
    causes = run.causes(losses) or (run.causes(run.gradients) if best is None else [])
    forward = [k for k in causes if run.site(k).phase != "backward"]
    if forward:
        return _forward(run, forward)
    if best is None:
        return [_at_every_scale(run, k) for k in _distinct_lines(run, causes)[:SHOWN]]
    if effect.loss > search.close:
        return [_imprecise(search, run, losses[-1])]
    found = []
    at_best = search.effect(best)
    if run.scale > best.scale:
        causes = run.causes(run.gradients) or run.origins("backward")
        found += [_too_high(run, k, best, at_best.is_fine) for k in causes[:1]]
    if at_best.wrong:
        return _conflict(search, at_best.wrong) + found
    return found or _underflow(search, effect.wrong)


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
    results = [*run.inputs(run.program.loss), *run.gradients]
    if run.ancestors(filter(run.is_bad, results), run.bad_operands).isdisjoint(bad):
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


def _forward(run: Run, keys: list[Key]) -> list[NumericFinding]:
    """Says where inf and nan begin in the forward pass."""
    if not run.bad_operands(keys[0]):
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
    if later:
        later = _distinct_lines(run, later)[:SHOWN]
        lines = (f"{run.operation(k).place} (2^{log2_of(run, k):.1f})" for k in later)
        message = "These lines have results that do not fit either: "
        message += "; ".join(lines) + "."
        kind, operation = found[0].kind, run.operation(later[0])
        found.append(NumericFinding(kind, message, operation))
    return found


def _describe(run: Run, key: Key) -> NumericFinding:
    """Says why an operation makes inf or nan at every loss scale."""
    operation, found = run.operation(key), run.range(key)
    limits = run.limit(key)
    is_half = equations.is_half(jnp.dtype(found.dtype))
    text = f"{operation}: {begins(run, key)} here"
    bits, cause = None, _why(run, key)
    if limits is not None and run.exceeds(key):
        needed, end = log2_of(run, key), math.log2(limits.overflow)
        bits = needed - end
        name = run.program.judged or found.dtype
        inverse = operation.primitive in INVERSE
        smaller = (
            "keep its inputs away from zero" if inverse else "make its inputs smaller"
        )
        text += (
            f". The largest result would be 2^{needed:.1f}; {name} ends at "
            f"2^{end:.0f}. No loss scale helps, since it does not depend on the scale: "
            f"{'compute' if is_half else 'keep'} this line in float32, or {smaller}."
        )
    elif is_half and found.infs and found.float32_nonfinite and not cause:
        # What fits into float32 would exceed the limits of half precision.
        text += (
            ". The result is too large for float32 as well. No loss scale helps: make "
            "the inputs of this line smaller, for example by subtracting the maximum "
            "before jnp.exp."
        )
    elif is_half and (not found.float32_nonfinite or _rounded_constants(run, key)):
        text += (
            f", and it is no overflow. {cause or DOMAIN} No loss scale helps: compute "
            "this line in float32."
        )
    else:
        where = ", and in float32 too" if is_half else ""
        text += (
            f"{where}. {cause or DOMAIN} No loss scale helps, nor does float32: keep "
            "the inputs of this line inside the domain of the operation and of its "
            "derivative. Add an epsilon, or guard sqrt, norm, log and division with a "
            "second jnp.where, before the operation."
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
    if _rounded_constants(run, key):
        return (
            "An input holds zeros. A constant was zero already when the program was "
            "written, since numbers below 2^-25, like 1e-8, are zero in float16. So "
            "what float32 would give is not known here."
        )
    if any(run.range(k).zeros for k in inputs):
        return "An input holds zeros."
    return None


def _rounded_constants(run: Run, key: Key) -> bool:
    """Whether a constant that leads here is zero only because of its dtype."""
    for k in (key, *run.ancestors(run.operands(key), lambda k: _near(run, k))):
        site = run.site(k)
        if 0.0 in site.constants and equations.is_half(jnp.dtype(site.dtype)):
            if site.primitive == "add":
                return True
            line = linecache.getline(site.source.file, site.source.line)
            if any(0 < float(x) < LOST * 2.0**-15 for x in NUMBER.findall(line)):
                return True
    return False


def _near(run: Run, key: Key) -> list[Key]:
    """Returns the operands of what keeps zeros zeros."""
    is_kept = run.site(key).moved or run.site(key).primitive in ("sqrt", "select_n")
    return run.operands(key) if is_kept else []


def _flushed_first(run: Run, key: Key) -> Key:
    """Returns the operation from which flushed zeros come."""
    while True:
        lost = [
            k for k in run.operands(key) if run.range(k).flushed and run.operands(k)
        ]
        if not lost:
            return key
        key = max(lost, key=lambda k: run.range(k).flushed)


# Finite results that differ from float32.


def _imprecise(search: Search, run: Run, result: Key) -> NumericFinding:
    """Says where the error of a result begins, which no loss scale mends."""
    key = run.beginning(result, search.close / 2)
    if run.is_bad(key):
        return _describe(run, key)
    operation, found, limits = run.operation(key), run.range(key), run.limit(key)
    is_small = gain_of(run, key) >= LOST or (
        limits and found.float32_largest < limits.normal
    )
    if limits and is_small and operation.primitive not in SUMS:  # Sums are exact there.
        message = (
            f"{operation}: {found.flushed:.0%} of the results are flushed to zero, and "
            f"the largest is 2^{log2_of(run, key):.1f}. No loss scale helps, since it "
            "does not depend on the scale: compute this line in float32."
        )
        return NumericFinding("underflow", message, operation)
    message = (
        f"{operation}: the results differ from float32 by up to {found.error:.2g} of "
        f"the largest.{_loss_of_precision(run, key)} No loss scale helps: compute this "
        "line in float32"
    )
    lines = [
        run.operation(k) for k in _distinct_lines(run, sources_of(search, run, key))
    ]
    places = dict.fromkeys(x.place for x in lines if x.line)
    places.pop(operation.place, None)
    if places:
        message += f", and what goes into it: {'; '.join(places)}"
    return NumericFinding("precision", f"{message}.", operation)


def _loss_of_precision(run: Run, key: Key) -> str:
    """Explains a loss of precision."""
    operands, found = run.operands(key), run.range(key)
    largest = max((run.range(k).largest for k in operands), default=0.0)
    is_sum = run.site(key).primitive in SUMS
    halves = [x.dtype for x in map(run.range, [key, *operands]) if _is_half(x.dtype)]
    if not is_sum or not halves or not largest:
        return ""
    exponent = math.floor(math.log2(largest))
    spacing = power(2.0 ** (exponent - jnp.finfo(halves[0]).nmant))
    text = f" {halves[0]} has a spacing of {spacing} at 2^{exponent}"
    if found.float32_largest < largest / 4:
        return f"{text}, and the inputs, which are as large as this, nearly cancel."
    return f"{text}: smaller terms of the sum are lost."


def _is_half(dtype: str) -> bool:
    return equations.is_half(jnp.dtype(dtype))


def sources_of(search: Search, run: Run, key: Key) -> list[Key]:
    """Returns the operations before whose errors are large beside a result."""
    least = search.close / 2 * run.range(key).float32_largest

    def parents(k):
        errors = ((x, run.range(x)) for x in run.operands(k))
        return [x for x, found in errors if found.error * found.float32_largest > least]

    found = run.ancestors([key], parents)
    return [k for k in run.keys if k in found and run.site(k).primitive]


# The backward pass, which the loss scale moves up and down.


def _would(search: Search) -> list[NumericFinding]:
    """Says what would happen in another dtype, in which nothing is computed."""
    run, best = search.run, search.best
    origins = run.origins("forward")
    urgent = _forward(run, origins) if origins else _nonfinite_arguments(run)
    if urgent:
        return urgent
    if best is None:
        origins = _distinct_lines(run, run.origins("backward"))
        return [_at_every_scale(run, k) for k in origins[:SHOWN]]
    found = [_too_high(run, k, best, True) for k in run.origins("backward")[:1]]
    if search.effect(best).wrong:
        return found + _conflict(search, search.effect(best).wrong)
    return found + _underflow(search, search.effect(run).wrong)


def _at_every_scale(run: Run, key: Key) -> NumericFinding:
    operation = run.operation(key)
    message = f"{operation}: {begins(run, key)} here at every loss scale"
    if run.range(key).float32_nonfinite:
        message += (
            ", and in float32 too. Keep the inputs of this line inside the domain of "
            "its derivative: add an epsilon, or guard it with a second jnp.where, "
            "before the operation."
        )
    else:
        message += ". Compute this line, or its derivative, in float32."
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


def gain_of(run: Run, key: Key) -> float:
    """Returns the share of the results that is flushed here, and not before."""
    shares = (run.range(k).flushed for k in run.operands(key))
    return run.range(key).flushed - max(shares, default=0.0)


def _losers(run: Run, wrong: list[int]) -> list[Key]:
    """Returns where gradients of these parameters are flushed, the most first."""
    keys = (k for i in wrong for k in run.inputs(run.program.gradients[i]))
    reached = run.ancestors(keys)
    gains = {k: gain_of(run, k) for k in run.backward if k in reached and run.limit(k)}
    gains = {k: gain for k, gain in gains.items() if gain >= LOST}
    return _distinct_lines(run, sorted(gains, key=lambda key: -gains[key]))


def _underflow(search: Search, wrong: list[int]) -> list[NumericFinding]:
    """Says where the gradients of parameters are lost, with a scale that is too low."""
    run, best, found = search.run, search.best, []
    for key in _losers(run, wrong)[:SHOWN] if best else ():
        operation = run.operation(key)
        message = (
            f"{operation}: {run.range(key).flushed:.0%} of the results are flushed to "
            f"zero at the loss scale {power(run.scale)}, and "
            f"{best.range(key).flushed:.0%} at {power(best.scale)}, the largest "
            "with which nothing in the backward pass overflows."
        )
        kind = "would_underflow" if run.program.judged else "underflow"
        found.append(NumericFinding(kind, message, operation))
    if not found and wrong:
        (*_, key) = run.inputs(run.program.gradients[wrong[0]])
        found = [_imprecise(search, run, key)]
    return found


def _conflict(search: Search, wrong: list[int]) -> list[NumericFinding]:
    """Says why gradients are wrong even at the largest scale."""
    best = search.best
    losers = ((k, best.limit(k)) for k in _losers(best, wrong))
    missing = {
        k: math.log2(limits.normal) - log2_of(best, k)
        for k, limits in losers
        if limits and 0 < best.range(k).float32_largest < limits.normal
    }
    if not missing:
        (*_, key) = best.inputs(best.program.gradients[wrong[0]])
        return [] if best.program.judged else [_imprecise(search, best, key)]
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
    return [NumericFinding("no_scale", message, first, second, float(bits))]
