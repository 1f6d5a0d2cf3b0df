"""Decisions of a program, and those of its shadow."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale._jaxprs.primitives import Trait, names_of
from optax_lossscale.diagnostics import _bits
from optax_lossscale.diagnostics._trace.equations import is_inexact, widen
from optax_lossscale.diagnostics._trace.values import Value

ORDERINGS = names_of(Trait.ORDER)
COMPARISONS = ("eq", "ne", *ORDERINGS)
# They return the places of numbers along an axis, as their last results.
PLACES = ("argmax", "argmin", "top_k")
DECISIONS = (*COMPARISONS, *PLACES, "sort", "is_finite")
# Operands are near each other if they differ by at most so many units of roundoff.
NEAR = 32
# Those that are compared to be the largest may be smaller than their rivals.
RIVALS = 4


def is_decision(name: str, inputs: Sequence[Value]) -> bool:
    """Whether an operation decides by floating-point numbers that may differ."""
    differ = (is_inexact(x.real) and x.wide is not None for x in inputs)
    return name in DECISIONS and any(differ)


def follows(
    equation: Any, inputs: Sequence[Value], decided: Any, otherwise: Any, dtype: str
) -> Any:
    """Whether the shadow takes the decisions of the program.

    It does where roundoff decides, so that a sign that flips near zero is no error. It
    does not where an operand is inf, nan or flushed in the program alone.

    Args:
      equation: The equation.
      inputs: Its operands.
      decided: The results of the program.
      otherwise: Those of the shadow alone.
      dtype: The dtype in question.

    Returns:
      bool, of the shape of the results or of one number.
    """
    name, params = equation.primitive.name, equation.params
    if name == "is_finite":
        return np.bool_(False)
    pairs = [(widen(x.real), widen(x.shadow)) for x in inputs if is_inexact(x.real)]
    if name in COMPARISONS:
        return _near(*pairs, dtype=dtype, orders=name in ORDERINGS)
    follow = _sound(*pairs, dtype=dtype)
    if name == "sort" and is_inexact(inputs[0].real):
        follow &= _near_ranks(*pairs[0], axis=params["dimension"], dtype=dtype)
    if name in PLACES:
        # Older versions of top_k know the last axis alone.
        (axis,) = params.get("axes", (params.get("axis", -1),))
        places = [jnp.asarray(x[-1]) for x in (decided, otherwise)]
        follow &= _near_places(pairs[0][1], *places, axis=axis, dtype=dtype)
    return follow


@functools.partial(jax.jit, static_argnames=("axis", "dtype"), inline=True)
def _near_places(x, *places, axis, dtype):
    """Whether the numbers at two places are as good as the same, each along an axis."""
    if places[0].ndim < x.ndim:
        numbers = jax.lax.broadcasted_iota(places[0].dtype, x.shape, axis % x.ndim)
        is_there = (numbers == jnp.expand_dims(i, axis) for i in places)
        first, second = (jnp.sum(jnp.where(y, x, 0), axis) for y in is_there)
    else:
        first, second = (jnp.take_along_axis(x, i, axis) for i in places)
    sizes = jnp.maximum(jnp.abs(first), jnp.abs(second))
    near = RIVALS * NEAR * float(jnp.finfo(dtype).eps) * sizes
    is_near = jnp.abs(first - second) <= near
    return (first == second) | is_near & ~_are_whole(first, second)


@functools.partial(jax.jit, static_argnames=("axis", "dtype"), inline=True)
def _near_ranks(real, shadow, *, axis, dtype):
    """Whether numbers are sorted, but for roundoff, where those of the program are."""
    _, first = jax.lax.sort((real, shadow), axis, num_keys=1)
    second = jax.lax.sort(shadow, axis)
    sizes = RIVALS * jnp.maximum(jnp.abs(first), jnp.abs(second))
    near = NEAR * float(jnp.finfo(dtype).eps) * jnp.maximum(sizes, _largest(shadow))
    is_same = (first == second) | jnp.isnan(first) & jnp.isnan(second)
    is_near = is_same | (jnp.abs(first - second) <= near)
    return jnp.all(is_near, axis, keepdims=True)


def _are_whole(first, second):
    """Whether two numbers differ as labels or positions do: by one or more."""
    are_whole = (first == jnp.round(first)) & (second == jnp.round(second))
    return are_whole & (first != second)


@functools.partial(jax.jit, static_argnames="dtype", inline=True)
def _sound(*pairs, dtype):
    """Whether no number is inf, nan or flushed in the program alone."""
    return ~functools.reduce(jnp.logical_or, (jnp.any(_lost(x, dtype)) for x in pairs))


@functools.partial(jax.jit, static_argnames=("dtype", "orders"), inline=True)
def _near(first, second, *, dtype, orders):
    """Whether two numbers differ by no more than roundoff, in float32, too."""
    pairs = list(zip(first, second, strict=True))
    shadows = pairs[1]
    sizes = jnp.maximum(*map(jnp.abs, shadows))
    # Beside zero, the other numbers of the array say what is near.
    is_zero = (shadows[0] == 0) | (shadows[1] == 0)
    top = jnp.minimum(*(_largest(jnp.maximum(*map(jnp.abs, x))) for x in pairs))
    sizes = jnp.where(is_zero, top, sizes)
    near = NEAR * float(jnp.finfo(dtype).eps) * sizes
    is_lost = _lost(first, dtype) | _lost(second, dtype)
    is_lost |= ~is_zero & _are_whole(*shadows)
    # Where each number is that of float32, rounded once, the cast decides.
    if orders:
        is_lost |= _are_casts(first, dtype) & _are_casts(second, dtype)
    return ~is_lost & (jnp.abs(shadows[0] - shadows[1]) <= near)


def _are_casts(pair, dtype):
    real, shadow = pair
    return jnp.all(real == shadow.astype(dtype).astype(real.dtype))


def _lost(pair, dtype):
    real, shadow = pair
    size = jnp.abs(shadow)
    is_flushed = (real == 0) & (size > 0) & (size <= _bits.limits_of(dtype).flushed)
    return is_flushed | (jnp.isfinite(shadow) & ~jnp.isfinite(real))


def _largest(x):
    """Returns the largest finite number of magnitudes."""
    return jnp.max(jnp.where(jnp.isfinite(x), x, 0), initial=0)
