"""Run a step, or keep everything as it was."""

from collections.abc import Callable
from typing import Any, Literal

import jax
from jax import lax
from jax.core import Tracer

from optax_lossscale._tree import cast_like, is_array, select

Skip = Literal["auto", "where", "cond"]


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

    leaves, treedef = jax.tree.flatten(operands)
    arrays = [x for x in leaves if is_array(x)]

    def unpack(arrays):
        rest = iter(arrays)
        return treedef.unflatten([next(rest) if is_array(x) else x for x in leaves])

    def run_arrays(arrays):
        return run(*unpack(arrays))

    def where(should_apply, run, arrays):
        new = run(arrays)
        old = keep(new, *unpack(arrays))
        return select(should_apply, cast_like(new, old), old)

    def cond(should_apply, run, arrays):
        like = jax.eval_shape(run, arrays)

        def keep_arrays(arrays):
            return keep(like, *unpack(arrays))

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
