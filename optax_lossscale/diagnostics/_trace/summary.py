"""A few numbers about an array and its twin; two summaries of one array join by max."""

import abc
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optax_lossscale._tree import is_inexact
from optax_lossscale.diagnostics import _bits

# Each is a float32 that is not negative, kept as its bits: larger numbers are larger
# integers, so the summaries of iterations and devices join by max, and what never ran
# is all zeros. Shares are those of the worst iteration, or device.
FIELDS = (
    "seen", "begins", "zeros", "infs", "nans", "flushed", "float32_nonfinite",
    "largest", "float32_largest", "error", "smallest",
)  # fmt: skip
BEGINS, BAD = (
    FIELDS.index("begins"),
    slice(FIELDS.index("infs"), FIELDS.index("nans") + 1),
)
# The smallest magnitude is kept as the difference from this, so it is a maximum, too.
INT32_MAX = np.iinfo(np.int32).max
# A group has at most GROUPED numbers, to save memory, and MEMBERS arrays: more of them
# compile slowly. Small arrays are repeated up to ROW numbers, if that is a multiple of
# their size. More numbers compile no faster, and each iteration of a loop counts them.
ROW, GROUPED, MEMBERS = 2**8, 2**20, 2**8
# The squares of frequencies, of which none is a multiple of another.
WAVES = (1, 2, 3, 5)
NOTHING = np.zeros(len(FIELDS), np.int32)


class Origins(NamedTuple):
    """What decides whether inf or nan begins in a result.

    Attributes:
      inputs: The sites of the operands.
      constants: The operands that are constants.
      is_elementwise: Whether each number is made of one of each operand, so that new
        inf and nan can be counted.
    """

    inputs: Sequence[int]
    constants: Sequence[float]
    is_elementwise: bool


class Rows(abc.ABC):
    """The summaries of arrays: one row for each site.

    Attributes:
      sites: What was summed up, in the order of the rows.
      rows: Each i32[n, len(FIELDS)], of some of the sites.
      origins: By site, what decides whether inf or nan begins there, if it can.
    """

    def __init__(self):
        """Begins without rows."""
        self.sites: list[int] = []
        self.rows: list[Any] = []
        self.origins: dict[int, Origins] = {}

    @abc.abstractmethod
    def call(self, function: Callable[..., Any], *args: Any, key: Any = None) -> Any:
        """Calls a function of pytrees of arrays; those of one key do the same."""

    @abc.abstractmethod
    def add(self, site: int, real: Any, wide: Any) -> None:
        """Sums an array and its twin up.

        Args:
          site: The number of its site.
          real: The array.
          wide: The array in float32; None if that is the same.
        """

    def extend(self, sites: Sequence[int], summaries: Any) -> None:
        """Adds what was summed up elsewhere."""
        self.sites += sites
        self.rows.append(summaries)

    def with_beginnings(self, summaries: Any) -> Any:
        """Says in the summaries of all sites where inf and nan begin."""
        rows = {site: i for i, site in enumerate(self.sites)}
        # After the rows: no operand, a mask of inf, and where nothing begins.
        none, mask, never = range(len(rows), len(rows) + 3)
        index: list[list[int]] = [[never]] * len(rows)
        elementwise = np.zeros(len(rows), bool)
        for site, (inputs, constants, is_elementwise) in self.origins.items():
            elementwise[rows[site]] = is_elementwise
            # An inf may be a mask, but with a constant of nan the nan begins here.
            masks = [mask] * any(map(math.isinf, constants))
            index[rows[site]] = [rows[k] for k in inputs if k in rows] + masks
        width = max(map(len, index), default=0)
        index = [x + [none] * (width - len(x)) for x in index]
        xp = np if isinstance(summaries, np.ndarray) else jnp
        infs, nans = summaries[:, BAD].view(np.float32).T
        bad = xp.stack([infs + nans, nans], 1)
        others = np.array([[0, 0], [1, 0], [1, 1]], np.float32)
        known = xp.concatenate([bad, others])
        had = known[np.array(index, np.int32).reshape(len(rows), width)].sum(1)
        is_first = (bad[:, 0] > 0) & (had[:, 0] == 0)
        is_new = (bad[:, 1] > 0) & (had[:, 1] == 0)
        is_new |= elementwise & (bad[:, 0] > 1.001 * had[:, 0])
        begins = xp.where(is_first, 2, xp.where(is_new, 1, 0)).astype(np.float32)
        # In the rows of a loop or a branch inside, it is known already.
        column = np.eye(len(FIELDS), dtype=np.int32)[[BEGINS]]
        return xp.maximum(summaries, begins.view(np.int32)[:, None] * column)


class TapeRows(Rows):
    """Rows of which each is a step of a tape."""

    def __init__(self, call: Callable[..., Any]):
        """Takes what adds a step."""
        super().__init__()
        self._call = call

    def call(self, function: Callable[..., Any], *args: Any, key: Any = None) -> Any:
        """Adds a step, and returns what stands for its results."""
        return self._call(function, *args, key=key)

    def add(self, site: int, real: Any, wide: Any) -> None:
        """Adds a step that sums an array and its twin up."""
        self.extend([site], self.call(row_of, real, wide, key=row_of))


