"""The record of metrics, and its files."""

import csv
import json
import math
import os
import pickle
import stat
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import INF, NAN
from hypothesis import given, settings, strategies as st

from optax_lossscale.diagnostics import History

SUFFIXES = [".csv", ".json"]


def recorded(steps, capacity=10_000):
    history = History(capacity)
    for step in steps:
        history.record(step, {"loss_scale": 2.0**step, "skipped_steps": 3 * step})
    return history


def bits(rows):
    """Returns rows with types and the bits of floats, which tell -0.0 and nan."""
    return [{k: (type(v), repr(v)) for k, v in row.items()} for row in rows]


def test_records_what_a_jitted_step_returns():
    @jax.jit
    def step(x):
        return {
            "scale": x,
            "half": x.astype(jnp.bfloat16),
            "good": x > 2,
            "n": x.astype(int),
        }

    history = History()
    history.record(jnp.int32(7), step(jnp.float32(1.7)))
    history.record(np.int64(8), step(jnp.float32(3)))
    history.record(
        9, {"scale": 1, "half": np.float16(0.1), "good": False, "n": np.uint8(3)}
    )
    assert bits(history.rows) == bits(
        [
            {"step": 7, "scale": float(np.float32(1.7)), "half": 1.703125}
            | {"good": False, "n": 1},
            {"step": 8, "scale": 3.0, "half": 3.0, "good": True, "n": 3},
            {"step": 9, "scale": 1, "half": float(np.float16(0.1)), "good": False}
            | {"n": 3},
        ]
    )
    assert history.steps.tolist() == [7, 8, 9]
    assert {name: column.dtype for name, column in history.columns.items()} == {
        "scale": np.float64,
        "half": np.float64,
        "good": np.bool_,
        "n": np.int64,
    }


def test_numbers_outlive_donated_arrays():
    history = History()
    scale = jnp.float32(8)
    history.record(0, {"loss_scale": scale})
    jax.jit(lambda x: x + 1, donate_argnums=0)(scale)
    scale.delete()
    assert history.columns["loss_scale"].tolist() == [8.0]


def test_replicated_arrays_are_scalars():
    mesh = jax.make_mesh((8,), ("x",))
    everywhere = jax.NamedSharding(mesh, jax.sharding.PartitionSpec())
    history = History()
    history.record(0, {"loss_scale": jax.device_put(jnp.float32(8), everywhere)})
    assert history.rows == [{"step": 0, "loss_scale": 8.0}]


def test_names_may_come_and_go():
    history = History()
    history.record(0, {"a": 1})
    history.record(1, {"a": 2, "b": True})
    history.record(2, {"b": False})
    a, b = history.columns.values()
    assert list(history.columns) == ["a", "b"]
    assert (a.dtype, b.dtype) == (np.int64, np.bool_)
    assert a.mask.tolist() == [False, False, True]
    assert a.tolist() == [1, 2, None]
    assert b.tolist() == [None, True, False]
    assert history.rows[2] == {"step": 2, "b": False}
    # A column without gaps is a plain array.
    assert type(recorded(range(3)).columns["loss_scale"]) is np.ndarray


def test_empty():
    history = History()
    assert len(history) == 0
    assert history.columns == {}
    assert history.rows == []
    assert history.steps.dtype == np.int64
    assert history.steps.shape == (0,)


