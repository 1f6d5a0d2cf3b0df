"""Warnings that name the user's line."""

import sys
import warnings
from pathlib import Path

LIBRARIES = ("optax_lossscale", "jax", "optax", "equinox", "flax")


def warn(message: str) -> None:
    """Warns of the first line on the stack outside of these libraries.

    Python shows a warning once for each line.
    """
    level, frame = 1, sys._getframe()
    while frame and frame.f_globals.get("__name__", "").split(".")[0] in LIBRARIES:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, UserWarning, stacklevel=level)


def is_called_by_jit() -> bool:
    """Tells whether `jax.jit` is tracing a function on this thread.

    Other transformations of JAX that record operations, `jax.lax.scan` for example,
    run what they recorded at once, so that a closed-over array is a current one.
    """
    frame = sys._getframe()
    while frame is not None and Path(frame.f_code.co_filename).name != "pjit.py":
        frame = frame.f_back
    return frame is not None
