"""A table of the runs, a summary in words, and a figure."""

from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator
from rich import box
from rich.console import Console
from rich.table import Column, Table

from examples.digits.train import (
    BY_HAND,
    DYNAMIC,
    FIXED,
    FLOAT32,
    POSITIVES,
    UNSCALED,
    Run,
    Way,
)
from optax_lossscale import diagnostics

GREEN = "#009E73"  # The color of `plot_exponents` after scaling.
LIGHT_BLUE = "#56B4E9"  # It can be read on dark backgrounds.
# Letters are large for telephones, and do not touch the edge.
STYLE: dict[Any, Any] = {"font.size": 16, "axes.titlesize": "medium"}
STYLE |= {"figure.constrained_layout.w_pad": 0.08}
TOLERANCE = 0.03  # Average precisions that differ by at most this much count as equal.
LEGEND = (
    "loss: in the last step. precision: the average precision on new patches. "
    "skipped: the number of skipped steps. scale: the last loss scale. zeros: the "
    "gradients of the hidden activations that are exactly zero."
)


def skips(run: Run) -> int:
    """Returns the number of skipped steps."""
    return int(run.records[-1]["skipped_steps"])


def print_report(runs: dict[Way, Run]) -> None:
    """Prints a table with a row for every way, then a summary in words."""
    titles = ("loss", "precision, %", "skipped", "scale", "zeros, %")
    columns = [Column(title, justify="right") for title in titles]
    table = Table("training", *columns, box=box.SIMPLE_HEAD)
    for way, run in runs.items():
        table.add_row(
            way.name,
            f"{run.column('loss')[-1]:.4f}",
            f"{100 * run.precision:.1f}",
            f"{skips(run)}",
            f"2^{run.column('log2_loss_scale')[-1]:g}",
            f"{100 * run.column('zeros').mean():.1f}",
        )
    console = Console(highlight=False)
    console.print(table)
    console.print(f"{LEGEND}\n\n{describe(runs)}")


def describe(runs: dict[Way, Run]) -> str:
    """Returns a summary of the runs in words."""
    precision = {way: run.precision for way, run in runs.items()}

    def verdict(way: Way) -> str:
        percent = f"({precision[way]:.1%})"
        if abs(precision[way] - precision[FLOAT32]) <= TOLERANCE:
            return f"matches float32 {percent}"
        if precision[way] < 0.2:
            return f"learns next to nothing {percent}"
        below = precision[way] < precision[FLOAT32]
        return f"{'falls short of' if below else 'exceeds'} float32 {percent}"

    if precision[FLOAT32] < 0.2:
        return (
            f"float32 itself reaches only {precision[FLOAT32]:.1%}, so this says "
            "nothing about float16: try more --steps."
        )
    repeats = runs[DYNAMIC].records[-1].get("retries")
    repeated = f" Repeated passes: {repeats}." if repeats else ""
    return (
        f"float32 reaches an average precision of {precision[FLOAT32]:.1%}; guessing "
        f"gives {POSITIVES:.1%}. Without loss scaling float16 {verdict(UNSCALED)}: "
        f"{runs[UNSCALED].column('zeros').mean():.1%} of the gradients of its hidden "
        f"activations are zero. With a fixed scale it {verdict(FIXED)}. With the "
        f"dynamic scale it {verdict(DYNAMIC)}, and skips {skips(runs[DYNAMIC])} of "
        f"{len(runs[DYNAMIC].histograms)} steps.{repeated} Cast by hand in place of "
        f"autocast, with the same scale, it {verdict(BY_HAND)}."
    )


def draw_figure(runs: dict[Way, Run], path: Path) -> None:
    """Draws the losses of all runs, and gradients of the dynamic one."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(9, 3.4), dpi=200, layout="constrained")
        left, right = figure.subplots(1, 2)
        draw_losses(runs, left)
        draw_gradients(runs[DYNAMIC], right)
        figure.savefig(path)


def color_of(way: Way) -> str:
    """Returns the color of a way in the style that is set, light or dark."""
    is_dark = mpl.rcParams["text.color"] == "white"
    return LIGHT_BLUE if is_dark and way == DYNAMIC else way.color


def draw_losses(runs: dict[Way, Run], axes: Axes) -> None:
    """Draws the losses; of those that coincide the later ones are thinner."""
    for way, run in runs.items():
        if way == BY_HAND:
            continue
        width = {FLOAT32: 9, FIXED: 4.5, DYNAMIC: 1.5}.get(way, 2.5)
        axes.semilogy(run.column("loss"), linewidth=width, color=color_of(way))
    axes.margins(y=0.13)
    axes.set(xlabel="step", ylabel="loss")
    axes.set_title("Training loss", loc="left", fontweight="bold")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_locator(NullLocator())
    axes.spines[["top", "right"]].set_visible(False)
    # Losses fall, so there is room above them on the right and below on the left.
    top = {"ha": "right", "va": "top", "transform": axes.transAxes}
    axes.text(1, 1, UNSCALED.name, color=color_of(UNSCALED), **top)
    for line, way in enumerate((DYNAMIC, FIXED, FLOAT32)):
        place = {"x": 0.03, "y": 0.05 + 0.13 * line, "transform": axes.transAxes}
        axes.text(**place, s=way.name, color=color_of(way))


def draw_gradients(run: Run, axes: Axes) -> None:
    """Draws the gradients of a step, with the shares that float16 has as zero."""
    step, scale = middle_step(run)
    histogram = run.histograms[step]
    diagnostics.plot_exponents(histogram, scale, ax=axes)
    axes.legend([], []).remove()  # Labels in line say more.
    text = f"not scaled:\n{flushed(histogram, 1):.1%} zero"
    axes.text(0.02, 0.97, text, va="top", transform=axes.transAxes)
    text = f"times $2^{{{np.log2(scale):g}}}$:\n{flushed(histogram, scale):.1%} zero"
    axes.text(0.54, 0.97, text, va="top", color=GREEN, transform=axes.transAxes)
    axes.set_title(f"Gradients in step {step + 1}", loc="left", fontweight="bold")
    axes.set(xlabel="magnitude", ylabel="% of gradients")
    axes.set_ylim(top=1.3 * axes.get_ylim()[1])


def middle_step(run: Run) -> tuple[int, float]:
    """Returns the middle one of the steps that were not skipped, and its scale."""
    states = [run.start, *run.records]
    applied = np.flatnonzero(run.column("last_step_applied"))
    step = int(applied[len(applied) // 2]) if len(applied) else 0
    # The states start with the initial one. A step that grows the scale has used that
    # before it, and one that was repeated has used that after it.
    return step, min(state["loss_scale"] for state in states[step : step + 2])


def flushed(histogram: diagnostics.ExponentHistogram, scale: float) -> float:
    """Returns the share that float16 rounds to zero after scaling."""
    exponents, counts, zeros, infs, nans = map(np.asarray, histogram)
    small = exponents + np.log2(scale) < -25
    return (zeros + counts[small].sum()) / (zeros + counts.sum() + infs + nans)