@pytest.mark.parametrize("capacity", [2, 3, 4, 5, 8, 9])
def test_is_bounded_and_spans_the_run(capacity):
    history = History(capacity)
    for last in range(200):
        history.record(10 * last, {"skipped_steps": last})
        steps = history.steps // 10
        assert len(history) <= capacity
        assert steps[0] == 0
        assert steps[-1] == last
        assert history.columns["skipped_steps"].tolist() == steps.tolist()
        # Evenly spaced but for the last, by the least power of two that fits.
        gaps = np.diff(steps)
        stride = gaps[0] if len(gaps) > 1 else 1
        assert np.all(gaps[:-1] == stride)
        assert np.all(gaps <= stride) or len(gaps) == 1
        assert math.log2(stride).is_integer()
        # Half of what there is room for is used, at least.
        assert len(history) >= min(last + 1, capacity // 2)


def test_thins_by_every_second_row():
    assert recorded(range(4), 4).steps.tolist() == [0, 1, 2, 3]
    assert recorded(range(5), 4).steps.tolist() == [0, 2, 4]
    assert recorded(range(6), 4).steps.tolist() == [0, 2, 4, 5]
    assert recorded(range(7), 4).steps.tolist() == [0, 2, 4, 6]
    assert recorded(range(8), 4).steps.tolist() == [0, 4, 7]
    assert recorded(range(9), 4).steps.tolist() == [0, 4, 8]


@pytest.mark.parametrize("capacity", [100, 5])
def test_a_restored_run_replaces_what_it_repeats(capacity):
    history = recorded(range(20), capacity)
    before = [step for step in history.steps if step < 9]
    history.record(9, {"loss_scale": 0.5, "skipped_steps": 1})
    assert history.steps.tolist() == [*before, 9]
    assert history.rows[-1] == {"step": 9, "loss_scale": 0.5, "skipped_steps": 1}
    for step in range(10, 30):
        history.record(step, {"loss_scale": 0.5, "skipped_steps": 1})
        assert len(history) <= capacity
        assert np.all(np.diff(history.steps) > 0)
        assert history.steps[-1] == step
    history.record(29, {"loss_scale": 0.25})
    assert history.steps[-1] == 29
    assert history.rows[-1] == {"step": 29, "loss_scale": 0.25}
    history.record(-3, {"loss_scale": 4.0})
    assert history.rows == [{"step": -3, "loss_scale": 4.0}]


@pytest.mark.parametrize("restored", [-1, 0, 1, 7, 8, 9, 40])
def test_a_restored_run_is_as_dense_as_what_is_left(restored):
    history = recorded(range(100), 8)
    left = [step for step in range(0, 100, 16) if step < restored]
    for step in range(restored, restored + 3):
        history.record(step, {"loss_scale": 2.0**step, "skipped_steps": 3 * step})
    # One row or none: every step again. Two or more: the stride that they have.
    if len(left) < 2:
        assert history.steps.tolist() == [*left, *range(restored, restored + 3)]
    else:
        assert history.steps.tolist() == [*left, restored + 2]
    for step in range(restored + 3, 200):
        history.record(step, {"loss_scale": 2.0**step, "skipped_steps": 3 * step})
    if not left:
        assert history.rows == recorded(range(restored, 200), 8).rows
    assert 4 <= len(history) <= 8


def test_steps_may_span_all_of_int64(tmp_path):
    history = History()
    for step in (-(2**63), 0, 2**63 - 1):
        history.record(step, {})
    for suffix in SUFFIXES:
        history.save(tmp_path / f"run{suffix}")
        assert History.load(tmp_path / f"run{suffix}").rows == history.rows


AWKWARD = {
    "float": [1.0, 0.1, 1e16, 5e-324, -0.0, NAN, INF, -INF, 2.0**126],
    "int": [0, 1, -1, 2**53 + 1, 2**63 - 1, -(2**63), 7, 8, 9],
    "bool": [True, False, True, True, False, False, True, False, True],
    "mixed": [1, 1.0, True, NAN, 0, False, 0.0, -0.0, 10**16],
    'odd, "name"\n# é': [1.0] * 9,
    "": [False] * 9,
}


def awkward(gaps):
    history = History(77)
    for k in range(9):
        row = {name: column[k] for name, column in AWKWARD.items()}
        if gaps:
            row = {name: x for j, (name, x) in enumerate(row.items()) if (j + k) % 3}
        history.record(1000 * k, row)
    return history


@pytest.mark.parametrize("suffix", [*SUFFIXES, ".CSV"])
@pytest.mark.parametrize("gaps", [False, True])
def test_files_lose_nothing(suffix, gaps, tmp_path):
    path = tmp_path / f"run{suffix}"
    history = awkward(gaps)
    history.save(path)
    loaded = History.load(path)
    assert bits(loaded.rows) == bits(history.rows)
    assert list(loaded.columns) == list(history.columns)
    assert loaded.capacity == 77
    for name, column in history.columns.items():
        assert loaded.columns[name].dtype == column.dtype
        assert type(loaded.columns[name]) is type(column)
    loaded.save(tmp_path / f"again{suffix}")
    assert (tmp_path / f"again{suffix}").read_bytes() == path.read_bytes()


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 5, 6, 7, 8, 21])
def test_a_loaded_history_goes_on(suffix, rows, tmp_path):
    history = recorded(range(rows), capacity=4)
    history.save(str(tmp_path / f"run{suffix}"))
    loaded = History.load(str(tmp_path / f"run{suffix}"))
    for step in [*range(rows, rows + 9), rows, *range(rows + 1, rows + 20)]:
        assert bits(loaded.rows) == bits(history.rows)
        for one in (history, loaded):
            one.record(step, {"loss_scale": 1.0})
    assert bits(loaded.rows) == bits(history.rows)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_rows_without_metrics_are_kept(suffix, tmp_path):
    history = History()
    for step in (3, 5):
        history.record(step, {})
    history.save(tmp_path / f"run{suffix}")
    assert History.load(tmp_path / f"run{suffix}").rows == [{"step": 3}, {"step": 5}]


