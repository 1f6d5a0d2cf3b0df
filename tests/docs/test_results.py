"""The pages show the committed results of the benchmarks."""

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import pytest
from helpers import ROOT

from benchmarks import grpo, need, pages, report
from benchmarks.tasks import detector, perceptron
from docs._mkdocs import figures


@pytest.mark.parametrize("path", pages.PAGES, ids=lambda path: path.name)
def test_tables_are_those_of_the_results(path):
    text = path.read_text()
    assert report.replace_tables(text, pages.tables()) == text


def test_readme_tells_the_costs():
    def cells(table):
        return [row.strip("| ").split(" | ")[1:] for row in table.splitlines()[2:]]

    files = pages.CPU, report.RESULTS / "compiled.json"
    rows = cells(report.summary_table(*map(report.load, files)))
    steps, update, trainer, _ = (row[:3] for row in rows)
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"`minimize` takes {min(steps)} to {max(steps)} times as long" in readme
    assert f"`update` up to {max(update)}, in a trainer" in readme
    assert f"in a trainer up to {max(trainer)}. " in readme
    more = [round(100 * float(ratio) - 100) for row in rows[:3] for ratio in row[-2:]]
    assert f"moves {min(more)} to {max(more)}% more bytes" in readme
    table = report.compiling_table(report.load(report.RESULTS / "compiling.json"))
    ours = cells(table[: table.index("| flax")])
    most = max(max(row[:-1]) for row in ours)
    assert f"takes up to {most} times as long for a TPU or GPU" in readme
    assert f"up to {max(row[-1] for row in ours)} times for a CPU" in readme


def test_page_tells_how_far_sampler_and_trainer_are_apart():
    found = report.load(grpo.RESULTS)
    _, half, *others = (np.mean(grpo.differences(found, way)) for way in grpo.WAYS)
    text = (ROOT / "docs/guide/float16-or-bfloat16.md").read_text()
    text = " ".join(text.split())
    default, as_written = (f"{other / half:.0f} times" for other in others)
    pair = f"{others[1]:.0e} against {half:.0e}".replace("e-0", "e-")
    assert f"bfloat16 differs {as_written} as much as float16: {pair}." in text
    assert f"leaves out some roundings of bfloat16, and it is {default}.)" in text
    assert f"**bfloat16 differs {as_written} as much as float16**" in text
    assert f"**XLA's default makes that {default}.**" in text


def test_figure_shows_the_results(tmp_path):
    figures.draw_grpo(tmp_path / "grpo.png")
    panels = plt.gcf().axes
    plt.close("all")
    ways = report.load(grpo.RESULTS)["runs"].values()
    for name, axes in zip(grpo.CURVES, panels, strict=True):
        for line, runs in zip(axes.lines, ways, strict=True):
            means = np.mean([run[name] for run in runs], axis=0)
            np.testing.assert_array_equal(line.get_ydata(), means)
    assert (tmp_path / "grpo.png").stat().st_size > 10_000


@pytest.mark.exhaustive
def test_a_training_lowers_the_loss():
    (way,) = need.WAYS.keys() - {"float32", "float16, unscaled"}
    with jax.numpy_dtype_promotion("standard"):
        few, many = (need.final_loss(perceptron(steps), way, 0) for steps in (10, 60))
        assert many < few < jnp.inf
        # The detector starts at its prior.
        assert 0.02 < need.final_loss(detector(10, 256), "float32", 0) < 0.2
