"""The plan of a function, in words. CONTRIBUTING.md says how to read it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from optax_lossscale._autocast import policy
from optax_lossscale._autocast.choices import Chooser, choices_of
from optax_lossscale._autocast.plan import Plan, Planner, plan_call
from optax_lossscale._autocast.policy import State
from optax_lossscale._autocast.roles import roles_of_call
from optax_lossscale._jaxprs import primitives


def describe(
    fun: Callable[..., Any], *args: Any, dtype: Any = "float16", float32: Any = ()
) -> str:
    """Returns the plan of `autocast(fun, dtype, float32=float32)(*args)`.

    It has a line for each step: the states of its results and operands, its kind,
    everything else that decides, and the user's line. The steps of a loop, a branch or
    a call follow it, indented.

    Args:
      fun: A function of pytrees of arrays, without Flax nnx modules.
      *args: Its arguments. The first that has arrays are the parameters.
      dtype: The dtype to compute in.
      float32: As of `autocast`.
    """
    closed = jax.make_jaxpr(fun)(*args)
    roles = roles_of_call(args, {}, len(closed.jaxpr.invars))
    is_chosen = Chooser(choices_of(float32))
    return "\n".join(_lines(*plan_call(closed, roles, dtype, is_chosen), is_chosen))


def _lines(
    planner: Planner, plan: Plan, is_chosen: Chooser, indent: str = ""
) -> Iterator[str]:
    for step in plan.program.steps:
        inputs, results = (
            [(planner.state(plan, x), x.aval) for x in atoms]
            for atoms in (step.equation.invars, step.equation.outvars)
        )
        text = f"{indent}{_names(results)} = {step.name}({_names(inputs)})"
        file, line, _ = step.source().own
        reasons = ", ".join(_reasons(planner, plan, step, is_chosen))
        yield f"{text:40}  {reasons}; {Path(file).name}:{line}"
        for body in plan.bodies.get(step, ()):
            yield from _lines(planner, body, is_chosen, f"{indent}  ")


def _names(states):
    return ", ".join(str(type_) if x is None else x.name for x, type_ in states)


def _reasons(planner, plan, step, is_chosen):
    """Yields the kind of a step, and everything else that decides."""
    layer, usual = plan.layers[step], primitives.kind_of(step.name)
    yield step.kind.name.lower()
    if step.kind != usual:
        yield f"{usual.name.lower()} in the table"
    if is_chosen(step):
        yield "chosen by float32="
    if layer.is_norm:
        yield "of a norm"
    if layer.part is not None:
        yield f"operand {step.inputs.index(layer.part) + 1} gives way"
    if step in plan.rounded:
        yield "rounded for products"
    results, inputs = (
        [planner.state(plan, x) for x in atoms]
        for atoms in (step.equation.outvars, step.equation.invars)
    )
    is_follower = step.kind in policy.FOLLOWERS
    if is_follower and State.SOFT in results and State.HALF in inputs:
        yield "read in float32"
