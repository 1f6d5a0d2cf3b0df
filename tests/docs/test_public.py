"""The public trainings: their edits, and the page of their results."""

import math
import subprocess
import sys

import pytest

from benchmarks import report
from benchmarks.public import edits, training
from benchmarks.public.page import PAGE, RESULTS, page
from benchmarks.public.programs import PROGRAMS, Program

FOUND = report.load(RESULTS)
SCRIPT = """\
import datasets
import jax
import optax
import shapes

w = shapes.ones()
optimizer = optax.sgd(0.001)
state = optimizer.init(w)
datasets.load()


def loss_fn(w):
    return 100 * ((w - 1 / 3) ** 2).sum()


for _ in range(20):
    loss, grads = jax.value_and_grad(loss_fn)(w)
    updates, state = optimizer.update(grads, state)
    w = optax.apply_updates(w, updates)
"""
TOY = Program(
    "toy",
    "",
    "owner/name",
    "HEAD",
    "folder/script.py",
    """
 import optax
+from optax_lossscale import LossScaleOptimizer

-optimizer = optax.sgd(0.001)
+optimizer = LossScaleOptimizer(optax.sgd(0.001), initial_scale=2.0**126)

-    loss, grads = jax.value_and_grad(loss_fn)(w)
+    loss, grads = optimizer.value_and_grad(loss_fn, state)(w)
""",
    "assert w.shape == (4,)",
    """
     w = optax.apply_updates(w, updates)
+    record(loss, state)
""",
    ("datasets",),
)


def test_the_page_shows_the_results():
    assert page(FOUND) == PAGE.read_text()


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_a_program_has_edits_and_results(program):
    added = "".join(x for e in edits.parse(program.float16) for x in e.new)
    assert "autocast(" in added or "@autocast" in added
    assert "LossScaleOptimizer(" in added
    assert edits.parse(program.setting)
    assert len(program.commit) == 40
    half, single = (FOUND[program.name]["rows"][way] for way in ("float16", "float32"))
    assert half["steps"] == single["steps"] > half["skipped"]
    assert single["skipped"] == 0
    assert all(math.isfinite(x["last_loss"]) for x in (half, single))


def test_names_of_programs_and_results_agree():
    assert FOUND.keys() == {program.name for program in PROGRAMS}


def test_edits_are_counted_without_the_import():
    assert edits.count(edits.parse(TOY.float16)) == (2, 2)


def test_an_edit_fits_once():
    assert edits.apply("a\nb\nc", edits.parse(" a\n-b\n+x\n+y")) == "a\nx\ny\nc"
    for program, diff in [("a\na", "-a"), ("a", "-b"), ("a", "+b")]:
        with pytest.raises(edits.EditError, match="must fit once"):
            edits.apply(program, edits.parse(diff))


def test_edits_do_not_overlap():
    with pytest.raises(edits.EditError, match="overlap"):
        edits.apply("a\nb\nc", edits.parse("-a\n b\n\n-b\n c"))
    with pytest.raises(edits.EditError, match="begin with"):
        edits.parse("a")


@pytest.fixture
def folder(tmp_path):
    """A repository with a program and a module beside it."""
    files = tmp_path / "owner/name/folder"
    files.mkdir(parents=True)
    (files / "script.py").write_text(SCRIPT)
    (files / "shapes.py").write_text(
        "import jax.numpy as jnp\nones = lambda: jnp.ones(4)\n"
    )
    who = "-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"
    for words in ["init"], ["add", "."], [*who, "commit", "-m", "first"]:
        subprocess.run(
            ["git", *words], cwd=files.parent, check=True, capture_output=True
        )
    return tmp_path


def test_a_program_trains_in_both_ways(folder, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setenv("MPLBACKEND", "agg")
    single, half = (training.train(folder, TOY, way) for way in training.WAYS)
    assert single["steps"] == half["steps"] == 20
    assert single["skipped"] == 0 < half["skipped"] < 10
    assert half["last_loss"] < 0.1 * half["first_loss"]


def test_a_notebook_is_its_code(tmp_path, monkeypatch):
    cells = [("code", ["%%time\n", "x = 1\n", "y = 2"]), ("markdown", ["z"])]
    cells = [{"cell_type": kind, "source": source} for kind, source in cells]
    notebook = training.json.dumps({"cells": cells})
    monkeypatch.setattr(training, "git", lambda *_: notebook)
    program = TOY._replace(file="a.ipynb")
    assert training.read(tmp_path, program) == "x = 1\ny = 2"


def test_a_missing_repository_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="owner/name"):
        training.train(tmp_path, TOY, "float32")
