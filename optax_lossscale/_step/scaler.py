"""Scales one loss, or several, each with its own scale."""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from optax_lossscale._rules.base import LossScale
from optax_lossscale._scaling import all_finite, scale_down, scale_up
from optax_lossscale._tree import is_float0, is_inexact, strongly_typed


@dataclasses.dataclass(frozen=True)
class Scaler:
    """A rule, for one loss or for several.

    For n losses, scales are f32[n], the arrays in a state have a first axis of n, and
    losses and gradients are sequences of n.

    Attributes:
      rule: The rule of each scale.
      num_losses: The number of losses; None if functions return a single loss.
    """

    rule: LossScale
    num_losses: int | None = None

    def check_scales(self, scales: jax.Array) -> jax.Array:
        """Returns the scales, if there is one for each loss."""
        wanted = () if self.num_losses is None else (self.num_losses,)
        if jnp.shape(scales) != wanted:
            raise ValueError(
                f"With num_losses={self.num_losses} the loss scale in the state must "
                f"be of shape {wanted}, got {jnp.shape(scales)}. If the state belongs "
                "to many members or devices, call inside the vmap or pmap that made it."
            )
        return scales

    def init(self) -> Any:
        """Returns the state before the first step."""
        state = strongly_typed(self.rule.init())
        if self.num_losses is None:
            return state
        return _stack(*[state] * self.num_losses)

    def scale(self, loss: Any, scales: jax.Array) -> Any:
        """Multiplies each loss by its scale, in at least float32."""
        return self._map(_scaled, self._one_each("the loss", loss), scales)

    def unscale(self, grads: Any, scales: jax.Array) -> Any:
        """Divides the gradients of each loss by its scale, in at least float32."""
        return self._map(_unscaled, self._one_each("grads", grads), scales)

    def value_and_grad(
        self, fun: Callable[..., Any], scales: jax.Array, has_aux: bool, transform: Any
    ) -> Callable[..., tuple[Any, Any]]:
        """Makes a function that returns `fun`'s output and its scaled gradients."""

        def of_loss(index, scale):
            def scaled(*args, **kwargs):
                out = fun(*args, **kwargs)
                losses = self._losses_of(out, has_aux)
                loss = losses if self.num_losses is None else losses[index]
                # The loss itself is passed along: the scaled one may be inf.
                return scale_up(loss, scale), _Out(out)

            differentiated = transform(scaled, has_aux=True)
            return lambda *args, **kwargs: _unpack(differentiated(*args, **kwargs))

        if self.num_losses is None:
            return of_loss(None, scales)
        functions = [of_loss(i, scales[i]) for i in range(self.num_losses)]

        def value_and_grad(*args, **kwargs):
            # A forward pass for each loss; they are the same, and jit runs one for all.
            pairs = [function(*args, **kwargs) for function in functions]
            values, grads = zip(*pairs, strict=True)
            return values[0], list(grads)

        return value_and_grad

    def sum_losses(self, losses: Any) -> Any:
        """Adds up several losses, in at least float32 to avoid overflow."""
        if self.num_losses is None:
            return losses
        one = jnp.ones((), jnp.float32)
        return functools.reduce(operator.add, [scale_up(x, one) for x in losses])

    def sum_gradients(self, grads: Any) -> Any:
        """Adds up the gradients of several losses."""
        if self.num_losses is None:
            return grads

        def add(*leaves):
            is_empty = is_float0(leaves[0])
            return leaves[0] if is_empty else functools.reduce(operator.add, leaves)

        return jax.tree.map(add, *self._one_each("grads", grads))

    def update(
        self, grads: Any, finite: jax.Array | None, state: Any, axis_name: Any
    ) -> tuple[Any, jax.Array]:
        """Advances each scale by the gradients of its own loss.

        Args:
          grads: Unscaled gradients.
          finite: bool[], False to count the gradients as not finite; or None.
          state: What `init` or `update` returned.
          axis_name: The axes over which devices agree.

        Returns:
          The new state; and for each loss whether to apply the step, bool in the shape
          of the scales.
        """

        def update_one(grads, state):
            if finite is not None:
                grads = (grads, _nan_unless(finite))
            grads = jax.tree.map(_without_derivative, grads)
            state, decision = self.rule.update(grads, state, axis_name=axis_name)
            return strongly_typed(state), jnp.asarray(decision, bool)

        if self.num_losses is None:
            return update_one(grads, state)
        indices = range(self.num_losses)
        states = [jax.tree.map(operator.itemgetter(i), state) for i in indices]
        return _stack(*self._map(update_one, grads, states))

    def should_apply(
        self, decisions: jax.Array, grads: Any, axis_name: Any
    ) -> jax.Array:
        """Returns whether to apply the step, bool[].

        Args:
          decisions: What `update` returned.
          grads: The sum of the gradients.
          axis_name: The axes over which devices agree.
        """
        applied = jnp.all(decisions)
        if self.num_losses is not None and self.rule.skip_nonfinite:
            # The sum of finite gradients may overflow, at any scale.
            applied &= all_finite(grads, axis_name=axis_name)
        return applied

    def _map(self, function, *parts):
        """Calls a function for each loss, with its parts."""
        if self.num_losses is None:
            return function(*parts)
        return [function(*(x[i] for x in parts)) for i in range(self.num_losses)]

    def _one_each(self, name: str, value: Any) -> Any:
        """Returns `value`, if it is a sequence with one element for each loss."""
        n = self.num_losses
        if n is None or (isinstance(value, tuple | list) and len(value) == n):
            return value
        got = f"{len(value)} in a " if isinstance(value, tuple | list) else ""
        raise TypeError(
            f"With num_losses={n} {name} must be a tuple or list of {n}, one for each "
            f"loss, got {got}{type(value).__name__}."
        )

    def _losses_of(self, out: Any, has_aux: bool) -> Any:
        """Returns the loss, or the losses, in what a loss function returned."""
        is_pair = isinstance(out, tuple | list) and len(out) == 2
        loss = self._one_each("the loss", out[0] if has_aux and is_pair else out)
        losses = [loss] if self.num_losses is None else loss
        if (has_aux and not is_pair) or not all(map(is_inexact, losses)):
            wanted = "a loss and auxiliary data" if has_aux else "a loss alone"
            raise TypeError(
                f"With has_aux={has_aux} the function must return {wanted}, the "
                f"loss a floating-point scalar, got {_types(out)}."
            )
        return loss


