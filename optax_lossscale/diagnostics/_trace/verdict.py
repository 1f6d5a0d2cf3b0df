"""The verdict: what breaks, why, and what to do, the most urgent first."""

import itertools

import numpy as np

from optax_lossscale.diagnostics._trace.backward import find_backward
from optax_lossscale.diagnostics._trace.findings import NumericFinding, power
from optax_lossscale.diagnostics._trace.forward import (
    describe,
    find_forward,
    find_nonfinite_arguments,
    is_harmless,
)
from optax_lossscale.diagnostics._trace.operations import Run

HARMLESS = " The loss and the gradients of this batch agree with float32 all the same."


def find_all(run: Run, best: list[Run | None]) -> list[NumericFinding]:
    """Returns what was found, what to fix first.

    Args:
      run: The run at the scale in question.
      best: For each loss, the run at the largest scale with which nothing in its
        backward pass overflows; None if there is no such scale.
    """
    forward, arguments = find_forward(run), find_nonfinite_arguments(run)
    starts = run.origins("forward")
    if starts and run.bad_operands(starts[0]):
        # The first nan was made from an inf: that of an argument, if there is one.
        forward = arguments or forward
    harmless = run.dtype is None and all(x is not None and is_harmless(x) for x in best)
    urgent = [] if harmless else forward or arguments
    if urgent:
        return urgent
    found = [x._replace(message=x.message + HARMLESS) for x in forward]
    for loss, other in enumerate(best):
        found = [*find_backward(run, other, loss), *found]
    if not found and (None in best or not np.isfinite(run.losses).all()):
        bad = (k for k in run.keys if run.site(k).primitive and run.is_bad(k))
        found = [describe(run, key) for key in itertools.islice(bad, 1)]
    return found or [_fine(best)]


def _fine(best: list[Run | None]) -> NumericFinding:
    largest = [run.scales[i] for i, run in enumerate(best) if run is not None]
    room = f" The largest loss scale is {power(min(largest))}." if largest else ""
    return NumericFinding(
        "fine", f"Nothing overflows, and no gradients are lost.{room}"
    )
