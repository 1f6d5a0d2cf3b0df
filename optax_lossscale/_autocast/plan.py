"""The plan of a program: which of its values are in half precision.

States go forward, from the operands of a step to its results: see `policy`. How the
readers of a value compute goes backward. It is known first, since no state decides it.
"""

import collections
import dataclasses
import enum
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from optax_lossscale._autocast import policy
from optax_lossscale._autocast.layers import Layers, find_layers
from optax_lossscale._autocast.policy import State, is_float32
from optax_lossscale._autocast.program import Program, Step, read
from optax_lossscale._autocast.roles import Role
from optax_lossscale._jaxprs import primitives
from optax_lossscale._jaxprs.primitives import Kind, Trait


class Readers(enum.Enum):
    """How all readers of a value compute.

    - PRODUCTS: Only products read it, directly or through moves. Moves round nothing,
      so it may be rounded before them.
    - FLOAT32: All that read it compute in float32.

    None stands for readers of several kinds, and for those that compute as the value
    is held.
    """

    PRODUCTS = enum.auto()
    FLOAT32 = enum.auto()


# None for a value that is not float32.
States = tuple[State | None, ...]
# By result of a program; None as `Readers` says.
AllReaders = tuple[Readers | None, ...]
# Calls that save nothing of their own, so that a value may be cast before it enters.
CAST_BEFORE = primitives.names_of(Kind.CALL) - {"remat2"}


