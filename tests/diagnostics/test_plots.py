"""What the figures show."""

import csv
import re
import sys

import jax
import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
import optax
import pytest
from helpers import INF, NAN

from optax_lossscale import LossScaleOptimizer
from optax_lossscale.diagnostics import (
    ExponentHistogram,
    metrics,
    plot_exponents,
    plot_history,
)

mpl.use("agg")
plt = pytest.importorskip("matplotlib.pyplot")


@pytest.fixture(autouse=True)
def figures():
    plt.close("all")
    settings = dict(mpl.rcParams)
    yield
    # What was drawn can be drawn: warnings are errors. No global settings are left.
    try:
        for number in plt.get_fignums():
            plt.figure(number).canvas.draw()
    finally:
        plt.close("all")
    assert dict(mpl.rcParams) == settings


def histogram(counts, zeros=0, infs=0, nans=0):
    """Makes a histogram, in arrays as they come from a device."""
    every = np.arange(-149, 128)
    filled = np.array([counts.get(e, 0) for e in every], np.float32)
    numbers = (jnp.float32(n) for n in (zeros, infs, nans))
    return ExponentHistogram(jnp.array(every, jnp.int32), jnp.array(filled), *numbers)


def stairs(ax):
    """Returns the values and the edges of what is drawn."""
    return [p.get_data()[:2] for p in ax.patches if hasattr(p, "get_data")]


def spans(ax):
    """Returns the left and right ends of shaded areas."""
    areas = [p for p in ax.patches if isinstance(p, mpl.patches.Rectangle)]
    return [(p.get_x(), p.get_x() + p.get_width()) for p in areas]


class TestExponents:
    COUNTS = {-30: 1, -20: 2, -19: 4, 3: 1}

    def test_before_and_after(self):
        ax = plot_exponents(histogram(self.COUNTS, zeros=2), 2.0**15)
        (before, edges), (after, scaled) = stairs(ax)
        assert edges.tolist() == list(range(-30, 5))
        assert scaled.tolist() == list(range(-15, 20))
        assert before.tolist() == after.tolist()
        drawn = {e: p for e, p in zip(edges.tolist(), before, strict=False) if p}
        assert drawn == {-30: 10, -20: 20, -19: 40, 3: 10}
        assert ax.get_legend().get_title().get_text() == "exactly zero: 20%"
        low, high = ax.get_xlim()
        assert low <= -30 < 19 <= high

    @pytest.mark.parametrize(
        ("dtype", "zero", "normal", "largest"),
        [
            ("float16", -25, -14, 65520),
            (jnp.bfloat16, -134, -126, 2.0**128 * (1 - 2.0**-9)),
            ("float8_e4m3fn", -10, -6, 464),
        ],
    )
    def test_shades_the_range_of_a_dtype(self, dtype, zero, normal, largest):
        below, limit = np.float32([2.0**zero, largest])
        assert below.astype(dtype) == 0
        assert (below * np.float32(1.01)).astype(dtype) > 0
        assert np.isfinite(np.nextafter(limit, np.float32(0)).astype(dtype))
        ax = plot_exponents(histogram(self.COUNTS), 1.0, dtype=dtype)
        low, high = ax.get_xlim()
        edges = [(low, zero), (zero, normal), (np.log2(largest), high)]
        np.testing.assert_allclose(spans(ax), edges)

    def test_gradients_themselves(self):
        grads = {"w": jnp.array([0.0, 2.0**-30, 2.0**-30, 1.5]), "n": None}
        optimizer = LossScaleOptimizer(optax.sgd(0.5), 2.0)
        (percent, edges), _ = stairs(plot_exponents(grads, optimizer.init(grads)))
        assert edges[[0, -1]].tolist() == [-30, 1]
        assert percent[[0, -1]].tolist() == [50, 25]

    @pytest.mark.parametrize(
        "grads", [None, np.zeros(2, np.float32), np.array([INF, NAN], np.float32)]
    )
    def test_nothing_to_draw(self, grads):
        ax = plot_exponents(grads, 2.0)
        assert (len(spans(ax)), stairs(ax)) == (3, [])

    def test_refuses_a_scale_on_the_device_that_is_no_scale(self):
        with pytest.raises(ValueError, match=r"loss scale of state .* got -1\.0"):
            plot_exponents(histogram({0: 1}), jnp.float32(-1))
        assert not plt.get_fignums()


def curves(ax):
    """Returns the points of each line of scales."""
    lines = [line for line in ax.lines if line.get_drawstyle() == "steps-post"]
    return [line.get_xydata().tolist() for line in lines]


def crosses(ax, marker="x"):
    """Returns where the crosses are, and how many steps the legend counts."""
    lines = [line for line in ax.lines if line.get_marker() == marker]
    counts = [int(re.findall(r": (\d+)", line.get_label())[0]) for line in lines]
    points = [line.get_xydata().tolist() for line in lines]
    return list(zip(points, counts, strict=True))


def records_of(scales, **columns):
    """Makes records of every tenth step; None stands for what a record lacks."""
    columns = {"step": range(0, 10 * len(scales), 10), "loss_scale": scales, **columns}
    rows = zip(*columns.values(), strict=True)
    pairs = [zip(columns, row, strict=True) for row in rows]
    return [{name: x for name, x in row if x is not None} for row in pairs]


