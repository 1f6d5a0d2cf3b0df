"""Exact counts of the gradients that underflow, and of gradients by exponent."""

import collections
import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale import _check as check
from optax_lossscale._jaxprs.parts import explicit_axes
from optax_lossscale._tree import inexact_leaves
from optax_lossscale._warn import warn
from optax_lossscale.diagnostics import _bits
from optax_lossscale.diagnostics._common import named_leaves, on_auto_axes, scale_of

# How many leaves a table has.
LEAVES_SHOWN = 12
# Leaves of so many numbers are counted together: that compiles faster.
JOINED, GROUPED = 2**16, 2**20
# The exponents of float32, subnormal numbers included.
FIRST, LAST = -149, 127


class Underflow(NamedTuple):
    """The numbers of one leaf, or of all leaves. `UnderflowStats` describes them."""

    size: jax.Array
    zero: jax.Array
    subnormal: jax.Array
    flushed: jax.Array
    flushed_unscaled: jax.Array
    nonfinite: jax.Array
    headroom: jax.Array


@jax.tree_util.register_pytree_node_class
class _Leaves(Mapping[str, Underflow]):
    """The rows of a table: hundreds of scalars would take minutes to compile."""

    def __init__(self, names: tuple[str, ...], table: jax.Array):
        """Takes key paths, and f32[..., n, 7]."""
        self._table = table
        self._rows = dict(zip(names, range(len(names)), strict=True))

    def __getitem__(self, name: str) -> Underflow:
        row = self._table[..., self._rows[name], :]
        return Underflow._make(row[..., i] for i in range(len(Underflow._fields)))

    def __iter__(self):
        return iter(self._rows)

    def __len__(self):
        return len(self._rows)

    def tree_flatten(self) -> tuple[Any, ...]:
        """Returns the table; and the names, which are static."""
        return (self._table,), tuple(self._rows)

    @classmethod
    def tree_unflatten(cls, names: tuple[str, ...], children: Any) -> "_Leaves":
        """Puts them together again."""
        return cls(names, *children)


class UnderflowStats(NamedTuple):
    """The result of `underflow_stats`. Print it.

    The table has a row for each leaf, at most 12, the worst first: by the shares that
    are not finite, flushed and subnormal.

    It holds named tuples of f32[] with these fields. A share is relative to all
    numbers, including zeros; it is 0 if there are none.

    - `size`: How many numbers there are. A complex number counts as two.
    - `zero`: The share that is exactly zero.
    - `subnormal`: The share that loses precision after scaling: it does not round to
      zero, but is below the smallest normal number of the dtype.
    - `flushed`: The share that is not zero, but rounds to zero after scaling.
    - `flushed_unscaled`: The share that is not zero, but would round to zero without
      scaling.
    - `nonfinite`: The share that is inf or nan, before or after scaling (or that
      saturates, if the dtype has neither).
    - `headroom`: How many bits the scale could rise: log2(largest number of the dtype /
      (largest finite magnitude * scale)). Negative if a finite number overflows; inf if
      all finite numbers are zero.

    Attributes:
      overall: The named tuple of all gradients.
      leaves: A mapping from the key path of each floating-point or complex leaf to its
        named tuple: `leaves["grads['w']"]`. As a pytree it is one array.

    Examples:
      >>> import jax.numpy as jnp
      >>> from optax_lossscale.diagnostics import underflow_stats
      >>> stats = underflow_stats({"w": jnp.array([0.0, 1e-9]), "b": 1.0}, 1)
      >>> print(stats.overall.flushed, stats.leaves["grads['w']"].flushed)
      0.33333334 0.5
      >>> stats
                 size  zero subnormal flushed flushed_unscaled nonfinite headroom
      all           3 33.3%      0.0%   33.3%            33.3%      0.0%     16.0
      grads['w']    2 50.0%      0.0%   50.0%            50.0%      0.0%     45.9
      grads['b']    1  0.0%      0.0%    0.0%             0.0%      0.0%     16.0
      >>> for name, value in stats.overall._asdict().items():
      ...     print(name, f"{value:.3g}")
      size 3
      zero 0.333
      subnormal 0
      flushed 0.333
      flushed_unscaled 0.333
      nonfinite 0
      headroom 16
    """

    overall: Underflow
    leaves: Mapping[str, Underflow]

    def __repr__(self):
        try:
            return _table(self)
        except (TypeError, ValueError):  # Tracers, or arrays of many members.
            return f"UnderflowStats({self.overall}, and {len(self.leaves)} leaves)"


