"""Which numbers of a program are held in half precision, and which in float32."""

import collections
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from optax_lossscale._autocast import policy
from optax_lossscale._autocast.policy import State
from optax_lossscale._autocast.program import Program, Step
from optax_lossscale._jaxprs import primitives
from optax_lossscale._jaxprs.primitives import Kind

States = tuple[State | None, ...]
# Calls that save nothing of their own, so that a number may be cast before it enters.
CAST_BEFORE = primitives.names_of(Kind.CALL) - {"remat2"}


@dataclasses.dataclass(eq=False)
class Plan:
    """The states of a program.

    Attributes:
      program: The program.
      states: By variable, the states of all numbers; None for what is not float32.
      inputs: The states of its arguments; None for what is not float32.
      outputs: The states of its results.
      operands: By step, the states of its operands.
      bodies: By step, the plans of the programs in it.
    """

    program: Program
    states: dict[Any, State | None]
    inputs: States
    outputs: States = ()
    operands: dict[Step, Sequence[State | None]] = dataclasses.field(
        default_factory=dict
    )
    bodies: dict[Step, tuple["Plan", ...]] = dataclasses.field(default_factory=dict)

    def is_read_wide(self, variable: Any) -> bool:
        """Whether a step, or perhaps a call in it, reads an argument in float32."""
        steps = [x for x in self.program.steps if variable in x.inputs]
        return any(
            step.bodies or self.states[x] == State.WIDE
            for step in steps
            for x in step.equation.outvars
        )


