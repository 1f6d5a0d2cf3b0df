"""Which leaves are gradients, and which are new values of the parameters."""

from collections.abc import Callable, Hashable
from typing import Any, TypeGuard

import jax
import optax

Mask = Any | Callable[[Any], Any] | None


def check_mask(mask: Mask) -> Mask:
    """Returns a mask whose leaves, unless it is a function, are True and False."""
    wrong = [x for x in jax.tree.leaves(mask) if not isinstance(x, bool)]
    if wrong and not _is_function(mask):
        raise TypeError(
            "mask must be a tree of True and False, a prefix of the parameters, or a "
            f"function that makes one of them, got a leaf {wrong[0]!r}."
        )
    return mask


def _is_function(mask: Mask) -> TypeGuard[Callable[[Any], Any]]:
    # A model of Equinox may be called too, and is a tree: a mask, if of bools.
    leaves = jax.tree.leaves(mask)
    return callable(mask) and bool(leaves) and all(map(callable, leaves))


def hashable(mask: Mask) -> Hashable:
    """Returns what tells masks apart."""
    if _is_function(mask):
        return mask
    leaves, treedef = jax.tree.flatten(mask)
    return *leaves, treedef


def _prefix(mask: Mask, tree: Any) -> Any:
    return check_mask(mask(tree)) if _is_function(mask) else mask


def expand(mask: Mask, tree: Any) -> Any:
    """Returns the mask with a leaf for each of the tree's."""
    if mask is None:
        return jax.tree.map(lambda _: True, tree)
    prefix = _prefix(mask, tree)
    try:
        return jax.tree.map(
            lambda keep, subtree: jax.tree.map(lambda _: keep, subtree), prefix, tree
        )
    except ValueError as error:
        raise ValueError(
            f"mask must be a prefix of the tree that it is for, {prefix!r} is none of "
            f"{jax.tree.structure(tree)}. A function of the tree fits several."
        ) from error


def gradients_of(mask: Mask, tree: Any) -> Any:
    """Returns the tree with None for the leaves that are no gradients."""
    if mask is None:
        return tree
    return jax.tree.map(lambda keep, x: x if keep else None, expand(mask, tree), tree)


def choose(mask: Mask, gradients: Any, values: Any) -> Any:
    """Takes the leaves that are gradients from one tree, and others from another."""
    if mask is None:
        return gradients
    keep = expand(mask, gradients)
    return jax.tree.map(lambda k, g, v: g if k else v, keep, gradients, values)


def complete(mask: Mask, tree: Any, params: Any) -> Any:
    """Returns the parameters that the inner optimizer proposes, and those it has not.

    Args:
      mask: The mask.
      tree: As the inner optimizer sees parameters: with `optax.MaskedNode`.
      params: All the parameters.
    """
    if mask is None:
        return tree
    # Not expanded: of several leaves that are masked as one there is one MaskedNode.
    prefix = _prefix(mask, params)
    return jax.tree.map(lambda k, new, old: new if k else old, prefix, tree, params)


def masked(
    inner: optax.GradientTransformationExtraArgs, mask: Mask
) -> optax.GradientTransformationExtraArgs:
    """Returns the optimizer, or one that only sees the gradients."""
    if mask is None:
        return inner
    return optax.masked(inner, mask, mask_compatible_extra_args=True)


def check_params(mask: Mask, params: Any) -> None:
    """Raises if a skipped update could not return what it has to keep."""
    if mask is not None and params is None:
        raise ValueError(
            "With a mask update needs params: where a step is skipped it returns the "
            "old values of the parameters that have no gradients."
        )
