"""What the figures show."""

import itertools
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
import optax
import pytest
from helpers import INF, NAN, exhaustive_but

from optax_lossscale import LossScaleOptimizer
from optax_lossscale.diagnostics import (
    History,
    plot_exponents,
    plot_history,
    plot_sweep,
)

mpl.use("agg")
plt = pytest.importorskip("matplotlib.pyplot")


class Histogram(NamedTuple):
    exponents: object
    counts: object
    zeros: object
    infs: object
    nans: object


class Sweep(NamedTuple):
    scales: object
    lost: object
    subnormal: object
    overflows: object
    suggested: object


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


PLACES = ["own", "small", "title", "subfigure"]


@pytest.fixture(params=exhaustive_but(PLACES, ["title"]))
def ax(request):
    if request.param == "own":
        return None
    figure = plt.figure(figsize=(5, 3), layout="constrained")
    if request.param == "subfigure":
        return figure.subfigures(1, 2)[0].subplots()
    ax = figure.subplots()
    if request.param == "title":
        ax.set_title("a long title of the figure, longer than is wide")
    return ax


def histogram(counts, zeros=0, infs=0, nans=0):
    """Makes a histogram, in arrays as they come from a device."""
    every = np.arange(-149, 128)
    filled = np.array([counts.get(e, 0) for e in every], np.float32)
    numbers = (jnp.float32(n) for n in (zeros, infs, nans))
    return Histogram(jnp.array(every, jnp.int32), jnp.array(filled), *numbers)