class Planner:
    """Plans programs; remembers what it found, so that nested loops cost nothing.

    Attributes:
      dtype: The dtype to compute in.
      functions: What JAX is to trace once, however often the program calls it.
    """

    def __init__(self, dtype: Any, is_chosen: Callable[[Step], bool]):
        """Takes the dtype, and whether the user wants a step in float32."""
        self.dtype, self._is_chosen = dtype, is_chosen
        self.functions: dict[Any, Callable[..., Any]] = {}
        self._plans: dict[Any, Plan] = {}
        self._wants: dict[Any, set[Any]] = {}
        self._found: dict[Any, set[Any]] = {}

    def plan(self, program: Program, inputs: States, wanted: Sequence[bool]) -> Plan:
        """Returns the states of a program.

        Args:
          program: The program.
          inputs: The states of its arguments.
          wanted: For each result, whether all that read it compute in float32.
        """
        key = program, inputs, tuple(wanted)
        if key not in self._plans:
            self._plans[key] = self._plan(*key)
        return self._plans[key]

    def _state(self, plan, atom):
        """Returns the state of an operand; None if it is not float32."""
        if not is_float32(atom.aval):
            return None
        if (number := plan.program.number(atom)) is not None:
            return policy.state_of_number(number, self.dtype)
        return plan.states[atom]

    def _plan(self, program, inputs, wanted):
        plan, jaxpr = Plan(program, {}, inputs), program.jaxpr
        arrays = [
            policy.state_of_array(x, self.dtype) if is_float32(x) else None
            for x in program.consts
        ]
        given = zip((*jaxpr.constvars, *jaxpr.invars), (*arrays, *inputs), strict=True)
        plan.states.update(given)
        wants, positions = self._wanted(program, wanted), self._positions(program)
        for step in program.steps:
            variables = step.equation.outvars
            is_wanted = [x in wants for x in variables]
            if step.name == "add":
                is_wanted = [is_wanted[0] or variables[0] in positions]
            states = [self._state(plan, x) for x in step.equation.invars]
            plan.operands[step] = states
            if step.bodies:
                found = self._nested(plan, step, states, is_wanted)
            elif step.is_parallel:
                pairs = zip(states, is_wanted, strict=True)
                found = [self._result(plan, step, [x], y) for x, y in pairs]
            else:
                found = [self._result(plan, step, states, any(is_wanted))]
                found *= len(variables)
            for variable, state in zip(variables, found, strict=True):
                plan.states[variable] = state if is_float32(variable.aval) else None
        self._widen(plan)
        plan.outputs = tuple(self._state(plan, x) for x in jaxpr.outvars)
        return plan

    def _widen(self, plan):
        """Holds numbers in float32 that nothing reads in half precision.

        It goes backward from what reads, up to the first add.
        """
        program = plan.program
        reads_half = set(program.outputs)
        for step in reversed(program.steps):
            found = [plan.states.get(x) for x in step.equation.outvars]
            is_alone = step.kind in policy.FOLLOWERS and len(found) == 1
            if is_alone and found == [State.HALF]:
                (variable,) = step.equation.outvars
                if variable not in reads_half:
                    plan.states[variable] = State.WIDE
                    # The adds of a residual stream before it stay as they are.
                    found = found if step.name == "add" else [State.WIDE]
            is_wide = all(x in (State.WIDE, None) for x in found)
            if step.bodies or step.kind == Kind.PRODUCT or not is_wide:
                reads_half.update(step.inputs)

    def _positions(self, program, arguments=None):
        """Returns numbers that are rounded, or less an argument or a constant.

        Args:
          program: The program.
          arguments: Which of its arguments are given; all if None.
        """
        if arguments is None:
            arguments = frozenset(program.jaxpr.invars)
        key = program, arguments
        if key in self._found:
            return self._found[key]
        given = {None, *program.numbers, *program.jaxpr.constvars}
        given.update(arguments)
        found: set[Any] = set()
        moves = Kind.MOVE, Kind.SPREAD
        for step in program.steps:
            if step.kind in moves and given.issuperset(step.inputs):
                given.update(step.equation.outvars)
        for step in reversed(program.steps):
            if step.name == "sub":
                atoms = step.equation.invars[::-1]
                for x, other, atom in zip(
                    step.inputs, step.inputs[::-1], atoms, strict=True
                ):
                    if other in given and program.number(atom) != 0:
                        found.add(x)
            elif step.name in policy.ROUNDINGS or (
                step.kind in moves and not found.isdisjoint(step.equation.outvars)
            ):
                found.update(step.inputs)
            elif primitives.kind_of(step.name) == Kind.CALL:
                ((body, reads),) = step.bodies
                pairs = list(zip(reads, body.jaxpr.invars, strict=True))
                passed = frozenset(x for i, x in pairs if step.inputs[i] in given)
                inner = self._positions(body, passed)
                found.update(step.inputs[i] for i, x in pairs if x in inner)
        return self._found.setdefault(key, found - {None})

    def _result(self, plan, step, states, is_wanted):
        """Returns the state of the results of a step without programs in it."""
        if self._is_chosen(step):
            return State.WIDE
        program = plan.program
        for variable in step.equation.outvars:
            if program.number(variable) is not None:
                return self._state(plan, variable)
        states = [x for x in states if x is not None]
        return policy.state_of_result(step.kind, states, is_wanted)

    def _nested(self, plan, step, states, wanted):
        """Plans the programs in a step, and returns the states of its results."""
        n = len(step.carry)
        wanted[:n] = [False] * n
        for i in step.carry:
            start = plan.program.number(step.equation.invars[i])
            body, reads = step.bodies[-1]
            variable = body.jaxpr.invars[list(reads).index(i)]
            may_add_up = policy.may_add_up(step.equation, start)
            if states[i] is not None and (
                may_add_up or variable in self._positions(body)
            ):
                states[i] = State.WIDE
        if step.name in CAST_BEFORE:
            ((body, _),) = step.bodies
            inner = self._wanted(body, tuple(wanted))
            for i, x in enumerate(body.jaxpr.invars):
                if x in inner and states[i] == State.HALF:
                    states[i] = State.WIDE
        while True:
            # The last is the body of a loop; the first may be its condition.
            plans = tuple(
                self.plan(x, tuple(states[i] for i in reads), wanted[: len(x.outputs)])
                for x, reads in step.bodies
            )
            results = [x.outputs for x in (plans[-1:] if n else plans)]
            found = [_largest(x) for x in zip(*results, strict=True)]
            before = [states[i] for i in step.carry]
            carry = [_largest(x) for x in zip(before, found[:n], strict=True)]
            if carry == before:
                plan.bodies[step] = plans
                return [*carry, *found[n:]]
            for i, state in zip(step.carry, carry, strict=True):
                states[i] = state

    def _wanted(self, program, outputs):
        """Returns what only operations in float32 read.

        Args:
          program: The program.
          outputs: For each of its results, whether only such operations read it.
        """
        key = program, outputs
        if key in self._wants:
            return self._wants[key]
        wants = collections.defaultdict(list)
        for variable, is_wanted in zip(program.outputs, outputs, strict=True):
            wants[variable].append(is_wanted)
        reads = itertools.chain(program.outputs, *(x.inputs for x in program.steps))
        count = collections.Counter(reads)
        for step in reversed(program.steps):
            found = [bool(wants[x]) and all(wants[x]) for x in step.equation.outvars]
            found[: len(step.carry)] = [False] * len(step.carry)
            for body, reads in step.bodies:
                inner = self._wanted(body, tuple(found[: len(body.outputs)]))
                for i, x in zip(reads, body.jaxpr.invars, strict=True):
                    wants[step.inputs[i]].append(x in inner and i not in step.carry)
            if not step.bodies:
                is_wide = self._is_chosen(step) or step.kind not in (
                    Kind.PRODUCT,
                    *policy.FOLLOWERS,
                )
                for i, x in enumerate(step.inputs):
                    # Not through the adds of a residual stream, which others read, too.
                    is_passed = step.kind != Kind.ARITHMETIC or count[x] == 1
                    is_read = found[i] if step.is_parallel else any(found)
                    is_passed &= step.kind in policy.FOLLOWERS and is_read
                    wants[x].append(is_wide or is_passed)
        return self._wants.setdefault(
            key, {k for k, x in wants.items() if x and all(x)}
        )


def is_float32(x: Any) -> bool:
    """Whether an array, or its type, is float32."""
    return str(getattr(x, "dtype", "")) == "float32"


def _largest(states):
    return None if None in states else max(states)
