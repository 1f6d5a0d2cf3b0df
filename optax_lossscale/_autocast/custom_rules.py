"""Functions with derivatives of their own: `jax.custom_jvp` and `jax.custom_vjp`.

The function and its rule become programs in half precision, each with a plan:

    forward mode:  primals, tangents -> [rule] -> results, tangents of the results
    reverse mode:  primals -> [forward] -> results, residuals
                   residuals, cotangents -> [pull] -> gradients of the primals

Primals are the arguments. Residuals are the arrays that the forward pass saves for the
backward pass, as the plan of `forward` holds them: `pull` is planned for their states.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from itertools import compress
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.interpreters import ad
from jax.tree_util import Partial

from optax_lossscale._autocast.layers import find_layers
from optax_lossscale._autocast.plan import Plan, Planner, States
from optax_lossscale._autocast.program import Step, read
from optax_lossscale._autocast.roles import Role
from optax_lossscale._jaxprs import lines, parts
from optax_lossscale._tree import Template, is_inexact, split_arrays


class CustomCall:
    """A call of such a function. Also its derivatives follow the policy."""

    def __init__(self, evaluate: Callable, planner: Planner, step: Step, plan: Plan):
        """Takes `evaluate`, and its arguments for the function itself."""
        self._evaluate, self._planner = evaluate, planner
        self._step, self._plan = step, plan
        self._traceback = parts.here()  # JAX calls the rules later.
        self._known = list(map(plan.program.known, plan.program.jaxpr.invars))
        self._outputs = _floats(plan.outputs, step.equation.outvars)

    def _primal(self, *args):
        return self._evaluate(self._planner, self._plan, args)

    def _follow(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        states: States,
        outputs: States,
        known: Sequence[Any] = (),
    ) -> tuple[list[Any], States]:
        """Runs a function, written for float32, as the policy says.

        Args:
          function: The function.
          args: Its arguments.
          states: Their states.
          outputs: The states in which to return its first results.
          known: The values of the first arguments; None if they are unknown.

        Returns:
          The results, and the states of the others.
        """
        pairs = zip(map(jax.typeof, args), states, strict=True)
        types = [
            x if state is None else parts.type_like(x, dtype=jnp.dtype(jnp.float32))
            for x, state in pairs
        ]
        # JAX keeps this jaxpr, with its lines, also for other callers.
        with parts.standing(parts.nowhere()):
            closed = parts.traced(function, *types)
        if held := list(filter(parts.has_ended, closed.consts)):
            raise TypeError(_closure(self._step, held))
        program = read(closed, self._planner.dtype, known, self._step.path)
        # Nobody knows whether an argument of a function inside is a parameter.
        layers = find_layers(program, (Role.DATA,) * len(args), {})
        plan = self._planner.plan(layers, states, (None,) * len(program.outputs))
        others = plan.outputs[len(outputs) :]
        with parts.standing(self._traceback):
            given = self._planner, plan, args, (*outputs, *others)
            # It names nothing to save: JAX cannot transpose a name.
            return self._evaluate(*given, is_saved=None), others

    def custom_jvp(self) -> Callable[..., list[Any]]:
        """Returns the function with the rule of a `jax.custom_jvp`."""
        inputs, m = self._plan.inputs, len(self._plan.outputs)
        outputs = *self._plan.outputs, *self._outputs

        def rule(primals, tangents):
            is_moved = [not isinstance(x, SymbolicZero) for x in tangents]
            n, floats = len(inputs), Template(is_inexact)

            def function(*args):
                written, taken = written_of(self._step.equation, args[:n], is_moved)
                out, tangents = jax.jvp(written, tuple(taken), args[n:])
                return out, floats.take(tangents)

            args = [*primals, *compress(tangents, is_moved)]
            states = *inputs, *compress(inputs, is_moved)
            results, _ = self._follow(function, args, states, outputs, self._known)
            return results[:m], floats.fill(results[m:])

        function = jax.custom_jvp(self._primal)
        function.defjvp(rule, symbolic_zeros=True)
        return function

    def custom_vjp(self) -> Callable[..., list[Any]]:
        """Returns the function with the rule of a `jax.custom_vjp`."""
        inputs, outputs = self._plan.inputs, self._plan.outputs
        consts = count_closed_over(self._step.equation)

        def forward(*args):
            mask = [i >= consts and x.perturbed for i, x in enumerate(args)]
            args = [x.value for x in args]
            pullback = Template(lambda _: True)

            def function(*args):
                written, taken = written_of(self._step.equation, args, mask)
                out, pull = jax.vjp(written, *taken)
                return out, pullback.take(pull)

            known, n = self._known, len(outputs)
            results, states = self._follow(function, args, inputs, outputs, known)
            # A pytree, so that the states of the residuals stay with them.
            pull = functools.partial(self._pull, pullback, states, mask)
            return results[:n], Partial(pull, results[n:])

        def backward(pull, cotangents):
            return pull(cotangents)

        function = jax.custom_vjp(self._primal)
        function.defvjp(forward, backward, symbolic_zeros=True)
        return function

    def _pull(self, pullback, states, mask, residuals, cotangents):
        """Returns the gradients of the arguments; None for those outside of a mask."""
        taken, join = split_arrays(list(map(_array, cotangents)), is_inexact)
        n, floats = len(residuals), Template(is_inexact)

        def function(*args):
            return floats.take(pullback.fill(args[:n])(join(args[n:])))

        held, given = self._plan.inputs, self._step.equation.invars
        outputs = _floats(compress(held, mask), compress(given, mask))
        args, states = [*residuals, *taken], (*states, *self._outputs)
        grads, _ = self._follow(function, args, states, outputs)
        return tuple(_joined(floats.fill(grads), mask, [None] * len(mask)))


def written_of(
    equation: Any, args: Sequence[Any], mask: Sequence[bool]
) -> tuple[Callable[..., list[Any]], list[Any]]:
    """Returns the function of an equation as it is written, of some of its arguments.

    Args:
      equation: The equation.
      args: All arguments.
      mask: Which of them the function takes. It keeps the others.

    Returns:
      The function, and its arguments.
    """

    def written(*taken):
        return parts.bind(equation, _joined(taken, mask, args))

    return written, list(compress(args, mask))


def count_closed_over(equation: Any) -> int:
    """Returns how many arrays a function closes over: its first operands.

    They have no gradient.
    """
    return equation.params.get("num_consts", 0)


def _closure(step: Step, held: Sequence[Any]) -> str:
    """Returns the message on a rule that reads arrays of a function traced before."""
    file, line, _ = step.source().own
    name, place = parts.function_of(parts.called_jaxpr(step.equation))
    is_users = lines.is_users(place.rpartition(":")[0])
    function = f"{name} ({Path(place).name})" if is_users else "a function"
    # `jax.custom_gradient` makes a `jax.custom_vjp` of its function.
    is_vjp = step.name == "custom_vjp_call"
    made_by = "jax.custom_vjp or jax.custom_gradient" if is_vjp else "jax.custom_jvp"
    arrays = ", ".join(dict.fromkeys(str(jax.typeof(x)) for x in held))
    return (
        f"{Path(file).name}:{line} calls {function} with a rule of derivatives "
        f"({made_by}) that closes over arrays of the function around it: {arrays}. "
        "autocast has traced that function before the rule runs. Pass these arrays as "
        "arguments of the function that has the rule."
    )


def _joined(
    taken: Iterable[Any], mask: Sequence[bool], others: Sequence[Any]
) -> list[Any]:
    """Returns the values of a mask, and others in the other places."""
    rest = iter(taken)
    pairs = zip(mask, others, strict=True)
    return [next(rest) if is_taken else x for is_taken, x in pairs]


def _array(x: Any) -> Any:
    """Returns a cotangent as an array, if it is a zero that JAX did not make."""
    # With the sharding of the output, the axes along which it varies, its weak type.
    return ad.zeros_like_aval(x.aval) if isinstance(x, SymbolicZero) else x


def _floats(states: Iterable[Any], variables: Iterable[Any]) -> States:
    pairs = zip(states, variables, strict=True)
    return tuple(state for state, x in pairs if is_inexact(x.aval))
