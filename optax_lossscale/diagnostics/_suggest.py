"""A loss scale for gradients, from the largest of them."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from optax_lossscale import _check as check
from optax_lossscale._scaling import exact_exp2
from optax_lossscale._tree import inexact_leaves
from optax_lossscale.diagnostics import _bits


def suggest_loss_scale(
    grads: Any, dtype: Any = "float16", margin: float = 2.0
) -> jax.Array:
    """Suggests a loss scale from the largest gradient.

    It is the largest power of two from 2**-126 to 2**126 for which `largest * scale` is
    at most `largest number of dtype / 2**margin`, computed exactly. The margin leaves
    room for larger gradients that are not in `grads`: in the next batch, and among the
    gradients of activations.

    You may call it inside `jax.jit`, `jax.lax.scan` and `jax.vmap`, and on sharded
    arrays. On the host, with the loss function at hand, use
    `trace_numerics(...).largest_scale`: it is exact, counts the gradients of
    activations as well, and the trace names the line that overflows or underflows.

    Args:
      grads: Unscaled gradients, any pytree, as `value_and_grad` returns them. None
        and integer leaves are ignored, and float64 is converted to float32.
      dtype: The dtype that gradients are computed in: "float16", "bfloat16", or a
        float8.
      margin: How many bits to leave free above the largest gradient.

    Returns:
      The scale, f32[]; 1.0 if all gradients are zero, or one is inf or nan. It may be
      below 1, which `FixedLossScale` rejects; `DynamicLossScale` accepts it as
      `initial_scale` if `min_scale` is no larger.

    Raises:
      ValueError: If `margin` is not from 0 to 128, or `dtype` is another one.
      TypeError: If `margin` is not a Python number, or `dtype` is not a dtype.

    Examples:
      >>> import jax.numpy as jnp
      >>> from optax_lossscale import DynamicLossScale
      >>> from optax_lossscale.diagnostics import suggest_loss_scale
      >>> grads = {"w": jnp.array([1e-3, -1e-9])}
      >>> scale = suggest_loss_scale(grads)
      >>> float(scale)  # 2**23: twice that would scale 0.001 to 16777, above 65504 / 4
      8388608.0
      >>> DynamicLossScale(initial_scale=float(scale)).initial_scale
      8388608.0
    """
    dtype, margin = check.dtype("dtype", dtype), check.bits("margin", margin)
    return _suggest(inexact_leaves(grads), dtype, margin)


@functools.partial(jax.jit, static_argnames=("dtype", "margin"))
def _suggest(leaves: list[jax.Array], dtype: str, margin: float) -> jax.Array:
    mantissa, exponent = math.frexp(_bits.limits_of(dtype).largest * 2.0**-margin)
    limit = int(math.ldexp(mantissa, _bits.MANTISSA + 1))
    maxima = [jnp.max(bits) for x in leaves if x.size for bits in _bits.magnitudes(x)]
    # Stacked: XLA would recompute a chain of scalars wherever its result is used.
    largest = jnp.max(jnp.stack([jnp.zeros((), jnp.int32), *maxima]))
    above = (_bits.mantissas(largest) > limit).astype(jnp.int32)
    fits = exponent - 1 - _bits.exponents(largest) - above
    scale = exact_exp2(fits.astype(jnp.float32))
    return jnp.where((largest > 0) & (largest < _bits.INFINITY), scale, jnp.float32(1))
