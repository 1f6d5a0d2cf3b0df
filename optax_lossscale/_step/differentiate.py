"""Differentiates a scaled loss, with `jax.value_and_grad` or a function like it."""

from collections.abc import Callable
from typing import Any

import jax

from optax_lossscale._numerics import scale_up


def scaled_value_and_grad(
    fun: Callable[..., Any],
    loss_of: Callable[[Any], Any],
    scale: jax.Array,
    transform: Callable[..., Any],
) -> Callable[..., tuple[Any, Any]]:
    """Makes a function that returns `fun`'s output and gradients of its scaled loss.

    Args:
      fun: A loss function, with or without auxiliary data.
      loss_of: Extracts the loss from the output of `fun`.
      scale: f32[].
      transform: `jax.value_and_grad`, or a function like it.
    """

    def scaled(*args, **kwargs):
        out = fun(*args, **kwargs)
        # Return the unscaled loss too: the scaled one may be inf.
        return scale_up(loss_of(out), scale), _Out(out)

    differentiated = transform(scaled, has_aux=True)

    def value_and_grad(*args, **kwargs):
        return _value_and_grads_of(differentiated(*args, **kwargs))

    return value_and_grad


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


def _value_and_grads_of(result: Any) -> tuple[Any, Any]:
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
