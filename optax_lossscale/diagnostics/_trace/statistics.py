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


MAXIMA = ("largest", "wide_largest", "error")
COUNTS = (
    "seen", "zeros", "subnormals", "infs", "nans", "flushed", "float32_nonfinite",
)  # fmt: skip
# What stands for the smallest magnitude where there is none.
NONE_SMALLEST = np.iinfo(np.int32).max


class Statistics(NamedTuple):
    """What was measured of n arrays, over all iterations if they are in a loop.

    Magnitudes are bits, as `_bits.magnitudes` returns them (of float64, the upper 32).

    Attributes:
      maxima: i32[n, 3], the largest finite magnitude, the largest one in float32, and
        the largest difference from float32.
      smallest: i32[n], the smallest magnitude that is not zero.
      counts: f32[n, 7], how many numbers were measured; how many were zero, subnormal,
        inf and nan; how many are zero, or would be, that are not zero in float32; how
        many are inf or nan in float32.
      first: i32[n, loops], in which iteration of each loop the first inf or nan was.
    """

    maxima: Any
    smallest: Any
    counts: Any
    first: Any

    @property
    def nonfinite(self) -> Any:
        """How many numbers were inf or nan, f32[n]."""
        infs = COUNTS.index("infs")
        return self.counts[..., infs : infs + 2].sum(-1)

    def row(self, i: int) -> dict[str, Any]:
        """Returns the numbers of one array, by the names in `MAXIMA` and `COUNTS`."""
        maxima = dict(zip(MAXIMA, self.maxima[i].tolist(), strict=True))
        counts = dict(zip(COUNTS, self.counts[i].tolist(), strict=True))
        return {"smallest": int(self.smallest[i]), **maxima, **counts}


def neutral(rows: int, loops: int) -> Statistics:
    """Returns the statistics of arrays that no one has computed."""
    return Statistics(
        maxima=jnp.zeros((rows, len(MAXIMA)), jnp.int32),
        smallest=jnp.full(rows, NONE_SMALLEST, jnp.int32),
        counts=jnp.zeros((rows, len(COUNTS)), jnp.float32),
        first=jnp.full((rows, loops), -1, jnp.int32),
    )


def merge(old: Statistics, new: Statistics) -> Statistics:
    """Joins the statistics of the same arrays, those of an earlier iteration first."""
    return Statistics(
        maxima=jnp.maximum(old.maxima, new.maxima),
        smallest=jnp.minimum(old.smallest, new.smallest),
        counts=old.counts + new.counts,
        first=jnp.where(old.nonfinite[:, None] > 0, old.first, new.first),
    )


def over_devices(statistics: Statistics) -> Statistics:
    """Joins the statistics of devices, which are along the first axis."""
    # The earliest iteration, comparing the outer loops first.
    late = np.iinfo(np.int32).max
    first = jnp.where(statistics.nonfinite[..., None] > 0, statistics.first, late)
    for i in range(first.shape[-1]):
        earliest = first[..., i] == first[..., i].min(0)
        first = jnp.where(earliest[..., None], first, late)
    return Statistics(
        maxima=statistics.maxima.max(0),
        smallest=statistics.smallest.min(0),
        counts=statistics.counts.sum(0),
        first=first.min(0),
    )


def in_iteration(statistics: Statistics, index: Any) -> Statistics:
    """Adds an outer loop to `first`."""
    index = jnp.broadcast_to(index, statistics.smallest.shape).astype(jnp.int32)
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


def norms(real: Any, shadow: Any, judged: Any = None) -> Any:
    """Returns the norms of a gradient in float32, of its error, and of what it lost.

    The fourth number is a projection: where the gradient is only roundoff, it differs
    from run to run.

    Args:
      real: The gradient.
      shadow: The gradient in float32.
      judged: The dtype that all numbers should fit into; None for their own.

    Returns:
      f32[4]. Lost is what is zero, or would be, that is not zero in float32.
    """
    wide, narrow = (_as_real(x).astype(jnp.float32) for x in (shadow, real))
    limit = codes_of(jnp.dtype(jnp.float32), judged or jnp.float32).flushed
    is_lost = (narrow == 0) | (_bits.magnitudes(wide)[0] <= limit)
    parts = wide, narrow - wide, jnp.where(is_lost, wide, 0)

    def norm(x):
        largest = jnp.max(jnp.abs(x), initial=0)
        unit = jnp.where(largest == 0, 1, largest)  # Squares could overflow.
        return unit * jnp.sqrt(jnp.sum(jnp.square(x / unit)))

    waves = jnp.sin(jnp.arange(wide.size, dtype=jnp.float32)).reshape(wide.shape)
    return jnp.stack([*map(norm, parts), jnp.sum(waves * wide)])


