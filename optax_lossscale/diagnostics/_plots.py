"""Figures of what happened during training. Only these need matplotlib."""

from typing import TYPE_CHECKING, Any

import numpy as np

from optax_lossscale import _check as check
from optax_lossscale.diagnostics import _drawing
from optax_lossscale.diagnostics._common import check_host, scale_of
from optax_lossscale.diagnostics._history import History
from optax_lossscale.diagnostics._underflow import exponent_histogram

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Color-blind readers can tell these apart (Okabe and Ito). Dashes, markers and hatches
# help where there is no color.
BLUE, ORANGE, GREEN = "#0072B2", "#D55E00", "#009E73"
LIGHT_ORANGE = "#F3C6A5"

# The first of these columns that a history has is drawn as the share that underflows.
SHARES = ("underflow", "flushed", "zero")
# A moving average is over a twentieth of the rows, and drawn if that is five or more.
WINDOWS, SMALLEST_WINDOW = 20, 5


def plot_exponents(
    histogram: Any, state: Any, *, dtype: Any = "float16", ax: "Axes | None" = None
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
      ValueError: If the scale is not positive and finite; if `state` holds no such
        state or several; if `dtype` has more than 16 bits.

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
    scale = float(scale_of(state))
    if not 0 < scale < np.inf:
        raise ValueError(f"The scale must be positive and finite, got {scale}.")
    fields = ("exponents", "counts", "zeros", "infs", "nans")
    if not all(hasattr(histogram, name) for name in fields):
        histogram = exponent_histogram(histogram)
    arrays = (np.asarray(getattr(histogram, name), np.float64) for name in fields)
    exponents, counts, *others = arrays
    axes: Any = _drawing.get_axes(ax)
    total = counts.sum() + sum(others)
    percent = 100 * counts / max(total, 1)
    low, *_, high = _drawing.boundaries(dtype)
    margin = 0.2 * (high - low)
    low, high = low - margin, high + margin
    if seen := np.flatnonzero(counts).tolist():
        percent = percent[seen[0] : seen[-1] + 1]
        edges = exponents[seen[0]] + np.arange(len(percent) + 1)
        scaled = edges + np.log2(scale)
        label = f"after scaling by {_drawing.as_power(scale)}"
        style = {"color": "black", "linewidth": 1.5, "zorder": 3}
        axes.stairs(percent, edges, label="before scaling", **style)
        axes.stairs(percent, scaled, fill=True, color=GREEN, label=label)
        low = min(low, edges[0] - 2, scaled[0] - 2)
        high = max(high, edges[-1] + 2, scaled[-1] + 2)
    _drawing.shade_ranges(axes, dtype, low, high)
    names = ("exactly zero", "inf", "nan")
    shares = zip(names, others, strict=True)
    text = ", ".join(
        f"{name} {_drawing.as_percent(n / total)}" for name, n in shares if n > 0
    )
    text = text or ("" if seen else "no gradients")
    entries = len(axes.get_legend_handles_labels()[0])
    _drawing.set_top(axes, 0, percent.max(initial=0), entries, title=text)
    axes.set(xlabel=f"magnitude, and the range of {dtype}", ylabel="% of gradients")
    _drawing.legend(axes, title=text)
    return axes


def plot_history(
    history: History, *, prefix: str = "", ax: "Axes | None" = None
) -> "Axes":
    """Draws the loss scale over the steps, and marks the skipped ones.

    A cross marks a row if its step was skipped, by `last_step_applied`, or if other
    steps were skipped since the row before, by `skipped_steps`. It then stands for all
    of them. It is drawn at the scale of the row before, which overflowed. If there is a
    column `underflow`, `flushed` or `zero`, with shares between 0 and 1, the first of
    these is drawn in a second panel below, with a moving average if there are 100 rows
    or more.

    Args:
      history: A `History` of what `metrics` returns, at least of `loss_scale` or
        `log2_loss_scale`.
      prefix: The prefix of all these names, as passed to `metrics`.
      ax: The matplotlib Axes to draw on; a new figure if None. A second panel takes a
        part of its height.

    Returns:
      The Axes of the scale. x is the step, y is logarithmic.

    Raises:
      ImportError: If matplotlib is not installed.
      TypeError: If `history` is not a `History`, or `ax` not an Axes.
      ValueError: If no row has a loss scale.

    Examples:
      >>> from optax_lossscale.diagnostics import History, plot_history
      >>> history = History()
      >>> for step, scale in enumerate([8.0, 16.0, 8.0]):
      ...     row = {"loss_scale": scale, "skipped_steps": int(step == 2)}
      ...     history.record(step, row)
      >>> ax = plot_history(history)
      >>> [line.get_label() for line in ax.lines]
      ['loss scale', 'skipped steps: 1']
    """
    if not isinstance(history, History):
        raise TypeError(
            f"history must be a History, got {type(history).__name__}. "
            "Make one with History(), and fill it with record(step, metrics(state))."
        )
    columns = {name: _floats(column) for name, column in history.columns.items()}
    scales = columns.get(f"{prefix}loss_scale")
    if scales is None:
        scales = np.exp2(columns.get(f"{prefix}log2_loss_scale", np.empty(0)))
    kept = np.flatnonzero(np.isfinite(scales) & (scales > 0))
    if not kept.size:
        raise ValueError(
            f"history has no row with {prefix + 'loss_scale'!r} to draw. It has "
            f"{len(history)} rows and the columns {list(columns)}. If all names have a "
            "prefix, pass it as prefix=."
        )
    missing = np.full(len(history), np.nan)
    applied, counts = (
        columns.get(prefix + name, missing)[kept]
        for name in ("last_step_applied", "skipped_steps")
    )
    steps, scales = history.steps[kept], scales[kept]
    skips = _skips_by_row(applied, counts)
    share = next((s for s in SHARES if prefix + s in columns), None)

    axes: Any = _drawing.get_axes(ax, height=3.6 if share is None else 4.8)
    marker = "o" if len(steps) == 1 else None
    style = {"color": BLUE, "linewidth": 1.5, "marker": marker, "label": "loss scale"}
    axes.step(steps, scales, where="post", **style)
    if skipped := np.flatnonzero(skips).tolist():
        # A row has the scale after its step; the step used that of the row before.
        before = scales[np.maximum(np.subtract(skipped, 1), 0)]
        style = {"color": "black", "markersize": 6, "linestyle": "none", "marker": "x"}
        label = f"skipped steps: {skips.sum():.0f}"
        axes.plot(steps[skipped], before, zorder=3, label=label, **style)
    axes.set_yscale("log", base=2)
    axes.minorticks_off()
    axes.set(xlabel="step", ylabel="loss scale")
    axes.xaxis.get_major_locator().set_params(integer=True)
    if len(steps) == 1:
        axes.set_xlim(steps[0] - 1, steps[0] + 1)
    axes.spines[["top", "right"]].set_visible(False)
    if share is not None:
        panel = _drawing.add_panel_below(axes)
        _draw_share(panel, history.steps, 100 * columns[prefix + share], share)
    lowest, highest = np.log2([scales.min(), scales.max()])
    entries = len(axes.get_legend_handles_labels()[0])
    _drawing.set_top(axes, lowest - 1, highest + 1, entries, log=True)
    _drawing.legend(axes)
    return axes


def plot_sweep(sweep: Any, *, ax: "Axes | None" = None) -> "Axes":
    """Draws what each loss scale loses, and the suggested scale.

    Args:
      sweep: A `ScaleSweep`, as `scale_sweep` returns it.
      ax: The matplotlib Axes to draw on; a new figure if None.

    Returns:
      The Axes. x is the scale, logarithmic, y is in percent. Scales that overflow are
      shaded, up to halfway to the next scale.

    Raises:
      ImportError: If matplotlib is not installed.
      TypeError: Under a transformation of JAX, such as `jax.jit`; if `sweep` is not a
        `ScaleSweep`, or `ax` is not an Axes.
      ValueError: If `sweep` has no scales, or they are not positive and finite.

    Examples:
      >>> import jax.numpy as jnp
      >>> from optax_lossscale.diagnostics import plot_sweep, scale_sweep
      >>> def loss_fn(params, batch):
      ...     return jnp.mean((params * batch).astype(jnp.float32))
      >>> sweep = scale_sweep(loss_fn, jnp.ones(3), jnp.ones((8, 3)))
      >>> print(plot_sweep(sweep).get_xlabel())
      loss scale
    """
    check_host("plot_sweep", sweep)
    fields = ("scales", "lost", "subnormal", "overflows", "suggested")
    if not all(hasattr(sweep, name) for name in fields):
        raise TypeError(
            f"sweep must be a ScaleSweep, as scale_sweep returns it, got a "
            f"{type(sweep).__name__}."
        )
    arrays = (np.asarray(getattr(sweep, name), np.float64) for name in fields)
    scales, lost, subnormal, overflows, suggested = arrays
    suggested = float(suggested)
    if not scales.size or not np.all((scales > 0) & (scales < np.inf)):
        raise ValueError(
            f"The scales must be positive and finite, and at least one, got {scales}."
        )
    order = np.argsort(scales)
    scales, lost, subnormal = scales[order], lost[order], subnormal[order]
    overflows = overflows[order] > 0
    lost, subnormal = (np.where(overflows, np.nan, 100 * y) for y in (lost, subnormal))

    axes: Any = _drawing.get_axes(ax)
    size = {"linewidth": 1.5, "markersize": 4}
    axes.plot(scales, lost, "o-", color=ORANGE, label="lost", **size)
    axes.plot(scales, subnormal, "s--", color=BLUE, label="subnormal", **size)
    axes.set_xscale("log", base=2)
    axes.minorticks_off()
    log2 = np.log2(scales)
    middle = (log2[1:] + log2[:-1]) / 2
    edges = np.concatenate([[log2[0] - 1], middle, [log2[-1] + 1]])
    label: str | None = "overflows"
    for first, last in _runs(overflows):
        start, stop = np.exp2(edges[[first, last + 1]])
        style = {"facecolor": "#E8E8E8", "edgecolor": "#BBBBBB", "hatch": "//"}
        axes.axvspan(start, stop, zorder=0, linewidth=0, label=label, **style)
        label = None
    low, high = edges[0], edges[-1]
    if 0 < suggested < np.inf:
        label = f"suggested: {_drawing.as_power(suggested)}"
        axes.axvline(
            suggested, color="black", linestyle=":", linewidth=1.5, label=label
        )
        low, high = min(low, np.log2(suggested) - 1), max(high, np.log2(suggested) + 1)
    axes.set_xlim(*np.exp2([low, high]))
    known = np.concatenate([lost, subnormal])
    entries = len(axes.get_legend_handles_labels()[0])
    _drawing.set_top(axes, 0, known[np.isfinite(known)].max(initial=0), entries)
    axes.set(xlabel="loss scale", ylabel="% of gradients")
    axes.spines[["top", "right"]].set_visible(False)
    _drawing.legend(axes)
    return axes


def _draw_share(axes: Any, steps: np.ndarray, percent: np.ndarray, name: str) -> None:
    """Draws a share over the steps, and its moving average if there are many rows."""
    known = np.isfinite(percent)
    steps, percent = steps[known], percent[known]
    width = len(steps) // WINDOWS
    color, marker = ORANGE, "o" if len(steps) == 1 else None
    if width >= SMALLEST_WINDOW:
        kernel = np.full(width, 1 / width)
        means = (np.convolve(x, kernel, "valid") for x in (steps, percent))
        label = f"{name}, mean over {width} rows"
        axes.plot(*means, color=ORANGE, linewidth=1.5, zorder=3, label=label)
        color = LIGHT_ORANGE
    axes.plot(steps, percent, color=color, linewidth=1, marker=marker, label=name)
    axes.set_ylabel(f"{name}, %")
    axes.spines[["top", "right"]].set_visible(False)
    _drawing.set_top(axes, 0, percent.max(initial=0), len(axes.lines))
    _drawing.legend(axes)


def _skips_by_row(applied: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Returns how many steps were skipped since the row before; nan means unknown."""
    skips = np.where(applied == 0, 1.0, 0.0)
    known = np.flatnonzero(np.isfinite(counts))
    skips[known[1:]] = np.maximum(skips[known[1:]], np.diff(counts[known]))
    return skips


def _runs(flags: np.ndarray) -> list[tuple[int, int]]:
    """Returns the first and the last index of every run of True."""
    change = np.diff(np.concatenate([[False], flags, [False]]).astype(int))
    first, last = np.flatnonzero(change == 1), np.flatnonzero(change == -1) - 1
    return list(zip(first.tolist(), last.tolist(), strict=True))


def _floats(column: np.ndarray) -> np.ndarray:
    """Returns a column as float64[rows], with nan where it is missing."""
    return np.ma.filled(np.ma.asarray(column).astype(np.float64), np.nan)