def _table(stats: UnderflowStats) -> str:
    def badness(item: tuple[str, Any]) -> Any:
        return item[1].nonfinite, item[1].flushed, item[1].subnormal

    overall, leaves = jax.device_get((stats.overall, stats.leaves))
    worst = sorted(leaves.items(), key=badness, reverse=True)[:LEAVES_SHOWN]
    rows = [["", *Underflow._fields]]
    for name, (size, *shares, headroom) in [("all", overall), *worst]:
        percents = (f"{share:.1%}" for share in shares)
        rows.append([name, f"{size:,.0f}", *percents, f"{headroom:.1f}"])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        " ".join([name.ljust(widths[0]), *map(str.rjust, cells, widths[1:])])
        for name, *cells in rows
    ]
    more = len(leaves) - LEAVES_SHOWN
    return "\n".join([*lines, f"and {more} more"] if more > 0 else lines)


def underflow_stats(grads: Any, state: Any, dtype: Any = "float16") -> UnderflowStats:
    """Computes the share of the gradients that a dtype loses, with and without scaling.

    Each number is judged as if it were converted to `dtype`, rounding to nearest even.
    Numbers are compared by their bits, so float32 subnormals count correctly, also on
    hardware that treats them as zero. With a scale that is a power of two everything is
    exact; otherwise the thresholds are rounded to float32. Subnormal bfloat16 numbers
    are subnormal in float32 as well: they count as subnormal, although such hardware
    would have flushed them during the computation.

    You may call it inside `jax.jit`, `jax.lax.scan` and `jax.vmap`, and on sharded
    arrays. It reads each gradient once. It warns, once a program is traced, if
    gradients are in `dtype` already: they have been rounded, and flushed ones are gone.

    Args:
      grads: Unscaled gradients, any pytree, as `value_and_grad` returns them, best
        computed in float32: a number that was flushed to zero while it was computed
        counts as zero. None and integer leaves are ignored, and float64 is converted to
        float32.
      state: A pytree that holds one `LossScaleOptimizerState`, or the scale itself, a
        number from 2**-126 to 2**126.
      dtype: The dtype that gradients are computed in: "float16", "bfloat16", or a
        float8.

    Returns:
      `UnderflowStats`, whose numbers are all f32[]. Counts are exact up to 2**24, and
      rounded to float32 beyond.

    Raises:
      ValueError: If `state` holds no such state or several, belongs to many members,
        or is a Python number outside that range; if `dtype` is another one.
      TypeError: If `dtype` is not a dtype.

    Examples:
      >>> import jax.numpy as jnp
      >>> import optax
      >>> from optax_lossscale import LossScaleOptimizer
      >>> from optax_lossscale.diagnostics import underflow_stats
      >>> optimizer = LossScaleOptimizer(optax.sgd(0.1))  # 2**15
      >>> grads = {"w": jnp.array([1e-3, 1e-9, 1e-14, 0.0])}
      >>> stats = underflow_stats(grads, optimizer.init(grads)).overall
      >>> print(stats.flushed_unscaled, stats.flushed, stats.subnormal)
      0.5 0.25 0.25
    """
    dtype = check.dtype("dtype", dtype)
    _bits.limits_of(dtype)
    leaves = named_leaves(grads, "grads")
    if any(x.dtype.name == dtype for x in leaves.values()):
        warn(
            f"The gradients are {dtype} already. What {dtype} flushes to zero is gone "
            "from them, and counts as zero here. Pass gradients of a float32 program."
        )
    overall, table = _stats(list(leaves.values()), scale_of(state), dtype)
    return UnderflowStats(overall, _Leaves(tuple(leaves), table))


