"""Runs a jaxpr, and beside it the same one in float32, and measures every result."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer, eval_jaxpr
from jax.sharding import PartitionSpec

from optax_lossscale.diagnostics._trace import equations, statistics
from optax_lossscale.diagnostics._trace.statistics import Recorder

Key = tuple[Any, ...]
NOWHERE = equations.Source()


class Value(NamedTuple):
    """An array, what it would be in float32, and where it was measured.

    Attributes:
      real: The array.
      shadow: The array in float32; the same object as `real` if they cannot differ.
      keys: The keys of the sites that measured it; several if it may come from either.
    """

    real: Any
    shadow: Any
    keys: tuple[Key, ...] = ()


class Loop(NamedTuple):
    """A loop: its number of iterations, if known, and whether it runs backwards."""

    length: int | None = None
    reverse: bool = False


@dataclasses.dataclass(frozen=True)
class Site:
    """One result of an operation.

    Attributes:
      primitive: The name of the primitive; "" for an argument of the program.
      dtype: The name of the dtype.
      shape: The shape.
      source: The user's line.
      scope: The named scopes.
      phase: "forward" or "backward".
      loops: The loops around it, the outermost first.
      inputs: For each floating-point input, the keys of the sites that measured it.
      constants: The inputs that are constants in the program.
      moved: The key of the site that measured the same magnitudes, if not this one.
      opaque: Whether it was not followed in float32.
      joined: For a loop's state, the keys before and after an iteration.
    """

    primitive: str = ""
    dtype: str = ""
    shape: tuple[int, ...] = ()
    source: equations.Source = NOWHERE
    scope: str = ""
    phase: str = ""
    loops: tuple[Loop, ...] = ()
    inputs: tuple[tuple[Key, ...], ...] = ()
    constants: tuple[float, ...] = ()
    moved: Key | None = None
    opaque: bool = False


class Place(NamedTuple):
    """Where a jaxpr is called."""

    key: Key
    source: equations.Source = NOWHERE
    scope: str = ""
    phase: str = "forward"
    loops: tuple[Loop, ...] = ()

    def at(self, equation: Any, index: int) -> "Place":
        """Returns the place of an equation."""
        return self._replace(
            key=(*self.key, index),
            source=equations.source_of(equation, self.source),
            scope=equations.scope_of(equation, self.scope),
        )


class Interpreter:
    """Runs jaxprs.

    Attributes:
      sites: By key, what was measured.
      before: By key, for the state of a loop: the keys before the loop, and those of
        the iteration before.
    """

    def __init__(self, zero: Any, judged: Any):
        """Prepares a run.

        Args:
          zero: u32[], a zero that the compiler does not know.
          judged: The dtype that wider numbers should fit into, or None.
        """
        self.zero = zero
        self.varying: Any = None
        self.judged = judged
        self.sites: dict[Key, Site] = {}
        self.before: dict[Key, tuple[tuple[Key, ...], tuple[Key, ...]]] = {}

    def new_recorder(self) -> Recorder:
        """Returns a recorder for one level of loops and branches."""
        return Recorder(self.judged)

    def argument(self, key: Key, x: Any, recorder: Recorder) -> Value:
        """Measures an argument of the program."""
        if not equations.is_inexact(x):
            return Value(x, x)
        site = Site(dtype=x.dtype.name, shape=x.shape, phase="argument")
        self.sites[key] = site
        recorder.add(key, x, x)
        return Value(x, x, (key,))

    def run(
        self,
        jaxpr: Any,
        consts: Sequence[Value],
        args: Sequence[Value],
        place: Place,
        recorder: Recorder,
        loss_scale: Any = None,
    ) -> list[Value]:
        """Evaluates a jaxpr.

        Args:
          jaxpr: The jaxpr.
          consts: Its constants.
          args: Its arguments.
          place: Where it is called.
          recorder: What measures.
          loss_scale: The variable that holds the loss scale, if this is the whole
            program. The equation that reads it scales the loss, and is not measured;
            what follows is the backward pass.
        """
        values = dict(zip(jaxpr.constvars, consts, strict=True))
        values |= zip(jaxpr.invars, args, strict=True)
        last = _last_uses(jaxpr)

        def read(x):
            return Value(x.val, x.val) if hasattr(x, "val") else values[x]

        for index, equation in enumerate(jaxpr.eqns):
            inputs = list(map(read, equation.invars))
            here = place.at(equation, index)
            scales_loss = any(x is loss_scale for x in equation.invars)
            handler = self._handler(equation)
            if scales_loss:
                found = self._unmeasured(handler, equation, inputs, here)
                place = place._replace(phase="backward")
            else:
                found = handler(equation, inputs, here, recorder)
            values.update(zip(equation.outvars, found, strict=True))
            for variable in last.get(index, ()):
                del values[variable]
        return list(map(read, jaxpr.outvars))

    def _handler(self, equation: Any) -> Callable[..., list[Value]]:
        name = equation.primitive.name
        if name in equations.CALLS:
            return self._call
        handlers = {
            "cond": self._cond,
            "scan": self._scan,
            "while": self._while,
            "shard_map": self._shard_map,
        }
        return handlers.get(name, self._operation)

    def _unmeasured(self, handler, equation, inputs, place):
        known = set(self.sites)
        found = handler(equation, inputs, place, self.new_recorder())
        for key in set(self.sites) - known:
            del self.sites[key]
        return [x._replace(keys=()) for x in found]

    # One operation.

    def _operation(self, equation, inputs, place, recorder):
        reals = equations.bind(equation, [x.real for x in inputs])
        # Of arrays made of constants, the compiler would compute all that is measured.
        constant = not any(isinstance(x.real, Tracer) for x in inputs)
        if constant or equation.primitive.name in equations.PRODUCTS:
            reals = [self._hold(x) for x in reals]
        shadows, opaque = self._shadows(equation, inputs, reals)
        if constant:
            pairs = zip(reals, shadows, strict=True)
            shadows = [y if y is x else self._hold(y) for x, y in pairs]
        moved = None
        if _keeps_magnitudes(equation) and self._is_measured(inputs[0].keys):
            (moved,) = inputs[0].keys
            moved = self.sites[moved].moved or moved
        numbers = [x for x in inputs if equations.is_inexact(x.real)]
        values = []
        for i, (real, shadow) in enumerate(zip(reals, shadows, strict=True)):
            if not equations.is_inexact(real):
                values.append(Value(real, real))
                continue
            key = (*place.key, i)
            self.sites[key] = Site(
                equation.primitive.name,
                real.dtype.name,
                real.shape,
                place.source,
                place.scope,
                place.phase,
                place.loops,
                tuple(x.keys for x in numbers if x.keys),
                tuple(x for v in numbers if not v.keys for x in _constant(v.real)),
                moved,
                opaque,
            )
            if moved is None:
                recorder.add(key, real, shadow)
            values.append(Value(real, shadow, (key,)))
        return values

    def _is_measured(self, keys):
        return len(keys) == 1 and keys[0] in self.sites

    def _hold(self, x):
        """Makes the compiler round `x`: it does not know that `zero` changes nothing.

        Compilers contract `x * y + z` to one operation, which rounds once.
        """
        if jnp.issubdtype(x.dtype, jnp.integer) or x.dtype == bool:
            return x ^ self.zero.astype(x.dtype)
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        integer = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
        bits = lax.bitcast_convert_type(x, integer) ^ self.zero.astype(integer)
        return lax.bitcast_convert_type(bits, x.dtype)

    def _shadows(self, equation, inputs, reals):
        """Returns the results in float32, and whether they could not be computed."""
        same = all(x.shadow is x.real for x in inputs)
        inexact = list(map(equations.is_inexact, reals))
        halves = [equations.is_half(x.dtype) for x in reals if equations.is_inexact(x)]
        if not any(inexact) or (same and not any(halves)):
            return reals, False
        name = equation.primitive.name
        wide = [equations.widen(x) for x in reals]
        if name in equations.BITS:
            return wide, False
        if name in equations.OPAQUE or equation.effects:
            return wide, True
        try:
            args = [equations.widen(x.shadow) for x in inputs]
            found = equations.bind_wide(equation, args)
        except Exception:  # Whatever a primitive does not support.
            return wide, True
        fits = all(
            x.shape == y.shape and x.dtype == y.dtype
            for x, y in zip(found, wide, strict=True)
            if equations.is_inexact(y)
        )
        if not fits:
            return wide, True
        pairs = zip(reals, found, strict=True)
        return [y if equations.is_inexact(x) else x for x, y in pairs], False

    # Operations that call jaxprs.

    def _call(self, equation, inputs, place, recorder):
        closed = equations.called_jaxpr(equation)
        if equation.primitive.name in equations.REMATERIALIZED:
            # Otherwise the compiler would find that the forward pass has this already.
            packed = _pack(inputs)
            inputs = _unpack(lax.optimization_barrier(packed), inputs)
        consts = [Value(x, x) for x in closed.consts]
        return self.run(closed.jaxpr, consts, inputs, place, recorder)

    def _cond(self, equation, inputs, place, recorder):
        index, *operands = inputs
        branches = equation.params["branches"]
        results: list[Any] = [None] * len(branches)

        def make(k):
            def branch(packed):
                own = self.new_recorder()
                inner = place._replace(key=(*place.key, f"branch {k}"))
                values = _unpack(packed, operands)
                consts = [Value(x, x) for x in branches[k].consts]
                out = self.run(branches[k].jaxpr, consts, values, inner, own)
                results[k] = (own.keys, out)
                return _pack(out, apart=True), own.finish()

            return branch

        packed = _pack(operands)
        functions = list(map(make, range(len(branches))))
        shapes = [jax.eval_shape(f, packed)[1] for f in functions]

        def complete(k):
            def branch(packed):
                out, found = functions[k](packed)
                parts = list(map(self._neutral, shapes))
                parts[k] = found
                return out, statistics.join_rows(parts)

            return branch

        out, found = lax.switch(
            index.real, list(map(complete, range(len(branches)))), packed
        )
        recorder.extend([key for keys, _ in results for key in keys], found)
        columns = zip(*(out for _, out in results), strict=True)
        keys = [tuple(k for x in column for k in x.keys) for column in columns]
        return _join(out, keys)

    def _scan(self, equation, inputs, place, recorder):
        params = equation.params
        n, m = equations.scan_counts(equation)
        consts, carry, xs = inputs[:n], inputs[n : n + m], inputs[n + m :]
        loop = Loop(params["length"], params["reverse"])
        closed = params["jaxpr"]

        def body(values, x, inner, own):
            x = _unpack(x, xs)
            out = self.run(
                closed.jaxpr, [Value(c, c) for c in closed.consts],
                [*consts, *values, *x], inner, own,
            )  # fmt: skip
            return out[:m], out[m:]

        def loop_over(step, state):
            return lax.scan(
                step, state, _pack(xs), length=params["length"],
                reverse=params["reverse"], unroll=params["unroll"],
            )  # fmt: skip

        first = jax.tree.map(lambda x: x[0] if params["length"] else x, _pack(xs))
        if not params["length"]:
            first = jax.tree.map(lambda x: jnp.zeros(x.shape[1:], x.dtype), _pack(xs))
        return self._loop(body, loop_over, carry, first, loop, place, recorder)

    def _while(self, equation, inputs, place, recorder):
        params = equation.params
        n, m = params["cond_nconsts"], params["body_nconsts"]
        asked, consts, carry = inputs[:n], inputs[n : n + m], inputs[n + m :]
        condition, closed = params["cond_jaxpr"], params["body_jaxpr"]

        def body(values, _, inner, own):
            asking = inner._replace(key=(*inner.key, "condition"))
            known = [Value(c, c) for c in condition.consts]
            self.run(condition.jaxpr, known, [*asked, *values], asking, own)
            known = [Value(c, c) for c in closed.consts]
            return self.run(closed.jaxpr, known, [*consts, *values], inner, own), []

        def continues(state):
            values = [x.real for x in _join(state[2], [()] * len(carry))]
            args = [*(x.real for x in asked), *values]
            (again,) = eval_jaxpr(condition.jaxpr, condition.consts, *args)
            return again

        def loop_over(step, state):
            state = lax.while_loop(continues, lambda s: step(s, None)[0], state)
            return state, ([], [])

        return self._loop(body, loop_over, carry, None, Loop(), place, recorder)

    def _loop(self, body, loop_over, carry, x, loop, place, recorder):
        """Runs a loop whose state also holds statistics.

        Args:
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
            own = self.new_recorder()
            values = _join(packed, [(key,) for key in states])
            new, out = body(values, x, inner, own)
            known.update(keys=own.keys, new=new, out=out)
            found = statistics.in_iteration(own.finish(), index)
            if total is not None:
                found = statistics.merge(total, found)
            return (index + 1, found, _pack(new, apart=True)), _pack(out, apart=True)

        start = (jnp.int32(0), None, _pack(carry, apart=True))
        (_, shapes, _), _ = jax.eval_shape(step, start, x)
        total = self._neutral(shapes)
        (_, found, packed), out = loop_over(step, (start[0], total, start[2]))
        recorder.extend(known["keys"], found)
        new = [x.keys for x in known["new"]]
        leave = self._sources(states, [x.keys for x in carry], new)
        ends = [leave((key,)) for key in states]
        return [
            *_join(packed, ends),
            *_join(out, [leave(y.keys) for y in known["out"]]),
        ]

    def _sources(self, states, old, new):
        """Notes where the state of a loop comes from.

        Args:
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

        self.before |= {key: split([key]) for key in states}
        return lambda keys: sum(split(keys), ())

    def _neutral(self, like):
        """Returns statistics of nothing, which vary where `shard_map` asks for it."""
        found = statistics.neutral(*like.first.shape)
        if self.varying is None:
            return found
        return jax.tree.map(lambda x: x + self.varying.astype(x.dtype), found)

    def _shard_map(self, equation, inputs, place, recorder):
        params = equation.params
        axes = equations.manual_axes(equation)
        devices = math.prod(params["mesh"].shape[x] for x in axes)
        known: dict[str, Any] = {}
        outer = self.zero, self.varying

        def body(zero, varying, packed):
            self.zero, self.varying = zero, varying[0]
            own = self.new_recorder()
            out = self.run(params["jaxpr"], (), _unpack(packed, inputs), place, own)
            known.update(keys=own.keys, out=out)
            found = jax.tree.map(lambda x: x[None], own.finish())
            return _pack(out, apart=True), found

        def specs(values, given, apart=False):
            reals = list(given)
            pairs = zip(values, given, strict=True)
            return reals, [spec for x, spec in pairs if _is_apart(x, apart)]

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
        )(self.zero, jnp.zeros(devices, jnp.int32), _pack(inputs))
        self.zero, self.varying = outer
        rows = [
            jax.tree.map(lambda x, i=i: x[i], found) for i in range(found.infs.shape[0])
        ]
        total = rows[0]
        for row in rows[1:]:
            total = statistics.merge(total, row)
        recorder.extend(known["keys"], total)
        return _join(out, [x.keys for x in known["out"]])


def _is_apart(x: Value, always: bool) -> bool:
    return equations.is_inexact(x.real) and (always or x.shadow is not x.real)


def _pack(values: Sequence[Value], apart: bool = False) -> tuple[list[Any], list[Any]]:
    """Returns the arrays of values, and the shadows that are arrays of their own.

    Args:
      values: The values.
      apart: Whether to return a shadow for every floating-point value.
    """
    shadows = [equations.widen(x.shadow) for x in values if _is_apart(x, apart)]
    return [x.real for x in values], shadows


def _unpack(packed: Any, like: Sequence[Value]) -> list[Value]:
    """Returns packed values; `like` says which have a shadow of their own."""
    reals, shadows = packed[0], iter(packed[1])
    return [
        Value(real, next(shadows) if _is_apart(x, False) else real, x.keys)
        for real, x in zip(reals, like, strict=True)
    ]


def _join(packed: Any, keys: Sequence[tuple[Key, ...]]) -> list[Value]:
    """Returns values that were packed with a shadow for each."""
    reals, shadows = packed[0], iter(packed[1])
    return [
        Value(real, next(shadows) if equations.is_inexact(real) else real, found)
        for real, found in zip(reals, keys, strict=True)
    ]


def _keeps_magnitudes(equation: Any) -> bool:
    """Whether the result has the magnitudes of the only input, as often as it does."""
    if equation.primitive.name == "convert_element_type":
        old, new = equation.invars[0].aval.dtype, equation.outvars[0].aval.dtype
        inexact = all(jnp.issubdtype(x, jnp.inexact) for x in (old, new))
        return inexact and equations.holds(new, old) and old != jnp.float64
    return equation.primitive.name in equations.MOVES and len(equation.invars) == 1


def _constant(x: Any) -> list[float]:
    """Returns a number that is constant in the program."""
    if isinstance(x, Tracer) or np.size(x) != 1 or jnp.iscomplexobj(x):
        return []
    return [float(np.asarray(x, np.float64).reshape(()))]


def _last_uses(jaxpr: Any) -> dict[int, list[Any]]:
    """Returns for each equation the variables that nothing needs after it."""
    last = {
        x: i
        for i, e in enumerate(jaxpr.eqns)
        for x in e.invars
        if not hasattr(x, "val")
    }
    for i, equation in enumerate(jaxpr.eqns):
        last |= {x: max(last.get(x, i), i) for x in equation.outvars}
    kept = {x for x in jaxpr.outvars if not hasattr(x, "val")}
    found: dict[int, list[Any]] = {}
    for x, i in last.items():
        if x not in kept:
            found.setdefault(i, []).append(x)
    return found
