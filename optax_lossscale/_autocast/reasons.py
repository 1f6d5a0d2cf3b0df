"""Why `autocast` computes nothing in half precision."""

import contextvars
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.tree_util import keystr

from optax_lossscale._autocast import policy
from optax_lossscale._autocast.custom_rules import count_closed_over, written_of
from optax_lossscale._autocast.plan import Plan
from optax_lossscale._autocast.program import Step, read, steps_of
from optax_lossscale._jaxprs import ends, parts, primitives
from optax_lossscale._jaxprs.primitives import Kind
from optax_lossscale._tree import is_inexact

LEAVE_OUT = "leave autocast out"
# A list of a diagnosis, to which each `autocast` that runs adds its reason, or "". The
# outermost is the last. It changes no program, so JAX's caches need not know it.
NOTES: contextvars.ContextVar[list[str] | None]
NOTES = contextvars.ContextVar("NOTES", default=None)


def reason(
    plan: Plan, args: Any, is_chosen: Callable[[Step], bool], dtype: Any
) -> str | None:
    """Returns why no product computes in half precision, and what to write.

    None if one does, perhaps only in the backward rule of a `jax.custom_vjp`.

    Args:
      plan: The plan of the program.
      args: The arguments of the function, by name.
      is_chosen: Whether the user keeps a step in float32.
      dtype: The dtype to compute in.
    """
    if plan.has_half_products:
        return None
    steps = list(steps_of(plan.program.steps))
    rules = (x for x in steps if x.name == "custom_vjp_call" and x.bodies)
    if any(_casts_in_rule(x, is_chosen, dtype) for x in rules):
        return None
    for step in steps:
        for x in () if step.bodies else parts.equations_in(step.equation):
            is_product = primitives.kind_of(policy.operation_of(x)) == Kind.PRODUCT
            if is_product and not policy.is_sum(x):
                return _of_product(x, step, args, is_chosen)
    return f"it has no matrix product and no convolution: {LEAVE_OUT}"


def _casts_in_rule(step, is_chosen, dtype):
    """Whether a product in the rule of a function computes in half precision."""
    equation = step.equation
    first = count_closed_over(equation)
    mask = [i >= first and is_inexact(x.aval) for i, x in enumerate(equation.invars)]

    def both_passes(*args):
        written, taken = written_of(equation, args, mask)
        out, pull = jax.vjp(lambda *x: list(filter(is_inexact, written(*x))), *taken)
        return pull(out)

    try:
        closed = jax.make_jaxpr(both_passes)(*(x.aval for x in equation.invars))
    except Exception:  # Inside of a `jax.shard_map`, or whatever a rule raises.
        return True
    program = read(closed, dtype, callers=step.path)
    found = (x for x in steps_of(program.steps) if x.kind == Kind.PRODUCT)
    return not all(map(is_chosen, found))


def _of_product(equation, step, args, is_chosen):
    if is_chosen(step):
        return f"float32= covers all of its products: name less, or {LEAVE_OUT}"
    dtypes = {str(x.aval.dtype) for x in equation.invars[:2]}
    for (name, *path), x in jax.tree_util.tree_leaves_with_path(args):
        dtype = str(getattr(x, "dtype", ""))
        if dtype in dtypes - {"float32"}:
            given = f"{name.key}{keystr(tuple(path))}"
            return (
                f"{given} is {dtype}: pass {given}.astype(jnp.float32), or {LEAVE_OUT}"
            )
    file, line, _ = step.source().own
    place = f"{Path(file).name}:{line}" if line else step.name
    if ends.Walk().holds_solver(step.equation):
        return (
            f"{place} runs a loop that ends when floating-point values are close, as a "
            f"solver does, and computes in float32: {LEAVE_OUT}"
        )
    if dtypes != {"float32"}:
        return (
            f"{place} multiplies {min(dtypes - {'float32'})} by itself: remove the "
            f"casts and the dtype of layers that lead to it, or {LEAVE_OUT}"
        )
    if precision := equation.params.get("precision"):
        return (
            f"{place} asks for precision {precision}: leave precision and "
            f"jax.default_matmul_precision out, or {LEAVE_OUT}"
        )
    table = f"by the table of operations ({step.name})"
    return f"{place} computes in float32, {table}: {LEAVE_OUT}"
