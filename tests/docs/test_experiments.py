"""The tables of the experiments, on the pages that show them."""

import json

import jax
import jax.numpy as jnp
import pytest
from helpers import ROOT

from experiments import language_model, need
from experiments.tasks import detector, perceptron

NEED = json.loads(need.RESULTS.read_text())
LANGUAGE_MODEL = json.loads(language_model.RESULTS.read_text())

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(autouse=True)
def standard_dtype_promotion(strict_dtype_promotion):
    """Lets the experiments promote dtypes."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.parametrize(
    ("path", "table"),
    [
        ("docs/guide/do-you-need-it.md", need.table(NEED)),
        ("docs/guide/do-you-need-it.md", language_model.table(LANGUAGE_MODEL)),
        ("docs/guide/do-you-need-it.md", language_model.flushed_table(LANGUAGE_MODEL)),
    ],
)
def test_pages_show_the_committed_results(path, table):
    assert table in (ROOT / path).read_text()


def test_readme_tells_the_perplexities():
    rows = language_model.table(LANGUAGE_MODEL).splitlines()[2:]
    in_float32, unscaled, *scaled = (row.split(" | ")[1] for row in rows)
    assert set(scaled) == {scaled[0]}
    text = " ".join((ROOT / "README.md").read_text().split())
    assert f"{in_float32} in float32, {unscaled} in float16 without" in text
    assert f"[{scaled[0]} with it]" in text


def test_the_figure_has_all_ways():
    (axes,) = language_model.plot(LANGUAGE_MODEL).axes
    assert [line.get_label() for line in axes.lines] == list(language_model.WAYS)


def test_a_training_lowers_the_loss():
    (way,) = need.WAYS.keys() - {"float32", "float16, unscaled"}
    few, many = (need.final_loss(perceptron(steps), way, 0) for steps in (10, 60))
    assert many < few < jnp.inf


def test_the_detector_starts_at_its_prior():
    assert 0.02 < need.final_loss(detector(10, 256), "float32", 0) < 0.2
