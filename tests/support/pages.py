"""Runs the pages of the documentation as a reader pastes them."""

import contextlib
import doctest
import io
import linecache
import re
from pathlib import Path

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


def has_check(path):
    """Whether a page asserts something of itself."""
    return bool(CHECK.search((ROOT / path).read_text()))


def run_blocks(path, filename="train.py"):
    """Runs a page as one script, and yields each block, and the variables after it.

    What a block prints is compared with the block below it, in which `...` stands for
    anything. (A block of "text" below it is not compared: numbers of one machine.) At
    last runs what the page asserts of itself.

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
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            run(before, code, filename, scope)
        printed = printed.getvalue()
        if shown is not None:
            is_shown = CHECKER.check_output(shown, printed, doctest.ELLIPSIS)
            assert is_shown, f"{path} shows:\n{shown}\nprinted:\n{printed}"
        yield code, printed if shown is None else "", scope
        script += code + "\n"
    for match in CHECK.finditer(text):
        run(text[: match.start(1)], match[1], Path(path).name, scope)


def run(before, code, filename, scope):
    """Runs code below other lines of a file, which is shown where an error is."""
    source = (before + code).splitlines(keepends=True)
    linecache.cache[filename] = len(source), None, source, filename
    with jax.numpy_dtype_promotion("standard"):
        exec(compile("\n" * before.count("\n") + code, filename, "exec"), scope)


def run_page(path, filename="train.py"):
    """Runs a page, and returns its variables."""
    (*_, (_, _, scope)) = run_blocks(path, filename)
    return scope
