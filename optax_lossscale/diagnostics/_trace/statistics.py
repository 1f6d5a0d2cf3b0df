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
MAXIMA = ("largest", "float32_largest", "error", "smallest")
COUNTS = (
    "seen", "zeros", "subnormals", "infs", "nans", "flushed", "float32_nonfinite",
)  # fmt: skip
# The smallest magnitude is kept as the difference from this, so it is a maximum, too.
HIGHEST = np.iinfo(np.int32).max


class Statistics(NamedTuple):
    """What was measured of n arrays, over all iterations if they are in a loop.

    Magnitudes are bits, as `_bits.magnitudes` returns them (of float64, the upper 32).

    Attributes:
      maxima: i32[n, 4], the largest finite magnitude, the largest one in float32, the
        largest difference from float32, and `HIGHEST` minus the smallest magnitude that
        is not zero; 0 where there is none.
      counts: f32[n, 7], how many numbers were measured; how many were zero, subnormal,
        inf and nan; how many are zero, or would be, that are not zero in float32; how
        many are inf or nan in float32.
      first: i32[n, loops], in which iteration of each loop the first inf or nan was.
    """

    maxima: Any
    counts: Any
    first: Any

    @property
    def nonfinite(self) -> Any:
        """How many numbers were inf or nan, f32[n]."""
        infs = COUNTS.index("infs")
        return self.counts[..., infs : infs + 2].sum(-1)

    def row(self, i: int) -> dict[str, Any]:
        """Returns the numbers of one array, by the names in `MAXIMA` and `COUNTS`."""
        numbers = self.maxima[i].tolist() + self.counts[i].tolist()
        found: dict[str, Any] = dict(zip(MAXIMA + COUNTS, numbers, strict=True))
        found["smallest"] = found["smallest"] and HIGHEST - found["smallest"]
        return found


# The statistics of no arrays.
NOTHING = Statistics(
    maxima=np.zeros((0, len(MAXIMA)), np.int32),
    counts=np.zeros((0, len(COUNTS)), np.float32),
    first=np.zeros((0, 0), np.int32),
)


def merge(old: Statistics, new: Statistics) -> Statistics:
    """Joins the statistics of the same arrays, those of an earlier iteration first."""
    return Statistics(
        maxima=jnp.maximum(old.maxima, new.maxima),
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
        counts=statistics.counts.sum(0),
        first=first.min(0),
    )


def in_iteration(statistics: Statistics, index: Any) -> Statistics:
    """Adds an outer loop to `first`."""
    index = jnp.full((len(statistics.first), 1), index, jnp.int32)
    first = jnp.concatenate([index, statistics.first], axis=1)
    return statistics._replace(first=first)


def join_rows(parts: list[Statistics]) -> Statistics:
    """Joins the statistics of different arrays."""
    loops = max(part.first.shape[1] for part in parts)

    def pad(part):
        missing = loops - part.first.shape[1]
        first = jnp.pad(part.first, ((0, 0), (0, missing)))
        return part._replace(first=first)

    return jax.tree.map(lambda *x: jnp.concatenate(x), *map(pad, parts))


def norms(real: Any, shadow: Any) -> Any:
    """Returns the norms of a gradient in float32, of its error, and of what it lost.

    The fourth number is a projection: where the gradient is only roundoff, it differs
    from run to run.

    Args:
      real: The gradient.
      shadow: The gradient in float32.

    Returns:
      f32[4]. A number is lost if it is zero, but not zero in float32.
    """
    wide, narrow = (_as_real(x).astype(jnp.float32) for x in (shadow, real))
    parts = wide, narrow - wide, jnp.where(narrow == 0, wide, 0)

    def norm(x):
        largest = jnp.max(jnp.abs(x), initial=0)
        unit = jnp.where(largest == 0, 1, largest)  # Squares could overflow.
        return unit * jnp.sqrt(jnp.sum(jnp.square(x / unit)))

    waves = jnp.sin(jnp.arange(wide.size, dtype=jnp.float32)).reshape(wide.shape)
    return jnp.stack([*map(norm, parts), jnp.sum(waves * wide)])


