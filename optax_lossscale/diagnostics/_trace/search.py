"""The largest loss scale with which nothing in the backward pass overflows."""

import math
from collections.abc import Callable

import numpy as np

from optax_lossscale.diagnostics._trace.operations import Run

LOWEST, HIGHEST = -126, 126


def find_largest(run: Run, at: Callable[[list[float]], Run], loss: int) -> Run | None:
    """Returns the run with the largest scale of one loss, or None if there is none.

    It tries scales, so it is exact: the prediction only says where to begin. What fits
    at a scale must fit at every lower one.

    Args:
      run: A run.
      at: Runs the program with other scales.
      loss: The index of the loss.
    """
    found: dict[int, Run] = {}

    def fits(exponent: int) -> bool:
        scales = list(run.scales)
        scales[loss] = 2.0**exponent
        found[exponent] = at(scales)
        return is_sound(found[exponent], loss)

    # What fits, and what does not; both are out of range until one was tried.
    below, above = LOWEST - 1, HIGHEST + 1
    exponent = int(np.clip(_predict(run, loss), LOWEST, HIGHEST))
    step = 1
    while above - below > 1:
        if fits(exponent):
            below = exponent
        else:
            above = exponent
        if below < LOWEST:
            exponent = max(above - step, LOWEST)
        elif above > HIGHEST:
            exponent = min(below + step, HIGHEST)
        else:
            exponent = (below + above) // 2
        step *= 2
    return found.get(below)


def is_sound(run: Run, loss: int) -> bool:
    """Whether nothing in the backward pass of a loss overflows, at the run's scales."""
    if any(map(run.is_bad, run.gradients(loss))):
        return False
    return not any(key[0] == loss for key in run.origins("backward"))


def headroom(run: Run, key: tuple) -> float:
    """Returns log2 of what a result could grow by before it overflows."""
    limits, largest = run.limit(key), run.range(key).float32_largest
    if limits is None or not largest:
        return math.inf
    return math.log2(limits.overflow / largest)


def _predict(run: Run, loss: int) -> int:
    backward = (k for k in run.keys if run.site(k).phase == "backward" and k[0] == loss)
    room = min((headroom(run, key) for key in backward), default=math.inf)
    room = min(room, 2.0 * HIGHEST)
    return math.floor(math.log2(run.scales[loss]) + room - 2**-20)
