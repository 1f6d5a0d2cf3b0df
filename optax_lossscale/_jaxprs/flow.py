"""Equations that hold jaxprs: which these are, and how to run them again.

A loop, a branch or a `jax.shard_map` runs again around other functions.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from optax_lossscale._jaxprs import parts, primitives
from optax_lossscale._jaxprs.primitives import Kind


class Bodies(NamedTuple):
    """The jaxprs that an equation runs.

    Attributes:
      jaxprs: Each with the indices of the operands that it reads. The last is the body
        of a loop; the first may be its condition.
      carry: The indices of the operands that are the state of a loop.
    """

    jaxprs: Sequence[tuple[Any, Sequence[int]]] = ()
    carry: Sequence[int] = ()


def bodies_of(equation: Any) -> Bodies:
    """Returns the jaxprs that an equation runs, if its kind in the table says so."""
    name, params = equation.primitive.name, equation.params
    kind, operands = primitives.kind_of(name), range(len(equation.invars))
    if kind in (Kind.CALL, Kind.DEVICES):
        return Bodies([(parts.called_jaxpr(equation), operands)])
    if kind == Kind.BRANCH:
        return Bodies([(x, operands[1:]) for x in params["branches"]])
    if name == "scan":
        _, carry, _ = scan_parts(equation, operands)
        return Bodies([(params["jaxpr"], operands)], carry)
    if name == "while":
        asked, consts, carry = while_parts(equation, operands)
        condition = params["cond_jaxpr"], [*asked, *carry]
        return Bodies([condition, (params["body_jaxpr"], [*consts, *carry])], carry)
    return Bodies()


def switch(
    equation: Any, index: Any, functions: Sequence[Callable[..., Any]], operands: Any
) -> Any:
    """Runs one of the functions, as a `cond` does with its branches.

    Args:
      equation: The equation.
      index: Its first operand, which says which branch.
      functions: A function for each branch.
      operands: The argument of the functions.
    """
    platforms = equation.params.get("branches_platforms")
    if platforms is None:
        return lax.switch(index, functions, operands)
    pairs = zip(functions, platforms, strict=True)
    by_name = {x: f for f, names in pairs for x in names or ("default",)}
    return lax.platform_dependent(operands, **by_name)


def scan_parts(equation: Any, values: Sequence[Any]) -> tuple[Any, Any, Any]:
    """Splits values of the operands: the constants, the state, the slices."""
    n, m = parts.scan_counts(equation)
    return values[:n], values[n : n + m], values[n + m :]


def scan(equation: Any, step: Callable[..., Any], state: Any, xs: Any) -> Any:
    """Runs a function of a state and a slice as a `scan` does."""
    params = equation.params
    options = {name: params[name] for name in ("length", "reverse", "unroll")}
    return lax.scan(step, state, xs, **options)


def while_parts(equation: Any, values: Sequence[Any]) -> tuple[Any, Any, Any]:
    """Splits values: the constants of the condition, those of the body, the state."""
    n, m = equation.params["cond_nconsts"], equation.params["body_nconsts"]
    return values[:n], values[n : n + m], values[n + m :]


def while_loop(
    equation: Any, condition: Callable[..., Any], body: Callable[..., Any], state: Any
) -> Any:
    """Runs a `while`; under `jax.vmap`, each example has a condition."""
    step = step_of_while(equation, condition, body)
    if step is body:
        return lax.while_loop(condition, body, state)
    return lax.while_loop(lambda state: jnp.any(condition(state)), step, state)


def step_of_while(
    equation: Any, condition: Callable[..., Any], body: Callable[..., Any]
) -> Callable[..., Any]:
    """Returns an iteration; an example whose condition is false keeps its state."""
    if not equation.params["cond_jaxpr"].jaxpr.outvars[0].aval.shape:
        return body

    def step(state):
        goes_on = condition(state)
        pairs = zip(body(state), state, strict=True)
        return [choose(goes_on, *pair) for pair in pairs]

    return step


def choose(flags: Any, new: Any, old: Any) -> Any:
    """Returns an array; where the flags of the first axes are False, the old one."""
    return jnp.where(jnp.expand_dims(flags, range(flags.ndim, new.ndim)), new, old)


def shard_map(
    equation: Any, body: Callable[..., Any], in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """Maps a function over the devices of a `shard_map`."""
    params = equation.params
    return jax.shard_map(
        body,
        mesh=params["mesh"],
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=set(parts.manual_axes(equation)),
        check_vma=params["check_vma"],
    )
