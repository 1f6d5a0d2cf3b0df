"""The demonstration: what it shows, what it says, and what it refuses."""

import collections
import itertools
import math
import re
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale
from optax_lossscale import __main__ as demonstration, _demo

DEFAULTS = {
    "steps": 500,
    "seed": 0,
    "loss_weight": 1e-5,
    "inner_optimizer": "momentum",
}


@pytest.fixture(autouse=True)
def standard_dtype_promotion(strict_dtype_promotion):
    """Gives Flax and Optax leave to promote dtypes."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def fake_runs(accuracies, *, steps=6, skipped=2, zeros=0.25, loss=1.0):
    """Makes runs with these accuracies in the four ways."""
    seeds = np.ones(_demo.SEEDS)
    exponents = np.zeros((_demo.SEEDS, steps, _demo.BINS), int)
    exponents[..., 0], exponents[..., 60] = 100 * zeros, 100 * (1 - zeros)
    shape = _demo.SEEDS, steps
    return {
        way: _demo.Runs(
            accuracy=accuracy * seeds,
            seconds=seeds.copy(),
            final_scale=2.0**10 * seeds,
            losses=np.full(shape, loss, np.float32),
            scales=np.full(shape, 2.0**10, np.float32),
            applied=np.broadcast_to(np.arange(steps) >= skipped, shape),
            exponents=exponents,
        )
        for way, accuracy in zip(_demo.WAYS, accuracies, strict=True)
    }


@pytest.mark.exhaustive
def test_scaling_makes_float16_as_accurate_as_float32(capsys, monkeypatch, tmp_path):
    kept = {}
    train_all_ways = _demo.train_all_ways

    def keep(**options):
        kept.update(train_all_ways(**options))
        return kept

    monkeypatch.setattr(_demo, "train_all_ways", keep)
    path = tmp_path / "figure.png"
    demonstration.main(["--steps", "120", "--plot", str(path)])

    assert list(kept) == list(_demo.WAYS)
    accuracy = {way: some.accuracy.mean() for way, some in kept.items()}
    assert accuracy[_demo.FLOAT32] > 0.95
    assert accuracy[_demo.UNSCALED] < 0.15
    for way in (_demo.FIXED, _demo.DYNAMIC):
        assert abs(accuracy[way] - accuracy[_demo.FLOAT32]) <= 0.015

    for way, some in kept.items():
        check_runs(way, some)
        # The same initial parameters and the same first batch, of every seed its own.
        first = some.losses[:, 0]
        np.testing.assert_allclose(first, kept[_demo.FLOAT32].losses[:, 0], rtol=1e-2)
        assert len(set(first)) == _demo.SEEDS
        if way == _demo.UNSCALED:
            assert some.zero_share == 1
            assert np.all(some.losses[:, -1] > 2)
        else:
            assert some.zero_share < 0.01
            assert np.all(some.losses[:, -1] < 0.1)

    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert not err  # no progress bar where there is no terminal
    assert lines[0].startswith("Training on handwritten digits: steps=120, seed=0, ")
    assert lines[-1] == _demo.describe(kept)
    assert "Without loss scaling float16 does not learn" in lines[-1]
    assert "With a fixed scale it matches float32" in lines[-1]
    assert "With the dynamic scale it matches float32" in lines[-1]
    check_figure(path)


def check_runs(way, some):
    """Checks that the scales and skips of runs follow the rule of their loss scale."""
    assert some.losses.shape == some.scales.shape == (_demo.SEEDS, 120)
    assert some.seconds.shape == (_demo.SEEDS,)
    every_scale = np.column_stack([some.scales, some.final_scale])
    if way != _demo.DYNAMIC:
        assert np.all(every_scale == way.loss_scale.loss_scale_value)
        assert some.skipped_steps == 0
        return
    for scales, applied, exponents in zip(
        every_scale.tolist(), some.applied, some.exponents, strict=True
    ):
        fell = [new < old for old, new in itertools.pairwise(scales)]
        assert fell == (~applied).tolist()
        assert scales[0] == 2.0**48
        assert sum(fell) > 5
        assert any(new > old for old, new in itertools.pairwise(scales))
        # It is what had to be skipped, and nothing else, that was not finite.
        assert (exponents[:, -1] > 0).tolist() == fell
        # What was applied had been scaled into float16's range, of up to 2**16.
        assert not np.any(exponents[applied, _demo.BIAS + 16 :])
        assert np.all(np.argmax(exponents[applied], axis=-1) > _demo.BIAS - 14)


def test_count_exponents():
    entries = [0.0, -0.0, 1.0, -1.99, 2.0, 2.0**-24, 3e-9, 65504.0, math.inf, math.nan]
    expected = collections.Counter({0: 2, _demo.BINS - 1: 2})
    expected.update(math.frexp(x)[1] - 1 + _demo.BIAS for x in entries[2:-2])
    counts = np.asarray(_demo.count_exponents(jnp.array(entries)))
    assert {bin_: counts[bin_] for bin_ in np.flatnonzero(counts)} == expected


@pytest.mark.exhaustive
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_float16_needs_no_scaling_where_gradients_are_large(optimizer, monkeypatch):
    monkeypatch.setattr(_demo, "WAYS", [_demo.UNSCALED])
    monkeypatch.setattr(_demo, "SEEDS", 1)
    runs = _demo.train_all_ways(60, seed=3, loss_weight=1.0, inner_optimizer=optimizer)
    assert runs[_demo.UNSCALED].accuracy > 0.9


@pytest.mark.parametrize(
    ("accuracies", "expected"),
    [
        (
            (0.97, 0.09, 0.972, 0.96),
            "float32 reaches 97.0%. Without loss scaling float16 does not learn "
            "(9.0%, guessing gives 10%): 25.0% of its gradients are zero. With a "
            "fixed scale it matches float32 (97.2%). With the dynamic scale it matches "
            "float32 (96.0%), and skips 2 of 6 steps.",
        ),
        (
            (0.9, 0.9, 0.95, 0.8),
            "float32 reaches 90.0%. Without loss scaling float16 matches float32 "
            "(90.0%): 25.0% of its gradients are zero. With a fixed scale it differs "
            "from float32 (95.0%). With the dynamic scale it differs from float32 "
            "(80.0%), and skips 2 of 6 steps.",
        ),
        (
            (0.12, 0.1, 0.1, 0.1),
            "float32 itself does not learn (12.0%, guessing gives 10%), so this says "
            "nothing about float16: try more --steps.",
        ),
    ],
)
def test_words_follow_the_numbers(accuracies, expected):
    assert _demo.describe(fake_runs(accuracies)) == expected


def test_report(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    runs = fake_runs((0.97, 0.09, 0.97, 0.97))
    last = runs[_demo.DYNAMIC]
    last.accuracy[0], last.final_scale[1], last.seconds[2] = 0.94, 2.0**11, 4.0
    _demo.print_report(runs)
    lines = capsys.readouterr().out.splitlines()
    rows = [" ".join(line.split()) for line in lines if line.startswith("  float")]
    assert rows == [
        "float32 97.0 (97.0-97.0) 2 2^10 25.0 1.0",
        "float16, unscaled 9.0 (9.0-9.0) 2 2^10 25.0 1.0",
        "float16, fixed 97.0 (97.0-97.0) 2 2^10 25.0 1.0",
        "float16, dynamic 96.0 (94.0-97.0) 2 2^10 25.0 2.0",
    ]
    assert max(map(len, lines[:-1])) <= 80
    assert lines[-1] == _demo.describe(runs)


@pytest.mark.parametrize(
    ("option", "value", "fix"),
    [
        ("--steps", "0", "must be a whole number from 1 to 10000"),
        ("--steps", "x", "must be a whole number from 1 to 10000"),
        ("--steps", "1.5", "must be a whole number from 1 to 10000"),
        ("--seed", "-1", "must be a whole number from 0 to 100000"),
        ("--loss-weight", "nan", "must be a number from 1e-12 to 1e+12"),
        ("--loss-weight", "inf", "must be a number from 1e-12 to 1e+12"),
        ("--loss-weight", "-1", "must be a number from 1e-12 to 1e+12"),
        ("--loss-weight", "0", "must be a number from 1e-12 to 1e+12"),
        ("--loss-weight", "small\nish", "must be a number from 1e-12 to 1e+12"),
        ("--optimizer", "lion", "choose from"),
        *(
            ("--plot", value, "must be a .png file in a directory that exists")
            for value in ("missing/x.png", "x.gif", "x", "folder.png")
        ),
    ],
)
def test_bad_values_are_refused_in_one_line(
    option, value, fix, capsys, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.png").mkdir()
    monkeypatch.setattr(_demo, "train_all_ways", pytest.fail)
    with pytest.raises(SystemExit) as exit_info:
        demonstration.main([option, value])
    assert exit_info.value.code == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.count("\n") == 1
    assert err.endswith("\n")
    assert f"argument {option}: " in err
    assert repr(value)[1:-1] in err
    assert fix in err


@pytest.mark.parametrize("package", ["flax", "matplotlib", "rich", "sklearn"])
def test_missing_extras_are_named_with_the_fix(package, capsys, monkeypatch):
    class Absent:
        @staticmethod
        def find_spec(name, *_):
            if name == package:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(sys, "meta_path", [Absent, *sys.meta_path])
    monkeypatch.delattr(optax_lossscale, "_demo")
    for name in list(sys.modules):
        if name == _demo.__name__ or name.partition(".")[0] == package:
            monkeypatch.delitem(sys.modules, name)
    with pytest.raises(SystemExit) as exit_info:
        demonstration.main([])
    assert exit_info.value.code == 2
    out, err = capsys.readouterr()
    assert not out
    assert err == (
        f"python -m optax_lossscale: error: needs {package}; "
        "install it with: pip install 'optax-lossscale[demo]'\n"
    )


def test_parsing_needs_no_extra():
    code = """
