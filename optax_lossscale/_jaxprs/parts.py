"""Undocumented parts of JAX: of jaxprs, types and lines. Only this file reads them.

Some of the names depend on the version of JAX.
"""

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from typing import Any

import jax
from jax.extend import source_info_util

# The parameters that hold the jaxpr of a call.
CALLED = ("jaxpr", "call_jaxpr")
# Classes of effects: devices exchange arrays, or ask for their index; and a `jax.Ref`
# of outside is read or written.
ON_AXIS = "NamedAxisEffect"
WRITES = {"WriteEffect", "AccumEffect"}
HARMLESS = {ON_AXIS, "ReadEffect", *WRITES}
_ENDED: weakref.WeakSet[Any] = weakref.WeakSet()  # Traces.
# Frames at which a traceback ends. Older versions of JAX keep the jaxpr of a function
# that is called again, and outside are the frames of its first call. Newer keep none.
BORDERS = ("trace_to_jaxpr", "trace_to_jaxpr_dynamic")


def opened(x: Any) -> tuple[Any, Sequence[Any]]:
    """Returns a jaxpr and its constants, closed or not."""
    return (x.jaxpr, x.consts) if is_closed(x) else (x, ())


def is_closed(x: Any) -> bool:
    """Whether a jaxpr holds the arrays that it closes over."""
    return hasattr(x, "jaxpr")


def is_jaxpr(x: Any) -> bool:
    """Whether `x` is a jaxpr, closed or not."""
    return hasattr(x, "eqns")


def is_literal(atom: Any) -> bool:
    """Whether an operand is a constant in the equation, its `val`, and no variable."""
    return hasattr(atom, "val")


def variable_of(atom: Any) -> Any:
    """Returns an operand that is a variable; None if it is a literal."""
    return None if is_literal(atom) else atom


def is_ref(atom: Any) -> bool:
    """Whether an operand or a result of an equation is a `jax.Ref`."""
    return hasattr(atom.aval, "inner_aval")


def type_held(atom: Any) -> Any:
    """Returns the type of an operand; for a `jax.Ref`, that of the array in it."""
    return getattr(atom.aval, "inner_aval", atom.aval)


def type_like(type_: Any, **changes: Any) -> Any:
    """Returns the type of an array with another `dtype` or `weak_type`."""
    return type_.update(**changes)


def called_jaxpr(equation: Any) -> Any:
    """Returns the jaxpr that a primitive of the kind CALL calls."""
    for name in CALLED:
        if name in equation.params:
            return equation.params[name]
    raise NotImplementedError(
        f"{equation.primitive} is a call in the table of primitives, but none of its "
        f"parameters is one of {', '.join(CALLED)}."
    )


def all_equations(jaxpr: Any) -> Iterator[Any]:
    """Yields the equations of a jaxpr, and of the jaxprs in their parameters."""
    for equation in jaxpr.eqns:
        yield from equations_in(equation)


def equations_in(equation: Any) -> Iterator[Any]:
    """Yields an equation, and those of the jaxprs in its parameters."""
    yield equation
    for jaxpr in jaxprs_in(equation):
        yield from all_equations(jaxpr)


def jaxprs_in(equation: Any) -> Iterator[Any]:
    """Yields the jaxprs in the parameters of an equation, without their constants."""
    for parameter in equation.params.values():
        for x in parameter if isinstance(parameter, tuple) else (parameter,):
            if is_jaxpr(x):
                yield opened(x)[0]


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


def _effects(x: Any) -> set[str]:
    return {type(effect).__name__ for effect in x.effects}


def has_side_effects(equation: Any) -> bool:
    """Whether an equation does more than to compute, exchange arrays and use a Ref."""
    return not _effects(equation) <= HARMLESS


def only_exchanges(jaxpr: Any) -> bool:
    """Whether a jaxpr has no effect but that devices exchange arrays."""
    return _effects(jaxpr) <= {ON_AXIS}


def writes_refs(jaxpr: Any) -> bool:
    """Whether a jaxpr writes a `jax.Ref` of outside."""
    return not _effects(jaxpr).isdisjoint(WRITES)


