"""How losses are scaled: one loss, or several, each with a scale of its own.

A scaler is a rule and the number of losses. `OneLoss` and `PerLoss` have the same
methods. The scales that they take are f32[] for one loss and f32[n] for n losses, and
gradients are a tree for one loss and a sequence of n trees for n losses.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from optax_lossscale._check import check_count
from optax_lossscale._numerics import all_finite, scale_down, scale_up
from optax_lossscale._rules.base import LossScale
from optax_lossscale._step.differentiate import scaled_value_and_grad
from optax_lossscale._tree import is_float0, is_inexact, strongly_typed


@dataclasses.dataclass(frozen=True)
class OneLoss:
    """Scales one loss by a rule."""

    rule: LossScale

    def init(self) -> Any:
        """Returns the state of the rule before the first step."""
        return strongly_typed(self.rule.init())

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the scales."""
        return ()

    def losses(self, loss: Any) -> Sequence[Any]:
        """Returns what a loss function returned as a sequence of losses."""
        return [loss]

    def scale(self, loss: Any, scales: jax.Array) -> Any:
        """Multiplies the loss by its scale, in at least float32."""
        if isinstance(loss, tuple | list | dict) or loss is None:
            raise TypeError(
                "The loss must be an array or a number, got "
                f"{_types(loss)}. For auxiliary data use value_and_grad."
            )
        return scale_up(loss, scales)

    def unscale(self, grads: Any, scales: jax.Array) -> Any:
        """Divides gradients by their scale, in at least float32."""

        def unscaled(x):
            return scale_down(x, scales) if is_inexact(x) else x

        return jax.tree.map(unscaled, grads)

    def value_and_grad(
        self, fun: Callable[..., Any], scales: jax.Array, has_aux: bool, transform: Any
    ) -> Callable[..., tuple[Any, Any]]:
        """Returns a function of what `fun` returns and its scaled gradients."""
        loss_of = functools.partial(_loss_of, self, has_aux=has_aux, index=0)
        return scaled_value_and_grad(fun, loss_of, scales, transform)

    def sum_losses(self, losses: Any) -> Any:
        """Adds up the losses."""
        return losses

    def sum_gradients(self, grads: Any) -> Any:
        """Adds up the gradients of the losses."""
        return grads

    def update(
        self, grads: Any, finite: jax.Array | None, state: Any, axis_name: Any
    ) -> tuple[Any, jax.Array]:
        """Advances each scale by the gradients of its own loss.

        Args:
          grads: Unscaled gradients.
          finite: bool[], False if the gradients are to count as not finite; or None.
          state: What `init` or `update` returned.
          axis_name: The axes over which devices agree.

        Returns:
          The new state; and whether the step is to be applied as far as each loss is
          concerned, of the shape of the scales.
        """
        if finite is not None:
            grads = (grads, _nan_unless(finite))
        grads = jax.tree.map(_without_derivative, grads)
        state, decision = self.rule.update(grads, state, axis_name=axis_name)
        return strongly_typed(state), jnp.asarray(decision, bool)

    def should_apply(
        self, decisions: jax.Array, grads: Any, axis_name: Any
    ) -> jax.Array:
        """Returns whether to apply the step, bool[].

        Args:
          decisions: What `update` returned.
          grads: The sum of the gradients.
          axis_name: The axes over which devices agree.
        """
        return jnp.all(decisions)


