"""Runs a program with some of its lines in float32, and drops lines not needed."""

import functools
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from optax_lossscale._autocast.cast import autocast
from optax_lossscale._jaxprs import parts, primitives
from optax_lossscale._jaxprs.primitives import Kind
from optax_lossscale.diagnostics._trace import equations, program, statistics
from optax_lossscale.diagnostics._trace.interpreter import Interpreter
from optax_lossscale.diagnostics._trace.operations import Run
from optax_lossscale.diagnostics._trace.values import Key, Place, Value

# Seconds between two lines that say how far the search is.
PATIENCE = 5
# They return numbers that they get, so they round nothing.
EXACT = primitives.names_of(Kind.MOVE) | primitives.names_of(Kind.SPREAD)
Line = tuple[str, int]  # The file and the number; "" and 0 if they are not known.


def cast_lines(run: Run, function: Any, call: Callable[..., Any]) -> Callable[..., Any]:
    """Compares `autocast(function, float32=lines)` with the function.

    Args:
      run: A run.
      function: The function.
      call: Takes a call of such a function apart: see `program.make_call`.

    Returns:
      A function of the lines. It returns what `effects.effect_of` takes.
    """

    def gradients(function):
        taken = call(function)
        arguments = jnp.float32(run.scale), taken[1]
        compiled = program.compile_function(program.gradients_of(taken), arguments)
        return compiled(*arguments)

    def compare(lines):
        names = [f"{file}:{number}" for file, number in lines if number]
        with warnings.catch_warnings(action="ignore"):  # A line of constants alone.
            dtype = jnp.dtype(run.program.dtype)
            cast = autocast(function, dtype, float32=names)
            loss, found = gradients(cast)
        sizes = [statistics.norms(*pair) for pair in zip(found, desired, strict=True)]
        return np.array(sizes, float), (float(loss), float(float32_loss))

    float32_loss, desired = gradients(function)
    return compare


class _Promoter(Interpreter):
    """Runs a jaxpr in which some lines compute in float32, and measures nothing.

    Half precision is kept in float32 arrays, so that its values may be wider.
    """

    def __init__(self, lines: Sequence[Line], scaled: set[Key], *about: Any):
        """Prepares a run.

        Args:
          lines: The lines that may compute in float32.
          scaled: The keys of the backward pass.
          *about: What `Interpreter` takes, and whether the lines do, bool[lines].
        """
        *rest, is_wide = about
        super().__init__(*rest)
        self._flags = {line: is_wide[i] for i, line in enumerate(lines)}
        self._scaled = scaled

    def _flag(self, place):
        return self._flags.get(place.source.own[:2], False)

    def value(self, x: Any) -> Value:
        return super().value(equations.widen(x))

    def holds(self, condition: Any, args: Sequence[Value], place: Place) -> Any:
        (found,) = self.enter(condition, args, place)
        return found.real

    def literal(self, x: Any, *about: Any) -> Value:
        found = super().literal(x, *about)
        real = equations.widen(found.real)
        if found.wide is not None:
            real = jnp.where(self._flag(about[1]), found.wide, real)
        return Value(real, found.wide)

    def measure(self, key: Key, x: Value, place: Place, **about: Any) -> Value:
        return x._replace(keys=(key,))

    def _operation(self, equation, inputs, place):
        args = [x.real for x in inputs]
        types = [x.aval for x in (*equation.invars, *equation.outvars)]
        halves = list(map(equations.in_half, types))
        # In the backward pass nobody wrote a cast: it belongs to the line before.
        is_cast = equation.primitive.name == "convert_element_type"
        is_scaled = any(not self._scaled.isdisjoint(x.keys) for x in inputs)
        is_exact = halves[-1] if is_cast and is_scaled else _is_exact(equation)
        flag = is_exact or self._flag(place)
        rounded = list(map(equations.narrow, args, types))
        reals = list(map(equations.widen, parts.bind(equation, rounded)))
        wide = None
        if any(halves) and flag is not False:
            wide = equations.bind_wide(equation, self.written(equation, args))
        if wide is not None:
            pairs = zip(wide, reals, strict=True)
            reals = wide if is_exact else [jnp.where(flag, *pair) for pair in pairs]
        shadows, _ = self._shadows(equation, inputs, reals)
        return [
            self.measure((*place.key, i), Value(*pair), place)
            for i, pair in enumerate(zip(reals, shadows, strict=True))
        ]


def _is_exact(equation: Any) -> bool:
    """Whether the results are numbers of the inputs, or no floating-point numbers."""
    if not any(equations.is_inexact(x.aval) for x in equation.outvars):
        return True
    return equations.is_exact_cast(equation) or equation.primitive.name in EXACT


def promote_lines(run: Run, lines: list[Line]) -> Callable[..., Any]:
    """Compares a program in which some lines compute in float32 with its shadow."""

    def mask(chosen):
        return np.array([x in chosen for x in lines], bool)

    make = functools.partial(_Promoter, lines, run.program.scaled)
    execute, _ = run.program.compile(make, mask(()))

    def compare(chosen):
        _, losses, sizes = execute(run.scale, mask(chosen))
        return sizes, losses

    return compare


def minimal(
    lines: list[Line], helps: Callable[[list[Line]], bool]
) -> list[Line] | None:
    """Returns lines that help, of which none can be dropped; None if none help.

    Args:
      lines: All lines, what helps most first.
      helps: Whether it is enough that these compute in float32.
    """
    count, told = 0, time.monotonic()
    while not helps(lines[:count]):
        if count == len(lines):
            return None
        count = min(2 * count or 1, len(lines))
    kept, before = lines[:count], None
    while kept != before:
        before = kept
        for line in reversed(before):
            if time.monotonic() - told > PATIENCE:
                told = time.monotonic()
                text = f"float32_lines: {len(kept)} of {len(lines)} lines are left"
                print(text, file=sys.stderr, flush=True)
            rest = [x for x in kept if x != line]
            kept = rest if helps(rest) else kept
    return kept
