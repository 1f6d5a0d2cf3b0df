"""The digits: what they show, their report, figure and command line."""

import itertools

import jax
import numpy as np
import pytest

from examples.digits import __main__ as digits, report, train
from optax_lossscale import DynamicLossScale

pytestmark = pytest.mark.usefixtures("standard_dtype_promotion")
STEPS = 30


def fake_runs(*precisions):
    """Makes runs with these average precisions in the five ways."""
    record = {"loss": 1.0, "zeros": 0.25, "log2_loss_scale": 10.0, "skipped_steps": 2}
    runs = (train.Run(x, record, [record], [None] * 6) for x in precisions)
    return dict(zip(train.WAYS, runs, strict=True))


@pytest.mark.exhaustive
def test_scaling_makes_float16_as_precise_as_float32(capsys, monkeypatch, tmp_path):
    kept = {}
    train_all_ways = train.train_all_ways

    def keep(**options):
        kept.update(train_all_ways(**options))
        return kept

    monkeypatch.setattr(train, "train_all_ways", keep)
    path = tmp_path / "figure.png"
    digits.main([f"--steps={STEPS}", "--batch-size=16384", "--plot", str(path)])

    assert list(kept) == list(train.WAYS)
    assert kept[train.FLOAT32].precision > 0.5
    assert kept[train.UNSCALED].precision < 0.3
    for way in (train.FIXED, train.DYNAMIC, train.BY_HAND):
        assert abs(kept[way].precision - kept[train.FLOAT32].precision) <= 0.03

    first_loss = kept[train.FLOAT32].column("loss")[0]
    for way, run in kept.items():
        losses, zeros = run.column("loss"), run.column("zeros")
        # Initial parameters and batches do not depend on the way.
        np.testing.assert_allclose(losses[0], first_loss, rtol=1e-3)
        if way == train.UNSCALED:
            assert zeros.mean() > 0.85
            assert losses[-1] > 0.8 * losses[0]
        else:
            assert zeros.mean() < 0.3
            assert losses[-1] < 0.7 * losses[0]
        check_scale(way, run)

    out, err = capsys.readouterr()
    # No progress bar where there is no terminal, but a line for each way.
    assert err.splitlines() == [f"{way.name}: {STEPS} steps" for way in train.WAYS]
    assert out.startswith("Finding digits in photographs: steps=30, seed=0, ")
    assert report.describe(kept) in " ".join(out.split())
    assert f"The figure is in {path}." in out
    check_figure(path)


def check_scale(way, run):
    """Checks that the scale follows its rule, and that only overflows are skipped."""
    assert run.column("step").tolist() == list(range(1, STEPS + 1))
    scales = np.array([run.start["loss_scale"], *run.column("loss_scale")])
    applied = run.column("last_step_applied")
    if way not in (train.DYNAMIC, train.BY_HAND):
        assert np.all(scales == way.rule.loss_scale_value)
        assert np.all(applied)
        return
    fell = [new < old for old, new in itertools.pairwise(scales)]
    assert fell == (~applied).tolist()
    assert scales[0] == 2.0**15
    assert scales.max() > 2.0**15


@pytest.mark.exhaustive
def test_float16_needs_no_scaling_in_small_batches(monkeypatch):
    monkeypatch.setattr(train, "WAYS", [train.FLOAT32, train.UNSCALED])
    runs = train.train_all_ways(
        100, seed=3, batch_size=1024, optimizer="adam", retries=0
    )
    assert runs[train.FLOAT32].precision > 0.9
    assert abs(runs[train.UNSCALED].precision - runs[train.FLOAT32].precision) < 0.03


@pytest.mark.exhaustive
def test_an_overflow_repeats_a_pass_and_skips_no_step(monkeypatch):
    fakes, rule = fake_runs(0.9, 0.1, 0.9, 0.9, 0.9), DynamicLossScale(2.0**30)
    monkeypatch.setattr(train, "WAYS", [train.DYNAMIC._replace(rule=rule)])
    options = {"seed": 3, "batch_size": 1024, "optimizer": "adam"}
    (skipping,) = train.train_all_ways(4, retries=0, **options).values()
    (run,) = train.train_all_ways(4, retries=24, **options).values()
    assert report.skips(skipping) > 0
    assert report.skips(run) == 0
    repeats = run.records[-1]["retries"]
    assert repeats >= run.records[0]["retries"] > 0
    assert all(x.infs == x.nans == 0 for x in run.histograms)
    text = report.describe(fakes | {train.DYNAMIC: run})
    assert f" 0 of 4 steps. Repeated passes: {repeats}. " in text


def test_patches_have_digits_where_the_labels_say():
    photos, pictures = train.load_pictures()
    key = jax.random.key(0)
    make_batch = jax.jit(train.make_batch, static_argnums=3)
    patches, has_digit = make_batch(key, photos, pictures, 20_000)
    bare, _ = make_batch(key, photos, np.float32(3) + 0 * pictures, 20_000)
    assert 50 < has_digit.sum() < 150
    assert np.array_equal(np.any(patches != bare, axis=1), has_digit)
    assert patches.shape == (20_000, 64)
    assert -1 <= patches.min() < patches.max() <= 1


def test_report(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    runs = fake_runs(0.9, 0.09, 0.95, 0.8, 0.88)
    words = report.describe(runs)
    for said in (
        "float32 reaches an average precision of 90.0%; guessing gives 0.5%.",
        "float16 learns next to nothing (9.0%): 25.0% of the gradients",
        "With the dynamic scale it falls short of float32 (80.0%), and skips 2 of 6",
    ):
        assert said in words
    assert "try more --steps" in report.describe(fake_runs(0.12, *[0.1] * 4))
    report.print_report(runs)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    # No word is broken at the end of a line.
    text = " ".join(" ".join(lines).split())
    assert text.endswith(f"{report.LEGEND} {words}")
    for way, run in runs.items():
        assert f"{way.name} 1.0000 {run.precision:.1%}"[:-1] + " 2 2^10 25.0" in text


def check_figure(path):
    """Checks that every way has been drawn in its color."""
    from matplotlib.colors import to_rgb
    from matplotlib.image import imread

    image = imread(path)[..., :3]
    for way in set(train.WAYS) - {train.BY_HAND}:
        distance = np.abs(image - to_rgb(way.color)).max(axis=-1)
        assert np.sum(distance < 0.01) > 50, way.name
