"""Helpers that the figures share: ranges of dtypes, legends, and matplotlib."""

import math
from typing import Any

import numpy as np

from optax_lossscale.diagnostics import _bits


def shade_ranges(ax: Any, dtype: str, low: float, high: float) -> None:
    """Shades where numbers are zero, subnormal or infinite in `dtype`.

    Args:
      ax: The matplotlib Axes; x is the log2 of the magnitude.
      dtype: The name of a floating-point dtype.
      low: The left end of the x axis.
      high: The right end.
    """
    meet = boundaries(dtype)
    edges = np.clip([low, *meet, high], low, high)
    areas = (
        ("zero", "#F3D9C9", "\\\\"),
        ("subnormal", "#FBF3D0", ".."),
        ("normal", "white", ""),
        ("overflow", "#F3D9C9", "//"),
    )
    for start, stop, (_, color, hatch) in zip(edges, edges[1:], areas, strict=False):
        style = {"facecolor": color, "edgecolor": "#D8C8B8", "hatch": hatch}
        ax.axvspan(start, stop, zorder=0, linewidth=0, **style)
    # The names are above the bars; that of a narrow area is higher than the others.
    top = ax.secondary_xaxis("top")
    names = [f"{name}\n" if name == "subnormal" else name for name, *_ in areas]
    top.set_xticks((edges[1:] + edges[:-1]) / 2, names, fontsize="small")
    top.tick_params(length=0, pad=2)
    top.spines["top"].set_visible(False)
    ax.spines[["top", "right"]].set_visible(False)
    # Ticks where areas meet come first, then multiples of ten where there is room.
    ticks: list[float] = []
    wanted = [meet[2], meet[1], meet[0], 0.0, *range(-200, 200, 10)]
    for tick in np.round(wanted):
        room = min((abs(tick - other) for other in ticks), default=np.inf)
        if low <= tick <= high and room > (high - low) / 12:
            ticks.append(tick)
    ax.set_xticks(sorted(ticks))
    ax.xaxis.set_major_formatter("$2^{{{x:.0f}}}$")
    ax.set_xlim(low, high)


def boundaries(dtype: str) -> tuple[float, float, float]:
    """Returns log2 of where zero ends, normal numbers begin, and overflow begins."""
    limits = _bits.limits_of(dtype)
    flushed, normal, overflow = limits.flushed, limits.normal, limits.overflow
    return math.log2(flushed), math.log2(normal), math.log2(overflow)


def as_power(scale: float) -> str:
    """Formats a scale, as a power of two if it is one."""
    mantissa, exponent = np.frexp(scale)
    return f"$2^{{{exponent - 1}}}$" if mantissa == 0.5 else f"{scale:.4g}"


def as_percent(share: float) -> str:
    """Formats a share that is above zero."""
    return "<0.01 %" if share < 1e-4 else f"{100 * share:.3g} %"


def get_axes(ax: Any, *, height: float = 3.6) -> Any:
    """Returns `ax`, or the Axes of a new figure that is `height` inches high."""
    try:
        import matplotlib.axes
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError(
            "Figures need matplotlib: pip install 'optax-lossscale[plot]'"
        ) from error
    if ax is None:
        _, ax = plt.subplots(figsize=(7, height), layout="constrained")
    if not isinstance(ax, matplotlib.axes.Axes):
        raise TypeError(
            f"ax must be a matplotlib Axes, got {type(ax).__name__}. If plt.subplots "
            "returned several, pass one of them."
        )
    return ax


def add_panel_below(ax: Any) -> Any:
    """Returns new Axes in the lower part of `ax`, which shrinks, with its x axis."""
    ratios = {"height_ratios": [3, 2], "hspace": 0.1}
    spec, figure = ax.get_subplotspec(), ax.figure
    if spec is None:
        box = ax.get_position()
        edges = {"left": box.x0, "bottom": box.y0, "right": box.x1, "top": box.y1}
        grid = figure.add_gridspec(2, 1, **edges, **ratios)
    else:
        grid = spec.subgridspec(2, 1, **ratios)
    ax.set_subplotspec(grid[0])
    panel = figure.add_subplot(grid[1], sharex=ax)
    panel.set_xlabel(ax.get_xlabel())
    ax.set_xlabel("")
    ax.tick_params(labelbottom=False)
    figure.align_ylabels([ax, panel])
    return panel


def set_top(
    ax: Any,
    low: float,
    high: float,
    entries: int,
    *,
    title: Any = "",
    log: bool = False,
) -> None:
    """Sets the limits of the y axis, and leaves room above for a legend.

    Args:
      ax: The Axes.
      low: The lowest value to show; its log2 on a logarithmic axis.
      high: The highest one, likewise.
      entries: The number of entries that the legend will have.
      title: The title of the legend.
      log: Whether the axis is logarithmic.
    """
    rows = -(-entries // _legend_columns(ax)) + bool(title)
    # Titles and labels take some of the height later.
    inches = 0.8 * ax.get_window_extent().height / ax.get_figure().dpi
    share = min((0.2 * rows + 0.2) / max(inches, 0.1), 0.6)
    top = low + (high - low or 1) / (1 - share)
    ax.set_ylim(*np.exp2([low, top]) if log else (low, top))
    if not log and top > 100:
        ax.set_yticks(range(0, 101, 20))


def legend(ax: Any, handles: Any = None, *, title: Any = "") -> None:
    """Adds a legend in the room that `set_top` left, of `handles` or of all labels."""
    made = ax.legend(
        handles=ax.get_legend_handles_labels()[0] if handles is None else handles,
        title=title or None,
        loc="upper left",
        ncols=_legend_columns(ax),
        fontsize="small",
        title_fontsize="small",
        alignment="left",
        framealpha=0.9,
        borderaxespad=0.2,
        columnspacing=1.2,
    )
    # If the layout made room for it, a wide legend would shrink a small plot away.
    made.set_in_layout(False)


def _legend_columns(ax: Any) -> int:
    inches = ax.get_window_extent().width / ax.get_figure().dpi
    return int(np.clip(inches / 1.25, 1, 3))
