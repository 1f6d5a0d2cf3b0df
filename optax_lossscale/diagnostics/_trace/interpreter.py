"""Runs a jaxpr and its float32 twin side by side, and sums up each result."""

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from optax_lossscale._jaxprs import ends, lines, parts
from optax_lossscale._jaxprs.primitives import Kind, Trait, has, kind_of, names_of
from optax_lossscale._tree import in_half, is_inexact
from optax_lossscale.diagnostics._trace import twin
from optax_lossscale.diagnostics._trace.bodies import BODIES, Place
from optax_lossscale.diagnostics._trace.sites import SOLVER, Site
from optax_lossscale.diagnostics._trace.steps import Slot, key_of
from optax_lossscale.diagnostics._trace.summary import Origins
from optax_lossscale.diagnostics._trace.twin import Pair, widen, without_sites

# Moves that change signs alone.
SIGNS = ("abs", "neg")
# They compute nothing; what has no name enters or leaves a loop, a branch or a device.
PASSIVE = names_of(Kind.MOVE) | {"", "convert_element_type", "reduce_precision"}


class Interpreter:
    """Runs jaxprs. The twin decides for itself.

    Attributes:
      sites: All sites, by their numbers.
    """

    def __init__(self, scale: Any):
        """Prepares to run.

        Args:
          scale: The variable that holds the loss scale: what follows is the backward
            pass.
        """
        self.sites: dict[int, Site] = {}
        self._scale, self._numbers = scale, {}
        self._held: dict[int, list[Site]] = {}  # By site, the casts that it moves.
        self._walk = ends.Walk()

    def interpret(self, jaxpr: Any, args: Sequence[Pair], place: Place) -> list[Pair]:
        """Evaluates a jaxpr, of its constants and its arguments."""

        def follow(index, equation, inputs):
            nonlocal place
            is_backward = place.phase == "backward"
            here = place._replace(
                path=(*place.path, index),
                source=lines.source_of(equation, place.source, is_backward=is_backward),
                scope=lines.scope_of(equation, place.scope),
            )
            if any(x is self._scale for x in equation.invars):
                here = here._replace(phase="scale")
                place = place._replace(phase="backward")
            return self._follow(equation, inputs, here)

        return twin.walk(jaxpr, args, follow, Pair)

    def call(self, jaxpr: Any, args: Sequence[Pair], place: Place) -> list[Pair]:
        """Evaluates a jaxpr in an equation."""
        jaxpr, consts = parts.opened(jaxpr)
        return self.interpret(jaxpr, [*map(Pair, consts), *args], place)

    def enter(self, name: str, values: Sequence[Pair], place: Place) -> list[Pair]:
        """Sums up what a loop, a branch or a device gets, in each iteration."""
        pairs = enumerate(values)
        return [self.measure((name, i), x, place, inputs=[x.site]) for i, x in pairs]

    def measure(
        self,
        name: Any,
        x: Pair,
        place: Place,
        *,
        inputs: Iterable[int | None] = (),
        is_elementwise: bool = False,
        same: int | None = None,
        **about: Any,
    ) -> Pair:
        """Sums a value up, if it is a number, or is decided otherwise in float32.

        Args:
          name: Its name, unique at this place.
          x: The value.
          place: Where it is.
          inputs: The sites that it depends on; None for what has none.
          is_elementwise: Whether it is computed number by number, of operands of its
            shape.
          same: The site of the same magnitudes, if it is a move.
          **about: More fields of its site.
        """
        if not x.may_differ:
            return x.at(None)
        number = self._numbers.setdefault((*place.path, name), len(self._numbers))
        # What depends on the scale is known to be backward later.
        phase = "forward" if place.phase == "backward" else place.phase
        if phase == "scale" and in_half(x.real):
            # The gradient of a loss in half. As the scale, inf could not begin in it.
            phase = "backward"
        about["inputs"] = tuple(i for i in inputs if i is not None)
        site = self.sites[number] = Site(
            dtype=x.real.dtype.name,
            shape=x.real.shape,
            source=place.source,
            scope=place.scope,
            phase=phase,
            row=number if same is None else self.sites[same].row,
            is_decision=not is_inexact(x.real),
            **({} if phase == "scale" else about),
        )
        if same is None:
            if site.primitive and not site.is_decision:
                operands = [self.sites[i] for i in site.inputs]
                is_elementwise &= all(y.shape == site.shape for y in operands)
                rows = [y.row for y in operands]
                origins = Origins(rows, site.constants, is_elementwise)
                place.recorder.origins[number] = origins
            place.recorder.add(number, x.real, x.wide)
        self._note_readers(number, place)
        return x.at(number)

    def _note_readers(self, number, place):
        """Notes the readers of a cast without a line, which gets that of the first."""
        site = self.sites[number]
        casts = [x for i in site.inputs for x in self._held.get(i, ())]
        if site.primitive in PASSIVE:
            self._held[number] = casts
        else:
            for x in casts:
                if not x.readers:
                    x.source, x.scope = site.source, site.scope
                x.readers.append(number)

    def _follow(self, equation, inputs, place):
        name = equation.primitive.name
        if name == "name":  # It computes nothing.
            return inputs
        if kind_of(name) == Kind.CALL:
            if name == "remat2":
                inputs = jax.tree.map(_again, inputs)
            return self.call(parts.called_jaxpr(equation), inputs, place)
        if name not in BODIES or twin.refs_among(equation.invars):
            return self._operation(equation, inputs, place)
        return self._flow(equation, inputs, place)

    def _flow(self, equation, inputs, place):
        """Runs a loop, a branch or devices."""
        recorder, run = place.recorder, BODIES[equation.primitive.name]
        run = functools.partial(run, equation, place=place)
        values, sources, sites, rows, decision, count = recorder.call(run, inputs)
        recorder.extend(sites, rows)
        if values and decision is not None:
            # The twin goes its own way: another branch, or more or fewer iterations.
            wides = [x.twin for x in inputs]
            is_loop = count is not None
            bind = twin.run_wide_while if is_loop else twin.bind_wide
            own = recorder.call(functools.partial(bind, equation), wides)
            own, wide_count = own if is_loop else (own, None)
            pairs = zip(values, own or [x.wide for x in values], strict=True)
            values = [Pair(x.real, wide) for x, wide in pairs]
            if wide_count is not None:
                counts = Pair(count, wide_count)
                self._measure_solver(equation, inputs, values, counts, place)
            sources = [[*x, decision] for x in sources]
        return [
            self.measure(i, x, place, inputs=y)
            for i, (x, y) in enumerate(zip(values, sources, strict=True))
        ]

    def _measure_solver(self, equation, inputs, values, counts, place):
        """Sums up how many iterations a solver takes, and whether it stands still."""
        if self._walk.ends_by_floats(equation):
            counts = self.measure("iterations", counts, place, primitive=SOLVER)
            ask = functools.partial(twin.stands_still, equation)
            call = place.recorder.call
            flags = Pair(*call(ask, without_sites(inputs), without_sites(values)))
            about = {"inputs": [counts.site], "primitive": SOLVER}
            self.measure("stands still", flags, place, **about)

    def _operation(self, equation, inputs, place):
        """Runs an equation that holds no bodies."""
        about = _about(equation, inputs)
        results, about["opaque"] = _results(equation, inputs, place.recorder.call)
        values = [self.measure(i, x, place, **about) for i, x in enumerate(results)]
        if _is_cast(equation) and not parts.has_line(equation):
            casts = [x.site for x in values if x.site is not None]
            self._held |= {site: [self.sites[site]] for site in casts}
        return values


