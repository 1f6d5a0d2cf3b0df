"""Branches that run a step or skip it."""

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

from optax_lossscale._tree import (
    cast_like,
    is_inexact,
    select,
    split_arrays,
    strongly_typed,
)

Arrays = list[jax.Array]

# A select copies the state, a branch stores the updates: the branch is better unless
# the updates are this much larger.
MUCH_LARGER = 4


class Program:
    """A function of a list of arrays, traced once for several uses.

    Attributes:
      traced: The program.
      like: The shapes and dtypes of the arrays in the result of the function.
      run: Computes a list of these arrays.
      join: Makes a result from a list of arrays, and from the constants in it.
    """

    def __init__(self, function: Callable[[Arrays], Any], arrays: Arrays):
        joins = []

        def compute(arrays):
            results, join = split_arrays(strongly_typed(function(arrays)))
            joins.append(join)
            return results

        self.traced: ClosedJaxpr = jax.make_jaxpr(compute)(arrays)
        (self.join,) = joins
        self.run = jax.jit(lambda arrays: jaxpr_as_fun(self.traced)(*arrays))
        # In JAX 0.8 the shapes that jax.make_jaxpr returns lack the varying axes.
        self.like = jax.eval_shape(self.run, arrays)


def branch(
    should_apply: jax.Array,
    program: Program,
    keep: Callable[[Any, Arrays], Arrays],
    arrays: Arrays,
) -> Arrays:
    """Returns `program.run(arrays)` if `should_apply`, else `keep(like, arrays)`.

    Args:
      should_apply: bool[].
      program: The step. Its results are cast to the dtypes of those of `keep`.
      keep: Its first argument has the shapes and dtypes of the results of the step.
      arrays: What the step reads.
    """
    like = program.like
    skip_branch = functools.partial(keep, like)

    def run_branch(arrays):
        return cast_like(program.run(arrays), skip_branch(arrays))

    if not jax.sharding.get_abstract_mesh().manual_axes:
        return lax.cond(should_apply, run_branch, skip_branch, arrays)
    # Both branches must vary over the same axes of jax.shard_map.
    axes = _varying_axes(like, jax.eval_shape(skip_branch, arrays))
    branches = [lambda x, f=f: _vary(f(x), axes) for f in (run_branch, skip_branch)]
    new = lax.cond(should_apply, *branches, arrays)
    # Devices that decide separately have different results. lax.cond does not tell
    # jax.shard_map so, but a select does, and XLA removes it.
    return select(should_apply, new, new)


def branch_and_follow(
    should_apply: jax.Array,
    program: Program,
    keep: Callable[[Any, Arrays], Arrays],
    arrays: Arrays,
    num_inputs: int,
) -> Arrays | None:
    """Does what `branch` does, but stores no updates where it can.

    A branch overwrites the state and stores new arrays, the updates. But often these
    follow from the new state: those of Adam from its moments and count. Then only the
    state is a result of the branch, and XLA computes the updates where they are used.

    Args:
      should_apply: See `branch`.
      program: See `branch`.
      keep: See `branch`.
      arrays: See `branch`.
      num_inputs: How many of the first arrays may be non-finite if the step is skipped.
        Updates that need these are stored.

    Returns:
      As `branch`, or None if a select is better: it stores no updates but copies the
      state, which here is much smaller.
    """
    old = keep(program.like, arrays)
    # The branch overwrites the state. Afterwards only its scalars are read: XLA has to
    # copy what is read later.
    kept = {id(x) for x in arrays} & {id(x) for x in old}
    state = [i for i, x in enumerate(old) if id(x) in kept]
    in_shard_map = bool(jax.sharding.get_abstract_mesh().manual_axes)
    if len(state) == len(old) or in_shard_map or program.traced.effects:
        return branch(should_apply, program, keep, arrays)
    readable = [
        i
        for i, x in enumerate(arrays)
        if i >= num_inputs and (id(x) not in kept or x.size == 1)
    ]
    exact = [i for i in state if old[i].dtype == program.like[i].dtype]
    later, follow = split(program.traced, exact, readable)
    stored = sorted({*range(len(old))}.difference(later))
    state_size = sum(old[i].size for i in state)
    updates_size = sum(old[i].size for i in stored) - state_size
    if updates_size > MUCH_LARGER * state_size:
        return None

    def take(results):
        return [results[i] for i in stored]

    like = take(old)

    def guard(x):
        # No derivative if the step is skipped, where it might be 0 * inf.
        return lax.select(should_apply, x, lax.stop_gradient(x)) if is_inexact(x) else x

    taken = lax.cond(
        should_apply,
        lambda arrays: cast_like(take(program.run(arrays)), like),
        lambda arrays: take(keep(program.like, arrays)),
        arrays,
    )
    new = dict(enumerate(old)) | dict(zip(stored, taken, strict=True))
    given = [new[i] for i in exact] + [arrays[i] for i in readable]
    updates = follow([guard(x) for x in [*given, *program.traced.consts]])
    kept_updates = [old[i] for i in later]
    updates = select(should_apply, cast_like(updates, kept_updates), kept_updates)
    return list((new | dict(zip(later, updates, strict=True))).values())


