"""A few numbers about each array: how large, how small, how many zeros, inf and nan."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optax_lossscale.diagnostics import _bits

# Arrays of the same size are measured in groups, which compile faster. A group has at
# most GROUPED numbers, to save memory. Small arrays are repeated up to ROW numbers, if
# that is a multiple of their size.
ROW, GROUPED = 2**12, 2**20


class Statistics(NamedTuple):
    """What was measured of n arrays, over all iterations if they are in a loop.

    Magnitudes are bits, as `_bits.magnitudes` returns them (of float64, the upper 32).

    Attributes:
      largest: i32[n], the largest finite magnitude.
      smallest: i32[n], the smallest magnitude that is not zero.
      wide_largest: i32[n], the largest finite magnitude in float32.
      error: i32[n], the largest difference from float32.
      seen: f32[n], how many numbers were measured.
      zeros: f32[n], how many were zero.
      subnormals: f32[n], how many were subnormal.
      infs: f32[n], how many were inf.
      nans: f32[n], how many were nan.
      flushed: f32[n], how many are zero, or would be, that are not zero in float32.
      first: i32[n, loops], in which iteration of each loop the first inf or nan was.
    """

    largest: Any
    smallest: Any
    wide_largest: Any
    error: Any
    seen: Any
    zeros: Any
    subnormals: Any
    infs: Any
    nans: Any
    flushed: Any
    first: Any


MAXIMA = ("largest", "wide_largest", "error")
COUNTS = ("seen", "zeros", "subnormals", "infs", "nans", "flushed")
NOT_SEEN = {"smallest": np.iinfo(np.int32).max, "first": -1}


def neutral(rows: int, loops: int) -> Statistics:
    """Returns the statistics of arrays that no one has computed."""

    def fill(name):
        is_bits = name in (*MAXIMA, "smallest", "first")
        shape = (rows, loops) if name == "first" else (rows,)
        dtype = jnp.int32 if is_bits else jnp.float32
        return jnp.full(shape, NOT_SEEN.get(name, 0), dtype)

    return Statistics(*map(fill, Statistics._fields))


def merge(left: Statistics, right: Statistics) -> Statistics:
    """Joins the statistics of the same arrays, those of an earlier iteration first."""

    def join(name):
        x, y = getattr(left, name), getattr(right, name)
        if name == "first":
            return jnp.where((left.infs + left.nans)[:, None] > 0, x, y)
        if name == "smallest":
            return jnp.minimum(x, y)
        return jnp.maximum(x, y) if name in MAXIMA else x + y

    return Statistics(*map(join, Statistics._fields))


def over_devices(statistics: Statistics) -> Statistics:
    """Joins the statistics of devices, which are along the first axis."""

    def join(name):
        x = getattr(statistics, name)
        if name == "first":
            # The earliest iteration, comparing the outer loops first.
            bad = statistics.infs + statistics.nans > 0
            late = np.iinfo(np.int32).max
            x = jnp.where(bad[..., None], x, late)
            for i in range(x.shape[-1]):
                earliest = x[..., i] == x[..., i].min(0)
                x = jnp.where(earliest[..., None], x, late)
            return x.min(0)
        if name == "smallest":
            return x.min(0)
        return x.max(0) if name in MAXIMA else x.sum(0)

    return Statistics(*map(join, Statistics._fields))


def in_iteration(statistics: Statistics, index: Any) -> Statistics:
    """Adds an outer loop to `first`."""
    index = jnp.broadcast_to(index, statistics.infs.shape).astype(jnp.int32)
    first = jnp.concatenate([index[:, None], statistics.first], axis=1)
    return statistics._replace(first=first)


def join_rows(parts: list[Statistics]) -> Statistics:
    """Joins the statistics of different arrays."""
    if not parts:
        return neutral(0, 0)
    loops = max(part.first.shape[1] for part in parts)

    def pad(part):
        missing = loops - part.first.shape[1]
        first = jnp.pad(part.first, ((0, 0), (0, missing)), constant_values=-1)
        return part._replace(first=first)

    return jax.tree.map(lambda *x: jnp.concatenate(x), *map(pad, parts))


class Recorder:
    """Measures arrays, in groups."""

    def __init__(self, dtype: Any = None):
        """Prepares to measure.

        Args:
          dtype: The dtype that all numbers are checked against; None for their own.
        """
        self.dtype = dtype
        self.keys: list[Any] = []
        self.known: set[Any] = set()
        self._parts: list[Statistics] = []
        self._groups: dict[Any, list[Any]] = {}

    def add(self, key: Any, real: Any, shadow: Any) -> None:
        """Measures an array, and remembers its key."""
        self.known.add(key)
        has_shadow = shadow is not real
        real = _as_real(real)
        shadow = _as_real(shadow).astype(jnp.float32) if has_shadow else real
        judged = real.dtype if self.dtype is None else self.dtype
        kind = (real.dtype, judged, has_shadow)
        size = real.size
        if 0 < size < ROW and ROW % size == 0:
            size = ROW
        if not size:
            self._extend([key], neutral(1, 0))
        elif 2 * size > GROUPED or not _is_replicated(real):
            found = _measure(real, shadow, judged, has_shadow, range(real.ndim))
            self._extend([key], jax.tree.map(lambda x: x[None], found))
        else:
            group = self._groups.setdefault((*kind, size), [])
            group.append((key, real, shadow))
            if (len(group) + 1) * size > GROUPED:
                self._measure_group((*kind, size))

    def has(self, keys: tuple[Any, ...]) -> bool:
        """Whether one array was measured here, and not in a loop or branch around."""
        return len(keys) == 1 and keys[0] in self.known

    def extend(self, keys: list[Any], statistics: Statistics) -> None:
        """Adds arrays that were measured elsewhere."""
        self._extend(keys, statistics)

    def finish(self) -> Statistics:
        """Returns the statistics of all arrays, in the order of `keys`."""
        for kind in list(self._groups):
            self._measure_group(kind)
        return join_rows(self._parts)

    def _extend(self, keys, statistics):
        self.keys += keys
        self._parts.append(statistics)

    def _measure_group(self, kind):
        _, judged, has_shadow, size = kind
        keys, reals, shadows = zip(*self._groups.pop(kind), strict=True)

        def stack(arrays):
            rows = []
            for x in arrays:
                # Not padded: on CPU, fusions with a pad read beyond the array.
                flat = lax.reshape(x, (1, x.size))
                repeated = lax.broadcast_in_dim(flat, (size // x.size, x.size), (0, 1))
                rows.append(lax.reshape(repeated, (1, size)))
            return lax.concatenate(rows, 0)

        real = stack(reals)
        shadow = stack(shadows) if has_shadow else real
        found = _measure(real, shadow, judged, has_shadow, (1,))
        share = jnp.asarray([x.size / size for x in reals], jnp.float32)
        counts = {name: getattr(found, name) * share for name in COUNTS}
        self._extend(list(keys), found._replace(**counts))


def _as_real(x):
    x = jnp.asarray(x)
    if not jnp.iscomplexobj(x):
        return x
    return lax.concatenate([lax.real(x)[None], lax.imag(x)[None]], 0)


def _is_replicated(x: Any) -> bool:
    spec = getattr(getattr(jax.typeof(x), "sharding", None), "spec", ())
    return not any(axis is not None for axis in spec or ())


class Codes(NamedTuple):
    """Where bits change their meaning, in `Statistics`."""

    normal: int
    infinity: int
    flushed: int


@functools.lru_cache
def codes_of(dtype: Any, judged: Any) -> Codes:
    """Returns the bits that matter for a dtype.

    Args:
      dtype: The dtype of the numbers.
      judged: The dtype that they should fit into.
    """
    if dtype == jnp.float64:
        return Codes(0x00100000, 0x7FF00000, 0)
    normal, flushed = float(np.finfo(np.float32).tiny), 0.0
    if judged != jnp.float32 and judged != jnp.float64:
        limits = _bits.limits_of(jnp.dtype(judged).name)
        normal, flushed = limits.normal, limits.flushed
    return Codes(as_code(normal), as_code(np.inf), as_code(flushed))


def as_code(x: float) -> int:
    """Returns the bits of a float32 number."""
    return int(np.float32(x).view(np.int32))


@functools.partial(
    jax.jit, static_argnames=("judged", "has_shadow", "axes"), inline=True
)
def _summarize(real, shadow, judged, has_shadow, axes):
    """Reduces two arrays, in one pass: on CPU each further pass costs as much."""
    codes = codes_of(real.dtype, judged)
    (bits,) = _bits.magnitudes(real)
    if bits.dtype == jnp.int64:
        bits = (bits >> 32).astype(jnp.int32)
    zero = lax.full_like(bits, 0)
    infinity = lax.full_like(bits, codes.infinity)
    finite = bits < infinity
    is_zero = bits == zero
    flags = [
        ~is_zero,
        bits >= lax.full_like(bits, codes.normal),
        ~finite,
        bits > infinity,
    ]
    maxima = [lax.select(finite, bits, zero)]
    least = lax.select(is_zero, lax.full_like(bits, NOT_SEEN["smallest"]), bits)
    if has_shadow:
        (wide,) = _bits.magnitudes(shadow)
        difference = lax.abs(lax.sub(real.astype(jnp.float32), shadow))
        error = lax.bitcast_convert_type(difference, jnp.int32)
        flushed = is_zero | (wide <= lax.full_like(wide, codes.flushed))
        flags.append((wide > zero) & flushed)
        end = lax.full_like(wide, as_code(np.inf))
        maxima += [lax.select(x < end, x, zero) for x in (wide, error)]
    elif codes.flushed:
        flags.append(~is_zero & (bits <= lax.full_like(bits, codes.flushed)))
    counts = [flag.astype(jnp.int32) for flag in flags]
    first = (np.int32(0),) * (len(counts) + len(maxima))

    def combine(x, y):
        n = len(counts)
        sums = map(lax.add, x[:n], y[:n])
        tops = map(lax.max, x[n:-1], y[n:-1])
        return *sums, *tops, lax.min(x[-1], y[-1])

    initial = (*first, np.int32(NOT_SEEN["smallest"]))
    *found, smallest = lax.reduce((*counts, *maxima, least), initial, combine, axes)
    return found[: len(counts)], found[len(counts) :], smallest


def _measure(real, shadow, judged, has_shadow, axes) -> Statistics:
    size = float(np.prod([real.shape[i] for i in axes]))
    axes = tuple(axes)
    # No int32 count overflows: the rows of a huge array are counted apart.
    apart = axes[:1] if size >= _bits.COUNTABLE else ()
    sums, maxima, smallest = _summarize(
        real, shadow, judged, has_shadow, axes[len(apart) :]
    )
    counts = [jnp.sum(x.astype(jnp.float32), apart) for x in sums]
    maxima = [jnp.max(x, apart) for x in maxima]
    nonzero, normal, nonfinite, nans = counts[:4]
    flushed = counts[4] if len(counts) > 4 else jnp.zeros_like(nonzero)
    wide, error = maxima[1:] if has_shadow else (maxima[0], jnp.zeros_like(maxima[0]))
    return Statistics(
        largest=maxima[0],
        smallest=jnp.min(smallest, apart),
        wide_largest=wide,
        error=error,
        seen=jnp.full_like(nonzero, size),
        zeros=size - nonzero,
        subnormals=nonzero - normal,
        infs=nonfinite - nans,
        nans=nans,
        flushed=flushed,
        first=jnp.zeros((*nonzero.shape, 0), jnp.int32),
    )
