"""Functions with derivatives of their own: `jax.custom_jvp` and `jax.custom_vjp`."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale._autocast.policy import State
from optax_lossscale._autocast.program import Known, Step
from optax_lossscale._autocast.states import Plan, States
from optax_lossscale._jaxprs import parts
from optax_lossscale._tree import is_inexact


class _Call:
    """A call of such a function. Numbers among its operands take no part."""

    def __init__(self, evaluator: Any, step: Step, plan: Plan, states: Sequence[Any]):
        self._evaluator, self.step, self.plan = evaluator, step, plan
        pairs = zip(step.inputs, step.equation.invars, states, strict=True)
        taken = [(x.aval, state) for k, x, state in pairs if isinstance(k, int)]
        self.states = [state for _, state in taken]
        self.chosen = [i for i, (x, _) in enumerate(taken) if is_inexact(x)]
        self.results = [
            i for i, x in enumerate(step.equation.outvars) if is_inexact(x.aval)
        ]

    def full(self, args: Sequence[Any]) -> list[Any]:
        """Returns the operands, with the numbers among them."""
        rest = iter(args)
        atoms = self.step.inputs
        return [x.value if isinstance(x, Known) else next(rest) for x in atoms]

    def primal(self, *args: Any) -> list[Any]:
        """Runs the function without its derivative."""
        return self._evaluator.run(self.plan, self.full(args))

    def written(self, args: Sequence[Any]) -> Callable[..., Any]:
        """Returns the function as it is written, of its floating-point arguments.

        It returns floating-point results, and the others.
        """

        def function(*floats):
            given = dict(enumerate(args)) | dict(zip(self.chosen, floats, strict=True))
            found = parts.bind(self.step.equation, self.full(list(given.values())))
            others = [x for i, x in enumerate(found) if i not in self.results]
            return [found[i] for i in self.results], others

        return function

    def join(self, floats: Sequence[Any], others: Any) -> list[Any]:
        """Puts floating-point results and others in their places."""
        numbers, rest = iter(floats), iter(others)
        count = range(len(self.step.outputs))
        return [next(numbers if i in self.results else rest) for i in count]

    def run(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        states: Sequence[State | None],
        outputs: Callable[[States], States],
    ) -> tuple[list[Any], States]:
        """Runs a function, written for float32, as the policy says.

        Args:
          function: The function.
          args: Its arguments.
          states: Their states.
          outputs: Maps the states of its results to those to return them in.
        """
        evaluator = self._evaluator
        pairs = zip(args, states, strict=True)
        closed = jax.make_jaxpr(function)(*(_type_of(x, state) for x, state in pairs))
        program = evaluator.reader.read(closed, (), self.step)
        wanted = [False] * len(program.outputs)
        plan = evaluator.planner.plan(program, tuple(states), wanted)
        wished = outputs(plan.outputs)
        return evaluator.run(plan, args, wished), wished


def custom_jvp(*about: Any) -> Callable[..., list[Any]]:
    """Returns a function with the rule of a `jax.custom_jvp`.

    Args:
      *about: An evaluator, the step, its plan and the states of its operands.
    """
    call = _Call(*about)
    states = [call.states[i] for i in call.chosen]

    def rule(primals, tangents):
        tangents = [tangents[i] for i in call.chosen]

        def function(*args):
            args, tangents = args[: len(primals)], list(args[len(primals) :])
            floats = [args[i] for i in call.chosen]
            return jax.jvp(call.written(args), floats, tangents, has_aux=True)

        n = len(call.results)
        kept = [call.plan.outputs[i] for i in call.results]
        found, _ = call.run(
            function,
            [*primals, *tangents],
            [*call.states, *states],
            lambda outputs: (*kept, *kept, *outputs[2 * n :]),
        )
        values = call.join(found[:n], found[2 * n :])
        zeros = [np.zeros(x.shape, jax.dtypes.float0) for x in found[2 * n :]]
        return values, call.join(found[n : 2 * n], zeros)

    function = jax.custom_jvp(call.primal)
    function.defjvp(rule)
    return function


def custom_vjp(*about: Any) -> Callable[..., list[Any]]:
    """Returns a function with the rule of a `jax.custom_vjp`; see `custom_jvp`."""
    call = _Call(*about)
    kept = [call.plan.outputs[i] for i in call.results]
    known: list[Any] = []

    def forward(*args):
        def function(*args):
            floats = [args[i] for i in call.chosen]
            out, backward, others = jax.vjp(call.written(args), *floats, has_aux=True)
            residuals, treedef = jax.tree.flatten(backward)
            known[:] = treedef, len(others)
            return out, others, residuals

        found, states = call.run(
            function, args, call.states, lambda x: (*kept, *x[len(kept) :])
        )
        n, m = len(kept), len(call.step.outputs)
        known.append(states[m:])
        return call.join(found[:n], found[n:m]), found[m:]

    def backward(residuals, cotangents):
        treedef, _, states = known
        cotangents = [cotangents[i] for i in call.results]

        def function(*args):
            residuals, out = args[: len(states)], args[len(states) :]
            return jax.tree.unflatten(treedef, residuals)(list(out))

        wished = tuple(call.states[i] for i in call.chosen)
        args = [*residuals, *cotangents]
        found, _ = call.run(function, args, [*states, *kept], lambda _: wished)
        grads = dict(zip(call.chosen, found, strict=True))
        return tuple(grads.get(i) for i in range(len(call.states)))

    function = jax.custom_vjp(call.primal)
    function.defvjp(forward, backward)
    return function


def _type_of(x: Any, state: State | None) -> Any:
    """Returns the type that an array has in float32."""
    found = jax.typeof(x)
    return found if state is None else found.update(dtype=jnp.dtype(jnp.float32))
