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
    stored: Sequence[int] | None = None,
) -> Arrays:
    """Returns `program.run(arrays)` if `should_apply`, else `keep(like, arrays)`.

    Args:
      should_apply: bool[].
      program: The step. Its results are cast to the dtypes of those of `keep`.
      keep: Its first argument has the shapes and dtypes of the results of the step.
      arrays: What the step reads.
      stored: The indices of the results to return. None returns all.
    """

    def take(results):
        return results if stored is None else [results[i] for i in stored]

    def skip_branch(arrays):
        return take(keep(program.like, arrays))

    def run_branch(arrays):
        return cast_like(take(program.run(arrays)), skip_branch(arrays))

    if not in_shard_map():
        return lax.cond(should_apply, run_branch, skip_branch, arrays)
    # Both branches must vary over the same axes of jax.shard_map.
    axes = _varying_axes(take(program.like), jax.eval_shape(skip_branch, arrays))
    branches = [lambda x, f=f: _vary(f(x), axes) for f in (run_branch, skip_branch)]
    new = lax.cond(should_apply, *branches, arrays)
    # Devices that decide separately have different results. lax.cond does not tell
    # jax.shard_map so, but a select does, and XLA removes it.
    return select(should_apply, new, new)


def in_shard_map() -> bool:
    """Tells whether `jax.shard_map` runs this for some of the devices."""
    return bool(jax.sharding.get_abstract_mesh().manual_axes)


def find_stored(
    program: Program, old: Arrays, arrays: Arrays, num_inputs: int
) -> tuple[list[int], Callable[[jax.Array, Arrays], Arrays]]:
    """Finds the results that a branch must store, and computes the others from them.

    A branch overwrites the state and stores new arrays, the updates. But often these
    follow from the new state: those of Adam from its moments and count. Then only the
    state is a result of the branch, and XLA computes the updates where they are used.

    Args:
      program: The step, without side effects.
      old: The results of a skipped step.
      arrays: What the step reads.
      num_inputs: How many of the first arrays may be non-finite if the step is skipped.
        Updates that need these are stored.

    Returns:
      The indices of the stored results; and a function that takes `should_apply` and
      these results, and returns all results.
    """
    # The branch overwrites the state. Afterwards only its scalars are read: XLA has to
    # copy what is read later.
    kept = {id(x) for x in arrays} & {id(x) for x in old}
    exact = [
        i
        for i, (x, like) in enumerate(zip(old, program.like, strict=True))
        if id(x) in kept and x.dtype == like.dtype
    ]
    readable = [
        i
        for i, x in enumerate(arrays)
        if i >= num_inputs and (id(x) not in kept or x.size == 1)
    ]
    later, compute = split(program.traced, exact, readable)
    stored = sorted({*range(len(old))}.difference(later))

    def complete(should_apply, results):
        def guard(x):
            # No derivative if the step is skipped, where it might be 0 * inf.
            if not is_inexact(x):
                return x
            return lax.select(should_apply, x, lax.stop_gradient(x))

        new = dict(zip(stored, results, strict=True))
        given = [new[i] for i in exact] + [arrays[i] for i in readable]
        updates = compute([guard(x) for x in [*given, *program.traced.consts]])
        kept_updates = [old[i] for i in later]
        updates = select(should_apply, cast_like(updates, kept_updates), kept_updates)
        new |= zip(later, updates, strict=True)
        return [new[i] for i in range(len(old))]

    return stored, complete


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
