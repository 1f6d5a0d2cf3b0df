"""Runs a program in the dtypes that its plan says."""

import contextlib
import contextvars
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from optax_lossscale._autocast import policy
from optax_lossscale._autocast.policy import State, is_float32
from optax_lossscale._autocast.program import Step
from optax_lossscale._autocast.rules import Call
from optax_lossscale._autocast.states import Plan, Planner, States
from optax_lossscale._jaxprs import flow, parts
from optax_lossscale._jaxprs.primitives import Kind, Trait

FLOAT32 = jnp.dtype(jnp.float32)
# A list while the diagnostics trace a program, else None. Then `autocast` casts
# constants in the program, where the trace sees their float32 values; it leaves casts
# for products without a line; and it appends the reason why it casts nothing, or "".
NOTES: contextvars.ContextVar[list[str] | None]
NOTES = contextvars.ContextVar("NOTES", default=None)


def run_plan(
    planner: Planner,
    plan: Plan,
    args: Sequence[Any],
    outputs: States | None = None,
    *,
    is_saved: bool | None = False,
) -> list[Any]:
    """Runs a program.

    Args:
      planner: What made the plan.
      plan: The plan of the program.
      args: Its arguments, in float32 or half precision.
      outputs: The states of the results; those of the plan if None.
      is_saved: Whether the backward pass would read what the program saves: not so
        where it computes all again, or where the user wrote the derivative. None in
        `jax.checkpoint`, where the user says what is saved.
    """
    outputs, program = plan.outputs if outputs is None else outputs, plan.program
    if is_saved and program.repeats:
        function = _function(planner, plan, outputs, is_saved=False)
        options = {"prevent_cse": False, "policy": policy.is_saved}
        return jax.checkpoint(function, **options)(*map(jnp.asarray, args))
    run = _Run(planner, plan, args, is_saved)
    for step in program.steps:
        run.follow(step)
    return list(map(run.held, program.jaxpr.outvars, outputs))


def _function(
    planner: Planner, plan: Plan, outputs: States, *, is_saved: bool | None
) -> Callable[..., list[Any]]:
    """Returns a program as a function: the same each time, so JAX traces it once."""

    def function(*args):
        return run_plan(planner, plan, args, outputs, is_saved=is_saved)

    return planner.functions.setdefault((plan, outputs, is_saved), function)