@dataclasses.dataclass(frozen=True)
class PerLoss:
    """Scales each of several losses by a rule, with a state for each."""

    rule: LossScale
    num_losses: int

    @property
    def _one(self) -> OneLoss:
        return OneLoss(self.rule)

    def init(self) -> Any:
        """Returns the states before the first step, stacked."""
        state = self._one.init()
        return jax.tree.map(lambda x: jnp.stack([x] * self.num_losses), state)

    @property
    def shape(self) -> tuple[int, ...]:
        """See `OneLoss`."""
        return (self.num_losses,)

    def losses(self, loss: Any) -> Sequence[Any]:
        """See `OneLoss`."""
        return self._one_each("the loss", loss)

    def scale(self, loss: Any, scales: jax.Array) -> Any:
        """See `OneLoss`."""
        losses = enumerate(self.losses(loss))
        return [self._one.scale(loss, scales[i]) for i, loss in losses]

    def unscale(self, grads: Any, scales: jax.Array) -> Any:
        """See `OneLoss`."""
        trees = enumerate(self._one_each("grads", grads))
        return [self._one.unscale(tree, scales[i]) for i, tree in trees]

    def value_and_grad(
        self, fun: Callable[..., Any], scales: jax.Array, has_aux: bool, transform: Any
    ) -> Callable[..., tuple[Any, Any]]:
        """See `OneLoss`."""

        def of_one(index, *args, **kwargs):
            loss_of = functools.partial(_loss_of, self, has_aux=has_aux, index=index)
            function = scaled_value_and_grad(fun, loss_of, scales[index], transform)
            return function(*args, **kwargs)

        def value_and_grad(*args, **kwargs):
            # A forward pass for each loss; they are the same, and jit runs one for all.
            pairs = [of_one(i, *args, **kwargs) for i in range(self.num_losses)]
            values, grads = zip(*pairs, strict=True)
            return values[0], list(grads)

        return value_and_grad

    def sum_losses(self, losses: Any) -> Any:
        """Adds up the losses, in at least float32: the sum must not overflow."""
        one = jnp.ones((), jnp.float32)
        return functools.reduce(operator.add, [scale_up(x, one) for x in losses])

    def sum_gradients(self, grads: Any) -> Any:
        """See `OneLoss`."""

        def add(*leaves):
            is_empty = is_float0(leaves[0])
            return leaves[0] if is_empty else functools.reduce(operator.add, leaves)

        return jax.tree.map(add, *self._one_each("grads", grads))

    def update(
        self, grads: Any, finite: jax.Array | None, state: Any, axis_name: Any
    ) -> tuple[Any, jax.Array]:
        """See `OneLoss`."""

        def update_one(index):
            own = jax.tree.map(lambda x: x[index], state)
            return self._one.update(grads[index], finite, own, axis_name)

        pairs = map(update_one, range(self.num_losses))
        return jax.tree.map(lambda *x: jnp.stack(x), *pairs)

    def should_apply(
        self, decisions: jax.Array, grads: Any, axis_name: Any
    ) -> jax.Array:
        """See `OneLoss`. The sum of finite gradients may overflow at any scale."""
        applied = jnp.all(decisions)
        if self.rule.skip_nonfinite:
            applied &= all_finite(grads, axis_name=axis_name)
        return applied

    def _one_each(self, name: str, value: Any) -> Sequence[Any]:
        n = self.num_losses
        if isinstance(value, tuple | list) and len(value) == n:
            return value
        got = f"{len(value)} in a " if isinstance(value, tuple | list) else ""
        raise TypeError(
            f"With num_losses={n} {name} must be a tuple or list of {n}, one for each "
            f"loss, got {got}{type(value).__name__}."
        )


Scaler = OneLoss | PerLoss


def make_scaler(rule: LossScale, num_losses: Any) -> Scaler:
    """Returns the scaler for one loss (None) or for a number of losses."""
    if num_losses is None:
        return OneLoss(rule)
    return PerLoss(rule, check_count("num_losses", num_losses))


def _without_derivative(x):
    # A scale and a decision have none.
    return lax.stop_gradient(x) if is_inexact(x) else x


@functools.partial(jax.jit, inline=True)
def _nan_unless(finite):
    return jnp.where(finite, jnp.float32(0), jnp.float32(jnp.nan))


def _loss_of(scaler: Scaler, out: Any, has_aux: bool, index: int) -> Any:
    """Returns one of the losses in what a loss function returned."""
    is_pair = isinstance(out, tuple | list) and len(out) == 2
    losses = scaler.losses(out[0] if has_aux and is_pair else out)
    if (has_aux and not is_pair) or not all(map(is_inexact, losses)):
        wanted = "a loss and auxiliary data" if has_aux else "a loss alone"
        raise TypeError(
            f"With has_aux={has_aux} the function must return {wanted}, the "
            f"loss a floating-point scalar, got {_types(out)}."
        )
    return losses[index]


def _types(tree: Any) -> Any:
    """Returns a tree with the types of its leaves, for messages."""

    def describe(leaf):
        return jax.typeof(leaf) if hasattr(leaf, "dtype") else type(leaf).__name__

    return jax.tree.map(describe, tree)