@functools.partial(jax.jit, static_argnames="dtype")
def _stats(
    leaves: list[jax.Array], scale: jax.Array, dtype: str
) -> tuple[Underflow, jax.Array]:
    """Returns an `Underflow` of all leaves, and a row for each leaf, f32[n, 7]."""
    order, tables = [], [jnp.zeros((0, len(Underflow._fields)), jnp.float32)]
    thresholds = _thresholds(scale, dtype)
    for numbers in _together(leaves, lambda x: (x.dtype, x.size)):
        some = [leaves[i] for i in numbers]
        x = some[0][None] if len(some) == 1 else jnp.stack(list(map(jnp.ravel, some)))
        counts, largest = _count(x, thresholds)
        room = _headroom(largest, scale, dtype)
        size = some[0].size * (1 + jnp.iscomplexobj(x))
        sizes = jnp.full_like(room, size)
        tables.append(jnp.stack([sizes, *counts, room], 1))
        order += numbers
    table = jnp.concatenate(tables)[np.argsort(order)]
    room = jnp.min(table[:, -1:], 0, keepdims=True, initial=jnp.inf)
    total = jnp.concatenate([jnp.sum(table[:, :-1], 0, keepdims=True), room], 1)
    table = jnp.concatenate([total, table])
    shares = table[:, 1:-1] / jnp.maximum(table[:, :1], 1.0)
    table = jnp.concatenate([table[:, :1], shares, table[:, -1:]], 1)
    return Underflow._make(table[0]), table[1:]


def _thresholds(scale: jax.Array, dtype: str) -> list[jax.Array]:
    """Returns the bits of the smallest numbers of each kind.

    They are not flushed when scaled, not flushed without scaling, normal when scaled,
    and infinite when scaled.
    """
    limits, one = _bits.limits_of(dtype), jnp.ones((), jnp.float32)
    wanted = (
        (limits.flushed, scale, False),
        (limits.flushed, one, False),
        (limits.normal, scale, True),
        (limits.overflow, scale, limits.tie_overflows),
    )
    return [_bits.threshold_bits(x, s, inclusive=i) for x, s, i in wanted]


