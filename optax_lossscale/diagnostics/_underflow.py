"""How many gradients underflow, and where they lie: exactly, by their bits."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale._check import check_dtype
from optax_lossscale._tree import inexact_leaves, is_inexact
from optax_lossscale.diagnostics._bits import (
    border,
    exponents,
    infinity,
    is_wide,
    limits_of,
    log2_mantissas,
    magnitudes,
    reduce_counts,
)
from optax_lossscale.diagnostics._common import named_leaves, scale_of


class Underflow(NamedTuple):
    """What a dtype does to numbers that are multiplied by the loss scale.

    Of one leaf, or of several together. Shares are those of all numbers, zeros among
    them, and 0 where there are none.

    Attributes:
      size: f32[], how many numbers there are. A complex number counts as two.
      zero: f32[], the share that is exactly zero.
      subnormal: f32[], the share that times the scale is below the smallest normal
        number of the dtype, where precision is lost, but does not round to zero.
      flushed: f32[], the share that is not zero, but times the scale rounds to it.
      flushed_unscaled: f32[], the share that is not zero, but would round to it
        without scaling.
      nonfinite: f32[], the share that is inf or nan, or times the scale rounds to it
        (saturates, where a dtype has neither).
      headroom: f32[], how many bits the scale could rise: log2(largest number of the
        dtype / (largest finite magnitude * scale)). Negative where a finite number
        overflows; inf where all finite numbers are zero.

    Examples:
      >>> from optax_lossscale.diagnostics import underflow_stats
      >>> stats = underflow_stats([1.0, 0.0, 1e-9, 1e9], 1024)
      >>> for name, value in stats.overall._asdict().items():
      ...     print(name, f"{value:.5g}")
      size 4
      zero 0.25
      subnormal 0.25
      flushed 0
      flushed_unscaled 0.25
      nonfinite 0.25
      headroom -23.898
    """

    size: jax.Array
    zero: jax.Array
    subnormal: jax.Array
    flushed: jax.Array
    flushed_unscaled: jax.Array
    nonfinite: jax.Array
    headroom: jax.Array


class UnderflowStats(NamedTuple):
    """What `underflow_stats` returns.

    Attributes:
      overall: All gradients together, an `Underflow`.
      leaves: Each leaf that holds numbers, an `Underflow`, by its key path:
        `"grads['w']"`.

    Examples:
      >>> from optax_lossscale.diagnostics import underflow_stats
      >>> stats = underflow_stats({"w": 1e-9, "b": 1.0}, 1)
      >>> print({name: float(leaf.flushed) for name, leaf in stats.leaves.items()})
      {"grads['b']": 0.0, "grads['w']": 1.0}
      >>> print(stats.overall.flushed)
      0.5
    """

    overall: Underflow
    leaves: dict[str, Underflow]


def underflow_stats(grads: Any, state: Any, dtype: Any = "float16") -> UnderflowStats:
    """Tells what share of the gradients a dtype loses, with the scale and without.

    The borders are those of a conversion to `dtype`, rounding to nearest even. Numbers
    are compared by their bits: float32 subnormals count as what they are, on hardware
    too that computes with them as zero. With a scale that is a power of two all is
    exact; else borders are rounded to float32. Where `dtype` is bfloat16, its
    subnormals are float32's, and count as subnormal, though such hardware would have
    flushed them in the computation.

    It may be called inside `jax.jit`, `jax.lax.scan` and `jax.vmap`, on sharded arrays
    too, and reads each gradient once.

    Args:
      grads: Unscaled gradients, any pytree, as `value_and_grad` returns them. What
        was flushed while they were computed is zero in them, and counts as such. None
        and integer leaves are ignored.
      state: A pytree that holds one `LossScaleOptimizerState`, or the scale itself, a
        positive number from 2**-126 to 2**126.
      dtype: What gradients are computed in: "float16", "bfloat16", or a float8.

    Returns:
      `UnderflowStats` of f32[] alone. Counts are exact up to 2**24, and float32
      beyond.

    Raises:
      ValueError: If `state` holds no or several states, is that of many members, or is
        a Python number that is no scale; if `dtype` is none of those.
      TypeError: If `dtype` is no dtype.

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
    dtype = check_dtype("dtype", dtype)
    limits_of(dtype)
    leaves = {
        name: jnp.asarray(leaf)
        for name, leaf in named_leaves(grads, "grads").items()
        if is_inexact(leaf)
    }
    scale = scale_of(state)
    widths = set(map(is_wide, leaves.values()))
    borders = {wide: _borders(scale, wide, dtype) for wide in widths}
    size, overall, each = 0, _together([]), {}
    # Leaf by leaf: what was compiled serves all leaves of a shape, and what does not
    # depend on the shape, all leaves.
    for name, x in leaves.items():
        numbers = x.size * (2 if jnp.iscomplexobj(x) else 1)
        counted = _count(x, borders[is_wide(x)])
        overall, each[name] = _add(overall, counted, np.float32(numbers), scale, dtype)
        size += numbers
    return UnderflowStats(_shares(overall, np.float32(size)), each)


class _Borders(NamedTuple):
    flushed: jax.Array
    unscaled: jax.Array
    normal: jax.Array
    overflow: jax.Array


class _Measured(NamedTuple):
    counts: jax.Array
    headroom: jax.Array


@functools.partial(jax.jit, static_argnames=("wide", "dtype"))
def _borders(scale: jax.Array, wide: bool, dtype: str) -> _Borders:
    limits = limits_of(dtype)
    like = jnp.zeros((), jnp.int64 if wide else jnp.int32)
    one = jnp.ones((), jnp.float32)
    return _Borders(
        flushed=border(limits.flushed, scale, like, inclusive=False),
        unscaled=border(limits.flushed, one, like, inclusive=False),
        normal=border(limits.normal, scale, like, inclusive=True),
        overflow=border(limits.overflow, scale, like, inclusive=limits.tie_overflows),
    )


