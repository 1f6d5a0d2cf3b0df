"""Checks of hyperparameters. Errors name the argument, its value and its range."""

import math
import numbers
from collections.abc import Callable
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
            f"{name} must not be of half precision ({dtype}), which rounds it, got "
            f"{value!r}. Pass a Python number."
        )
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(
            f"{name} must be a Python number, got {value!r} of type "
            f"{type(value).__name__}. What changes in training belongs in the state."
        )
    try:
        checked = float(value)
    except OverflowError:
        checked = math.inf
    if not math.isfinite(checked):
        raise ValueError(f"{name} must be finite, got {value!r}.")
    return checked


def _between(low: float, high: float, wanted: str) -> Callable[[str, Any], float]:
    """Makes a check that returns a number as a float, if it is in the range."""

    def check(name, value):
        checked = number(name, value)
        if not low <= checked <= high:
            raise ValueError(f"{name} must be {wanted}, got {value!r}.")
        return checked

    return check


scale = _between(
    SMALLEST_SCALE,
    LARGEST_SCALE,
    "at least 2**-126 and at most 2**126, where 1 / scale is a normal float32",
)
fixed_scale = _between(
    1,
    LARGEST_SCALE,
    "at least 1, as in TensorFlow's FixedLossScale, and at most 2**126",
)
growth_factor = _between(
    1 + 2.0**-23,
    LARGEST_SCALE,
    "above 1 in float32 (2 is usual): at least 1 + 2**-23, and at most 2**126",
)
backoff_factor = _between(
    SMALLEST_SCALE,
    1 - 2.0**-24,
    "below 1 in float32 (0.5 is usual): at least 2**-126, at most 1 - 2**-24",
)
share = _between(0, 1, "at least 0 and at most 1")
bits = _between(0, 128, "at least 0 and at most 128")


def count(name: str, value: Any, least: int = 1) -> int:
    """Returns `value` as an int, if it is a whole number of at least `least`."""
    checked = number(name, value)
    if checked != int(checked) or not least <= checked < 2**31:
        raise ValueError(
            f"{name} must be a whole number from {least} to 2**31 - 1, got {value!r}."
        )
    return int(checked)


def boolean(name: str, value: Any) -> bool:
    """Returns `value`, if it is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}.")
    return value


def string(name: str, value: Any) -> str:
    """Returns `value`, if it is a string."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a string, got {value!r}.")
    return value


def function(name: str, value: Any) -> Any:
    """Returns `value`, if it can be called."""
    if not callable(value):
        raise TypeError(f"{name} must be a function, got {value!r}.")
    return value


def dtype(name: str, value: Any) -> str:
    """Returns the name of a dtype, if it is floating-point with at most 16 bits."""
    try:
        dtype = jnp.dtype(value)
    except TypeError as error:
        raise TypeError(
            f'{name} must be a dtype or its name, "float16" for example, got {value!r}.'
        ) from error
    if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize > 2:
        raise ValueError(
            f"{name} must be a floating-point dtype of at most 16 bits, got {value!r}."
        )
    return dtype.name


# By the names of the hyperparameters.
FACTORS = {"growth_factor": growth_factor, "backoff_factor": backoff_factor}
