"""The bodies of loops, branches and devices, of values and their twins.

Each body is followed once, so that the cost grows with the program. The rows of its
sites leave it as one array.

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
from optax_lossscale.diagnostics._trace.measure.rows import GroupedRows, Rows
from optax_lossscale.diagnostics._trace.measure.statistics import NOTHING
from optax_lossscale.diagnostics._trace.measure.twin import Pair, without_sites


class Place(NamedTuple):
    """The place of a jaxpr in the program.

    Attributes:
      path: The numbers and names of the equations around it.
      interpreter: The `Interpreter` that follows it.
      recorder: The rows of its sites.
      source: The user's line around it.
      scope: The named scopes around it.
      phase: The phase of the step; see `Site`.
      zero: A zero, i32[], that varies over all mapped axes, so that rows may be added
        to it.
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

    def enter(self, name: str, values: Sequence[Pair]) -> list[Pair]:
        """Records values that enter a loop, a branch or a device."""
        return self.interpreter.enter(name, values, self)

    def follow(self, jaxpr: Any, values: Sequence[Pair]) -> list[Pair]:
        """Follows a body; returns its results."""
        return self.interpreter.call(jaxpr, values, self)


class Result(NamedTuple):
    """The result of a loop, a branch or devices.

    Attributes:
      pairs: The results.
      sources: For each, the sites that it may come from; None for those without one.
      sites: The sites inside.
      rows: Their rows, i32[len(sites), n].
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


class Branch(NamedTuple):
    """The result of one branch: its pairs, its rows, and the sites of these."""

    pairs: list[Pair]
    rows: Any
    sites: list[int]


class Iteration(NamedTuple):
    """The result of one iteration of a loop.

    Attributes:
      state: The new state.
      outputs: The outputs of a `scan`.
      rows: The rows of the sites inside.
      sites: These sites.
      entered: The sites of the state that it began with.
      decision: The site of the decision to go on, if that may differ in float32.
    """

    state: list[Pair]
    outputs: list[Pair]
    rows: Any
    sites: list[int]
    entered: list[int | None]
    decision: int | None


class Body(NamedTuple):
    """A body that was traced once.

    Attributes:
      run: Runs its jaxpr; returns a result as the body does.
      types: The result of the body, with types in place of arrays.
    """

    run: Callable[..., Any]
    types: Any


def _trace(body: Callable[..., Any], *args: Any) -> Body:
    """Traces a body once."""
    template = Template()
    closed = jax.make_jaxpr(lambda *args: template.take(body(*args)))(*args)

    def run(*args):
        leaves = jax.tree.leaves(args)
        return template.fill(eval_jaxpr(closed.jaxpr, closed.consts, *leaves))

    return Body(run, template.fill(closed.out_avals))


def _twins(pairs: Sequence[Pair]) -> list[bool]:
    """Returns which pairs have a twin."""
    return [x.has_twin for x in pairs]


def run_cond(equation: Any, inputs: Sequence[Pair], place: Place) -> Result:
    """Runs a `cond`. Of branches that are not taken, the rows are zeros."""
    index, *operands = inputs
    branches = _trace_branches(equation, operands, place)
    sites = [x.types.sites for x in branches]

    def complete(number, pairs):
        taken = branches[number].run(pairs)
        rows = [np.repeat(NOTHING[None], len(x), 0) + place.zero for x in sites]
        rows[number] = taken.rows
        return without_sites(taken.pairs), jnp.concatenate(rows)

    chosen = [functools.partial(complete, k) for k in range(len(branches))]
    out, rows = flow.switch(equation, index.real, chosen, operands)
    ends = zip(*(x.types.pairs for x in branches), strict=True)
    sources = [[x.site for x in of_branches] for of_branches in ends]
    decision = index.site if index.has_twin else None
    return Result(out, sources, [y for x in sites for y in x], rows, decision)


def _trace_branches(equation, operands, place):
    """Traces all branches of a `cond`, until the same of their results have twins."""
    jaxprs = equation.params["branches"]

    def branch(number, has_twin, pairs):
        recorder = GroupedRows()
        inner = place.inside(f"branch {number}", recorder)
        out = inner.follow(jaxprs[number], inner.enter("operand", pairs))
        rows = recorder.finish() + place.zero
        return Branch(list(map(Pair.with_twin, out, has_twin)), rows, recorder.sites)

    has_twin = [is_inexact(x.aval) for x in equation.outvars]
    while True:
        traced = [
            _trace(functools.partial(branch, k, has_twin), operands)
            for k in range(len(jaxprs))
        ]
        twins = zip(*(_twins(x.types.pairs) for x in traced), strict=True)
        before, has_twin = has_twin, list(map(any, twins))
        if has_twin == before:
            return traced


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
      place: The place of the loop.
      body: Maps values, pairs of a slice and a place to new values, outputs, and the
        site of the decision to go on, or None.
      loop_over: Runs an iteration, of the state and a slice, on the first state; the
        third argument has the type of the rows. It returns the state, the outputs, the
        rows, and how many iterations ran, or None if that is no decision.
    """
    start, step = _trace_iteration(carry, x, place, body)

    def iterate(state, x):
        made = step.run(state, x)
        return without_sites(made.state), made.outputs, made.rows

    made = step.types
    state, outputs, rows, count = loop_over(iterate, start, made.rows)
    sources = []
    for before, after, entered in zip(carry, made.state, made.entered, strict=True):
        sources.append([i for i in (before.site, after.site) if i is not None])
        if entered is not None:
            place.interpreter.sites[entered].inputs = tuple(sources[-1])
    sources += [[x.site] for x in made.outputs]
    pairs = [*state, *outputs]
    return Result(pairs, sources, made.sites, rows, made.decision, count)


