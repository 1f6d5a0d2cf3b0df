"""Runs a jaxpr, and beside it the same one in float32, and measures every result."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from optax_lossscale.diagnostics._trace import control_flow, equations
from optax_lossscale.diagnostics._trace.statistics import Recorder
from optax_lossscale.diagnostics._trace.values import (
    Key,
    Place,
    Site,
    Value,
    pack,
    unpack,
)

FLOW = {
    "cond": control_flow.run_cond,
    "scan": control_flow.run_scan,
    "while": control_flow.run_while,
    "shard_map": control_flow.run_shard_map,
}


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
          judged: The dtype that all numbers should fit into; None for their own.
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

    def enter(
        self,
        jaxpr: Any,
        consts: Sequence[Any],
        args: Sequence[Value],
        place: Place,
        recorder: Recorder,
    ) -> list[Value]:
        """Evaluates a jaxpr inside the program, whose constants are not measured."""
        known = [Value(x, x) for x in consts]
        return self.run(jaxpr, known, args, place, recorder)

    def _handler(self, equation: Any) -> Callable[..., list[Value]]:
        name = equation.primitive.name
        if name in equations.CALLS:
            return self._call
        return self._flow if name in FLOW else self._operation

    def _flow(self, equation, inputs, place, recorder):
        """Measures the results of loops and branches: only some sites are in them."""
        found = FLOW[equation.primitive.name](self, equation, inputs, place, recorder)
        values = []
        for i, x in enumerate(found):
            if equations.is_inexact(x.real):
                key = (*place.key, "result", i)
                self.sites[key] = Site(
                    dtype=x.real.dtype.name,
                    shape=x.real.shape,
                    source=place.source,
                    scope=place.scope,
                    phase=place.phase,
                    loops=place.loops,
                    inputs=(x.keys,),
                )
                recorder.add(key, x.real, x.shadow)
                values.append(x._replace(keys=(key,)))
            else:
                values.append(x)
        return values

    def _unmeasured(self, handler, equation, inputs, place):
        known = set(self.sites)
        found = handler(equation, inputs, place, self.new_recorder())
        for key in set(self.sites) - known:
            del self.sites[key]
        return [x._replace(keys=()) for x in found]

    # One operation.

    def _operation(self, equation, inputs, place, recorder):
        known = [not isinstance(x.real, Tracer) for x in inputs]
        args = [x.real for x in inputs]
        if equation.primitive.name == "div":
            # The compiler would multiply by the reciprocal of a constant.
            pairs = zip(args, known, strict=True)
            args = [
                self._hold(jnp.asarray(x)) if is_known else x for x, is_known in pairs
            ]
        reals = equations.bind(equation, args)
        # XLA would fold constants, and their statistics, at compile time.
        constant = all(known)
        if any(known) or constant or equation.primitive.name in equations.REWRITTEN:
            reals = [self._hold(x) for x in reals]
        shadows, opaque = self._shadows(equation, inputs, reals)
        if constant:
            pairs = zip(reals, shadows, strict=True)
            shadows = [y if y is x else self._hold(y) for x, y in pairs]
        moved = None
        if _keeps_magnitudes(equation) and recorder.has(inputs[0].keys):
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
            else:
                recorder.known.add(key)
            values.append(Value(real, shadow, (key,)))
        return values

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
        jaxpr, consts = equations.called_jaxpr(equation)
        if equation.primitive.name in equations.REMATERIALIZED:
            # Otherwise the compiler would find that the forward pass has this already.
            packed = pack(inputs)
            inputs = unpack(lax.optimization_barrier(packed), inputs)
        return self.enter(jaxpr, consts, inputs, place, recorder)


def _keeps_magnitudes(equation: Any) -> bool:
    """Whether the result has the same magnitudes, in the same shares, as its input."""
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
