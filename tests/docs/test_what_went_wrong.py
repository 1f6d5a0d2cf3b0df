"""Each mistake on the page names tests, and these are there."""

import ast
import re

import pytest
from helpers import ROOT

PAGE = ROOT / "docs/guide/what-went-wrong.md"
ROWS = [line for line in PAGE.read_text().splitlines() if line.startswith("| **")]


def names_in(path):
    """Returns the names of the tests of a file, of classes too."""
    nodes = ast.walk(ast.parse(path.read_text()))
    names = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    return {name for name in names if name.startswith("test_")}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[4:30])
def test_each_mistake_has_a_test(row):
    _, _, _, last, _ = row.split("|")
    named = re.findall(r"\[`(test_\w+)`\]\((.*?)\)", last)
    assert named
    for name, path in named:
        assert name in names_in((PAGE.parent / path).resolve())


def test_the_page_has_a_table():
    assert len(ROWS) >= 15