@jax.jit
def _count(x: jax.Array, borders: _Borders) -> list[tuple[jax.Array, jax.Array]]:
    """Returns of each part the counts of each kind, and the largest finite number."""

    def count(bits):
        nonzero = bits > 0
        masks = [
            bits == 0,
            (bits >= borders.flushed) & (bits < borders.normal),
            nonzero & (bits < borders.flushed),
            nonzero & (bits < borders.unscaled),
            bits >= borders.overflow,
        ]
        return reduce_counts(masks, jnp.where(bits < infinity(bits), bits, 0))

    return [count(bits) for bits in magnitudes(x)]


@functools.partial(jax.jit, static_argnames="dtype")
def _add(
    overall: _Measured,
    parts: list[tuple[jax.Array, jax.Array]],
    size: jax.typing.ArrayLike,
    scale: jax.Array,
    dtype: str,
) -> tuple[_Measured, Underflow]:
    """Adds a leaf of one or two parts to those before; returns what is lost of it."""
    mantissa, exponent = math.frexp(limits_of(dtype).largest)
    (scale_bits,) = magnitudes(scale)

    def headroom(largest):
        whole = exponent - 1 - exponents(largest) - exponents(scale_bits)
        fraction = log2_mantissas(largest) + log2_mantissas(scale_bits)
        room = whole.astype(jnp.float32) + (math.log2(2 * mantissa) - fraction)
        return jnp.where(largest > 0, room, jnp.inf).astype(jnp.float32)

    measured = [_Measured(counts, headroom(top)) for counts, top in parts]
    return _together([overall, *measured]), _shares(_together(measured), size)


@jax.jit
def _together(measured: list[_Measured]) -> _Measured:
    """Sums the counts; takes the least headroom."""
    # Stacked: XLA would repeat a chain of scalars wherever its result is used.
    none = _Measured(jnp.zeros(5, jnp.float32), jnp.full((), jnp.inf, jnp.float32))
    counts, headrooms = map(jnp.stack, zip(none, *measured, strict=True))
    return _Measured(jnp.sum(counts, axis=0), jnp.min(headrooms))


@jax.jit
def _shares(measured: _Measured, size: jax.typing.ArrayLike) -> Underflow:
    shares = measured.counts / jnp.maximum(size, 1.0)
    zero, subnormal, flushed, flushed_unscaled, nonfinite = shares
    return Underflow(
        size=jnp.asarray(size),
        zero=zero,
        subnormal=subnormal,
        flushed=flushed,
        flushed_unscaled=flushed_unscaled,
        nonfinite=nonfinite,
        headroom=measured.headroom,
    )


class ExponentHistogram(NamedTuple):
    """How many numbers there are of each exponent.

    Attributes:
      exponents: i32[n], all there are, from small to large: -149 to 127; where
        there is a float64 leaf, -1074 to 1023.
      counts: f32[n], how many numbers have 2**e <= |x| < 2**(e+1).
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
    """Counts numbers by their exponents, exactly, subnormals too.

    It may be called inside `jax.jit`, `jax.lax.scan` and `jax.vmap`, on sharded arrays
    too (where mesh axes are explicit, inside `jax.sharding.auto_axes`). Histograms of
    several steps are summed by `jax.tree.map`, but for `exponents`.

    Args:
      grads: Gradients, any pytree; unscaled ones, if `plot_exponents` is to show
        them. None and integer leaves are ignored, and a complex number counts as two.

    Returns:
      `ExponentHistogram`, of the same size whatever the gradients are. Counts are
      exact up to 2**24, and float32 beyond; of one leaf, to below 2**31 of a kind.

    Examples:
      >>> import jax.numpy as jnp
      >>> from optax_lossscale.diagnostics import exponent_histogram
      >>> histogram = exponent_histogram({"w": jnp.array([0.0, 1.0, -1.5, 2.0])})
      >>> seen = histogram.counts > 0
      >>> print(histogram.exponents[seen], histogram.counts[seen], histogram.zeros)
      [0 1] [2. 1.] 1.0
    """
    leaves = inexact_leaves(grads)
    first, last = (-1074, 1023) if any(map(is_wide, leaves)) else (-149, 127)
    # All in one: zeros come before the least exponent, inf and nan after the largest.
    bins = jnp.zeros(last - first + 4, jnp.float32)
    # Leaf by leaf, so that what was compiled serves all the leaves of a shape.
    for x in leaves:
        bins = _count_exponents(bins, x, first)
    return _histogram(bins, first)


@functools.partial(jax.jit, static_argnames="first")
def _count_exponents(bins: jax.Array, x: jax.Array, first: int) -> jax.Array:
    for bits in magnitudes(x):
        # inf and nan have one exponent, which in float32 is one of float64's.
        place = jnp.where(bits > 0, exponents(bits) - first + 1, 0)
        place = jnp.where(bits == infinity(bits), bins.size - 2, place)
        place = jnp.where(bits > infinity(bits), bins.size - 1, place)
        # Faster on CPU than comparing or sorting, and of constant memory.
        counts = (
            jnp.zeros(bins.size, jnp.int32).at[place].add(1, mode="promise_in_bounds")
        )
        bins = bins + counts.astype(jnp.float32)
    return bins


@functools.partial(jax.jit, static_argnames="first")
def _histogram(bins: jax.Array, first: int) -> ExponentHistogram:
    return ExponentHistogram(
        exponents=first + jnp.arange(bins.size - 3, dtype=jnp.int32),
        counts=bins[1:-2],
        zeros=bins[0],
        infs=bins[-2],
        nans=bins[-1],
    )