class _Run:
    """One run of a program."""

    def __init__(self, planner, plan, args, is_saved):
        self.planner, self.plan, self.is_saved = planner, plan, is_saved
        jaxpr = plan.program.jaxpr
        variables = (*jaxpr.constvars, *jaxpr.invars)
        arrays = (*plan.program.consts, *args)
        self._values: dict[Any, Any] = dict(zip(variables, arrays, strict=True))
        self._casts: dict[Any, Any] = {}

    def dtype_of(self, state: State | None) -> Any:
        """Returns the dtype of a float32 number in a state."""
        return jnp.dtype(self.planner.dtype) if state == State.HALF else FLOAT32

    def _cast(self, x, state):
        dtype = self.dtype_of(state)
        is_there = state is None or x.dtype == dtype
        return x if is_there else jax.lax.convert_element_type(x, dtype)

    def read(self, atom: Any, state: State | None) -> Any:
        """Returns an operand; if it is float32, in the dtype of a state."""
        number = self.plan.program.scalar(atom)
        state = state if is_float32(atom.aval) else None
        if number is not None:
            # Without the barrier JAX would round it while tracing.
            if state is not None and NOTES.get() is not None and number == number:
                return self._cast(jax.lax.optimization_barrier(number), state)
            number = number if state is None else number.astype(self.dtype_of(state))
            python = number.item()  # weakly typed
            is_weak = atom.aval.weak_type and jax.typeof(python).dtype == number.dtype
            return python if is_weak else number
        x = atom.val if parts.is_literal(atom) else self._values[atom]
        if state is None or x.dtype == self.dtype_of(state):
            return x
        if atom not in self._casts:  # Cast once: it has one other dtype.
            self._casts[atom] = self._cast(x, state)
        return self._casts[atom]

    def held(self, atom: Any, state: State | None) -> Any:
        """Returns an operand as an array, in the dtype of a state."""
        with _for_products(state == State.HALF):
            x = self.read(atom, state)
        return x if isinstance(x, jax.Ref) else jnp.asarray(x)

    def follow(self, step: Step) -> None:
        """Runs a step."""
        with parts.standing_like(step.equation):
            method = NESTED.get(step.name, _run_call) if step.bodies else _Run.bind
            results = zip(step.equation.outvars, method(self, step), strict=True)
            self._values.update(results)

    def bind(self, step: Step) -> list[Any]:
        """Returns the results of a step without programs in it."""
        equation, states = step.equation, self.outputs(step)
        inputs, params = equation.invars, equation.params
        if step.name == "convert_element_type" and step.kind == Kind.MOVE:
            x = self.held(inputs[0], states[0])
            is_weak = inputs[0].aval.weak_type and states[0] != State.HALF
            # The gradient of this cast is weakly typed, as without `autocast`.
            return [jax.lax.convert_element_type(x, x.dtype) if is_weak else x]
        is_rounded = step in self.plan.rounded
        is_wide = State.HALF not in states or self.plan.program.layers[step].is_norm
        if is_wide or is_rounded or _spreads(step):
            wide = parts.bind(equation, [self.read(x, State.WIDE) for x in inputs])
            with _for_products(is_rounded):
                results = list(map(self._cast, wide, states))
            is_named = self.is_saved is not None and step.kind == Kind.ARITHMETIC
            if is_named and State.HALF in states and not is_rounded:
                # `policy.is_saved`: saved in place of the product, which is as large.
                return [checkpoint_name(x, "autocast") for x in results]
            return results
        if params.get("preferred_element_type") is not None:
            params = params | {"preferred_element_type": self.dtype_of(State.HALF)}
        held = states if step.is_parallel else [State.HALF] * len(inputs)
        return parts.bind(equation, list(map(self.read, inputs, held)), params)

    def body(self, step: Step, index: int, outputs: States | None = None) -> Callable:
        """Returns a program in a step as a function."""
        plan = self.plan.bodies[step][index]
        is_saved = self.is_saved and step.name != "while"
        if step.name == "remat2":
            is_saved = None
        outputs = plan.outputs if outputs is None else outputs
        return _function(self.planner, plan, outputs, is_saved=is_saved)

    def arguments(self, step: Step) -> list[Any]:
        """Returns the operands of a call as arrays."""
        return list(map(self.held, step.equation.invars, self.plan.operands[step]))

    def outputs(self, step: Step) -> States:
        """Returns the states of the results of a step."""
        return tuple(self.plan.states.get(x) for x in step.equation.outvars)


def _run_cond(run: _Run, step: Step) -> list[Any]:
    index, *operands = run.arguments(step)
    outputs = run.outputs(step)
    bodies = [run.body(step, i, outputs) for i in range(len(step.bodies))]
    functions = [lambda x, body=body: body(*x) for body in bodies]
    return flow.switch(step.equation, index, functions, operands)


def _run_scan(run: _Run, step: Step) -> list[Any]:
    variables = step.equation.invars
    consts, carry, xs = flow.scan_parts(step.equation, variables)
    outputs, (plan,) = run.outputs(step), run.plan.bodies[step]
    n = len(carry)
    body = run.body(step, 0, (*outputs[:n], *plan.outputs[n:]))
    states, _, inputs = flow.scan_parts(step.equation, run.plan.operands[step])
    casts = [
        run.held(x, state) if state == State.HALF else None
        for x, state in zip(consts, states, strict=True)
    ]
    # The derivative adds up over the iterations what the constants get: in float32.
    consts = [run.held(x, State.WIDE) for x in consts]
    carry = list(map(run.held, carry, outputs[:n]))
    xs = list(map(run.held, xs, inputs))

    def iterate(carry, x):
        pairs = zip(consts, casts, strict=True)
        given = [x if cast is None else _cast_before(x, cast) for x, cast in pairs]
        results = body(*given, *carry, *x)
        return results[:n], results[n:]

    carry, ys = flow.scan(step.equation, iterate, carry, xs)
    return [*carry, *ys]


