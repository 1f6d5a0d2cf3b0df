"""Magnitudes as integers: exact where floating-point arithmetic is not.

XLA treats float32 subnormals as zero on some platforms, even in comparisons, and its
log2 is not exact. The bits of a float without the sign bit are an integer, and larger
magnitudes are larger integers: comparing them is exact.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# Fewer numbers than this fit into an int32 count.
COUNTABLE = 2**31
# Of float32: the bits of the mantissa, without the implicit leading one, the bias of
# the exponent, and the bits of infinity.
MANTISSA, BIAS = 23, 127
INFINITY = 255 << MANTISSA


class Limits(NamedTuple):
    """The limits of a dtype of at most 16 bits, exact in float64."""

    flushed: float  # The largest magnitude that rounds to zero.
    normal: float  # The smallest normal number.
    largest: float  # The largest finite number.
    overflow: float  # Magnitudes below this boundary round to `largest`.
    tie_overflows: bool  # Whether the boundary itself overflows.


@functools.lru_cache
def limits_of(dtype: str) -> Limits:
    """Returns the limits of a dtype of at most 16 bits.

    Raises:
      ValueError: If it has no zero (float8_e8m0fnu).
    """
    info = jnp.finfo(dtype)
    if float(np.zeros((), jnp.dtype(dtype))) != 0:
        raise ValueError(f"dtype must have a zero, as float16 has, got {dtype!r}.")
    largest = float(info.max)
    half_ulp = 2.0 ** (math.frexp(largest)[1] - 2 - info.nmant)
    with np.errstate(over="ignore"):
        tie = np.float32(largest + half_ulp).astype(jnp.dtype(dtype))
    return Limits(
        flushed=float(info.smallest_subnormal) / 2,
        normal=float(info.tiny),
        largest=largest,
        overflow=largest + half_ulp,
        # A dtype without inf and nan saturates instead (float4_e2m1fn).
        tie_overflows=not float(tie) <= largest,
    )


def magnitudes(x: Any) -> list[jax.Array]:
    """Returns the bits of |x| in float32 as integers, i32.

    A complex array gives two results, one for each part. Narrower dtypes are converted
    without loss; float64 is rounded, or flushed to zero. nan is larger than `INFINITY`.
    """
    x = jnp.asarray(x)
    parts = (lax.real(x), lax.imag(x)) if jnp.iscomplexobj(x) else (x,)
    bits = (lax.bitcast_convert_type(p.astype(jnp.float32), jnp.int32) for p in parts)
    return [b & 2**31 - 1 for b in bits]


def exponents(bits: jax.Array) -> jax.Array:
    """Returns e with 2**e <= |x| < 2**(e+1), i32; for zero, the smallest e minus 1."""
    subnormal = 31 - lax.clz(bits) - (BIAS - 1 + MANTISSA)
    biased = bits >> MANTISSA
    return jnp.where(biased > 0, biased - BIAS, subnormal)


def mantissas(bits: jax.Array) -> jax.Array:
    """Returns |x| / 2**e, in [1, 2), times 2**MANTISSA, as an integer."""
    one = 1 << MANTISSA
    shift = jnp.maximum(lax.clz(bits) - (31 - MANTISSA), 0)
    return jnp.where(bits >= one, (bits & one - 1) | one, bits << shift)


def log2_mantissas(bits: jax.Array) -> jax.Array:
    """Returns log2(|x| / 2**e), f32, in [0, 1]; exactly 0 for powers of two."""
    ratio = mantissas(bits).astype(jnp.float32) * 2.0**-MANTISSA
    return jnp.log2(ratio)


def threshold_bits(limit: float, scale: jax.Array, *, inclusive: bool) -> jax.Array:
    """Returns the bits of the smallest number that reaches the limit when scaled.

    The number is rounded to float32; it is exact if the scale is a power of two.

    Args:
      limit: A positive number.
      scale: f32[], a normal number.
      inclusive: Whether a product equal to the limit reaches it.
    """
    n = MANTISSA
    mantissa, exponent = math.frexp(limit)
    if not inclusive:
        mantissa += 2.0 ** -(n + 1)  # The next larger number.
    # The quotient may be subnormal in float32, or outside its range.
    (scale_bits,) = magnitudes(scale)
    unit = scale_bits & (1 << n) - 1 | BIAS << n  # In [1, 2).
    unit = lax.bitcast_convert_type(unit, jnp.float32)
    quotient = lax.bitcast_convert_type(jnp.float32(2 * mantissa) / unit, jnp.int32)
    biased = (quotient >> n) + (exponent - 1 - exponents(scale_bits))
    fraction = quotient & (1 << n) - 1
    # Shifts round down; the two minus signs make it round up.
    subnormal = -(-(fraction | 1 << n) >> jnp.clip(1 - biased, 0, 31))
    normal = jnp.clip(biased, 1, 255) << n | fraction
    finite = jnp.minimum(normal, INFINITY)
    return jnp.where(biased > 0, finite, subnormal).astype(jnp.int32)


def reduce_counts(
    masks: list[jax.Array], largest: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Counts several masks and finds maxima in each row, in one pass.

    On CPU this is 40 times faster than one reduction for each.

    Args:
      masks: bool[k, ...], all of the same shape.
      largest: The numbers to find the maxima of: i32[k, ...], of the same shape, not
        negative.

    Returns:
      The counts, f32[len(masks), k], exact up to 2**24; and the maxima, 0 if there are
      no numbers.
    """
    # Larger arrays are counted part by part, so that no int32 count overflows.
    start = 1 if largest.size < COUNTABLE else 2
    axes = range(start, largest.ndim)
    ones = [mask.astype(jnp.int32) for mask in masks]

    def combine(left, right):
        *sums, top = zip(left, right, strict=True)
        return *(lax.add(*pair) for pair in sums), lax.max(*top)

    zeros = [lax.full_like(x, 0, shape=()) for x in (*ones, largest)]
    *counts, top = lax.reduce((*ones, largest), tuple(zeros), combine, tuple(axes))
    rest = tuple(range(1, top.ndim))
    sums = jnp.stack([jnp.sum(count.astype(jnp.float32), rest) for count in counts])
    return sums, jnp.max(top, rest, initial=0)
