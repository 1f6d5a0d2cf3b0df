"""The language model trains the same wherever it runs, and however often it stops."""

import json
import re
import shutil
import signal
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits
from language_model_run import ARGUMENTS, OVERFLOW, SEQUENCE, STEPS, main
from runs import column, finish, finish_all, free_port, last_state, read_rows, start

from examples.common import settings
from examples.common.logs import Table
from examples.common.settings import SettingError
from examples.language_model import cli
from examples.language_model.config import Config
from examples.language_model.data import BYTES, Corpus, Tokenizer
from examples.language_model.optimizer import RULES, averaged_parameters, make_optimizer
from examples.language_model.sharding import make_mesh
from examples.language_model.train import COLUMNS
from optax_lossscale import DynamicLossScale

pytestmark = [
    pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices"),
    pytest.mark.usefixtures("standard_dtype_promotion"),
]


needs_signals = pytest.mark.skipif(
    sys.platform == "win32", reason="Windows stops a process without a signal"
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Returns the folder of a run on one device, and the lines that it printed."""
    out = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "80")
        return out, finish(start("--out", out)).splitlines()


@pytest.mark.exhaustive
def test_a_run_leaves_settings_metrics_and_goes_on(whole, tmp_path, capsys):
    out, first = tmp_path / "run", whole[1]
    shutil.copytree(whole[0], out)
    # The settings are on several lines, which are not too long.
    assert first[1].startswith("dtype=float16  ")
    assert max(map(len, first)) <= 80
    saved = json.loads((out / "settings.json").read_text())
    assert saved["vocabulary"] == 512
    assert saved["loss_scale"] == "dynamic"

    rows = read_rows(out)
    assert tuple(rows[0])[: len(COLUMNS)] == COLUMNS
    assert column(out, "step") == list(range(1, STEPS + 1))
    skipped = [float(step >= OVERFLOW) for step in range(1, STEPS + 1)]
    assert column(out, "skipped_steps") == skipped
    assert column(out, "loss_scale") == [2.0 ** (15 - s) for s in skipped]
    headroom = np.array(column(out, "headroom"))
    assert (headroom > 0).all()
    # In a skipped step only the scale changes.
    before, after = headroom[OVERFLOW - 2 : OVERFLOW]
    assert after == pytest.approx(before + 1, rel=1e-6)
    losses, perplexities = column(out, "loss"), column(out, "perplexity")
    assert losses[-1] < losses[0] - 1
    assert len(perplexities) == 2
    assert first[-1] == f"perplexity {perplexities[-1]:.2f} after step {STEPS}"
    assert list((out / "tensorboard").iterdir())

    # A complete run has nothing left to do, wherever it is looked at.
    before = (out / "metrics.csv").read_text()
    main("--out", str(out), "--mesh=data=2,fsdp=4")
    assert capsys.readouterr().out.splitlines()[-1] == first[-1]
    assert (out / "metrics.csv").read_text() == before
    with pytest.raises(SystemExit, match="2"):
        main("--out", str(out), "--dtype=bfloat16", "--seed=1")
    settings = "dtype 'float16', not 'bfloat16'; loss_scale 'dynamic', not 'none'; "
    assert settings + "seed 0, not 1, got" in capsys.readouterr().err


@needs_signals
@pytest.mark.exhaustive
def test_killed_or_stopped_it_comes_to_the_same_end(whole, tmp_path):
    stopped = tmp_path / "stopped"
    finish(start("SIGKILL", 4, "--out", stopped), -signal.SIGKILL)
    text = finish(start("SIGINT", 8, "--out", stopped), 128 + signal.SIGINT)
    assert "stopped after step 9; the same command goes on from there" in text
    assert column(stopped, "step")[-1] == 9
    finish(start("--out", stopped))
    assert read_rows(stopped) == read_rows(whole[0])
    assert_same_bits(last_state(stopped), last_state(whole[0]))


@needs_signals
@pytest.mark.exhaustive
def test_two_processes_train_alike_and_stop_after_the_same_step(whole, tmp_path):
    common = [f"--coordinator=127.0.0.1:{free_port()}", "--processes=2"]
    common += ["--mesh=data=2,fsdp", "--steps=5000", "--out", tmp_path]
    # The second one gets the signal while it saves step 8.
    processes = [
        start(*send, *common, f"--process={rank}", devices=2)
        for rank, send in enumerate([(), ("SIGINT", 8)])
    ]
    codes = 128 + signal.SIGTERM, 128 + signal.SIGINT
    first, _ = finish_all(processes, codes)
    (step,) = re.findall("stopped after step (\\d+); the same command goes on", first)
    assert OVERFLOW < 8 < int(step) < 5000
    assert column(tmp_path, "step") == list(range(1, int(step) + 1))
    assert (tmp_path / "checkpoints" / step).is_dir()
    assert_begins_alike(tmp_path, whole[0])


@pytest.mark.exhaustive
def test_eight_devices_train_alike_and_skip_together(whole, tmp_path):
    assert SEQUENCE // (16 // 8) == 2
    options = "--no-scan-layers", "--remat", "--accumulate=2", "--save-every=12"
    main("--out", str(tmp_path), "--mesh=data=2,fsdp=4", *options)
    assert column(tmp_path, "step") == column(whole[0], "step")
    assert_begins_alike(tmp_path, whole[0])


def assert_begins_alike(out, wanted):
    """Checks the steps that both runs have, of which one is skipped."""
    assert 1 in column(out, "skipped_steps")
    for name in ("step", "loss_scale", "skipped_steps", "loss", "perplexity"):
        pair = column(out, name), column(wanted, name)
        n = min(map(len, pair))
        assert n
        tolerance = 2e-3 if name in ("loss", "perplexity") else 0
        np.testing.assert_allclose(pair[0][:n], pair[1][:n], rtol=tolerance)


@pytest.mark.exhaustive
def test_with_retries_an_overflow_costs_no_batch(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda: jax.local_devices()[:1])
    options = [*ARGUMENTS, "--steps=6", "--save-every=6", "--retries=24"]
    with mock.patch.dict(RULES, dynamic=DynamicLossScale(2.0**30, growth_interval=3)):
        cli.main([*options, "--out", str(tmp_path)])
    first, *_, last = read_rows(tmp_path)
    assert last["skipped_steps"] == "0"
    assert int(last["retries"]) > int(first["retries"])
    words = f"skipped 0  repeated {last['retries']}  perplexity"
    assert words in capsys.readouterr().out


def test_a_skip_keeps_the_average_and_only_matrices_decay():
    params = {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}
    grads = jax.tree.map(jnp.zeros_like, params)
    optimizer = make_optimizer(Config(warmup_steps=0))
    update = jax.jit(optimizer.update)
    updates, applied = update(grads, optimizer.init(params), params)
    assert (updates["kernel"] < 0).all()
    assert (updates["bias"] == 0).all()
    # The first update is averaged with the weight 9/10.
    np.testing.assert_allclose(
        averaged_parameters(applied)["kernel"],
        params["kernel"] + 0.9 * updates["kernel"],
        rtol=1e-6,
    )
    grads["bias"] = grads["bias"] * jnp.inf
    _, skipped = update(grads, applied, params)
    assert_same_bits(skipped.inner_state, applied.inner_state)


class TestData:
    def test_rare_words_are_spelled(self):
        tokenizer = Tokenizer([b"a b b b rare"], BYTES + 2)
        assert tokenizer.encode(b"a b rare") == [BYTES + 1, BYTES, *b" rare"]
        assert tokenizer.encode("ü".encode()) == list("ü".encode())

    def test_batches_depend_on_seed_and_step_alone(self):
        first, second = (Corpus("a*.py", 512, 16, seed=3) for _ in range(2))
        np.testing.assert_array_equal(
            first.training_batch(5, 4), second.training_batch(5, 4)
        )
        assert (first.training_batch(5, 4) != first.training_batch(6, 4)).any()
        batches = first.validation_batches(3, 4)
        assert batches.shape == (3, 4, 17)
        assert batches.dtype == np.int32
        assert first.digest == second.digest


@pytest.mark.parametrize(
    ("text", "shape"), [("fsdp", (1, 8)), ("data=8", (8, 1)), ("fsdp,data=2", (2, 4))]
)
def test_meshes(text, shape):
    assert make_mesh(text, jax.devices()).devices.shape == shape


@pytest.mark.parametrize("text", ["", "data=0", "rows=8", "data=1,data=8"])
def test_meshes_that_do_not_fit(text):
    with pytest.raises(SettingError, match="mesh must"):
        make_mesh(text, jax.devices())


def test_settings_may_change_until_there_is_a_checkpoint(tmp_path):
    settings.keep(tmp_path, Config(batch_size=8))
    settings.keep(tmp_path, Config(batch_size=16))
    (tmp_path / "checkpoints" / "4").mkdir(parents=True)
    with pytest.raises(SettingError, match="batch_size 16, not 8"):
        settings.keep(tmp_path, Config(batch_size=8))


def test_rows_beyond_a_checkpoint_are_dropped(tmp_path):
    path = tmp_path / "metrics.csv"
    row = dict.fromkeys(COLUMNS, 0.5)
    table = Table(path, 0, COLUMNS)
    for step in (10, 20, 30):
        table.add(row | {"step": step})
    table.close()
    whole = path.read_text().splitlines(keepends=True)
    # The process died in the middle of a row.
    path.write_text("".join(whole[:-1]) + "3")
    table = Table(path, 20, COLUMNS)
    table.add(row | {"step": 30})
    table.close()
    assert path.read_text() == "".join(whole)
    Table(path, 10, COLUMNS).close()
    assert path.read_text() == "".join(whole[:2])