def test_pickles():
    history = recorded(range(7), 4)
    assert pickle.loads(pickle.dumps(history)).rows == history.rows


def test_json_is_strict(tmp_path):
    def refuse(constant):
        raise AssertionError(constant)

    awkward(gaps=True).save(tmp_path / "run.json")
    text = (tmp_path / "run.json").read_text()
    content = json.loads(text, parse_constant=refuse)
    assert content["steps"] == [1000 * k for k in range(9)]
    assert content["columns"]["float"][5:8] == ["nan", None, "-inf"]
    assert content["columns"]["bool"][5] is False


def test_csv_is_plain_under_one_comment(tmp_path):
    history = History(8)
    history.record(0, {"loss_scale": jnp.float32(8), "last_step_applied": True})
    history.record(1, {"loss_scale": INF, "skipped_steps": 1})
    history.save(tmp_path / "run.csv")
    first, *lines = (tmp_path / "run.csv").read_text().splitlines()
    assert first == "# optax_lossscale History: capacity=8 stride=1 records=2"
    assert list(csv.reader(lines)) == [
        ["step", "loss_scale", "last_step_applied", "skipped_steps"],
        ["0", "8.0", "True", ""],
        ["1", "inf", "", "1"],
    ]


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("when", ["write", "replace"])
def test_a_crash_leaves_the_old_file(suffix, when, tmp_path, monkeypatch):
    path = tmp_path / f"run{suffix}"
    recorded(range(3)).save(path)
    old = path.read_bytes()

    def crash(*args):
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        if when == "write":
            patch.setattr("os.fsync", crash)
        else:
            patch.setattr(Path, "replace", crash)
        with pytest.raises(OSError, match="no space left"):
            recorded(range(5)).save(path)
    assert path.read_bytes() == old
    assert list(tmp_path.iterdir()) == [path]
    recorded(range(5)).save(path)
    assert len(History.load(path)) == 5
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_threads_may_save_to_one_path(suffix, tmp_path):
    path, errors = tmp_path / f"run{suffix}", []
    histories = [recorded(range(n)) for n in range(1, 9)]

    def save(history):
        try:
            for _ in range(20):
                history.save(path)
                assert len(History.load(path)) in range(1, 9)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=save, args=(h,)) for h in histories]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert list(tmp_path.iterdir()) == [path]