def _count(x: jax.Array, thresholds: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Returns the counts of each kind, f32[5, k], and the largest finite magnitudes."""
    flushed, unscaled, normal, overflow = thresholds

    def count(bits):
        masks = [
            bits == 0,
            (bits >= flushed) & (bits < normal),
            (bits > 0) & (bits < flushed),
            (bits > 0) & (bits < unscaled),
            bits >= overflow,
        ]
        finite = jnp.where(bits < _bits.INFINITY, bits, 0)
        return _bits.reduce_counts(masks, finite)

    counts, largest = zip(*map(count, _bits.magnitudes(x)), strict=True)
    return functools.reduce(jnp.add, counts), functools.reduce(jnp.maximum, largest)


def _together(leaves, kind):
    """Groups the numbers of small leaves by kind; each other leaf is a group.

    Many small programs take long to compile. Large leaves may be spread over devices.
    """
    groups: dict[Any, list[int]] = {}
    counts = collections.Counter()
    for i, x in enumerate(leaves):
        is_small = x.size <= JOINED and not explicit_axes(x)
        counts[kind(x)] += x.size  # A group is a copy, so it stays small.
        group = (kind(x), counts[kind(x)] // GROUPED) if is_small else i
        groups.setdefault(group, []).append(i)
    return list(groups.values())


def _headroom(largest: jax.Array, scale: jax.Array, dtype: str) -> jax.Array:
    """Returns how many bits the scale could rise, of the bits of largest numbers."""
    mantissa, exponent = math.frexp(_bits.limits_of(dtype).largest)
    (scale_bits,) = _bits.magnitudes(scale)
    whole = exponent - 1 - _bits.exponents(largest) - _bits.exponents(scale_bits)
    fraction = _bits.log2_mantissas(largest) + _bits.log2_mantissas(scale_bits)
    room = whole.astype(jnp.float32) + (math.log2(2 * mantissa) - fraction)
    return jnp.where(largest > 0, room, jnp.inf).astype(jnp.float32)


class ExponentHistogram(NamedTuple):
    """How many numbers have each exponent.

    Attributes:
      exponents: i32[277], all exponents of float32, ascending: -149 to 127.
      counts: f32[277], how many numbers have 2**e <= |x| < 2**(e+1).
      zeros: f32[], how many are zero.
      infs: f32[], how many are infinite.
      nans: f32[], how many are nan.

    Examples:
      >>> import jax.numpy as jnp
      >>> from optax_lossscale.diagnostics import exponent_histogram
      >>> exponent_histogram(jnp.ones(3, jnp.float16)).counts.shape
      (277,)
    """

    exponents: jax.Array
    counts: jax.Array
    zeros: jax.Array
    infs: jax.Array
    nans: jax.Array


def exponent_histogram(grads: Any) -> ExponentHistogram:
    """Counts numbers by their exponents, exactly, including subnormals.

    You may call it inside `jax.jit`, `jax.lax.scan` and `jax.vmap`, and on sharded
    arrays. To combine the histograms of several steps, add up every field but
    `exponents`.

    Args:
      grads: Gradients, any pytree; unscaled ones for `plot_exponents`. None and integer
        leaves are ignored, a complex number counts as two, and float64 is converted to
        float32.

    Returns:
      `ExponentHistogram`; its size does not depend on the gradients' values or shapes.
      Counts are exact up to 2**24, and rounded to float32 beyond. In one leaf, fewer
      than 2**31 numbers can have the same exponent.

    Examples:
      >>> import jax.numpy as jnp
      >>> from optax_lossscale.diagnostics import exponent_histogram
      >>> histogram = exponent_histogram({"w": jnp.array([0.0, 1.0, -1.5, 2.0])})
      >>> seen = histogram.counts > 0
      >>> print(histogram.exponents[seen], histogram.counts[seen], histogram.zeros)
      [0 1] [2. 1.] 1.0
    """
    return _histogram(inexact_leaves(grads))


@jax.jit
def _histogram(leaves: list[jax.Array]) -> ExponentHistogram:
    # One array: zeros come before the smallest exponent, inf and nan after the largest.
    bins = jnp.zeros(LAST - FIRST + 4, jnp.float32)

    def count(place):
        # Faster on CPU than comparing or sorting, and needs constant memory.
        zeros = jnp.zeros(bins.size, jnp.int32)
        return zeros.at[place].add(1, mode="promise_in_bounds")

    for bits in (b for x in _joined(leaves) for b in _bits.magnitudes(x)):
        # inf and nan share an exponent.
        place = jnp.where(bits > 0, _bits.exponents(bits) - FIRST + 1, 0)
        place = jnp.where(bits == _bits.INFINITY, bins.size - 2, place)
        place = jnp.where(bits > _bits.INFINITY, bins.size - 1, place)
        bins = bins + on_auto_axes(count, place).astype(jnp.float32)
    exponents = FIRST + jnp.arange(bins.size - 3, dtype=jnp.int32)
    return ExponentHistogram(exponents, bins[1:-2], bins[0], bins[-2], bins[-1])


def _joined(leaves):
    """Returns leaves; small ones of one dtype are joined to one array."""
    groups = ([leaves[i] for i in x] for x in _together(leaves, lambda x: x.dtype))
    return [
        x[0] if len(x) == 1 else jnp.concatenate(list(map(jnp.ravel, x)))
        for x in groups
    ]
