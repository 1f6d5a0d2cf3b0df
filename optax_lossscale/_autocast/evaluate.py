"""Runs a program in the dtypes that its plan says."""

import contextvars
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.source_info_util import current_name_stack, user_context

from optax_lossscale._autocast import islands, rules
from optax_lossscale._autocast.islands import Island
from optax_lossscale._autocast.policy import State
from optax_lossscale._autocast.program import Atom, Kind, Known, Reader, Step
from optax_lossscale._autocast.states import Plan, Planner, States, is_float32
from optax_lossscale._jaxprs import flow, parts

# They broadcast operands by themselves, and their derivatives add up in half precision.
BROADCASTING = ("add", "sub", "mul", "div", "max", "min", "clamp")
FLOAT32 = jnp.dtype(jnp.float32)
# Whether a program casts its constants, so that diagnostics see their float32 numbers.
SHOWS = contextvars.ContextVar("shows_constants", default=False)


class Evaluator:
    """Runs programs.

    Attributes:
      dtype: The dtype to compute in.
      planner: Plans the programs.
      reader: Makes programs of jaxprs.
    """

    def __init__(self, dtype: Any, planner: Planner, reader: Reader):
        """Takes the attributes."""
        self.dtype, self.planner, self.reader = jnp.dtype(dtype), planner, reader

    def hold(self, x: Any, state: State | None) -> Any:
        """Casts a number to the dtype of its state."""
        return x if state is None else _cast(x, self.dtype_of(state))

    def dtype_of(self, state: State | None) -> Any:
        """Returns the dtype of a float32 number in a state."""
        return self.dtype if state == State.HALF else FLOAT32

    def run(
        self,
        plan: Plan,
        args: Sequence[Any],
        outputs: States | None = None,
        *,
        is_saved: bool = False,
    ) -> list[Any]:
        """Runs a program.

        Args:
          plan: Its plan.
          args: Its arguments, in float32 or half precision.
          outputs: The states of the results; those of the plan if None.
          is_saved: Whether a backward pass would read what it saves: not so where the
            user lets it compute all again, or wrote the derivative.
        """
        run, program = _Run(self, plan, is_saved), plan.program
        for name, x in program.consts.items():
            run.values[name] = self.hold(x, plan.states.get(name))
        for name, x, state in zip(program.inputs, args, plan.inputs, strict=True):
            if isinstance(name, int):
                run.values[name] = self.hold(x, state)
        run.follow(islands.schedule(plan) if is_saved else program.steps)
        outputs = plan.outputs if outputs is None else outputs
        return list(map(run.held, program.outputs, outputs))


class _Run:
    """One run of a program."""

    def __init__(self, evaluator: Evaluator, plan: Plan, is_saved: bool):
        self.evaluator, self.plan, self.is_saved = evaluator, plan, is_saved
        self.values: dict[Atom, Any] = {}
        self._casts: dict[tuple[Atom, Any], Any] = {}

    def read(self, atom: Atom, dtype: Any) -> Any:
        """Returns an operand of a primitive, in a dtype if it is float32."""
        if isinstance(atom, Known):
            number = atom.value
            if not is_float32(number):
                return number
            if SHOWS.get():  # JAX would round it while tracing.
                return _cast(jax.lax.optimization_barrier(number), dtype)
            return number.astype(dtype)
        x = self.values[atom]
        if atom not in self.plan.states or x.dtype == dtype:
            return x
        key = atom, dtype
        if key not in self._casts:
            self._casts[key] = _cast(x, dtype)
        return self._casts[key]

    def held(self, atom: Atom, state: State | None) -> Any:
        """Returns an operand as an array, in the dtype of a state."""
        x = self.read(atom, self.evaluator.dtype_of(state))
        return jnp.asarray(x) if isinstance(atom, Known) else x

    def follow(self, steps: Iterable[Step | Island]) -> None:
        """Runs steps."""
        for step in steps:
            if isinstance(step, Island):
                self._cross(step)
                continue
            names = current_name_stack() + step.scope
            with user_context(step.equation.source_info.traceback, name_stack=names):
                self.values.update(zip(step.outputs, self.step(step), strict=True))

    def _cross(self, island):
        """Runs an island."""

        def function(values):
            run = _Run(self.evaluator, self.plan, False)
            run.values.update(zip(island.inputs, values, strict=True))
            run.follow(island.steps)
            return [run.values[x] for x in island.outputs]

        function = jax.checkpoint(function, prevent_cse=False)
        found = function([self.values[x] for x in island.inputs])
        self.values.update(zip(island.outputs, found, strict=True))

    def step(self, step: Step) -> list[Any]:
        """Returns the results of a step."""
        if step.bodies:
            return NESTED.get(step.name, _run_jit)(self, step)
        states = [self.plan.states.get(x) for x in step.outputs]
        is_half = State.HALF in states
        equation, dtype = step.equation, self.evaluator.dtype_of(max_state(states))
        if step.name == "convert_element_type" and step.kind == Kind.MOVE:
            return [self.read(step.inputs[0], dtype)]
        if not is_half or (step.kind == Kind.SPREAD and _spreads(equation)):
            args = [self.read(x, FLOAT32) for x in step.inputs]
            return list(map(self.evaluator.hold, parts.bind(equation, args), states))
        pairs = zip(step.inputs, equation.invars, strict=True)
        shape = equation.outvars[0].aval.shape if step.name in BROADCASTING else None
        args = [self._broadcast(k, x.aval, shape) for k, x in pairs]
        params = equation.params
        if params.get("preferred_element_type") is not None:
            params = params | {"preferred_element_type": dtype}
        return parts.bind(equation, args, params)

    def _broadcast(self, atom, aval, shape):
        """Reads an operand in half precision; of the shape of the result, if given.

        It is broadcast in float32, since its derivative is a sum.
        """
        if shape in (None, aval.shape) or isinstance(atom, Known):
            return self.read(atom, self.evaluator.dtype)
        wide = jnp.broadcast_to(self.read(atom, FLOAT32), shape)
        return _cast(wide, self.evaluator.dtype)

    def body(self, step: Step, index: int, outputs: States | None = None) -> Callable:
        """Returns a program in a step as a function."""
        plan = self.plan.bodies[step][index]
        is_saved = self.is_saved and step.name not in ("remat2", "while")
        return lambda *args: self.evaluator.run(plan, args, outputs, is_saved=is_saved)

    def arguments(self, step: Step) -> list[Any]:
        """Returns the operands of a call as arrays."""
        return [self.held(*x) for x in zip(step.inputs, self.states(step), strict=True)]

    def states(self, step: Step) -> list[State | None]:
        """Returns the states of the operands of a step."""
        pairs = zip(step.inputs, step.equation.invars, strict=True)
        return [self.evaluator.planner.state(self.plan, k, x.aval) for k, x in pairs]

    def outputs(self, step: Step) -> States:
        """Returns the states of the results of a step."""
        return tuple(self.plan.states.get(x) for x in step.outputs)