class Recorder:
    """Measures arrays, in groups.

    Attributes:
      keys: The keys of what was measured, in the order of the statistics.
      known: For the keys of values that were measured here, and not in a loop or branch
        inside, the key of the same magnitudes.
    """

    def __init__(self):
        """Prepares to measure; see the attributes."""
        self.keys: list[Any] = []
        self.known: dict[Any, Any] = {}
        self._parts = [NOTHING]
        self._groups: dict[Any, list[Any]] = {}

    def add(self, key: Any, real: Any, shadow: Any) -> None:
        """Measures an array, and remembers its key."""
        dtype = jnp.finfo(real.dtype).dtype
        has_shadow = shadow is not real
        real = _as_real(real)
        shadow = _as_real(shadow) if has_shadow else real
        size = real.size
        if 0 < size < ROW and ROW % size == 0:
            size = ROW
        if not size or 2 * size > GROUPED or not _is_replicated(real):
            found = _measure(real, shadow, dtype, tuple(range(real.ndim)))
            self.extend([key], jax.tree.map(lambda x: x[None], found))
        else:
            kind = dtype, has_shadow, size
            group = self._groups.setdefault(kind, [])
            group.append((key, real, shadow))
            if (len(group) + 1) * size > GROUPED:
                self._measure_group(kind)

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
        dtype, has_shadow, size = kind
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
        found = _measure(real, shadow, dtype, (1,))
        share = jnp.asarray([[x.size / size] for x in reals], jnp.float32)
        self.extend(list(keys), found._replace(counts=found.counts * share))


def _as_real(x):
    """Returns an array in float32 or float64, with both parts if it is complex."""
    x = jnp.asarray(x)
    x = jnp.stack([lax.real(x), lax.imag(x)]) if jnp.iscomplexobj(x) else x
    return x if x.dtype == jnp.float64 else x.astype(jnp.float32)


def _is_replicated(x: Any) -> bool:
    spec = getattr(getattr(jax.typeof(x), "sharding", None), "spec", ())
    return not any(axis is not None for axis in spec or ())


@functools.lru_cache
def codes_of(dtype: Any) -> list[int]:
    """Returns the bits of the smallest normal number, of inf, and of what is flushed.

    Args:
      dtype: The dtype of the numbers.
    """
    if dtype == jnp.float64:
        return [0x00100000, 0x7FF00000, 0]
    limits = _bits.limits_of(jnp.dtype(dtype).name)
    numbers = np.array([limits.normal, np.inf, limits.flushed], np.float32)
    return numbers.view(np.int32).tolist()


def _code(x: Any) -> Any:
    (bits,) = _bits.magnitudes(x)
    return bits if bits.dtype == jnp.int32 else (bits >> 32).astype(jnp.int32)


@functools.partial(jax.jit, static_argnames=("dtype", "axes"), inline=True)
def _summarize(real, shadow, dtype, axes):
    """Reduces two arrays, in one pass: on CPU each further pass costs as much."""
    normal, infinity, flushed = codes_of(dtype)
    bits, wide, error = map(_code, (real, shadow, real - shadow))
    is_zero = bits == 0
    is_counted = ~is_zero & (bits < infinity)
    flags = [is_zero, is_counted & (bits < normal), bits == infinity, bits > infinity]
    flags += [(wide > 0) & (is_zero | (wide <= flushed)), wide >= infinity]
    counts = [flag.astype(jnp.int32) for flag in flags]
    maxima = [jnp.where(x < infinity, x, 0) for x in (bits, wide, error)]
    maxima.append(jnp.where(is_counted, HIGHEST - bits, 0))
    n = len(counts)  # `combine` must not hold arrays: JAX keeps it.

    def combine(x, y):
        return *map(lax.add, x[:n], y[:n]), *map(lax.max, x[n:], y[n:])

    initial = (np.int32(0),) * (n + len(maxima))
    found = lax.reduce((*counts, *maxima), initial, combine, axes)
    return found[:n], found[n:]


def _measure(real, shadow, dtype, axes) -> Statistics:
    size = float(np.prod([real.shape[i] for i in axes]))
    # No int32 count overflows: the rows of a huge array are counted apart.
    apart = axes[:1] if size >= _bits.COUNTABLE else ()
    counts, maxima = _summarize(real, shadow, dtype, axes[len(apart) :])
    counts = [jnp.sum(x.astype(jnp.float32), apart) for x in counts]
    maxima = [jnp.max(x, apart) for x in maxima]
    return Statistics(
        maxima=jnp.stack(maxima, -1),
        counts=jnp.stack([jnp.full_like(counts[0], size), *counts], -1),
        first=jnp.zeros((*counts[0].shape, 0), jnp.int32),
    )