def test_processes_of_one_number_may_save_to_one_path(tmp_path, monkeypatch):
    path, fsync = tmp_path / "run.csv", os.fsync
    monkeypatch.setattr(os, "getpid", lambda: 1)

    def save_another(fd):
        # In another container, in the middle of the first one's save.
        monkeypatch.setattr(os, "fsync", fsync)
        recorded(range(5)).save(path)
        assert len(History.load(path)) == 5

    monkeypatch.setattr(os, "fsync", save_another)
    recorded(range(3)).save(path)
    assert len(History.load(path)) == 3
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_names_as_long_as_the_file_system_allows(suffix, tmp_path):
    path = tmp_path / f"{'r' * (255 - len(suffix))}{suffix}"
    recorded(range(3)).save(path)
    assert len(History.load(path)) == 3


def test_permissions_are_those_of_a_file_that_is_opened(tmp_path):
    path, other = tmp_path / "run.csv", tmp_path / "other"
    recorded(range(3)).save(path)
    other.touch()
    assert path.stat().st_mode == other.stat().st_mode
    for mode in (0o600, 0o664):
        path.chmod(mode)
        recorded(range(3)).save(path)
        assert stat.S_IMODE(path.stat().st_mode) == mode


def test_what_a_killed_save_left_is_removed_a_day_later(tmp_path, monkeypatch):
    path = tmp_path / "run.csv"

    def kill(fd):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", kill)
        patch.setattr(Path, "unlink", lambda *args, **options: None)
        with pytest.raises(KeyboardInterrupt):
            recorded(range(3)).save(path)
    (left,) = tmp_path.iterdir()
    # It may be that of a save that goes on.
    recorded(range(5)).save(path)
    assert sorted(tmp_path.iterdir()) == sorted([left, path])
    unrelated = tmp_path / ".other.tmp"
    unrelated.touch()
    before = time.time() - 25 * 60 * 60
    for old in (left, unrelated):
        os.utime(old, (before, before))
    recorded(range(6)).save(path)
    assert sorted(tmp_path.iterdir()) == sorted([unrelated, path])
    assert len(History.load(path)) == 6


def test_writes_through_a_link(tmp_path):
    link = tmp_path / "latest.csv"
    link.symlink_to(tmp_path / "run.csv")
    recorded(range(3)).save(link)
    assert link.is_symlink()
    assert len(History.load(tmp_path / "run.csv")) == 3


@pytest.mark.parametrize("name", ["run.txt", "run", "run.csv.gz"])
def test_other_suffixes_are_refused(name, tmp_path):
    with pytest.raises(ValueError, match=r"must end in \.csv or \.json.*run"):
        recorded(range(3)).save(tmp_path / name)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match=r"must end in \.csv or \.json"):
        History.load(tmp_path / name)


