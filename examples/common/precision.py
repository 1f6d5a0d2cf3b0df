"""The dtype that an example computes in."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from optax_lossscale import autocast

DTYPES = ("float32", "bfloat16", "float16")


def compute_in(dtype: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a float32 function that computes in one of `DTYPES`."""
    return function if dtype == "float32" else autocast(function, jnp.dtype(dtype))
