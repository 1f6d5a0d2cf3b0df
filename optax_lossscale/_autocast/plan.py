"""Which numbers of a program are held in half precision, and which in float32."""

import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

from optax_lossscale._autocast import policy
from optax_lossscale._autocast.layers import Layers
from optax_lossscale._autocast.policy import State, is_float32
from optax_lossscale._autocast.program import Program, Step
from optax_lossscale._jaxprs import primitives
from optax_lossscale._jaxprs.primitives import Kind, Trait

States = tuple[State | None, ...]
# Calls that save nothing of their own, so that a number may be cast before it enters.
CAST_BEFORE = primitives.names_of(Kind.CALL) - {"remat2"}


@dataclasses.dataclass(eq=False)
class Plan:
    """The states of a program.

    Attributes:
      layers: The layers of the program.
      states: By variable, the states of all numbers; None for what is not float32.
      inputs: The states of its arguments; None for what is not float32.
      outputs: The states of its results.
      operands: By step with programs in it, the states of its operands.
      bodies: By step, the plans of the programs in it.
      rounded: The steps that compute in float32, and whose results only products read.
    """

    layers: Layers
    states: dict[Any, State | None]
    inputs: States
    outputs: States = ()
    operands: dict[Step, States] = dataclasses.field(default_factory=dict)
    bodies: dict[Step, tuple["Plan", ...]] = dataclasses.field(default_factory=dict)
    rounded: set[Step] = dataclasses.field(default_factory=set)

    @property
    def program(self) -> Program:
        """The program."""
        return self.layers.program

    @functools.cached_property
    def read_wide(self) -> set[Any]:
        """The variables that a step, or perhaps a call in it, reads in float32."""
        return {
            variable
            for step in self.program.steps
            for x in step.equation.outvars
            if step.bodies or self.states[x] == State.WIDE
            for variable in step.inputs
        }


