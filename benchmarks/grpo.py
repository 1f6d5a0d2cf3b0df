"""Compares dtypes in reinforcement learning: `python -m benchmarks.grpo`.

Runs `examples.grpo` in three dtypes with three seeds, and bfloat16 once more where XLA
has to round as the program says. Takes a quarter of an hour on two cores; stopped, it
goes on if it gets the same `--out`. Writes `results/grpo.json`. To draw it, run
`python -m docs._mkdocs.figures`.
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


def run(way: str, seed: int, out: Path) -> dict[str, Any]:
    """Trains once, and returns what its logs say of the reinforcement learning."""
    dtype, flags = WAYS[way]
    command = [sys.executable, "-m", "examples.grpo", "--dtype", dtype]
    command += ["--seed", str(seed), "--out", str(out)]
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


def table(found: dict[str, Any]) -> str:
    """Returns a Markdown table of the runs: means, and ranges of the seeds."""
    cells = []
    for way, runs in found["runs"].items():
        apart = differences(found, way)
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


def differences(found: dict[str, Any], way: str) -> list[float]:
    """Returns the mean difference of each seed."""
    return [float(np.mean(run["mean_difference"])) for run in found["runs"][way]]


def main() -> None:
    """Runs the whole experiment, and writes its results."""
    parser = report.parser("benchmarks.grpo", __doc__)
    text = "Keep the runs in this folder."
    parser.add_argument("--out", type=Path, metavar="FOLDER", help=text)
    out = parser.parse_args().out or Path(tempfile.mkdtemp())
    runs = {way: [] for way in WAYS}
    cases = list(itertools.product(range(SEEDS), enumerate(WAYS)))
    for seed, (i, way) in track(cases, "training"):
        runs[way].append(run(way, seed, out / f"{i}-{seed}"))
    found = {**report.about(), "runs": runs}
    print(table(found))
    report.save(RESULTS, found)


if __name__ == "__main__":
    main()
