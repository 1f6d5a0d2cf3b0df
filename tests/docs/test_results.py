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
    files = pages.CPU, report.RESULTS / "compiled.json"
    table = report.summary_table(*map(report.load, files))
    rows = [row.strip("| ").split(" | ")[1:] for row in table.splitlines()[2:]]
    (mlp, transformer), update, trainer, _ = (row[:2] for row in rows)
    compiling = max(row[2] for row in rows)
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"`minimize` takes {transformer} to {mlp} times as long" in readme
    assert f"`update` up to {max(update)}, in a trainer" in readme
    assert f"in a trainer up to {max(trainer)}. On GPU" in readme
    more = [round(100 * float(ratio) - 100) for row in rows[:3] for ratio in row[-2:]]
    assert f"for a transformer up to {compiling} times" in readme
    assert f"moves {min(more)} to {max(more)}% more bytes" in readme


def test_page_tells_how_far_sampler_and_trainer_are_apart():
    found = report.load(grpo.RESULTS)
    _, half, *others = (np.mean(grpo.differences(found, way)) for way in grpo.WAYS)
    text = (ROOT / "docs/guide/float16-or-bfloat16.md").read_text()
    text = " ".join(text.split())
    default, as_written = (f"{other / half:.0f} times" for other in others)
    first = f"{others[0]:.0e} in bfloat16 and {half:.0e} in float16"
    first = f"{first} ({default}; {as_written} if XLA leaves out no rounding)"
    assert f"it is {first.replace('e-0', 'e-')}, and the rewards are the same" in text
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
