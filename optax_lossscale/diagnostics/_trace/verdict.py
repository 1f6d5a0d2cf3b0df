"""The verdict: what breaks, why, and what to do, the most urgent first.

It rests on the effect: as long as the loss and the gradients agree with float32, all is
fine. If they do not, it goes from the wrong results up to the line where that begins.
"""

import math

import jax.numpy as jnp

from optax_lossscale.diagnostics._trace import equations
from optax_lossscale.diagnostics._trace.effects import LOST, Effect, percent
from optax_lossscale.diagnostics._trace.findings import NumericFinding, log2_of, power
from optax_lossscale.diagnostics._trace.operations import Run, named
from optax_lossscale.diagnostics._trace.search import HIGHEST, Search, headroom
from optax_lossscale.diagnostics._trace.values import Key

# How many lines to name of each kind.
SHOWN = 3
# A scale that is at most this many bits too high comes down within a few skipped steps.
USUAL_BITS = 4
# They make large numbers of small ones.
INVERSE = ("div", "rsqrt", "log", "log1p")
ROUNDED = "A constant like 1e-8 is 0 in float16, and one like -1e9 is -inf."
POWERS = ("pow", "integer_pow")  # If the exponent is negative.
# Their results are exact where they are subnormal.
SUMS = ("add", "sub", "add_any", "reduce_sum", "cumsum", "scatter-add", "psum")


def find_all(search: Search) -> list[NumericFinding]:
    """Returns what was found, what to fix first."""
    run, best = search.run, search.best
    effect = search.effect(run)
    found = []
    if best is None or not effect.is_fine:
        found = _nonfinite_arguments(run) or _wrong(search, effect)
    return found or [_fine(search, effect)]


def _kinds_of(run: Run, key: Key) -> str:
    """Returns "inf", "nan" or both; "overflow" in a run in which there is neither."""
    found = run.range(key)
    kinds = ["inf"] * (found.infs > 0) + ["nan"] * (found.nans > 0)
    return " and ".join(kinds) or "overflow"


def _begins(run: Run, key: Key) -> str:
    """Returns "inf begins", "inf and nan begin" and the like."""
    kinds = _kinds_of(run, key)
    return f"{kinds} {'begin' if ' and ' in kinds else 'begins'}"


def _fine(search: Search, effect: Effect) -> NumericFinding:
    run, best = search.run, search.best
    text = f"Fine: the loss and the gradients agree with float32 ({effect})."
    if abs(run.losses[0] - run.losses[1]) > search.close * abs(run.losses[1]):
        text += " The loss is small because its terms cancel."
    if best is not None:
        text += f" The largest loss scale is {power(best.scale)}."
    swallowed = next((k for k in run.origins() if not run.range(k).is_finite), None)
    if swallowed is not None:
        place = run.operation(swallowed).place
        text += f" The {_kinds_of(run, swallowed)} at {place} changes nothing."
    return NumericFinding("fine", text)


def _wrong(search: Search, effect: Effect) -> list[NumericFinding]:
    """Says why the loss or the gradients are not those of float32."""
    run, best = search.run, search.best
    losses = run.inputs(run.program.loss)
    causes, late = run.causes(losses), run.causes(run.gradients)
    if best is None:
        causes = causes or late
    if causes:
        return _nonfinite(search, causes)
    if best is None or effect.loss > search.close:
        return [_explain(search, run, beginning_of(search, run, []))]
    found, at_best = [], search.effect(best)
    if run.scale > best.scale:
        late = late or run.origins("backward")
        found = [_too_high(run, k, best, at_best.is_fine) for k in late[:1]]
    if at_best.wrong:
        return [_conflict(search, best, at_best.wrong), *found]
    return found or _underflow(search, best, effect.wrong)


# Where no loss scale helps.


def _nonfinite_arguments(run: Run) -> list[NumericFinding]:
    """Finds inf or nan in the arguments, if a gradient is not finite either."""
    results = [*run.inputs(run.program.loss), *run.gradients]
    reached = run.ancestors(filter(run.is_bad, results), run.bad_operands)
    arguments = (k for k in run.keys if run.site(k).phase == "argument")
    bad = [k for k in arguments if k in reached and not run.range(k).is_finite]
    if not bad or not any(map(run.is_bad, run.gradients)):
        return []
    (name,) = bad[0]
    readers = (k for k in run.keys if any(bad[0] in x for x in run.site(k).inputs))
    operation = run.operation(next(readers, bad[0]))
    more = "" if len(bad) == 1 else f" (and {len(bad) - 1} more)"
    kind, fix = "argument", "Look for the bad example in the data"
    if bad[0] in run.program.parameters:
        kind, fix = "parameter", "Restore a checkpoint from before"
    message = (
        f"The {kind} {name}{more} held {_kinds_of(run, bad[0])} before anything was "
        f"computed. It is first used at {operation}. No loss scale helps. {fix}."
    )
    return [NumericFinding("nonfinite_argument", message, operation)]


