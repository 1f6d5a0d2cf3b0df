"""Compares ways to train the language model: `python -m experiments.language_model`.

Trains the preset `tiny` of `examples.language_model` in float32, and in float16 without
loss scaling and with three rules, with three seeds. Then traces the first step, to see
which operations lose their gradients. Writes `results/language_model.json` and
`docs/language_model.png`.
"""

import argparse
import csv
import dataclasses
import linecache
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import Progress

from benchmarks import report
from examples.language_model.config import PRESETS, Config
from examples.language_model.data import Corpus, make_corpus
from examples.language_model.sharding import make_mesh
from examples.language_model.step import Trainer
from examples.language_model.train import train
from optax_lossscale import diagnostics

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "experiments" / "results" / "language_model.json"
FIGURE = ROOT / "docs" / "language_model.png"

# The settings of each way, and its color.
WAYS: dict[str, tuple[dict[str, str], str]] = {
    "float32": ({"dtype": "float32", "loss_scale": "none"}, "#B8B8B8"),
    "float16, unscaled": ({"loss_scale": "none"}, "#D55E00"),
    "float16, fixed": ({"loss_scale": "fixed"}, "#CC79A7"),
    "float16, dynamic": ({"loss_scale": "dynamic"}, "#0072B2"),
    "float16, headroom": ({"loss_scale": "headroom"}, "#009E73"),
}
EVERY = 3  # steps between the losses that are kept
# The loss scales at which the first step is traced: none, and the default.
SCALES = (1.0, 2.0**15)


def run(config: Config, corpus: Corpus, out: Path) -> dict[str, Any]:
    """Trains once, and returns what its logs say."""
    train(config, corpus, make_mesh(config.mesh, jax.devices()), out)
    with (out / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    return {
        "loss": {
            row["step"]: round(float(row["loss"]), 3)
            for row in rows
            if int(row["step"]) % EVERY == 0
        },
        "perplexity": round(float(rows[-1]["perplexity"]), 1),
        "skipped": int(float(rows[-1]["skipped_steps"])),
        "loss_scale": float(rows[-1]["loss_scale"]),
    }


def flushed(config: Config) -> dict[str, dict[str, float]]:
    """Traces the first step, and returns the largest share of flushed gradients.

    Returns:
      By loss scale, then by line of the model: of the operations of the line's backward
      pass, the largest share of results that are zero in float16 and not in float32.
    """
    trainer = Trainer(config, make_mesh("data", jax.devices()))
    state = trainer.init(jax.random.key(config.seed))
    batch = make_corpus(config).training_batch(0, config.batch_size)
    found = {}
    for scale in SCALES:
        trace = diagnostics.trace_numerics(
            trainer.loss, state.params, batch, scale=scale
        )
        shares = found[f"{scale:g}"] = {}
        for operation in trace.operations:
            if operation.phase == "backward" and operation.dtype == "float16":
                line = linecache.getline(operation.file, operation.line).strip()
                share = float(operation.output.flushed)
                shares[line] = max(shares.get(line, 0.0), share)
    return found


def compare(config: Config, seeds: int) -> dict[str, Any]:
    """Runs the whole experiment, with a progress bar if run in a terminal."""
    found: dict[str, Any] = {
        **report.about(),
        "settings": dataclasses.asdict(config),
        "runs": {name: [] for name in WAYS},
    }
    console, hidden = Console(stderr=True), not sys.stderr.isatty()
    with (
        tempfile.TemporaryDirectory() as folder,
        Progress(console=console, transient=True, disable=hidden) as progress,
    ):
        bar = progress.add_task("", total=seeds * len(WAYS))
        for seed in range(seeds):
            corpus = make_corpus(dataclasses.replace(config, seed=seed))
            for name, (changes, _) in WAYS.items():
                progress.update(bar, description=f"{name}, seed {seed}")
                changed = dataclasses.replace(config, seed=seed, **changes)
                made = run(changed, corpus, Path(folder) / f"{name} {seed}")
                found["runs"][name].append(made)
                progress.advance(bar)
                if hidden:
                    last = made["perplexity"]
                    print(f"{name}, seed {seed}: perplexity {last}", flush=True)
    return found


def table(found: dict[str, Any]) -> str:
    """Returns a Markdown table of the runs."""
    cells = []
    for name, runs in found["runs"].items():
        last = [run["perplexity"] for run in runs]
        skipped = np.mean([run["skipped"] for run in runs])
        spread = f"{min(last):.0f} to {max(last):.0f}"
        cells.append([name, f"{np.mean(last):.0f}", spread, f"{skipped:g}"])
    header = ["training", "perplexity", "range of 3 seeds", "skipped steps"]
    return report.table(header, cells)


def flushed_table(found: dict[str, Any]) -> str:
    """Returns a Markdown table of the lines that lose most."""
    unscaled, scaled = found["flushed"].values()
    worst = sorted(unscaled, key=lambda line: -unscaled[line])[:6]
    cells = [[f"`{x}`", f"{unscaled[x]:.0%}", f"{scaled[x]:.1%}"] for x in worst]
    return report.table(
        ["backward pass of", "unscaled", "scaled by 2<sup>15</sup>"], cells
    )


def plot(found: dict[str, Any]) -> Figure:
    """Plots the loss of every way, as the mean over the seeds."""
    figure = Figure(figsize=(7, 3.4), layout="constrained")
    axes = figure.subplots()
    for name, (_, color) in WAYS.items():
        losses = [list(run["loss"].values()) for run in found["runs"][name]]
        steps = list(map(int, found["runs"][name][0]["loss"]))
        width = 5 if name == "float32" else 1.6
        # Two lines in the same place, with dashes in turn.
        dashes = {"float16, dynamic": (0, (4, 8)), "float16, headroom": (6, (4, 8))}
        style = dashes.get(name, "-")
        mean = np.mean(losses, axis=0)
        axes.plot(steps, mean, color=color, lw=width, ls=style, label=name)
    axes.set(xlabel="step", ylabel="training loss")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return figure


def main() -> None:
    """Parses the arguments, runs the experiment and writes its results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, help="steps of each run")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each way")
    parser.add_argument(
        "--out", type=Path, default=RESULTS, help="the JSON file to write"
    )
    options = parser.parse_args()
    config = PRESETS["tiny"]
    if options.steps:
        config = dataclasses.replace(config, steps=options.steps)
    found = compare(config, options.seeds)
    print(table(found))
    found["flushed"] = flushed(config)
    print(flushed_table(found))
    report.save(options.out, found)
    if options.out == RESULTS:
        plot(found).savefig(FIGURE, dpi=120)


if __name__ == "__main__":
    main()
