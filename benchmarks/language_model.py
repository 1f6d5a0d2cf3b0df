"""Compares ways to train the language model: `python -m benchmarks.language_model`.

Trains the preset `tiny` of `examples.language_model` in float32, and in float16 without
loss scaling and with three rules, with three seeds, and two of these for longer. Then
traces the first step, to see which operations lose their gradients. Adds to
`results/language_model.json`. Arguments name some of these parts: `flushed`.
"""

import dataclasses
import functools
import linecache
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.progress import track

from benchmarks import report
from examples.language_model.config import PRESETS, Config
from examples.language_model.data import make_corpus
from examples.language_model.sharding import make_mesh
from examples.language_model.step import Trainer
from examples.language_model.train import train
from optax_lossscale.diagnostics import trace_numerics

RESULTS = report.RESULTS / "language_model.json"

# The settings of each way.
WAYS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32", "loss_scale": "none"},
    "float16, unscaled": {"loss_scale": "none"},
    "float16, fixed": {"loss_scale": "fixed"},
    "float16, dynamic": {"loss_scale": "dynamic"},
    "float16, headroom": {"loss_scale": "headroom"},
    "float16, unscaled, 150 steps": {"loss_scale": "none", "steps": 150},
    "float16, dynamic, 150 steps": {"loss_scale": "dynamic", "steps": 150},
}
# The loss scales at which the first step is traced: none, and the default.
SCALES = (1.0, 2.0**15)


def run(config: Config) -> dict[str, Any]:
    """Trains once, and returns what its logs say."""
    mesh = make_mesh(config.mesh, jax.devices())
    with tempfile.TemporaryDirectory() as folder:
        train(config, make_corpus(config), mesh, Path(folder))
        last = report.read_csv(Path(folder, "metrics.csv"))[-1]
    return {
        "perplexity": round(float(last["perplexity"]), 1),
        "skipped": int(last["skipped_steps"]),
        "loss_scale": float(last["loss_scale"]),
    }


def flushed() -> dict[str, dict[str, float]]:
    """Traces the first step, and returns the largest share of flushed gradients.

    Returns:
      By loss scale, then by line of the model: of the operations of the line's backward
      pass, the largest share of results that are zero in float16 and not in float32.
    """
    config = PRESETS["tiny"]
    trainer = Trainer(config, make_mesh("data", jax.devices()))
    state = trainer.init(jax.random.key(config.seed))
    batch = make_corpus(config).training_batch(0, config.batch_size)
    by_scale = {}
    for scale in SCALES:
        trace = trace_numerics(trainer.loss, state.params, batch, scale=scale)
        shares = by_scale[f"{scale:g}"] = {}
        for operation in trace.operations:
            if operation.phase == "backward" and operation.dtype == "float16":
                line = linecache.getline(operation.file, operation.line).strip()
                share = float(operation.output.flushed)
                shares[line] = max(shares.get(line, 0.0), share)
    return by_scale


def table(results: dict[str, Any]) -> str:
    """Returns a Markdown table of the runs."""
    cells = []
    for name in WAYS:
        last = [run["perplexity"] for run in results[name]["rows"]]
        skipped = np.mean([run["skipped"] for run in results[name]["rows"]])
        spread = f"{min(last):.0f} to {max(last):.0f}"
        cells.append([name, f"{np.mean(last):.0f}", spread, f"{skipped:.2g}"])
    header = ["training", "perplexity", "range of 3 seeds", "skipped steps"]
    return report.table(header, cells)


def flushed_table(results: dict[str, Any]) -> str:
    """Returns a Markdown table of the lines that lose most."""
    unscaled, scaled = results["flushed"]["rows"].values()
    worst = sorted(unscaled, key=lambda line: -unscaled[line])[:6]
    cells = [[f"`{x}`", f"{unscaled[x]:.0%}", f"{scaled[x]:.1%}"] for x in worst]
    header = ["backward pass of", "unscaled", "scaled by 2<sup>15</sup>"]
    return report.table(header, cells)


def trainings(way: str) -> list[dict[str, Any]]:
    """Trains in one way, with three seeds."""
    changed = functools.partial(dataclasses.replace, PRESETS["tiny"], **WAYS[way])
    return [run(changed(seed=seed)) for seed in track(range(3), way)]


PARTS: dict[str, Callable[[], Any]] = {"flushed": flushed}
PARTS |= {way: functools.partial(trainings, way) for way in WAYS}


def main() -> None:
    """Measures all parts, or those that are named, and writes the results."""
    results = report.measure_parts("benchmarks.language_model", __doc__, PARTS, RESULTS)
    print(table(results), flushed_table(results), sep="\n")


if __name__ == "__main__":
    main()