def _run_cond(run: _Run, step: Step) -> list[Any]:
    index, *operands = run.arguments(step)
    outputs = run.outputs(step)
    bodies = [run.body(step, i, outputs) for i in range(len(step.bodies))]
    functions = [lambda x, body=body: body(*x) for body in bodies]
    return flow.switch(step.equation, index, functions, operands)


def _run_scan(run: _Run, step: Step) -> list[Any]:
    consts, carry, xs = flow.scan_parts(step.equation, step.inputs)
    outputs, (plan,) = run.outputs(step), run.plan.bodies[step]
    n = len(carry)
    body = run.body(step, 0, (*outputs[:n], *plan.outputs[n:]))
    # The derivative adds up over the iterations what the constants get: in float32.
    consts = [run.held(x, State.WIDE) for x in consts]
    carry = list(map(run.held, carry, outputs[:n]))
    _, _, states = flow.scan_parts(step.equation, run.states(step))
    xs = list(map(run.held, xs, states))

    def iterate(carry, x):
        found = body(*consts, *carry, *x)
        return found[:n], found[n:]

    carry, ys = flow.scan(step.equation, iterate, carry, xs)
    return [*carry, *ys]


def _run_while(run: _Run, step: Step) -> list[Any]:
    asked, consts, carry = flow.while_parts(step.equation, step.inputs)
    outputs = run.outputs(step)
    asked, consts = (
        [run.held(x, State.WIDE) for x in part] for part in (asked, consts)
    )
    condition, body = run.body(step, 0), run.body(step, 1, outputs)
    return jax.lax.while_loop(
        lambda state: condition(*asked, *state)[0],
        lambda state: body(*consts, *state),
        list(map(run.held, carry, outputs)),
    )


def _run_shard_map(run: _Run, step: Step) -> list[Any]:
    specs, axes = step.equation.params["in_specs"], parts.manual_axes(step.equation)
    args = []
    for atom, state, spec in zip(step.inputs, run.states(step), specs, strict=True):
        # Where devices have the same array, its derivative is a sum over them.
        is_split = set(jax.tree.leaves(tuple(spec))) >= set(axes)
        args.append(run.held(atom, state if is_split else State.WIDE))
    outputs = list(step.equation.params["out_specs"])
    return flow.shard_map(step.equation, run.body(step, 0), tuple(specs), outputs)(
        *args
    )


def _run_checkpoint(run: _Run, step: Step) -> list[Any]:
    options = {x: step.equation.params[x] for x in ("prevent_cse", "policy")}
    return jax.checkpoint(run.body(step, 0), **options)(*run.arguments(step))


def _run_jit(run: _Run, step: Step) -> list[Any]:
    names = "in_shardings", "out_shardings"
    shardings = {x: step.equation.params[x] for x in names}
    body = run.body(step, 0)
    return list(jax.jit(lambda *x: tuple(body(*x)), **shardings)(*run.arguments(step)))


def _run_custom(run: _Run, step: Step) -> list[Any]:
    make = rules.custom_jvp if step.name == "custom_jvp_call" else rules.custom_vjp
    (plan,) = run.plan.bodies[step]
    function = make(run.evaluator, step, plan, run.states(step))
    args = zip(step.inputs, run.arguments(step), strict=True)
    return function(*(x for atom, x in args if isinstance(atom, int)))


NESTED = {
    "cond": _run_cond,
    "scan": _run_scan,
    "while": _run_while,
    "shard_map": _run_shard_map,
    "remat2": _run_checkpoint,
    "custom_jvp_call": _run_custom,
    "custom_vjp_call": _run_custom,
}


def max_state(states: Sequence[State | None]) -> State | None:
    """Returns the largest state."""
    return max((x for x in states if x is not None), default=None)


def _cast(x: Any, dtype: Any) -> Any:
    return x if x.dtype == dtype else jax.lax.convert_element_type(x, dtype)


def _spreads(equation: Any) -> bool:
    """Whether it may bring a number to several places."""
    is_broadcast = equation.primitive.name == "broadcast_in_dim"
    sizes = [np.prod(x.aval.shape) for x in (equation.invars[0], equation.outvars[0])]
    return not is_broadcast or sizes[0] != sizes[1]
