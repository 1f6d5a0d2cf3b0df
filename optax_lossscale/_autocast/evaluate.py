"""Evaluates a program in the dtypes that its plan says."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from optax_lossscale._autocast import policy
from optax_lossscale._autocast.custom_rules import CustomCall
from optax_lossscale._autocast.plan import Plan, Planner, States
from optax_lossscale._autocast.policy import State, is_float32
from optax_lossscale._autocast.program import Program, Step
from optax_lossscale._jaxprs import flow, parts
from optax_lossscale._jaxprs.primitives import Kind, Trait

FLOAT32 = jnp.dtype(jnp.float32)
# Whether a diagnosis traces the program. Then `autocast` casts constants in it, where
# the diagnosis sees their float32 values; it leaves casts for products without a line;
# and its results have the name MARK, or IDLE_MARK if it casts nothing. JAX's caches
# know this context: a program that was traced for a diagnosis is not trained, and the
# other way round. All diagnoses share what they trace.
DIAGNOSES = jax.make_user_context(default_value=False)
MARK = "optax_lossscale.autocast"
IDLE_MARK = f"{MARK} computes nothing"


def evaluate(
    planner: Planner,
    plan: Plan,
    args: Sequence[Any],
    outputs: States | None = None,
    *,
    is_saved: bool | None = False,
) -> list[Any]:
    """Returns the results of a program.

    Args:
      planner: The planner that made the plan.
      plan: The plan of the program.
      args: Its arguments, in float32 or half precision.
      outputs: The states of the results; those of the plan if None.
      is_saved: Whether the backward pass would read what the program saves: False where
        it recomputes everything, or where the user wrote the derivative. None in
        `jax.checkpoint`, where the user says what is saved.
    """
    outputs, program = plan.outputs if outputs is None else outputs, plan.program
    if is_saved and program.repeats:
        function = _function(planner, plan, outputs, is_saved=False)
        options = {"prevent_cse": False, "policy": policy.is_saved}
        return jax.checkpoint(function, **options)(*map(jnp.asarray, args))
    evaluator = _Evaluator(planner, plan, args, is_saved)
    for step in program.steps:
        evaluator.follow(step)
    return list(map(evaluator.held, program.jaxpr.outvars, outputs))


def _function(
    planner: Planner, plan: Plan, outputs: States, *, is_saved: bool | None
) -> Callable[..., list[Any]]:
    """Returns a program as a function: the same each time, so JAX traces it once."""

    def function(*args):
        return evaluate(planner, plan, args, outputs, is_saved=is_saved)

    return planner.functions.setdefault((plan, outputs, is_saved), function)


class _Evaluator:
    """The arrays of a program, and how they are computed.

    `follow` computes a step: by `bind`, or if there are programs in it, by the method
    that `NESTED` has for its primitive, else by `call`. These return the results.
    """

    def __init__(self, planner, plan, args, is_saved):
        self._planner, self._plan, self._is_saved = planner, plan, is_saved
        jaxpr = plan.program.jaxpr
        variables = (*jaxpr.constvars, *jaxpr.invars)
        arrays = (*plan.program.consts, *args)
        self._values: dict[Any, Any] = dict(zip(variables, arrays, strict=True))
        self._casts: dict[Any, Any] = {}

    def follow(self, step: Step) -> None:
        """Computes a step."""
        with parts.standing_like(step.equation):
            nested = NESTED.get(step.name, _Evaluator.call)
            results = (nested if step.bodies else _Evaluator.bind)(self, step)
            self._values.update(zip(step.equation.outvars, results, strict=True))

    def held(self, atom: Any, state: State | None) -> Any:
        """Returns an operand as an array; if it is float32, in the dtype of a state."""
        with _for_products(state == State.HALF):
            x = self._read(atom, state)
        return x if isinstance(x, jax.Ref) else jnp.asarray(x)

    def _read(self, atom, state):
        """Returns an operand; a known value is no array yet."""
        value = self._plan.program.scalar(atom)
        state = state if is_float32(atom.aval) else None
        if value is not None:
            # Without the barrier JAX would round it while tracing.
            if state is not None and DIAGNOSES.value and value == value:
                return self._cast(jax.lax.optimization_barrier(value), state)
            value = value if state is None else value.astype(self._dtype(state))
            python = value.item()  # weakly typed
            is_weak = atom.aval.weak_type and jax.typeof(python).dtype == value.dtype
            return python if is_weak else value
        x = atom.val if parts.is_literal(atom) else self._values[atom]
        if state is None or x.dtype == self._dtype(state):
            return x
        if atom not in self._casts:  # Cast once: it has one other dtype.
            self._casts[atom] = self._cast(x, state)
        return self._casts[atom]

    def _dtype(self, state):
        return jnp.dtype(self._planner.dtype) if state == State.HALF else FLOAT32

    def _cast(self, x, state):
        dtype = self._dtype(state)
        is_there = state is None or x.dtype == dtype
        return x if is_there else jax.lax.convert_element_type(x, dtype)

    def _states(self, step):
        """Returns the states of the results of a step."""
        return tuple(self._plan.states[x] for x in step.equation.outvars)

    def _operands(self, step):
        """Returns the operands of a step with programs in it as arrays."""
        return list(map(self.held, step.equation.invars, self._plan.operands[step]))

    def _body(self, step, index, outputs=None):
        """Returns a program in a step as a function; `outputs` are its states."""
        plan = self._plan.bodies[step][index]
        is_saved = self._is_saved and step.name != "while"
        if step.name == "remat2":
            is_saved = None
        outputs = plan.outputs if outputs is None else outputs
        return _function(self._planner, plan, outputs, is_saved=is_saved)

    def bind(self, step: Step) -> list[Any]:
        """Computes a step without programs in it."""
        states = self._states(step)
        if step.name == "convert_element_type" and step.kind == Kind.MOVE:
            return [self._converted(step.equation.invars[0], states[0])]
        is_rounded = step in self._plan.rounded
        is_wide = State.HALF not in states or self._plan.layers[step].is_norm
        if is_wide or is_rounded or _spreads(step, self._plan.program):
            return self._in_float32(step, states, is_rounded)
        return self._in_half(step, states)

    def _converted(self, atom, state):
        """Returns an array that is converted to float32, in the dtype of a state."""
        x = self.held(atom, state)
        if not atom.aval.weak_type or state == State.HALF:
            return x
        # The gradient of this cast is weakly typed, as without `autocast`.
        return jax.lax.convert_element_type(x, x.dtype)

    def _in_float32(self, step, states, is_rounded):
        """Computes a step in float32, and casts the results, perhaps for products."""
        with _for_products(True):
            inputs = [self._read(x, State.WIDE) for x in step.equation.invars]
        wide = parts.bind(step.equation, inputs)
        with _for_products(is_rounded):
            results = list(map(self._cast, wide, states))
        is_saved = self._is_saved is not None and step.kind == Kind.ARITHMETIC
        if is_saved and State.HALF in states and not is_rounded:
            # So that `policy.is_saved` saves it, and not the product, as large as it.
            return [checkpoint_name(x, "autocast") for x in results]
        return results

    def _in_half(self, step, states):
        """Computes a step in half precision."""
        equation, params = step.equation, step.equation.params
        if params.get("preferred_element_type") is not None:
            params = params | {"preferred_element_type": self._dtype(State.HALF)}
        inputs = equation.invars
        held = states if step.is_parallel else [State.HALF] * len(inputs)
        return parts.bind(equation, list(map(self._read, inputs, held)), params)

    def cond(self, step: Step) -> list[Any]:
        """Computes a branch."""
        index, *operands = self._operands(step)
        outputs = self._states(step)
        bodies = [self._body(step, i, outputs) for i in range(len(step.bodies))]
        functions = [lambda x, body=body: body(*x) for body in bodies]
        return flow.switch(step.equation, index, functions, operands)

    def scan(self, step: Step) -> list[Any]:
        """Computes a `scan`."""
        consts, carry, xs = flow.scan_parts(step.equation, step.equation.invars)
        states, _, inputs = flow.scan_parts(step.equation, self._plan.operands[step])
        outputs, (plan,) = self._states(step), self._plan.bodies[step]
        n = len(carry)
        body = self._body(step, 0, (*outputs[:n], *plan.outputs[n:]))
        casts = [
            self.held(x, state) if state == State.HALF else None
            for x, state in zip(consts, states, strict=True)
        ]
        # The gradient of a constant is a sum over the iterations: in float32.
        consts = [self.held(x, State.WIDE) for x in consts]
        carry = list(map(self.held, carry, outputs[:n]))
        xs = list(map(self.held, xs, inputs))

        def iterate(carry, x):
            pairs = zip(consts, casts, strict=True)
            given = [x if cast is None else _cast_before(x, cast) for x, cast in pairs]
            results = body(*given, *carry, *x)
            return results[:n], results[n:]

        carry, ys = flow.scan(step.equation, iterate, carry, xs)
        return [*carry, *ys]

    def while_loop(self, step: Step) -> list[Any]:
        """Computes a `while`."""
        equation, outputs = step.equation, self._states(step)
        asked, consts, carry = flow.while_parts(equation, equation.invars)
        asked, consts = (
            [self.held(x, State.WIDE) for x in part] for part in (asked, consts)
        )
        condition, body = self._body(step, 0), self._body(step, 1, outputs)
        return flow.while_loop(
            equation,
            lambda state: condition(*asked, *state)[0],
            lambda state: body(*consts, *state),
            list(map(self.held, carry, outputs)),
        )

    def shard_map(self, step: Step) -> list[Any]:
        """Computes a `jax.shard_map`."""
        equation, states = step.equation, self._plan.operands[step]
        specs, axes = tuple(equation.params["in_specs"]), parts.manual_axes(equation)
        args = []
        for x, state, spec in zip(equation.invars, states, specs, strict=True):
            # Where devices have the same array, its derivative is a sum over them.
            is_split = set(jax.tree.leaves(tuple(spec))) >= set(axes)
            args.append(self.held(x, state if is_split else State.WIDE))
        outputs = list(equation.params["out_specs"])
        return flow.shard_map(equation, self._body(step, 0), specs, outputs)(*args)

    def checkpoint(self, step: Step) -> list[Any]:
        """Computes a call under `jax.checkpoint`."""
        options = {x: step.equation.params[x] for x in ("prevent_cse", "policy")}
        return jax.checkpoint(self._body(step, 0), **options)(*self._operands(step))

    def custom(self, step: Step) -> list[Any]:
        """Computes a call of a function with a derivative of its own."""
        (plan,) = self._plan.bodies[step]
        call = CustomCall(evaluate, self._planner, step, plan)
        is_jvp = step.name == "custom_jvp_call"
        function = call.custom_jvp() if is_jvp else call.custom_vjp()
        return function(*self._operands(step))

    def call(self, step: Step) -> list[Any]:
        """Computes another call."""
        body, args = self._body(step, 0), self._operands(step)
        (plan,) = self._plan.bodies[step]
        for i, x in enumerate(plan.program.jaxpr.invars):
            # One cast for all calls, so that their gradients add up in float32.
            if plan.inputs[i] == State.HALF and x in plan.read_wide:
                args[i] = self.held(step.equation.invars[i], State.WIDE)
        params = step.equation.params
        if step.name == "program_order":  # It is about the equations of this body.
            closed = jax.make_jaxpr(body)(*args)
            return parts.bind(step.equation, args, params | {"call_jaxpr": closed})
        if "in_shardings" not in params:
            return body(*args)
        is_plain = not (parts.is_placed(step.equation) or plan.program.is_shared)
        # For diagnostics, a call has the line that an old jaxpr has not.
        if is_plain and not DIAGNOSES.value:
            return body(*args)
        before, after = params["in_shardings"], list(params["out_shardings"])
        return jax.jit(body, in_shardings=before, out_shardings=after)(*args)


NESTED = {
    "cond": _Evaluator.cond,
    "scan": _Evaluator.scan,
    "while": _Evaluator.while_loop,
    "shard_map": _Evaluator.shard_map,
    "remat2": _Evaluator.checkpoint,
    "custom_jvp_call": _Evaluator.custom,
    "custom_vjp_call": _Evaluator.custom,
}


@jax.custom_jvp
def _cast_before(_x, cast):
    """Returns `cast`, which was made of `_x` before; the gradient goes to `_x`."""
    return cast


@_cast_before.defjvp
def _(primals, tangents):
    return primals[1], tangents[0].astype(primals[1].dtype)


def _for_products(is_so: bool) -> Any:
    """A context manager: for diagnostics, casts for products have no line."""
    is_shown = is_so and DIAGNOSES.value
    return parts.standing(parts.nowhere()) if is_shown else contextlib.nullcontext()


def _spreads(step: Step, program: Program) -> bool:
    """Whether it may copy values to several places, so that its derivative is a sum."""
    inputs, result = step.equation.invars, step.equation.outvars[0].aval
    if step.has(Trait.ELEMENTWISE):
        # It broadcasts by itself, and its derivative would add up in half precision.
        arrays = (x for x in inputs if program.known(x) is None)
        return any(x.aval.shape != result.shape for x in arrays)
    is_reshape = step.name == "broadcast_in_dim" and inputs[0].aval.size == result.size
    return step.kind == Kind.SPREAD and not is_reshape
