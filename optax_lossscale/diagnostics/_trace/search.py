"""The largest loss scale with which nothing in the backward pass overflows."""

import math
from collections.abc import Callable

import numpy as np

from optax_lossscale.diagnostics._trace.operations import Run
from optax_lossscale.diagnostics._trace.values import Key

LOWEST, HIGHEST = -126, 126


def find_largest(run: Run, at: Callable[[float], Run]) -> Run | None:
    """Returns the run with the largest scale, or None if there is none.

    It tries scales, so it is exact: the prediction only says where to begin. What fits
    at a scale must fit at every lower one.

    Args:
      run: A run.
      at: Runs the program with another scale.
    """
    best = None
    # What fits, and what does not; both are out of range until one was tried.
    below, above = LOWEST - 1, HIGHEST + 1
    exponent = int(np.clip(_predict(run), LOWEST, HIGHEST))
    step = 1
    while above - below > 1:
        tried = at(2.0**exponent)
        if is_sound(tried):
            below, best = exponent, tried
        else:
            above = exponent
        if below < LOWEST:
            exponent = max(above - step, LOWEST)
        elif above > HIGHEST:
            exponent = min(below + step, HIGHEST)
        else:
            exponent = (below + above) // 2
        step *= 2
    return best


def is_sound(run: Run) -> bool:
    """Whether nothing in the backward pass overflows, at the scale of the run."""
    return not any(map(run.is_bad, run.gradients)) and not run.origins("backward")


def headroom(run: Run, key: Key) -> float:
    """Returns log2 of what a result could grow by before it overflows."""
    limits, largest = run.limit(key), run.range(key).float32_largest
    if limits is None or not largest:
        return math.inf
    return math.log2(limits.overflow / largest)


def _predict(run: Run) -> int:
    room = min((headroom(run, key) for key in run.backward), default=math.inf)
    room = min(room, 2.0 * HIGHEST)
    return math.floor(math.log2(run.scale) + room - 2**-20)
