"""The inner optimizer: wrappers for its dtypes and for parameters without gradients."""

import contextlib
import functools
import inspect
import reprlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale._hints import PARAMETERS, add_once
from optax_lossscale._models import combine, partition
from optax_lossscale._tree import (
    difference,
    in_half,
    is_array,
    is_float0,
    is_inexact_array,
    strongly_typed,
    zero_update,
)


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
    """Returns a state in at least float32, for the parameters that have a gradient.

    Optimizers make their state in the dtypes of the parameters. In float16, momenta
    overflow and squares of gradients underflow, even if the gradients are float32.
    """
    return inner.init(widen(partition(params)[0]))


def _states_of(inner: Any, *trees: Any) -> Iterator[Any]:
    """Yields the shapes and dtypes of the state that `init` makes for each tree."""
    # A closure, because a tree may hold functions, which JAX takes as no argument.
    return (jax.eval_shape(lambda x=x: init(inner, x)) for x in trees)


def check_dtypes(inner: Any, state: Any, params: Any, grads: Any) -> None:
    """Raises if a state is narrower than the one that `init` makes."""
    if not any(map(in_half, jax.tree.leaves(state))):
        return
    leaves = jax.tree.leaves_with_path(state)
    # The state may be of all parameters, or only of those with a gradient. If it is of
    # neither, the step raises.
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


def _hint_of_mismatch(inner: Any, grads: Any, state: Any, params: Any) -> str:
    """Returns a hint if gradients or state do not fit the parameters; "" if both do."""
    with contextlib.suppress(Exception):  # `init` may not take other trees.
        trained = grads if params is None else _none_like(grads, params)
        if not difference(grads, trained):
            made = [*_states_of(inner, trained, params)]
            if any(not difference(state, x) for x in made):
                return ""
            return f"{_difference_of_states(state, made[-1])}{PARAMETERS}"
    return PARAMETERS


def _difference_of_states(got: Any, wanted: Any) -> str:
    """Names an array of a state that differs from that of `init`; "" if none does."""

    def shapes(state):
        leaves = jax.tree.leaves_with_path(state)
        return {jax.tree_util.keystr(path): np.shape(x) for path, x in leaves}

    found, made = shapes(got), shapes(wanted)
    for path in made | found:
        if path not in found:
            return f"state.inner_state{path} is missing, which init makes. "
        if path not in made:
            return f"init makes no state.inner_state{path}. "
        if found[path] != made[path]:
            return (
                f"state.inner_state{path} must be of shape {made[path]}, as init makes "
                f"it, got {found[path]}. "
            )
    return ""


def update(
    inner: Any, updates: Any, state: Any, params: Any, extra_args: dict[str, Any]
) -> tuple[Any, Any]:
    """Calls the optimizer in at least float32; updates are None where gradients are."""
    try:
        return _update(inner, updates, state, params, extra_args)
    except Exception as error:
        add_once(error, _hint_of_mismatch(inner, updates, state, params))
        raise


def _update(
    inner: Any, updates: Any, state: Any, params: Any, extra_args: dict[str, Any]
) -> tuple[Any, Any]:
    """Calls the optimizer, with zeros or None for gradients that are missing.

    It sees None in place of parameters that are not floating-point. If gradients of
    floating-point parameters are missing as well, the state decides: zeros, if it was
    made for these parameters, else None.
    """
    extra_args = arguments_of(inner.update, extra_args)
    if params is None:
        return _update_as_given(inner, updates, state, None, extra_args)
    params, rest = partition(params)
    if jax.tree.leaves(rest):
        extra_args = _with_rest(extra_args, rest)
    try:
        trained = _none_like(_without_float0(updates), params)
    except ValueError:
        # The structures differ, as with optax.lookahead.
        return _update_as_given(inner, updates, state, params, extra_args)
    if _is_state_of_all(inner, params, state, trained):
        return _update_all(inner, updates, state, params, extra_args)
    return _update_trained(inner, updates, state, trained, extra_args)


def _update_as_given(inner, updates, state, params, extra_args):
    """Updates with gradients as they are: no parameters, or another structure."""
    return _call(inner, updates, state, params, extra_args, _without_float0)


def _update_all(inner, updates, state, params, extra_args):
    """Updates all floating-point parameters: missing gradients are zero."""

    def with_zeros(grads):
        return _zeros_for_none(grads, params)

    new, state = _call(inner, updates, state, params, extra_args, with_zeros)
    return _none_like(updates, new), state


