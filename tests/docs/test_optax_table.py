"""The table of Optax's parts says what running them shows."""

import re

import pytest
from optax_table import PAGE, ROWS, heading, table

pytestmark = pytest.mark.usefixtures("standard_dtype_promotion")
TEXT = PAGE.read_text()
START, END = table(TEXT)
LINES = TEXT[START:END].splitlines()
every_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.code)


@pytest.mark.exhaustive
@every_row
def test_row_is_what_running_it_shows(row):
    assert row.line() in LINES, (
        "python tests/support/optax_table.py makes the table anew"
    )


def test_table_is_made_of_the_rows():
    assert LINES[:2] == heading()
    codes = [line.split(" | ")[0] for line in LINES[2:]]
    assert codes == [f"| `{row.code}`" for row in ROWS]
    assert all(
        line.endswith(f" | {row.note} |")
        for line, row in zip(LINES[2:], ROWS, strict=True)
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "row", [row for row in ROWS if row.check], ids=lambda row: row.code
)
def test_note_is_true(row):
    row.check(row)


def test_words_are_explained():
    words = set()
    for line in LINES[2:]:
        for cell in line.split(" | ")[1:4]:
            words |= set(re.split("[,;] ", re.sub("inf: |nan: ", "", cell))) - {""}
    assert words <= set(re.findall(r"\*(.*?)\*", TEXT[:START])), words
    assert {"exact", "moves", "stops", "nan"} <= words


def test_outermost_is_always_right():
    assert all(line.split(" | ")[1] == "exact" for line in LINES[2:])
