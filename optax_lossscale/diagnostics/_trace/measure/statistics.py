"""The statistics of an array and its float32 twin: one row of numbers.

A row is i32[len(FIELDS)]. Each field is a float32 that is not negative, kept as its
bits: larger numbers are larger integers. So the rows of iterations and devices join by
`max`, and the row of an operation that never ran is all zeros.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optax_lossscale._tree import is_inexact
from optax_lossscale.diagnostics import _bits
from optax_lossscale.diagnostics._trace.run import FIELDS, WAVES

# The smallest magnitude is kept as the difference from this: so a maximum keeps it.
INT32_MAX = np.iinfo(np.int32).max
NOTHING = np.zeros(len(FIELDS), np.int32)


def numbers(row: Any) -> dict[str, float]:
    """Returns the numbers of a row on the host, by the names in `FIELDS`."""
    bits = np.array(row)
    bits[-1] = bits[-1] and INT32_MAX - bits[-1]
    return dict(zip(FIELDS, bits.view(np.float32).tolist(), strict=True))


def row_of(real: Any, twin: Any) -> Any:
    """Returns the row of an array and its twin, i32[1, len(FIELDS)]; see `Rows.add`."""
    comparable = Comparable.of(real, twin)
    return comparable.reduced(tuple(range(comparable.real.ndim)))[None]


class Comparable(NamedTuple):
    """An array and its twin as float32 arrays.

    Attributes:
      real: The array. Of integers and flags 1 where they agree with the twin, and 0
        elsewhere, which counts as flushed.
      twin: The twin, `real` itself if there is none.
      edge: The bits of the largest magnitude that the dtype flushes to zero.
    """

    real: Any
    twin: Any
    edge: int

    @classmethod
    def of(cls, real: Any, twin: Any) -> "Comparable":
        """Converts an array and its twin; None is no twin."""
        if not is_inexact(real):
            real = (real == twin).astype(jnp.float32)
            twin = jnp.ones_like(real)
        limits = _bits.limits_of(jnp.finfo(real.dtype).dtype.name)
        edge = int(np.float32(limits.flushed).view(np.int32))
        real = _as_real(real)
        return cls(real, real if twin is None else _as_real(twin), edge)

    def reduced(self, axes: tuple[int, ...]) -> Any:
        """Returns the rows along other axes than these, i32[..., len(FIELDS)]."""
        return _reduced(self.real, self.twin, self.edge, axes)


def norms(real: Any, float32: Any) -> Any:
    """Returns the norms and the sketch of a gradient, f32[3 + len(WAVES)].

    See `Run.norms`.
    """
    wide, narrow = _as_real(float32), _as_real(real)

    def norm(x):
        largest = jnp.max(jnp.abs(x), initial=0)
        unit = jnp.where(largest == 0, 1, largest)  # Squares could overflow.
        return unit * jnp.sqrt(jnp.sum(jnp.square(x / unit)))

    # Each number by its place, without a reshape: devices may have parts of each row.
    places = jnp.ones(wide.shape, jnp.float32)
    for axis in range(wide.ndim):
        stride = math.prod(wide.shape[axis + 1 :])
        places += stride * lax.broadcasted_iota(jnp.float32, wide.shape, axis)
    sizes = map(norm, (wide, narrow - wide, jnp.where(narrow == 0, wide, 0)))
    waves = (jnp.sum(jnp.sin(x**0.5 * places) * wide) for x in WAVES)
    return jnp.stack([*sizes, *waves])


@functools.partial(jax.jit, static_argnames=("edge", "axes"), inline=True)
def _reduced(real, wide, edge, axes):
    """Reduces two arrays in one pass: on CPU each further pass costs as much."""
    size = max(math.prod(real.shape[i] for i in axes), 1)
    if size >= _bits.COUNTABLE:  # No int32 count overflows: the worst row counts.
        return _reduced(real, wide, edge, axes[1:]).max(0)
    # Functions of `lax` alone: those of `jax.numpy` take twice as long to trace.
    arrays = real, wide, lax.sub(real, wide)
    bits, twin, error = (lax.bitcast_convert_type(x, jnp.int32) for x in arrays)
    bits, twin, error = (
        lax.bitwise_and(x, lax.full_like(x, INT32_MAX)) for x in (bits, twin, error)
    )
    numbers = 0, edge, int(np.float32(np.inf).view(np.int32)), INT32_MAX
    zero, edge, infinity, highest = (lax.full_like(bits, x) for x in numbers)
    is_zero, is_infinite = lax.eq(bits, zero), lax.ge(twin, infinity)
    is_flushed = lax.bitwise_or(is_zero, lax.le(twin, edge))
    is_lost = lax.bitwise_and(lax.gt(twin, zero), is_flushed)
    is_inf, is_nan = lax.eq(bits, infinity), lax.gt(bits, infinity)
    flags = [is_zero, is_inf, is_nan, is_lost, is_infinite]
    maxima = [lax.select(lax.lt(x, infinity), x, zero) for x in (bits, twin, error)]
    is_number = lax.bitwise_and(lax.lt(bits, infinity), lax.gt(bits, zero))
    maxima.append(lax.select(is_number, lax.sub(highest, bits), zero))
    n = len(flags)  # `combine` must not hold arrays: JAX keeps it.

    def combine(x, y):
        return *map(lax.add, x[:n], y[:n]), *map(lax.max, x[n:], y[n:])

    start = (np.int32(0),) * (n + len(maxima))
    arrays = *(lax.convert_element_type(x, jnp.int32) for x in flags), *maxima
    totals = lax.reduce(arrays, start, combine, axes)
    one = lax.full_like(totals[0], size)
    counts = [one, lax.full_like(one, 0), *totals[:n]]
    counts = [lax.convert_element_type(x, jnp.float32) for x in counts]
    shares = [lax.div(x, counts[0]) for x in counts]
    floats = [lax.bitcast_convert_type(x, jnp.int32) for x in shares]
    columns = [lax.expand_dims(x, (x.ndim,)) for x in (*floats, *totals[n:])]
    return lax.concatenate(columns, one.ndim)


def _as_real(x):
    """Returns an array in float32, with both parts if it is complex."""
    x = jnp.asarray(x)
    x = jnp.stack([lax.real(x), lax.imag(x)]) if jnp.iscomplexobj(x) else x
    end = float(jnp.finfo(jnp.float32).max)  # Finite numbers of float64 stay finite.
    if x.dtype == jnp.float64:
        x = jnp.where(jnp.isfinite(x), jnp.clip(x, -end, end), x)
    return x.astype(jnp.float32)
