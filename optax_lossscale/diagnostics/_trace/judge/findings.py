"""The kinds of findings and the causes of faults, each with its words."""

import dataclasses
import enum
from typing import NamedTuple

from optax_lossscale.diagnostics._trace.run import NumericOperation


class FindingKind(enum.StrEnum):
    """The kinds of findings, which `NumericFinding` documents.

    Attributes:
      event: The event at an operation, as a template that `words.event_of` fills in;
        "" for kinds that have a function of their own in `words`.
    """

    NONFINITE_ARGUMENT = "nonfinite_argument"
    FORWARD = "forward", "{begins} here{too}"
    BACKWARD = "backward", "{begins} here{too}"
    SCALE_TOO_HIGH = "scale_too_high"
    NO_SCALE = "no_scale"
    UNDERFLOW = "underflow", "{flushed:.0%} of the {noun} are flushed to zero"
    PRECISION = (
        "precision",
        "the {noun} differ from float32 by {error:.2g} of the largest{magnified}",
    )
    DECISION = "decision", "float32 decides otherwise here{share}"
    FINE = "fine"

    event: str

    def __new__(cls, kind: str, event: str = ""):
        """Makes a string of the kind alone."""
        self = str.__new__(cls, kind)
        self._value_, self.event = kind, event
        return self

    __repr__ = str.__repr__  # A finding prints its kind as a string.

    @classmethod
    def of_nonfinite(cls, phase: str) -> "FindingKind":
        """Returns the kind of inf and nan that begin in a pass."""
        return cls.BACKWARD if phase == "backward" else cls.FORWARD


class NumericFinding(NamedTuple):
    """A fault of a step, and its remedy; or that all is fine.

    Attributes:
      kind: "nonfinite_argument": a parameter or the data held inf or nan.
        "forward": inf or nan begins in the forward pass, so no loss scale helps; also
        in float32, if the message says so.
        "backward": inf or nan begins in the backward pass at every loss scale.
        "scale_too_high": the backward pass overflows at this loss scale.
        "no_scale": no loss scale fits two operations.
        "underflow": results are flushed to zero, or too small to be precise.
        "precision": finite results differ too much from float32.
        "decision": float32 chooses otherwise, among numbers that half precision cannot
        tell apart, or it ends a loop sooner. Alone it is no fault.
        "fine": the gradients agree with float32.
      message: The fault, its cause and its remedy, in plain words.
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


@dataclasses.dataclass(frozen=True, eq=False)
class Words:
    """The words of a cause.

    Attributes:
      why: The reason, as a template that `words.why_of` fills in.
      by_hand: More about it for casts by hand, where the twin has rounded constants.
      guard: The advice in place of float32. Without it the advice is float32, which the
        twin shows to be right.
      instead: The advice beside float32, if there is any.
      is_before: Whether lines before made it, which are named first.
    """

    why: str = ""
    by_hand: str = ""
    guard: str = ""
    instead: str = ""
    is_before: bool = False


OVERFLOW = "The largest {noun} would be 2^{size:.1f}; {dtype} ends at 2^{end:.3g}."
TOO_LARGE = "The result is too large for float32 as well."
CONSTANTS = "A constant like 1e-8 is 0 in float16, and one like -1e9 is -inf."
HOLDS_INF = "An input holds inf, and inf - inf, inf / inf and 0 * inf are nan."
HOLDS_ZEROS = "Its input holds zeros that float32 would not have: "
SPACING = "{half} has a spacing of {step} at 2^{top}"
GUARD = (
    "keep its inputs in the domain of the operation and of its derivative: guard log, "
    "sqrt, norm and division with a second jnp.where, as in jnp.log(jnp.where(x > 0, "
    "x, 1)), or add an epsilon"
)


SMALLER = (
    "make its inputs smaller: look for outliers in the data, in constants and in the "
    "parameters"
)
DIVERGES = (
    "If the loss grew from step to step, the run diverges: lower the learning rate, "
    "and restore an earlier checkpoint"
)


class Cause(enum.Enum):
    """The cause of a fault; the value has its words."""

    UNKNOWN = Words()
    # Of inf and nan that float32 does not have.
    RANGE = Words(OVERFLOW, instead="make its inputs smaller")
    POLE = Words(OVERFLOW, instead="keep its inputs away from zero")
    CONSTANT = Words(CONSTANTS)
    INF = Words(HOLDS_INF)
    FLUSHED = Words(HOLDS_ZEROS + "they were flushed at {at}.", is_before=True)
    ROUNDED = Words(
        HOLDS_ZEROS + "the numbers that cancel are rounded at {at}.", is_before=True
    )
    TERMS = Words("Its terms overflow while they are added.")
    CAST = Words("Its input is beyond the range of {dtype}.")
    # Of inf and nan that float32 has as well.
    FLOAT32_RANGE = Words(
        TOO_LARGE,
        guard="make its inputs smaller, for example by subtracting the maximum",
    )
    FLOAT32_GROWS = Words(
        TOO_LARGE,
        guard=f"{SMALLER}. {DIVERGES}",
    )
    FLOAT32_ONLY = Words(guard=f"{SMALLER}, or {GUARD}. {DIVERGES}")
    FLOAT32_INF = Words(
        HOLDS_INF,
        by_hand=CONSTANTS,
        guard="keep inf out of its inputs. For a mask, take jnp.where, or the least "
        "finite number, jnp.finfo(x.dtype).min",
    )
    ZEROS = Words("An input holds zeros.", by_hand=CONSTANTS, guard=GUARD)
    DOMAIN = Words("An input is outside of the domain of the function.", guard=GUARD)
    NAN = Words("A constant is nan.", guard="use another number there")
    # Of finite results.
    SMALL = Words("The largest is 2^{size:.1f}.")
    TERMS_LOST = Words(SPACING + ": smaller terms of the sum are lost.")
    CANCEL = Words(
        SPACING + ", and the inputs, which are as large as this, nearly cancel."
    )
    DECIDED = Words(is_before=True)
