"""A table of the runs, a summary in words, and a figure."""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.table import Column, Table

from examples.digits.train import DYNAMIC, FIXED, FLOAT32, POSITIVES, UNSCALED, Run, Way
from optax_lossscale import diagnostics

TOLERANCE = 0.03  # Average precisions that differ by at most this much count as equal.
LEGEND = (
    "precision: the average precision on new patches. skipped: the number of skipped "
    "steps. scale: the last loss scale. zeros: the gradients of the hidden activations "
    "that are exactly zero. seconds: the time of the run, without compilation."
)


def skips(run: Run) -> int:
    """Returns the number of skipped steps."""
    return int(run.records[-1]["skipped_steps"])


def print_report(runs: dict[Way, Run]) -> None:
    """Prints a table with a row for every way, then a summary in words."""
    titles = ("precision, %", "skipped", "scale", "zeros, %", "seconds")
    columns = [Column(title, justify="right") for title in titles]
    table = Table("training", *columns, box=box.SIMPLE_HEAD)
    for way, run in runs.items():
        table.add_row(
            way.name,
            f"{100 * run.precision:.1f}",
            f"{skips(run)}",
            f"2^{run.column('log2_loss_scale')[-1]:g}",
            f"{100 * run.column('zeros').mean():.1f}",
            f"{run.seconds:.1f}",
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
    repeated = f" Repeated backward passes: {repeats}." if repeats else ""
    return (
        f"float32 reaches an average precision of {precision[FLOAT32]:.1%}; guessing "
        f"gives {POSITIVES:.1%}. Without loss scaling float16 {verdict(UNSCALED)}: "
        f"{runs[UNSCALED].column('zeros').mean():.1%} of the gradients of its hidden "
        f"activations are zero. With a fixed scale it {verdict(FIXED)}. With the "
        f"dynamic scale it {verdict(DYNAMIC)}, and skips {skips(runs[DYNAMIC])} of "
        f"{len(runs[DYNAMIC].histograms)} steps.{repeated}"
    )


def draw_figure(runs: dict[Way, Run], path: Path) -> None:
    """Draws all losses, and the scale and gradients of the dynamic run."""
    figure = Figure(figsize=(9, 6.4), dpi=140, layout="constrained")
    axes = figure.subplot_mosaic("ls;gg", height_ratios=[1, 0.85])

    for way, run in runs.items():
        width, dashes = 5 if way == FLOAT32 else 2, "--" if way == DYNAMIC else "-"
        style = {"color": way.color, "label": way.name, "linestyle": dashes}
        axes["l"].semilogy(run.column("loss"), linewidth=width, **style)
    axes["l"].set(xlabel="step", ylabel="loss")
    axes["l"].spines[["top", "right"]].set_visible(False)
    axes["l"].legend(frameon=False)

    run = runs[DYNAMIC]
    states = [run.start, *run.records]
    diagnostics.plot_history(states, ax=axes["s"])
    # Draw the last step that was applied, or the last one if every step was skipped.
    applied = run.column("last_step_applied")
    last = len(applied) - 1 - np.argmax(applied[::-1])
    # The states start with the initial one. A step that grows the scale has used that
    # before it, and one that was repeated has used that after it.
    scale = min(state["loss_scale"] for state in states[last : last + 2])
    diagnostics.plot_exponents(run.histograms[last], scale, ax=axes["g"])

    axes["l"].set_title("Training loss", loc="left", fontweight="bold")
    axes["s"].set_title("Dynamic loss scale", loc="left", fontweight="bold")
    title = f"Gradients of the hidden activations, step {last + 1}"
    axes["g"].set_title(title, loc="left", fontweight="bold")
    figure.savefig(path)
