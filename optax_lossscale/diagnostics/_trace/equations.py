"""What an equation of a jaxpr says: its line, its scope, its parts.

What this folder knows about JAX's primitives and its internals is here, but for loops
and branches: see `control_flow`.
"""

import dataclasses
import functools
import itertools
import linecache
import math
import os
import re
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep
CUSTOM_VJP = jax.custom_vjp.__call__.__qualname__
# A line in these packages is not the user's: the line that called them is, where the
# dtype of a layer is chosen. In other libraries, both lines are named.
FRAMEWORKS = (
    "jax", "jaxlib", "flax", "haiku", "equinox", "keras", "optax", "chex", "jmp",
    "einops", "optree",
)  # fmt: skip
# Who calls a function that older versions of JAX keep the jaxpr of. Newer ones keep no
# frames outside of it.
BORDERS = ("trace_to_jaxpr", "trace_to_jaxpr_dynamic")
# What consoles call their input. Other names in angle brackets are of generated code.
CONSOLES = re.compile(
    r"<([a-z]+-input|input|stdin|console|command|doctest|string|exec)\b"
)
NUMBER = re.compile(r"(?<![\w.])\d*\.?\d+(?:e-?\d+)?", re.IGNORECASE)
# A file, a line, and the qualified name of the function with that line.
Line = tuple[str, int, str]
# Primitives that call one jaxpr, and the parameters that hold it.
CALLS = (
    "jit", "closed_call", "eval_jaxpr", "remat2", "custom_jvp_call", "custom_vjp_call",
)  # fmt: skip
CALLED = ("jaxpr", "call_jaxpr")
# They return the magnitudes that they get, perhaps in another order.
MOVES = (
    "reshape", "transpose", "broadcast_in_dim", "squeeze", "rev", "neg", "abs", "copy",
    "stop_gradient", "optimization_barrier", "pvary", "sharding_constraint",
    "mesh_cast", "reshard",
)  # fmt: skip
# Compilers rewrite these together with the next operation, which rounds differently:
# x * y + z, x / y / z, 1 / sqrt(x), exp(x) * exp(y) and the like.
REWRITTEN = (
    "mul", "square", "integer_pow", "div", "sqrt", "rsqrt", "exp", "exp2", "pow", "log",
)  # fmt: skip
# With a constant like -1e9 they make masks, whose overflow is no fault.
MASKS = ("select_n", "broadcast_in_dim", "convert_element_type", "max", "min", "pad")
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
BITS = ("bitcast_convert_type", "rng_uniform", "nextafter")
HALF = [x for x in dir(jnp) if re.fullmatch(r"b?float16|float[48]_\w+", x)]


@dataclasses.dataclass(frozen=True)
class Source:
    """Where an equation stands in the user's code; line 0 if that is not known.

    Attributes:
      file: The file.
      line: The line.
      function: The qualified name of the function with that line.
      in_rule: Whether the equation is in the backward rule of a `jax.custom_vjp`
        function, which that line calls.
      callers: The user's lines that led there, the innermost first: of each the file,
        the line and the function. Sources are equal whoever calls them.
    """

    file: str = ""
    line: int = 0
    function: str = ""
    in_rule: bool = False
    callers: tuple[Line, ...] = dataclasses.field(default=(), compare=False)

    @property
    def own(self) -> Line:
        """The innermost line that the user can change."""
        lines = [(self.file, self.line, self.function), *self.callers]
        return next((x for x in lines if not is_installed(x[0])), lines[0])


def is_half(dtype: Any) -> bool:
    """Whether a dtype, or its name, is a floating-point one of at most 16 bits."""
    return str(dtype) in HALF


def in_half(x: Any) -> bool:
    """Whether an array, or its type, is in half precision."""
    return is_half(getattr(x, "dtype", None))


def is_inexact(x: Any) -> bool:
    """Whether an array, or its type, is floating-point or complex."""
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.inexact)


def is_exact_cast(equation: Any) -> bool:
    """Whether it converts numbers to a dtype that has all of them."""
    types = [x.aval for x in (*equation.invars, *equation.outvars)]
    is_cast = equation.primitive.name == "convert_element_type"
    if not is_cast or not all(map(is_inexact, types)):
        return False
    old, new = (jnp.finfo(x.dtype) for x in types)
    has_range = old.minexp >= new.minexp and old.maxexp <= new.maxexp
    return has_range and old.nmant <= new.nmant


def source_of(equation: Any, caller: Source, *, is_backward: bool) -> Source:
    """Returns the innermost line of the user, and those that called it.

    Args:
      equation: An equation.
      caller: Where the jaxpr that holds it is called. JAX keeps the jaxpr of a jitted
        function, with the lines of the first call, so only lines inside count.
      is_backward: Whether it is in the backward pass. There JAX gives equations of a
        custom rule the line of the call of the `jax.custom_vjp` function.
    """
    traceback = equation.source_info.traceback
    in_rule = False
    lines: list[Line] = []
    for frame in traceback.frames if traceback is not None else ():
        in_rule |= is_backward and not lines and frame.function_name == CUSTOM_VJP
        if frame.function_name in BORDERS or frame.file_name.startswith(PACKAGE):
            break
        if _is_users(frame.file_name):
            lines.append((frame.file_name, frame.line_num, frame.function_name))
    if not lines:
        return dataclasses.replace(caller, in_rule=in_rule or caller.in_rule)
    if caller.line:
        lines += [(caller.file, caller.line, caller.function), *caller.callers]
    # A lambda and what calls it are often on one line.
    callers = (y for x, y in itertools.pairwise(lines) if x[:2] != y[:2])
    return Source(*lines[0], in_rule, tuple(callers))


