"""What half precision changes in the loss and in the gradients."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from optax_lossscale.diagnostics._trace.operations import Run
from optax_lossscale.diagnostics._trace.program import Program
from optax_lossscale.diagnostics._trace.values import Key

# Results agree with float32 if they differ by less: 20 times the precision of float16.
CLOSE = 0.01
# With fewer bits of precision more is usual, but never more than this.
FARTHEST = 0.5
# The gradient of one parameter may be farther: rounding the parameters alone does that.
LEAF = 10
# An error that is a smaller share of the norm of all gradients never matters.
PART = 0.1
# Of a gradient, a smaller share that is flushed to zero is not worth a word.
LOST = 0.01
# A sum is roundoff if it is not so many times as large as that.
ROUNDOFF = 8
# Primitives through which a sum stays a sum.
LINEAR = ("add", "sub", "add_any", "reduce_sum", "mul", "div", "neg", "psum")


class Effect(NamedTuple):
    """How far the loss and the gradients are from float32.

    Attributes:
      loss: The difference of the loss, relative to float32; inf if it is not finite.
      gradients: The norm of the difference of all gradients, relative to the norm of
        all; inf if it is not finite.
      wrong: The numbers of the parameters whose gradients are wrong, the worst first.
      is_fine: Whether the loss and the gradients agree with float32.
    """

    loss: float
    gradients: float
    wrong: list[int]
    is_fine: bool

    def __str__(self):
        return f"loss {percent(self.loss)}, gradients {percent(self.gradients)}"


def percent(x: float) -> str:
    if not math.isfinite(x):
        return str(x)
    return f"{100 * x:.0f}%" if x >= 1 else f"{100 * x:.2g}%"


def closeness(dtype: str) -> float:
    """Returns how far results may be from float32 in a dtype: 0.01 in float16."""
    return min(CLOSE * 2.0 ** (10 - jnp.finfo(dtype).nmant), FARTHEST)


def noise_of(program: Program, scale: float) -> frozenset[int]:
    """Returns the parameters whose gradients are roundoff in float32, too.

    Their gradients are zero in theory, like that of a bias before a normalization. A
    scale that is no power of two rounds differently, so they change.
    """
    factor = 1.375
    (*_, first), (*_, second) = program.run(scale), program.run(scale * factor)
    with np.errstate(invalid="ignore"):
        change = np.abs(second[:, 3] / factor - first[:, 3])
        return frozenset(np.flatnonzero(change > CLOSE * first[:, 0]).tolist())


def effect_of(
    norms: Any,
    losses: Sequence[float],
    *,
    close: float,
    noise: frozenset[int],
    terms: float,
) -> Effect:
    """Compares a run with float32.

    Args:
      norms: Of each parameter's gradient: see `statistics.norms`.
      losses: The loss, and what it would be in float32.
      close: How far results may be from float32.
      noise: The parameters whose gradients do not count.
      terms: How large the loss would be if its terms did not cancel.
    """
    sizes, differences, lost, _ = norms.T
    total, difference = math.hypot(*sizes), math.hypot(*differences)
    gradients = _ratio(difference, total)
    allowed = close * np.maximum(LEAF * sizes, PART * total)
    is_wrong = ~np.isfinite(differences) | (differences > allowed)
    is_wrong |= lost > LOST * sizes
    wrong = [i for i in np.flatnonzero(is_wrong).tolist() if i not in noise]
    if gradients > close and not wrong:
        wrong = [int(np.argmax(differences))]
    wrong.sort(key=lambda i: -_ratio(differences[i], 1))
    are_fine = not wrong
    real, wide = losses
    size = max(abs(wide), terms) if are_fine else abs(wide)
    loss = _ratio(abs(real - wide), size)
    return Effect(loss, gradients, wrong, are_fine and loss <= close)


def _ratio(part: float, whole: float) -> float:
    """Returns a part of a whole; inf if that is no number, and 0 of nothing."""
    if not math.isfinite(part) or not math.isfinite(whole):
        return math.inf
    if not whole:
        return math.inf if part else 0.0
    return float(part / whole)


def terms_of(run: Run) -> float:
    """Returns how large the loss would be if its terms did not cancel.

    A loss like the mean of advantages is zero but for roundoff, and need not agree.
    """
    eps = float(jnp.finfo(run.program.dtype).eps)
    largest, ahead = 0.0, [(key, 1.0) for key in run.inputs(run.program.loss)]
    seen: set[Key] = set()
    while ahead:
        key, factor = ahead.pop()
        seen.add(key)
        site, found = run.site(key), run.range(key)
        if site.shape or not (site.primitive in LINEAR or site.moved):
            continue
        for k in set(run.operands(key)) - seen:
            size = run.range(k).float32_largest
            inner = factor
            if site.primitive in ("mul", "div"):
                inner *= found.float32_largest / size if size else 0
            else:
                terms = size * math.prod(run.site(k).shape) ** 0.5
                if found.float32_largest < ROUNDOFF * eps * terms:
                    largest = max(largest, factor * terms)
            ahead.append((k, inner))
    return largest
