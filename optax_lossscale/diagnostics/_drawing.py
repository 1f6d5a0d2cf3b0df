"""Helpers that the figures share: ranges of dtypes, and matplotlib."""

import math
from typing import Any

import numpy as np

from optax_lossscale.diagnostics import _bits

# Color-blind readers can tell these apart, on white and on black.
BLUE, GREEN, ORANGE = "#1F83CC", "#009E73", "#D55E00"


def shade_ranges(ax: Any, dtype: str, low: float, high: float) -> None:
    """Shades where numbers are zero, subnormal or infinite in `dtype`.

    Args:
      ax: The matplotlib Axes; x is the log2 of the magnitude.
      dtype: The name of a floating-point dtype.
      low: The left end of the x axis.
      high: The right end.
    """
    edges = np.clip([low, *boundaries(dtype), high], low, high)
    # The names are above the bars; that of a narrow area is higher than the others.
    narrow = edges[2] - edges[1] < 0.14 * (high - low)
    names = ["zero", "subnormal\n" if narrow else "subnormal", "normal", "overflow"]
    for i, hatch in ((0, "\\\\"), (1, ".."), (3, "//")):
        style = {"facecolor": (ORANGE, 0.12), "edgecolor": (ORANGE, 0.3)}
        ax.axvspan(*edges[i : i + 2], zorder=0, linewidth=0, hatch=hatch, **style)
    top = ax.secondary_xaxis("top")
    top.set_xticks((edges[1:] + edges[:-1]) / 2, names, fontsize="small")
    top.tick_params(length=0, pad=2)
    top.spines["top"].set_visible(False)
    whole_numbers(ax.xaxis)
    ax.xaxis.set_major_formatter("$2^{{{x:.0f}}}$")
    ax.set_xlim(low, high)


def boundaries(dtype: str) -> tuple[float, float, float]:
    """Returns log2 of where zero ends, normal numbers begin, and overflow begins."""
    flushed, normal, _, overflow, _ = _bits.limits_of(dtype)
    return math.log2(flushed), math.log2(normal), math.log2(overflow)


def whole_numbers(axis: Any) -> None:
    """Puts ticks at whole numbers alone."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True))


def ink() -> str:
    """Returns the color of text and outlines: black, or white in a dark style."""
    import matplotlib as mpl

    return mpl.rcParams["text.color"]


def get_axes(ax: Any, *, rows: int = 1, size: tuple[float, float] = (7, 3.6)) -> Any:
    """Returns `ax`, or the Axes of a new figure, an array if it has several rows."""
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError(
            "Figures need matplotlib: pip install 'optax-lossscale[plot]'"
        ) from error
    if ax is not None and not hasattr(ax, "stairs"):
        raise TypeError(f"ax must be a matplotlib Axes, got {ax!r}.")
    if ax is None:
        _, ax = plt.subplots(rows, figsize=size, layout="constrained")
    return ax


def add_legend(ax: Any, title: str = "") -> None:
    """Adds a legend of all labels, and hides the frame above what is drawn."""
    style = {"loc": "upper left", "ncols": 2, "fontsize": "small"}
    handles, _ = ax.get_legend_handles_labels()
    ax.legend(handles=handles, title=title or None, **style)
    ax.spines[["top", "right"]].set_visible(False)