def _trace_iteration(carry, x, place, body):
    """Traces an iteration, until the new state has twins where the old one has them.

    Returns:
      The first state; and the iteration, whose result is an `Iteration`.
    """

    def iterate(state, x):
        recorder = GroupedRows()
        inner = place.inside("loop", recorder)
        values = [y.at(first.site) for y, first in zip(state, carry, strict=True)]
        values = inner.enter("state", values)
        new, outputs, decision = body(values, x, inner)
        rows = recorder.finish() + place.zero
        return Iteration(
            state=list(map(Pair.with_twin, new, _twins(state))),
            outputs=list(map(Pair.with_twin, outputs)),
            rows=rows,
            sites=recorder.sites,
            entered=[y.site for y in values],
            decision=decision,
        )

    start = without_sites(map(Pair.with_twin, carry))
    while True:
        step = _trace(iterate, start, x)
        has_twin = _twins(step.types.state)
        if has_twin == _twins(start):
            return start, step
        start = list(map(Pair.with_twin, start, has_twin))


def run_scan(equation: Any, inputs: Sequence[Pair], place: Place) -> Result:
    """Runs a `scan`."""
    consts, carry, xs = flow.scan_parts(equation, inputs)

    def body(values, x, inner):
        slices = inner.enter("slice", x)
        args = [*inner.enter("constant", consts), *values, *slices]
        out = inner.follow(equation.params["jaxpr"], args)
        return out[: len(carry)], out[len(carry) :], None

    def loop_over(iterate, start, _):
        def step_of_scan(state, x):
            state, *out = iterate(state, x)
            return state, out

        state, (outputs, rows) = flow.scan(equation, step_of_scan, start, xs)
        return state, outputs, jnp.max(rows, 0, initial=0), None

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
        args = inner.enter("constant", [*asked, *consts])
        (again,) = asking.follow(condition, [*args[: len(asked)], *values])
        args = [*args[len(asked) :], *values]
        new = inner.follow(equation.params["body_jaxpr"], args)
        if again.real.ndim:  # Under `jax.vmap`, each example has a condition.
            new = _chosen(again.real, new, values)
        return new, [], again.site if again.has_twin else None

    def loop_over(iterate, start, like):
        def goes_on(both):
            args = [*(x.real for x in asked), *(x.real for x in both[0])]
            return jnp.any(eval_jaxpr(condition.jaxpr, condition.consts, *args)[0])

        def step_of_while(both):
            before, most, count = both
            state, _, rows = iterate(before, [])
            return state, jnp.maximum(most, rows), count + 1

        nothing = np.zeros(like.shape, np.int32) + place.zero
        start = start, nothing, jnp.asarray(place.zero, jnp.float32)
        state, rows, count = lax.while_loop(goes_on, step_of_while, start)
        return state, [], rows, count

    return _run_loop(carry, [], place, body, loop_over)


def _chosen(is_new, new, old):
    """Returns new values of the examples that go on, and old ones of the others."""
    choose = functools.partial(flow.choose, is_new)
    return [
        Pair(choose(x.real, y.real), choose(x.in_float32, y.in_float32), x.site)
        for x, y in zip(new, old, strict=True)
    ]


def run_shard_map(equation: Any, inputs: Sequence[Pair], place: Place) -> Result:
    """Runs a `shard_map`. Rows are those of the worst device."""
    params, axes = equation.params, parts.manual_axes(equation)
    static = Template()

    def body(pairs):
        # It varies over all axes of devices, as the rows do.
        every = jax.sharding.get_abstract_mesh().manual_axes
        zero = 0 * lax.axis_index(tuple(every))
        recorder = GroupedRows()
        inner = place.inside("device", recorder)._replace(zero=zero)
        out = inner.follow(params["jaxpr"], inner.enter("operand", pairs))
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