DAMAGES = {
    "empty": lambda text: "",
    "no comment": lambda text: text.split("\n", 1)[1],
    "no header": lambda text: text.split("\n", 1)[0],
    "cut": lambda text: text[: text.rindex("6,64.0")],
    "cut in a row": lambda text: text[:-4],
    "text": lambda text: text.replace("64.0", "many"),
    "more cells": lambda text: text.replace("64.0", "64.0,1"),
    "steps": lambda text: text.replace("6,64.0", "1,64.0"),
    "no step": lambda text: text.replace("6,64.0", ",64.0"),
    "real step": lambda text: text.replace("6,64.0", "6.5,64.0"),
    "stride": lambda text: text.replace("stride=2", "stride=0"),
    "capacity": lambda text: text.replace("capacity=4", "capacity=3"),
    "large": lambda text: text.replace("18\n", f"{2**70}\n"),
    "large step": lambda text: text.replace("6,64.0", f"{2**63},64.0"),
    "column of steps": lambda text: text.replace("skipped_steps", "step"),
    "name twice": lambda text: text.replace("skipped_steps", "loss_scale"),
    "other steps": lambda text: text.replace('"step"', '"epoch"'),
    "no quote": lambda text: text.replace('_steps"', "_steps"),
    "cut in a cell": lambda text: text[:-2],
    "cut at the end": lambda text: text[:-1],
    "another spelling": lambda text: text.replace("64.0", "6_4.0"),
    "digits of another script": lambda text: text.replace("stride=2", "stride=٢"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_damaged_csv_is_named(kind, tmp_path):
    path = tmp_path / "run.csv"
    recorded(range(7), 4).save(path)
    text = path.read_text()
    damaged = DAMAGES[kind](text)
    assert damaged != text
    path.write_text(damaged)
    with pytest.raises(ValueError, match=r"run\.csv' cannot be loaded"):
        History.load(path)


@pytest.mark.parametrize(
    "changes",
    [
        {"format": "something else"},
        {"columns": None},
        {"columns": {"loss_scale": [1.0]}},
        {"columns": {"loss_scale": ["many"] * 4}},
        {"columns": {"loss_scale": [[1.0]] * 4}},
        {"steps": [0, 2, 2, 6]},
        {"steps": [0, 2, True, 6]},
        {"steps": [0, 2, 4, 6.0]},
        {"steps": [0, 2, 4]},
        {"stride": "2"},
        {"records": -1},
        {"records": 100},
        {"capacity": None},
        {"steps": [0, 2, 4, 2**63]},
        {"steps": "0246"},
        {"columns": {"step": [0, 2, 4, 6]}},
        {"columns": {"loss_scale": ["128"] * 4}},
        {"columns": {"loss_scale": ["Infinity"] * 4}},
    ],
)
def test_damaged_json_is_named(changes, tmp_path):
    path = tmp_path / "run.json"
    recorded(range(7), 4).save(path)
    content = json.loads(path.read_text())
    for damaged in ({**content, **changes}, list(content), {}):
        path.write_text(json.dumps(damaged))
        with pytest.raises(ValueError, match=r"run\.json' cannot be loaded"):
            History.load(path)
    twice = json.dumps(content).replace("skipped_steps", "loss_scale")
    for text in (json.dumps(content)[:-9], "[" * 10**5, twice):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"run\.json' cannot be loaded"):
            History.load(path)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_part_of_a_file_is_damaged(suffix, tmp_path):
    path = tmp_path / f"run{suffix}"
    for history in (History(), recorded(range(7), 4), awkward(gaps=True)):
        history.save(path)
        content = path.read_bytes()
        for length in range(len(content)):
            path.write_bytes(content[:length])
            with pytest.raises(ValueError, match="cannot be loaded"):
                History.load(path)


HOSTILE = ["", "nan", "-inf", "1e999", "NaN", "null", "-0", "1_0", " 1", "0x1", "+1"]
HOSTILE += ["9" * 30, "9" * 5000, "[" * 9999, '"', '""', '"step"', "step", "é", "\0"]
HOSTILE += ["\n", "\r", "#", "}", "{}", "[]", "True", "true", "1.0", "5e-324", "٣"]


@st.composite
def damage(draw, content):
    """Damages the bytes of a file, in one way or several."""
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(["cut", "flip", "drop", "repeat", "replace"]))
        if kind in ("cut", "flip"):
            at = draw(st.integers(0, max(len(content) - 1, 0)))
            byte = draw(st.binary(min_size=1, max_size=1))
            content = content[:at] + (byte + content[at + 1 :]) * (kind == "flip")
            continue
        parts = content.split(b"\n" if draw(st.booleans()) else b",")
        mark = b"\n" if content.count(b"\n") == len(parts) - 1 else b","
        at = draw(st.integers(0, len(parts) - 1))
        hostile = draw(st.sampled_from(HOSTILE)).encode()
        new = {"drop": [], "repeat": [parts[at]] * 2, "replace": [hostile]}[kind]
        content = mark.join([*parts[:at], *new, *parts[at + 1 :]])
    return content


