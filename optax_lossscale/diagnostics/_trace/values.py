"""Arrays, where they are measured, and what is around them."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from optax_lossscale.diagnostics._trace import equations

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


def is_apart(x: Value, always: bool) -> bool:
    """Whether a value has, or always has, a shadow of its own."""
    return equations.is_inexact(x.real) and (always or x.shadow is not x.real)


def pack(values: Sequence[Value], apart: bool = False) -> tuple[list[Any], list[Any]]:
    """Returns the arrays of values, and the shadows that are arrays of their own.

    Args:
      values: The values.
      apart: Whether to return a shadow for every floating-point value.
    """
    shadows = [equations.widen(x.shadow) for x in values if is_apart(x, apart)]
    return [x.real for x in values], shadows


def unpack(packed: Any, like: Sequence[Value]) -> list[Value]:
    """Returns packed values; `like` says which have a shadow of their own."""
    reals, shadows = packed[0], iter(packed[1])
    return [
        Value(real, next(shadows) if is_apart(x, False) else real, x.keys)
        for real, x in zip(reals, like, strict=True)
    ]


def join(packed: Any, keys: Sequence[tuple[Key, ...]]) -> list[Value]:
    """Returns values that were packed with a shadow for each."""
    reals, shadows = packed[0], iter(packed[1])
    return [
        Value(real, next(shadows) if equations.is_inexact(real) else real, found)
        for real, found in zip(reals, keys, strict=True)
    ]