@dataclasses.dataclass(eq=False)
class Plan:
    """The states of the values of a program.

    Attributes:
      layers: The layers of the program.
      states: By variable, its state; None if it is not float32.
      inputs: The states of the arguments.
      outputs: The states of the results.
      operands: By step with programs in it, the states of its operands.
      bodies: By step, the plans of the programs in it.
      rounded: The float32 steps whose results are rounded at once, because only
        products read them.
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

    @functools.cached_property
    def has_half_products(self) -> bool:
        """Whether a product computes in half precision, also in the programs in it."""
        steps = (x for x in self.program.steps if x.kind == Kind.PRODUCT)
        if any(self.states[x.equation.outvars[0]] == State.HALF for x in steps):
            return True
        bodies = itertools.chain.from_iterable(self.bodies.values())
        return any(x.has_half_products for x in bodies)


class Planner:
    """Plans programs; remembers the plans, so that nested loops cost nothing.

    Attributes:
      dtype: The dtype to compute in.
      functions: The functions of plans; JAX traces each once.
      plan: Returns the plan of a program with its layers, for the states of its
        arguments, and the readers of its results.
    """

    def __init__(self, dtype: Any, is_chosen: Callable[[Step], bool]):
        """Takes the dtype, and whether the user wants a step in float32."""
        self.dtype, self._is_chosen = dtype, is_chosen
        self.functions: dict[Any, Callable[..., Any]] = {}
        self.plan: Callable[[Layers, States, AllReaders], Plan]
        self.plan = functools.cache(self._plan)
        self._readers = functools.cache(self._find_readers)

    def state(self, plan: Plan, atom: Any) -> Any:
        """Returns the state of an operand; None if it is not float32."""
        if not is_float32(atom.aval):
            return None
        if (value := plan.program.known(atom)) is not None:
            return policy.state_of_constant(value, self.dtype)
        return plan.states[atom]

    def _plan(self, layers, inputs, readers):
        program = layers.program
        plan, jaxpr = Plan(layers, {}, inputs), program.jaxpr
        states = *map(state_of_array, jaxpr.constvars), *inputs
        given = zip((*jaxpr.constvars, *jaxpr.invars), states, strict=True)
        plan.states.update(given)
        readers_of = self._readers(layers, readers)
        for step in program.steps:
            atoms, variables = step.equation.invars, step.equation.outvars
            found = [readers_of[x] for x in variables]
            if step.bodies:
                states = self._nested(plan, step, found)
            elif step.is_parallel:
                pairs = zip(atoms, found, strict=True)
                states = [self._result(plan, step, [x], of_it) for x, of_it in pairs]
            else:
                states = [self._result(plan, step, atoms, _common(found))]
                states *= len(variables)
            for variable, state in zip(variables, states, strict=True):
                plan.states[variable] = state if is_float32(variable.aval) else None
        outputs = [self.state(plan, x) for x in jaxpr.outvars]
        pairs = zip(outputs, readers, strict=True)
        plan.outputs = tuple(
            State.HALF if of_it == Readers.PRODUCTS and state is not None else state
            for state, of_it in pairs
        )
        return plan

    def _result(self, plan, step, atoms, readers):
        """Returns the state of the results of a step without programs in it."""
        program = plan.program
        if self._is_chosen(step) or not step.equation.outvars:
            return State.WIDE
        result = step.equation.outvars[0]
        if program.known(result) is not None:
            return self.state(plan, result)
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
        is_half_follower = state == State.HALF and step.kind in policy.FOLLOWERS
        if readers == Readers.FLOAT32 and is_half_follower:
            # Otherwise it, or its gradient, would be rounded before it is added up: of
            # a cross entropy the two parts of the gradient, p and -1, are nearly each
            # other's opposite.
            return State.SOFT
        is_rounded = readers == Readers.PRODUCTS and is_float32(result.aval)
        if not is_rounded or state == State.HALF:
            return state
        if step.kind in (Kind.MOVE, Kind.SPREAD):
            return State.HALF if State.HALF in states else state
        plan.rounded.add(step)
        return State.HALF

    def _operand(self, plan, step, atom):
        """Returns the state of an operand. In a sum, a filled array is an array."""
        value = plan.program.known(atom)
        # Flax subtracts zeros, which changes nothing.
        is_sum = step.has(Trait.PLUS) or (step.has(Trait.MINUS) and value != 0)
        is_filled = value is not None and atom.aval.shape
        return State.WIDE if is_sum and is_filled else self.state(plan, atom)

    def _nested(self, plan, step, readers):
        """Plans the programs in a step, and returns the states of its results.

        The state of a loop is as wide after an iteration as before. So a loop is
        planned again, with the state that it returned, until it returns the same.
        """
        n = len(step.carry)
        others = readers[n:]
        states = self._operands(plan, step, [*[None] * n, *others])
        carry, of_carry = [states[i] for i in step.carry], [None] * n
        while True:
            plans = self._bodies(plan, step, states, [*of_carry, *others])
            # The last is the body of a loop; the first may be its condition.
            results = [x.outputs for x in (plans[-1:] if n else plans)]
            outputs = [_widest(x) for x in zip(*results, strict=True)]
            after = [_widest(x) for x in zip(carry, outputs[:n], strict=True)]
            # A float32 state is not rounded before it enters.
            of_next = [Readers.FLOAT32 if x == State.WIDE else None for x in after]
            if (after, of_next) == (carry, of_carry):
                plan.operands[step], plan.bodies[step] = tuple(states), plans
                return [*carry, *outputs[n:]]
            carry, of_carry = after, of_next
            for i, state in zip(step.carry, carry, strict=True):
                states[i] = state

    def _operands(self, plan, step, readers):
        """Returns the states of the operands of a step, where they enter its programs.

        Args:
          plan: The plan.
          step: The step.
          readers: The readers of its results; None for the state of a loop.
        """
        states = [self.state(plan, x) for x in step.equation.invars]
        for i in step.carry:
            if states[i] == State.SOFT:  # A loop may change it, so it gives no way.
                states[i] = State.WIDE
        for body, operands in plan.layers.bodies[step]:
            inside = self._readers_inside(body, readers)
            for i, of_it in zip(operands, inside, strict=True):
                if states[i] is None or i in step.carry:
                    continue
                if step.name in CAST_BEFORE and states[i] == State.HALF:
                    is_wide = of_it == Readers.FLOAT32
                    states[i] = State.SOFT if is_wide else State.HALF
                elif step.carry and of_it == Readers.PRODUCTS:
                    states[i] = State.HALF  # Cast once, before the loop.
        return states

    def _bodies(self, plan, step, states, readers):
        """Returns the plans of the programs in a step."""
        return tuple(
            self.plan(
                body,
                tuple(states[i] for i in operands),
                tuple(readers[: len(body.program.outputs)]),
            )
            for body, operands in plan.layers.bodies[step]
        )

    def _readers_inside(self, body, readers):
        """Returns the readers of the arguments of a program in a step.

        Args:
          body: The layers of the program.
          readers: The readers of the results of the step. Those of a program are the
            first: the condition of a loop returns one.
        """
        found = self._readers(body, tuple(readers[: len(body.program.outputs)]))
        return [found[x] for x in body.program.jaxpr.invars]

    def _find_readers(self, layers, outputs):
        """Returns, by variable of a program, how its readers compute: a walk backward.

        Args:
          layers: The layers of the program.
          outputs: The readers of its results.
        """
        program, wide = layers.program, self._wide_on_purpose(layers)
        given = itertools.chain(program.outputs, *(x.inputs for x in program.steps))
        count = collections.Counter(given)
        found = collections.defaultdict(list)
        for variable, of_it in zip(program.outputs, outputs, strict=True):
            found[variable].append(of_it)
        for step in reversed(program.steps):
            results = [_common(found[x]) for x in step.equation.outvars]
            results[: len(step.carry)] = [None] * len(step.carry)
            for body, operands in layers.bodies.get(step, ()):
                inside = self._readers_inside(body, results)
                for i, of_it in zip(operands, inside, strict=True):
                    found[step.inputs[i]].append(None if i in step.carry else of_it)
            is_wide = self._is_wide(step) or layers[step].is_norm
            if step.kind == Kind.ARITHMETIC:
                is_wide |= not wide.isdisjoint(step.equation.outvars)
            for i, x in enumerate(() if step.bodies else step.inputs):
                result = results[i] if step.is_parallel else _common(results)
                found[x].append(_as_reader(step, is_wide, count[x] == 1, result))
        common = {x: _common(of_it) for x, of_it in found.items()}
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


def _as_reader(
    step: Step, is_wide: bool, is_alone: bool, result: Readers | None
) -> Readers | None:
    """Returns how a step, a reader of an operand, computes.

    Args:
      step: The step, without programs in it.
      is_wide: Whether it computes in float32.
      is_alone: Whether nothing else reads the operand.
      result: The readers of its result.
    """
    if is_wide:
        return Readers.FLOAT32
    if step.kind == Kind.PRODUCT:
        return Readers.PRODUCTS
    if step.kind == Kind.MOVE:
        return result
    # A value with other readers keeps its dtype, as a residual stream does. But the
    # gradient of a broadcast is a sum, in float32.
    follows = is_alone or step.kind == Kind.SPREAD
    return Readers.FLOAT32 if follows and result == Readers.FLOAT32 else None


def plan_call(
    closed: Any, roles: tuple[Role, ...], dtype: Any, is_chosen: Callable | None = None
) -> tuple[Planner, Plan]:
    """Returns the plan of a function that is called, and the planner that made it.

    Args:
      closed: The jaxpr of the function. The caller reads its results in float32.
      roles: The roles of its arguments.
      dtype: The dtype to compute in.
      is_chosen: Whether the user wants a step in float32; None if none is wanted. Then
        it does not matter where each call stands: a function is read once.
    """
    inputs = tuple(map(state_of_array, closed.jaxpr.invars))
    states = map(state_of_array, closed.jaxpr.outvars)
    readers = tuple(None if x is None else Readers.FLOAT32 for x in states)
    program = read(closed, dtype, programs={} if is_chosen is None else None)
    planner = Planner(dtype, is_chosen or (lambda step: False))
    return planner, planner.plan(find_layers(program, roles, {}), inputs, readers)


def state_of_array(variable: Any) -> State | None:
    """Returns the state of an array of the user, or of a result that the user gets."""
    return State.WIDE if is_float32(variable.aval) else None


def _widest(states: Sequence[Any]) -> State | None:
    """Returns the widest state; None if the values are not float32."""
    return None if None in states else max(states)


def _common(readers: Sequence[Readers | None]) -> Readers | None:
    """Returns how all of the readers compute; None if they differ."""
    return readers[0] if readers and len(set(readers)) == 1 else None