def _update_trained(inner, updates, state, trained, extra_args):
    """Updates the parameters that have a gradient; the others are None."""

    def with_none(grads):
        return _none_like(trained, grads)

    return _call(inner, updates, state, trained, extra_args, with_none)


def _call(inner, updates, state, params, extra_args, convert):
    """Calls the optimizer in at least float32; `convert` prepares gradients for it."""
    extra = {k: convert(x) if k == "grad" else x for k, x in extra_args.items()}
    new, of_inner = inner.update(widen(convert(updates)), state, widen(params), **extra)
    return new, strongly_typed(of_inner)


def _with_rest(extra_args: dict[str, Any], rest: Any) -> dict[str, Any]:
    """Makes loss functions among extra arguments take the tree without `rest`."""

    def of_trained(function):
        # Line searches read its signature: which extra arguments it takes.
        @functools.wraps(function)
        def joined(trained, **kwargs):
            return function(combine(trained, rest), **kwargs)

        # A pytree, as some optimizers pass it through jax.jit or jax.lax.cond.
        return jax.tree_util.Partial(joined)

    # The names that Optax has for them, in line searches and in `sophia`. A function of
    # another name gets None in place of integers.
    given = (x for x in ("value_fn", "obj_fn") if extra_args.get(x) is not None)
    return extra_args | {x: of_trained(extra_args[x]) for x in given}


def _is_state_of_all(inner: Any, params: Any, state: Any, trained: Any) -> bool:
    """Whether a state was made for all parameters, not only those with a gradient."""
    if jax.tree.structure(params) == jax.tree.structure(trained):
        return False
    (of_trained,) = _states_of(inner, trained)
    return jax.tree.structure(of_trained) != jax.tree.structure(state)


def map_with_none(function: Callable[..., Any], *trees: Any) -> Any:
    """Maps over trees; None in the first tree is a leaf: a missing gradient."""
    return jax.tree.map(function, *trees, is_leaf=lambda x: x is None)


def _none_like(grads, tree):
    return map_with_none(lambda grad, x: None if grad is None else x, grads, tree)


def _without_float0(grads):
    return jax.tree.map(lambda x: None if is_float0(x) else x, grads)


def _zeros_for_none(grads, params):
    def zeros(grad, param):
        is_missing = grad is None or param is None
        return jax.tree.map(jnp.zeros_like, param) if is_missing else grad

    return map_with_none(zeros, grads, params)


def parameters_as_arrays(params: Any, grads: Any) -> Any:
    """Makes Python numbers among parameters arrays, unless they have no gradient."""

    def array(x):
        return strongly_typed(x) if is_array(x) else x

    def leaf(grad, param):
        return jax.tree.map(array, param) if grad is None else strongly_typed(param)

    # Otherwise the structures differ, as with optax.lookahead.
    with contextlib.suppress(ValueError):
        return map_with_none(leaf, grads, params)
    trained, rest = partition(params)
    return combine(strongly_typed(trained), rest)


def widen(tree: Any) -> Any:
    """Converts Python numbers to arrays, and half-precision arrays to float32."""

    def wide(leaf):
        return leaf.astype(jnp.float32) if in_half(leaf) else leaf

    return jax.tree.map(wide, strongly_typed(tree))


def narrow_like(updates: Any, grads: Any) -> Any:
    """Converts float32 updates to the dtypes of the gradients where these are narrower.

    Optimizers return updates in the dtypes of the gradients, but here the inner one
    ran in float32. Updates of another structure (`optax.lookahead`) stay unchanged.
    """

    def is_none(x):
        return x is None

    def narrow(update, grad):
        if update is None:  # The parameter is an integer, for example.
            return None if grad is None else zero_update(grad)
        if is_array(grad) and not is_array(update):  # A Python number.
            return jnp.asarray(update, grad.dtype)
        return update.astype(grad.dtype) if in_half(grad) else update

    of_updates, of_grads = (jax.tree.structure(x, is_none) for x in (updates, grads))
    if of_updates == of_grads:
        updates = map_with_none(narrow, updates, grads)
    return strongly_typed(updates)


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
        if not is_inexact_array(new):
            return old
        return new.astype(old.dtype) if is_array(old) else new

    return map_with_none(cast, proposed, params)