class Recorder:
    """Measures arrays, in groups.

    Attributes:
      dtype: The dtype that all numbers should fit into; None for their own.
      keys: The keys of what was measured, in the order of the statistics.
      known: The keys of what was measured here, and not in a loop or branch inside.
    """

    def __init__(self, dtype: Any = None):
        """Prepares to measure; see the attributes."""
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
        size = real.size
        if 0 < size < ROW and ROW % size == 0:
            size = ROW
        if not size:
            self.extend([key], neutral(1, 0))
        elif 2 * size > GROUPED or not _is_replicated(real):
            found = _measure(real, shadow, judged, has_shadow, range(real.ndim))
            self.extend([key], jax.tree.map(lambda x: x[None], found))
        else:
            kind = real.dtype, judged, has_shadow, size
            group = self._groups.setdefault(kind, [])
            group.append((key, real, shadow))
            if (len(group) + 1) * size > GROUPED:
                self._measure_group(kind)

    def has(self, keys: tuple[Any, ...]) -> bool:
        """Whether one array was measured here, and not in a loop or branch around."""
        return len(keys) == 1 and keys[0] in self.known

    def extend(self, keys: list[Any], statistics: Statistics) -> None:
        """Adds arrays that were measured elsewhere."""
        self.keys += keys
        self._parts.append(statistics)

    def finish(self) -> Statistics:
        """Returns the statistics of all arrays, in the order of `keys`."""
        for kind in list(self._groups):
            self._measure_group(kind)
        return join_rows(self._parts)

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
        share = jnp.asarray([[x.size / size] for x in reals], jnp.float32)
        self.extend(list(keys), found._replace(counts=found.counts * share))


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
    least = lax.select(is_zero, lax.full_like(bits, NONE_SMALLEST), bits)
    if has_shadow:
        (wide,) = _bits.magnitudes(shadow)
        difference = lax.abs(lax.sub(real.astype(jnp.float32), shadow))
        error = lax.bitcast_convert_type(difference, jnp.int32)
        flushed = is_zero | (wide <= lax.full_like(wide, codes.flushed))
        end = lax.full_like(wide, as_code(np.inf))
        flags += [(wide > zero) & flushed, wide >= end]
        maxima += [lax.select(x < end, x, zero) for x in (wide, error)]
    elif codes.flushed:
        flags.append(~is_zero & (bits <= lax.full_like(bits, codes.flushed)))
    counts = [flag.astype(jnp.int32) for flag in flags]
    n = len(counts)  # `combine` must not hold arrays: JAX keeps it.
    first = (np.int32(0),) * (n + len(maxima))

    def combine(x, y):
        sums = map(lax.add, x[:n], y[:n])
        tops = map(lax.max, x[n:-1], y[n:-1])
        return *sums, *tops, lax.min(x[-1], y[-1])

    initial = (*first, np.int32(NONE_SMALLEST))
    *found, smallest = lax.reduce((*counts, *maxima, least), initial, combine, axes)
    return found[:n], found[n:], smallest


def _measure(real, shadow, judged, has_shadow, axes) -> Statistics:
    size = float(np.prod([real.shape[i] for i in axes]))
    axes = tuple(axes)
    # No int32 count overflows: the rows of a huge array are counted apart.
    apart = axes[:1] if size >= _bits.COUNTABLE else ()
    sums, maxima, smallest = _summarize(
        real, shadow, judged, has_shadow, axes[len(apart) :]
    )
    sums = [jnp.sum(x.astype(jnp.float32), apart) for x in sums]
    largest, *wide = [jnp.max(x, apart) for x in maxima]
    nonzero, normal, nonfinite, nans, *wide_counts = sums
    seen, none = jnp.full_like(nonzero, size), jnp.zeros_like(nonzero)
    zeros, subnormals, infs = seen - nonzero, nonzero - normal, nonfinite - nans
    wide_counts += [none, nonfinite][len(wide_counts) :]
    counts = [seen, zeros, subnormals, infs, nans, *wide_counts]
    maxima = [largest, *(wide or [largest, jnp.zeros_like(largest)])]
    return Statistics(
        maxima=jnp.stack(maxima, -1),
        smallest=jnp.min(smallest, apart),
        counts=jnp.stack(counts, -1),
        first=jnp.zeros((*nonzero.shape, 0), jnp.int32),
    )
