"""The verdict on the backward pass, which the loss scale moves up and down."""

import math

from optax_lossscale.diagnostics._trace.findings import (
    SHOWN,
    NumericFinding,
    begins,
    distinct_lines,
    log2_of,
    power,
)
from optax_lossscale.diagnostics._trace.operations import Run
from optax_lossscale.diagnostics._trace.search import headroom
from optax_lossscale.diagnostics._trace.values import Key

# A smaller share of gradients that are flushed to zero is not worth a word.
LOST = 0.01
# A scale that is at most this many bits too high comes down within a few skipped steps.
USUAL_BITS = 4


def find_backward(run: Run, best: Run | None, loss: int) -> list[NumericFinding]:
    """Says what overflows or underflows in the backward pass of a loss.

    Args:
      run: The run.
      best: The run at the largest scale with which nothing overflows, if there is one.
      loss: The index of the loss.
    """
    origins = [key for key in run.origins("backward") if key[0] == loss]
    if best is None:
        return [_at_every_scale(run, k) for k in distinct_lines(run, origins)[:SHOWN]]
    conflict = _conflict(best, loss)
    found = [_too_high(run, origins[0], best, conflict is None)] if origins else []
    return found + ([conflict] if conflict else _underflow(run, best, loss))


def _at_every_scale(run: Run, key: Key) -> NumericFinding:
    operation = run.operation(key)
    message = (
        f"{operation}: {begins(run, key)} here at every loss scale. Compute "
        "this line, or its derivative, in float32."
    )
    return NumericFinding("backward", message, operation)


def _too_high(run: Run, key: Key, best: Run, alone: bool) -> NumericFinding:
    operation = run.operation(key)
    scale, largest = run.scales[key[0]], best.scales[key[0]]
    would = ""
    if math.isfinite(headroom(run, key)):
        would = f" (it would be 2^{log2_of(run, key):.1f})"
    text = (
        f"{operation}: {begins(run, key)} here{would}, at the loss scale "
        f"{power(scale)}. The largest scale with which nothing in the backward pass "
        f"overflows is {power(largest)}."
    )
    bits = math.log2(scale / largest)
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


def _lost(run: Run, loss: int) -> float:
    """Returns the largest share of a parameter's gradient that is flushed."""
    return max((run.range(k).flushed for k in run.gradients(loss)), default=0.0)


def _losers(run: Run, loss: int) -> list[Key]:
    """Returns where results of the backward pass are flushed, the most first."""
    gains: dict[Key, float] = {}
    for key in run.keys:
        if run.site(key).phase == "backward" and key[0] == loss and run.limit(key):
            shares = (run.range(k).flushed for k in run.operands(key))
            gain = run.range(key).flushed - max(shares, default=0.0)
            gains |= {key: gain} if gain >= LOST else {}
    return distinct_lines(run, sorted(gains, key=lambda key: -gains[key]))


def _underflow(run: Run, best: Run, loss: int) -> list[NumericFinding]:
    if _lost(run, loss) < LOST:
        return []
    found = []
    for key in _losers(run, loss)[:SHOWN]:
        operation = run.operation(key)
        message = (
            f"{operation}: {run.range(key).flushed:.0%} of the results are flushed to "
            f"zero at the loss scale {power(run.scales[loss])}, and "
            f"{best.range(key).flushed:.0%} at {power(best.scales[loss])}, the largest "
            "with which nothing in the backward pass overflows."
        )
        kind = "underflow" if run.range(key).zeros else "would_underflow"
        found.append(NumericFinding(kind, message, operation))
    return found


def _conflict(best: Run, loss: int) -> NumericFinding | None:
    """Finds two operations that no loss scale fits."""
    if _lost(best, loss) < LOST:
        return None
    missing = {}
    for key in _losers(best, loss):
        limits = best.limit(key)
        if limits is not None and best.range(key).float32_largest < limits.normal:
            missing[key] = math.log2(limits.normal) - log2_of(best, key)
    if not missing:
        return None
    low = next(iter(missing))
    keys = (k for k in best.keys if best.site(k).phase == "backward" and k[0] == loss)
    high = min(keys, key=lambda k: headroom(best, k))
    bits = math.ceil(missing[low])
    first, second = best.operation(high), best.operation(low)
    message = (
        f"No loss scale fits both: above {power(best.scales[loss])}, {first} "
        f"overflows; at that scale {best.range(low).flushed:.0%} of the results of "
        f"{second} are flushed to zero, and the largest is 2^{log2_of(best, low):.1f}. "
        f"They are {bits} bits apart. Keep one of the two lines in float32, or give "
        "the loss that feeds the second a scale of its own (num_losses)."
    )
    return NumericFinding("no_scale", message, first, second, float(bits))
