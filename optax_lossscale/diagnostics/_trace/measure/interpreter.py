"""Runs a jaxpr and its float32 twin side by side, and records each result."""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from optax_lossscale._jaxprs import ends, lines, parts
from optax_lossscale._jaxprs.primitives import Kind, Trait, has, kind_of, names_of
from optax_lossscale._tree import in_half, is_inexact
from optax_lossscale.diagnostics._trace.measure import twin
from optax_lossscale.diagnostics._trace.measure.bodies import BODIES, Place
from optax_lossscale.diagnostics._trace.measure.rows import Operands
from optax_lossscale.diagnostics._trace.measure.tape import Slot, key_of
from optax_lossscale.diagnostics._trace.measure.twin import Pair, widen, without_sites
from optax_lossscale.diagnostics._trace.run import SOLVER, Site

# Moves that change signs alone.
SIGNS = ("abs", "neg")
# Primitives that compute nothing; "" is an input or output of a loop, branch or
# shard_map.
PASSIVE = names_of(Kind.MOVE) | {"", "convert_element_type", "reduce_precision"}


class About(NamedTuple):
    """The part of a site that its equation knows.

    Attributes:
      primitive: The name of the primitive; "" for an input or output of a loop, a
        branch or a device.
      inputs: The sites of the operands; None for those without one.
      constants: The operands that are constants, and an exponent.
      same: The site of the same magnitudes, if it is a move.
      is_elementwise: Whether it is computed number by number, of operands of its shape.
      opaque: Whether it could not run in float32.
    """

    primitive: str = ""
    inputs: Sequence[int | None] = ()
    constants: tuple[float, ...] = ()
    same: int | None = None
    is_elementwise: bool = False
    opaque: bool = False


NO_OPERATION = About()


class Interpreter:
    """Runs jaxprs. The twin decides for itself.

    Attributes:
      sites: All sites, by their numbers.
    """

    def __init__(self, scale: Any):
        """Prepares to run.

        Args:
          scale: The variable that holds the loss scale. The backward pass begins where
            it is read.
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
        """Records values that enter a loop, a branch or a device."""
        return [
            self.record((name, i), x, place, About(inputs=[x.site]))
            for i, x in enumerate(values)
        ]

    def record(
        self, name: Any, x: Pair, place: Place, about: About = NO_OPERATION
    ) -> Pair:
        """Records the statistics of a value.

        Integers and flags are recorded only if float32 may change them.

        Args:
          name: Its name, unique at this place.
          x: The value.
          place: Its place.
          about: The part of its site that its equation knows.

        Returns:
          The value with its site, or without one if it is not recorded.
        """
        if not x.is_recorded:
            return x.at(None)
        number = self._numbers.setdefault((*place.path, name), len(self._numbers))
        site = self.sites[number] = self._site(number, x, place, about)
        if about.same is None:  # A move has the row of the value that it moves.
            if site.primitive and not site.is_decision:
                place.recorder.operands[number] = self._operands(site, about)
            place.recorder.add(number, x.real, x.twin)
        self._note_readers(number)
        return x.at(number)

    def _site(self, number, x, place, about):
        """Returns the site of a value."""
        # `call._mark_backward` marks the sites that depend on the loss scale.
        phase = "forward" if place.phase == "backward" else place.phase
        if phase == "scale" and in_half(x.real):
            # The gradient of a loss in half. If its phase stayed "scale", inf could
            # not begin here.
            phase = "backward"
        if phase == "scale":  # It is no operation of the user.
            about = NO_OPERATION._replace(same=about.same)
        return Site(
            dtype=x.real.dtype.name,
            shape=x.real.shape,
            source=place.source,
            row=number if about.same is None else self.sites[about.same].row,
            scope=place.scope,
            phase=phase,
            primitive=about.primitive,
            inputs=tuple(i for i in about.inputs if i is not None),
            constants=about.constants,
            is_decision=not is_inexact(x.real),
            opaque=about.opaque,
        )

    def _operands(self, site, about):
        """Returns the operands from which inf and nan of a result may come."""
        operands = [self.sites[i] for i in site.inputs]
        is_elementwise = about.is_elementwise
        is_elementwise &= all(x.shape == site.shape for x in operands)
        return Operands([x.row for x in operands], site.constants, is_elementwise)

    def _note_readers(self, number):
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
        run = functools.partial(BODIES[equation.primitive.name], equation, place=place)
        found = place.recorder.call(run, inputs)
        place.recorder.extend(found.sites, found.rows)
        pairs, sources = found.pairs, found.sources
        if pairs and found.decision is not None:
            pairs = self._decided_in_float32(equation, inputs, found, place)
            sources = [[*x, found.decision] for x in sources]
        return [
            self.record(i, x, place, About(inputs=y))
            for i, (x, y) in enumerate(zip(pairs, sources, strict=True))
        ]

    def _decided_in_float32(self, equation, inputs, found, place):
        """Runs a loop or a branch once more, all in float32: that decides for itself.

        It takes another branch, or runs more or fewer iterations.

        Returns:
          The results, with twins that were decided so.
        """
        args, call = [x.in_float32 for x in inputs], place.recorder.call
        count = None
        if found.count is None:
            twins = call(functools.partial(twin.bind_wide, equation), args)
        else:
            run = functools.partial(twin.run_wide_while, equation)
            twins, count = call(run, args)
        twins = twins or [x.twin for x in found.pairs]
        pairs = [Pair(x.real, y) for x, y in zip(found.pairs, twins, strict=True)]
        if count is not None:
            counts = Pair(found.count, count)
            self._record_solver(equation, inputs, pairs, counts, place)
        return pairs

    def _record_solver(self, equation, inputs, results, counts, place):
        """Records how many iterations a solver takes, and whether it stands still."""
        if self._walk.ends_by_floats(equation):
            about = About(primitive=SOLVER)
            counts = self.record("iterations", counts, place, about)
            ask = functools.partial(twin.stands_still, equation)
            call = place.recorder.call
            flags = Pair(*call(ask, without_sites(inputs), without_sites(results)))
            about = About(primitive=SOLVER, inputs=[counts.site])
            self.record("stands still", flags, place, about)

    def _operation(self, equation, inputs, place):
        """Runs an equation that holds no bodies."""
        results, opaque = _results(equation, inputs, place.recorder.call)
        about = _about(equation, inputs)._replace(opaque=opaque)
        pairs = [self.record(i, x, place, about) for i, x in enumerate(results)]
        if _is_cast(equation) and not parts.has_line(equation):
            casts = [x.site for x in pairs if x.site is not None]
            self._held |= {site: [self.sites[site]] for site in casts}
        return pairs


def _is_cast(equation):
    return equation.primitive.name == "convert_element_type"


def _about(equation: Any, inputs: Sequence[Pair]) -> About:
    """Returns the part of a result's site that its equation knows."""
    name = equation.primitive.name
    operands = [x for x in inputs if x.site is not None or is_inexact(x.real)]
    constants = [c for x in operands if x.site is None for c in _constant(x.real)]
    if name == "integer_pow":
        constants.append(float(equation.params["y"]))
    is_finite = all(map(math.isfinite, constants))
    return About(
        primitive=name,
        inputs=[x.site for x in operands],
        constants=tuple(constants),
        same=inputs[0].site if _is_move(equation, inputs) else None,
        is_elementwise=has(name, Trait.ELEMENTWISE) and is_finite,
    )