class GroupedRows(Rows):
    """Rows in one program: arrays of one size are summed up together.

    That compiles faster.
    """

    def __init__(self):
        """Begins without groups."""
        super().__init__()
        self._groups: dict[Any, list[Any]] = {}

    def call(self, function: Callable[..., Any], *args: Any, key: Any = None) -> Any:
        """Calls a function."""
        del key
        return function(*args)

    def add(self, site: int, real: Any, wide: Any) -> None:
        """Adds an array and its twin to those of their size."""
        real, wide, edge = _numbers(real, wide)
        size = real.size
        if not size or 2 * size > GROUPED or not _is_replicated(real):
            row = _reduced(real, wide, edge, tuple(range(real.ndim)))
            self.extend([site], row[None])
            return
        size = ROW if size < ROW and ROW % size == 0 else size
        kind = edge, wide is not real, size
        group = self._groups.setdefault(kind, [])
        group.append((site, real, wide))
        if (len(group) + 1) * size > GROUPED or len(group) == MEMBERS:
            self._reduce_group(kind)

    def finish(self) -> Any:
        """Returns i32[len(sites), len(FIELDS)], where inf and nan begin included."""
        for kind in list(self._groups):
            self._reduce_group(kind)
        return self.with_beginnings(jnp.concatenate([NOTHING[None][:0], *self.rows]))

    def _reduce_group(self, kind):
        edge, has_twin, size = kind
        sites, reals, wides = zip(*self._groups.pop(kind), strict=True)

        def stack(arrays):
            rows = []
            for x in arrays:
                # Not padded: on CPU, fusions with a pad read beyond the array.
                flat = lax.reshape(x, (1, x.size))
                repeated = lax.broadcast_in_dim(flat, (size // x.size, x.size), (0, 1))
                rows.append(lax.reshape(repeated, (1, size)))
            return lax.concatenate(rows, 0)

        real = stack(reals)
        wide = stack(wides) if has_twin else real
        self.extend(sites, _reduced(real, wide, edge, (1,)))


def numbers(summary: Any) -> dict[str, float]:
    """Returns the numbers of a summary on the host, by the names in `FIELDS`."""
    bits = np.array(summary)
    bits[-1] = bits[-1] and INT32_MAX - bits[-1]
    return dict(zip(FIELDS, bits.view(np.float32).tolist(), strict=True))


def row_of(real: Any, wide: Any) -> Any:
    """Returns i32[1, len(FIELDS)] of an array and its twin; see `Rows.add`."""
    real, wide, edge = _numbers(real, wide)
    return _reduced(real, wide, edge, tuple(range(real.ndim)))[None]


def _numbers(real, wide):
    """Returns an array and its twin in float32, and what counts as flushed."""
    if not is_inexact(real):  # What is decided otherwise counts as flushed.
        real = (real == wide).astype(jnp.float32)
        wide = jnp.ones_like(real)
    limits = _bits.limits_of(jnp.finfo(real.dtype).dtype.name)
    edge = int(np.float32(limits.flushed).view(np.int32))
    real = _as_real(real)
    return real, real if wide is None else _as_real(wide), edge


def norms(real: Any, wide: Any) -> Any:
    """Returns the norms of a gradient in float32, of its error, and of what it lost.

    After these three come `WAVES` projections of the gradient in float32, a sketch: see
    `sketch_distance`.
    """
    wide, narrow = _as_real(wide), _as_real(real)

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


def sketch_distance(before: Any, after: Any) -> Any:
    """Estimates how far the gradients of two runs are from each other.

    From projections on `WAVES`; of n of them the relative error is about 1/sqrt(2 n).

    Args:
      before: f64[parameters, 3 + n]: the `norms` of one run.
      after: Those of the other.

    Returns:
      f64[parameters]: the norm of the difference of each parameter's gradients.
    """
    change = np.sum(np.square(after[:, 3:] - before[:, 3:]), 1)
    return np.sqrt(2 * change / len(WAVES))


@functools.partial(jax.jit, static_argnames=("edge", "axes"), inline=True)
def _reduced(real, wide, edge, axes):
    """Sums two arrays up in one pass: on CPU each further pass costs as much."""
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


def _is_replicated(x: Any) -> bool:
    spec = getattr(getattr(jax.typeof(x), "sharding", None), "spec", ())
    return not any(axis is not None for axis in spec or ())


def _as_real(x):
    """Returns an array in float32, with both parts if it is complex."""
    x = jnp.asarray(x)
    x = jnp.stack([lax.real(x), lax.imag(x)]) if jnp.iscomplexobj(x) else x
    end = float(jnp.finfo(jnp.float32).max)  # What is finite in float64 stays finite.
    if x.dtype == jnp.float64:
        x = jnp.where(jnp.isfinite(x), jnp.clip(x, -end, end), x)
    return x.astype(jnp.float32)
