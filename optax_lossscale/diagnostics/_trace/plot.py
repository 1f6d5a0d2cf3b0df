"""The picture of a trace: the exponents of each operation, forward above backward."""

from typing import TYPE_CHECKING, Any

import numpy as np

from optax_lossscale.diagnostics import _drawing
from optax_lossscale.diagnostics._trace import equations
from optax_lossscale.diagnostics._trace.operations import NumericOperation

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLUE, ORANGE, GRAY, RED = _drawing.BLUE, _drawing.ORANGE, "#9A9A9A", "#E0383E"
# Exponents to show beyond the largest and the smallest.
MARGIN = 6.0


def plot_numerics(
    trace: Any, *, axes: "tuple[Axes, Axes] | None" = None
) -> "tuple[Axes, Axes]":
    """Draws the range of each operation, in the forward and in the backward pass.

    Args:
      trace: A `NumericsTrace`, as `trace_numerics` returns it.
      axes: Two matplotlib Axes, for the forward and the backward pass; a new figure if
        None.

    Returns:
      The two Axes. x is the operation, in order of execution, y the exponent. A bar
      goes from the smallest to the largest magnitude; those of half precision are blue,
      others gray. A line shows the largest magnitude in float32. Where numbers of
      `trace.dtype` are zero, subnormal or overflow is shaded.

    Raises:
      ImportError: If matplotlib is not installed.
      TypeError: If `trace` is not a `NumericsTrace`, or `axes` are not two Axes.

    Examples:
      >>> import jax.numpy as jnp
      >>> from optax_lossscale import diagnostics
      >>> def loss_fn(w):
      ...     return jnp.sum(jnp.square(w.astype(jnp.float16))).astype(jnp.float32)
      >>> trace = diagnostics.trace_numerics(loss_fn, jnp.array([1.0, 2.0]))
      >>> forward, backward = diagnostics.plot_numerics(trace)
      >>> print(backward.get_xlabel())
      operation
    """
    if not hasattr(trace, "operations"):
        raise TypeError(
            "trace must be a NumericsTrace, as trace_numerics returns it, got a "
            f"{type(trace).__name__}."
        )
    forward, backward = _get_axes(axes)
    low, high = _limits(trace)
    for ax, phase in ((forward, "forward"), (backward, "backward")):
        chosen = [x for x in trace.operations if x.phase == phase]
        _shade(ax, trace.dtype, low, high)
        _draw(ax, chosen, low, high)
        ax.set(xlim=(-1, len(chosen)), ylim=(low, high), ylabel=f"{phase}, magnitude")
        ax.spines[["top", "right"]].set_visible(False)
    backward.set_xlabel("operation")
    handles = {}
    for ax in (backward, forward):
        handles |= dict(zip(*reversed(ax.get_legend_handles_labels()), strict=True))
    forward.legend(
        handles.values(), handles.keys(), fontsize="small", loc="lower left", ncols=3,
        bbox_to_anchor=(0, 1.02), borderaxespad=0, frameon=False,
    )  # fmt: skip
    return forward, backward


def _get_axes(axes):
    if axes is None:
        axes = _drawing.get_axes(None, rows=2, size=(9, 6))
    if not isinstance(axes, tuple | list | np.ndarray) or len(axes) != 2:
        raise TypeError("axes must be two matplotlib Axes, or None for a new figure.")
    return tuple(map(_drawing.get_axes, axes))


def _exponents(operations: list[NumericOperation], name: str) -> np.ndarray:
    """Returns log2 of a magnitude of each operation; nan if that is zero."""
    found = np.array([getattr(x.output, name) for x in operations], np.float64)
    return np.log2(np.where(found > 0, found, np.nan))


def _limits(trace: Any) -> tuple[float, float]:
    """Returns the exponents to show: the range of the dtype, and what leaves it."""
    flushed, _, overflow = _drawing.boundaries(trace.dtype)
    smallest = np.nanmin([flushed, *_exponents(trace.operations, "smallest")])
    largest = np.nanmax([overflow, *_exponents(trace.operations, "float32_largest")])
    low = max(smallest, flushed - 3 * MARGIN) - MARGIN
    return low, min(largest, overflow + 8 * MARGIN) + MARGIN


def _shade(ax: Any, dtype: str, low: float, high: float) -> None:
    flushed, normal, overflow = _drawing.boundaries(dtype)
    areas = (
        (low, flushed, (ORANGE, 0.2), "zero"),
        (flushed, normal, (ORANGE, 0.08), "subnormal"),
        (overflow, high, (ORANGE, 0.2), "overflow"),
    )
    for start, stop, color, name in areas:
        ax.axhspan(start, stop, facecolor=color, zorder=0, linewidth=0)
        ax.text(
            1.005, (start + stop) / 2, name, transform=ax.get_yaxis_transform(),
            fontsize="small", va="center",
        )  # fmt: skip
    ax.set_yticks(sorted({round(x) for x in (flushed, normal, 0, overflow)}))
    ax.yaxis.set_major_formatter("$2^{{{x:.0f}}}$")


def _draw(ax: Any, chosen: list[NumericOperation], low: float, high: float) -> None:
    bottom = np.maximum(_exponents(chosen, "smallest"), low)
    top = np.maximum(_exponents(chosen, "largest"), bottom + 0.2)
    is_half = np.array([equations.is_half(x.dtype) for x in chosen])
    width = float(np.clip(300 / max(len(chosen), 1), 0.6, 4))
    kinds = [(is_half, BLUE, "half precision"), (~is_half, GRAY, "other dtypes")]
    for is_shown, color, label in kinds:
        (index,) = np.nonzero(is_shown & ~np.isnan(top))
        if index.size:
            ax.vlines(index, bottom[index], top[index], color=color, linewidth=width,
                      label=label)  # fmt: skip
    wide = _exponents(chosen, "float32_largest")
    ax.plot(wide, color=_drawing.ink(), linewidth=0.8, label="largest in float32")
    bad = [i for i, x in enumerate(chosen) if not x.output.is_finite]
    if bad:
        ax.plot(bad, [high - 1] * len(bad), "x", color=RED, label="inf or nan",
                markersize=4, clip_on=False)  # fmt: skip
    lost = [i for i, x in enumerate(chosen) if x.output.flushed >= 0.01]
    if lost:
        ax.plot(lost, [low + 1] * len(lost), "v", color=ORANGE, markersize=4,
                label="flushed to zero", clip_on=False)  # fmt: skip
