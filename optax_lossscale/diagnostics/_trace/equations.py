"""What the trace knows about primitives, and the same equation in float32."""

import math
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale._jaxprs.lines import AUTOCAST
from optax_lossscale._jaxprs.parts import bind, is_jaxpr, opened
from optax_lossscale._jaxprs.primitives import Kind, names_of

# They return the magnitudes that they get, perhaps in another order.
MOVES = (
    "reshape", "transpose", "broadcast_in_dim", "squeeze", "rev", "neg", "abs", "copy",
    "stop_gradient", "optimization_barrier", "pvary", "sharding_constraint",
    "reshard",
)  # fmt: skip
PRODUCTS = names_of(Kind.PRODUCT)
# Compilers rewrite these together with the next operation, which rounds differently:
# x * y + z, x / y / z, 1 / sqrt(x), exp(x) * exp(y) and the like.
REWRITTEN = (
    "mul", "square", "integer_pow", "div", "sqrt", "rsqrt", "exp", "exp2", "pow", "log",
)  # fmt: skip
# They work number by number, so new inf and nan can be counted.
ELEMENTWISE = (
    "add", "sub", "mul", "div", "add_any", "square", "integer_pow", "pow", "exp",
    "exp2", "expm1", "convert_element_type", "log", "log1p", "sqrt", "rsqrt", "sinh",
    "cosh", "tan", "reduce_precision",
)  # fmt: skip
# They cannot run in float32, or have side effects that must not run twice.
OPAQUE = (
    "pallas_call", "tpu_custom_call", "triton_kernel_call", "ffi_call", "pure_callback",
    "io_callback", "debug_callback", "custom_partitioning",
)  # fmt: skip
# They have poles and domains.
POLES = (
    "div", "sqrt", "rsqrt", "log", "log1p", "pow", "integer_pow", "acos", "asin",
    "atanh", "acosh", "erf_inv", "rem",
)  # fmt: skip
# The operand that has a pole at zero.
POLE_AT_ZERO = {"div": 1, "log": 0, "rsqrt": 0, "integer_pow": 0}
TINY = 2.0**-27
# A product may name the dtype of its operands.
ALGORITHMS = jax.lax.DotAlgorithm, jax.lax.DotAlgorithmPreset
BITS = ("bitcast_convert_type", "rng_uniform", "nextafter")
HALF = [x for x in dir(jnp) if re.fullmatch(r"b?float16|float[48]_\w+", x)]


def is_half(dtype: Any) -> bool:
    """Whether a dtype, or its name, is a floating-point one of at most 16 bits."""
    return str(dtype) in HALF


def in_half(x: Any) -> bool:
    """Whether an array, or its type, is in half precision."""
    return is_half(getattr(x, "dtype", None))


def is_inexact(x: Any) -> bool:
    """Whether an array, or its type, is floating-point or complex."""
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.inexact)


def is_autocast(equation: Any) -> bool:
    """Whether `autocast` made an equation."""
    traceback = equation.source_info.traceback
    frames = traceback.frames if traceback is not None else ()
    return any(x.file_name.startswith(AUTOCAST) for x in frames)


def has_algorithm(equation: Any) -> bool:
    """Whether a product names the dtypes that it computes in."""
    return isinstance(equation.params.get("precision"), ALGORITHMS)


def is_exact_cast(equation: Any) -> bool:
    """Whether it converts numbers to a dtype that has all of them."""
    types = [x.aval for x in (*equation.invars, *equation.outvars)]
    is_cast = equation.primitive.name == "convert_element_type"
    if not is_cast or not all(map(is_inexact, types)):
        return False
    old, new = (jnp.finfo(x.dtype) for x in types)
    has_range = old.minexp >= new.minexp and old.maxexp <= new.maxexp
    return has_range and old.nmant <= new.nmant


# The same equation in float32.


def wide_dtype(dtype: Any) -> Any:
    """Returns float32 for half precision, other dtypes as they are."""
    return jnp.dtype(jnp.float32) if is_half(dtype) else dtype


def widen(x: Any) -> Any:
    """Converts half precision to float32."""
    return jnp.asarray(x, jnp.float32) if in_half(x) else x


