"""Follows loops, branches and the programs of devices."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import eval_jaxpr
from jax.sharding import PartitionSpec

from optax_lossscale._jaxprs import flow, parts
from optax_lossscale.diagnostics._trace import equations, statistics
from optax_lossscale.diagnostics._trace.values import Place, Value


def run_cond(
    interpreter: Any, equation: Any, inputs: list[Value], place: Place
) -> list[Value]:
    """Follows every branch; only the one that is taken is measured."""
    index, *operands = inputs
    branches = equation.params["branches"]
    measured: list[Any] = []

    def run(k, operands):
        inner = place.inside(f"branch {k}")
        arrived = interpreter.arrive("operand", operands, inner)
        out = interpreter.enter(branches[k], arrived, inner)
        measured.append(inner.recorder.keys)
        return out, inner.recorder.finish()

    def complete(k, operands):
        out, found = runs[k](operands)
        parts = [_neutral(interpreter, x) for x in shapes]
        parts[k] = found
        values = map(Value.apart, out, keys, differ)
        return list(values), statistics.join_rows(parts)

    numbers = range(len(branches))
    traced = (once(functools.partial(run, k), operands) for k in numbers)
    runs, found = zip(*traced, strict=True)
    outs, shapes = zip(*found, strict=True)
    keys = [sum((x.keys for x in values), ()) for values in zip(*outs, strict=True)]
    differ = [
        any(x.wide is not None for x in values) for values in zip(*outs, strict=True)
    ]
    chosen = [functools.partial(complete, k) for k in numbers]
    out, found = flow.switch(equation, index.real, chosen, operands)
    place.recorder.extend([key for keys in measured for key in keys], found)
    if index.wide is None:
        return out
    is_other = index.real != index.wide
    out = [x._replace(keys=x.keys + index.keys) for x in out]
    return _with_shadows(
        equation, inputs, out, lambda new, x: jnp.where(is_other, new, x)
    )


def _with_shadows(equation, inputs, values, choose):
    """Chooses between the shadows of results and those of a run of the shadow alone."""
    found = equations.bind_wide(equation, [x.shadow for x in inputs])
    return (
        values
        if found is None
        else [
            x._replace(wide=choose(new, x.shadow))
            for x, new in zip(values, found, strict=True)
        ]
    )


def run_scan(
    interpreter: Any, equation: Any, inputs: list[Value], place: Place
) -> list[Value]:
    """Follows a scan."""
    params = equation.params
    consts, carry, xs = flow.scan_parts(equation, inputs)

    def body(values, x, inner):
        args = interpreter.arrive("constant", consts, inner), values, x
        out = interpreter.enter(params["jaxpr"], list(itertools.chain(*args)), inner)
        return out[: len(carry)], out[len(carry) :]

    def loop_over(step, state):
        return flow.scan(equation, step, state, xs)

    def first_of(x):
        return x[0] if params["length"] else jnp.zeros(x.shape[1:], x.dtype)

    x = jax.tree.map(first_of, xs)
    return _loop(interpreter, body, loop_over, carry, x, place)


def _chosen(again: Value, new: Value, old: Value) -> Value:
    """Returns the state that goes on; under `jax.vmap`, of each example."""
    if not again.real.ndim:
        return new
    wide = None
    if not new.wide is old.wide is again.wide is None:
        wide = flow.choose(again.shadow, new.shadow, old.shadow)
    return new._replace(real=flow.choose(again.real, new.real, old.real), wide=wide)


def run_while(
    interpreter: Any, equation: Any, inputs: list[Value], place: Place
) -> list[Value]:
    """Follows a while loop. The last time, its condition is not measured."""
    params = equation.params
    asked, consts, carry = flow.while_parts(equation, inputs)
    condition = params["cond_jaxpr"]

    def body(values, _, inner):
        asking = inner._replace(key=(*inner.key, "condition"))
        args = interpreter.arrive("constant", [*asked, *consts], inner)
        (again,) = interpreter.enter(condition, [*args[: len(asked)], *values], asking)
        args = [*args[len(asked) :], *values]
        new = interpreter.enter(params["body_jaxpr"], args, inner)
        return [_chosen(again, *pair) for pair in zip(new, values, strict=True)], []

    def continues(state):
        return jnp.any(interpreter.holds(condition, [*asked, *state[1]], place))

    def loop_over(step, state):
        return lax.while_loop(continues, lambda s: step(s, [])[0], state), []

    found = _loop(interpreter, body, loop_over, carry, [], place)
    # By its own decisions the shadow may run longer, and in `autocast` shorter, too.
    last = place._replace(key=(*place.key, "end"))
    (again,) = interpreter.enter(condition, [*asked, *found], last)
    if again.wide is None:
        return found
    found = [x._replace(keys=x.keys + again.keys) for x in found]
    is_other = jnp.logical_or(again.wide, interpreter.is_exact)
    return _with_shadows(
        equation, inputs, found, lambda *pair: flow.choose(is_other, *pair)
    )


def once(function: Callable[..., Any], *args: Any) -> tuple[Callable[..., Any], Any]:
    """Traces a function; returns one that runs its jaxpr, and the results' types.

    So a body is followed once, however deep loops and branches are in each other.
    """
    closed, types = jax.make_jaxpr(function, return_shape=True)(*args)

    def run(*args):
        out = eval_jaxpr(closed.jaxpr, closed.consts, *jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(types), out)

    return run, types


def _loop(interpreter, body, loop_over, carry, x, place):
    """Runs a loop whose state also holds statistics.

    Args:
      interpreter: The interpreter.
      body: Maps values, a slice and a place to values and outputs.
      loop_over: Runs a function of state and slice on an initial state.
      carry: The initial state.
      x: One slice.
      place: Where it is.
    """
    states = [(*place.key, "loop", "state", i) for i in range(len(carry))]
    sources, measured = [], []
    differ = [x.wide is not None for x in carry]

    def as_state(values):
        triples = zip(values, states, differ, strict=True)
        return [x.apart((key,), is_other) for x, key, is_other in triples]

    def iterate(values, x):
        inner = place.inside("loop")
        values = [
            interpreter.measure(k, x, inner, decides=x.wide is not None)
            for k, x in zip(states, values, strict=True)
        ]
        new, out = body(values, interpreter.arrive("slice", x, inner), inner)
        # The state comes from before the loop, and from the iteration before.
        sources[:] = [(*x.keys, *y.keys) for x, y in zip(new, carry, strict=True)]
        found = inner.recorder.finish()
        measured[:] = inner.recorder.keys
        differ[:] = [x.wide is not None for x in new]
        return found, as_state(new), [x.apart(x.keys) for x in out]

    def step(state, x):
        total, values = state
        found, values, out = run(values, x)
        return (statistics.merge(total, found), values), out

    start = as_state(carry)
    run, (shapes, new, _) = once(iterate, start, x)
    while jax.tree.structure(new) != jax.tree.structure(start):
        # The loop decides what float32 decides otherwise, and carries it on.
        start = as_state(carry)
        run, (shapes, new, _) = once(iterate, start, x)
    (found, ends), ys = loop_over(step, (_neutral(interpreter, shapes), start))
    place.recorder.extend(measured, found)
    for key, keys in zip(states, sources, strict=True):
        if key in interpreter.sites:
            site = dataclasses.replace(interpreter.sites[key], inputs=(keys,))
            interpreter.sites[key] = site
    ends = [x._replace(keys=keys) for x, keys in zip(ends, sources, strict=True)]
    return [*ends, *ys]


def _neutral(interpreter, like):
    """Returns statistics of nothing, which vary where `shard_map` asks for it."""
    return jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype) + interpreter.varying.astype(x.dtype),
        like,
    )


def run_shard_map(
    interpreter: Any, equation: Any, inputs: list[Value], place: Place
) -> list[Value]:
    """Follows the program of each device."""
    params = equation.params
    axes = parts.manual_axes(equation)
    devices = math.prod(params["mesh"].shape[x] for x in axes)
    measured: list[Any] = []
    outer = interpreter.zero, interpreter.varying

    def body(zero, varying, values):
        interpreter.zero, interpreter.varying = zero, varying[0]
        inner = place.inside("device")
        values = interpreter.arrive("operand", values, inner)
        out = interpreter.enter(params["jaxpr"], values, inner)
        found = jax.tree.map(lambda x: x[None], inner.recorder.finish())
        measured[:] = inner.recorder.keys
        return [x.apart(x.keys) for x in out], found

    # A value and its shadow are sharded alike.
    in_specs = PartitionSpec(), PartitionSpec(axes), list(params["in_specs"])
    out_specs = list(params["out_specs"]), PartitionSpec(axes)
    run = flow.shard_map(equation, body, in_specs, out_specs)
    out, found = run(interpreter.zero, jnp.zeros(devices, jnp.int32), inputs)
    interpreter.zero, interpreter.varying = outer
    place.recorder.extend(measured, statistics.over_devices(found))
    return out
