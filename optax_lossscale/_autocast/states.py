"""Which numbers of a program are held in half precision, and which in float32."""

import collections
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from optax_lossscale._autocast import policy
from optax_lossscale._autocast.policy import State
from optax_lossscale._autocast.program import Atom, Kind, Known, Program, Step
from optax_lossscale._jaxprs import flow

States = tuple[State | None, ...]
# They hand a sum in a loop on, as it is or as the larger of two.
PASSES = (Kind.MOVE, Kind.SPREAD)


@dataclasses.dataclass(eq=False)
class Plan:
    """The states of a program.

    Attributes:
      program: The program.
      inputs: The states of its arguments; None for what is not float32.
      states: By name, the states of all float32 numbers.
      outputs: The states of its results.
      bodies: By step, the plans of the programs in it.
    """

    program: Program
    inputs: States
    states: dict[int, State]
    outputs: States = ()
    bodies: dict[Step, tuple["Plan", ...]] = dataclasses.field(default_factory=dict)


class Planner:
    """Plans programs; remembers what it found, so that nested loops cost nothing."""

    def __init__(self, dtype: Any, is_float32: Callable[[Step], bool]):
        """Prepares.

        Args:
          dtype: The dtype to compute in.
          is_float32: Whether the user wants a step in float32.
        """
        self._dtype, self._is_float32 = dtype, is_float32
        self._plans: dict[Any, Plan] = {}
        self._wants: dict[Any, tuple[set[Atom], tuple[bool, ...]]] = {}
        self._origins: dict[Program, list[dict[int, bool]]] = {}

    def plan(self, program: Program, inputs: States, wanted: Sequence[bool]) -> Plan:
        """Returns the states of a program.

        Args:
          program: The program.
          inputs: The states of its arguments.
          wanted: For each result, whether all that read it compute in float32.
        """
        key = program, inputs, tuple(wanted)
        if key not in self._plans:
            self._plans[key] = self._plan(program, inputs, wanted)
        return self._plans[key]

    def state(self, plan: Plan, atom: Atom, aval: Any) -> State | None:
        """Returns the state of an operand; None if it is not float32."""
        if not is_float32(aval):
            return None
        if isinstance(atom, Known):
            return policy.state_of_number(atom, self._dtype)
        return plan.states[atom]

    def _plan(self, program, inputs, wanted):
        names = [
            x for x in zip(program.inputs, inputs, strict=True) if x[1] is not None
        ]
        plan = Plan(program, inputs, {k: v for k, v in names if isinstance(k, int)})
        for name, array in program.consts.items():
            if is_float32(array):
                plan.states[name] = policy.state_of_array(array, self._dtype)
        wants, _ = self._wanted(program, tuple(wanted))
        for step in program.steps:
            avals = [x.aval for x in step.equation.invars]
            pairs = zip(step.inputs, avals, strict=True)
            states = [self.state(plan, *pair) for pair in pairs]
            if step.bodies:
                plan.bodies[step], found = self._nested(plan, step, states, wants)
            else:
                found = [self._result(program, step, states, wants)] * len(step.outputs)
            results = zip(step.outputs, step.equation.outvars, found, strict=True)
            plan.states.update((k, x) for k, v, x in results if is_float32(v.aval))
        plan.outputs = tuple(self._outputs(plan))
        return plan

    def _outputs(self, plan) -> Iterator[State | None]:
        for atom in plan.program.outputs:
            if isinstance(atom, Known):
                aval = np.asarray(atom.value)
                yield self.state(plan, atom, aval)
            else:
                yield plan.states.get(atom)

    def _result(self, program, step, states, wants):
        """Returns the state of the results of a step without programs in it."""
        if self._is_float32(step):
            return State.WIDE
        if (number := program.filled.get(step.outputs[0])) is not None:
            return policy.state_of_number(number, self._dtype)
        pairs = [x for x in zip(step.inputs, states, strict=True) if x[1] is not None]
        rounded = [k for k, x in pairs if x == State.FLEXIBLE]
        is_mixed = any(program.number(k) is None for k in rounded)
        is_wanted = not wants.isdisjoint(step.outputs)
        states = [x for _, x in pairs]
        return policy.state_of_result(step.kind, states, is_mixed, is_wanted)

    def _nested(self, outer, step, states, wants):
        """Returns the plans of the programs in a step, and the states of its results."""
        wanted = [x in wants for x in step.outputs]
        if step.name == "cond":
            plans = [self.plan(x, tuple(states[1:]), wanted) for x in step.bodies]
            return tuple(plans), _join(x.outputs for x in plans)
        if step.name not in ("scan", "while"):
            plan = self.plan(step.bodies[0], tuple(states), wanted)
            return (plan,), plan.outputs
        if step.name == "while":
            asked, consts, carry = flow.while_parts(step.equation, states)
            xs, start = [], len(asked) + len(consts)
        else:
            consts, carry, xs = flow.scan_parts(step.equation, states)
            asked, start = [], len(consts)
        body, n = step.bodies[-1], len(carry)
        inits = step.inputs[start : start + n]
        first = start - len(asked)
        carry = [
            State.WIDE
            if x is not None and self._adds_up(outer, step, i, first, y)
            else x
            for i, (x, y) in enumerate(zip(carry, inits, strict=True))
        ]
        wanted = [False] * n + wanted[n:]
        while True:
            plan = self.plan(body, (*consts, *carry, *xs), wanted)
            joined = _join([carry, plan.outputs[:n]])
            if joined == carry:
                break
            carry = joined
        found = [*carry, *plan.outputs[n:]]
        if step.name == "scan":
            return (plan,), found
        condition = self.plan(step.bodies[0], (*asked, *carry), [False])
        return (condition, plan), found

    def _adds_up(self, outer, step, index, first, init):
        """Whether a part of a loop's state is a sum over many iterations."""
        length = step.equation.params.get("length", policy.LONG_LOOP)
        number = outer.program.number(init)
        is_sum = number is not None and number == 0
        if length < policy.LONG_LOOP and not is_sum:
            return False
        return self._origins_of(step.bodies[-1])[index].get(first + index, False)

    def _origins_of(self, program: Program) -> list[dict[int, bool]]:
        """Returns for each result from which arguments it comes by adding and moving.

        With the index of an argument is whether something was added on the way.
        """
        if program in self._origins:
            return self._origins[program]
        found: dict[Atom, dict[int, bool]] = {}
        found |= {k: {i: False} for i, k in enumerate(program.inputs)}
        small: set[Atom] = set()
        for step in program.steps:
            inputs = [found.get(x, {}) for x in step.inputs]
            sizes = [math.prod(x.aval.shape) for x in step.equation.invars]
            is_small = [
                k == 1 or x in small or program.number(x) is not None
                for x, k in zip(step.inputs, sizes, strict=True)
            ]
            outputs = [{} for _ in step.outputs]
            if step.bodies and step.name != "while":
                outputs = self._nested_origins(step, inputs)
            elif step.name in ("add", "sub", "add_any"):
                outputs = [_merge(inputs, adds=True)]
            elif step.name in ("mul", "div"):
                pairs = zip(inputs, reversed(is_small), strict=True)
                outputs = [_merge([x for x, decays in pairs if decays])]
            elif step.kind in PASSES:
                outputs = [_merge(inputs)] * len(step.outputs)
            if step.kind in PASSES and all(is_small):
                small.update(step.outputs)
            found |= zip(step.outputs, outputs, strict=True)
        self._origins[program] = [found.get(x, {}) for x in program.outputs]
        return self._origins[program]

    def _nested_origins(self, step, inputs):
        operands = inputs[1:] if step.name == "cond" else inputs

        def through(origin):
            return _merge(
                {k: before or added for k, before in operands[i].items()}
                for i, added in origin.items()
            )

        parts = [map(through, self._origins_of(body)) for body in step.bodies]
        return [_merge(x) for x in zip(*parts, strict=True)]

    def _wanted(self, program, outputs):
        """Finds what only operations in float32 read.

        Args:
          program: The program.
          outputs: For each of its results, whether only such operations read it.

        Returns:
          The names, and whether the arguments are among them.
        """
        key = program, outputs
        if key in self._wants:
            return self._wants[key]
        wants: dict[Atom, bool] = {}

        def note(atoms, wanted):
            for atom, is_wanted in zip(atoms, wanted, strict=True):
                wants[atom] = wants.get(atom, True) and is_wanted

        note(program.outputs, outputs)
        reads = itertools.chain(program.outputs, *(x.inputs for x in program.steps))
        count = collections.Counter(x for x in reads if isinstance(x, int))
        for step in reversed(program.steps):
            found = [wants.get(x, False) for x in step.outputs]
            if step.bodies:
                note(step.inputs, self._nested_wants(step, found))
            elif self._is_float32(step) or step.kind == Kind.FLOAT32:
                note(step.inputs, [True] * len(step.inputs))
            elif step.kind in (Kind.MOVE, Kind.SPREAD):
                note(step.inputs, [any(found)] * len(step.inputs))
            elif step.kind == Kind.ARITHMETIC:
                # Not through the adds of a residual stream, which others read as well.
                note(step.inputs, [any(found) and count[x] == 1 for x in step.inputs])
            else:
                note(step.inputs, [False] * len(step.inputs))
        names = {k for k, x in wants.items() if x and isinstance(k, int)}
        self._wants[key] = names, tuple(x in names for x in program.inputs)
        return self._wants[key]

    def _nested_wants(self, step, found):
        if step.name == "while":
            return [False] * len(step.inputs)
        if step.name != "scan":
            wants = [self._wanted(x, tuple(found))[1] for x in step.bodies]
            joined = [all(x) for x in zip(*wants, strict=True)]
            return [False, *joined] if step.name == "cond" else joined
        consts, carry, xs = flow.scan_parts(step.equation, step.inputs)
        n = len(carry)
        _, wants = self._wanted(step.bodies[0], (*[False] * n, *found[n:]))
        consts, _, xs = flow.scan_parts(step.equation, wants)
        return [*consts, *[False] * n, *xs]


def is_float32(x: Any) -> bool:
    """Whether an array, or its type, is float32."""
    return str(getattr(x, "dtype", "")) == "float32"


def _join(parts):
    """Returns the larger of the states of several programs."""
    return [None if None in x else max(x) for x in zip(*map(list, parts), strict=True)]


def _merge(origins, adds=False):
    found: dict[int, bool] = {}
    for origin in origins:
        for i, added in origin.items():
            found[i] = found.get(i, False) or added or adds
    return found