def _is_cast(equation):
    return equation.primitive.name == "convert_element_type"


def _about(equation: Any, inputs: Sequence[Pair]) -> dict[str, Any]:
    """Returns what an equation says of its results, for `Interpreter.measure`."""
    name, numbers = equation.primitive.name, [x for x in inputs if _is_number(x)]
    constants = [c for x in numbers if x.site is None for c in _constant(x.real)]
    if name == "integer_pow":
        constants.append(float(equation.params["y"]))
    is_move = has(name, Trait.KEEPS) or name in SIGNS
    if _is_cast(equation):  # All of half precision is in float32.
        to = equation.outvars[0].aval.dtype
        is_move = in_half(inputs[0].real) and to == jnp.float32
    is_finite = all(map(math.isfinite, constants))
    return {
        "primitive": name,
        "inputs": [x.site for x in numbers],
        "constants": tuple(constants),
        "same": inputs[0].site if is_move and len(inputs) == 1 else None,
        "is_elementwise": has(name, Trait.ELEMENTWISE) and is_finite,
    }


def _is_number(x):
    return x.site is not None or is_inexact(x.real)


def _results(equation, inputs, call):
    """Runs an equation and its twin in one step.

    Returns:
      The results; and whether they could not be computed in float32.
    """
    both, key = functools.partial(_both, equation), key_of(_both, equation)
    reals, wides = call(both, without_sites(inputs), key=key)
    opaque = wides is None and not has(equation.primitive.name, Trait.BITS)
    if not wides:
        wides = [call(widen, x, key=widen) if in_half(x) else None for x in reals]
    return list(map(Pair, reals, wides)), opaque


def _both(equation, pairs):
    """Runs an equation and its twin.

    Returns:
      The results; and those in float32, [] if they are the same, or None if they could
      not be computed.
    """
    name = equation.primitive.name
    args = [x.real for x in pairs]
    is_constant = not all(isinstance(x, Tracer) for x in args)
    if has(name, Trait.OVER):
        # The compiler would multiply by the reciprocal of a constant, and in a step of
        # its own by that of any number, unless the twin divides by it, too.
        args[1] = lax.optimization_barrier(jnp.asarray(args[1]))
    reals = twin.bind_on_refs(equation, args)
    # The compiler would fold constants and join operations, and hide an overflow.
    if has(name, Trait.REWRITTEN) or is_constant:
        reals = lax.optimization_barrier(reals)
    has_half = any(map(in_half, reals))
    differs = has_half or any(x.differs for x in pairs)
    if not differs and not has(name, Trait.OPAQUE):
        return reals, []
    return reals, twin.bind_wide(equation, [x.twin for x in pairs])


def _again(x):
    """Hides from the compiler that it has an array, so that it computes it again."""
    # No compiler sees two steps of a tape.
    return lax.optimization_barrier(x) if isinstance(x, Tracer) else x


def _constant(x: Any) -> list[float]:
    """Returns a number that is constant in the program."""
    if isinstance(x, Tracer | Slot) or np.size(x) != 1 or jnp.iscomplexobj(x):
        return []
    return [float(np.asarray(x, np.float64).reshape(()))]
