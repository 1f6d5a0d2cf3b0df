"""The verdict: what breaks, why, and what to do, the most urgent first."""

from optax_lossscale.diagnostics._trace.backward import find_backward
from optax_lossscale.diagnostics._trace.findings import NumericFinding, power
from optax_lossscale.diagnostics._trace.forward import (
    find_forward,
    find_nonfinite_arguments,
    is_harmless,
)
from optax_lossscale.diagnostics._trace.operations import Run

HARMLESS = " The loss and the gradients of this batch agree with float32 all the same."


def find_all(run: Run, best: list[Run | None], dtype: str) -> list[NumericFinding]:
    """Returns what was found, what to fix first.

    Args:
      run: The run at the scale in question.
      best: For each loss, the run at the largest scale with which nothing in its
        backward pass overflows; None if there is no such scale.
      dtype: The dtype in question.
    """
    forward = find_forward(run, dtype)
    harmless = [
        x._replace(message=x.message + HARMLESS)
        for x in forward
        if all(other is not None and is_harmless(other) for other in best)
    ]
    urgent = [] if harmless else forward or find_nonfinite_arguments(run)
    if urgent:
        return urgent
    found = harmless
    for loss, other in enumerate(best):
        found = [*find_backward(run, other, loss), *found]
    return found or [_fine(best)]


def _fine(best: list[Run | None]) -> NumericFinding:
    largest = [run.scales[i] for i, run in enumerate(best) if run is not None]
    room = f" The largest loss scale is {power(min(largest))}." if largest else ""
    return NumericFinding(
        "fine", f"Nothing overflows, and no gradients are lost.{room}"
    )
