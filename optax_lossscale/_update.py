"""Apply the update or keep the old values: `select`, or `cond` on CPU."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.core import Tracer

from optax_lossscale import _hints, _tree

# Replaces the gradients of a skipped step. Not 0, where a norm has no derivative. But
# small: an inner optimizer may add up gradients over devices, and would add this to
# those of devices that do not skip.
SMALL = 2.0**-20
# On CPU. A select copies the state, a branch stores the updates: branch, unless the
# updates are this many times as large.
MUCH_LARGER = 4


def is_recording() -> bool:
    """Whether operations are recorded for a compiler, as under `jax.jit`.

    `jax.vmap` and `jax.grad` alone record nothing: they run operations one by one.
    """
    return isinstance(_probe(), Tracer)


@jax.jit
def _probe():
    # Compiled, because an eager operation would transfer the constant to the device,
    # which jax.transfer_guard may forbid.
    return np.zeros((), bool)


def may_branch() -> bool:
    """Whether `lax.cond` may skip a step."""
    # Devices of jax.shard_map need not agree: if one branched alone, it would not join
    # the collectives of the others.
    return is_recording() and not jax.sharding.get_abstract_mesh().manual_axes


def barrier_on_cpu(skips: bool, tree: Any) -> Any:
    """Puts a barrier after gradients, if a step with them may branch on CPU.

    Otherwise XLA computes the last operation of each gradient twice, in the layout of
    the check and in that of the branch, and stores both.
    """
    if not (skips and may_branch()):
        return tree
    arrays, join = _tree.split_arrays(tree)

    # One barrier per leaf: a joint one would give every leaf the varying axes of all
    # (jax.shard_map).
    def barriers(arrays):
        return [lax.optimization_barrier(x) for x in arrays]

    return join(lax.platform_dependent(arrays, cpu=barriers, default=list))


def conditional_update(
    should_apply: jax.Array | None,
    run: Callable[..., Any],
    keep: Callable[..., Any],
    inputs: Any,
    *operands: Any,
) -> Any:
    """Returns `run(inputs, *operands)` if `should_apply`, else the result of `keep`.

    Args:
      should_apply: bool[]; None always runs.
      run: The step, which is traced once. GPU and TPU run it and select, because a
        branch keeps XLA from fusing the step with other operations. CPU branches
        instead, because a select makes XLA copy the donated state. (It selects if the
        state is small.)
      keep: Called as `keep(like, *operands)`. `like` is the result of `run`, or its
        shapes and dtypes. The result of `run` is cast to the dtypes of its result.
      inputs: A pytree that may hold inf or nan if the step is skipped. With a select
        `run` is computed for a skipped step as well, and gets small values instead:
        otherwise the derivative of the select would be 0 * inf = nan.
      *operands: Pytrees. Pass large arrays here: closing over them makes XLA copy
        them at a branch.

    Returns:
      A tree of the structure that `run` and `keep` share.
    """
    arrays, join = _tree.split_arrays((inputs, operands))
    results = _tree.Template()

    def run_arrays(arrays):
        inputs, operands = join(arrays)
        return results.take(run(inputs, *operands))

    def keep_arrays(like, arrays):
        new = results.fill(like)
        old = keep(new, *join(arrays)[1])
        if place := _tree.difference(new, old):
            raise ValueError(
                f"{_hints.PARAMETERS} In (result, state) of a step, {place}"
            )
        return _tree.split_arrays(old)[0]

    if should_apply is None:
        new = run_arrays(arrays)
        return results.fill(_tree.cast_like(new, keep_arrays(new, arrays)))
    compute = jax.jit(run_arrays) if is_recording() else run_arrays

    def where(should_apply, arrays):
        inputs, operands = join(arrays)
        inexact, join_inputs = _tree.split_arrays(inputs, _tree.is_inexact_array)
        guarded = _tree.in_one_program(_small_if_skipped, should_apply, inexact)
        guarded = join_inputs(guarded), operands
        new = compute(_tree.split_arrays(guarded)[0])
        old = keep_arrays(new, arrays)
        return _tree.select(should_apply, _tree.cast_like(new, old), old)

    def branch(should_apply, arrays):
        def skip_branch(arrays):
            return keep_arrays(like, arrays)

        def run_branch(arrays):
            return _tree.cast_like(compute(arrays), skip_branch(arrays))

        return lax.cond(should_apply, run_branch, skip_branch, arrays)

    def on_cpu(should_apply, arrays):
        is_small = _is_select_better(keep_arrays(like, arrays), arrays)
        return (where if is_small else branch)(should_apply, arrays)

    if may_branch():
        like = jax.eval_shape(compute, arrays)
        new = lax.platform_dependent(should_apply, arrays, cpu=on_cpu, default=where)
    else:
        new = where(should_apply, arrays)
    return results.fill(new)


@functools.partial(jax.jit, inline=True)
def _small_if_skipped(should_apply: jax.Array, arrays: list[Any]) -> list[Any]:
    return [lax.select(should_apply, x, _tree.filled_like(x, SMALL)) for x in arrays]


def _is_select_better(old: list[jax.Array], arrays: list[jax.Array]) -> bool:
    """Whether a branch would store much more than a select copies.

    Args:
      old: The results of a skipped step.
      arrays: The arguments of the step. Those that are also in `old` are the state.
    """
    kept = {id(x) for x in arrays}
    state = sum(x.size for x in old if id(x) in kept)
    updates = sum(x.size for x in old) - state
    return updates > MUCH_LARGER * state
