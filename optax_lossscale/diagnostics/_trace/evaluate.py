"""Runs a jaxpr and its float32 twin side by side, and sums up each result."""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from optax_lossscale._jaxprs import lines, parts
from optax_lossscale._jaxprs.primitives import Kind, Trait, has, kind_of
from optax_lossscale.diagnostics._trace.flow import FLOW, Place
from optax_lossscale.diagnostics._trace.run import Site
from optax_lossscale.diagnostics._trace.summary import Origins
from optax_lossscale.diagnostics._trace.twin import (
    Value,
    bind_wide,
    in_half,
    is_inexact,
    values_of,
    widen,
)

# Moves that change signs alone.
SIGNS = ("abs", "neg")


class Evaluator:
    """Runs jaxprs. The twin decides for itself, but where `follows` says otherwise.

    Attributes:
      zero: i32[]: zero. Inside of `jax.shard_map` it varies over devices, as the
        summaries do.
      follows: bool[]: whether comparisons and places of the twin are the program's.
      sites: All sites, by their numbers.
    """

    def __init__(self, scale: Any, follows: Any):
        """Prepares to run.

        Args:
          scale: The variable that holds the loss scale: what follows is the backward
            pass.
          follows: See the attribute.
        """
        self.zero: Any = np.int32(0)
        self.follows = follows
        self.sites: dict[int, Site] = {}
        self._scale, self._numbers = scale, {}

    def run(self, jaxpr: Any, args: Sequence[Value], place: Place) -> list[Value]:
        """Evaluates a jaxpr, of its constants and its arguments."""
        values = dict(zip((*jaxpr.constvars, *jaxpr.invars), args, strict=True))

        def read(x):
            return Value(x.val, x.val) if hasattr(x, "val") else values[x]

        for index, equation in enumerate(jaxpr.eqns):
            is_backward = place.phase == "backward"
            here = place._replace(
                path=(*place.path, index),
                source=lines.source_of(equation, place.source, is_backward=is_backward),
                scope=lines.scope_of(equation, place.scope),
            )
            if any(x is self._scale for x in equation.invars):
                here = here._replace(phase="scale")
                place = place._replace(phase="backward")
            found = self._follow(equation, list(map(read, equation.invars)), here)
            values.update(zip(equation.outvars, found, strict=True))
        return list(map(read, jaxpr.outvars))

    def call(self, jaxpr: Any, args: Sequence[Value], place: Place) -> list[Value]:
        """Evaluates a jaxpr in an equation."""
        jaxpr, consts = parts.opened(jaxpr)
        return self.run(jaxpr, [*(Value(x, x) for x in consts), *args], place)

    def enter(self, name: str, values: Sequence[Value], place: Place) -> list[Value]:
        """Sums up what a loop, a branch or a device gets, in each iteration."""
        sources = [() if x.site is None else (x.site,) for x in values]
        pairs = enumerate(zip(values, sources, strict=True))
        return [self.measure((name, i), x, place, inputs=y) for i, (x, y) in pairs]

    def finish(self, place: Place) -> Any:
        """Returns the summaries of a place."""
        return place.recorder.finish() + self.zero

    def measure(
        self,
        name: Any,
        x: Value,
        place: Place,
        *,
        is_elementwise: bool = False,
        moved: int | None = None,
        **about: Any,
    ) -> Value:
        """Sums a value up, if it is a number, or is decided otherwise in float32.

        Args:
          name: What tells it from other values of this place.
          x: The value.
          place: Where it is.
          is_elementwise: Whether it is computed number by number.
          moved: The site of the same magnitudes, if it is a move.
          **about: More fields of its site.
        """
        if not x.may_differ:
            return x._replace(site=None)
        number = self._numbers.setdefault((*place.path, name), len(self._numbers))
        # What depends on the scale is known to be backward later.
        phase = "forward" if place.phase == "backward" else place.phase
        if phase == "scale" and in_half(x.real):
            # The gradient of a loss in half. As the scale, inf could not begin in it.
            phase = "backward"
        site = self.sites[number] = Site(
            dtype=x.real.dtype.name,
            shape=x.real.shape,
            source=place.source,
            scope=place.scope,
            phase=phase,
            row=number if moved is None else self.sites[moved].row,
            is_decision=not is_inexact(x.real),
            **({} if phase == "scale" else about),
        )
        if moved is None:
            real, wide, origins = x.real, x.wide, None
            if site.is_decision:  # What is decided otherwise counts as flushed.
                real = (x.real == x.wide).astype(jnp.float32)
                wide = jnp.ones_like(real)
            elif site.primitive:
                rows = [self.sites[i].row for i in site.inputs]
                origins = Origins(rows, site.constants, is_elementwise)
            place.recorder.add(number, real, wide, origins)
        return x._replace(site=number)

    def _follow(self, equation, inputs, place):
        name = equation.primitive.name
        if kind_of(name) == Kind.CALL:
            if name == "remat2":
                # Otherwise the compiler would find that the forward pass has this.
                flat = lax.optimization_barrier([x.pair(x.differs) for x in inputs])
                inputs = values_of(flat, inputs)
            return self.call(parts.called_jaxpr(equation), inputs, place)
        if name not in FLOW:
            return self._operation(equation, inputs, place)
        found = FLOW[name](self, equation, inputs, place)
        place.recorder.extend(found.sites, found.summaries)
        values, sources = found.values, found.sources
        if values and found.decision is not None:
            # The twin goes its own way: another branch, or as often as it decides.
            own = bind_wide(equation, [x.wide for x in inputs])
            values = self._chosen(values, own or [x.wide for x in values])
            sources = [[*x, found.decision] for x in sources]
        return [
            self.measure(i, x, place, inputs=tuple(y))
            for i, (x, y) in enumerate(zip(values, sources, strict=True))
        ]

    def _chosen(self, values, own):
        """Gives values the twin's own results, but where it follows the program."""
        pairs = zip(values, own, strict=True)
        return [Value(x.real, jnp.where(self.follows, x.wide, y)) for x, y in pairs]

    def _operation(self, equation, inputs, place):
        name = equation.primitive.name
        args = [x.real for x in inputs]
        if name == "div" and not isinstance(args[1], Tracer):
            # The compiler would multiply by the reciprocal of a constant.
            args[1] = lax.optimization_barrier(jnp.asarray(args[1]))
        reals = parts.bind(equation, args)
        # The compiler would fold constants and join operations, and hide an overflow.
        is_joined = has(name, Trait.REWRITTEN)
        if is_joined or not all(isinstance(x.real, Tracer) for x in inputs):
            reals = lax.optimization_barrier(reals)
        wides, opaque = self._twins(equation, inputs, reals)
        numbers = [x for x in inputs if x.site is not None or is_inexact(x.real)]
        constants = [c for x in numbers if x.site is None for c in _constant(x.real)]
        if name == "integer_pow":
            constants.append(float(equation.params["y"]))
        sources = tuple(x.site for x in numbers if x.site is not None)
        shapes = {self.sites[i].shape for i in sources}
        elementwise = has(name, Trait.ELEMENTWISE) and all(
            map(math.isfinite, constants)
        )
        is_move = has(name, Trait.KEEPS) or name in SIGNS
        if name == "convert_element_type":  # All of half precision is in float32.
            is_move = in_half(inputs[0].real) and reals[0].dtype == jnp.float32
        about = {"primitive": name, "inputs": sources, "opaque": opaque}
        about |= {"constants": tuple(constants)}
        about["moved"] = inputs[0].site if is_move and len(inputs) == 1 else None
        found = []
        for i, (real, wide) in enumerate(zip(reals, wides, strict=True)):
            about["is_elementwise"] = elementwise and shapes <= {real.shape}
            found.append(self.measure(i, Value(real, wide), place, **about))
        return found

    def _twins(self, equation, inputs, reals):
        """Returns the results in float32, and whether they could not be computed."""
        name = equation.primitive.name
        has_half = any(in_half(x.aval) for x in equation.outvars)
        differs = has_half or any(x.differs for x in inputs)
        if not differs and not has(name, Trait.OPAQUE):
            return reals, False
        found = bind_wide(equation, self._operands(name, inputs))
        if found is None:
            return list(map(widen, reals)), not has(name, Trait.BITS)
        decided = [is_inexact(x) for x in reals]
        pairs = zip(decided, reals, found, strict=True)
        return [
            y if is_number else jnp.where(self.follows, x, y)
            for is_number, x, y in pairs
        ], False

    def _operands(self, name, inputs):
        """Returns the operands of the twin."""
        wides = [x.wide for x in inputs]
        if name in CHOOSERS and inputs[1].differs:
            real, wide = map(widen, inputs[1][:2])
            wides[1] = jnp.where(self.follows, real, wide)
        return wides


# Their second operand says which numbers of the first they return.
CHOOSERS = ("select_and_scatter_add", "select_and_gather_add")


def _constant(x: Any) -> list[float]:
    """Returns a number that is constant in the program."""
    if isinstance(x, Tracer) or np.size(x) != 1 or jnp.iscomplexobj(x):
        return []
    return [float(np.asarray(x, np.float64).reshape(()))]
