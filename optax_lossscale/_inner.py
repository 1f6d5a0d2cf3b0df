"""The inner optimizer: wrappers for its dtypes and for parameters without gradients."""

import contextlib
import inspect
import reprlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from optax_lossscale._hints import PARAMETERS, hint
from optax_lossscale._modules import has_settings
from optax_lossscale._tree import difference, in_half, is_array, is_key, strongly_typed


def check_optimizer(inner: Any) -> None:
    """Raises if `inner` has no methods `init` and `update`."""
    if not all(callable(getattr(inner, x, None)) for x in ("init", "update")):
        advice = " Call it to make an optimizer." if callable(inner) else ""
        if hasattr(inner, "tx"):  # nnx.Optimizer, TrainState.
            advice = " Wrap the optimizer of Optax that it was made of, its tx."
        got = getattr(inner, "__name__", reprlib.repr(inner))
        raise TypeError(
            "inner_optimizer must be an optax.GradientTransformation, or an object "
            f"with methods init and update, got {got}.{advice}"
        )


def arguments_of(
    function: Callable[..., Any], extra_args: dict[str, Any]
) -> dict[str, Any]:
    """Returns the extra arguments that a function takes."""
    parameters = inspect.signature(function).parameters.values()
    if any(x.kind == x.VAR_KEYWORD for x in parameters):
        return extra_args
    return {x.name: extra_args[x.name] for x in parameters if x.name in extra_args}


def init(inner: Any, params: Any) -> Any:
    """Returns a state in at least float32, for the numbers in `params`.

    Optimizers make their state in the dtypes of the parameters. In float16, momenta
    overflow and squares of gradients underflow, even if the gradients are float32.
    """
    return inner.init(widen(without_constants(params)))


def _states_of(inner: Any, *trees: Any) -> Iterator[Any]:
    """Yields the shapes and dtypes of the state that `init` makes for each tree."""
    # A closure, because a tree may hold functions, which JAX takes as no argument.
    return (jax.eval_shape(lambda x=x: init(inner, x)) for x in trees)


def check_dtypes(inner: Any, state: Any, params: Any, grads: Any) -> None:
    """Raises if a state is narrower than the one that `init` makes."""
    if not any(map(in_half, jax.tree.leaves(state))):
        return
    leaves = jax.tree.leaves_with_path(state)
    # The state may be of the parameters with a gradient alone. If it fits neither, the
    # step raises.
    made = map(jax.tree.leaves, _states_of(inner, params, grads))
    alike = (x for x in made if len(x) == len(leaves))
    for (path, x), wanted in zip(leaves, next(alike, ()), strict=False):
        if in_half(x) and x.dtype != wanted.dtype:
            raise TypeError(
                f"state.inner_state{jax.tree_util.keystr(path)} must be "
                f"{wanted.dtype}, as init makes it, got {x.dtype}, in which small "
                "numbers are zero: a cast back does not mend them. Restore one in "
                f"{wanted.dtype}, or begin a new state. (mu_dtype chooses a dtype.)"
            )


def _fits(inner: Any, grads: Any, state: Any, params: Any) -> bool:
    """Whether gradients and a state are those of parameters, all or some of them."""
    with contextlib.suppress(Exception):  # Other trees, which init may not take.
        trained = grads if params is None else _none_like(grads, params)
        made = _states_of(inner, trained, params)
        is_whole = not difference(grads, trained)
        return is_whole and any(not difference(state, x) for x in made)
    return False


def update(
    inner: Any, updates: Any, state: Any, params: Any, extra_args: dict[str, Any]
) -> tuple[Any, Any]:
    """Runs the optimizer in at least float32; updates are None where gradients are."""
    with hint(PARAMETERS, lambda _: not _fits(inner, updates, state, params)):
        return _update(inner, updates, state, params, extra_args)


