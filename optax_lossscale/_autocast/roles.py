"""Roles: which arrays are parameters, and which are data.

Of the arguments of a call, their places decide. In a program roles go forward, from its
arguments to its results.
"""

import enum
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.core import ShapedArray

from optax_lossscale._autocast.program import Program, Step
from optax_lossscale._jaxprs.parts import variable_of
from optax_lossscale._jaxprs.primitives import Kind
from optax_lossscale._models import is_model, is_mutable
from optax_lossscale._tree import is_argument, is_inexact


class Role(enum.IntEnum):
    """The role of an array: it is made of these. Of several the largest wins.

    - KNOWN: known values alone.
    - PARAMETER: parameters, and known values.
    - MIXED: parameters that are combined with data outside of layers.
    - DATA: anything else.
    - STATE: the state of a loop, with no product since.
    """

    KNOWN = 0
    PARAMETER = 1
    MIXED = 2
    DATA = 3
    STATE = 4


class Roles:
    """The roles of the arrays of a program."""

    def __init__(self, program: Program, given: Mapping[Any, Role]):
        """Takes a program, and the roles of its arguments."""
        self._program, self._roles = program, dict(given)

    def of(self, atom: Any) -> Role:
        """Returns the role of an operand: DATA, if nothing is known of it."""
        if self._program.known(atom) is not None:
            return Role.KNOWN
        is_array = isinstance(atom.aval, ShapedArray)  # and no reference
        return self._roles.get(variable_of(atom), Role.DATA) if is_array else Role.DATA

    def inside(self, step: Step) -> list[Role]:
        """Returns the roles of the operands of a step in the programs in it."""
        given = map(self.of, step.equation.invars)
        return [Role.STATE if i in step.carry else x for i, x in enumerate(given)]

    def follow(self, step: Step, bodies: Sequence["Roles"]) -> None:
        """Adds the results of a step, for the roles in the programs in it."""
        given = list(map(self.of, step.equation.invars))
        made = max(given, default=Role.KNOWN)
        made = min(made, Role.DATA) if step.kind == Kind.PRODUCT else made
        roles = given if step.is_parallel else [made] * len(step.equation.outvars)
        if len(bodies) == 1 and not step.carry:
            roles = [bodies[0].of(x) for x in bodies[0]._program.jaxpr.outvars]
        self._roles.update(zip(step.equation.outvars, roles, strict=True))


def is_traced(x: Any) -> bool:
    """Whether a leaf is an argument of the program: NumPy's integers are static."""
    return is_argument(x) and (isinstance(x, jax.Array) or is_inexact(x))


def roles_of_call(args: Any, kwargs: Any, n: int) -> tuple[Role, ...]:
    """Returns the roles of the arrays of a call.

    Args:
      args: The arguments. Those of the first with arrays are the parameters, or those
        of the first Flax nnx module.
      kwargs: The arguments by name.
      n: How many arrays there are. The last are those in Flax nnx modules.
    """
    pairs = jax.tree.leaves_with_path((args, kwargs), is_leaf=is_mutable)
    models = [path[:2] for path, x in pairs if is_model(x)]
    held = [path[:2] for path, x in pairs if is_traced(x) or is_mutable(x)]
    # Parameters come by position, also after a name; only an nnx module may be a
    # keyword argument.
    first = (*models, *(path for path in held if path[0].idx == 0), None)[0]
    roles = [
        Role.PARAMETER if path[:2] == first else Role.DATA
        for path, x in pairs
        if is_traced(x)
    ]
    return *roles, *(Role.PARAMETER,) * (n - len(roles))
