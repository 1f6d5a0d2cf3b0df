"""Follows loops, branches and the programs of devices."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import eval_jaxpr
from jax.sharding import PartitionSpec

from optax_lossscale.diagnostics._trace import equations, statistics
from optax_lossscale.diagnostics._trace.values import (
    Loop,
    Place,
    Value,
    keys_of,
    pack,
    unpack,
)


def run_cond(
    interpreter: Any, equation: Any, inputs: list[Value], place: Place
) -> list[Value]:
    """Follows every branch; only the one that is taken is measured."""
    index, *operands = inputs
    branches = equation.params["branches"]
    measured: list[Any] = [None] * len(branches)
    results: list[Any] = [None] * len(branches)

    def make(k):
        def branch(packed):
            inner = place.inside(f"branch {k}")
            values = unpack(packed, keys_of(operands))
            out = interpreter.enter(branches[k], values, inner)
            measured[k], results[k] = inner.recorder.keys, keys_of(out)
            return pack(out, apart=True), inner.recorder.finish()

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
    place.recorder.extend([key for keys in measured for key in keys], found)
    return unpack(out, [sum(keys, ()) for keys in zip(*results, strict=True)])


def run_scan(
    interpreter: Any, equation: Any, inputs: list[Value], place: Place
) -> list[Value]:
    """Follows a scan."""
    params = equation.params
    n, m = equations.scan_counts(equation)
    consts, carry, xs = inputs[:n], inputs[n : n + m], inputs[n + m :]

    def body(values, x, inner):
        args = [*consts, *values, *unpack(x, keys_of(xs))]
        out = interpreter.enter(params["jaxpr"], args, inner)
        return out[:m], out[m:]

    def loop_over(step, state):
        options = {name: params[name] for name in ("length", "reverse", "unroll")}
        return lax.scan(step, state, pack(xs), **options)

    def first_of(x):
        return x[0] if params["length"] else jnp.zeros(x.shape[1:], x.dtype)

    first = jax.tree.map(first_of, pack(xs))
    loop = Loop(params["length"], params["reverse"])
    is_scaled = any(interpreter.is_scaled(x.keys) for x in inputs)
    return _loop(interpreter, body, loop_over, carry, is_scaled, first, loop, place)


def run_while(
    interpreter: Any, equation: Any, inputs: list[Value], place: Place
) -> list[Value]:
    """Follows a while loop. The last time, its condition is not measured."""
    params = equation.params
    n, m = params["cond_nconsts"], params["body_nconsts"]
    asked, consts, carry = inputs[:n], inputs[n : n + m], inputs[n + m :]
    condition = params["cond_jaxpr"]

    def body(values, _, inner):
        asking = inner._replace(key=(*inner.key, "condition"))
        interpreter.enter(condition, [*asked, *values], asking)
        return interpreter.enter(params["body_jaxpr"], [*consts, *values], inner), []

    def continues(state):
        given = [*(x.real for x in asked), *(real for real, _ in state[2])]
        pairs = zip(given, condition.jaxpr.invars, strict=True)
        args = [equations.narrow(x, v.aval) for x, v in pairs]
        (again,) = eval_jaxpr(condition.jaxpr, condition.consts, *args)
        return again

    def loop_over(step, state):
        return lax.while_loop(continues, lambda s: step(s, None)[0], state), []

    is_scaled = any(interpreter.is_scaled(x.keys) for x in inputs)
    return _loop(interpreter, body, loop_over, carry, is_scaled, None, Loop(), place)


def _loop(interpreter, body, loop_over, carry, is_scaled, x, loop, place):
    """Runs a loop whose state also holds statistics.

    Args:
      interpreter: The interpreter.
      body: Maps values, a slice and a place to values and outputs.
      loop_over: Runs a function of state and slice on an initial state.
      carry: The initial values.
      is_scaled: Whether any input of the loop depends on the loss scale. Then its state
        does: in the backward pass, cotangents of constants begin as zeros.
      x: One slice.
      loop: What is known of the loop.
      place: Where it is.
    """
    states = [(*place.key, "loop", "state", i) for i in range(len(carry))]
    if is_scaled:
        interpreter.scaled.update(states)
    known: dict[str, Any] = {}

    def step(state, x):
        index, total, packed = state
        inner = place.inside("loop", loop)
        new, out = body(unpack(packed, [(key,) for key in states]), x, inner)
        known.update(keys=inner.recorder.keys, new=keys_of(new), out=keys_of(out))
        found = statistics.in_iteration(inner.recorder.finish(), index)
        if total is not None:
            found = statistics.merge(total, found)
        return (index + 1, found, pack(new, apart=True)), pack(out, apart=True)

    start = (jnp.int32(0), None, pack(carry, apart=True))
    (_, shapes, _), _ = jax.eval_shape(step, start, x)
    total = _neutral(interpreter, shapes)
    (_, found, packed), out = loop_over(step, (start[0], total, start[2]))
    place.recorder.extend(known["keys"], found)
    leave = _sources(interpreter, states, keys_of(carry), known["new"])
    ends, ys = [leave((key,)) for key in states], list(map(leave, known["out"]))
    return [*unpack(packed, ends), *unpack(out, ys)]


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
    interpreter: Any, equation: Any, inputs: list[Value], place: Place
) -> list[Value]:
    """Follows the program of each device."""
    params = equation.params
    axes = equations.manual_axes(equation)
    devices = math.prod(params["mesh"].shape[x] for x in axes)
    known: dict[str, Any] = {}
    outer = interpreter.zero, interpreter.varying

    def body(zero, varying, packed):
        interpreter.zero, interpreter.varying = zero, varying[0]
        inner = place.inside("device")
        values = unpack(packed, keys_of(inputs))
        out = interpreter.enter(params["jaxpr"], values, inner)
        known.update(keys=inner.recorder.keys, out=keys_of(out))
        found = jax.tree.map(lambda x: x[None], inner.recorder.finish())
        return pack(out, apart=True), found

    # A value and its shadow are sharded alike.
    out, found = jax.shard_map(
        body,
        mesh=params["mesh"],
        in_specs=(PartitionSpec(), PartitionSpec(axes), list(params["in_specs"])),
        out_specs=(list(params["out_specs"]), PartitionSpec(axes)),
        axis_names=set(axes),
        check_vma=params["check_vma"],
    )(interpreter.zero, jnp.zeros(devices, jnp.int32), pack(inputs))
    interpreter.zero, interpreter.varying = outer
    place.recorder.extend(known["keys"], statistics.over_devices(found))
    return unpack(out, known["out"])
