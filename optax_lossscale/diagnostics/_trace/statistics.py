"""A few numbers about each array: how large, how small, how many zeros, inf and nan."""

import functools
import math
from collections.abc import Sequence
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
MAXIMA = ("largest", "float32_largest", "error", "smallest", "begins")
COUNTS = "seen", "zeros", "infs", "nans", "flushed", "float32_nonfinite"
# The smallest magnitude is kept as the difference from this, so it is a maximum, too.
HIGHEST = np.iinfo(np.int32).max


class Statistics(NamedTuple):
    """What was measured of n arrays, over all iterations if they are in a loop.

    Magnitudes are bits, as `_bits.magnitudes` returns them.

    Attributes:
      maxima: i32[n, 5], the largest finite magnitude, the largest one in float32, the
        largest difference from float32, and `HIGHEST` minus the smallest magnitude that
        is not zero; 0 where there is none. Then 2 if inf or nan came from finite
        inputs; 1 if there were more of them than in the inputs, or nan from inf.
      counts: f32[n, 6], how many numbers were measured; how many were zero, inf and
        nan; how many are zero, or would be, that are not zero in float32; how many are
        inf or nan in float32.
    """

    maxima: Any
    counts: Any

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
)


def merge(old: Statistics, new: Statistics) -> Statistics:
    """Joins the statistics of the same arrays in two iterations."""
    return Statistics(jnp.maximum(old.maxima, new.maxima), old.counts + new.counts)


def over_devices(statistics: Statistics) -> Statistics:
    """Joins the statistics of devices, which are along the first axis."""
    return Statistics(statistics.maxima.max(0), statistics.counts.sum(0))


def join_rows(parts: list[Statistics]) -> Statistics:
    """Joins the statistics of different arrays."""
    return jax.tree.map(lambda *x: jnp.concatenate(x), *parts)


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
    wide, narrow = map(_as_real, (shadow, real))
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
        self._inputs: dict[Any, tuple[Any, bool, Any]] = {}
        self._parts = [NOTHING]
        self._groups: dict[Any, list[Any]] = {}

    def add(
        self,
        key: Any,
        real: Any,
        shadow: Any,
        inputs: Sequence[Any] = (),
        constants: Sequence[float] = (),
        is_elementwise: bool = False,
    ) -> None:
        """Measures an array, and remembers its key.

        Args:
          key: The key.
          real: The array.
          shadow: The array in float32.
          inputs: The keys of the arrays that it was computed from.
          constants: The constants that it was computed from.
          is_elementwise: Whether each number was computed from one of each input.
        """
        self._inputs[key] = inputs, is_elementwise, constants
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
        found, rows = join_rows(self._parts), {k: i for i, k in enumerate(self.keys)}
        # Shares, since a number that is broadcast was measured once.
        _, _, infs, nans, _, _ = (found.counts / jnp.maximum(found.counts[:, :1], 1)).T
        sources: list[list[int]] = [[] for _ in rows]
        # Nothing begins here in the rows of a loop or branch inside.
        is_elementwise, constant = np.zeros(len(rows), bool), np.ones((2, len(rows)))
        for key, (inputs, number_by_number, constants) in self._inputs.items():
            row, known = rows[key], (self.known.get((k,), k) for k in inputs)
            sources[row] = [rows[k] for k in known if k in rows]
            is_elementwise[row] = number_by_number
            # An inf may be a mask, but with a constant of nan the nan begins here.
            constant[:, row] = any(map(math.isinf, constants)), False
        width = max(map(len, sources), default=0)
        index = [x + [len(rows)] * (width - len(x)) for x in sources]
        shares = jnp.stack([infs + nans, nans])
        shares = jnp.concatenate([shares, jnp.zeros((2, 1), jnp.float32)], 1)
        index = np.array(index, np.int32).reshape(len(rows), width)
        had = shares.at[:, index].get(mode="promise_in_bounds").sum(-1)
        had, had_nan = had + constant.astype(np.float32)
        is_new = (nans > 0) & (had_nan == 0)
        is_new |= is_elementwise & (infs + nans > 1.001 * had)
        begins = jnp.where((infs + nans > 0) & (had == 0), 2, is_new.astype(jnp.int32))
        begins = jnp.maximum(found.maxima[:, -1], begins)[:, None]
        maxima = jnp.concatenate([found.maxima[:, :-1], begins], 1)
        return found._replace(maxima=maxima)

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
    """Returns an array in float32, with both parts if it is complex."""
    x = jnp.asarray(x)
    x = jnp.stack([lax.real(x), lax.imag(x)]) if jnp.iscomplexobj(x) else x
    end = float(jnp.finfo(jnp.float32).max)  # What is finite in float64 stays finite.
    if x.dtype == jnp.float64:
        x = jnp.where(jnp.isfinite(x), jnp.clip(x, -end, end), x)
    return x.astype(jnp.float32)


def _is_replicated(x: Any) -> bool:
    spec = getattr(getattr(jax.typeof(x), "sharding", None), "spec", ())
    return not any(axis is not None for axis in spec or ())


@functools.lru_cache
def codes_of(dtype: Any) -> list[int]:
    """Returns the bits of inf, and of the largest number that a dtype flushes."""
    limits = _bits.limits_of(jnp.dtype(dtype).name)
    return np.array([np.inf, limits.flushed], np.float32).view(np.int32).tolist()


@functools.partial(jax.jit, static_argnames=("dtype", "axes"), inline=True)
def _summarize(real, shadow, dtype, axes):
    """Reduces two arrays, in one pass: on CPU each further pass costs as much."""
    infinity, flushed = codes_of(dtype)
    ((bits,), (wide,), (error,)) = map(_bits.magnitudes, (real, shadow, real - shadow))
    is_zero = bits == 0
    is_counted = ~is_zero & (bits < infinity)
    flags = [is_zero, bits == infinity, bits > infinity]
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
        maxima=jnp.stack([*maxima, jnp.zeros_like(maxima[0])], -1),
        counts=jnp.stack([jnp.full_like(counts[0], size), *counts], -1),
    )