def axes_used(x: Any) -> set[Any]:
    """Returns the axes of devices that an equation or a jaxpr names."""
    return {effect.name for effect in x.effects if type(effect).__name__ == ON_AXIS}


def varying_axes(x: Any) -> frozenset[Any]:
    """Returns the axes of `jax.shard_map` along which an array is known to vary."""
    kind = x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x)
    kind = getattr(kind, "manual_axis_type", kind)
    # The second in older versions.
    return getattr(kind, "varying", getattr(kind, "vma", None)) or frozenset()


def explicit_axes(x: Any) -> tuple[Any, ...]:
    """Returns the explicit axes of the mesh that the type of an array names."""
    return jax.typeof(x).sharding.mesh.explicit_axes


def has_name(axis: Any) -> bool:
    """Whether an axis has a name of the user: `jax.pmap` without one makes its own."""
    return not str(axis).startswith(("_internal", "<axis"))  # The second: older JAX.


def is_placed(equation: Any) -> bool:
    """Whether a `jit` says how its arguments or its results are sharded."""
    shardings = equation.params["in_shardings"] + equation.params["out_shardings"]
    return any(type(x).__name__ != "UnspecifiedValue" for x in shardings)


def frames_of(equation: Any) -> Sequence[Any]:
    """Returns the frames in which JAX made an equation, the innermost first."""
    traceback = equation.source_info.traceback
    return () if traceback is None else traceback.frames


def is_border(frame: Any) -> bool:
    """Whether the frames outside of this one are those of the first call alone."""
    return frame.function_name in BORDERS


def scopes_of(equation: Any) -> str:
    """Returns the named scopes and the transformations that an equation is in."""
    return str(equation.source_info.name_stack)


def here() -> Any:
    """Returns the traceback that equations get now."""
    return source_info_util.current().traceback


@functools.cache
def nowhere() -> Any:
    """Returns a traceback with no line of the user's, made in a fresh thread."""
    with futures.ThreadPoolExecutor(1) as threads:
        closed = threads.submit(jax.make_jaxpr(lambda x: -x), 0.0).result()
    return closed.eqns[0].source_info.traceback


def has_line(equation: Any) -> bool:
    """Whether an equation has a traceback: not so in the rule of a function."""
    return equation.source_info.traceback is not nowhere()


def traced(function: Callable[..., Any], *args: Any) -> Any:
    """Returns the jaxpr of a function, as `jax.make_jaxpr`, and remembers its trace."""
    traces: set[Any] = set()

    @functools.wraps(function)
    def noted(*args):
        traces.update(filter(None, map(_trace_of, args[:1])))
        return function(*args)

    closed = jax.make_jaxpr(noted)(*args)
    _ENDED.update(traces)
    return closed


def has_ended(x: Any) -> bool:
    """Whether `x` stands for an array in a function that `traced` traced before."""
    return _trace_of(x) in _ENDED


def _trace_of(x: Any) -> Any:
    return getattr(x, "_trace", None)


def function_of(jaxpr: Any) -> tuple[str, str]:
    """Returns the name of the function that a jaxpr was traced from, and its place.

    The place is "file:line".
    """
    info = opened(jaxpr)[0].debug_info
    name, _, place = (info.func_src_info if info else "").partition(" at ")
    return name, place


def is_inlined(function: Any) -> bool:
    """Whether JAX puts the equations of a jitted function in those of its caller."""
    inline = getattr(getattr(function, "_jit_info", None), "inline", False)
    return getattr(inline, "name", inline) in (True, "JAX_EARLY")  # Newer versions.


def standing(traceback: Any) -> Any:
    """A context manager: equations made in it get a traceback."""
    return source_info_util.user_context(traceback)


def standing_like(equation: Any) -> Any:
    """A context manager: equations made in it get the line and scopes of this one."""
    source = equation.source_info
    names = source_info_util.current_name_stack() + source.name_stack
    # Without a line, it is in the rule of a function, which has the line.
    traceback = source.traceback if has_line(equation) else None
    return source_info_util.user_context(traceback, name_stack=names)


def context_of(equation: Any) -> Any:
    """Returns the settings of JAX under which an equation was made."""
    return equation.ctx


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
