"""Compares dtypes in reinforcement learning: `python -m benchmarks.grpo`.

Runs `examples.grpo` in three dtypes with three seeds, and bfloat16 once more where XLA
has to round as the program says. Takes an hour on two cores; stopped, it goes on if it
gets the same `--out`. Writes `results/grpo.json` and its figure.
"""

import argparse
import csv
import itertools
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import track

from benchmarks import report
from examples.grpo.config import Config

RESULTS = report.RESULTS / "grpo.json"
FIGURE = RESULTS.with_suffix(".png")
AS_WRITTEN = "--xla_allow_excess_precision=false"
# The dtype and XLA's flags of each way, and its color.
WAYS = {
    "float32": ("float32", "", "#808080"),
    "float16": ("float16", "", "#0072B2"),
    "bfloat16": ("bfloat16", "", "#D55E00"),
    f"bfloat16, `{AS_WRITTEN}`": ("bfloat16", AS_WRITTEN, "#E69F00"),
}
SEEDS = 3
EVERY = 5  # Steps in a point of a curve.
CURVES = ("reward", "mean_difference")


def run(way: str, seed: int, out: Path) -> dict[str, Any]:
    """Trains once, and returns what its logs say of the reinforcement learning."""
    dtype, flags, _ = WAYS[way]
    command = [sys.executable, "-m", "examples.grpo", "--dtype", dtype]
    subprocess.run(
        [*command, "--seed", str(seed), "--out", str(out)],
        env=os.environ | {"XLA_FLAGS": flags},
        stdout=subprocess.DEVNULL,
        check=True,
    )
    with (out / "metrics.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["reward"]]
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    curves = {
        name: np.array(columns[name], float).reshape(-1, EVERY).mean(1)
        for name in CURVES
    }
    return {
        **{name: [float(f"{x:.3g}") for x in curve] for name, curve in curves.items()},
        "largest_difference": max(map(float, columns["largest_difference"])),
        "clipped": float(np.mean(np.array(columns["clipped"], float))),
        "skipped": int(columns["skipped_steps"][-1]),
        "retries": int(columns["retries"][-1] or 0),
    }


def table(found: dict[str, Any]) -> str:
    """Returns a Markdown table of the runs: means, and ranges of the seeds."""
    cells = []
    for way, runs in found["runs"].items():
        apart = differences(found, way)
        largest = max(run["largest_difference"] for run in runs)
        clipped, repeated = (
            np.mean([run[name] for run in runs]) for name in ("clipped", "retries")
        )
        last = [run["reward"][-1] for run in runs]
        row = [f"{np.mean(apart):.1e}", f"{min(apart):.1e} to {max(apart):.1e}"]
        row += [f"{largest:.0e}", f"{clipped:.1%}"]
        row += [f"{np.mean(last):.2f}", f"{min(last):.2f} to {max(last):.2f}"]
        cells.append([way, *row, f"{repeated:g}"])
    header = ["computed in", "mean difference", f"range of {SEEDS} seeds", "largest"]
    header += ["clipped", "reward", f"range of {SEEDS} seeds", "repeated"]
    return report.table(header, cells)


def differences(found: dict[str, Any], way: str) -> list[float]:
    """Returns the mean difference of each seed."""
    return [float(np.mean(run["mean_difference"])) for run in found["runs"][way]]


def plot(found: dict[str, Any]) -> None:
    """Draws the differences and the rewards of all seeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.2), layout="constrained")
    panels: Any = figure.subplots(1, 2)
    for way, runs in found["runs"].items():
        label, color = way.replace("`", ""), WAYS[way][-1]
        for axes, name in zip(panels, reversed(CURVES), strict=True):
            curves = np.array([run[name] for run in runs])
            steps = (np.arange(curves.shape[1]) + 0.5) * EVERY
            axes.plot(steps, curves.mean(0), color=color, label=label)
            axes.fill_between(
                steps, curves.min(0), curves.max(0), color=color, alpha=0.2
            )
    panels[0].set_title("Log-probabilities: sampler - trainer", fontsize="medium")
    panels[0].set_yscale("log")
    panels[1].set_title("Reward: share of right answers", fontsize="medium")
    panels[1].legend(fontsize="x-small")
    for axes in panels:
        axes.set_xlabel("step of reinforcement learning")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(FIGURE, dpi=150)


def main() -> None:
    """Runs the whole experiment, and writes its results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.grpo")
    parser.add_argument("--out", type=Path, help="folder of the runs")
    out = parser.parse_args().out or Path(tempfile.mkdtemp())
    runs = {way: [] for way in WAYS}
    for seed, (i, way) in track(
        list(itertools.product(range(SEEDS), enumerate(WAYS))), "training"
    ):
        runs[way].append(run(way, seed, out / f"{i}-{seed}"))
    settings = {"seeds": SEEDS, "steps": Config.steps}
    found = {**report.about(), "settings": settings, "runs": runs}
    print(table(found))
    report.save(RESULTS, found)
    plot(found)


if __name__ == "__main__":
    main()