import sys
sys.modules.update(dict.fromkeys(("flax", "matplotlib", "rich", "sklearn")))
from optax_lossscale.__main__ import main
main(["--help"])
"""
    command = [sys.executable, "-W", "error", "-c", code]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def test_help_lists_options_and_defaults(capsys):
    with pytest.raises(SystemExit) as exit_info:
        demonstration.main(["--help"])
    assert exit_info.value.code == 0
    out = " ".join(capsys.readouterr().out.split())
    for option, default in (
        ("--steps STEPS", "500"),
        ("--seed SEED", "0"),
        ("--loss-weight LOSS_WEIGHT", "1e-5"),
        ("--optimizer {sgd,momentum,adam}", "momentum"),
    ):
        assert re.search(rf"{re.escape(option)} [^()]*\(default: {default}\)", out)
    assert out.count("default") == 4
    assert "--plot FILE.png also draw" in out


def test_options_reach_the_experiment(monkeypatch):
    seen = []

    def train_all_ways(**options):
        seen.append(options)
        return fake_runs((0.9, 0.1, 0.9, 0.9))

    monkeypatch.setattr(_demo, "train_all_ways", train_all_ways)
    demonstration.main([])
    for name in _demo.OPTIMIZERS:
        options = f"--steps 7 --seed 3 --loss-weight 1e-3 --optimizer {name}"
        demonstration.main(options.split())
        chosen = dict(zip(DEFAULTS, (7, 3, 1e-3, name), strict=True))
        assert seen == [DEFAULTS, chosen]
        del seen[1:]


def test_interrupt_ends_it_with_status_130():
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "optax_lossscale"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout.readline().startswith("Training")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate()
    assert process.returncode == 130
    assert err == "python -m optax_lossscale: interrupted\n"


@pytest.mark.parametrize(
    "runs",
    [
        fake_runs((0.9, 0.1, 0.9, 0.9)),
        fake_runs((0.9, 0.1, 0.9, 0.9), steps=1, skipped=0, zeros=0),
        fake_runs((0.9, 0.1, 0.9, 0.9), skipped=6, zeros=1, loss=np.nan),
    ],
    ids=["usual", "one step", "nothing but skips"],
)
def test_figure_has_content(runs, tmp_path):
    path = tmp_path / "figure.png"
    _demo.draw_figure(runs, path)
    check_figure(path)


def check_figure(path):
    """Checks that every way has been drawn in its color."""
    from matplotlib.colors import to_rgb
    from matplotlib.image import imread

    image = imread(path)[..., :3]
    assert image.shape[1] > 900
    for way in _demo.WAYS:
        distance = np.abs(image - to_rgb(way.color)).max(axis=-1)
        assert np.sum(distance < 0.01) > 50, way.name
