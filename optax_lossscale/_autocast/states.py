"""Which numbers of a program are held in half precision, and which in float32."""

import collections
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from optax_lossscale._autocast import policy
from optax_lossscale._autocast.policy import State
from optax_lossscale._autocast.program import Atom, Kind, Known, Program, Step

States = tuple[State | None, ...]


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
        self._wants: dict[Any, set[int]] = {}

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
        plan = Plan(program, inputs, {})
        plan.states.update(
            x for x in zip(program.inputs, inputs, strict=True) if x[1] is not None
        )
        for name, array in program.consts.items():
            if is_float32(array):
                plan.states[name] = policy.state_of_array(array, self._dtype)
        wants = self._wanted(program, tuple(wanted))
        for step in program.steps:
            pairs = zip(step.inputs, step.equation.invars, strict=True)
            states = [self.state(plan, k, x.aval) for k, x in pairs]
            if step.bodies:
                found = self._nested(plan, step, states, wants)
            else:
                found = [self._result(program, step, states, wants)] * len(step.outputs)
            results = zip(step.outputs, step.equation.outvars, found, strict=True)
            plan.states.update((k, x) for k, v, x in results if is_float32(v.aval))
        plan.outputs = tuple(
            self.state(plan, x, x.value) if isinstance(x, Known) else plan.states.get(x)
            for x in program.outputs
        )
        return plan

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
        return policy.state_of_result(
            step.kind, [x for _, x in pairs], is_mixed, is_wanted
        )

    def _nested(self, plan, step, states, wants):
        """Plans the programs in a step, and returns the states of its results."""
        n = len(step.carry)
        wanted = [x in wants for x in step.outputs]
        wanted[:n] = [False] * n
        for index, i in enumerate(step.carry):
            if states[i] is not None and self._adds_up(plan.program, step, index):
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

    def _adds_up(self, program, step, index):
        """Whether a part of a loop's state is a sum, and a long one or from zero on."""
        start = program.number(step.inputs[step.carry[index]])
        length = step.equation.params.get("length", policy.LONG_LOOP)
        if length < policy.LONG_LOOP and start != 0:
            return False
        body, reads = step.bodies[-1]
        reached = self._reached(body, body.inputs[reads.index(step.carry[index])])
        return reached.get(body.outputs[index], False)

    def _reached(self, program: Program, start: Atom) -> dict[Atom, bool]:
        """Returns what comes from a number by adding and moving; whether by adding."""
        reached = {start: False}
        for step in program.steps:
            hits = [i for i, x in enumerate(step.inputs) if x in reached]
            adds = step.name in ("add", "sub", "add_any")
            adds |= any(reached[step.inputs[i]] for i in hits)
            for body, reads in step.bodies:
                for i in set(hits).intersection(reads):
                    inner = self._reached(body, body.inputs[reads.index(i)])
                    for x, k in zip(step.outputs, body.outputs, strict=False):
                        if k in inner:
                            reached[x] = adds or inner[k]
            if hits and not step.bodies and policy.passes_sums_on(step, program, hits):
                reached.update((x, adds) for x in step.outputs)
        return reached

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
        for atom, is_wanted in zip(program.outputs, outputs, strict=True):
            wants[atom].append(is_wanted)
        reads = itertools.chain(program.outputs, *(x.inputs for x in program.steps))
        count = collections.Counter(x for x in reads if isinstance(x, int))
        for step in reversed(program.steps):
            found = [bool(wants[x]) and all(wants[x]) for x in step.outputs]
            found[: len(step.carry)] = [False] * len(step.carry)
            for body, reads in step.bodies:
                inner = self._wanted(body, tuple(found[: len(body.outputs)]))
                for i, x in zip(reads, body.inputs, strict=True):
                    wants[step.inputs[i]].append(x in inner and i not in step.carry)
            if not step.bodies:
                is_wide = self._is_float32(step) or step.kind == Kind.FLOAT32
                for x in step.inputs:
                    # Not through the adds of a residual stream, which others read, too.
                    is_passed = step.kind != Kind.ARITHMETIC or count[x] == 1
                    is_passed &= step.kind in policy.FOLLOWERS and any(found)
                    wants[x].append(is_wide or is_passed)
        names = {k for k, x in wants.items() if x and all(x) and isinstance(k, int)}
        return self._wants.setdefault(key, names)


def is_float32(x: Any) -> bool:
    """Whether an array, or its type, is float32."""
    return str(getattr(x, "dtype", "")) == "float32"


def _largest(states):
    return None if None in states else max(states)