@functools.cache
def _is_users(file: str) -> bool:
    """Whether a file of a traceback is the user's own."""
    if file.startswith("<"):
        return CONSOLES.match(file) is not None
    library = sysconfig.get_path("stdlib") + os.sep
    if file.startswith(library) and not is_installed(file):
        return False
    modules = (sys.modules.get(name) for name in FRAMEWORKS)
    files = (getattr(module, "__file__", None) for module in modules)
    folders = (os.path.dirname(x) + os.sep for x in files if x)
    return not file.startswith(tuple(folders))


def is_installed(file: str) -> bool:
    """Whether a file is that of an installed library."""
    return "-packages" + os.sep in file


def scope_of(equation: Any, outer: str) -> str:
    """Returns the named scopes, `Model/Block_0` for example, without transforms."""
    names = str(equation.source_info.name_stack)
    names = re.sub(r"\b(?:jvp|transpose|vmap|jit|pjit|remat|checkpoint)\(", "(", names)
    names = names.replace("(", "").replace(")", "").replace("rematted_computation", "")
    parts = [part for part in names.split("/") if part]
    middle = len(parts) // 2
    if equation.primitive.name == "remat2" and parts[:middle] == parts[middle:]:
        parts = parts[:middle]  # In the backward pass JAX gives it its scopes twice.
    return "/".join([outer, *parts] if outer else parts)


def opened(x: Any) -> tuple[Any, Sequence[Any]]:
    """Returns a jaxpr and its constants, closed or not."""
    return (x.jaxpr, x.consts) if hasattr(x, "jaxpr") else (x, ())


def is_jaxpr(x: Any) -> bool:
    """Whether `x` is a jaxpr, closed or not."""
    return hasattr(x, "eqns")


def called_jaxpr(equation: Any) -> Any:
    """Returns the jaxpr that a primitive in `CALLS` calls."""
    return next(equation.params[x] for x in CALLED if x in equation.params)


def all_equations(jaxpr: Any) -> Iterator[Any]:
    """Yields the equations of a jaxpr, and of the jaxprs in their parameters."""
    for equation in jaxpr.eqns:
        yield equation
        for parameter in equation.params.values():
            for x in parameter if isinstance(parameter, tuple) else (parameter,):
                if is_jaxpr(x):
                    yield from all_equations(opened(x)[0])


def manual_axes(equation: Any) -> tuple[str, ...]:
    """Returns the axes that a `shard_map` maps over."""
    names = ("newly_manual_axes", "manual_axes")  # The second in older versions.
    return tuple(next(equation.params[x] for x in names if x in equation.params))


def scan_counts(equation: Any) -> tuple[int, int]:
    """Returns how many constants a scan has, and how many parts its state."""
    params = equation.params
    if "ft_in" not in params:  # Older versions of JAX.
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(list(consts)), len(list(carry))


def bind(equation: Any, args: Sequence[Any], params: Any = None) -> list[Any]:
    """Runs an equation, perhaps with other parameters."""
    params = equation.params if params is None else params
    params = equation.primitive.get_bind_params(params)
    functions = ()
    if isinstance(params, tuple):  # Older versions return functions as well.
        functions, params = params
    with equation.ctx.manager:
        out = equation.primitive.bind(*functions, *args, **params)
    return list(out) if equation.primitive.multiple_results else [out]


# The same equation in float32.


def wide_dtype(dtype: Any) -> Any:
    """Returns float32 for half precision, other dtypes as they are."""
    return jnp.dtype(jnp.float32) if is_half(dtype) else dtype


def widen(x: Any) -> Any:
    """Converts half precision to float32."""
    return jnp.asarray(x, jnp.float32) if in_half(x) else x


def as_written(x: Any, equation: Any, place: Any) -> Any:
    """Returns what stands for a constant in float32.

    JAX rounds constants when it traces a program. So 1e-8 is 0 in float16, and -1e9 is
    -inf. Any tiny and any huge number does what the user meant.
    """
    if not in_half(x) or np.size(x) != 1:
        return x
    name, number = equation.primitive.name, float(x)
    if math.isinf(number) and name in ("mul", "add", "sub"):
        return np.float32(math.copysign(2.0**100, number))
    is_tiny = name == "add"
    if name in ("max", "clamp"):  # It may be a ReLU, so there must be such a number.
        line = linecache.getline(place.source.file, place.source.line)
        is_tiny = any(0 < float(n) < 2.0**-25 for n in NUMBER.findall(line))
    return np.float32(2.0**-27) if number == 0 and is_tiny else x


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
    try:
        params = {name: _widen_parameter(x) for name, x in equation.params.items()}
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
