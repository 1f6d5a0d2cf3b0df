"""The inner optimizer: its arguments and its dtypes."""

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_lossscale._scaling import at_least_float32
from optax_lossscale._tree import is_array, is_inexact, is_real, strongly_typed


def accepts(function: Callable[..., Any], name: str) -> bool:
    """Tells whether `function` takes a keyword argument `name`."""
    parameters = inspect.signature(function).parameters
    kinds = [parameter.kind for parameter in parameters.values()]
    return name in parameters or inspect.Parameter.VAR_KEYWORD in kinds


def check_optimizer(name: str, value: Any) -> optax.GradientTransformationExtraArgs:
    """Returns `value` as an optimizer that takes, or ignores, extra arguments."""
    if isinstance(value, optax.GradientTransformation):
        return optax.with_extra_args_support(value)
    has_methods = (callable(getattr(value, name, None)) for name in ("init", "update"))
    if not all(has_methods):
        hint = " Call it to make an optimizer." if callable(value) else ""
        raise TypeError(
            f"{name} must be an optax.GradientTransformation, or an object with "
            f"methods init and update, got {value!r}.{hint}"
        )
    # Besides updates, state and params it takes extra arguments.
    if len(inspect.signature(value.update).parameters) > 3:
        return optax.GradientTransformationExtraArgs(value.init, value.update)
    plain = optax.GradientTransformation(value.init, value.update)
    return optax.with_extra_args_support(plain)


def check_gradients(grads: Any) -> None:
    """Raises if `grads` are pairs of gradients and variables, as in Keras."""
    if isinstance(grads, Iterator):
        raise TypeError(
            "grads must be a pytree like the parameters, got a "
            f"{type(grads).__name__}. "
            "Keras's apply_gradients(zip(grads, variables)) is "
            "apply_gradients(grads, params, state) here."
        )


def check_loss_value(value: Any) -> None:
    """Checks that `value` can be the loss of a step."""
    if value is None:
        raise TypeError(
            "value= is missing, and check_loss=True needs it. Pass the unscaled loss, "
            "as value_and_grad returns it: update(grads, state, params, value=loss) "
            "or apply_gradients(grads, params, state, value=loss). minimize passes it "
            "for you; Flax's TrainState.apply_gradients does not."
        )
    if not is_real(value) or np.shape(value) != ():
        raise TypeError(
            f"value must be the loss, a real scalar, got {value!r}. Reduce the loss to "
            "a scalar first, and pass it without auxiliary data."
        )


def check_no_loss_scale(inner_state: Any) -> None:
    """Raises if `optax.tree.set(state, loss_scale=...)` sets a hyperparameter too."""

    def has_hyperparameters(node):
        return isinstance(getattr(node, "hyperparams", None), dict)

    nodes = jax.tree.leaves(inner_state, is_leaf=has_hyperparameters)
    if any(has_hyperparameters(x) and "loss_scale" in x.hyperparams for x in nodes):
        raise ValueError(
            "inner_optimizer has a hyperparameter named 'loss_scale', which "
            "optax.tree.set(state, loss_scale=...) would set together with the scale. "
            "Rename it in the function that inject_hyperparams wraps."
        )


def in_float32(
    inner: optax.GradientTransformationExtraArgs,
) -> optax.GradientTransformationExtraArgs:
    """Returns an optimizer with state and computation in at least float32.

    Optimizers make their state in the dtypes of the parameters. In float16, momenta
    overflow and squares of gradients underflow, even if the gradients are float32.
    """

    def init(params):
        return inner.init(widen(params))

    # Lets `accepts` see the arguments of the optimizer itself.
    @functools.wraps(inner.update)
    def update(updates, state, params=None, **extra_args):
        return inner.update(widen(updates), state, widen(params), **extra_args)

    return optax.GradientTransformationExtraArgs(init, update)


def widen(tree: Any) -> Any:
    """Converts numbers to arrays, and narrow floating-point arrays to float32."""

    def wide(leaf):
        if not is_array(leaf) or not is_inexact(leaf):
            return leaf
        return leaf.astype(at_least_float32(leaf.dtype))

    return jax.tree.map(wide, strongly_typed(tree))


def narrow_like(updates: Any, grads: Any) -> Any:
    """Converts float32 updates to the dtypes of the gradients where these are narrower.

    Optimizers return updates in the dtypes of the gradients, but here the inner one
    ran in float32. Updates of another structure (`optax.lookahead`) stay unchanged.
    """
    if jax.tree.structure(updates) != jax.tree.structure(grads):
        return updates

    def narrow(update, grad):
        is_wide = not is_array(grad) or at_least_float32(grad.dtype) == grad.dtype
        return update if is_wide or not is_inexact(grad) else update.astype(grad.dtype)

    return jax.tree.map(narrow, updates, grads)


def without_constants(params: Any) -> Any:
    """Returns the tree with None for functions, strings and other constants.

    Python integers are constants too: JAX computes no gradients for them.
    """

    def chosen(leaf):
        is_number = hasattr(leaf, "dtype") or isinstance(leaf, float | complex)
        return leaf if is_number else None

    return jax.tree.map(chosen, params)


def leave_out_none(
    inner: optax.GradientTransformationExtraArgs,
    grads: Any,
    inner_state: Any,
    params: Any,
) -> tuple[Any, Any]:
    """Leaves out the parameters that have no gradient, as in Equinox models.

    Args:
      inner: The inner optimizer.
      grads: Gradients, with None for any part of `params` that has no gradient.
      inner_state: The state, made by `init` from all parameters, or from those that
        have gradients.
      params: All parameters, or None.

    Returns:
      Gradients and parameters that fit the state.
    """
    if params is None or jax.tree.structure(grads) == jax.tree.structure(params):
        return grads, params
    try:
        chosen = map_with_none(lambda g, p: None if g is None else p, grads, params)
    except ValueError:
        # The structures differ, as with optax.lookahead.
        return grads, params
    structure = jax.tree.structure(jax.eval_shape(inner.init, chosen))
    if structure == jax.tree.structure(inner_state):
        return grads, chosen

    def zeros(grad, param):
        return jax.tree.map(jnp.zeros_like, param) if grad is None else grad

    params = without_constants(params)
    return map_with_none(zeros, grads, params), params


def put_back_none(grads: Any, new: Any, old: Any) -> Any:
    """Puts back what `leave_out_none` left out.

    Args:
      grads: The gradients that `leave_out_none` was given.
      new: Updates or parameters, computed from what `leave_out_none` returned.
      old: All parameters; None if `new` are updates.

    Returns:
      `new`, but with the leaves of `old`, or None, where a gradient is None.
    """
    if old is None:
        return map_with_none(lambda g, new: None if g is None else new, grads, new)
    return map_with_none(lambda g, new, old: old if g is None else new, grads, new, old)


def as_parameters(proposed: Any, params: Any) -> Any:
    """Casts parameters proposed by an inner optimizer to the dtypes of `params`."""

    def cast(new, old):
        return new.astype(old.dtype) if is_array(old) and is_array(new) else new

    return jax.tree.map(cast, proposed, params)


def expand_none(grads: Any, params: Any) -> Any:
    """Returns gradients with one None for each parameter without a gradient."""

    def expand(grad, param):
        return jax.tree.map(lambda _: None, param) if grad is None else grad

    return map_with_none(expand, grads, params)


def map_with_none(function: Callable[..., Any], grads: Any, *trees: Any) -> Any:
    """Maps over trees; None in the first, a missing gradient, is a leaf."""
    return jax.tree.map(function, grads, *trees, is_leaf=lambda x: x is None)
