"""Runs loops, branches and devices, of values and their twins.

Each body is followed once, so that the cost grows with the program. Values enter as
pairs of arrays, and a value that cannot differ stays one array. What is summed up
inside leaves the body as one array, with one row for each site.
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
from optax_lossscale._tree import is_inexact
from optax_lossscale.diagnostics._trace.summary import NOTHING, Recorder
from optax_lossscale.diagnostics._trace.twin import Value, values_of


class Place(NamedTuple):
    """Where a jaxpr runs: its path, what sums up, the user's line."""

    path: tuple[Any, ...]
    recorder: Recorder
    source: lines.Source = lines.Source()
    scope: str = ""
    phase: str = "forward"

    def inside(self, name: str) -> "Place":
        """Returns the place inside a loop, a branch or a device."""
        return self._replace(path=(*self.path, name), recorder=Recorder())


class Result(NamedTuple):
    """What a loop, a branch or devices return.

    Attributes:
      pairs: The results, each an array and its twin, or None.
      sources: For each, the sites that it may come from.
      sites: What was summed up inside.
      summaries: i32[len(sites), n].
      decision: The site that says which branch is taken, or how often a loop runs, if
        that may be another one in float32.
    """

    pairs: list[Any]
    sources: list[list[int]]
    sites: list[int]
    summaries: Any
    decision: int | None = None


def _result(pairs, sources, sites, summaries, decision=None):
    known = [[i for i in x if i is not None] for x in sources]
    return Result(pairs, known, sites, summaries, decision)


def _traced(function: Callable[..., Any], *args: Any) -> tuple[Callable[..., Any], Any]:
    """Traces a function; returns one that runs its jaxpr, and the results' types."""
    closed, types = jax.make_jaxpr(function, return_shape=True)(*args)

    def run(*args):
        out = eval_jaxpr(closed.jaxpr, closed.consts, *jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(types), out)

    return run, types


def _labels(values: Sequence[Value]) -> list[tuple[int | None, bool]]:
    """Returns the sites of values, and whether they may differ, without the arrays."""
    return [(x.site, x.may_differ) for x in values]


def run_cond(
    evaluator: Any, equation: Any, inputs: Sequence[Value], place: Place
) -> Result:
    """Runs a `cond`. Of branches that are not taken, the summaries are zeros."""
    index, *operands = inputs
    branches = equation.params["branches"]
    numbers = range(len(branches))
    differ = [is_inexact(x.aval) for x in equation.outvars]
    ends: list[Any] = [None] * len(branches)
    sites: list[list[int]] = [[]] * len(branches)

    def run(k, pairs):
        inner = place.inside(f"branch {k}")
        values = evaluator.enter("operand", values_of(pairs, operands), inner)
        out = evaluator.call(branches[k], values, inner)
        ends[k], rows = _labels(out), evaluator.finish(inner)
        sites[k] = inner.recorder.sites
        return list(map(Value.pair, out, differ)), rows

    def trace():
        return [_traced(functools.partial(run, k), pairs)[0] for k in numbers]

    pairs = [x.pair(x.differs) for x in operands]
    traced = trace()
    either = [any(differs for _, differs in x) for x in zip(*ends, strict=True)]
    if differ != either:
        differ[:] = either  # What one branch decides otherwise has a twin in all.
        traced = trace()

    def complete(k, pairs):
        out, own = traced[k](pairs)
        rows = [np.repeat(NOTHING[None], len(x), 0) + evaluator.zero for x in sites]
        return out, jnp.concatenate([*rows[:k], own, *rows[k + 1 :]])

    chosen = [functools.partial(complete, k) for k in numbers]
    out, rows = flow.switch(equation, index.real, chosen, pairs)
    sources = [[i for i, _ in x] for x in zip(*ends, strict=True)]
    decision = index.site if index.differs else None
    return _result(out, sources, [y for x in sites for y in x], rows, decision)


def _run_loop(
    evaluator: Any,
    carry: Sequence[Value],
    x: Any,
    place: Place,
    body: Callable[..., Any],
    loop_over: Callable[..., Any],
) -> Result:
    """Runs a loop whose state holds pairs.

    Args:
      evaluator: What follows jaxprs.
      carry: The values before the loop.
      x: The pairs of one slice.
      place: Where it is.
      body: Maps values, pairs of a slice and a place to new values and outputs.
      loop_over: Runs a step, of the state and a slice, on the first state; the third
        argument has the type of the summaries.
    """
    differ, seen = [x.may_differ for x in carry], {}

    def iterate(pairs, x):
        inner = place.inside("loop")
        values = evaluator.enter("state", values_of(pairs, carry), inner)
        new, out = body(values, x, inner)
        rows = evaluator.finish(inner)
        seen.update(
            state=_labels(values), new=_labels(new), out=_labels(out),
            sites=inner.recorder.sites,
        )  # fmt: skip
        outs = [x.pair(x.may_differ) for x in out]
        return list(map(Value.pair, new, differ)), outs, rows

    while True:
        before, start = list(differ), list(map(Value.pair, carry, differ))
        run, (_, _, rows) = _traced(iterate, start, x)
        differ = [x or y for x, (_, y) in zip(differ, seen["new"], strict=True)]
        if differ == before:  # What the loop decides otherwise, it carries on.
            break
    state, outs, rows = loop_over(run, start, rows)
    sources = []
    for x, (made, _), (entered, _) in zip(
        carry, seen["new"], seen["state"], strict=True
    ):
        sources.append([x.site, made])
        if entered is not None:
            evaluator.sites[entered].inputs = tuple(
                i for i in sources[-1] if i is not None
            )
    sources += [[i] for i, _ in seen["out"]]
    return _result([*state, *outs], sources, seen["sites"], rows)


