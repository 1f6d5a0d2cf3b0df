"""What computes in which dtype, and why. Change it here.

A float32 number of the program is in one of three states. FLEXIBLE: an argument, or
what follows from arguments without products: float32, and rounded where it meets HALF.
HALF: held in half precision. WIDE: float32 on purpose. Integers have no state.
"""

import enum
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from optax_lossscale._jaxprs import primitives
from optax_lossscale._jaxprs.primitives import Kind, Trait


class State(enum.IntEnum):
    """How a float32 number of the program is held. Where two meet, the larger wins."""

    FLEXIBLE = 0
    HALF = 1
    WIDE = 2


# Their results are as wide as their operands.
FOLLOWERS = Kind.ARITHMETIC, Kind.OUTER, Kind.MOVE, Kind.SPREAD
# Beyond such a factor the product may leave the range that its other factor is in.
LARGEST_FACTOR = 128
# Such a factor is of a moving average: of 0.99 * x, half precision loses what it adds.
NEAR_ONE = 1 / 64
# From so many iterations on, the roundings of what a loop updates add up.
LONG_LOOP = 128
# Of so many units of roundoff, a number may be one that a loop is to come down to.
TOLERANCE = 16
# They read positions, whose units half precision may not resolve.
ROUNDINGS = ("floor", "ceil", "round")
# Larger arrays are parameters rather than masks, and looking at them takes time.
LARGEST_CONSTANT = 2**20
# They mark what is certain to fit.
SMALL = ("bool", "int8", "uint8", "int4", "uint4", "int2", "uint2")


def kind_of(equation: Any, dtype: Any, known: Sequence[Any], is_square: bool) -> Kind:
    """Returns the kind of an equation.

    Args:
      equation: The equation.
      dtype: The dtype to compute in.
      known: For each operand, its number if the program knows it, else None.
      is_square: Whether it multiplies a number by itself.
    """
    name, params = equation.primitive.name, equation.params
    kind = primitives.kind_of(name)
    old: Any = equation.invars[0].aval if equation.invars else None
    if name == "convert_element_type":
        is_same = old.dtype == equation.outvars[0].aval.dtype
        # Masks and bytes fit. Other integers are counts and positions.
        is_small = old.dtype.name in SMALL
        return Kind.MOVE if is_same else Kind.BOUNDED if is_small else Kind.FLOAT32
    types = [x.aval.dtype for x in (*equation.invars, *equation.outvars)]
    floats = {x for x in types if jnp.issubdtype(x, jnp.inexact)}
    if kind == Kind.PRODUCT and types[-1] == np.float32 and len(set(types[:-1])) > 1:
        floats.discard(jnp.dtype(dtype))  # JAX promoted one operand for the other.
    if floats != {np.dtype(np.float32)}:
        return Kind.FLOAT32  # Somebody chose another dtype.
    fill = params.get("fill_value")
    if fill is not None and state_of_number(fill, dtype) == State.WIDE:
        return Kind.FLOAT32  # What x.at[i].get(fill_value=1e5) puts in.
    if kind == Kind.PRODUCT:
        if not _is_default(params.get("precision")):
            return Kind.FLOAT32  # Somebody asked for precision.
        if is_square and _is_length(equation):
            return Kind.LENGTH  # x @ x of a vector.
        # Nothing is added up: a product of each with each, of positions for example.
        return Kind.OUTER if _terms(equation) == 1 else kind
    if name == "reduce_sum" and math.prod(old.shape[x] for x in params["axes"]) == 1:
        return Kind.MOVE
    if name == "sub" and known == [None, None]:
        # A small difference of large numbers: half precision has lost its digits.
        return Kind.FLOAT32
    if name == "div" and known[1] is None:
        return Kind.FLOAT32
    factors = [x for x in (known if name in ("mul", "div") else ()) if x is not None]
    if is_square or not all(map(_is_moderate, factors)):
        return Kind.FLOAT32
    return kind