@pytest.mark.parametrize("suffix", SUFFIXES)
@settings(max_examples=300)
@given(data=st.data(), sample=st.sampled_from(["awkward", "thinned", "plain"]))
def test_what_can_be_loaded_is_whole(suffix, data, sample, tmp_path_factory):
    folder = tmp_path_factory.mktemp("damaged")
    path, again = folder / f"run{suffix}", folder / f"again{suffix}"
    history = {
        "awkward": lambda: awkward(gaps=True),
        "thinned": lambda: recorded(range(7), 4),
        "plain": lambda: recorded(range(4)),
    }[sample]()
    history.save(path)
    path.write_bytes(data.draw(damage(path.read_bytes())))
    try:
        loaded = History.load(path)
    except ValueError:
        return
    loaded._check()
    loaded.save(again)
    content = again.read_bytes()
    reloaded = History.load(again)
    assert bits(reloaded.rows) == bits(loaded.rows)
    reloaded.save(again)
    assert again.read_bytes() == content
    assert len(loaded.steps) == len(loaded.rows) <= loaded.capacity
    for name, column in loaded.columns.items():
        assert name != "step"
        assert len(column) == len(loaded)


def test_a_missing_file_is_not_damaged(tmp_path):
    with pytest.raises(FileNotFoundError):
        History.load(tmp_path / "run.csv")


@pytest.mark.parametrize(
    ("step", "metrics", "error", "match"),
    [
        (1.0, {}, TypeError, "step must be an integer, got 1.0"),
        (True, {}, TypeError, "step must be an integer, got True"),
        ("1", {}, TypeError, "step must be a real number"),
        (np.arange(3), {}, ValueError, r"step must be a scalar, got shape \(3,\)"),
        (2**63, {}, ValueError, "step must fit into 64 bits"),
        (0, [1.0], TypeError, "metrics must be a dictionary"),
        (0, {3: 1.0}, TypeError, "must be strings, got 3"),
        (0, {"step": 1}, ValueError, 'must not be named "step"'),
        (0, {"a": "1"}, TypeError, r"metrics\['a'\] must be a real number"),
        (0, {"a": None}, TypeError, r"metrics\['a'\] must be a real number"),
        (0, {"a": 1j}, TypeError, r"metrics\['a'\] must be a real number"),
        (0, {"a": jnp.complex64(1)}, TypeError, r"metrics\['a'\] must be a real"),
        (0, {"a": 2**70}, ValueError, r"metrics\['a'\] must fit into 64 bits"),
        (0, {"b": 1, "a": jnp.ones(8)}, ValueError, r"\['a'\].* shape \(8,\)"),
        (0, {"a": [1.0]}, ValueError, r"\['a'\] must be a scalar"),
    ],
)
def test_refuses_what_is_no_scalar(step, metrics, error, match):
    history = recorded(range(3))
    with pytest.raises(error, match=match):
        history.record(step, metrics)
    # Nothing was lost to an attempt.
    assert history.steps.tolist() == [0, 1, 2]


def test_refuses_tracers():
    history = History()

    @jax.jit
    def step(x):
        history.record(0, {"loss_scale": x})
        return x

    with pytest.raises(TypeError, match=r"History\.record is for the host.*outside"):
        step(1.0)
    with pytest.raises(TypeError, match=r"History\.record is for the host.*outside"):
        jax.jit(lambda i: history.record(i, {}))(1)
    assert len(history) == 0


@pytest.mark.parametrize("capacity", [1, 0, -5, 2.5, INF])
def test_refuses_capacities(capacity):
    with pytest.raises(ValueError, match="capacity must be"):
        History(capacity)


@pytest.mark.parametrize("capacity", ["10", None, True])
def test_refuses_what_is_no_capacity(capacity):
    with pytest.raises(TypeError, match="capacity must be"):
        History(capacity)
