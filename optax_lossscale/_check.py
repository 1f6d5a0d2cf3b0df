"""Checks of hyperparameters. Errors name the argument, its value and its range."""

import math
import numbers
from typing import Any

import jax.numpy as jnp
import numpy as np

# Within these bounds the scale and its reciprocal are normal float32 numbers.
# Outside, one of the two is subnormal, which most hardware flushes to zero: all
# gradients would be zero, even if divided, as XLA multiplies by the reciprocal.
SMALLEST_SCALE = 2.0**-126
LARGEST_SCALE = 2.0**126


def number(name: str, value: Any) -> float:
    """Returns `value` as a float, if it is a finite real number."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(
            f"{name} must be a Python number, got {value!r} of type "
            f"{type(value).__name__}. Hyperparameters are constants: values that "
            f"change during training belong in the state."
        )
    try:
        checked = float(value)
    except OverflowError:
        checked = math.inf
    if not math.isfinite(checked):
        raise ValueError(f"{name} must be finite, got {value!r}.")
    return checked


def _in_range(name, value, low, high, wanted, why=""):
    checked = number(name, value)
    if not low <= checked <= high:
        raise ValueError(f"{name} must be {wanted}, got {value!r}{why}.")
    return checked


def scale(name: str, value: Any, *, at_least: float = SMALLEST_SCALE) -> float:
    """Returns `value` as a float, if it is a valid loss scale."""
    dtype = getattr(value, "dtype", np.dtype(float))
    if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32:
        raise ValueError(
            f"{name} must not be of half precision ({dtype}), where a scale overflows "
            f"or is rounded, got {value!r}. Pass a Python float."
        )
    wanted = f"at least {at_least:.2g} and at most 2**126 (8.5e37)"
    why = ": the scale and its reciprocal must be normal float32 numbers"
    return _in_range(name, value, at_least, LARGEST_SCALE, wanted, why)


def count(name: str, value: Any, *, at_least: int = 1) -> int:
    """Returns `value` as an int, if it is a whole number of at least `at_least`."""
    checked = number(name, value)
    if checked != int(checked) or not at_least <= checked < 2**31:
        raise ValueError(
            f"{name} must be a whole number, at least {at_least} and below 2**31, "
            f"got {value!r}."
        )
    return int(checked)


def growth_factor(name: str, value: Any) -> float:
    """Returns `value` as a float, if it is a valid growth factor."""
    wanted = "above 1 in float32 (2 is usual): at least 1 + 2**-23, and at most 2**126"
    return _in_range(name, value, 1 + 2.0**-23, LARGEST_SCALE, wanted)


def backoff_factor(name: str, value: Any) -> float:
    """Returns `value` as a float, if it is a valid backoff factor."""
    wanted = (
        "above 0 and below 1 in float32 (0.5 is usual): at least 2**-126 and at most "
        "1 - 2**-24"
    )
    return _in_range(name, value, SMALLEST_SCALE, 1 - 2.0**-24, wanted)


def share(name: str, value: Any) -> float:
    """Returns `value` as a float, if it is from 0 to 1."""
    return _in_range(name, value, 0, 1, "at least 0 and at most 1")


def boolean(name: str, value: Any) -> bool:
    """Returns `value`, if it is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}.")
    return value


def bits(name: str, value: Any) -> float:
    """Returns `value` as a float, if it is a number of bits from 0 to 128."""
    return _in_range(name, value, 0, 128, "at least 0 and at most 128")


def decay(name: str, value: Any) -> float:
    """Returns `value` as a float, if it can be the decay of a running mean."""
    # Closer to 1, a float32 mean of logarithms would round away a change of one bit.
    wanted = "at least 0 and below 1 (0.99 is usual): at most 1 - 2**-20"
    return _in_range(name, value, 0, 1 - 2.0**-20, wanted)


def dtype(name: str, value: Any) -> str:
    """Returns the name of a dtype, if it is floating-point with at most 16 bits."""
    try:
        dtype = jnp.dtype(value)
    except TypeError as error:
        raise TypeError(
            f'{name} must be a dtype or its name, "float16" for example, got {value!r}.'
        ) from error
    if not jnp.issubdtype(dtype, jnp.floating) or jnp.finfo(dtype).bits > 16:
        raise ValueError(
            f"{name} must be the dtype that gradients are computed in, floating-point "
            f"of at most 16 bits, got {value!r}."
        )
    return dtype.name