def _update(
    inner: Any, updates: Any, state: Any, params: Any, extra_args: dict[str, Any]
) -> tuple[Any, Any]:
    """Runs the optimizer, whichever parts of the parameters it knows.

    Parts of the parameters may have no gradient, such as the functions in an Equinox
    model. The state may belong to all parameters, or to those with a gradient.
    """
    extra_args = arguments_of(inner.update, extra_args)

    def update_all(updates, params, extra_args):
        updates, new = inner.update(widen(updates), state, widen(params), **extra_args)
        return updates, strongly_typed(new)

    is_whole = jax.tree.structure(updates) == jax.tree.structure(params)
    if params is None or is_whole:
        return update_all(updates, params, extra_args)
    try:
        trained = _none_like(updates, params)
    except ValueError:
        # The structures differ, as with optax.lookahead.
        return update_all(updates, params, extra_args)
    of_trained = jax.eval_shape(lambda params: inner.init(widen(params)), trained)
    if jax.tree.structure(of_trained) == jax.tree.structure(state):
        return update_all(updates, trained, extra_args)
    params = without_constants(params)
    if "grad" in extra_args:
        extra_args = extra_args | {"grad": _zeros_for_none(extra_args["grad"], params)}
    new, state = update_all(_zeros_for_none(updates, params), params, extra_args)
    return _none_like(updates, new), state


def map_with_none(function: Callable[..., Any], *trees: Any) -> Any:
    """Maps over trees; None in the first, a missing gradient, is a leaf."""
    return jax.tree.map(function, *trees, is_leaf=lambda x: x is None)


def _none_like(grads, tree):
    return map_with_none(lambda grad, x: None if grad is None else x, grads, tree)


def _zeros_for_none(grads, params):
    def zeros(grad, params):
        return jax.tree.map(jnp.zeros_like, params) if grad is None else grad

    return map_with_none(zeros, grads, params)


def without_constants(params: Any) -> Any:
    """Returns the tree with None for functions, strings, keys and other constants.

    Python integers are constants too, as JAX computes no gradients for them, and so are
    integers of 4 bits, which JAX does not add to other numbers.
    """
    numbers = () if has_settings(params) else (float, complex)

    def number(leaf):
        if not hasattr(leaf, "dtype"):
            return leaf if isinstance(leaf, numbers) else None
        is_int = jnp.issubdtype(leaf.dtype, jnp.integer)
        is_number = not is_key(leaf) and not (is_int and jnp.iinfo(leaf.dtype).bits < 8)
        return leaf if is_number else None

    return jax.tree.map(number, params)


def parameters_as_arrays(params: Any, grads: Any) -> Any:
    """Returns parameters as strongly typed arrays, but numbers without a gradient."""

    def array(x):
        return strongly_typed(x) if is_array(x) else x

    def leaf(grad, param):
        return jax.tree.map(array, param) if grad is None else strongly_typed(param)

    # Otherwise the structures differ, as with optax.lookahead.
    with contextlib.suppress(ValueError):
        return map_with_none(leaf, grads, params)
    return strongly_typed(params)


def widen(tree: Any) -> Any:
    """Converts numbers to arrays, and narrow floating-point arrays to float32."""

    def wide(leaf):
        return leaf.astype(jnp.float32) if in_half(leaf) else leaf

    return jax.tree.map(wide, strongly_typed(tree))


def narrow_like(updates: Any, grads: Any) -> Any:
    """Converts float32 updates to the dtypes of the gradients where these are narrower.

    Optimizers return updates in the dtypes of the gradients, but here the inner one
    ran in float32. Updates of another structure (`optax.lookahead`) stay unchanged.
    """
    if jax.tree.structure(updates) != jax.tree.structure(grads):
        return strongly_typed(updates)

    def narrow(update, grad):
        if is_array(grad) and not is_array(update):  # A Python number.
            return jnp.asarray(update, grad.dtype)
        return update.astype(grad.dtype) if in_half(grad) else update

    return strongly_typed(jax.tree.map(narrow, updates, grads))


def apply_updates(params: Any, updates: Any) -> Any:
    """Returns parameters plus updates, in the dtypes of the parameters.

    They are added in at least float32, and only the result is rounded.
    """

    def add(update, param):
        if not is_array(param) or not is_array(update):
            return param
        with jax.numpy_dtype_promotion("standard"):
            return (widen(param) + update).astype(param.dtype)

    return map_with_none(add, strongly_typed(updates), params)


def as_parameters(proposed: Any, params: Any) -> Any:
    """Gives proposed parameters the dtypes, and the constants, of `params`."""

    def cast(new, old):
        if not is_array(new):
            return old
        return new.astype(old.dtype) if is_array(old) else new

    return map_with_none(cast, proposed, params)
