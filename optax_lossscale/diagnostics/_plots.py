"""Figures of a training run. Only these need matplotlib."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from optax_lossscale import _check as check
from optax_lossscale.diagnostics import _bits
from optax_lossscale.diagnostics._common import check_host, scale_of
from optax_lossscale.diagnostics._underflow import ExponentHistogram, exponent_histogram

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Color-blind readers can tell these apart, on white and on black.
BLUE, GREEN, ORANGE = "#1F83CC", "#009E73", "#D55E00"


def plot_exponents(
    histogram: Any,
    state: Any,
    *,
    dtype: Any = "float16",
    ax: "Axes | None" = None,
) -> "Axes":
    """Draws a histogram of the gradients' magnitudes, before and after scaling.

    Shares are relative to all numbers, including those that are exactly zero or not
    finite; the legend lists these. Shaded areas mark where a number becomes zero in
    `dtype`, where it is subnormal and where it overflows, rounding to nearest even.
    With a good scale, the filled histogram lies in the white area, with some room to
    its right.

    Args:
      histogram: An `ExponentHistogram`, as `exponent_histogram` returns it, or the
        gradients themselves, unscaled, any pytree.
      state: A pytree that holds one `LossScaleOptimizerState`, or the scale itself.
      dtype: The dtype of the backward pass, floating-point, of at most 16 bits.
      ax: The matplotlib Axes to draw on; a new figure if None.

    Returns:
      The Axes. x is the log2 of the magnitude, y is in percent.

    Raises:
      ImportError: If matplotlib is not installed.
      TypeError: Under a transformation of JAX, such as `jax.jit`; if `ax` is not an
        Axes, or `dtype` is not a dtype.
      ValueError: If the scale is not a number from 2**-126 to 2**126; if `state`
        holds no such state or several; if `dtype` has more than 16 bits.

    Examples:
      >>> import numpy as np
      >>> from optax_lossscale.diagnostics import plot_exponents
      >>> grads = {"w": np.float32(1e-6) * np.arange(100, dtype=np.float32)}
      >>> ax = plot_exponents(grads, 2.0**15)
      >>> ax.get_xlabel()
      'magnitude, and the range of float16'

    References:
      Micikevicius et al., [Mixed Precision Training](https://arxiv.org/abs/1710.03740),
      2018, Figure 3.
    """
    check_host("plot_exponents", (histogram, state))
    dtype = check.dtype("dtype", dtype)
    scale = check.scale("the loss scale of state", scale_of(state).item())
    if not isinstance(histogram, ExponentHistogram):
        histogram = exponent_histogram(histogram)
    exponents, counts, *others = (np.asarray(x, np.float64) for x in histogram)
    axes, ink = _get_axes(ax)
    total = max(counts.sum() + sum(others), 1)
    low, *_, high = np.add(_boundaries(dtype), [-8, 0, 8])
    filled = np.flatnonzero(counts)
    if filled.size:
        kept = slice(filled[0], filled[-1] + 1)
        percent = 100 * counts[kept] / total
        edges = exponents[filled[0]] + np.arange(len(percent) + 1)
        scaled = edges + np.log2(scale)
        style = {"color": ink, "linewidth": 1.5, "zorder": 3}
        axes.stairs(percent, edges, label="before scaling", **style)
        label = f"after scaling by $2^{{{np.log2(scale):.4g}}}$"
        axes.stairs(percent, scaled, fill=True, color=GREEN, label=label)
        axes.set_ylim(0, 1.4 * percent.max())
        low = min(low, edges[0] - 2, scaled[0] - 2)
        high = max(high, edges[-1] + 2, scaled[-1] + 2)
    _shade_ranges(axes, dtype, low, high)
    shares = zip(("exactly zero", "inf", "nan"), others, strict=True)
    text = ", ".join(f"{name}: {_percent(n / total)}" for name, n in shares if n)
    axes.set(xlabel=f"magnitude, and the range of {dtype}", ylabel="% of gradients")
    _add_legend(axes, text)
    return axes


def plot_history(
    records: Iterable[Mapping[str, Any]], *, prefix: str = "", ax: "Axes | None" = None
) -> "Axes":
    """Draws the loss scale over the steps, and marks the skipped and repeated ones.

    A cross marks a record if its step was skipped, by `last_step_applied`, or if other
    steps were skipped since the record before, by `skipped_steps`. It then stands for
    all of them: the legend counts the steps, and the crosses if these are fewer. The
    cross of the first record stands for all skipped steps until then, since training
    began; the legend says how many, if several. A cross is drawn at the scale of the
    record before, which the step used; the first one above the curve, since no record
    has its scale. There a short line marks backward passes that were repeated, by
    `retries`.

    Args:
      records: A list of dictionaries, one for each step that was logged: the result of
        `metrics`, with names of your own if you like. `loss_scale` alone is needed.
        `step` is the x axis; without it, records are numbered from 0. A record may lack
        a name, or hold None. Values may be arrays, numbers or, as `csv.DictReader`
        returns them, strings. Records of many members draw a line for each.
      prefix: The prefix of all these names but `step`, as passed to `metrics`.
      ax: The matplotlib Axes to draw on; a new figure if None.

    Returns:
      The Axes. x is the step, y is the scale, logarithmic.

    Raises:
      ImportError: If matplotlib is not installed.
      TypeError: Under a transformation of JAX, such as `jax.jit`; if `records` are not
        dictionaries, or `ax` is not an Axes.
      ValueError: If no record has a loss scale, or a value is not a number.

    Examples:
      >>> from optax_lossscale.diagnostics import plot_history
      >>> records = [
      ...     {"step": step, "loss_scale": scale, "skipped_steps": int(step == 20)}
      ...     for step, scale in [(0, 8.0), (10, 16.0), (20, 8.0)]
      ... ]
      >>> ax = plot_history(records)
      >>> [line.get_label() for line in ax.lines]
      ['loss scale', 'skipped steps: 1']
    """
    records = list(records)
    if not all(isinstance(record, Mapping) for record in records):
        raise TypeError(
            'records must be a list of dictionaries (pandas: table.to_dict("records")).'
        )
    scales = _column(records, prefix + "loss_scale")
    is_drawn = np.isfinite(scales) & (scales > 0)
    if not is_drawn.any():
        raise ValueError(
            f"None of the {len(records)} records has a {prefix + 'loss_scale'!r} that "
            "is positive and finite. If the names have a prefix, pass it as prefix=."
        )
    steps = np.arange(len(records))
    if any("step" in record for record in records):
        steps = _column(records, "step")[:, 0]
    rows = is_drawn.any(axis=1)
    steps, scales = steps[rows], np.where(is_drawn, scales, np.nan)[rows]
    names = ("last_step_applied", "skipped_steps", "retries")
    columns = (_column(records, prefix + name)[rows] for name in names)
    applied, skips, retries = (np.broadcast_to(x, scales.shape).T for x in columns)
    marks = {"skipped steps": ("x", applied, skips)}
    marks["repeated passes"] = ("|", np.full_like(applied, np.nan), retries)

    axes, ink = _get_axes(ax)
    marker = "o" if len(steps) == 1 else None
    lines = axes.step(steps, scales, where="post", color=BLUE, marker=marker)
    lines[0].set_label("loss scale")
    for name, (sign, flags, counts) in marks.items():
        new = np.array(list(map(_new_by_row, flags, counts))).T
        if new.any():
            row, member = np.nonzero(new)
            # A record has the scale after its step; that of the one before was used.
            used = scales[np.maximum(row - 1, 0), member]
            used[row == 0] = 2**0.5 * np.nanmax(scales)
            label = f"{name}: {new.sum():.0f}"
            if row.size < new.sum():
                label += f" (marks: {row.size})"
            if (first := new[0].sum()) > 1:
                label += f", {first:.0f} by step {steps[0]:.10g}"
            style = {"color": ink, "marker": sign, "linestyle": ""}
            axes.plot(steps[row], used, **style, zorder=3, label=label)
    axes.set_yscale("log", base=2)
    lowest, highest = np.nanmin(scales), np.nanmax(scales)
    axes.set_ylim(lowest / 2, highest * 2 * (highest / lowest) ** 0.25)
    axes.set(xlabel="step", ylabel="loss scale")
    _whole_numbers(axes.xaxis)
    _add_legend(axes)
    return axes


def _percent(share: float) -> str:
    """Writes a share with two digits, but never as 1e-05."""
    return np.format_float_positional(100 * share, 2, fractional=False, trim="-") + "%"


def _column(records: list[Mapping[str, Any]], name: str) -> np.ndarray:
    """Returns a metric, float64[records, members], with nan where it is missing."""
    values = [record.get(name) for record in records]
    check_host("plot_history", values)
    rows = [_numbers(name, value) for value in jax.device_get(values)]
    return np.array(np.broadcast_arrays(*rows))


def _numbers(name: str, value: Any) -> np.ndarray:
    if isinstance(value, str):
        value = {"": None, "True": 1, "False": 0}.get(value, value)
    try:
        return np.ravel(np.asarray(np.nan if value is None else value, np.float64))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"The {name!r} of a record must be a number, got {value!r}. For a file, "
            "convert arrays with .item() first, or write one column for each member."
        ) from error


def _new_by_row(applied: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Returns how many were counted since the row before; nan means unknown."""
    new = np.where(applied == 0, 1.0, 0.0)
    known = np.flatnonzero(np.isfinite(counts))
    new[known] = np.maximum(new[known], np.diff(counts[known], prepend=0.0))
    return new


def _shade_ranges(ax: Any, dtype: str, low: float, high: float) -> None:
    """Shades where numbers are zero, subnormal or infinite in `dtype`.

    Args:
      ax: The matplotlib Axes; x is the log2 of the magnitude.
      dtype: The name of a floating-point dtype.
      low: The left end of the x axis.
      high: The right end.
    """
    edges = np.clip([low, *_boundaries(dtype), high], low, high)
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
    _whole_numbers(ax.xaxis)
    ax.xaxis.set_major_formatter("$2^{{{x:.0f}}}$")
    ax.set_xlim(low, high)


def _boundaries(dtype: str) -> np.ndarray:
    """Returns log2 of where zero ends, normal numbers begin, and overflow begins."""
    flushed, normal, _, overflow, _ = _bits.limits_of(dtype)
    return np.log2([flushed, normal, overflow])


def _whole_numbers(axis: Any) -> None:
    """Puts ticks at whole numbers alone."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True))


def _get_axes(ax: Any) -> tuple[Any, str]:
    """Returns `ax`, or the Axes of a new figure, and the color of outlines and text."""
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError(
            "Figures need matplotlib: pip install 'optax-lossscale[plot]'"
        ) from error
    if ax is not None and not hasattr(ax, "stairs"):
        raise TypeError(f"ax must be a matplotlib Axes, got {ax!r}.")
    if ax is None:
        _, ax = plt.subplots(figsize=(7, 3.6), layout="constrained")
    # Black, or white in a dark style.
    return ax, plt.rcParams["text.color"]


def _add_legend(ax: Any, title: str = "") -> None:
    """Adds a legend of all labels, and hides the frame above and to the right."""
    style = {"loc": "upper left", "ncols": 2, "fontsize": "small"}
    handles, _ = ax.get_legend_handles_labels()
    ax.legend(handles=handles, title=title or None, **style)
    ax.spines[["top", "right"]].set_visible(False)
