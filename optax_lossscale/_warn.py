"""Warnings that name the user's line."""

import sys
import warnings

LIBRARIES = ("optax_lossscale", "jax", "optax", "equinox", "flax", "haiku")


def warn(message: str) -> None:
    """Warns at the first line on the stack that is not of these libraries.

    Python shows a warning once for each line.
    """
    level, frame = 1, sys._getframe()
    while frame and frame.f_globals.get("__name__", "").split(".")[0] in LIBRARIES:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, UserWarning, stacklevel=level)
