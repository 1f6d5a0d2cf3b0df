"""Checks of hyperparameters. Errors name the argument, its value and its range."""

import functools
import numbers
import reprlib
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from optax_lossscale._tree import Args, Out, in_half, is_half

# Within these bounds the scale and its reciprocal are normal float32 numbers.
# Outside, one of the two is subnormal, which most hardware flushes to zero: all
# gradients would be zero, even if divided, as XLA multiplies by the reciprocal.
SMALLEST_SCALE = 2.0**-126
LARGEST_SCALE = 2.0**126


def _number(name: str, value: Any) -> Any:
    """Returns `value`, if it is a real number, and not in half precision."""
    if in_half(value):  # The bounds would be rounded as well, to 0 and inf.
        raise ValueError(
            f"{name} must not be of half precision ({value.dtype}), which rounds it, "
            f"got {value!r}. Pass a Python number."
        )
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        advice = " Write float(...) around it." if hasattr(value, "dtype") else ""
        raise TypeError(
            f"{name} must be a Python number, got {value!r} ({type(value).__name__})."
            + advice
        )
    return value


def _between(low: float, high: float, wanted: str) -> Callable[[str, Any], float]:
    """Makes a check that returns a number as a float, if it is in the range."""

    def check(name, value):
        if not low <= _number(name, value) <= high:  # nan is in no range.
            raise ValueError(f"{name} must be {wanted}, got {value!r}.")
        return float(value)

    return check


def kind(is_right: Callable[[Any], bool], wanted: str) -> Callable[..., Any]:
    """Makes a check that returns a value, if it is of the right type."""

    def check(name, value, advice=""):
        if not is_right(value):
            # A model may be passed in place of its loss function: `repr` shortens it.
            words = f"{name} must be {wanted}, got {reprlib.repr(value)}. {advice}"
            raise TypeError(words.rstrip())
        return value

    return check


scale = _between(SMALLEST_SCALE, LARGEST_SCALE, "from 2**-126 to 2**126")
fixed_scale = _between(
    1, LARGEST_SCALE, "at least 1, as in TensorFlow, and at most 2**126"
)
share = _between(0, 1, "from 0 to 1")
bits = _between(0, 128, "from 0 to 128")
boolean = kind(lambda x: isinstance(x, bool), "True or False")
function = kind(callable, "a function")


def count(name: str, value: Any, least: int = 1) -> int:
    """Returns `value` as an int, if it is a whole number of at least `least`."""
    if not least <= _number(name, value) < 2**31 or value != int(value):
        raise ValueError(
            f"{name} must be a whole number from {least} to 2**31 - 1, got {value!r}."
        )
    return int(value)


def by_position(*names: str) -> Callable[[Callable[Args, Out]], Callable[Args, Out]]:
    """Decorates a method: its error names the arguments that it takes by position."""

    def decorate(method):
        @functools.wraps(method)
        def call(self, /, *args, **kwargs):
            if len(args) < len(names):
                name, given = method.__name__, ", ".join(names)
                by_name = f" (by name: {', '.join(kwargs)})" if kwargs else ""
                raise TypeError(
                    f"{name} takes {given} by position, got {len(args)} by position"
                    f"{by_name}. Write {name}({given}, *batch)."
                )
            return method(self, *args, **kwargs)

        return call

    return decorate


def dtype(name: str, value: Any) -> str:
    """Returns the name of a dtype, if it is floating-point with at most 16 bits."""
    try:
        dtype = jnp.dtype(value)
    except (TypeError, ValueError):
        raise TypeError(
            f'{name} must be a dtype or its name, as "float16" or "bfloat16", got '
            f"{value!r}."
        ) from None
    if not is_half(dtype):
        raise ValueError(
            f"{name} must be a floating-point dtype of at most 16 bits, as float16 or "
            f"bfloat16, got {value!r}."
        )
    return dtype.name


# By hyperparameter. A factor closer to 1 would not change a float32 scale.
FACTORS = {
    "growth_factor": _between(
        1 + 2.0**-23, LARGEST_SCALE, "from 1 + 2**-23 to 2**126 (2 is usual)"
    ),
    "backoff_factor": _between(
        SMALLEST_SCALE, 1 - 2.0**-24, "from 2**-126 to 1 - 2**-24 (0.5 is usual)"
    ),
}