def run_scan(
    evaluator: Any, equation: Any, inputs: Sequence[Value], place: Place
) -> Result:
    """Runs a `scan`."""
    consts, carry, xs = flow.scan_parts(equation, inputs)

    def body(values, x, inner):
        slices = evaluator.enter("slice", values_of(x, xs), inner)
        args = [*evaluator.enter("constant", consts, inner), *values, *slices]
        out = evaluator.call(equation.params["jaxpr"], args, inner)
        return out[: len(carry)], out[len(carry) :]

    def loop_over(run, start, _):
        def step(state, x):
            state, *out = run(state, x)
            return state, out

        state, (outs, rows) = flow.scan(equation, step, start, pairs)
        return state, outs, jnp.max(rows, 0, initial=0)

    def first_of(x):
        return x[0] if len(x) else jnp.zeros(x.shape[1:], x.dtype)

    pairs = [x.pair(x.differs) for x in xs]
    slice_of = jax.tree.map(first_of, pairs)
    return _run_loop(evaluator, carry, slice_of, place, body, loop_over)


def run_while(
    evaluator: Any, equation: Any, inputs: Sequence[Value], place: Place
) -> Result:
    """Runs a `while`, as often as the program does."""
    asked, consts, carry = flow.while_parts(equation, inputs)
    condition = equation.params["cond_jaxpr"]
    decisions: list[int | None] = []

    def body(values, _, inner):
        asking = inner._replace(path=(*inner.path, -1))
        args = evaluator.enter("constant", [*asked, *consts], inner)
        (again,) = evaluator.call(condition, [*args[: len(asked)], *values], asking)
        decisions[:] = [again.site if again.differs else None]
        args = [*args[len(asked) :], *values]
        new = evaluator.call(equation.params["body_jaxpr"], args, inner)
        if again.real.ndim:  # Under `jax.vmap`, each example has a condition.
            choose = functools.partial(flow.choose, again.real)
            pairs = zip(new, values, strict=True)
            new = [
                Value(choose(x.real, y.real), choose(x.wide, y.wide), x.site)
                for x, y in pairs
            ]
        return new, []

    def loop_over(run, start, like):
        def goes_on(both):
            args = [*(x.real for x in asked), *(x for x, _ in both[0])]
            return jnp.any(eval_jaxpr(condition.jaxpr, condition.consts, *args)[0])

        def step(both):
            state, _, rows = run(both[0], [])
            return state, jnp.maximum(both[1], rows)

        nothing = np.zeros(like.shape, np.int32) + evaluator.zero
        state, rows = lax.while_loop(goes_on, step, (start, nothing))
        return state, [], rows

    result = _run_loop(evaluator, carry, [], place, body, loop_over)
    return result._replace(decision=decisions[0])


def run_shard_map(
    evaluator: Any, equation: Any, inputs: Sequence[Value], place: Place
) -> Result:
    """Runs a `shard_map`. Summaries are those of the worst device."""
    params, axes = equation.params, parts.manual_axes(equation)
    seen: dict[str, Any] = {}
    outside = evaluator.zero

    def body(pairs):
        # It varies over all axes of devices, as the summaries do.
        every = jax.sharding.get_abstract_mesh().manual_axes
        evaluator.zero = 0 * lax.axis_index(tuple(every))
        inner = place.inside("device")
        values = evaluator.enter("operand", values_of(pairs, inputs), inner)
        out = evaluator.call(params["jaxpr"], values, inner)
        rows = evaluator.finish(inner)[None]
        seen.update(out=_labels(out), sites=inner.recorder.sites)
        return [x.pair(x.may_differ) for x in out], rows

    in_specs = (list(params["in_specs"]),)
    out_specs = list(params["out_specs"]), PartitionSpec(axes)
    run = flow.shard_map(equation, body, in_specs, out_specs)
    out, rows = run([x.pair(x.differs) for x in inputs])
    evaluator.zero = outside
    return _result(out, [[i] for i, _ in seen["out"]], seen["sites"], rows.max(0))


FLOW = {
    "cond": run_cond, "scan": run_scan, "while": run_while, "shard_map": run_shard_map,
}  # fmt: skip
