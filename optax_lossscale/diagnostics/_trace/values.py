"""Arrays, where they are measured, and what is around them."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_lossscale._jaxprs import lines
from optax_lossscale.diagnostics._trace import equations
from optax_lossscale.diagnostics._trace.statistics import Recorder

Key = tuple[Any, ...]
NOWHERE = lines.Source()


class Value(NamedTuple):
    """An array, what it would be in float32, and where it was measured.

    It is a pytree, of which the keys are not a part.

    Attributes:
      real: The array.
      wide: The array in float32; None if the two cannot differ.
      keys: The keys of the sites that measured it; several if it may come from either.
    """

    real: Any
    wide: Any = None
    keys: tuple[Key, ...] = ()

    @property
    def shadow(self) -> Any:
        """The array in float32; the same object as `real` if they cannot differ."""
        return self.real if self.wide is None else self.wide

    def apart(self, keys: tuple[Key, ...], differs: bool = False) -> "Value":
        """Returns the same, with other keys, for a place where others may stand, too.

        If it is floating-point, or others differ from float32, it has a shadow.
        """
        has_shadow = differs or equations.is_inexact(self.real)
        return Value(
            self.real, equations.widen(self.shadow) if has_shadow else None, keys
        )


jax.tree_util.register_pytree_node(
    Value, lambda x: (x[:2], x.keys), lambda keys, x: Value(*x, keys)
)


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
      inputs: For each floating-point input, the keys of the sites that measured it.
      constants: The inputs that are constants in the program.
      moved: The key of the site that measured the same magnitudes, if not this one.
      opaque: Whether it was not followed in float32.
      has_algorithm: Whether its `precision` is a `jax.lax.DotAlgorithm`.
      decides: Whether it decides by floating-point numbers. If it is no such number
        itself, the share that float32 decides otherwise is measured as flushed.
    """

    primitive: str = ""
    dtype: str = ""
    shape: tuple[int, ...] = ()
    source: lines.Source = NOWHERE
    scope: str = ""
    phase: str = ""
    inputs: tuple[tuple[Key, ...], ...] = ()
    constants: tuple[float, ...] = ()
    moved: Key | None = None
    opaque: bool = False
    has_algorithm: bool = False
    decides: bool = False

    @property
    def is_decision(self) -> bool:
        """Whether it decides by floating-point numbers, and is no such number."""
        return self.decides and not jnp.issubdtype(self.dtype, jnp.inexact)


class Place(NamedTuple):
    """Where a jaxpr is called, and what measures its results.

    Attributes:
      key: The numbers of the equations around it, the outermost first.
      recorder: Measures results on this level of loops and branches.
      source: The user's line that calls it.
      scope: The named scopes around it.
      phase: "forward" or "backward"; "argument" for the arguments of the program.
    """

    key: Key
    recorder: Recorder
    source: lines.Source = NOWHERE
    scope: str = ""
    phase: str = "forward"

    def at(self, equation: Any, index: int) -> "Place":
        """Returns the place of an equation."""
        is_backward = self.phase == "backward"
        source = lines.source_of(equation, self.source, is_backward=is_backward)
        scope = lines.scope_of(equation, self.scope)
        return self._replace(key=(*self.key, index), source=source, scope=scope)

    def inside(self, name: str) -> "Place":
        """Returns the place inside a loop or a branch, which is measured apart."""
        return self._replace(key=(*self.key, name), recorder=Recorder())
