"""Runs the pages of the documentation as a reader pastes them."""

import contextlib
import doctest
import io
import linecache
import re

import jax
from helpers import ROOT

BLOCK = re.compile(r"```python\n(.*?)```(?:\n\n```\n(.*?)```)?", re.DOTALL)
# What a page asserts of itself. Readers do not see it.
CHECK = re.compile(r"^<!-- check\n(.*?)^-->$", re.DOTALL | re.MULTILINE)
FRAGMENT = re.compile(r"```py\n(.*?)```", re.DOTALL)
CHECKER = doctest.OutputChecker()


def page_blocks(path):
    """Returns the blocks of Python of a page, each with the output shown below it."""
    return BLOCK.findall((ROOT / path).read_text())


def page_fragments(path):
    """Returns the code of a page that is not pasted with its blocks."""
    return FRAGMENT.findall((ROOT / path).read_text())


def run_blocks(path, filename="train.py"):
    """Runs a page as one script, and yields each block, and the variables after it.

    What a block prints is compared with the block below it, in which `...` stands for
    anything. (A block of "text" below it is not compared: numbers of one machine.)

    Args:
      path: The page, from the root of the repository.
      filename: What the script is called. The lines of "train.py" are those of the
        blocks, of another file those of the page. Python shows them where it quotes
        the script.
    """
    text, script, scope = (ROOT / path).read_text(), "", {"__name__": "train"}
    for match in BLOCK.finditer(text):
        code, shown = match.groups()
        before = script if filename == "train.py" else text[: match.start(1)]
        source = (before + code).splitlines(keepends=True)
        linecache.cache[filename] = len(source), None, source, filename
        printed = io.StringIO()
        with (
            jax.numpy_dtype_promotion("standard"),
            contextlib.redirect_stdout(printed),
        ):
            exec(compile("\n" * before.count("\n") + code, filename, "exec"), scope)
        printed = printed.getvalue()
        if shown is not None:
            assert CHECKER.check_output(shown, printed, doctest.ELLIPSIS), printed
        yield code, printed if shown is None else "", scope
        script += code + "\n"


def run_page(path, filename="train.py"):
    """Runs a page, and returns its variables."""
    (*_, (_, _, scope)) = run_blocks(path, filename)
    return scope


def run_checks(path, scope, filename):
    """Runs what a page asserts of its variables, after its blocks."""
    text = (ROOT / path).read_text()
    lines = text.splitlines(keepends=True)
    linecache.cache[filename] = len(lines), None, lines, filename
    checks = list(CHECK.finditer(text))
    assert checks, f"{path} needs a comment '<!-- check' with its asserts"
    for match in checks:
        above = "\n" * text.count("\n", 0, match.start(1))
        exec(compile(above + match[1], filename, "exec"), scope)