def as_written(x: Any, equation: Any) -> Any:
    """Returns what stands for a constant in float32.

    JAX rounds constants when it traces a program. So 1e-8 is 0 in float16, and -1e9 is
    -inf. Any tiny and any huge number does what the user meant.
    """
    if not in_half(x) or np.size(x) != 1:
        return x
    name, number = equation.primitive.name, float(x)
    if math.isinf(number) and name in ("mul", "add", "sub"):
        return np.float32(math.copysign(2.0**100, number))
    return np.float32(TINY) if number == 0 and name == "add" else x


def floored(jaxpr: Any) -> set[int]:
    """Returns the identities of equations with a pole at zero that nobody reaches.

    Nobody divides by `max(x, 0)`, or takes its logarithm: a tiny constant was there.
    """
    made = {x: equation for equation in jaxpr.eqns for x in equation.outvars}

    def is_floor(x):
        equation = made.get(x) if not hasattr(x, "val") else None
        if equation is None:
            return False
        name, operands = equation.primitive.name, equation.invars
        if name in (*MOVES, "convert_element_type"):
            return is_floor(operands[0])
        is_floor_of = {name, equation.params.get("name")} & {"max", "clamp", "clip"}
        known = [v.val for v in operands if hasattr(v, "val") and in_half(v.aval)]
        return bool(is_floor_of) and any(np.size(v) == 1 and v == 0 for v in known)

    poles = ((x, POLE_AT_ZERO.get(x.primitive.name)) for x in jaxpr.eqns)
    return {id(x) for x, i in poles if i is not None and is_floor(x.invars[i])}


def above_zero(equation: Any, args: Sequence[Any]) -> list[Any]:
    """Returns the operands of such an equation, of which one is not zero."""
    args, i = list(args), POLE_AT_ZERO[equation.primitive.name]
    args[i] = jnp.maximum(args[i], jnp.asarray(TINY, args[i].dtype))
    return args


def narrow(x: Any, aval: Any) -> Any:
    """Rounds a number in float32 to the half precision that the program has."""
    is_narrower = in_half(aval) and x.dtype != aval.dtype
    return jnp.asarray(x).astype(aval.dtype) if is_narrower else x


def bind_wide(equation: Any, args: Sequence[Any]) -> list[Any] | None:
    """Runs an equation in float32 where it is in half precision; None if it cannot."""
    # It runs more than once. Collectives have an effect, but no side effect.
    is_pure = all(type(x).__name__ == "NamedAxisEffect" for x in equation.effects)
    if not is_pure or equation.primitive.name in (*OPAQUE, *BITS):
        return None
    if equation.primitive.name == "reduce_precision" and in_half(
        equation.outvars[0].aval
    ):
        return [widen(args[0])]  # `jax.checkpoint` rounds so what it saves.
    try:
        params = {name: _widen_parameter(x) for name, x in equation.params.items()}
        if has_algorithm(equation):
            params["precision"] = (jax.lax.Precision.HIGHEST,) * 2
        found = bind(equation, list(map(widen, args)), params)
        types = list(map(_wide_type, equation.outvars))
        return found if [(x.shape, x.dtype) for x in found] == types else None
    except Exception:  # Whatever a primitive does not support.
        return None


def _wide_type(variable: Any) -> tuple[Any, Any]:
    """Returns the shape and the dtype of a variable in float32."""
    return variable.aval.shape, wide_dtype(variable.aval.dtype)


def _widen_parameter(x: Any) -> Any:
    if is_jaxpr(x):
        widened = _widen_jaxpr(*opened(x))
        return widened if hasattr(x, "jaxpr") else widened.jaxpr
    if isinstance(x, tuple):
        parts = map(_widen_parameter, x)
        return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)
    is_dtype = isinstance(x, jnp.dtype) or (isinstance(x, type) and hasattr(x, "dtype"))
    return wide_dtype(jnp.dtype(x)) if is_dtype else x


def _widen_jaxpr(jaxpr: Any, consts: Sequence[Any]) -> Any:
    def run(*args):
        values = dict(zip(jaxpr.constvars, map(widen, consts), strict=True))
        values |= zip(jaxpr.invars, args, strict=True)

        def read(x):
            return widen(x.val) if hasattr(x, "val") else values[x]

        for equation in jaxpr.eqns:
            found = bind_wide(equation, list(map(read, equation.invars)))
            if found is None:
                raise TypeError(f"{equation.primitive} cannot run in float32.")
            values.update(zip(equation.outvars, found, strict=True))
        return list(map(read, jaxpr.outvars))

    types = (jax.ShapeDtypeStruct(*_wide_type(x)) for x in jaxpr.invars)
    return jax.make_jaxpr(run)(*types)
