"""The largest loss scale with which nothing in the backward pass overflows."""

import functools
import math

import numpy as np

from optax_lossscale.diagnostics._trace import effects
from optax_lossscale.diagnostics._trace.operations import Run
from optax_lossscale.diagnostics._trace.program import Program
from optax_lossscale.diagnostics._trace.values import Key

LOWEST, HIGHEST = -126, 126


class Search:
    """Runs a program at several scales.

    Attributes:
      close: How far results may be from float32.
      judge: Compares norms and losses of any run with float32: see
        `effects.effect_of`.
      effect: Compares one of these runs with float32.
      predicted: The scale at which the largest number of the backward pass in float32
        is in range.
      run: The run at the scale in question.
      best: The run at the largest scale with which the gradients are finite, and no
        overflow in the backward pass changes them; None if there is none.
    """

    def __init__(self, program: Program, close: float, scale: float):
        """Runs the program until the largest scale is found."""
        self.close = close
        self.at = functools.cache(functools.partial(Run, program))
        self.run = self.at(scale)
        self.judge = functools.partial(
            effects.effect_of,
            close=close,
            noise=effects.noise_of(program, scale),
            terms=effects.terms_of(self.run),
        )
        self.effect = functools.cache(lambda run: self.judge(run.norms, run.losses))
        rooms = [headroom(self.run, key) for key in self.run.backward]
        predicted = math.log2(scale) + min([2.0 * HIGHEST, *rooms]) - 2**-20
        self.predicted = 2.0 ** float(np.clip(math.floor(predicted), LOWEST, HIGHEST))
        self.best = self._find_largest()

    def _find_largest(self) -> Run | None:
        """Returns the run with the largest scale, or None if there is none.

        It tries scales, so it is exact: the prediction only says where to begin. What
        fits at a scale must fit at every lower one.
        """
        # What fits, and what does not; both are out of range until one was tried.
        below, above = LOWEST - 1, HIGHEST + 1
        exponent = int(math.log2(self.predicted))
        step = 1
        while above - below > 1:
            if self.is_sound(self.at(2.0**exponent)):
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
        return self.at(2.0**below) if below >= LOWEST else None

    def is_sound(self, run: Run) -> bool:
        """Whether no overflow in the backward pass matters, at the scale of the run."""
        if any(map(run.is_bad, run.gradients)):
            return False
        origins = run.origins("backward")
        return not any(map(run.exceeds, origins)) or not self.effect(run).wrong


def headroom(run: Run, key: Key) -> float:
    """Returns log2 of what a result could grow by before it overflows."""
    limits, largest = run.limit(key), run.range(key).float32_largest
    if limits is None or not largest:
        return math.inf
    return math.log2(limits.overflow / largest)