@pytest.fixture(scope="module")
def run():
    """Returns the records of a run, as `metrics` returns them in a compiled step."""
    optimizer = LossScaleOptimizer(
        optax.sgd(0.1), initial_scale=2.0**20, dynamic_growth_steps=2
    )

    @jax.jit
    def step(state, factor):
        _, state = optimizer.update(factor * jnp.ones(3), state)
        return state, metrics(state, "a/")

    state, records = optimizer.init(jnp.ones(3)), []
    for i, factor in enumerate([NAN, NAN, 1, 1, INF, 1]):
        state, record = step(state, jnp.float32(factor))
        records.append({"step": i, "loss": jnp.float32(1), **record})
    return records


class TestPlotHistory:
    def check_run(self, records):
        ax = plot_history(records, prefix="a/")
        exponents = [19, 18, 18, 19, 18, 18]
        assert curves(ax) == [[[step, 2.0**e] for step, e in enumerate(exponents)]]
        # At the scale that overflowed, or above the curve: no record has the first one.
        points = [[0, pytest.approx(2.0**19.5)], [1, 2.0**19], [4, 2.0**19]]
        assert crosses(ax) == [(points, 3)]
        low, high = ax.get_ylim()
        assert low < 2.0**18 < 2.0**19 < high

    def test_records_on_the_device(self, run):
        self.check_run(run)

    def test_records_from_csv(self, run, tmp_path):
        with (tmp_path / "run.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, run[0].keys())
            writer.writeheader()
            writer.writerows(run)
        with (tmp_path / "run.csv").open(newline="") as file:
            self.check_run(csv.DictReader(file))

    SKIPS = {
        "between records": (
            [16.0, 8.0, 8.0, 2.0, 4.0],
            {"skipped_steps": [5, 6, 6, 9, 9], "last_step_applied": [1, 1, 1, 0, 1]},
            ([[0, pytest.approx(2**4.5)], [10, 16.0], [30, 8.0]], 9),
        ),
        "flags alone": (
            [4.0, 4.0, 2.0, 1.0],
            {"last_step_applied": [False, True, False, False]},
            ([[0, pytest.approx(2**2.5)], [20, 4.0], [30, 2.0]], 3),
        ),
        "counts that begin later or anew": (
            [8.0] * 7,
            {"skipped_steps": [None, "", 4, None, 6, 0, 1]},
            ([[20, 8.0], [40, 8.0], [60, 8.0]], 7),
        ),
    }

    @pytest.mark.parametrize(("scales", "columns", "marks"), SKIPS.values(), ids=SKIPS)
    def test_skipped_steps_are_marked(self, scales, columns, marks):
        assert crosses(plot_history(records_of(scales, **columns))) == [marks]

    def test_repeated_passes(self):
        columns = {"last_step_applied": [True, False, True], "retries": [0, 3, 3]}
        ax = plot_history(records_of([16.0, 2.0, 2.0], **columns))
        assert crosses(ax) == [([[10, 16.0]], 1)]
        assert crosses(ax, "|") == [([[10, 16.0]], 3)]

    def test_missing_names(self):
        records = records_of([4.0, None, "", NAN, 8.0], other=[1, 2, 3, 4, 5])
        ax = plot_history(records)
        assert curves(ax) == [[[0, 4.0], [40, 8.0]]]
        for record in records:
            del record["step"]
        assert curves(plot_history(records)) == [[[0, 4.0], [4, 8.0]]]

    def test_of_many_members(self):
        scales = np.array([[4.0, 8.0], [2.0, 16.0], [2.0, 16.0]])
        counts = np.array([[0, 0], [1, 0], [1, 2]])
        ax = plot_history(records_of(jnp.array(scales), skipped_steps=counts))
        steps = [0, 10, 20]
        assert curves(ax) == [
            [list(point) for point in zip(steps, x, strict=True)] for x in scales.T
        ]
        assert crosses(ax) == [([[10, 4.0], [20, 16.0]], 3)]

    @pytest.mark.parametrize("rows", [[], [{}], [{"a/loss_scale": 1.0}]])
    def test_refuses_records_without_a_scale(self, rows):
        with pytest.raises(ValueError, match=r"has a 'loss_scale'.*prefix="):
            plot_history(rows)
        assert not plt.get_fignums()

    def test_refuses_what_is_no_list_of_records(self):
        for records in ({"loss_scale": [1.0]}, ["loss_scale"], [[1.0]]):
            with pytest.raises(TypeError, match="records must be a list of dict"):
                plot_history(records)
        for value in ("[4. 2.]", "high", object(), 1j):
            with pytest.raises(ValueError, match="'loss_scale' of a record must be a"):
                plot_history(records_of([value]))


@pytest.mark.parametrize(
    "draw",
    [
        lambda **kw: plot_exponents(histogram({0: 1}), 8.0, **kw),
        lambda **kw: plot_history(records_of([8.0], last_step_applied=[0]), **kw),
    ],
)
class TestEveryPlot:
    def test_draws_on_the_given_axes_or_makes_a_figure(self, draw):
        _, (left, right) = plt.subplots(1, 2)
        assert draw(ax=left) is left
        assert not right.has_data()
        assert len(plt.get_fignums()) == 1
        assert draw().get_figure().number == 2

    def test_says_how_to_install_matplotlib(self, draw, monkeypatch):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "matplotlib", None)
            with pytest.raises(
                ImportError, match=r"pip install 'optax-lossscale\[plot\]'"
            ):
                draw()
