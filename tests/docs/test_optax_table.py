"""The page about Optax's parts says what running them shows."""

import pytest
from optax_table import EXACT, PAGE, ROWS, page

pytestmark = pytest.mark.usefixtures("standard_dtype_promotion")


@pytest.mark.exhaustive
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.code)
def test_row_is_what_running_it_shows(row):
    inside = [row.inside] if "inner" in row.code else []
    assert [*row.cells()] == [EXACT, row.minimize, *inside]
    if row.check:
        row.check(row)


def test_page_shows_the_rows():
    text = PAGE.read_text()
    assert page(text) == text
    assert f"{len(ROWS)} parts of Optax" in text