def _nonfinite(search: Search, keys: list[Key]) -> list[NumericFinding]:
    """Says where inf and nan begin, at every loss scale."""
    run = search.run
    keys = [k for k in keys if run.site(k).phase == "forward"] or keys
    if not run.bad_operands(keys[0]):
        # A nan made from an inf is a consequence, not a cause.
        keys = [key for key in keys if not run.bad_operands(key)]
    keys = _distinct_lines(run, [_cause(run, key) for key in keys])
    return [_explain(search, run, key) for key in keys[:SHOWN]]


def _distinct_lines(run: Run, keys: list[Key]) -> list[Key]:
    """Returns the first site of each line."""
    found: dict[object, Key] = {}
    for key in keys:
        site = run.site(key)
        found.setdefault((site.source, site.scope, site.source.line or key), key)
    return list(found.values())


def _explain(search: Search, run: Run, key: Key) -> NumericFinding:
    """Says why an operation is wrong at every loss scale, and what to do."""
    halves = [k for k in sources_of(search, run, key) if run.limit(k)]
    if not run.limit(key) and not run.is_bad(key) and halves:
        # A line in float32 magnifies an error of half precision.
        key = max(halves, key=lambda k: run.range(k).error)
    operation = run.operation(key)
    kind, what, why, fix = trouble_of(search, run, key)
    why = f" {why}" if why else ""
    text = f"{operation}: {what}.{why} No loss scale helps: {fix}."
    bits = -headroom(run, key) if run.exceeds(key) else None
    first = _flushed_before(run, key)
    other = None if first is None else run.operation(first)
    return NumericFinding(kind, text, operation, other, bits)


def trouble_of(search: Search, run: Run, key: Key) -> tuple[str, str, str, str]:
    """Returns what is wrong with an operation at every loss scale.

    Returns:
      The kind of the finding; what happens here; why, a sentence or ""; what to do.
    """
    site, found, limits = run.site(key), run.range(key), run.limit(key)
    is_half = equations.is_half(found.dtype)
    kind = "backward" if site.phase == "backward" else "forward"
    what = f"{_begins(run, key)} here"
    noun = "gradients" if site.phase == "backward" else "results"
    fix = f"{'compute' if is_half else 'keep'} {_line_to_change(run, key)} in float32"
    if found.float32_nonfinite and site.primitive.startswith("exp"):
        why = "The result is too large for float32 as well."
        fix = "make its inputs smaller, for example by subtracting the maximum"
        return kind, what, why, fix
    if limits is not None and run.exceeds(key):
        needed, end = log2_of(run, key), math.log2(limits.overflow)
        largest = f"The largest {noun[:-1]} would be 2^{needed:.1f}"
        why = f"{largest}; {found.dtype} ends at 2^{end:.0f}."
        if not all(map(math.isfinite, site.constants)):
            why = ROUNDED
        exponents = site.constants if site.primitive in POWERS else ()
        if site.primitive in INVERSE or min(exponents, default=0) < 0:
            fix += ", or keep its inputs away from zero"
        else:
            fix += ", or make its inputs smaller"
        return kind, what, why, fix
    if run.is_bad(key):
        why = _why(run, key)
        if found.float32_nonfinite:
            what += ", in float32 too" if is_half else ""
            fix = (
                "keep its inputs in the domain of the operation and of its derivative. "
                "Add an epsilon, or guard log, sqrt, norm and division with a second "
                "jnp.where, before the operation"
            )
        return kind, what, why, _together(run, key, fix)
    if is_underflow(run, key):
        what = f"{found.flushed:.0%} of the {noun} are flushed to zero"
        is_small = limits and found.float32_largest < limits.normal
        why = f"The largest is 2^{log2_of(run, key):.1f}." if is_small else ""
        return "underflow", what, why, fix
    if run.is_decided_otherwise(key):
        share = (
            "" if not found.shape else f" for {percent(found.flushed)} of the numbers"
        )
        what = f"this is decided otherwise in float32{share}"
        return "decision", what, _why(run, key), _together(run, key, fix)
    what = f"the {noun} differ from float32 by {found.error:.2g} of the largest"
    operations = map(run.operation, sources_of(search, run, key))
    places = dict.fromkeys(x.place for x in operations if x.line)
    places.pop(run.operation(key).place, None)
    if places:
        fix += f", and the lines that feed it: {'; '.join(places)}"
    return "precision", what, _loss_of_precision(run, key), fix


