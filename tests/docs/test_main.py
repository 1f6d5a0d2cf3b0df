"""The demonstration: its experiment, report, figure and command line."""

import itertools
import re
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest

import optax_lossscale
from optax_lossscale import __main__ as demonstration, _demo
from optax_lossscale.diagnostics import History, exponent_histogram

DEFAULTS = {"steps": 80, "seed": 0, "batch_size": 2**17, "optimizer": "adam"}


@pytest.fixture(autouse=True)
def standard_dtype_promotion(strict_dtype_promotion):
    """Lets Flax and Optax promote dtypes."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def fake_run(precision, *, steps=6, skipped=2, zeros=0.25, loss=1.0, log2_scale=10.0):
    """Makes a run that skips its first steps."""
    history = History()
    for step in range(steps + 1):
        record = {
            "loss_scale": 2.0**log2_scale,
            "log2_loss_scale": log2_scale,
            "last_step_applied": step == 0 or step > skipped,
            "skipped_steps": min(step, skipped),
        }
        history.record(
            step, record | {"loss": loss, "zeros": zeros} if step else record
        )
    counts = int(100 * zeros), int(100 * (1 - zeros))
    grads = np.repeat(np.float32([0, 2**-20]), counts)
    return _demo.Run(precision, 1.0, history, [exponent_histogram(grads)] * steps)


def fake_runs(precisions, **options):
    """Makes runs with these average precisions in the four ways."""
    return {
        way: fake_run(precision, **options)
        for way, precision in zip(_demo.WAYS, precisions, strict=True)
    }


@pytest.mark.exhaustive
def test_scaling_makes_float16_as_precise_as_float32(capsys, monkeypatch, tmp_path):
    kept = {}
    train_all_ways = _demo.train_all_ways

    def keep(**options):
        kept.update(train_all_ways(**options))
        return kept

    monkeypatch.setattr(_demo, "train_all_ways", keep)
    path = tmp_path / "figure.png"
    demonstration.main(["--steps", "50", "--plot", str(path)])

    assert list(kept) == list(_demo.WAYS)
    assert kept[_demo.FLOAT32].precision > 0.5
    assert kept[_demo.UNSCALED].precision < 0.1
    for way in (_demo.FIXED, _demo.DYNAMIC):
        assert abs(kept[way].precision - kept[_demo.FLOAT32].precision) <= 0.03

    first_loss = _demo.column(kept[_demo.FLOAT32], "loss")[0]
    for way, run in kept.items():
        losses, zeros = _demo.column(run, "loss"), _demo.column(run, "zeros")
        assert losses.shape == zeros.shape == (50,)
        # Initial parameters and batches do not depend on the way.
        np.testing.assert_allclose(losses[0], first_loss, rtol=1e-3)
        if way == _demo.UNSCALED:
            assert zeros.mean() > 0.98
            assert losses[-1] > 0.8 * losses[0]
        else:
            assert zeros.mean() < 0.3
            assert losses[-1] < 0.4 * losses[0]
        check_run(way, run)

    out, err = capsys.readouterr()
    lines = out.splitlines()
    # No progress bar where there is no terminal, but a line for each way.
    assert err.splitlines() == [f"{way.name}: 50 steps" for way in _demo.WAYS]
    assert lines[0].startswith("Finding digits in photographs: steps=50, seed=0, ")
    *_, words, _, where = lines
    assert where == f"The figure is in {path}."
    assert words == _demo.describe(kept)
    assert "Without loss scaling float16 learns next to nothing" in words
    assert "With a fixed scale it matches float32" in words
    assert "With the dynamic scale it matches float32" in words
    check_figure(path)


def check_run(way, run):
    """Checks that the scale follows its rule, and that only overflows are skipped."""
    columns = run.history.columns
    assert run.history.steps.tolist() == list(range(51))
    assert len(run.histograms) == 50
    assert run.seconds > 0
    scales, applied = columns["loss_scale"], columns["last_step_applied"][1:]
    if way != _demo.DYNAMIC:
        assert np.all(scales == way.rule.loss_scale_value)
        assert np.all(applied)
        return
    fell = [new < old for old, new in itertools.pairwise(scales)]
    assert fell == (~applied).tolist()
    assert scales[0] == 2.0**15
    assert any(new > old for old, new in itertools.pairwise(scales))


@pytest.mark.exhaustive
def test_float16_needs_no_scaling_in_small_batches(monkeypatch):
    monkeypatch.setattr(_demo, "WAYS", [_demo.FLOAT32, _demo.UNSCALED])
    runs = _demo.train_all_ways(300, seed=3, batch_size=1024, optimizer="adam")
    assert runs[_demo.FLOAT32].precision > 0.9
    assert abs(runs[_demo.UNSCALED].precision - runs[_demo.FLOAT32].precision) < 0.03


def test_patches_have_digits_where_the_labels_say():
    photos, digits = _demo.load_pictures()
    key = jax.random.key(0)
    make_batch = jax.jit(_demo.make_batch, static_argnums=3)
    patches, has_digit = make_batch(key, photos, digits, 20_000)
    bare, _ = make_batch(key, photos, np.float32(3) + 0 * digits, 20_000)
    assert 50 < has_digit.sum() < 150
    assert np.array_equal(np.any(patches != bare, axis=1), has_digit)
    assert patches.shape == (20_000, 64)
    assert -1 <= patches.min() < patches.max() <= 1


@pytest.mark.parametrize(
    ("precisions", "expected"),
    [
        (
            (0.97, 0.09, 0.972, 0.96),
            "float32 reaches an average precision of 97.0%; guessing gives 0.5%. "
            "Without loss scaling float16 learns next to nothing (9.0%): 25.0% of the "
            "gradients of its hidden activations are zero. With a fixed scale it "
            "matches float32 (97.2%). With the dynamic scale it matches float32 "
            "(96.0%), and skips 2 of 6 steps.",
        ),
        (
            (0.9, 0.9, 0.95, 0.8),
            "float32 reaches an average precision of 90.0%; guessing gives 0.5%. "
            "Without loss scaling float16 matches float32 (90.0%): 25.0% of the "
            "gradients of its hidden activations are zero. With a fixed scale it "
            "exceeds float32 (95.0%). With the dynamic scale it falls short of "
            "float32 (80.0%), and skips 2 of 6 steps.",
        ),
        (
            (0.12, 0.1, 0.1, 0.1),
            "float32 itself reaches only 12.0%, so this says nothing about float16: "
            "try more --steps.",
        ),
    ],
)
def test_words_follow_the_numbers(precisions, expected):
    assert _demo.describe(fake_runs(precisions)) == expected


def test_report(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    runs = fake_runs((0.97, 0.09, 0.97, 0.97))
    runs[_demo.DYNAMIC] = fake_run(0.96, skipped=3, log2_scale=11.0)
    _demo.print_report(runs)
    lines = capsys.readouterr().out.splitlines()
    rows = [" ".join(line.split()) for line in lines if line.startswith("  float")]
    assert rows == [
        "float32 97.0 2 2^10 25.0 1.0",
        "float16, unscaled 9.0 2 2^10 25.0 1.0",
        "float16, fixed 97.0 2 2^10 25.0 1.0",
        "float16, dynamic 96.0 3 2^11 25.0 1.0",
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
        ("--batch-size", "255", "must be a whole number from 256 to 1048576"),
        ("--batch-size", "big\nish", "must be a whole number from 256 to 1048576"),
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
    assert "training steps per run, 1 to 10000 (default: 80)" in out
    for option, default in (
        ("--steps STEPS", "80"),
        ("--seed SEED", "0"),
        ("--batch-size BATCH_SIZE", "131072"),
        ("--optimizer {sgd,momentum,adam}", "adam"),
    ):
        assert re.search(rf"{re.escape(option)} [^()]*\(default: {default}\)", out)
    assert out.count("default") == 4
    assert "--plot FILE.png also draw" in out


def test_version(capsys):
    with pytest.raises(SystemExit) as exit_info:
        demonstration.main(["--version"])
    assert exit_info.value.code == 0
    assert capsys.readouterr().out.split()[1] == optax_lossscale.__version__


def test_options_reach_the_experiment(monkeypatch):
    seen = []

    def train_all_ways(**options):
        seen.append(options)
        return fake_runs((0.9, 0.1, 0.9, 0.9))

    monkeypatch.setattr(_demo, "train_all_ways", train_all_ways)
    demonstration.main([])
    for name in _demo.OPTIMIZERS:
        options = f"--steps 7 --seed 3 --batch-size 512 --optimizer {name}"
        demonstration.main(options.split())
        chosen = dict(zip(DEFAULTS, (7, 3, 512, name), strict=True))
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
        assert process.stdout.readline().startswith("Finding")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate()
    assert process.returncode == 130
    # It may have begun the first way, and said so.
    *begun, last = err.splitlines()
    assert begun in ([], ["float32: 80 steps"])
    assert last == "python -m optax_lossscale: interrupted"


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"steps": 1, "skipped": 0, "zeros": 0},
        {"skipped": 6, "zeros": 1, "loss": np.nan},
    ],
    ids=["usual", "one step", "nothing but skips"],
)
def test_figure_has_content(options, tmp_path):
    path = tmp_path / "figure.png"
    _demo.draw_figure(fake_runs((0.9, 0.1, 0.9, 0.9), **options), path)
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
