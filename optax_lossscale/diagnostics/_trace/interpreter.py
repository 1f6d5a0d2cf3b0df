"""Runs a jaxpr, and beside it the same one in float32, and measures every result."""

import collections
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer, eval_jaxpr

from optax_lossscale._jaxprs import parts, primitives
from optax_lossscale._jaxprs.primitives import Kind
from optax_lossscale.diagnostics._trace import control_flow, decisions, equations
from optax_lossscale.diagnostics._trace.values import Key, Place, Site, Value

FLOW = {
    "cond": control_flow.run_cond,
    "scan": control_flow.run_scan,
    "while": control_flow.run_while,
    "shard_map": control_flow.run_shard_map,
}


class Interpreter:
    """Runs jaxprs.

    Attributes:
      zero: u32[], a zero that the compiler does not know.
      dtype: The dtype in question.
      is_exact: Whether the shadow takes its own decisions, even where roundoff decides.
      varying: i32[], a zero that differs between devices for all that the compiler
        knows, inside of `jax.shard_map`.
      loss_scale: The variable that holds the loss scale. What depends on it is the
        backward pass.
      floored: See `equations.floored`.
      sites: By key, what was measured.
    """

    def __init__(self, zero: Any, loss_scale: Any, dtype: str, is_exact: bool):
        """Prepares a run; see the attributes."""
        self.zero, self.loss_scale = zero, loss_scale
        self.dtype, self.is_exact = dtype, is_exact
        self.varying: Any = np.int32(0)
        self.floored: set[int] = set()
        self.sites: dict[Key, Site] = {}

    def run(self, jaxpr: Any, args: Sequence[Value], place: Place) -> list[Value]:
        """Evaluates a jaxpr.

        Args:
          jaxpr: The jaxpr.
          args: Its constants and its arguments.
          place: Where it is called.
        """
        variables = [*jaxpr.constvars, *jaxpr.invars]
        values = dict(zip(variables, args, strict=True))

        def read(x, *about):
            return self.literal(x.val, *about) if hasattr(x, "val") else values[x]

        self.floored |= equations.floored(jaxpr)
        for index, equation in enumerate(jaxpr.eqns):
            here = place.at(equation, index)
            inputs = [read(x, equation, here) for x in equation.invars]
            if any(x is self.loss_scale for x in equation.invars):
                here = here._replace(phase="scale")
                place = place._replace(phase="backward")
            found = self._follow(equation, inputs, here)
            values.update(zip(equation.outvars, found, strict=True))
        return list(map(read, jaxpr.outvars))

    def enter(self, jaxpr: Any, args: Sequence[Value], place: Place) -> list[Value]:
        """Evaluates a jaxpr of an equation, whose constants are not measured."""
        jaxpr, consts = parts.opened(jaxpr)
        return self.run(jaxpr, [*map(self.value, consts), *args], place)

    def holds(self, condition: Any, args: Sequence[Value], _place: Place) -> Any:
        """Returns whether a condition holds, and measures nothing."""
        jaxpr, consts = parts.opened(condition)
        (found,) = eval_jaxpr(jaxpr, consts, *(x.real for x in args))
        return found

    def literal(self, x: Any, *about: Any) -> Value:
        """Returns a constant in an equation, which is given with its place."""
        wide = equations.as_written(x, about[0]) if about else x
        return Value(x, None if wide is x else wide)

    def value(self, x: Any) -> Value:
        """Returns an array as it is in the program: in float32 it cannot differ."""
        return Value(x)

    def measure(self, key: Key, x: Value, place: Place, **about: Any) -> Value:
        """Measures a value, if it is floating-point.

        Args:
          key: Its key.
          x: The value.
          place: Where it was computed.
          **about: What else is known of the site.
        """
        about = {} if place.phase == "scale" else about  # Nobody wrote that.
        numbers = x.real, x.shadow
        if not equations.is_inexact(x.real):
            if x.wide is None:
                return x
            if not about.get("decides"):
                inputs = (k for keys in about.get("inputs", ()) for k in keys)
                return x._replace(keys=tuple(inputs))
            # What is decided otherwise is measured as numbers that are flushed.
            same = (x.real == x.wide).astype(jnp.float32)
            numbers = same, jnp.ones_like(same)
        site = Site(
            dtype=x.real.dtype.name,
            shape=x.real.shape,
            source=place.source,
            scope=place.scope,
            phase="forward" if place.phase == "backward" else place.phase,
            **about,
        )
        self.sites[key] = site
        place.recorder.known[(key,)] = site.moved or key
        if site.moved is None:
            inputs = list(itertools.chain(*site.inputs))
            shapes = {self.sites[k].shape for k in inputs if k in self.sites}
            is_elementwise = site.primitive in equations.ELEMENTWISE
            is_elementwise &= shapes <= {site.shape}
            # The largest number of none is -inf.
            constants = site.constants + (math.inf,) * any(0 in x for x in shapes)
            is_elementwise &= all(map(math.isfinite, constants))
            place.recorder.add(key, *numbers, inputs, constants, is_elementwise)
        return x._replace(keys=(key,))

    def arrive(self, name: str, values: Sequence[Value], place: Place) -> list[Value]:
        """Measures what a loop, a branch or a device gets from outside."""
        return [
            self.measure((*place.key, name, i), x, place, inputs=(x.keys,))
            for i, x in enumerate(values)
        ]

    def _follow(self, equation, inputs, place):
        name = equation.primitive.name
        if primitives.kind_of(name) == Kind.CALL:
            if name == "remat2":
                # Otherwise the compiler would find that the forward pass has this.
                inputs = lax.optimization_barrier(inputs)
            return self.enter(parts.called_jaxpr(equation), inputs, place)
        if name not in FLOW:
            return self._operation(equation, inputs, place)
        # In loops and branches are only some of the sites of their results.
        found = FLOW[name](self, equation, inputs, place)
        return [
            self.measure((*place.key, "result", i), x, place, inputs=(x.keys,))
            for i, x in enumerate(found)
        ]

    def _operation(self, equation, inputs, place):
        name = equation.primitive.name
        constant = [not isinstance(x.real, Tracer) for x in inputs]
        args = [x.real for x in inputs]
        if name == "div":
            # The compiler would multiply by the reciprocal of a constant.
            pairs = zip(args, constant, strict=True)
            args = [self._hold(jnp.asarray(x)) if fixed else x for x, fixed in pairs]
        reals = parts.bind(equation, args)
        # XLA would fold constants, and their statistics, at compile time.
        if any(constant) or not inputs or name in equations.REWRITTEN:
            reals = list(map(self._hold, reals))
        wide, opaque = self._shadows(equation, inputs, reals)
        if all(constant):
            wide = [x if x is None else self._hold(x) for x in wide]
        moved = None
        if _keeps_magnitudes(equation):
            moved = place.recorder.known.get(inputs[0].keys)
        numbers = [x for x in inputs if x.keys or equations.is_inexact(x.real)]
        constants = [c for x in numbers if not x.keys for c in _constant(x.real)]
        if name == "integer_pow":
            constants.append(equation.params["y"])
        about = {
            "primitive": name,
            "inputs": tuple(x.keys for x in numbers if x.keys),
            "constants": tuple(constants),
            "moved": moved,
            "opaque": opaque,
            "has_algorithm": equations.has_algorithm(equation),
            "decides": decisions.is_decision(name, inputs),
        }
        return [
            self.measure((*place.key, i), Value(*pair), place, **about)
            for i, pair in enumerate(zip(reals, wide, strict=True))
        ]

    def _hold(self, x):
        """Makes the compiler round `x`: it does not know that `zero` changes nothing.

        Compilers contract `x * y + z` to one operation, which rounds once.
        """
        if jnp.issubdtype(x.dtype, jnp.floating):
            integer = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
            bits = self._hold(lax.bitcast_convert_type(x, integer))
            return lax.bitcast_convert_type(bits, x.dtype)
        is_whole = jnp.issubdtype(x.dtype, jnp.integer) or x.dtype == bool
        return x ^ self.zero.astype(x.dtype) if is_whole else x

    def written(self, equation: Any, args: Sequence[Any]) -> Sequence[Any]:
        """Returns the operands that an equation has in float32."""
        is_floored = id(equation) in self.floored
        return equations.above_zero(equation, args) if is_floored else args

    def _shadows(self, equation, inputs, reals):
        """Returns the results in float32, and whether they could not be computed."""
        name = equation.primitive.name
        has_half = any(equations.in_half(x.aval) for x in equation.outvars)
        is_wide = any(x.wide is not None for x in inputs)
        if not (has_half or is_wide or name in equations.OPAQUE):
            return [None] * len(reals), False
        args = self.written(equation, [equations.widen(x.shadow) for x in inputs])
        found = equations.bind_wide(equation, args)
        if found is None:
            wide = [equations.widen(x) if equations.in_half(x) else None for x in reals]
            return wide, name not in equations.BITS
        if self.is_exact:
            return found, False
        if name in equations.POLES:
            # The shadow takes the decisions of the program, so it may come to a pole
            # that neither the program nor float32 would come to.
            is_pole = jnp.isfinite(reals[0]) & ~jnp.isfinite(found[0])
            found = [jnp.where(is_pole, equations.widen(reals[0]), found[0])]
        if decisions.is_decision(name, inputs):
            follows = decisions.follows(equation, inputs, reals, found, self.dtype)
            found = [
                x if equations.is_inexact(x) else jnp.where(follows, real, x)
                for x, real in zip(found, reals, strict=True)
            ]
        return found, False


def _keeps_magnitudes(equation: Any) -> bool:
    """Whether the result has the same magnitudes, in the same shares, as its input."""
    if equations.is_exact_cast(equation):
        return True
    return equation.primitive.name in equations.MOVES and len(equation.invars) == 1


def _constant(x: Any) -> list[float]:
    """Returns a number that is constant in the program."""
    if isinstance(x, Tracer) or np.size(x) != 1 or jnp.iscomplexobj(x):
        return []
    return [float(np.asarray(x, np.float64).reshape(()))]


def backward_keys(sites: dict[Key, Site]) -> set[Key]:
    """Returns the keys of what depends on the loss scale: see `Interpreter`."""
    readers = collections.defaultdict(list)
    for key, site in sites.items():
        for k in itertools.chain(*site.inputs):
            readers[k].append(key)
    ahead = [key for key, x in sites.items() if x.phase == "scale"]
    found = set(ahead)
    while ahead:
        new = {*readers[ahead.pop()]} - found
        found |= new
        ahead += new
    return found
