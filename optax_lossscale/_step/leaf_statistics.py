"""Counts for each leaf the steps in which its gradient was not finite."""

import functools
from collections.abc import Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from optax_lossscale._scaling import axis_index, nonfinite_sums
from optax_lossscale._tree import is_array, is_inexact

FINITE, INF, NAN = range(3)


class LeafStatistics(NamedTuple):
    """The statistics of n leaves, kept with `track_leaves=True`.

    The leaves are those of the parameters, including None, in the order of
    `jax.tree.leaves`. `optax_lossscale.diagnostics.nonfinite_leaves` names them.

    Attributes:
      last: i32[n], the kind of each gradient in the last non-finite step: 0 finite,
        1 inf, 2 nan (or both).
      inf_steps: i32[n], steps in which each was inf. Stays at its maximum.
      nan_steps: i32[n], steps in which each was nan. Stays at its maximum.
    """

    last: jax.Array
    inf_steps: jax.Array
    nan_steps: jax.Array


def leaves_of(tree: Any) -> list[Any]:
    """Returns the leaves of a tree, including None, which stands for no gradient."""
    return jax.tree.leaves(tree, is_leaf=lambda x: x is None)


def differentiated(params: Any) -> Any:
    """Returns the parameters that have gradients.

    With `optax.lookahead` parameters are pairs, and only the fast ones have gradients.
    """

    def is_pair(node):
        return isinstance(node, optax.LookaheadParams)

    def fast(node):
        return node.fast if is_pair(node) else node

    return jax.tree.map(fast, params, is_leaf=is_pair)


def initial_leaves(params: Any) -> LeafStatistics:
    """Returns the statistics before the first step."""
    n = len(leaves_of(differentiated(params)))
    # Three arrays, because a single one could not be donated three times.
    return LeafStatistics(*(jnp.zeros(n, jnp.int32) for _ in LeafStatistics._fields))


def check_leaves(statistics: Any, track_leaves: bool) -> None:
    """Raises if a restored state lacks statistics or has damaged ones."""
    if statistics is None and not track_leaves:
        return
    fields = statistics if isinstance(statistics, LeafStatistics) else ()
    shapes = {jnp.shape(x) if is_array(x) else None for x in fields}
    if len(shapes) != 1 or [len(shape or ()) for shape in shapes] != [1]:
        raise ValueError(
            "state.leaf_statistics must be LeafStatistics of three arrays of shape "
            "(n,) with track_leaves=True, and these or None without it, got "
            f"{statistics!r}. Begin new ones: state._replace(leaf_statistics="
            "optimizer.init(params).leaf_statistics)."
        )


def count_leaves(
    statistics: Any, grads: Any, axis_name: Hashable | None
) -> LeafStatistics:
    """Records which gradients of a step are not finite.

    Raises:
      ValueError: If there are more or fewer gradients than parameters.
    """
    # A missing gradient counts as finite.
    leaves = [jnp.asarray(x if is_inexact(x) else 0.0) for x in leaves_of(grads)]
    (expected,) = statistics.last.shape
    if len(leaves) != expected:
        raise ValueError(
            f"With track_leaves=True the gradients must have the {expected} leaves of "
            f"the parameters given to init (None for no gradient), got "
            f"{len(leaves)}."
        )
    return _count(statistics, leaves, axis_name)


@functools.partial(jax.jit, static_argnames="axis_name")
def _count(statistics, leaves, axis_name):
    kinds = _kinds(leaves, axis_name)

    def count(steps, kind):
        return jnp.where(kinds == kind, optax.safe_increment(steps), steps)

    return LeafStatistics(
        last=jnp.where(jnp.any(kinds != FINITE), kinds, statistics.last),
        inf_steps=count(statistics.inf_steps, INF),
        nan_steps=count(statistics.nan_steps, NAN),
    )


def _kinds(leaves: list[jax.Array], axis_name: Hashable | None) -> jax.Array:
    """Returns the kind of each leaf over all devices: finite, inf or nan."""
    if not leaves:
        return jnp.zeros(0, jnp.int32)
    # The decision to skip uses the same sums: XLA computes them once.
    sums = jnp.stack(nonfinite_sums(leaves))
    finite = jnp.isfinite(sums)
    # On CPU the sums do not tell inf from nan: only a non-finite step looks for nan.
    nan = lax.platform_dependent(
        sums,
        leaves,
        cpu=lambda sums, leaves: lax.cond(
            jnp.all(jnp.isfinite(sums)), lambda _: jnp.isnan(sums), _has_nan, leaves
        ),
        default=lambda sums, _: jnp.isnan(sums),
    )
    kinds = jnp.where(finite, FINITE, jnp.where(nan, NAN, INF)).astype(jnp.int32)
    if axis_name is None:
        return kinds
    return lax.pmax(kinds + 0 * axis_index(axis_name), axis_name)


def _has_nan(leaves: list[jax.Array]) -> jax.Array:
    return jnp.stack([jnp.any(lax.ne(x, x)) for x in leaves])
