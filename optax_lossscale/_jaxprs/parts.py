"""The parts of an equation of a jaxpr, and how to run it."""

from collections.abc import Iterator, Sequence
from typing import Any

# The parameters that hold the jaxpr of a call.
CALLED = ("jaxpr", "call_jaxpr")


def opened(x: Any) -> tuple[Any, Sequence[Any]]:
    """Returns a jaxpr and its constants, closed or not."""
    return (x.jaxpr, x.consts) if hasattr(x, "jaxpr") else (x, ())


def is_jaxpr(x: Any) -> bool:
    """Whether `x` is a jaxpr, closed or not."""
    return hasattr(x, "eqns")


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