def split(
    program: ClosedJaxpr, results: Sequence[int], arguments: Sequence[int]
) -> tuple[list[int], Callable[[Arrays], Arrays]]:
    """Finds the results of a program that follow from other results.

    Args:
      program: A program without side effects.
      results: The indices of the results from which others may follow.
      arguments: The indices of the arguments from which they may follow, too.

    Returns:
      The indices of the results that follow from these and the constants alone; and a
      function that computes them from a list: these results, these arguments, and the
      constants.
    """
    jaxpr = program.jaxpr
    given = [jaxpr.outvars[i] for i in results]
    given += [*(jaxpr.invars[i] for i in arguments), *jaxpr.constvars]
    found, possible = _variables(given), []
    for equation in jaxpr.eqns:
        if _variables(equation.invars) <= found and not _is_unsafe(equation):
            if not found.issuperset(equation.outvars):
                possible.append(equation)
            found.update(equation.outvars)
    others = sorted({*range(len(jaxpr.outvars))}.difference(results))
    later = [i for i in others if _variables([jaxpr.outvars[i]]) <= found]
    wanted = [jaxpr.outvars[i] for i in later]
    needed, equations = _variables(wanted), []
    for equation in reversed(possible):
        if not needed.isdisjoint(equation.outvars):
            needed |= _variables(equation.invars)
            equations.append(equation)
    # A result may be a literal. A variable may be both a result and an argument.
    index = {x: i for i, x in enumerate(given) if not isinstance(x, Literal)}
    rest = jaxpr.replace(
        constvars=[], invars=[*index], outvars=wanted, eqns=equations[::-1]
    )
    compute = jaxpr_as_fun(ClosedJaxpr(rest, []))
    return later, lambda values: compute(*(values[i] for i in index.values()))


def _is_unsafe(equation: Any) -> bool:
    """Tells whether an equation may run forever, or raise, at the initial state.

    What follows from the state is also computed in skipped steps, where the state may
    be the initial one, from which the inner optimizer never computes updates.
    """
    if equation.primitive.name in ("while", "pure_callback"):
        return True
    programs = jax.tree.leaves(list(equation.params.values()))
    programs = [x for x in programs if hasattr(x, "eqns")]
    return any(_is_unsafe(inner) for program in programs for inner in program.eqns)


def _variables(atoms: Sequence[Any]) -> set[Any]:
    return {x for x in atoms if not isinstance(x, Literal)}


def _varying_axes(*trees: Any) -> list[frozenset[Hashable]]:
    """Returns the mesh axes of `jax.shard_map` over which each leaf of any tree varies.

    Args:
      *trees: Trees of `jax.ShapeDtypeStruct`, of one structure.
    """

    def axes(leaf):
        # The name of this attribute depends on the version of JAX.
        if hasattr(leaf, "manual_axis_type"):
            return getattr(leaf.manual_axis_type, "varying", frozenset())
        return getattr(leaf, "vma", None) or frozenset()

    leaves = (jax.tree.leaves(tree) for tree in trees)
    return [
        functools.reduce(frozenset.union, map(axes, group))
        for group in zip(*leaves, strict=True)
    ]


def _vary(tree: Any, axes: list[frozenset[Hashable]]) -> Any:
    """Makes each leaf vary over mesh axes, as both branches of a cond must.

    XLA removes the selects.
    """

    def leaf(x, axes):
        for axis in sorted(axes, key=str):
            x = lax.select(lax.axis_index(axis) >= 0, x, x)
        return x

    leaves, treedef = jax.tree.flatten(tree)
    return treedef.unflatten(map(leaf, leaves, axes))