def labels(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


def stairs(ax):
    """Returns by label the values and the edges of what is drawn."""
    steps = [
        p for p in ax.patches if hasattr(p, "get_data") and p.get_label()[0] != "_"
    ]
    return {p.get_label(): (*p.get_data()[:2], p.get_fill()) for p in steps}


def spans(ax):
    """Returns the left and right ends of shaded areas."""
    areas = [p for p in ax.patches if isinstance(p, mpl.patches.Rectangle)]
    return [(p.get_x(), p.get_x() + p.get_width()) for p in areas]


def tick_labels(axis):
    axis.get_figure().canvas.draw()
    low, high = sorted(axis.get_view_interval())
    pairs = zip(axis.get_majorticklocs(), axis.get_majorticklabels(), strict=True)
    return {float(at): text.get_text() for at, text in pairs if low <= at <= high}


def assert_room_for_legend(ax, highest):
    """Checks that the legend stands above what is drawn."""
    ax.get_figure(root=True).canvas.draw()
    bottom = ax.get_legend().get_window_extent().y0
    assert ax.transData.transform((ax.get_xlim()[0], highest))[1] <= bottom


class TestExponents:
    COUNTS = {-30: 1, -20: 2, -19: 4, 3: 1}

    def test_before_and_after(self, ax):
        drawn = plot_exponents(histogram(self.COUNTS, zeros=2), 2.0**15, ax=ax)
        assert ax is None or drawn is ax
        (before, edges, before_filled), (after, scaled, after_filled) = [
            stairs(drawn)[name]
            for name in ("before scaling", "after scaling by $2^{15}$")
        ]
        assert not before_filled
        assert after_filled
        assert edges.tolist() == list(range(-30, 5))
        assert scaled.tolist() == list(range(-15, 20))
        assert before.tolist() == after.tolist()
        percent = dict(zip(edges.tolist(), before.tolist(), strict=False))
        assert {e: p for e, p in percent.items() if p} == {
            -30: 10,
            -20: 20,
            -19: 40,
            3: 10,
        }
        assert drawn.get_xlabel() == "magnitude, and the range of float16"
        assert drawn.get_ylabel() == "% of gradients"
        assert labels(drawn) == ["before scaling", "after scaling by $2^{15}$"]
        assert drawn.get_legend().get_title().get_text() == "exactly zero 20 %"
        low, high = drawn.get_xlim()
        assert low <= -30
        assert high >= 19
        assert_room_for_legend(drawn, 40)

    @pytest.mark.parametrize(
        ("dtype", "zero", "normal", "largest"),
        [
            ("float16", -25, -14, 65520),
            (jnp.bfloat16, -134, -126, 2.0**128 * (1 - 2.0**-9)),
            ("float8_e4m3fn", -10, -6, 464),
            ("float8_e5m2", -17, -14, 61440),
        ],
    )
    def test_range_of_dtype(self, dtype, zero, normal, largest):
        below, limit = np.float32([2.0**zero, largest])
        assert below.astype(dtype) == 0
        assert (below * np.float32(1.01)).astype(dtype) > 0
        assert np.isfinite(np.nextafter(limit, np.float32(0)).astype(dtype))
        with np.errstate(over="ignore"):
            assert not np.isfinite(np.nextafter(limit, np.float32(INF)).astype(dtype))
        ax = plot_exponents(histogram(self.COUNTS), 1.0, dtype=dtype)
        low, high = ax.get_xlim()
        highest = np.log2(largest)
        edges = [low, zero, normal, highest, high]
        np.testing.assert_allclose(spans(ax), list(itertools.pairwise(edges)))
        [top] = ax.child_axes
        names = [text.get_text().strip() for text in top.get_xticklabels()]
        assert names == ["zero", "subnormal", "normal", "overflow"]
        middles = np.add(edges[1:], edges[:-1]) / 2
        np.testing.assert_allclose(top.get_xticks(), middles)
        assert jnp.dtype(dtype).name in ax.get_xlabel()
        ticks = tick_labels(ax.xaxis)
        assert ticks[normal].replace("\N{MINUS SIGN}", "-") == f"$2^{{{normal}}}$"
        assert round(highest) in ticks
        assert np.diff(sorted(ticks)).min() > (high - low) / 12

    def test_scales(self):
        state = LossScaleOptimizer(optax.sgd(0.1), initial_scale=2.0**7).init(
            jnp.ones(3)
        )
        for scale, text in (
            (state, "$2^{7}$"),
            (jnp.float32(0.25), "$2^{-2}$"),
            (1, "$2^{0}$"),
            (1000.0, "1000"),
            (2.0**126, "$2^{126}$"),
        ):
            ax = plot_exponents(histogram(self.COUNTS), scale)
            assert labels(ax)[1] == f"after scaling by {text}"
        _, edges, _ = stairs(plot_exponents(histogram({0: 1}), 1000.0))[
            "after scaling by 1000"
        ]
        np.testing.assert_allclose(edges, np.log2([1000.0, 2000.0]))

    @pytest.mark.parametrize(
        ("counts", "others", "text"),
        [
            ({}, (0, 0, 0), "no gradients"),
            ({}, (7, 0, 0), "exactly zero 100 %"),
            ({}, (0, 1, 3), "inf 25 %, nan 75 %"),
            ({0: 1e6}, (0, 0, 1), "nan <0.01 %"),
            ({0: 8}, (0, 0, 0), ""),
            ({-149: 5, 127: 5}, (10, 0, 0), "exactly zero 50 %"),
            ({127: 5}, (0, 10, 5), "inf 50 %, nan 25 %"),
        ],
    )
    def test_numbers_without_a_magnitude(self, counts, others, text, ax):
        ax = plot_exponents(histogram(counts, *others), 2.0**15, ax=ax)
        assert ax.get_legend().get_title().get_text() == text
        assert len(stairs(ax)) == (2 if counts else 0)
        assert len(spans(ax)) == 4

    def test_gradients_themselves(self):
        grads = {"w": jnp.array([0.0, 2.0**-30, 2.0**-30, 1.5]), "n": None}
        ax = plot_exponents(grads, 2.0)
        percent, edges, _ = stairs(ax)["before scaling"]
        assert edges[[0, -1]].tolist() == [-30, 1]
        assert percent[[0, -1]].tolist() == [50, 25]
        assert ax.get_legend().get_title().get_text() == "exactly zero 25 %"

    @pytest.mark.parametrize("scale", [0.0, -1.0, NAN, INF, 2.0**200])
    def test_refuses_scales(self, scale):
        with pytest.raises(ValueError, match=r"state must be (at least|finite)"):
            plot_exponents(histogram({0: 1}), scale)
        with pytest.raises(ValueError, match="scale must be positive and finite"):
            plot_exponents(histogram({0: 1}), jnp.float32(-1))
        assert not plt.get_fignums()

    def test_refuses_other_arguments(self):
        with pytest.raises(ValueError, match="dtype must be"):
            plot_exponents(histogram({0: 1}), 1.0, dtype="float32")
        with pytest.raises(ValueError, match="LossScaleOptimizerState"):
            plot_exponents(histogram({0: 1}), {"a": jnp.ones(3)})
        with pytest.raises(TypeError, match="plot_exponents is for the host"):
            jax.jit(lambda h: plot_exponents(h, 1.0))(histogram({0: 1}))


def history_of(scales, prefix="", step=lambda k: 10 * k, **columns):
    """Makes a history; None stands for what a row lacks."""
    history = History()
    for k, values in enumerate(zip(scales, *columns.values(), strict=True)):
        pairs = zip(("loss_scale", *columns), values, strict=True)
        row = {prefix + name: x for name, x in pairs if x is not None}
        history.record(step(k), row)
    return history


def curve(ax):
    [line] = [line for line in ax.lines if line.get_label() == "loss scale"]
    assert line.get_drawstyle() == "steps-post"
    return list(zip(*map(np.ndarray.tolist, line.get_data()), strict=True))


def panel_of(ax):
    """Returns the panel below."""
    [panel] = [other for other in ax.get_figure().axes if other is not ax]
    return panel


def crosses(ax):
    """Returns where the crosses are, and the text of the legend."""
    found = [line for line in ax.lines if line.get_marker() == "x"]
    for line in found:
        x, y = map(np.ndarray.tolist, line.get_data())
        return list(zip(x, y, strict=True)), line.get_label()
    return [], None


class TestHistory:
    def test_real_run(self, ax):
        optimizer = LossScaleOptimizer(
            optax.sgd(0.1), initial_scale=2.0**20, dynamic_growth_steps=2
        )
        params, history = jnp.ones(3), History()
        state = optimizer.init(params)
        for step, factor in enumerate([NAN, NAN, 1, 1, INF, 1]):
            _, state = optimizer.update(params * factor, state)
            names = ("last_step_applied", "skipped_steps")
            row = {name: getattr(state, name) for name in names}
            row["loss_scale"] = optimizer.current_loss_scale(state)
            history.record(step, row)
        ax = plot_history(history, ax=ax)
        exponents = [19, 18, 18, 19, 18, 18]
        assert curve(ax) == [(step, 2.0**e) for step, e in enumerate(exponents)]
        # At the scale that overflowed, which for the first row is not known.
        points, label = crosses(ax)
        assert points == [(0, 2.0**19), (1, 2.0**19), (4, 2.0**19)]
        assert label == "skipped steps: 3"
        assert (ax.get_xlabel(), ax.get_ylabel()) == ("step", "loss scale")
        assert labels(ax) == ["loss scale", "skipped steps: 3"]
        assert ax.get_yscale() == "log"
        assert_room_for_legend(ax, 2.0**19)

    def test_ticks_are_powers_of_two(self):
        ax = plot_history(history_of([2.0**15, 2.0**15, 2.0**18]))
        ticks = tick_labels(ax.yaxis)
        assert ticks.keys() >= {2.0**15, 2.0**16, 2.0**17, 2.0**18}
        assert all("2^{" in text for text in ticks.values())
        assert all(tick == int(tick) for tick in tick_labels(ax.xaxis))

    @pytest.mark.parametrize("exponent", [-126, 0, 126])
    def test_constant_scale_at_the_bounds(self, exponent, ax):
        ax = plot_history(history_of([2.0**exponent] * 3), ax=ax)
        low, high = ax.get_ylim()
        assert 0 < low < 2.0**exponent < high < INF
        assert 2.0**exponent in tick_labels(ax.yaxis)

    def test_counts_what_was_skipped_between_rows(self):
        ax = plot_history(
            history_of(
                [16.0, 8.0, 8.0, 2.0, 4.0],
                skipped_steps=[5, 6, 6, 9, 9],
                last_step_applied=[True, True, True, False, True],
            )
        )
        points, label = crosses(ax)
        assert points == [(10, 16.0), (30, 8.0)]
        assert label == "skipped steps: 4"

    def test_flags_alone(self):
        applied = [False, True, False, False]
        history = history_of([4.0, 4.0, 2.0, 1.0], last_step_applied=applied)
        points, label = crosses(plot_history(history))
        assert points == [(0, 4.0), (20, 4.0), (30, 2.0)]
        assert label == "skipped steps: 3"

    def test_counts_alone_that_begin_later_or_anew(self):
        counts = [None, None, 4, None, 6, 0, 1]
        history = history_of([8.0] * 7, skipped_steps=counts)
        points, label = crosses(plot_history(history))
        assert points == [(40, 8.0), (60, 8.0)]
        assert label == "skipped steps: 3"

    def test_thinned(self):
        history = History(capacity=4)
        for k in range(100):
            history.record(k, {"loss_scale": 2.0, "skipped_steps": k})
        assert crosses(plot_history(history))[1] == "skipped steps: 99"

    def test_nothing_skipped(self):
        history = history_of([4.0, 4.0], last_step_applied=[True] * 2)
        assert labels(plot_history(history)) == ["loss scale"]

    def test_all_skipped(self, ax):
        history = history_of([4.0] * 9, last_step_applied=[False] * 9)
        assert len(crosses(plot_history(history, ax=ax))[0]) == 9

    @pytest.mark.parametrize("share", ["underflow", "flushed", "zero"])
    def test_share_in_a_second_panel(self, share, ax):
        columns = {share: [0.5, None, 0.25, NAN], "other": [1.0] * 4}
        history = history_of([4.0, None, 4.0, 8.0], "a/", **columns)
        ax = plot_history(history, prefix="a/", ax=ax)
        assert curve(ax) == [(0, 4.0), (20, 4.0), (30, 8.0)]
        panel = panel_of(ax)
        [line] = panel.lines
        assert [x.tolist() for x in line.get_data()] == [[0, 20], [50, 25]]
        assert (ax.get_xlabel(), ax.get_ylabel()) == ("", "loss scale")
        assert (panel.get_xlabel(), panel.get_ylabel()) == ("step", f"{share}, %")
        assert panel.get_ylim()[0] == 0
        assert (labels(ax), labels(panel)) == (["loss scale"], [share])
        assert_room_for_legend(ax, 8.0)
        assert_room_for_legend(panel, 50)
        # One below the other, with the same x axis.
        upper, lower = (axes.get_window_extent() for axes in (ax, panel))
        assert lower.y1 < upper.y0
        assert (lower.x0, lower.x1) == pytest.approx((upper.x0, upper.x1))
        assert ax.get_xlim() == panel.get_xlim()
        assert not any(text.get_visible() for text in ax.get_xticklabels())

    def test_share_in_axes_at_any_place(self):
        figure = plt.figure()
        ax = figure.add_axes((0.25, 0.5, 0.5, 0.25))
        plot_history(history_of([4.0, 8.0], zero=[0.5, 0.25]), ax=ax)
        above, below = ax.get_position(), panel_of(ax).get_position()
        np.testing.assert_allclose((*below.min, *above.max), (0.25, 0.5, 0.75, 0.75))
        assert above.y0 > below.y1

    def test_many_rows_have_a_moving_average(self):
        shares = np.arange(100) / 100
        ax = plot_history(history_of([4.0] * 99, zero=shares[:99]))
        assert labels(panel_of(ax)) == ["zero"]
        panel = panel_of(plot_history(history_of([4.0] * 100, zero=shares)))
        assert labels(panel) == ["zero, mean over 5 rows", "zero"]
        mean, rows = panel.lines
        np.testing.assert_allclose(mean.get_ydata(), np.arange(96) + 2)
        np.testing.assert_allclose(mean.get_xdata(), 10 * np.arange(96) + 20)
        np.testing.assert_allclose(rows.get_ydata(), np.arange(100))
        assert mean.get_zorder() > rows.get_zorder()

    def test_first_of_several_shares_is_drawn(self):
        history = history_of([4.0], zero=[0.5], flushed=[0.25])
        assert labels(panel_of(plot_history(history))) == ["flushed"]

    @pytest.mark.parametrize("values", [[0.0, 0.0], [NAN, NAN], [NAN, 1.0]])
    def test_degenerate_share(self, values, ax):
        ax = plot_history(history_of([4.0, 8.0], zero=values), ax=ax)
        assert labels(panel_of(ax)) == ["zero"]

    def test_one_row_is_seen(self, ax):
        history = history_of([4.0], last_step_applied=[False], zero=[0.5])
        ax = plot_history(history, ax=ax)
        assert ax.lines[0].get_marker() == "o"
        assert curve(ax) == [(0, 4.0)]
        assert crosses(ax)[0] == [(0, 4.0)]
        assert ax.get_xlim() == (-1, 1)

    def test_log2_will_do(self):
        history = History()
        history.record(0, {"log2_loss_scale": 3.0})
        history.record(4, {"log2_loss_scale": jnp.int32(4)})
        assert curve(plot_history(history)) == [(0, 8.0), (4, 16.0)]

    @pytest.mark.parametrize("rows", [[], [{}], [{"a/loss_scale": 1.0}]])
    def test_refuses_a_history_without_a_scale(self, rows):
        history = History()
        for step, row in enumerate(rows):
            history.record(step, row)
        with pytest.raises(ValueError, match=r"no row with 'loss_scale'.*prefix="):
            plot_history(history)
        assert not plt.get_fignums()

    def test_refuses_what_is_no_history(self):
        with pytest.raises(TypeError, match="history must be a History, got dict"):
            plot_history({"loss_scale": [1.0]})


def sweep(overflows, suggested=2.0**3, scales=None, **changes):
    n = len(overflows)
    scales = 2.0 ** np.arange(n) if scales is None else scales
    lost = np.where(overflows, NAN, 1 / np.arange(1, n + 1))
    made = Sweep(scales, lost, lost / 4, np.array(overflows), suggested)
    return Sweep(*(jnp.asarray(x) for x in made._replace(**changes)))


class TestSweep:
    def test_lines(self, ax):
        ax = plot_sweep(sweep([False] * 4 + [True] * 2, 4.0), ax=ax)
        lost, subnormal, suggested = ax.lines
        assert lost.get_xdata().tolist() == [1, 2, 4, 8, 16, 32]
        expected = [100, 50, 100 / 3, 25, NAN, NAN]
        np.testing.assert_allclose(lost.get_ydata(), expected, rtol=1e-6)
        np.testing.assert_allclose(
            subnormal.get_ydata(), np.divide(expected, 4), rtol=1e-6
        )
        assert suggested.get_xdata() == [4.0, 4.0]
        assert [line.get_label() for line in ax.lines] == labels(ax)[:2] + labels(ax)[
            3:
        ]
        texts = ["lost", "subnormal", "overflows", "suggested: $2^{2}$"]
        assert labels(ax) == texts
        # Told apart without colors.
        styles = {(line.get_linestyle(), line.get_marker()) for line in ax.lines}
        assert len(styles) == 3
        np.testing.assert_allclose(spans(ax), [(2.0**3.5, 2.0**6)])
        np.testing.assert_allclose(ax.get_xlim(), (0.5, 2.0**6))
        assert ax.get_ylim()[0] == 0
        assert 100 in tick_labels(ax.yaxis)
        assert max(tick_labels(ax.yaxis)) == 100
        assert (ax.get_xlabel(), ax.get_ylabel()) == ("loss scale", "% of gradients")
        assert tick_labels(ax.xaxis)[4.0] == "$\\mathdefault{2^{2}}$"
        assert_room_for_legend(ax, 100)

    def test_each_run_of_overflows_is_shaded_once_labeled(self):
        ax = plot_sweep(sweep([True, False, True, True, False]))
        edges = [(0.5, 2**0.5), (2**1.5, 2**3.5)]
        np.testing.assert_allclose(spans(ax), edges)
        assert labels(ax).count("overflows") == 1

    def test_what_overflows_is_not_drawn(self):
        given = sweep([False, True], subnormal=np.array([0.5, 0.5]))
        assert np.isnan(plot_sweep(given).lines[1].get_ydata()).tolist() == [
            False,
            True,
        ]

    def test_any_order(self):
        straight = sweep([False, False, True, True])
        turned = Sweep(*(x[::-1] if x.ndim else x for x in straight))
        for line, other in zip(
            plot_sweep(straight).lines, plot_sweep(turned).lines, strict=True
        ):
            np.testing.assert_array_equal(line.get_data(), other.get_data())

    @pytest.mark.parametrize("overflows", [[True] * 4, [True], [False], [False] * 4])
    @pytest.mark.parametrize("suggested", [2.0**-126, 2.0**126, 1.0, 3.0, NAN])
    def test_degenerate(self, overflows, suggested):
        ax = plot_sweep(sweep(overflows, suggested))
        assert ("overflows" in labels(ax)) == overflows[0]
        low, high = ax.get_xlim()
        if np.isnan(suggested):
            assert len(ax.lines) == 2
        else:
            assert low < suggested < high

    def test_refuses_what_is_no_sweep(self):
        with pytest.raises(TypeError, match=r"sweep must be a ScaleSweep.*a dict"):
            plot_sweep({"scales": [1.0]})
        for scales in ([], [0.0], [NAN], [INF], [-1.0]):
            given = sweep([False] * len(scales), scales=np.array(scales))
            with pytest.raises(ValueError, match="scales must be positive"):
                plot_sweep(given)
        with pytest.raises(TypeError, match="plot_sweep is for the host"):
            jax.jit(plot_sweep)(sweep([False]))
        assert not plt.get_fignums()


DRAWINGS = {
    "plot_exponents": lambda **kw: plot_exponents(histogram({0: 1}), 8.0, **kw),
    "plot_history": lambda **kw: plot_history(history_of([8.0]), **kw),
    "plot_sweep": lambda **kw: plot_sweep(sweep([False, True]), **kw),
}


@pytest.mark.parametrize("name", DRAWINGS)
class TestEveryPlot:
    def test_makes_a_figure_of_its_own(self, name):
        plt.figure()
        ax = DRAWINGS[name]()
        assert len(plt.get_fignums()) == 2
        figure = ax.get_figure()
        assert figure.get_size_inches().tolist() == [7, 3.6]
        assert (
            figure.get_layout_engine().__class__.__name__ == "ConstrainedLayoutEngine"
        )

    def test_adds_no_figure_to_the_given_axes(self, name):
        _, (left, right) = plt.subplots(1, 2)
        assert DRAWINGS[name](ax=left) is left
        assert len(plt.get_fignums()) == 1
        assert not right.has_data()

    def test_refuses_what_is_no_axes(self, name):
        _, axes = plt.subplots(1, 2)
        with pytest.raises(
            TypeError, match="ax must be a matplotlib Axes, got ndarray"
        ):
            DRAWINGS[name](ax=axes)

    def test_says_how_to_install_matplotlib(self, name, monkeypatch):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "matplotlib", None)
            with pytest.raises(
                ImportError, match=r"pip install 'optax-lossscale\[plot\]'"
            ):
                DRAWINGS[name]()
