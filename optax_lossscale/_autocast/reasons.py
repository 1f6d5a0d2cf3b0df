"""Why `autocast` computes nothing in half precision."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from optax_lossscale._autocast.policy import State
from optax_lossscale._autocast.program import Step, steps_of
from optax_lossscale._autocast.states import Plan
from optax_lossscale._jaxprs import parts, primitives
from optax_lossscale._jaxprs.primitives import Kind
from optax_lossscale._tree import is_inexact


def computes_in_half(plan: Plan) -> bool:
    """Whether a product of a program computes in half precision."""
    steps = (x for x in plan.program.steps if x.kind == Kind.PRODUCT)
    if any(plan.states[x.equation.outvars[0]] == State.HALF for x in steps):
        return True
    return any(computes_in_half(x) for bodies in plan.bodies.values() for x in bodies)


def first_reason(
    plan: Plan, args: Any, kwargs: Any, is_chosen: Callable[[Step], bool]
) -> str | None:
    """Returns the first reason why no product computes in half precision.

    None if a `jax.custom_vjp` may have one: JAX traces its rule in the backward pass.

    Args:
      plan: The plan of the program.
      args: The positional arguments of the function, any pytree.
      kwargs: The others.
      is_chosen: Whether the user keeps a step in float32.
    """
    for step in steps_of(plan.program):
        inside = [] if step.bodies else parts.equations_in(step.equation)
        found = [
            x for x in inside if primitives.kind_of(x.primitive.name) == Kind.PRODUCT
        ]
        if not found:
            continue
        if is_chosen(step):
            return "float32= covers all of its products"
        types = [x.aval.dtype.name for x in found[0].invars if is_inexact(x.aval)]
        others = [x for x in types if x != "float32"]
        if others:
            return _chosen_by_user(plan, args, kwargs, others[0], step)
        if found[0] is not step.equation:
            is_loop = step.kind == Kind.LOOP
            why = "is a loop that ends by floating-point numbers"
            other = f"calls {step.name}, which autocast does not open"
            return f"{_place(step)} {why if is_loop else other}"
        precision = step.equation.params.get("precision")
        asked = (
            f"asks for precision {precision}" if precision else "is float32 by table"
        )
        return f"{_place(step)} {asked}"
    if any(x.name == "custom_vjp_call" for x in steps_of(plan.program)):
        return None
    return "it has no matrix product and no convolution"


def _chosen_by_user(plan, args, kwargs, dtype, step):
    for name, tree in (("args", args), ("kwargs", kwargs)):
        for path, x in jax.tree_util.tree_leaves_with_path(tree):
            if str(getattr(x, "dtype", "")) == dtype:
                place = jax.tree_util.keystr(path)
                return f"{name}{place} is {dtype}"
    for cast in steps_of(plan.program):
        is_cast = cast.name == "convert_element_type"
        if is_cast and cast.equation.outvars[0].aval.dtype.name == dtype:
            return f"{_place(cast)} casts to {dtype} by itself"
    return f"{_place(step)} computes in {dtype}"


def _place(step: Step) -> str:
    file, line, _ = step.source().own
    return f"{Path(file).name}:{line}" if line else step.name