def _stack(*trees):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def _scaled(loss: Any, scale: jax.Array) -> jax.Array:
    if isinstance(loss, tuple | list | dict) or loss is None:
        raise TypeError(
            f"The loss must be an array or a number, got {_types(loss)}. For auxiliary "
            "data use value_and_grad."
        )
    return scale_up(loss, scale)


def _unscaled(grads: Any, scale: jax.Array) -> Any:
    return jax.tree.map(lambda x: scale_down(x, scale) if is_inexact(x) else x, grads)


def _without_derivative(x):
    # The scale and the decision have no derivative.
    return lax.stop_gradient(x) if is_inexact(x) else x


@functools.partial(jax.jit, inline=True)
def _nan_unless(finite):
    return jnp.where(finite, jnp.float32(0), jnp.float32(jnp.nan))


def _types(tree: Any) -> Any:
    """Returns a tree with the types of its leaves, for messages."""

    def describe(leaf):
        return jax.typeof(leaf) if hasattr(leaf, "dtype") else type(leaf).__name__

    return jax.tree.map(describe, tree)


@jax.tree_util.register_pytree_node_class
class _Out:
    """Marks the output of the user's function in what a transform returns."""

    def __init__(self, value):
        self.value = value

    def tree_flatten(self):
        return (self.value,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def _unpack(result: Any) -> tuple[Any, Any]:
    """Returns the value and the gradients, if a transform returned both."""
    try:
        (_, out), grads = result
        if isinstance(out, _Out):
            return out.value, grads
    except (TypeError, ValueError):
        pass
    raise TypeError(
        "transform must return the value with the gradients, as jax.value_and_grad, "
        "eqx.filter_value_and_grad and nnx.value_and_grad do; jax.grad returns only "
        "gradients."
    )
