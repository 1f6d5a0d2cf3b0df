"""Warnings that name the user's line."""

import sys
import warnings

from optax_lossscale._libraries import FRAMEWORKS


def warn(message: str) -> None:
    """Warns at the first line on the stack that is not of a framework.

    Python shows a warning once for each line.
    """
    level, frame = 1, sys._getframe()
    while frame and frame.f_globals.get("__name__", "").split(".")[0] in FRAMEWORKS:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, UserWarning, stacklevel=level)