def _line_to_change(run: Run, key: Key) -> str:
    """Returns "this line", or the user's line that calls an installed library."""
    source = run.site(key).source
    if source.own[:2] == (source.file, source.line):
        return "this line"
    return f"the call at {named(*source.own)}"


def _together(run: Run, key: Key, fix: str) -> str:
    """Adds to the advice the line where zeros come from, if it is another one."""
    first = _flushed_before(run, key)
    if first is None:
        return fix
    place = run.operation(first).place
    return f"compute {place}, and this line in float32, and cast nothing in between"


def _flushed_before(run: Run, key: Key) -> Key | None:
    """Returns where zeros come from that break an operation of another line."""
    is_hidden = run.exceeds(key) or run.bad_operands(key)
    if is_hidden or not (run.is_lost(key) or run.is_decided_otherwise(key)):
        return None
    first = _flushed_first(run, key)
    same = first and run.site(first).source == run.site(key).source
    return None if same else first


def _why(run: Run, key: Key) -> str:
    """Explains an operation that makes inf or nan, or decides otherwise."""
    site, inputs = run.site(key), run.operands(key)
    is_constant = not all(map(math.isfinite, site.constants))
    if is_constant or run.bad_operands(key):
        text = "An input holds inf, and inf - inf, inf / inf and 0 * inf are nan."
        return f"{text} {ROUNDED}" if is_constant else text
    first = _flushed_first(run, key)
    if first is not None:
        if 0.0 in run.site(first).constants:
            return f"An input holds zeros. {ROUNDED}"
        return (
            "Its input holds zeros that float32 would not have: they were flushed at "
            f"{run.operation(first).place}."
        )
    if any(run.range(k).zeros for k in inputs):
        return "An input holds zeros."
    if site.primitive in (*SUMS, *equations.PRODUCTS):
        return "Its terms overflow while they are added."
    if site.decides:
        return "Its operands are near each other."
    return "An input is outside of the domain of the function."


def _flushed_first(run: Run, key: Key) -> Key | None:
    """Returns where zeros that float32 would not have come from, if they go in here."""

    def flushed(k):
        operands = (x for x in run.operands(k) if not run.site(x).is_decision)
        return [x for x in operands if run.range(x).flushed]

    reached = run.ancestors(flushed(key), flushed)
    found = [k for k in run.keys if k in reached and run.operands(k)]
    rounded = [k for k in found if 0.0 in run.site(k).constants]
    return next(iter(rounded + found), None)


def _cause(run: Run, key: Key) -> Key:
    """Returns where inf begins that is swallowed before, as in log(1 / inf)."""
    found = run.beginning(key, math.inf)
    return found if run.is_lost(found) else key


def is_underflow(run: Run, key: Key) -> bool:
    """Whether results are flushed to zero here, or too small to be precise."""
    limits, found = run.limit(key), run.range(key)
    if limits is None or run.site(key).primitive in SUMS:
        return False
    return _gain(run, key) >= LOST or 0 < found.float32_largest < limits.normal


def half_of(run: Run, key: Key) -> str | None:
    """Returns the half precision of a result or of its inputs, if there is any."""
    dtypes = (run.site(k).dtype for k in [key, *run.operands(key)])
    return next(filter(equations.is_half, dtypes), None)


def _loss_of_precision(run: Run, key: Key) -> str:
    """Explains a loss of precision in a sum."""
    operands, found = run.operands(key), run.range(key)
    # Of a running sum, the result is the largest.
    largest = max((run.range(k).largest for k in (*operands, key)), default=0.0)
    half = half_of(run, key)
    if run.site(key).primitive not in SUMS or half is None or not largest:
        return ""
    exponent = math.floor(math.log2(largest))
    spacing = power(2.0 ** (exponent - jnp.finfo(half).nmant))
    text = f"{half} has a spacing of {spacing} at 2^{exponent}"
    if found.float32_largest < largest / 4:
        return f"{text}, and the inputs, which are as large as this, nearly cancel."
    return f"{text}: smaller terms of the sum are lost."


def sources_of(search: Search, run: Run, key: Key) -> list[Key]:
    """Returns the operations before whose errors are large beside a result."""
    least = search.close / 2 * run.range(key).float32_largest

    def parents(k):
        errors = ((x, run.range(x)) for x in run.operands(k))
        # In a product of matrices, the terms may be larger than the inputs.
        end = 0 if run.site(k).primitive in equations.PRODUCTS else least
        return [x for x, found in errors if found.error * found.float32_largest > end]

    found = run.ancestors([key], parents)
    return [k for k in run.keys if k in found and run.site(k).primitive]


