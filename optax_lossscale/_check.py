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
    dtype = getattr(value, "dtype", np.dtype(float))
    if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32:
        raise ValueError(
            f"{name} must not be of half precision ({dtype}), where it overflows or is "
            f"rounded, got {value!r}. Pass a Python number."
        )
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


def _in_range(name, value, low, high, wanted):
    checked = number(name, value)
    if not low <= checked <= high:
        raise ValueError(f"{name} must be {wanted}, got {value!r}.")
    return checked


def scale(name: str, value: Any) -> float:
    """Returns `value` as a float, if it is a valid loss scale."""
    wanted = "at least 2**-126 and at most 2**126, where 1 / scale is a normal float32"
    return _in_range(name, value, SMALLEST_SCALE, LARGEST_SCALE, wanted)


def fixed_scale(name: str, value: Any) -> float:
    """Returns `value` as a float, if it is a valid fixed loss scale."""
    wanted = "at least 1, as in TensorFlow's FixedLossScale, and at most 2**126"
    return _in_range(name, value, 1.0, LARGEST_SCALE, wanted)


def count(name: str, value: Any, least: int = 1) -> int:
    """Returns `value` as an int, if it is a whole number of at least `least`."""
    checked = number(name, value)
    if checked != int(checked) or not least <= checked < 2**31:
        raise ValueError(
            f"{name} must be a whole number, at least {least} and below 2**31, got "
            f"{value!r}."
        )
    return int(checked)


def growth_factor(name: str, value: Any) -> float:
    """Returns `value` as a float, if it is a valid growth factor."""
    wanted = "above 1 in float32 (2 is usual): at least 1 + 2**-23, and at most 2**126"
    return _in_range(name, value, 1 + 2.0**-23, LARGEST_SCALE, wanted)


def backoff_factor(name: str, value: Any) -> float:
    """Returns `value` as a float, if it is a valid backoff factor."""
    wanted = "below 1 in float32 (0.5 is usual): at least 2**-126, at most 1 - 2**-24"
    return _in_range(name, value, SMALLEST_SCALE, 1 - 2.0**-24, wanted)


def share(name: str, value: Any) -> float:
    """Returns `value` as a float, if it is from 0 to 1."""
    return _in_range(name, value, 0, 1, "at least 0 and at most 1")


def boolean(name: str, value: Any) -> bool:
    """Returns `value`, if it is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}.")
    return value


def key(name: str, value: Any) -> str:
    """Returns `value`, if it is a string and not empty."""
    if not isinstance(value, str) or not value:
        raise TypeError(
            f'{name} must be a name, "loss_scale" for example, got {value!r}.'
        )
    return value


def function(name: str, value: Any) -> Any:
    """Returns `value`, if it can be called."""
    if not callable(value):
        raise TypeError(f"{name} must be a function, got {value!r}.")
    return value


def bits(name: str, value: Any) -> float:
    """Returns `value` as a float, if it is a number of bits from 0 to 128."""
    return _in_range(name, value, 0, 128, "at least 0 and at most 128")


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


# By the names of the hyperparameters.
FACTORS = {"growth_factor": growth_factor, "backoff_factor": backoff_factor}
