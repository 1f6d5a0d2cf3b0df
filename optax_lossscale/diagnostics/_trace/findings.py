"""What was found, and the words for it."""

import math
from typing import NamedTuple

from optax_lossscale.diagnostics import _common
from optax_lossscale.diagnostics._trace.operations import NumericOperation, Run
from optax_lossscale.diagnostics._trace.values import Key


class NumericFinding(NamedTuple):
    """Something that `trace_numerics` found.

    Attributes:
      kind: "nonfinite_argument": a parameter or the data held inf or nan.
        "forward": inf or nan begins in the forward pass, so no loss scale helps.
        "backward": inf or nan begins in the backward pass at every loss scale.
        "scale_too_high": the backward pass overflows at this loss scale.
        "underflow": results are flushed to zero.
        "precision": finite results differ too much from float32.
        "no_scale": no loss scale fits two operations.
        "decision": float32 decides otherwise.
        "fine": the loss and the gradients agree with float32.
      message: What happens and what to do, in plain words.
      operation: The operation, or None.
      other: A second operation that matters, or None.

    Examples:
      >>> import jax.numpy as jnp
      >>> from optax_lossscale import diagnostics
      >>> def loss_fn(w):
      ...     return jnp.sum(jnp.exp(w.astype(jnp.float16))).astype(jnp.float32)
      >>> trace = diagnostics.trace_numerics(loss_fn, jnp.array([1.0, 12.0]))
      >>> trace.findings[0].kind
      'forward'
    """

    kind: str
    message: str
    operation: NumericOperation | None = None
    other: NumericOperation | None = None


def log2_of(run: Run, key: Key) -> float:
    """Returns log2 of the largest magnitude in float32."""
    return math.log2(run.range(key).float32_largest)


def power(scale: float) -> str:
    """Writes a number as a power of two, but for 1."""
    return "1" if scale == 1 else _common.power(scale)