# The backward pass, which the loss scale moves up and down.


def _too_high(run: Run, key: Key, best: Run, alone: bool) -> NumericFinding:
    operation = run.operation(key)
    would = ""
    if math.isfinite(headroom(run, key)):
        would = f" (it would be 2^{log2_of(run, key):.1f})"
    text = (
        f"{operation}: {_begins(run, key)} here{would}, at the loss scale "
        f"{power(run.scale)}. The largest scale with which nothing in the backward "
        f"pass overflows is {power(best.scale)}."
    )
    bits = math.log2(run.scale / best.scale)
    if not operation.line:
        text += " This is the gradient of the loss itself: return the loss in float32."
    elif alone and bits <= USUAL_BITS and best.scale >= 1:
        text += (
            " Nothing is wrong: this is usual after the scale has grown. A dynamic "
            "scale skips the step and lowers itself."
        )
    elif alone:
        text += " Start at a lower loss scale, or let a dynamic one come down."
    return NumericFinding("scale_too_high", text, operation, bits=bits)


def _gain(run: Run, key: Key) -> float:
    """Returns the share of the results that is flushed here, and not before."""
    shares = (run.range(k).flushed for k in run.operands(key))
    return run.range(key).flushed - max(shares, default=0.0)


def _losers(run: Run, wrong: list[int]) -> list[Key]:
    """Returns where gradients of these parameters are flushed, the most first."""
    keys = (k for i in wrong for k in run.inputs(run.program.gradients[i]))
    reached = run.ancestors(keys)
    gains = {k: _gain(run, k) for k in run.backward if k in reached and run.limit(k)}
    found = sorted(gains, key=lambda key: -gains[key])
    return _distinct_lines(run, [k for k in found if gains[k] >= LOST])


def _underflow(search: Search, best: Run, wrong: list[int]) -> list[NumericFinding]:
    """Says where the gradients of parameters are lost, with a scale that is too low."""
    run, found = search.run, []
    for key in _losers(run, wrong)[:SHOWN]:
        operation = run.operation(key)
        message = (
            f"{operation}: {run.range(key).flushed:.0%} of the gradients are flushed "
            f"to zero at the loss scale {power(run.scale)}, and "
            f"{best.range(key).flushed:.0%} at {power(best.scale)}, the largest "
            "with which nothing in the backward pass overflows. Use that: "
            f"initial_scale=2.0**{math.log2(best.scale):.0f}."
        )
        found.append(NumericFinding("underflow", message, operation))
    if not found and wrong:
        found = [_explain(search, run, beginning_of(search, run, wrong))]
    return found


def beginning_of(search: Search, run: Run, wrong: list[int]) -> Key:
    """Returns where the error of the worst gradient begins, or else of the loss."""
    worst = [k for i in wrong[:1] for k in run.program.gradients[i]]
    (*_, key) = run.inputs(worst) or run.inputs(run.program.loss)
    return run.beginning(key, search.close / 2)


def _out_of_range(run: Run, wrong: list[int]) -> dict[Key, int]:
    """Returns where gradients are flushed, and how many bits are missing."""
    losers = ((k, run.limit(k), run.range(k)) for k in _losers(run, wrong))
    return {
        k: math.ceil(math.log2(limits.normal) - log2_of(run, k))
        for k, limits, found in losers
        if limits and 0 < found.float32_largest < limits.normal
    }


def _conflict(search: Search, best: Run, wrong: list[int]) -> NumericFinding:
    """Says why gradients are wrong even at the largest scale."""
    missing = _out_of_range(best, wrong)
    if not missing or best.scale == 2.0**HIGHEST:
        return _explain(search, best, beginning_of(search, best, wrong))
    (low, bits), *_ = missing.items()
    high = min(best.backward, key=lambda k: headroom(best, k))
    first, second = best.operation(high), best.operation(low)
    message = (
        f"No loss scale fits both: above {power(best.scale)}, {first} "
        f"overflows; at that scale {best.range(low).flushed:.0%} of the results of "
        f"{second} are flushed to zero, and the largest is 2^{log2_of(best, low):.1f}. "
        f"They are {bits} bits apart. Keep one of the two lines in float32, or give "
        "the loss that feeds the second a scale of its own."
    )
    return NumericFinding("no_scale", message, first, second, float(bits))
