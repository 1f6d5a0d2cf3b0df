"""A value and its float32 twin; a walk through a jaxpr; an equation in float32."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import jaxpr_as_fun

from optax_lossscale._jaxprs import flow, parts
from optax_lossscale._jaxprs.primitives import Trait, has
from optax_lossscale._tree import in_half, is_half, is_inexact

# They move an array into a Ref, and out of it.
MOVED = "new_ref", "freeze"


def widen(x: Any) -> Any:
    """Converts half precision to float32."""
    return jnp.asarray(x, jnp.float32) if in_half(x) else x


def rounded(x: Any, dtype: str) -> Any:
    """Rounds numbers in float32 to as many bits as a dtype has, in any range."""
    if getattr(x, "dtype", None) != jnp.float32:
        return x
    return jax.lax.reduce_precision(x, 8, jnp.finfo(dtype).nmant)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pair:
    """An array of the program, and its twin: the same array computed in float32.

    It is a pytree, so transformations and steps of a tape carry pairs. Its structure
    says whether it has a twin, and its site.

    Attributes:
      real: The array.
      twin: Its twin; None as long as the two cannot differ.
      site: The number of its site; None if it has none. Where structures have to
        agree, as those of a loop's state do, pairs have none: see `without_sites`.
    """

    real: Any
    twin: Any = None
    site: int | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def has_twin(self) -> bool:
        """Whether float32 may have other numbers."""
        return self.twin is not None

    @property
    def is_recorded(self) -> bool:
        """Whether it is floating-point, or has a twin of its own."""
        return self.has_twin or is_inexact(self.real)

    @property
    def in_float32(self) -> Any:
        """The twin, or the array itself if it has none."""
        return self.twin if self.has_twin else self.real

    def at(self, site: int | None) -> "Pair":
        """Returns the pair with another site."""
        return Pair(self.real, self.twin, site)

    def with_twin(self, always: bool = False) -> "Pair":
        """Returns the pair with a twin of its own if it is recorded, or always."""
        if self.has_twin or not (always or self.is_recorded):
            return self
        return Pair(self.real, widen(self.real), self.site)


def without_sites(pairs: Iterable[Pair]) -> list[Pair]:
    """Returns pairs without their sites."""
    return [x.at(None) for x in pairs]


def refs_among(variables: Iterable[Any]) -> list[Any]:
    """Returns the variables that stand for a `jax.Ref`."""
    return list(filter(parts.is_ref, variables))


def constants_of(closed: Any) -> list[Any]:
    """Returns the constants of a closed jaxpr; of a `jax.Ref`, the array in it."""
    return [x[...] if isinstance(x, jax.Ref) else x for x in closed.consts]


def walk(
    jaxpr: Any,
    args: Sequence[Any],
    follow: Callable[[int, Any, list[Any]], Sequence[Any]],
    literal: Callable[[Any], Any] = lambda x: x,
) -> list[Any]:
    """Follows the equations of a jaxpr, in order. A Ref is the array that it holds.

    Args:
      jaxpr: The jaxpr.
      args: Its constants and its arguments.
      follow: Maps the index of an equation, it, and its operands to its results, and to
        the arrays that the Refs among its operands hold after it.
      literal: Maps a number in an equation to an operand.

    Returns:
      The results, and the arrays that the Refs among the arguments hold at the end.
    """
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), args, strict=True))

    def read(x):
        return literal(x.val) if parts.is_literal(x) else values[x]

    for index, equation in enumerate(jaxpr.eqns):
        operands = list(map(read, equation.invars))
        changed = *equation.outvars, *refs_among(equation.invars)
        is_moved = equation.primitive.name in MOVED
        results = operands * len(changed) if is_moved else None
        results = results or follow(index, equation, operands)
        values.update(zip(changed, results, strict=True))
    return list(map(read, (*jaxpr.outvars, *refs_among(jaxpr.invars))))


def bind_on_refs(equation: Any, args: Sequence[Any], params: Any = None) -> list[Any]:
    """Runs an equation on Refs of its own; returns its results, then their arrays."""
    pairs = zip(equation.invars, args, strict=True)
    args = [jax.new_ref(x) if parts.is_ref(var) else x for var, x in pairs]
    refs = [x for x in args if isinstance(x, jax.Ref)]
    return [*parts.bind(equation, args, params), *map(jax.freeze, refs)]


def bind_wide(equation: Any, args: Sequence[Any]) -> list[Any] | None:
    """Runs an equation in float32 where it is in half precision; None if it cannot."""
    # It runs more than once.
    is_pure = not parts.has_side_effects(equation)
    changed = *equation.outvars, *refs_among(equation.invars)
    name, results = equation.primitive.name, [x.aval for x in changed]
    if not is_pure or has(name, Trait.OPAQUE | Trait.BITS):
        return None
    if name == "reduce_precision" and in_half(results[0]):
        return [widen(args[0])]  # `jax.checkpoint` rounds saved results so.
    try:
        params = {name: _widen_parameter(x) for name, x in equation.params.items()}
        if "precision" in params and any(in_half(x.aval) for x in equation.invars):
            # By default a GPU rounds float32 to TF32, and a TPU to bfloat16.
            params["precision"] = (jax.lax.Precision.HIGHEST,) * 2
        wide = bind_on_refs(equation, list(map(widen, args)), params)
    except Exception:  # Whatever a primitive does not support.
        return None
    types = [(x.shape, _wide_dtype(x.dtype)) for x in results]
    return wide if [(x.shape, x.dtype) for x in wide] == types else None


def run_wide_while(equation: Any, args: Sequence[Any]) -> tuple[list[Any] | None, Any]:
    """Runs a `while` in float32, as `bind_wide` does, and counts its iterations.

    Returns:
      The results, and how many iterations it ran, f32[]; or twice None if it cannot.
    """
    if parts.has_side_effects(equation):
        return None, None
    try:
        names = "cond_jaxpr", "body_jaxpr"
        jaxprs = (_widen_jaxpr(*parts.opened(equation.params[x])) for x in names)
        asks, runs = map(jaxpr_as_fun, jaxprs)
        asked, consts, carry = flow.while_parts(equation, list(map(widen, args)))

        def step(both):
            state, count = both
            return flow.step_of_while(equation, asking, body)(state), count + 1

        def asking(state):
            return asks(*asked, *state)[0]

        def body(state):
            return runs(*consts, *state)

        start = carry, jnp.float32(0)
        return lax.while_loop(lambda both: jnp.any(asking(both[0])), step, start)
    except Exception:  # Whatever a primitive does not support.
        return None, None


def stands_still(
    equation: Any, inputs: Sequence[Pair], results: Sequence[Pair]
) -> tuple[Any, Any]:
    """Asks whether numbers in half precision never reach the tolerance of a `while`.

    It asks the condition about the last floating-point numbers of the program, and the
    last integers and flags of float32, among which a counter is below its limit.

    Args:
      equation: The equation.
      inputs: Its operands.
      results: Its results, the last state.

    Returns:
      Whether the loop would go on, bool[]; and its twin, False.
    """
    asked, _, _ = flow.while_parts(equation, [x.real for x in inputs])
    state = [x.real if is_inexact(x.real) else x.in_float32 for x in results]
    (goes_on,) = jaxpr_as_fun(equation.params["cond_jaxpr"])(*asked, *state)
    return jnp.any(goes_on), jnp.zeros((), bool)


def _wide_dtype(dtype: Any) -> Any:
    return jnp.dtype(jnp.float32) if is_half(dtype) else dtype


def _widen_parameter(x: Any) -> Any:
    if parts.is_jaxpr(x):
        widened = _widen_jaxpr(*parts.opened(x))
        return widened if parts.is_closed(x) else widened.jaxpr
    if isinstance(x, tuple):
        widened = map(_widen_parameter, x)
        return type(x)(*widened) if hasattr(x, "_fields") else tuple(widened)
    is_dtype = isinstance(x, jnp.dtype) or (isinstance(x, type) and hasattr(x, "dtype"))
    return _wide_dtype(jnp.dtype(x)) if is_dtype else x


def _widen_jaxpr(jaxpr: Any, consts: Sequence[Any]) -> Any:
    def follow(_, equation, args):
        if (results := bind_wide(equation, args)) is None:
            raise TypeError(f"{equation.primitive} cannot run in float32.")
        return results

    def wide(*args):
        return walk(jaxpr, [*map(widen, consts), *args], follow, widen)

    avals = map(parts.type_held, jaxpr.invars)
    types = (parts.type_like(x, dtype=_wide_dtype(x.dtype)) for x in avals)
    return jax.make_jaxpr(wide)(*types)
