"""The pages show the committed results of the benchmarks."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import by_hand, grpo, guards, need, pages, report
from benchmarks.tasks import detector, perceptron


@pytest.mark.parametrize("path", pages.PAGES, ids=lambda path: path.name)
def test_numbers_are_those_of_the_results(path):
    assert pages.updated(path) == path.read_text()


# What follows from a format or a formula.
OTHER_FIGURES = {"do-you-need-it.md": {"0.05", "0.4"}}
GUIDE = sorted(pages.ROOT.glob("docs/guide/*.md"))


@pytest.mark.parametrize("path", [pages.README, *GUIDE], ids=lambda path: path.name)
def test_each_measured_figure_is_that_of_a_row(path):
    code = r"```.*?```|<!--.*?-->|^\|.*?$"
    prose = re.sub(code, "", path.read_text(), flags=re.M | re.S)
    figure = r"(?<![\w.`*])\d+\.\d+(?=%|,| and| to| times| MB| GB| ms)"
    told = re.findall(pages.NUMBER, " ".join(pages.sentences_of(path)))
    others = OTHER_FIGURES.get(path.name, set())
    assert set(re.findall(figure, prose)) - set(told) == others


def test_the_page_of_autocast_by_hand_shows_its_results():
    assert by_hand.page() == by_hand.PAGE.read_text()


def test_numbers_are_written_wherever_lines_end():
    page = "In float16 it takes 1.5\ntimes (2e-3) as long."
    sentence = "float16 it takes 12 times (3e-10) as"
    wanted = "In float16 it takes 12\ntimes (3e-10) as long."
    assert pages.fill(page, sentence) == wanted
    with pytest.raises(ValueError, match="must say once"):
        pages.fill(page, "it took 12 times")


def test_the_figure_shows_its_results(tmp_path):
    import matplotlib.pyplot as plt

    from docs._mkdocs import figures

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
@pytest.mark.usefixtures("standard_dtype_promotion")
@pytest.mark.parametrize("wrap", [guards.skipping, guards.guarded])
def test_the_table_of_guards_is_right_about_us(wrap):
    train = guards.make_training(wrap)
    assert guards.judge(train, "inf gradients, finite loss", seed=0)["same bits"]
    applied = guards.judge(train, "one spike of 100 times", seed=0)["applied"]
    assert applied == (wrap is guards.skipping)


@pytest.mark.exhaustive
def test_a_training_lowers_the_loss():
    (way,) = need.WAYS.keys() - {"float32", "float16, unscaled"}
    with jax.numpy_dtype_promotion("standard"):
        few, many = (need.final_loss(perceptron(steps), way, 0) for steps in (10, 60))
        assert many < few < jnp.inf
        # The detector starts at its prior.
        assert 0.02 < need.final_loss(detector(10, 256), "float32", 0) < 0.2
