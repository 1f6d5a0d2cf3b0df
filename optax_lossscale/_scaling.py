"""Numerics: scaling, the check for inf and nan, exact powers of two."""

import functools
import os
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optax_lossscale._devices import on_all_devices, over_devices
from optax_lossscale._tree import inexact_leaves


def at_least_float32(dtype: jax.typing.DTypeLike) -> np.dtype:
    """Returns float32 for narrower dtypes and integers, else `dtype` itself."""
    dtype = jnp.dtype(dtype)
    is_wide = jnp.issubdtype(dtype, jnp.inexact) and jnp.finfo(dtype).bits >= 32
    return dtype if is_wide else jnp.dtype(jnp.float32)


def scale_up(x: Any, scale: jax.Array) -> jax.Array:
    """Returns `x * scale`, in float32 where `x` is narrower."""
    # In a step that is not compiled the loss is a tracer of jax.grad, and operations on
    # it are slow: a cast to its own dtype, and even more an operator of jax.numpy.
    x = x if isinstance(x, jax.Array) else jnp.asarray(x)
    if (wide := at_least_float32(x.dtype)) != x.dtype:
        x = lax.convert_element_type(x, wide)
    scale = lax.convert_element_type(scale, jnp.finfo(wide).dtype)
    scale = lax.broadcast(scale, x.shape)
    if jnp.iscomplexobj(x):
        # (inf + bi) * (s + 0i) would be nan: scale real and imaginary parts apart.
        return lax.complex(lax.real(x) * scale, lax.imag(x) * scale)
    return lax.mul(x, scale)


@functools.partial(jax.jit, inline=True)
def scale_all_down(scale: jax.Array, arrays: list[Any]) -> list[jax.Array]:
    """Returns `x / scale` for each array; see `scale_down`."""
    return [scale_down(x, scale) for x in arrays]


@functools.partial(jax.jit, inline=True)
def scale_down(x: Any, scale: jax.Array) -> jax.Array:
    """Returns `x / scale`, in float32 where `x` is narrower.

    Multiplies by the reciprocal, which is exact where `scale` is a power of two.
    """
    wide = at_least_float32(jnp.asarray(x).dtype)
    return scale_up(x, 1 / scale.astype(jnp.finfo(wide).dtype))


def _nonfinite_sums(leaves: list[jax.Array]) -> list[jax.Array]:
    """Returns for each leaf zero if it is finite, else a positive number or nan."""
    # float8_e8m0fnu has no zero.
    leaves = [x.astype(jnp.float32) if x.dtype.itemsize == 1 else x for x in leaves]
    # The compiler may take x - x for zero then.
    if "xla_cpu_enable_fast_math=true" in os.environ.get("XLA_FLAGS", ""):
        return _count(leaves)
    return lax.platform_dependent(leaves, cpu=_differences, default=_count)


def _count(leaves: list[jax.Array]) -> list[jax.Array]:
    # A sum, not a max: across devices, a max may drop nan.
    return [_sum((~lax.is_finite(x)).astype(jnp.float32)) for x in leaves]


def _differences(leaves: list[jax.Array]) -> list[jax.Array]:
    # Several times faster on CPU, where a count writes an array of booleans first.
    return [_sum(lax.sub(x, x)) for x in leaves]


def _sum(x: jax.Array) -> jax.Array:
    return lax.reduce_sum(x, range(x.ndim)).astype(jnp.float32)


def _parts(leaves: list[jax.Array]) -> list[jax.Array]:
    """Returns the leaves, with real and imaginary parts in place of complex ones."""
    pairs = ((x.real, x.imag) if jnp.iscomplexobj(x) else (x,) for x in leaves)
    return [part for pair in pairs for part in pair]


def _stack(scalars: list[jax.Array]) -> jax.Array:
    # XLA turns the reduction of a stack into a chain of operations. On TPU and GPU this
    # lets it reduce one scalar over devices. On CPU every kernel that uses the result
    # would repeat the chain: compile time would grow with the square of its length.
    return lax.platform_dependent(
        jnp.stack(scalars), cpu=lax.optimization_barrier, default=lambda x: x
    )


@functools.partial(jax.jit, static_argnames="axis_name")
def _all_finite(leaves: list[jax.Array], axis_name: Hashable | None) -> jax.Array:
    finite = jnp.ones((), bool)
    if leaves:
        finite = jnp.sum(_stack(_nonfinite_sums(_parts(leaves)))) == 0
    return on_all_devices(finite, axis_name)


def all_finite(tree: Any, *, axis_name: Hashable | None = None) -> jax.Array:
    """Tells whether all floating-point values in a tree are finite.

    Args:
      tree: Any pytree. Leaves that are not floating-point or complex (None,
        integers, float0, PRNG keys, functions) are ignored.
      axis_name: A name, or tuple of names, of mapped axes (`jax.pmap`,
        `jax.vmap`, `jax.shard_map`) to reduce the result over: True if the trees
        of all devices are finite.

    Returns:
      bool[], False if any value is inf or nan. A tree without values is finite.

    Raises:
      NameError: At trace time, if `axis_name` is not bound.

    Examples:
      >>> import jax.numpy as jnp
      >>> from optax_lossscale import all_finite
      >>> bool(all_finite({"w": jnp.ones(3), "b": None}))
      True
      >>> bool(all_finite({"w": jnp.array([1.0, jnp.nan]), "b": None}))
      False
    """
    return _all_finite(inexact_leaves(tree), axis_name)


@jax.jit
def _largest_of(x: jax.Array) -> jax.Array:
    # float8 has no max, and a float64 beyond the range of float32 counts as inf.
    return jnp.max(lax.abs(x.astype(jnp.float32)), initial=0.0)


@functools.partial(jax.jit, static_argnames="axis_name")
def _largest(leaves: list[jax.Array], axis_name: Hashable | None) -> jax.Array:
    largest = jnp.zeros((), jnp.float32)
    if leaves:
        each = _stack([_largest_of(x) for x in _parts(leaves)])
        largest = jnp.max(jnp.fmin(jnp.fmax(each, 0.0), jnp.finfo(jnp.float32).max))
    if axis_name is None:
        return largest
    return over_devices(lax.pmax, largest, axis_name)


def largest_magnitude(tree: Any, *, axis_name: Hashable | None = None) -> jax.Array:
    """Returns the largest magnitude in a tree of finite values.

    It does not tell whether the tree is finite: whether a maximum keeps nan depends
    on the platform. Also call `all_finite`, and ignore this result if that is False.

    Args:
      tree: Any pytree. Leaves that `all_finite` ignores are ignored.
      axis_name: As in `all_finite`.

    Returns:
      f32[], never inf or nan; 0 for a tree without values. A complex value counts as
      the larger of its parts.
    """
    return _largest(inexact_leaves(tree), axis_name)


def exact_exp2(exponent: jax.Array) -> jax.Array:
    """Returns 2**exponent for a whole exponent, clipped to +-126; exp2 may round."""
    exponent = jnp.fmin(jnp.fmax(exponent, -126.0), 126.0)
    biased = (exponent.astype(jnp.int32) + 127) << 23
    return jax.lax.bitcast_convert_type(biased, jnp.float32)
