"""Roles: which arrays of a program are parameters, and which are data.

They are facts of a call, and of the whole program: marked from the top down, once,
before any plan.
"""

import dataclasses
import enum
from collections.abc import Iterable, Iterator
from typing import Any

from optax_lossscale._jaxprs.primitives import Kind


class Role(enum.IntEnum):
    """What an array is made of. Of several the largest wins.

    - NUMBER: of known numbers alone.
    - PARAMETER: of parameters, and of known numbers.
    - MET: of parameters that meet data otherwise than in layers.
    - DATA: of anything else.
    - STATE: of the state of a loop, with no product since.
    """

    NUMBER = 0
    PARAMETER = 1
    MET = 2
    DATA = 3
    STATE = 4


def steps_of(steps: Iterable[Any]) -> Iterator[Any]:
    """Yields steps, and those of the programs in them."""
    for step in steps:
        yield step
        for body, _ in step.bodies:
            yield from steps_of(body.steps)


def mark(program: Any, roles: tuple[Role, ...], marked: dict[Any, Any]) -> Any:
    """Returns a program with the roles of its arrays.

    Args:
      program: The program.
      roles: The roles of its arguments. A parameter may turn out to be MET.
      marked: The programs that were marked before, to mark each once for its roles.
    """
    key = program, roles
    if key not in marked:
        known = dict(zip(program.jaxpr.invars, roles, strict=True))
        marked[key] = _with_roles(program, known, marked)
        while met := _met(marked[key]):
            known |= dict.fromkeys(met, Role.MET)
            marked[key] = _with_roles(program, known, marked)
    return marked[key]


def _with_roles(program, known, marked):
    """Returns a program with the roles of its arrays, for those of its arguments."""
    new = dataclasses.replace(program, steps=[], roles=dict(known))
    for step in program.steps:
        given = list(map(new.role, step.equation.invars))
        made = max(given, default=Role.NUMBER)
        made = min(made, Role.DATA) if step.kind == Kind.PRODUCT else made
        roles = given if step.is_parallel else [made] * len(step.equation.outvars)
        if step.bodies:
            inside = [Role.STATE if i in step.carry else x for i, x in enumerate(given)]
            bodies = [
                (mark(body, tuple(inside[i] for i in operands), marked), operands)
                for body, operands in step.bodies
            ]
            step = dataclasses.replace(step, bodies=bodies)
            if len(bodies) == 1 and not step.carry:
                roles = map(bodies[0][0].role, bodies[0][0].jaxpr.outvars)
        new.steps.append(step)
        new.roles.update(zip(step.equation.outvars, roles, strict=True))
    return new


def _met(program):
    """Returns the arguments that are parameters, but meet data outside of layers."""
    met: set[Any] = set()
    for step in reversed(program.steps):
        atoms, part = step.equation.invars, program.layers[step].part
        found = [x in met for x in step.equation.outvars]
        is_layer = step.bodies or step.kind == Kind.PRODUCT or step.is_parallel
        meets = not is_layer and max(map(program.role, atoms), default=0) >= Role.DATA
        # The sum of the squares of a parameter, say, meets the loss: no matter.
        is_array = any(x.aval.shape for x in met.intersection(step.equation.outvars))
        back = found if step.is_parallel else [any(found)] * len(atoms)
        for x, y in zip(atoms, back, strict=True):
            is_parameter = program.role(x) == Role.PARAMETER and x is not part
            if is_parameter and (meets or (y and (is_array or not x.aval.shape))):
                met.add(x)
        for body, operands in step.bodies:
            pairs = zip(operands, body.jaxpr.invars, strict=True)
            inside = (atoms[i] for i, x in pairs if body.role(x) > Role.PARAMETER)
            met.update(x for x in inside if program.role(x) == Role.PARAMETER)
    return met.intersection(program.jaxpr.invars)