class Planner:
    """Plans programs; remembers the plans, so that nested loops cost nothing.

    A wish says how a number is read. WIDE: all that read it compute in float32. HALF:
    only products read it, directly or through moves. Moves round nothing, so it may be
    rounded before them. None: otherwise.

    Attributes:
      dtype: The dtype to compute in.
      functions: The functions of plans; JAX traces each once.
      plan: Returns the plan of a program, for the states of its arguments, and the
        wishes for its results.
    """

    def __init__(self, dtype: Any, is_chosen: Callable[[Step], bool]):
        """Takes the dtype, and whether the user wants a step in float32."""
        self.dtype, self._is_chosen = dtype, is_chosen
        self.functions: dict[Any, Callable[..., Any]] = {}
        self.plan: Callable[[Layers, States, States], Plan]
        self.plan = functools.cache(self._plan)
        self._wishes = functools.cache(self._find_wishes)

    def _state(self, plan, atom) -> Any:
        """Returns the state of an operand; None if it is not float32."""
        if not is_float32(atom.aval):
            return None
        if (number := plan.program.number(atom)) is not None:
            return policy.state_of_number(number, self.dtype)
        return plan.states[atom]

    def _plan(self, layers, inputs, wishes):
        program = layers.program
        plan, jaxpr = Plan(layers, {}, inputs), program.jaxpr
        arrays = [State.WIDE if is_float32(x) else None for x in program.consts]
        given = zip((*jaxpr.constvars, *jaxpr.invars), (*arrays, *inputs), strict=True)
        plan.states.update(given)
        wish_for = self._wishes(layers, wishes)
        for step in program.steps:
            atoms, variables = step.equation.invars, step.equation.outvars
            wished = [wish_for[x] for x in variables]
            if step.bodies:
                states = self._nested(plan, step, wished)
            elif step.is_parallel:
                pairs = zip(atoms, wished, strict=True)
                states = [self._result(plan, step, [x], wish) for x, wish in pairs]
            else:
                states = [self._result(plan, step, atoms, _common(wished))]
                states *= len(variables)
            for variable, state in zip(variables, states, strict=True):
                plan.states[variable] = state if is_float32(variable.aval) else None
        outputs = [self._state(plan, x) for x in jaxpr.outvars]
        pairs = zip(outputs, wishes, strict=True)
        plan.outputs = tuple(
            wish if wish == State.HALF and x is not None else x for x, wish in pairs
        )
        return plan

    def _result(self, plan, step, atoms, wish):
        """Returns the state of the results of a step without programs in it."""
        program = plan.program
        if self._is_chosen(step) or not step.equation.outvars:
            return State.WIDE
        result = step.equation.outvars[0]
        if program.number(result) is not None:
            return self._state(plan, result)
        layer = plan.layers[step]
        states = [
            self._operand(plan, step, x)
            for x in atoms
            if is_float32(x.aval) and x is not layer.part
        ]
        if layer.is_norm:
            # Its steps compute in float32, and the last is rounded as its operand is.
            states = [max(State.HALF, plan.states[layer.operand])]
        state = policy.state_of_result(step.kind, states)
        if wish == State.WIDE and state == State.HALF and step.kind in policy.FOLLOWERS:
            # Otherwise it, or its gradient, would be rounded before it is added up: of
            # a cross entropy the two parts of the gradient, p and -1, are nearly each
            # other's opposite.
            return State.SOFT
        if wish == State.HALF != state and is_float32(result.aval):
            if step.kind not in (Kind.MOVE, Kind.SPREAD):
                plan.rounded.add(step)
                return State.HALF
            return State.HALF if State.HALF in states else state
        return state

    def _operand(self, plan, step, atom):
        """Returns the state of an operand. In a sum, a filled array is an array."""
        number = plan.program.number(atom)
        # Flax subtracts zeros, which changes nothing.
        is_sum = step.has(Trait.PLUS) or (step.has(Trait.MINUS) and number != 0)
        is_filled = number is not None and atom.aval.shape
        return State.WIDE if is_sum and is_filled else self._state(plan, atom)

    def _nested(self, plan, step, wishes):
        """Plans the programs in a step, and returns the states of its results."""
        n = len(step.carry)
        wishes = [*[None] * n, *wishes[n:]]
        states = [self._state(plan, x) for x in step.equation.invars]
        for i in step.carry:
            if states[i] == State.SOFT:  # A state of a loop is no number.
                states[i] = State.WIDE
        bodies = plan.layers.bodies[step]
        for body, operands in bodies:
            program = body.program
            inner = self._wishes(body, tuple(wishes[: len(program.outputs)]))
            for i, x in zip(operands, program.jaxpr.invars, strict=True):
                if states[i] is None or i in step.carry:
                    continue
                if step.name in CAST_BEFORE and states[i] == State.HALF:
                    states[i] = State.SOFT if inner[x] == State.WIDE else State.HALF
                elif step.carry and inner[x] == State.HALF:
                    states[i] = State.HALF  # Cast once, before the loop.
        while True:
            plans = tuple(
                self.plan(
                    body,
                    tuple(states[i] for i in operands),
                    tuple(wishes[: len(body.program.outputs)]),
                )
                for body, operands in bodies
            )
            # The last is the body of a loop; the first may be its condition.
            results = [x.outputs for x in (plans[-1:] if n else plans)]
            outputs = [_widest(x) for x in zip(*results, strict=True)]
            before = [states[i] for i in step.carry]
            carry = [_widest(x) for x in zip(before, outputs[:n], strict=True)]
            wide = [State.WIDE if x == State.WIDE else None for x in carry]
            if carry == before and wide == wishes[:n]:
                plan.operands[step], plan.bodies[step] = tuple(states), plans
                return [*carry, *outputs[n:]]
            wishes[:n] = wide  # What enters a float32 state is not rounded before.
            for i, state in zip(step.carry, carry, strict=True):
                states[i] = state

    def _find_wishes(self, layers, outputs):
        """Returns the wishes for the numbers of a program: a walk backward.

        Args:
          layers: The layers of the program.
          outputs: The wishes for its results.
        """
        program, wide = layers.program, self._wide_on_purpose(layers)
        given = itertools.chain(program.outputs, *(x.inputs for x in program.steps))
        count = collections.Counter(given)
        wishes = collections.defaultdict(list)
        for variable, wish in zip(program.outputs, outputs, strict=True):
            wishes[variable].append(wish)
        for step in reversed(program.steps):
            results = [_common(wishes[x]) for x in step.equation.outvars]
            results[: len(step.carry)] = [None] * len(step.carry)
            for body, operands in layers.bodies.get(step, ()):
                inside = body.program
                inner = self._wishes(body, tuple(results[: len(inside.outputs)]))
                for i, x in zip(operands, inside.jaxpr.invars, strict=True):
                    wish = None if i in step.carry else inner[x]
                    wishes[step.inputs[i]].append(wish)
            is_wide = self._is_wide(step) or layers[step].is_norm
            if step.kind == Kind.ARITHMETIC:
                is_wide |= not wide.isdisjoint(step.equation.outvars)
            for i, x in enumerate(() if step.bodies else step.inputs):
                result = results[i] if step.is_parallel else _common(results)
                # An add of a residual stream, which others read, too, stays as it is.
                is_alone = step.kind == Kind.SPREAD or count[x] == 1
                if is_wide or step.kind == Kind.PRODUCT:
                    wish = State.WIDE if is_wide else State.HALF
                elif step.kind == Kind.MOVE:
                    wish = result
                else:  # Gradients of what spreads are sums.
                    wish = result if result == State.WIDE and is_alone else None
                wishes[x].append(wish)
        common = {x: _common(wish) for x, wish in wishes.items()}
        return collections.defaultdict(type(None), common)

    def _wide_on_purpose(self, layers):
        """Returns the results that are float32 whatever the arguments are."""
        wide: set[Any] = set()
        for step in layers.program.steps:
            operand = layers[step].operand
            given = step.inputs if operand is None else [operand]
            begins = self._is_wide(step) and step.kind != Kind.BOUNDED
            follows = step.kind in policy.FOLLOWERS and not wide.isdisjoint(given)
            if not step.bodies and (begins or follows):
                wide.update(x for x in step.equation.outvars if is_float32(x.aval))
        return wide

    def _is_wide(self, step):
        """Whether a step computes in float32 whatever it reads."""
        kinds = Kind.PRODUCT, *policy.FOLLOWERS
        return self._is_chosen(step) or step.kind not in kinds


def _widest(states):
    return None if None in states else max(states)


def _common(wishes):
    return wishes[0] if wishes and len(set(wishes)) == 1 else None
