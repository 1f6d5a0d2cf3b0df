"""Why `autocast` computes nothing in half precision."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.tree_util import keystr

from optax_lossscale._autocast.policy import State
from optax_lossscale._autocast.program import Step
from optax_lossscale._autocast.roles import steps_of
from optax_lossscale._autocast.states import Plan
from optax_lossscale._jaxprs import parts, primitives
from optax_lossscale._jaxprs.primitives import Kind


def computes_in_half(plan: Plan) -> bool:
    """Whether a product of a program computes in half precision."""
    steps = (x for x in plan.program.steps if x.kind == Kind.PRODUCT)
    if any(plan.states[x.equation.outvars[0]] == State.HALF for x in steps):
        return True
    return any(computes_in_half(x) for bodies in plan.bodies.values() for x in bodies)


def reason(plan: Plan, args: Any, is_chosen: Callable[[Step], bool]) -> str | None:
    """Returns why no product computes in half precision, from the first product.

    None if a `jax.custom_vjp` may have one: JAX traces its rule in the backward pass.

    Args:
      plan: The plan of the program.
      args: The arguments of the function, by name.
      is_chosen: Whether the user keeps a step in float32.
    """
    steps = list(steps_of(plan.program.steps))
    rules = [x for x in steps if x.name == "custom_vjp_call" and x.bodies]
    if not all(map(is_chosen, rules)):
        return None
    for step in steps:
        for x in () if step.bodies else parts.equations_in(step.equation):
            if primitives.kind_of(x.primitive.name) == Kind.PRODUCT:
                return _of_product(x, step, args, is_chosen)
    return "it has no matrix product and no convolution"


def _of_product(equation, step, args, is_chosen):
    if is_chosen(step):
        return "float32= covers all of its products"
    dtypes = {str(x.aval.dtype) for x in equation.invars[:2]}
    for (name, *path), x in jax.tree_util.tree_leaves_with_path(args):
        dtype = str(getattr(x, "dtype", ""))
        if dtype in dtypes - {"float32"}:
            return f"{name.key}{keystr(tuple(path))} is {dtype}"
    file, line, _ = step.source().own
    place = f"{Path(file).name}:{line}" if line else step.name
    if dtypes != {"float32"}:
        return f"{place} multiplies {min(dtypes - {'float32'})} by itself"
    if precision := equation.params.get("precision"):
        return f"{place} asks for precision {precision}"
    return f"{place} computes in float32, by the table of dtypes: {step.name}"
