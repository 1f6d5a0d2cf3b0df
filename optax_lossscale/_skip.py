"""Run a step, or keep everything as it was: what depends on the platform."""

from collections.abc import Callable
from typing import Any, Literal

import jax
from jax import lax
from jax.core import Tracer

from optax_lossscale._tree import cast_like, is_array, select

Skip = Literal["auto", "where", "cond"]


def _split(tree: Any) -> tuple[list[jax.Array], Callable[[list[jax.Array]], Any]]:
    """Returns the arrays of a tree, and what puts others in their places."""
    leaves, treedef = jax.tree.flatten(tree)

    def join(arrays):
        rest = iter(arrays)
        return treedef.unflatten([next(rest) if is_array(x) else x for x in leaves])

    return [x for x in leaves if is_array(x)], join


def settle(skip: Skip | None, tree: Any) -> Any:
    """Has gradients computed before they are used, where the step branches on CPU.

    There XLA would compute the end of each gradient twice, in the layout that suits
    the check and in the one that the branch needs, and keep both.
    """
    arrays, join = _split(tree)
    traced = any(isinstance(x, Tracer) for x in arrays)
    if skip in (None, "where") or not traced:
        return tree
    # One by one: together they would all vary as the one that varies most does.
    return join(
        lax.platform_dependent(
            arrays,
            cpu=lambda arrays: [lax.optimization_barrier(x) for x in arrays],
            default=lambda arrays: arrays,
        )
    )


def run_or_skip(
    skip: Skip | None,
    should_apply: jax.Array,
    run: Callable[..., Any],
    keep: Callable[..., Any],
    *operands: Any,
) -> Any:
    """Returns `run(*operands)` if `should_apply`, else `keep(like, *operands)`.

    Args:
      skip: "where" runs and selects; "cond" branches; "auto" branches on CPU, where
        a select makes XLA copy the donated state, and selects elsewhere, where a
        branch keeps the step from being fused with what surrounds it. Where
        nothing is traced there is no branch to compile, and all three select.
        None always runs.
      should_apply: bool[].
      run: The step. It is traced once.
      keep: What a skip returns. `like` is the result of `run`, or its shapes and
        dtypes. The result of `run` is cast to the dtypes of `keep`'s.
      *operands: Pytrees. Large arrays must come this way: closing over them
        makes XLA copy them at a branch.

    Returns:
      A tree of the structure that `run` and `keep` share.
    """
    if skip is None:
        new = run(*operands)
        return cast_like(new, keep(new, *operands))

    arrays, join = _split(operands)

    def run_arrays(arrays):
        return run(*join(arrays))

    def where(should_apply, run, arrays):
        new = run(arrays)
        old = keep(new, *join(arrays))
        return select(should_apply, cast_like(new, old), old)

    def cond(should_apply, run, arrays):
        like = jax.eval_shape(run, arrays)

        def keep_arrays(arrays):
            return keep(like, *join(arrays))

        def run_cast(arrays):
            return cast_like(run(arrays), keep_arrays(arrays))

        new = lax.cond(should_apply, run_cast, keep_arrays, arrays)
        if jax.sharding.get_abstract_mesh().manual_axes:
            # Where devices decide apart, their results part. lax.cond does not tell
            # jax.shard_map so; a select does, and XLA drops it.
            return select(should_apply, new, new)
        return new

    if skip == "where" or not isinstance(should_apply, Tracer):
        return where(should_apply, run_arrays, arrays)
    # jit remembers the trace, which eval_shape and the branches then share.
    run_once = jax.jit(run_arrays)
    if skip == "cond":
        return cond(should_apply, run_once, arrays)
    return lax.platform_dependent(
        should_apply,
        arrays,
        cpu=lambda pred, arrays: cond(pred, run_once, arrays),
        default=lambda pred, arrays: where(pred, run_once, arrays),
    )