def _is_move(equation, inputs):
    """Whether the result has the magnitudes of the only operand."""
    name = equation.primitive.name
    if _is_cast(equation):  # All of half precision is in float32.
        to = equation.outvars[0].aval.dtype
        return in_half(inputs[0].real) and to == jnp.float32
    return len(inputs) == 1 and (has(name, Trait.KEEPS) or name in SIGNS)


def _constant(x: Any) -> list[float]:
    """Returns the number of an operand that is constant in the program; else []."""
    if isinstance(x, Tracer | Slot) or np.size(x) != 1 or jnp.iscomplexobj(x):
        return []
    return [float(np.asarray(x, np.float64).reshape(()))]


def _results(equation, inputs, call):
    """Runs an equation and its twin in one step.

    Returns:
      The results; and whether they could not be computed in float32.
    """
    both, key = functools.partial(_both, equation), key_of(_both, equation)
    reals, twins = call(both, without_sites(inputs), key=key)
    opaque = twins is None and not has(equation.primitive.name, Trait.BITS)
    if not twins:
        twins = [call(widen, x, key=widen) if in_half(x) else None for x in reals]
    return list(map(Pair, reals, twins)), opaque


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
        # its own by that of any number, unless the twin divides by it as well.
        args[1] = lax.optimization_barrier(jnp.asarray(args[1]))
    reals = twin.bind_on_refs(equation, args)
    # The compiler would fold constants and join operations, and hide an overflow.
    if has(name, Trait.REWRITTEN) or is_constant:
        reals = lax.optimization_barrier(reals)
    has_half = any(map(in_half, reals))
    differs = has_half or any(x.has_twin for x in pairs)
    if not differs and not has(name, Trait.OPAQUE):
        return reals, []
    return reals, twin.bind_wide(equation, [x.in_float32 for x in pairs])


def _again(x):
    """Hides from the compiler that it has an array, so that it computes it again."""
    # No compiler sees two steps of a tape.
    return lax.optimization_barrier(x) if isinstance(x, Tracer) else x
