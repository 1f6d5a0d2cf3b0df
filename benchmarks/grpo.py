"""Compares dtypes in reinforcement learning: `python -m benchmarks.grpo`.

Runs `examples.grpo` in three dtypes with three seeds, and bfloat16 once more where XLA
has to round as the program says. Takes a quarter of an hour on two cores; stopped, it
goes on if it gets the same `--out`. Writes `results/grpo.json`. A word chooses the
dtypes with it: `python -m benchmarks.grpo float32 --steps 10`. `python -m
docs._mkdocs.figures` draws the results.
"""

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

RESULTS = report.RESULTS / "grpo.json"
AS_WRITTEN = "--xla_allow_excess_precision=false"
# The dtype and XLA's flags of each way.
WAYS = {
    "float32": ("float32", ""),
    "float16": ("float16", ""),
    "bfloat16": ("bfloat16", ""),
    f"bfloat16, `{AS_WRITTEN}`": ("bfloat16", AS_WRITTEN),
}
SEEDS = 3
EVERY = 5  # Steps in a point of a curve.
CURVES = ("mean_difference", "reward")


def run(way: str, seed: int, steps: int, out: Path) -> dict[str, Any]:
    """Trains once, and returns what its logs say of the reinforcement learning."""
    dtype, flags = WAYS[way]
    command = [sys.executable, "-m", "examples.grpo", "--dtype", dtype]
    command += ["--seed", str(seed), "--steps", str(steps), "--out", str(out)]
    subprocess.check_output(command, env=os.environ | {"XLA_FLAGS": flags})
    rows = report.read_csv(out / "metrics.csv")
    rows = rows[np.isfinite(rows["reward"])]
    curves = {name: rows[name].reshape(-1, EVERY).mean(1) for name in CURVES}
    return {
        **{name: [float(f"{x:.3g}") for x in curve] for name, curve in curves.items()},
        "largest_difference": rows["largest_difference"].max(),
        "clipped": rows["clipped"].mean(),
        "skipped": int(rows["skipped_steps"][-1]),
        "retries": int(np.nan_to_num(rows["retries"][-1])),
    }


def table(results: dict[str, Any]) -> str:
    """Returns a Markdown table of the runs: means, and ranges of the seeds."""
    cells = []
    for way, runs in results["runs"].items():
        apart = differences(results, way)
        largest = max(run["largest_difference"] for run in runs)
        clipped = np.mean([run["clipped"] for run in runs])
        repeated = np.mean([run["retries"] for run in runs])
        last = [run["reward"][-1] for run in runs]
        row = [f"{np.mean(apart):.1e}", f"{min(apart):.1e} to {max(apart):.1e}"]
        row += [f"{largest:.0e}", f"{clipped:.1%}"]
        row += [f"{np.mean(last):.2f}", f"{min(last):.2f} to {max(last):.2f}"]
        cells.append([way, *row, f"{repeated:.0f}"])
    header = ["computed in", "mean difference", f"range of {SEEDS} seeds", "largest"]
    header += ["clipped", "reward", f"range of {SEEDS} seeds", "repeated"]
    return report.table(header, cells)


def differences(results: dict[str, Any], way: str) -> list[float]:
    """Returns the mean difference of each seed."""
    return [float(np.mean(run["mean_difference"])) for run in results["runs"][way]]


def main() -> None:
    """Trains, and writes the results."""
    parser = report.parser("benchmarks.grpo", __doc__)
    parser.add_argument("word", nargs="?", default="", help="of the dtypes to train in")
    text = "Train for so many steps (default: %(default)s)."
    parser.add_argument("--steps", type=int, default=100, metavar="N", help=text)
    text = "Keep the runs in this folder."
    parser.add_argument("--out", type=Path, metavar="FOLDER", help=text)
    options = parser.parse_args()
    out = options.out or Path(tempfile.mkdtemp())
    ways = {way: i for i, way in enumerate(WAYS) if options.word in way}
    runs = {way: [] for way in ways}
    cases = list(itertools.product(range(SEEDS), ways.items()))
    for seed, (way, i) in track(cases, "training"):
        runs[way].append(run(way, seed, options.steps, out / f"{i}-{seed}"))
    results = report.load(RESULTS) | report.about()
    results["runs"] |= runs
    print(table(results))
    report.save(RESULTS, results)


if __name__ == "__main__":
    main()
