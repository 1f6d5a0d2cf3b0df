"""What computes in which dtype, and why. Change it here.

A float32 number of the program is in one of these states; integers have none.

- HALF: held in half precision, the result of a product.
- WIDE: float32 on purpose.
- FLEXIBLE: an argument, or what follows from arguments without products. It is float32,
  and makes float32 what it meets, as PyTorch promotes.
- LOOKED_UP, BROADCAST, BOUNDED: float32 that gives way, rounded where it meets HALF. An
  embedding, which integers look up; a bias or a gain, which is smaller than what it
  meets; the result of a bounded function, or a number that fits.
"""

import enum
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from optax_lossscale._jaxprs import parts, primitives
from optax_lossscale._jaxprs.primitives import Kind, Trait


class State(enum.IntEnum):
    """How a float32 number of the program is held. Where two meet, the larger wins.

    But where FLEXIBLE meets HALF, the result is WIDE.
    """

    BOUNDED = 0
    BROADCAST = 1
    LOOKED_UP = 2
    FLEXIBLE = 3
    HALF = 4
    WIDE = 5


# Their results are as wide as their operands.
ARITHMETIC = Kind.ARITHMETIC, Kind.OUTER
FOLLOWERS = *ARITHMETIC, Kind.MOVE, Kind.SPREAD
# Beyond such a factor the product may leave the range that its other factor is in.
LARGEST_FACTOR = 128
# Such a factor is of a moving average: of 0.99 * x, half precision loses what it adds.
NEAR_ONE = 1 / 64
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


def is_saved(primitive: Any, *types: Any, **params: Any) -> bool:
    """Whether the backward pass reads a result rather than computes it again."""
    if primitive.name == "custom_jvp_call":  # `relu`: as what it calls.
        called, _ = parts.opened(params["call_jaxpr"])
        return any(
            is_saved(x.primitive, *(y.aval for y in x.invars), **x.params)
            for x in parts.all_equations(called)
        )
    is_move = primitives.kind_of(primitive.name) == Kind.MOVE
    # What it moves in float32 may be there in half precision.
    is_wide = is_move and any(x.dtype == np.float32 for x in types)
    return not (is_wide or primitives.has(primitive.name, Trait.CHEAP))


def state_of_number(number: Any, dtype: Any) -> State:
    """Returns the state of a constant: WIDE if half precision cannot hold it."""
    info, size = jnp.finfo(dtype), abs(float(number))
    fits = float(info.tiny) <= size <= float(info.max)
    return (
        State.BOUNDED if fits or size in (0, math.inf) or size != size else State.WIDE
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


class Operand(NamedTuple):
    """A float32 operand: its state, its size, and its number if that is known."""

    state: State
    size: int
    number: Any


def met(states: Sequence[State]) -> State:
    """Returns the state of numbers that meet."""
    return State.WIDE if {State.FLEXIBLE, State.HALF} <= set(states) else max(states)


def state_of_result(
    name: str, kind: Kind, operands: Sequence[Operand], size: int
) -> State:
    """Returns the state of the results of an equation.

    Args:
      name: The name of its primitive.
      kind: Its kind.
      operands: Its float32 operands.
      size: The size of its first result.
    """
    if kind == Kind.PRODUCT:
        return State.HALF
    if kind == Kind.BOUNDED:
        return State.BOUNDED
    if kind not in FOLLOWERS or not operands:
        return State.WIDE
    broadcasts = kind == Kind.OUTER or primitives.has(name, Trait.ELEMENTWISE)
    broadcasts |= primitives.has(name, Trait.KEEPS)
    states = [
        State.BROADCAST
        if broadcasts and x.state == State.FLEXIBLE and x.size < size
        else x.state
        for x in operands
    ]
    found = met(states)
    if name == "gather" and found == State.FLEXIBLE:
        return State.LOOKED_UP
    arrays = [x for x, y in zip(states, operands, strict=True) if y.number is None]
    numbers = [x.number for x in operands if x.number is not None]
    if kind in ARITHMETIC and found in (State.BOUNDED, State.BROADCAST):
        # Each may be a bias or a gain, but both together are an array of the program:
        # times of measurements by frequencies, an offset and an oscillation.
        is_built = len(arrays) == 2 and found == State.BROADCAST
        is_scaled = arrays == [State.BOUNDED] and any(
            abs(1 / x if name == "div" else x) > 1 for x in numbers
        )
        return State.FLEXIBLE if is_built or is_scaled else found
    return found
