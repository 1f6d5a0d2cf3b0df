"""Roles: which arrays of a program are parameters, and which are data.

They are facts of a call, and of the whole program: marked from the top down, once,
before any plan.
"""

import dataclasses
import enum
import itertools
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
        marked[key] = _marked(program, known, marked)
        while met := _met(marked[key]):
            known |= dict.fromkeys(met, Role.MET)
            marked[key] = _marked(program, known, marked)
    return marked[key]


def _marked(program, known, marked):
    new = dataclasses.replace(program, steps=[], roles=dict(known))
    for step in program.steps:
        given, results = (
            list(map(new.role, step.equation.invars)),
            step.equation.outvars,
        )
        made = max(given, default=Role.NUMBER)
        roles = [min(made, Role.DATA) if step.kind == Kind.PRODUCT else made]
        roles *= len(results)
        if step.bodies:
            inside = [Role.STATE if i in step.carry else x for i, x in enumerate(given)]
            bodies = [
                (mark(body, tuple(inside[i] for i in reads), marked), reads)
                for body, reads in step.bodies
            ]
            step = dataclasses.replace(step, bodies=bodies)
            if len(bodies) == 1 and not step.carry:
                roles = list(map(bodies[0][0].role, bodies[0][0].jaxpr.outvars))
        elif step.is_parallel:
            roles = given
        new.steps.append(step)
        new.roles.update(zip(results, roles, strict=True))
    return new


def _met(program):
    """Returns the arguments that are parameters, but meet data outside of layers."""
    met: set[Any] = set()
    for step in reversed(program.steps):
        inputs, results = step.equation.invars, step.equation.outvars
        part, made = (
            program.layers[step].part,
            max(map(program.role, inputs), default=0),
        )
        found = met.intersection(results)
        if step.is_parallel:
            inputs = [x for x, y in zip(inputs, results, strict=True) if y in met]
        elif step.bodies or step.kind == Kind.PRODUCT or made < Role.DATA:
            # The sum of the squares of a parameter, say, meets the loss: no matter.
            is_scalar = not any(x.aval.shape for x in found)
            inputs = [x for x in inputs if found and not (is_scalar and x.aval.shape)]
        for body, reads in step.bodies:
            pairs = zip(reads, body.jaxpr.invars, strict=True)
            inside = [i for i, x in pairs if body.role(x) > Role.PARAMETER]
            inputs += [step.equation.invars[i] for i in inside]
        is_parameter = (
            program.role(x) == Role.PARAMETER and x is not part for x in inputs
        )
        met.update(itertools.compress(inputs, is_parameter))
    return met.intersection(program.jaxpr.invars)
