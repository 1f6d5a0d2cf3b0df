"""The policy: which operations compute in which dtype, and why. Change it here.

Each float32 value has one of three states. Integers have none.

- SOFT: float32 that gives way: it is rounded where it is combined with HALF. Constants
  that fit, bounded functions of HALF, and HALF results that only float32 reads.
- HALF: held in half precision, as the result of a product.
- WIDE: float32 that wins: the result is float32, as PyTorch promotes. Arrays of the
  program, and float32 on purpose.
"""

import enum
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from optax_lossscale._jaxprs import parts, primitives
from optax_lossscale._jaxprs.primitives import Kind, Trait


class State(enum.IntEnum):
    """How a float32 value is held. Where two are combined, the larger wins."""

    SOFT = 0
    HALF = 1
    WIDE = 2


# Their results are as wide as their operands.
FOLLOWERS = Kind.ARITHMETIC, Kind.MOVE, Kind.SPREAD
# Beyond such a factor the product may leave the range that its other factor is in.
LARGEST_FACTOR = 128
# Such a factor is of a moving average: of 0.99 * x, half precision loses what it adds.
NEAR_ONE = 1 / 64


def kind_of(equation: Any, dtype: Any, known: Sequence[Any]) -> Kind:
    """Returns the kind of an equation.

    Args:
      equation: The equation.
      dtype: The dtype to compute in.
      known: For each operand, its value if the program knows it, else None.
    """
    name, params = operation_of(equation), equation.params
    kind = primitives.kind_of(name)
    old: Any = equation.invars[0].aval if equation.invars else None
    if name == "convert_element_type" and old.dtype == equation.outvars[0].aval.dtype:
        return Kind.MOVE
    types = [x.aval.dtype for x in (*equation.invars, *equation.outvars)]
    floats = {x for x in types if jnp.issubdtype(x, jnp.inexact)}
    if kind == Kind.PRODUCT and types[-1] == np.float32 and len(set(types[:-1])) > 1:
        floats.discard(jnp.dtype(dtype))  # JAX promoted one operand for the other.
    if floats != {np.dtype(np.float32)}:
        return Kind.FLOAT32  # Somebody chose another dtype.
    fill = params.get("fill_value")
    if fill is not None and state_of_constant(fill, dtype) == State.WIDE:
        return Kind.FLOAT32  # As of x.at[i].get(fill_value=1e5).
    if not _is_default(params.get("precision")):
        return Kind.FLOAT32  # Somebody asked for precision.
    if kind == Kind.PRODUCT:
        return Kind.FLOAT32 if is_sum(equation) else kind
    if name == "reduce_sum" and math.prod(old.shape[x] for x in params["axes"]) == 1:
        return Kind.MOVE
    if primitives.has(name, Trait.MINUS) and known == [None, None]:
        # A small difference of large numbers: half precision has lost its digits.
        return Kind.FLOAT32
    if primitives.has(name, Trait.OVER) and known[1] is None:
        return Kind.FLOAT32
    if primitives.has(name, Trait.TIMES) and _is_square(equation):
        return Kind.FLOAT32
    has_factors = primitives.has(name, Trait.TIMES | Trait.OVER)
    factors = [x for x in known if x is not None]
    is_far = has_factors and not all(map(is_moderate, factors))
    return Kind.FLOAT32 if is_far else kind


def is_moderate(factor: Any) -> bool:
    """Whether an array in half precision, times this constant, can stay there."""
    size = abs(float(factor))
    if size in (0, 1):
        return True
    return 1 / LARGEST_FACTOR <= size <= LARGEST_FACTOR and abs(size - 1) > NEAR_ONE


def is_float32(x: Any) -> bool:
    """Whether an array, or its type, is float32."""
    return getattr(x, "dtype", None) == np.float32


def _is_default(precision: Any) -> bool:
    chosen = precision if isinstance(precision, tuple) else (precision,)
    return all(x is None or str(x) in ("DEFAULT", "Precision.DEFAULT") for x in chosen)


def operation_of(equation: Any) -> str:
    """Returns the operation of an equation: its name in the table of primitives."""
    types = [x.aval for x in equation.invars]
    return primitives.table_name(equation.primitive, types, equation.params)


def _is_square(equation: Any) -> bool:
    """Whether it multiplies an array by itself."""
    first, second = map(parts.variable_of, equation.invars)
    return first is not None and first is second


def is_sum(equation: Any) -> bool:
    """Whether the result of a product has batch dimensions alone, as of two vectors.

    It reads each value once, so that half precision computes nothing faster.
    """
    if equation.primitive.name != "dot_general":
        return False
    _, (batch, _) = equation.params["dimension_numbers"]
    return len(batch) == len(equation.outvars[0].aval.shape)


def is_saved(primitive: Any, *types: Any, **params: Any) -> bool:
    """Whether the backward pass reads a result rather than computes it again."""
    if primitive.name == "custom_jvp_call":  # `relu`: as its operations.
        called, _ = parts.opened(params["call_jaxpr"])
        return any(
            is_saved(x.primitive, *(y.aval for y in x.invars), **x.params)
            for x in parts.all_equations(called)
        )
    name = primitives.table_name(primitive, types, params)
    is_move = primitives.kind_of(name) == Kind.MOVE
    # The operand of a float32 move is saved already, or can be, in fewer bytes.
    is_wide = is_move and any(x.dtype == np.float32 for x in types)
    return not (is_wide or primitives.has(name, Trait.CHEAP))


def state_of_constant(value: Any, dtype: Any) -> State:
    """Returns the state of a constant: WIDE if half precision cannot hold it."""
    info, size = jnp.finfo(dtype), abs(float(value))
    fits = float(info.tiny) <= size <= float(info.max)
    is_exact = size in (0, math.inf) or size != size
    return State.SOFT if fits or is_exact else State.WIDE


def state_of_result(kind: Kind, states: Sequence[State]) -> State:
    """Returns the state of the results of an equation.

    Args:
      kind: Its kind.
      states: The states of its float32 operands, but for those that give way.
    """
    if kind == Kind.PRODUCT:
        return State.HALF
    if kind not in (*FOLLOWERS, Kind.BOUNDED) or not states:
        return State.WIDE
    state = max(states)
    return State.SOFT if kind == Kind.BOUNDED and state == State.HALF else state
