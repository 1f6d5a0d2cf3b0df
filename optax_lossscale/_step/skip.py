"""Runs a step or skips it, in the way that suits the platform."""

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax import core, lax

from optax_lossscale._step.branch import Program, branch, find_stored, in_shard_map
from optax_lossscale._tree import cast_like, is_array, is_inexact, select, split_arrays

Skip = Literal["auto", "where", "cond"]

# Replaces inf and nan in a skipped step. Not 0, where a norm has no derivative. Not 1:
# if the step sums over devices, that would change the result on devices that do not
# skip.
SMALL = 2.0**-20
# A select copies the state, a branch stores the updates: the branch is better unless
# the updates are this much larger.
MUCH_LARGER = 4


def is_recording() -> bool:
    """Tells whether operations are recorded for a compiler, as under `jax.jit`.

    `jax.vmap` and `jax.grad` alone record nothing: they run operations one by one.
    """
    return isinstance(_constant(), core.Tracer)


@jax.jit
def _constant():
    # Compiled, because an eager operation would transfer the constant to the device,
    # which jax.transfer_guard may forbid.
    return np.zeros((), bool)


def choose_skip(skip: Skip, axis_name: Hashable | None) -> Skip:
    """Returns "where" for "auto" if devices may decide differently, else `skip`.

    Devices along a mapped axis that `axis_name` leaves out need not agree. If they
    branched, a device that skips would not join the collectives of the others.
    """
    named = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    mapped = set(jax.sharding.get_abstract_mesh().manual_axes)
    # In JAX 0.8, jax.pmap may have no mesh.
    names = vars(core).get("unsafe_get_axis_names_DO_NOT_USE", tuple)()
    apart = mapped.union(names).difference(named)
    return "where" if skip == "auto" and apart else skip


def barrier_on_cpu(skip: Skip | None, tree: Any) -> Any:
    """Computes gradients before they are used, if the step branches on CPU.

    Otherwise XLA computes the end of each gradient twice, in the layout of the check
    and in that of the branch, and keeps both.
    """
    if skip in (None, "where") or not is_recording():
        return tree
    arrays, join = split_arrays(tree)
    # One barrier per leaf: a joint one would give every leaf the varying axes of all
    # (jax.shard_map).
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
    inputs: Any,
    *operands: Any,
) -> Any:
    """Returns `run(inputs, *operands)` if `should_apply`, else what `keep` returns.

    Args:
      skip: "where" runs and selects; "cond" branches; "auto" branches on CPU, where
        a select makes XLA copy the donated state (unless that is small), and selects
        elsewhere, where a branch prevents XLA from fusing the step with other
        operations. If nothing is recorded (`is_recording`), all three select. None
        always runs.
      should_apply: bool[].
      run: The step. It is traced once.
      keep: Called as `keep(like, *operands)`. `like` is the result of `run`, or its
        shapes and dtypes. The result of `run` is cast to the dtypes of its result.
      inputs: A pytree that may hold inf or nan if the step is skipped. If `run` is
        computed although the step is skipped, it gets small numbers instead.
        Otherwise differentiating the select would compute 0 * inf = nan.
      *operands: Pytrees. Pass large arrays here: closing over them makes XLA copy
        them at a branch.

    Returns:
      A tree of the structure that `run` and `keep` share.
    """
    if skip is None:
        new = run(inputs, *operands)
        return cast_like(new, keep(new, *operands))

    arrays, join = split_arrays((inputs, operands))

    def run_arrays(arrays):
        inputs, operands = join(arrays)
        return run(inputs, *operands)

    def keep_arrays(like, arrays):
        kept = keep(like, *join(arrays)[1])
        check_same(like, kept)
        return kept

    def where(should_apply, run, keep, arrays):
        inputs, operands = join(arrays)
        new = run(split_arrays((small_unless(should_apply, inputs), operands))[0])
        old = keep(new, arrays)
        return select(should_apply, cast_like(new, old), old)

    if skip == "where" or not is_recording():
        return where(should_apply, run_arrays, keep_arrays, arrays)
    program = Program(run_arrays, arrays)

    def keep_list(like, arrays):
        return split_arrays(keep_arrays(program.join(like), arrays))[0]

    if skip == "cond":
        return program.join(branch(should_apply, program, keep_list, arrays))
    num_inputs = len(split_arrays(inputs)[0])

    def select_step(should_apply, arrays):
        return where(should_apply, program.run, keep_list, arrays)

    def on_cpu(should_apply, arrays):
        old = keep_list(program.like, arrays)
        keeps_all = {id(x) for x in old} <= {id(x) for x in arrays}
        if keeps_all or in_shard_map() or program.traced.effects:
            return branch(should_apply, program, keep_list, arrays)
        stored, complete = find_stored(program, old, arrays, num_inputs)
        if is_select_better(old, arrays, stored):
            return select_step(should_apply, arrays)
        results = branch(should_apply, program, keep_list, arrays, stored)
        return complete(should_apply, results)

    new = lax.platform_dependent(should_apply, arrays, cpu=on_cpu, default=select_step)
    return program.join(new)


def is_select_better(
    old: list[jax.Array], arrays: list[jax.Array], stored: Sequence[int]
) -> bool:
    """Tells whether a branch would store more than a select copies.

    Args:
      old: The results of a skipped step.
      arrays: What the step reads. What is also in `old` is the state.
      stored: The indices of the results that the branch returns.
    """
    kept = {id(x) for x in arrays}
    state = sum(old[i].size for i in stored if id(old[i]) in kept)
    updates = sum(old[i].size for i in stored) - state
    return updates > MUCH_LARGER * state


def check_same(new: Any, old: Any) -> None:
    """Raises if a step returns other structures or shapes than a skipped step.

    Args:
      new: What the step returns, or its shapes.
      old: What a skipped step returns.
    """

    def leaf(path, x, y):
        if np.shape(x) != np.shape(y):
            place = jax.tree_util.keystr(path)
            raise ValueError(f"{place} is of shape {np.shape(x)}, not {np.shape(y)}.")

    try:
        jax.tree_util.tree_map_with_path(leaf, new, old)
    except ValueError as error:
        raise ValueError(
            "inner_optimizer must return parameters and a state like those it gets. "
            "Pass grads of the structure and shapes of params, and the state that this "
            f"optimizer's init made for these params. In (result, state): {error}"
        ) from error


def small_unless(should_apply: jax.Array, tree: Any) -> Any:
    """Replaces floating-point leaves with small numbers if the step is skipped."""

    def leaf(x):
        is_number = is_array(x) and is_inexact(x)
        return _small_number_unless(should_apply, x) if is_number else x

    return jax.tree.map(leaf, tree)


@functools.partial(jax.jit, inline=True)
def _small_number_unless(should_apply, x):
    return lax.select(should_apply, x, lax.full_like(x, SMALL))