def _is_moderate(factor: Any) -> bool:
    size = abs(float(factor))
    if size in (0, 1):
        return True
    return 1 / LARGEST_FACTOR <= size <= LARGEST_FACTOR and abs(size - 1) > NEAR_ONE


def _is_default(precision: Any) -> bool:
    chosen = precision if isinstance(precision, tuple) else (precision,)
    return all(x is None or str(x) in ("DEFAULT", "Precision.DEFAULT") for x in chosen)


def _terms(equation: Any) -> int:
    """Returns how many products each number of the result adds up."""
    if equation.primitive.name != "dot_general":
        return 2
    (axes, _), _ = equation.params["dimension_numbers"]
    return math.prod(equation.invars[0].aval.shape[x] for x in axes)


def _is_length(equation: Any) -> bool:
    """Whether a product of an array with itself adds up squares alone."""
    ((x, y), (batch, other)) = equation.params["dimension_numbers"]
    shape = equation.invars[0].aval.shape
    return x == y and batch == other and len(x) + len(batch) == len(shape)


def may_add_up(equation: Any, start: Any) -> bool:
    """Whether a part of a loop's state may be a sum or a product of many numbers.

    Args:
      equation: The loop.
      start: What number that part is before the loop; None if that is not known.
    """
    return start is not None or equation.params.get("length", LONG_LOOP) >= LONG_LOOP


def has_tolerance(compared: Sequence[float], used: Sequence[float], dtype: Any) -> bool:
    """Whether a loop ends when something is as small as roundoff.

    Args:
      compared: The sizes of the numbers that it compares with.
      used: Those of all numbers that its end depends on.
      dtype: The dtype to compute in.
    """
    eps = float(jnp.finfo(dtype).eps)
    limit = TOLERANCE * eps
    largest = max((x for x in used if x < limit), default=0)
    # A solver adds an absolute and a relative tolerance: the larger one counts.
    return any(0 < x < limit for x in compared) or 0 < largest < eps


def is_saved(primitive: Any, *_: Any, **_params: Any) -> bool:
    """Whether the backward pass reads a result rather than computes it again."""
    return not primitives.has(primitive.name, Trait.CHEAP)


def state_of_number(number: Any, dtype: Any) -> State:
    """Returns the state of a constant: WIDE if half precision cannot hold it."""
    info, size = jnp.finfo(dtype), abs(float(number))
    fits = float(info.tiny) <= size <= float(info.max)
    return (
        State.FLEXIBLE if fits or size in (0, math.inf) or size != size else State.WIDE
    )


def state_of_array(array: Any, dtype: Any) -> State:
    """Returns the state of an array that the program closes over.

    WIDE if `dtype` cannot hold a number of it, or if all are too small for it.
    """
    is_array = isinstance(array, jax.Array | np.ndarray)  # A Ref is none.
    is_known = is_array and not isinstance(array, Tracer)
    is_here = is_known and getattr(array, "is_fully_addressable", True)
    if not is_here or np.size(array) > LARGEST_CONSTANT:
        return State.FLEXIBLE
    sizes = np.abs(np.asarray(array, np.float32))
    largest, info = np.max(sizes, initial=0, where=np.isfinite(sizes)), jnp.finfo(dtype)
    fits = largest == 0 or float(info.tiny) <= largest <= float(info.max)
    return State.FLEXIBLE if fits else State.WIDE


def state_of_result(kind: Kind, states: Sequence[State], is_wanted: bool) -> State:
    """Returns the state of the results of an equation.

    Args:
      kind: Its kind.
      states: The states of its operands.
      is_wanted: Whether all that read the result compute in float32.
    """
    if kind == Kind.PRODUCT:
        return State.HALF
    if kind == Kind.BOUNDED:
        return State.FLEXIBLE
    if kind not in FOLLOWERS or not states:
        return State.WIDE
    found = max(states)
    # Otherwise it, or its gradient, would be rounded before it is added up: of a cross
    # entropy the two parts of the gradient, p and -1, are nearly each other's opposite.
    return State.WIDE if is_wanted and found == State.HALF else found
