"""Follows loops, branches and the programs of devices."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import eval_jaxpr
from jax.sharding import PartitionSpec

from optax_lossscale.diagnostics._trace import equations, statistics
from optax_lossscale.diagnostics._trace.statistics import Recorder
from optax_lossscale.diagnostics._trace.values import (
    Loop,
    Place,
    Value,
    is_apart,
    join,
    pack,
    unpack,
)


def run_cond(
    interpreter: Any,
    equation: Any,
    inputs: list[Value],
    place: Place,
    recorder: Recorder,
) -> list[Value]:
    """Follows every branch; only the one that is taken is measured."""
    index, *operands = inputs
    branches = equation.params["branches"]
    results: list[Any] = [None] * len(branches)

    def make(k):
        def branch(packed):
            own = interpreter.new_recorder()
            inner = place._replace(key=(*place.key, f"branch {k}"))
            values = unpack(packed, operands)
            jaxpr, consts = branches[k].jaxpr, branches[k].consts
            out = interpreter.enter(jaxpr, consts, values, inner, own)
            results[k] = (own.keys, out)
            return pack(out, apart=True), own.finish()

        return branch

    packed = pack(operands)
    functions = list(map(make, range(len(branches))))
    shapes = [jax.eval_shape(f, packed)[1] for f in functions]

    def complete(k):
        def branch(packed):
            out, found = functions[k](packed)
            parts = [_neutral(interpreter, x) for x in shapes]
            parts[k] = found
            return out, statistics.join_rows(parts)

        return branch

    chosen = list(map(complete, range(len(branches))))
    platforms = equation.params.get("branches_platforms")
    if platforms is None:
        out, found = lax.switch(index.real, chosen, packed)
    else:
        pairs = zip(chosen, platforms, strict=True)
        by_name = {x: f for f, names in pairs for x in names or ("default",)}
        out, found = lax.platform_dependent(packed, **by_name)
    recorder.extend([key for keys, _ in results for key in keys], found)
    columns = zip(*(out for _, out in results), strict=True)
    keys = [tuple(k for x in column for k in x.keys) for column in columns]
    return join(out, keys)


def run_scan(
    interpreter: Any,
    equation: Any,
    inputs: list[Value],
    place: Place,
    recorder: Recorder,
) -> list[Value]:
    """Follows a scan."""
    params = equation.params
    n, m = equations.scan_counts(equation)
    consts, carry, xs = inputs[:n], inputs[n : n + m], inputs[n + m :]
    loop = Loop(params["length"], params["reverse"])
    closed = params["jaxpr"]

    def body(values, x, inner, own):
        x = unpack(x, xs)
        args = [*consts, *values, *x]
        out = interpreter.enter(closed.jaxpr, closed.consts, args, inner, own)
        return out[:m], out[m:]

    def loop_over(step, state):
        return lax.scan(
            step, state, pack(xs), length=params["length"],
            reverse=params["reverse"], unroll=params["unroll"],
        )  # fmt: skip

    def first_of(x):
        return x[0] if params["length"] else jnp.zeros(x.shape[1:], x.dtype)

    first = jax.tree.map(first_of, pack(xs))
    return _loop(interpreter, body, loop_over, carry, first, loop, place, recorder)


def run_while(
    interpreter: Any,
    equation: Any,
    inputs: list[Value],
    place: Place,
    recorder: Recorder,
) -> list[Value]:
    """Follows a while loop. The last time, its condition is not measured."""
    params = equation.params
    n, m = params["cond_nconsts"], params["body_nconsts"]
    asked, consts, carry = inputs[:n], inputs[n : n + m], inputs[n + m :]
    condition, closed = params["cond_jaxpr"], params["body_jaxpr"]

    def body(values, _, inner, own):
        asking = inner._replace(key=(*inner.key, "condition"))
        args = [*asked, *values]
        interpreter.enter(condition.jaxpr, condition.consts, args, asking, own)
        args = [*consts, *values]
        return interpreter.enter(closed.jaxpr, closed.consts, args, inner, own), []

    def continues(state):
        values = [x.real for x in join(state[2], [()] * len(carry))]
        args = [*(x.real for x in asked), *values]
        (again,) = eval_jaxpr(condition.jaxpr, condition.consts, *args)
        return again

    def loop_over(step, state):
        state = lax.while_loop(continues, lambda s: step(s, None)[0], state)
        return state, ([], [])

    return _loop(interpreter, body, loop_over, carry, None, Loop(), place, recorder)


def _loop(interpreter, body, loop_over, carry, x, loop, place, recorder):
    """Runs a loop whose state also holds statistics.

    Args:
      interpreter: The interpreter.
      body: Maps values, a slice, a place and a recorder to values and outputs.
      loop_over: Runs a function of state and slice on an initial state.
      carry: The initial values.
      x: One slice.
      loop: What is known of the loop.
      place: Where it is.
      recorder: The recorder around it.
    """
    inner = place._replace(key=(*place.key, "loop"), loops=(*place.loops, loop))
    states = [(*inner.key, "state", i) for i in range(len(carry))]
    known: dict[str, Any] = {}

    def step(state, x):
        index, total, packed = state
        own = interpreter.new_recorder()
        values = join(packed, [(key,) for key in states])
        new, out = body(values, x, inner, own)
        known.update(keys=own.keys, new=new, out=out)
        found = statistics.in_iteration(own.finish(), index)
        if total is not None:
            found = statistics.merge(total, found)
        return (index + 1, found, pack(new, apart=True)), pack(out, apart=True)

    start = (jnp.int32(0), None, pack(carry, apart=True))
    (_, shapes, _), _ = jax.eval_shape(step, start, x)
    total = _neutral(interpreter, shapes)
    (_, found, packed), out = loop_over(step, (start[0], total, start[2]))
    recorder.extend(known["keys"], found)
    new = [x.keys for x in known["new"]]
    leave = _sources(interpreter, states, [x.keys for x in carry], new)
    ends = [leave((key,)) for key in states]
    return [
        *join(packed, ends),
        *join(out, [leave(y.keys) for y in known["out"]]),
    ]


def _sources(interpreter, states, old, new):
    """Notes where the state of a loop comes from.

    Args:
      interpreter: The interpreter.
      states: The keys of its parts.
      old: For each part, the keys before the loop.
      new: For each part, the keys after an iteration.

    Returns:
      A function that replaces keys of the state by those where it comes from.
    """
    before = dict(zip(states, old, strict=True))
    after = dict(zip(states, new, strict=True))

    def split(keys):
        found = list(keys)
        for key in found:  # It grows: parts of the state may change places.
            found += [k for k in after.get(key, ()) if k not in found]
        starts = tuple(k for key in found for k in before.get(key, ()))
        return starts, tuple(key for key in found if key not in before)

    interpreter.before |= {key: split([key]) for key in states}
    return lambda keys: sum(split(keys), ())


def _neutral(interpreter, like):
    """Returns statistics of nothing, which vary where `shard_map` asks for it."""
    found = statistics.neutral(*like.first.shape)
    if interpreter.varying is None:
        return found
    return jax.tree.map(lambda x: x + interpreter.varying.astype(x.dtype), found)


def run_shard_map(
    interpreter: Any,
    equation: Any,
    inputs: list[Value],
    place: Place,
    recorder: Recorder,
) -> list[Value]:
    """Follows the program of each device."""
    params = equation.params
    axes = equations.manual_axes(equation)
    devices = math.prod(params["mesh"].shape[x] for x in axes)
    known: dict[str, Any] = {}
    outer = interpreter.zero, interpreter.varying

    def body(zero, varying, packed):
        interpreter.zero, interpreter.varying = zero, varying[0]
        own = interpreter.new_recorder()
        out = interpreter.run(params["jaxpr"], (), unpack(packed, inputs), place, own)
        known.update(keys=own.keys, out=out)
        found = jax.tree.map(lambda x: x[None], own.finish())
        return pack(out, apart=True), found

    def specs(values, given, apart=False):
        reals = list(given)
        pairs = zip(values, given, strict=True)
        return reals, [spec for x, spec in pairs if is_apart(x, apart)]

    out_types = [Value(v.aval, v.aval) for v in equation.outvars]
    out, found = jax.shard_map(
        body,
        mesh=params["mesh"],
        in_specs=(
            PartitionSpec(),
            PartitionSpec(axes),
            specs(inputs, params["in_specs"]),
        ),
        out_specs=(
            specs(out_types, params["out_specs"], True),
            PartitionSpec(axes),
        ),
        axis_names=set(axes),
        check_vma=params["check_vma"],
    )(interpreter.zero, jnp.zeros(devices, jnp.int32), pack(inputs))
    interpreter.zero, interpreter.varying = outer
    recorder.extend(known["keys"], statistics.over_devices(found))
    return join(out, [x.keys for x in known["out"]])
