"""The bodies of loops, branches and devices, of values and their twins.

Each body is followed once, so that the cost grows with the program. What is summed up
inside leaves the body as one array, with one row for each site.

JAX carries pairs, as they are pytrees. But branches have to return the same structure,
and a loop has to return that of its state. So there pairs have no sites, and each has a
twin if any branch or the loop makes one: a body is followed until no more are added.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import eval_jaxpr
from jax.sharding import PartitionSpec

from optax_lossscale._jaxprs import flow, lines, parts
from optax_lossscale._tree import Template, is_inexact
from optax_lossscale.diagnostics._trace.summary import NOTHING, GroupedRows, Rows
from optax_lossscale.diagnostics._trace.twin import Pair, without_sites


class Place(NamedTuple):
    """Where a jaxpr runs: its path, what follows it and sums up, the user's line.

    `zero` is added to summaries. It is a zero, i32[], that varies over the axes of the
    enclosing `jax.shard_map`, as all of them must.
    """

    path: tuple[Any, ...]
    interpreter: Any
    recorder: Rows
    source: lines.Source = lines.Source()
    scope: str = ""
    phase: str = "forward"
    zero: Any = np.int32(0)

    def inside(self, name: str, recorder: Rows) -> "Place":
        """Returns the place inside a loop, a branch or a device."""
        return self._replace(path=(*self.path, name), recorder=recorder)


class Result(NamedTuple):
    """What a loop, a branch or devices return.

    Attributes:
      pairs: The results.
      sources: For each, the sites that it may come from; None for what has none.
      sites: What was summed up inside.
      rows: Its summaries, i32[len(sites), n].
      decision: The site that says which branch is taken, or how often a loop runs, if
        that may be another one in float32.
      count: Of a `while`, how many iterations it ran, f32[].
    """

    pairs: list[Pair]
    sources: list[list[int | None]]
    sites: list[int]
    rows: Any
    decision: int | None = None
    count: Any = None


def _traced(function: Callable[..., Any], *args: Any) -> tuple[Callable[..., Any], Any]:
    """Traces a function once.

    Returns:
      A function that runs its jaxpr; and what it returns, with types in place of
      arrays.
    """
    template = Template()
    closed = jax.make_jaxpr(lambda *args: template.take(function(*args)))(*args)

    def replay(*args):
        leaves = jax.tree.leaves(args)
        return template.fill(eval_jaxpr(closed.jaxpr, closed.consts, *leaves))

    return replay, template.fill(closed.out_avals)


def run_cond(equation: Any, inputs: Sequence[Pair], place: Place) -> Result:
    """Runs a `cond`. Of branches that are not taken, the summaries are zeros."""
    index, *operands = inputs
    branches = equation.params["branches"]
    numbers = range(len(branches))
    differ = [is_inexact(x.aval) for x in equation.outvars]

    def branch(k, pairs):
        recorder = GroupedRows()
        inner = place.inside(f"branch {k}", recorder)
        values = inner.interpreter.enter("operand", pairs, inner)
        out = inner.interpreter.call(branches[k], values, inner)
        rows = recorder.finish() + place.zero
        return list(map(Pair.with_twin, out, differ)), rows, recorder.sites

    while True:
        before = differ
        traced = [_traced(functools.partial(branch, k), operands) for k in numbers]
        ends = list(zip(*(out for _, (out, _, _) in traced), strict=True))
        differ = [any(x.differs for x in of_branches) for of_branches in ends]
        if differ == before:  # What one branch decides otherwise has a twin in all.
            break
    sites = [x for _, (_, _, x) in traced]

    def complete(k, pairs):
        out, own, _ = traced[k][0](pairs)
        rows = [np.repeat(NOTHING[None], len(x), 0) + place.zero for x in sites]
        return without_sites(out), jnp.concatenate([*rows[:k], own, *rows[k + 1 :]])

    chosen = [functools.partial(complete, k) for k in numbers]
    out, rows = flow.switch(equation, index.real, chosen, operands)
    sources = [[x.site for x in of_branches] for of_branches in ends]
    decision = index.site if index.differs else None
    return Result(out, sources, [y for x in sites for y in x], rows, decision)


def _run_loop(
    carry: Sequence[Pair],
    x: Any,
    place: Place,
    body: Callable[..., Any],
    loop_over: Callable[..., Any],
) -> Result:
    """Runs a loop whose state holds pairs.

    Args:
      carry: The values before the loop.
      x: The types of one slice, in pairs.
      place: Where it is.
      body: Maps values, pairs of a slice and a place to new values, outputs, and the
        site of the decision to go on, or None.
      loop_over: Runs a step, of the state and a slice, on the first state; the third
        argument has the type of the summaries. It returns the state, the outputs, the
        summaries, and how many iterations ran, or None if that is no decision.
    """

    def iterate(state, x):
        recorder = GroupedRows()
        inner = place.inside("loop", recorder)
        values = [y.at(first.site) for y, first in zip(state, carry, strict=True)]
        values = inner.interpreter.enter("state", values, inner)
        new, out, decision = body(values, x, inner)
        rows = recorder.finish() + place.zero
        new = [y.with_twin(old.differs) for y, old in zip(new, state, strict=True)]
        about = [y.site for y in values], recorder.sites, decision
        return new, list(map(Pair.with_twin, out)), rows, about

    def iterate_without_sites(state, x):
        new, out, rows, _ = step(state, x)
        return without_sites(new), out, rows

    start = without_sites(map(Pair.with_twin, carry))
    while True:
        step, (new, out, rows, about) = _traced(iterate, start, x)
        if all(y.differs == old.differs for y, old in zip(new, start, strict=True)):
            break
        # What the loop decides otherwise, it carries on.
        start = [old.with_twin(y.differs) for y, old in zip(new, start, strict=True)]
    entered, sites, decision = about
    state, outs, rows, count = loop_over(iterate_without_sites, start, rows)
    sources = []
    for x, made, first in zip(carry, new, entered, strict=True):
        sources.append([i for i in (x.site, made.site) if i is not None])
        if first is not None:
            place.interpreter.sites[first].inputs = tuple(sources[-1])
    sources += [[x.site] for x in out]
    return Result([*state, *outs], sources, sites, rows, decision, count)


def run_scan(equation: Any, inputs: Sequence[Pair], place: Place) -> Result:
    """Runs a `scan`."""
    consts, carry, xs = flow.scan_parts(equation, inputs)

    def body(values, x, inner):
        slices = inner.interpreter.enter("slice", x, inner)
        args = [*inner.interpreter.enter("constant", consts, inner), *values, *slices]
        out = inner.interpreter.call(equation.params["jaxpr"], args, inner)
        return out[: len(carry)], out[len(carry) :], None

    def loop_over(step, start, _):
        def step_of_scan(state, x):
            state, *out = step(state, x)
            return state, out

        state, (outs, rows) = flow.scan(equation, step_of_scan, start, xs)
        return state, outs, jnp.max(rows, 0, initial=0), None

    def types_of_slice(pair, variable):
        return jax.tree.map(
            lambda x: parts.type_like(variable.aval, dtype=x.dtype), pair
        )

    variables = parts.opened(equation.params["jaxpr"])[0].invars
    slices = map(types_of_slice, xs, variables[len(consts) + len(carry) :])
    return _run_loop(carry, list(slices), place, body, loop_over)


def run_while(equation: Any, inputs: Sequence[Pair], place: Place) -> Result:
    """Runs a `while`, as often as the program does."""
    asked, consts, carry = flow.while_parts(equation, inputs)
    condition = equation.params["cond_jaxpr"]

    def body(values, _, inner):
        asking = inner._replace(path=(*inner.path, -1))
        args = inner.interpreter.enter("constant", [*asked, *consts], inner)
        (again,) = inner.interpreter.call(
            condition, [*args[: len(asked)], *values], asking
        )
        args = [*args[len(asked) :], *values]
        new = inner.interpreter.call(equation.params["body_jaxpr"], args, inner)
        if again.real.ndim:  # Under `jax.vmap`, each example has a condition.
            choose = functools.partial(flow.choose, again.real)
            pairs = zip(new, values, strict=True)
            new = [
                Pair(choose(x.real, y.real), choose(x.twin, y.twin), x.site)
                for x, y in pairs
            ]
        return new, [], again.site if again.differs else None

    def loop_over(step, start, like):
        def goes_on(both):
            args = [*(x.real for x in asked), *(x.real for x in both[0])]
            return jnp.any(eval_jaxpr(condition.jaxpr, condition.consts, *args)[0])

        def step_of_while(both):
            before, most, count = both
            state, _, rows = step(before, [])
            return state, jnp.maximum(most, rows), count + 1

        nothing = np.zeros(like.shape, np.int32) + place.zero
        start = start, nothing, jnp.asarray(place.zero, jnp.float32)
        state, rows, count = lax.while_loop(goes_on, step_of_while, start)
        return state, [], rows, count

    return _run_loop(carry, [], place, body, loop_over)


def run_shard_map(equation: Any, inputs: Sequence[Pair], place: Place) -> Result:
    """Runs a `shard_map`. Summaries are those of the worst device."""
    params, axes = equation.params, parts.manual_axes(equation)
    static = Template()

    def body(pairs):
        # It varies over all axes of devices, as the summaries do.
        every = jax.sharding.get_abstract_mesh().manual_axes
        zero = 0 * lax.axis_index(tuple(every))
        recorder = GroupedRows()
        inner = place.inside("device", recorder)._replace(zero=zero)
        values = inner.interpreter.enter("operand", pairs, inner)
        out = inner.interpreter.call(params["jaxpr"], values, inner)
        rows = (recorder.finish() + zero)[None]
        static.take(recorder.sites)
        return list(map(Pair.with_twin, out)), rows

    in_specs = (list(params["in_specs"]),)
    out_specs = list(params["out_specs"]), PartitionSpec(axes)
    on_devices = flow.shard_map(equation, body, in_specs, out_specs)
    out, rows = on_devices(inputs)
    sources = [[x.site] for x in out]
    return Result(out, sources, static.fill([]), rows.max(0))


BODIES = {
    "cond": run_cond, "scan": run_scan, "while": run_while, "shard_map": run_shard_map,
}  # fmt: skip
