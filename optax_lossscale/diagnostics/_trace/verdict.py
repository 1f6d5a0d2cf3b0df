"""The verdict: what breaks, why, and what to do, the most urgent first.

It rests on the effect: as long as the loss and the gradients agree with float32, all is
fine. If they do not, it goes from the wrong results up to the line where that begins.
"""

import math

from optax_lossscale.diagnostics._trace.causes import (
    begins,
    flushed_before,
    gain,
    kinds_of,
    lines_to_pass,
    sources_of,
    trouble_of,
)
from optax_lossscale.diagnostics._trace.effects import LOST, Effect
from optax_lossscale.diagnostics._trace.findings import NumericFinding, log2_of, power
from optax_lossscale.diagnostics._trace.operations import Run
from optax_lossscale.diagnostics._trace.search import HIGHEST, LOWEST, Search, headroom
from optax_lossscale.diagnostics._trace.values import Key

# How many lines to name of each kind.
SHOWN = 3
# An inf that is swallowed leaves larger errors than this.
SWALLOWED = 0.5
# A scale that is at most this many bits too high comes down within a few skipped steps.
USUAL_BITS = 4


def find_all(search: Search) -> list[NumericFinding]:
    """Returns what was found, what to fix first."""
    run, best = search.run, search.best
    effect = search.effect(run)
    found = []
    if best is None or not effect.is_fine:
        found = _nonfinite_arguments(run) or _wrong(search, effect)
    return found or [_fine(search, effect)]


def _fine(search: Search, effect: Effect) -> NumericFinding:
    run, best = search.run, search.best
    text = f"Fine: the loss and the gradients agree with float32 ({effect})."
    if abs(run.losses[0] - run.losses[1]) > search.close * abs(run.losses[1]):
        text += " The loss is small because its terms cancel."
    if best is not None:
        text += f" The largest loss scale is {power(best.scale)}."
    swallowed = next(run.nonfinite_origins(), None)
    if swallowed is not None:
        place = run.operation(swallowed).place
        text += f" The {kinds_of(run, swallowed)} at {place} changes nothing."
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
    operations = (k for k in run.keys if run.site(k).primitive)
    readers = (k for k in operations if bad[0] in run.ancestors([k]))
    operation = run.operation(next(readers, bad[0]))
    more = "" if len(bad) == 1 else f" (and {len(bad) - 1} more)"
    kind, fix = "argument", "Look for the bad example in the data"
    if bad[0] in run.program.parameters:
        kind, fix = "parameter", "Restore a checkpoint from before"
    message = (
        f"The {kind} {name}{more} held {kinds_of(run, bad[0])} before anything was "
        f"computed. It is first used at {operation}. No loss scale helps. {fix}."
    )
    return [NumericFinding("nonfinite_argument", message, operation)]


def _nonfinite(search: Search, keys: list[Key]) -> list[NumericFinding]:
    """Says where inf and nan begin, at every loss scale."""
    run = search.run
    keys = [k for k in keys if run.site(k).phase == "forward"] or keys
    # A nan made from an inf is a consequence, also of an inf that a loop made before.
    first = {k for k in keys if not run.bad_operands(k)}
    later = (run.ancestors([k], run.bad_operands) - {k} for k in keys)
    keys = [k for k, x in zip(keys, later, strict=True) if first.isdisjoint(x)]
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
    if not run.limit(key) and not _has_cause(run, key):
        # A line in float32 magnifies an error of half precision.
        halves = [k for k in sources_of(search, run, key) if run.limit(k)]
        key = halves[-1] if halves else key
    operation = run.operation(key)
    kind, what, why, fix = trouble_of(search, run, key)
    why = f" {why}" if why else ""
    text = f"{operation}: {what}.{why} No loss scale helps: {fix}."
    first = flushed_before(run, key)
    other = None if first is None else run.operation(first)
    return NumericFinding(kind, text, operation, other)


def _has_cause(run: Run, key: Key) -> bool:
    """Whether there is inf or nan for which no error of half precision is needed."""
    if not run.is_bad(key):
        return False
    is_known = run.range(key).float32_nonfinite or run.bad_operands(key)
    return bool(is_known) or flushed_before(run, key) is not None


def _cause(run: Run, key: Key) -> Key:
    """Returns where inf begins that is swallowed, as in log(1 / inf) and nan_to_num."""
    found = run.beginning(key, SWALLOWED)
    return found if run.is_lost(found) else key


# The backward pass, which the loss scale moves up and down.


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
        text += " This is the gradient of the loss itself: return the loss in float32."
    elif alone and bits <= USUAL_BITS and best.scale >= 1:
        text += (
            " Nothing is wrong: this is usual after the scale has grown. A dynamic "
            "scale skips the step and lowers itself."
        )
    elif alone and best.scale < 1:
        scale = math.log2(best.scale)
        lowest = f"min_scale=2.0**{max(scale - 4, LOWEST):.0f}"
        text += f" Start below 1: DynamicLossScale(2.0**{scale:.0f}, {lowest})."
    elif alone:
        text += " Start at a lower loss scale, or let a dynamic one come down."
    return NumericFinding("scale_too_high", text, operation)


def _losers(run: Run, wrong: list[int]) -> list[Key]:
    """Returns where gradients of these parameters are flushed, the most first."""
    keys = (k for i in wrong for k in run.inputs(run.program.gradients[i]))
    reached = run.ancestors(keys)
    gains = {k: gain(run, k) for k in run.backward if k in reached and run.limit(k)}
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
    passed = lines_to_pass(best, [high])
    lines = f"the first ({passed})" if passed else "one of the two lines"
    message = (
        f"No loss scale fits both: above {power(best.scale)}, {first} "
        f"overflows; at that scale {best.range(low).flushed:.0%} of the results of "
        f"{second} are flushed to zero, and the largest is 2^{log2_of(best, low):.1f}. "
        f"They are {bits} bits apart. Keep {lines} in float32, with those that feed it "
        "(diagnostics.float32_lines finds them), or give the loss that feeds the "
        "second a scale of its own."
    )
    return NumericFinding("no_scale", message, first, second)
