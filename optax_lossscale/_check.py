"""Checks of hyperparameters: what is wrong, and what is allowed."""

import math
import numbers
from typing import Any

import jax.numpy as jnp
import numpy as np

# Within these bounds the scale and its reciprocal are normal float32 numbers.
# Outside, one of the two is subnormal, which most hardware takes for zero: so would
# all gradients be, even if divided, as XLA multiplies by the reciprocal then too.
SMALLEST_SCALE = 2.0**-126
LARGEST_SCALE = 2.0**126


def check_number(name: str, value: Any) -> float:
    """Returns `value` as a float, if it is a finite real number."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(
            f"{name} must be a Python number, got {value!r} of type "
            f"{type(value).__name__}. Hyperparameters are fixed when the program "
            f"is built: what changes during training belongs in the state."
        )
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name} must be finite, got {value!r}.")
    return number


def check_scale(name: str, value: Any, *, at_least: float = SMALLEST_SCALE) -> float:
    """Returns `value` as a float, if it can serve as a loss scale."""
    dtype = getattr(value, "dtype", np.dtype(float))
    if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32:
        raise ValueError(
            f"{name} must not be of half precision ({dtype}), in which a scale soon "
            f"overflows or rounds, got {value!r}. Pass a Python float."
        )
    number = check_number(name, value)
    if not at_least <= number <= LARGEST_SCALE:
        raise ValueError(
            f"{name} must be at least {at_least:.2g} and at most 2**126 (8.5e37), got "
            f"{value!r}: the scale and its reciprocal must be normal float32 numbers."
        )
    return number


def check_count(name: str, value: Any, *, at_least: int = 1) -> int:
    """Returns `value` as an int, if it is a whole number of at least `at_least`."""
    number = check_number(name, value)
    if number != int(number) or not at_least <= number < 2**31:
        raise ValueError(
            f"{name} must be a whole number, at least {at_least} and below 2**31, "
            f"got {value!r}."
        )
    return int(number)


def check_growth_factor(name: str, value: Any) -> float:
    """Returns `value` as a float, if a scale can grow by it."""
    number = check_number(name, value)
    if not 1 + 2.0**-23 <= number <= LARGEST_SCALE:
        raise ValueError(
            f"{name} must be above 1 in float32 (2 is usual): at least 1 + 2**-23, and "
            f"at most 2**126, got {value!r}."
        )
    return number


def check_backoff_factor(name: str, value: Any) -> float:
    """Returns `value` as a float, if a scale can back off by it."""
    number = check_number(name, value)
    if not SMALLEST_SCALE <= number <= 1 - 2.0**-24:
        raise ValueError(
            f"{name} must be above 0 and below 1 in float32 (0.5 is usual): at least "
            f"2**-126 and at most 1 - 2**-24, got {value!r}."
        )
    return number


def check_share(name: str, value: Any) -> float:
    """Returns `value` as a float, if it is a share of a whole."""
    number = check_number(name, value)
    if not 0 <= number <= 1:
        raise ValueError(f"{name} must be at least 0 and at most 1, got {value!r}.")
    return number


def check_bool(name: str, value: Any) -> bool:
    """Returns `value`, if it is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}.")
    return value


def check_bits(name: str, value: Any) -> float:
    """Returns `value` as a float, if it is a distance in powers of two."""
    number = check_number(name, value)
    if not 0 <= number <= 128:
        raise ValueError(f"{name} must be at least 0 and at most 128, got {value!r}.")
    return number


def check_decay(name: str, value: Any) -> float:
    """Returns `value` as a float, if it can be the decay of a running mean."""
    number = check_number(name, value)
    # Nearer to 1, rounding keeps a float32 mean of logarithms from moving by a bit.
    if not 0 <= number <= 1 - 2.0**-20:
        raise ValueError(
            f"{name} must be at least 0 and below 1 (0.99 is usual): at most "
            f"1 - 2**-20, got {value!r}."
        )
    return number


def check_dtype(name: str, value: Any) -> str:
    """Returns the name of a dtype, if it is one that gradients can overflow."""
    try:
        dtype = jnp.dtype(value)
    except TypeError as error:
        raise TypeError(
            f'{name} must be a dtype or its name, "float16" for example, got {value!r}.'
        ) from error
    if not jnp.issubdtype(dtype, jnp.floating) or jnp.finfo(dtype).bits > 16:
        raise ValueError(
            f"{name} must be a floating-point dtype of at most 16 bits, the one that "
            f"gradients are computed in, got {value!r}."
        )
    return dtype.name
