"""The parts of jaxprs and of types that JAX does not document, each read here alone.

Some of their names depend on the version of JAX.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax

# The parameters that hold the jaxpr of a call.
CALLED = ("jaxpr", "call_jaxpr")
# Classes of effects: devices exchange arrays, or ask for their index; and a `jax.Ref`
# of outside is read or written.
ON_AXIS = "NamedAxisEffect"
WRITES = {"WriteEffect", "AccumEffect"}
HARMLESS = {ON_AXIS, "ReadEffect", *WRITES}


def opened(x: Any) -> tuple[Any, Sequence[Any]]:
    """Returns a jaxpr and its constants, closed or not."""
    return (x.jaxpr, x.consts) if hasattr(x, "jaxpr") else (x, ())


def is_jaxpr(x: Any) -> bool:
    """Whether `x` is a jaxpr, closed or not."""
    return hasattr(x, "eqns")


def is_literal(atom: Any) -> bool:
    """Whether an operand is a number in the equation, its `val`, and no variable."""
    return hasattr(atom, "val")


def is_ref(atom: Any) -> bool:
    """Whether an operand or a result of an equation is a `jax.Ref`."""
    return hasattr(atom.aval, "inner_aval")


def called_jaxpr(equation: Any) -> Any:
    """Returns the jaxpr that a primitive of the kind CALL calls."""
    return next(equation.params[x] for x in CALLED if x in equation.params)


def all_equations(jaxpr: Any) -> Iterator[Any]:
    """Yields the equations of a jaxpr, and of the jaxprs in their parameters."""
    for equation in jaxpr.eqns:
        yield from equations_in(equation)


def equations_in(equation: Any) -> Iterator[Any]:
    """Yields an equation, and those of the jaxprs in its parameters."""
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


def _effects(x: Any) -> set[str]:
    return {type(effect).__name__ for effect in x.effects}


def has_side_effects(equation: Any) -> bool:
    """Whether an equation does more than to compute, exchange arrays and use a Ref."""
    return not _effects(equation) <= HARMLESS


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
    return not str(axis).startswith("_internal")


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
