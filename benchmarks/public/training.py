"""Runs a program of a public repository, with edits.

A program runs in a process of its own, where it may import modules of any name. So this
module imports nothing of `benchmarks` but edits and the table of programs.
"""

import contextlib
import importlib.abc
import importlib.machinery
import io
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import types
import warnings
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any
from unittest import mock

import jax
import numpy as np

from benchmarks.public import edits
from benchmarks.public.programs import Program
from optax_lossscale import diagnostics

FLOAT32, FLOAT16 = WAYS = "float32", "float16"


class Mocks(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports mocks of libraries that only load or draw data."""

    def __init__(self, names: Sequence[str]):
        self.names = names

    def find_spec(self, name, path=None, target=None):
        """Finds these libraries and the modules in them."""
        if any(f"{name}.".startswith(f"{x}.") for x in self.names):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        """Returns a mock."""
        return mock.MagicMock(name=spec.name)

    def exec_module(self, module):
        """Does nothing, as a mock has all names."""


class Log:
    """The losses of a training, and which steps were skipped."""

    def __init__(self):
        self.losses: list[float] = []
        self.skipped = 0

    def record(self, loss: Any = None, state: Any = None) -> None:
        """Adds the loss of a step, and the state of its optimizer, compiled or not."""
        if loss is not None:
            jax.debug.callback(lambda x: self.losses.append(float(x)), loss)
        # In float32 no state counts skipped steps.
        with contextlib.suppress(ValueError):
            applied = diagnostics.metrics(state)["last_step_applied"]
            jax.debug.callback(self._count, applied)

    def _count(self, applied):
        self.skipped += not applied

    def result(self) -> dict[str, Any]:
        """Returns the number of steps, the first and last losses, and skipped steps."""
        jax.effects_barrier()
        few = max(1, len(self.losses) // 10)
        first, last = (
            math.fsum(x) / few for x in (self.losses[:few], self.losses[-few:])
        )
        counts = {"steps": len(self.losses), "skipped": self.skipped}
        return {**counts, "first_loss": first, "last_loss": last}


def git(repository: Path, *words: str) -> str:
    """Returns the output of git in a repository."""
    command = ["git", "-C", str(repository), *words]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        raise FileNotFoundError(f"{' '.join(command)}: {run.stderr.strip()}")
    return run.stdout


def read(repository: Path, program: Program) -> str:
    """Returns the code of a program, of a notebook that of its cells."""
    source = git(repository, "show", f"{program.commit}:{program.file}")
    if not program.file.endswith(".ipynb"):
        return source
    cells = [x for x in json.loads(source)["cells"] if x["cell_type"] == "code"]
    lines = "\n\n".join("".join(cell["source"]) for cell in cells).split("\n")
    return "\n".join(line for line in lines if not line.startswith(("%", "!")))


def edited(source: str, program: Program, way: str) -> str:
    """Returns the code that runs in float32 or in float16."""
    found = edits.parse(program.setting) if program.setting else []
    if way == FLOAT16:
        found += edits.parse(program.float16)
    return edits.apply(source, found)


def copy_modules(repository: Path, program: Program, root: Path) -> None:
    """Copies the Python files beside a program, and those that make packages."""
    folders = PurePosixPath(program.file).parents
    paths = [f"{folders[0]}/"] if program.file.endswith(".py") else []
    if program.is_package:
        paths += [f"{folder}/__init__.py" for folder in folders[1:-1]]
    if not paths:
        return
    listed = git(repository, "ls-tree", "--name-only", program.commit, "--", *paths)
    for path in listed.split():
        if path.endswith(".py"):
            copy = root / path
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(git(repository, "show", f"{program.commit}:{path}"))


def train(folder: Path, program: Program, way: str) -> dict[str, Any]:
    """Trains a program.

    Args:
      folder: Repositories, `owner/name`, as clones that have the commit.
      program: The program.
      way: "float32" or "float16".

    Returns:
      The result of `Log`.
    """
    repository = (folder / program.repository).resolve()
    code = edited(read(repository, program), program, way)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    sys.meta_path.insert(0, Mocks(program.mocks))
    os.environ["MPLBACKEND"] = "agg"  # Draw figures, and show none.
    warnings.filterwarnings("error", "autocast computes nothing")
    log = Log()
    with (
        tempfile.TemporaryDirectory() as name,
        contextlib.chdir(name),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        root = Path(name)
        copy_modules(repository, program, root)
        path = (root / program.file).with_suffix(".py")
        sys.path[:0] = [str(path.parent)] + [name] * program.is_package
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(code)  # Where errors and diagnostics read the lines.
        module = sys.modules["program"] = types.ModuleType("program")
        vars(module).update(__file__=str(path), record=log.record)
        exec(compile(code, path, "exec"), vars(module))
        exec(program.run, vars(module))
        return log.result()