@jax.custom_jvp
def _cast_before(_x, cast):
    """Returns an array that was cast before; its derivative goes to what was cast."""
    return cast


@_cast_before.defjvp
def _(primals, tangents):
    return primals[1], tangents[0].astype(primals[1].dtype)


def _run_while(run: _Run, step: Step) -> list[Any]:
    asked, consts, carry = flow.while_parts(step.equation, step.equation.invars)
    outputs = run.outputs(step)
    asked, consts = (
        [run.held(x, State.WIDE) for x in part] for part in (asked, consts)
    )
    condition, body = run.body(step, 0), run.body(step, 1, outputs)
    return flow.while_loop(
        step.equation,
        lambda state: condition(*asked, *state)[0],
        lambda state: body(*consts, *state),
        list(map(run.held, carry, outputs)),
    )


def _run_shard_map(run: _Run, step: Step) -> list[Any]:
    equation, specs = step.equation, step.equation.params["in_specs"]
    axes, args = parts.manual_axes(equation), []
    for x, state, spec in zip(
        equation.invars, run.plan.operands[step], specs, strict=True
    ):
        # Where devices have the same array, its derivative is a sum over them.
        is_split = set(jax.tree.leaves(tuple(spec))) >= set(axes)
        args.append(run.held(x, state if is_split else State.WIDE))
    outputs = list(equation.params["out_specs"])
    return flow.shard_map(equation, run.body(step, 0), tuple(specs), outputs)(*args)


def _run_checkpoint(run: _Run, step: Step) -> list[Any]:
    options = {x: step.equation.params[x] for x in ("prevent_cse", "policy")}
    return jax.checkpoint(run.body(step, 0), **options)(*run.arguments(step))


def _run_call(run: _Run, step: Step) -> list[Any]:
    body, args = run.body(step, 0), run.arguments(step)
    (plan,) = run.plan.bodies[step]
    for i, x in enumerate(plan.program.jaxpr.invars):
        # One cast for all calls, so that their gradients add up in float32.
        if plan.inputs[i] == State.HALF and x in plan.read_wide:
            args[i] = run.held(step.equation.invars[i], State.WIDE)
    params = step.equation.params
    if step.name == "program_order":  # It is about the equations of this body.
        closed = jax.make_jaxpr(body)(*args)
        return parts.bind(step.equation, args, params | {"call_jaxpr": closed})
    if "in_shardings" not in params:
        return body(*args)
    before, after = params["in_shardings"], params["out_shardings"]
    is_plain = not (parts.is_placed(step.equation) or plan.program.is_shared)
    # For diagnostics, a call has the line that an old jaxpr has not.
    if is_plain and NOTES.get() is None:
        return body(*args)
    return jax.jit(body, in_shardings=before, out_shardings=list(after))(*args)


def _run_custom(run: _Run, step: Step) -> list[Any]:
    (plan,) = run.plan.bodies[step]
    call = Call(run_plan, run.planner, step, plan)
    is_jvp = step.name == "custom_jvp_call"
    return (call.custom_jvp() if is_jvp else call.custom_vjp())(*run.arguments(step))


NESTED = {
    "cond": _run_cond,
    "scan": _run_scan,
    "while": _run_while,
    "shard_map": _run_shard_map,
    "remat2": _run_checkpoint,
    "custom_jvp_call": _run_custom,
    "custom_vjp_call": _run_custom,
}


def _for_products(is_so: bool) -> Any:
    """A context manager: for diagnostics, casts have the line of what reads them."""
    is_shown = is_so and NOTES.get() is not None
    return parts.standing(parts.nowhere()) if is_shown else contextlib.nullcontext()


def _spreads(step: Step) -> bool:
    """Whether it may bring a number to several places, so that its derivative adds."""
    shape = step.equation.outvars[0].aval.shape
    shapes = [x.aval.shape for x in step.equation.invars]
    if step.has(Trait.ELEMENTWISE):
        # It broadcasts by itself, and its derivative would add up in half precision.
        return any(x not in ((), shape) for x in shapes)
    same_size = [np.prod(x) == np.prod(shape) for x in shapes]
    is_reshape = step.name == "broadcast_in_dim" and same_size[0]
    return step.kind == Kind.SPREAD and not is_reshape
