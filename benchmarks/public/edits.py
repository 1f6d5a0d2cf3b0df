"""Edits of a program: short diffs without line numbers.

An edit is a block of lines. They begin with "-" (removed), "+" (added) or " " (kept).
The lines that it removes and keeps are in the program once, one after the other. An
empty line separates two edits.
"""

import itertools
from typing import NamedTuple


class Edit(NamedTuple):
    """One place of a program.

    Attributes:
      old: The lines that the program has there.
      new: The lines in their place.
      text: The edit as it is written.
    """

    old: list[str]
    new: list[str]
    text: str


class Lines(NamedTuple):
    """How many lines edits change, imports apart."""

    removed: int
    added: int


class EditError(ValueError):
    """An edit does not fit its program."""


def parse(diff: str) -> list[Edit]:
    """Reads edits."""
    edits = []
    for block in diff.strip("\n").split("\n\n"):
        lines = [(line[:1], line[1:]) for line in block.split("\n")]
        if unknown := {mark for mark, _ in lines} - set("+- "):
            raise EditError(f"a line must begin with +, - or space, got {unknown}")
        old, new = ([x for mark, x in lines if mark in marks] for marks in ("- ", "+ "))
        edits.append(Edit(old, new, block))
    return edits


def apply(program: str, edits: list[Edit]) -> str:
    """Returns a program with all edits.

    Each must fit the program as it is published, at one place, which no other edit
    changes.
    """
    lines = program.split("\n")
    places = sorted((*_place(lines, edit), edit) for edit in edits)
    for (_, end, first), (start, _, second) in itertools.pairwise(places):
        if start < end:
            raise EditError(f"two edits overlap:\n{first.text}\n\n{second.text}")
    for start, end, edit in reversed(places):
        lines[start:end] = edit.new
    return "\n".join(lines)


def _place(lines: list[str], edit: Edit) -> tuple[int, int]:
    size = len(edit.old)
    starts = [i for i in range(len(lines)) if lines[i : i + size] == edit.old]
    if not size or len(starts) != 1:
        raise EditError(f"must fit once, fits {len(starts)} times:\n{edit.text}")
    return starts[0], starts[0] + size


def count(edits: list[Edit]) -> Lines:
    """Counts the lines of edits, without the import of this library."""
    lines = [line for edit in edits for line in edit.text.split("\n")]
    removed, added = (
        sum(
            line.startswith(mark) and "from optax_lossscale " not in line
            for line in lines
        )
        for mark in "-+"
    )
    return Lines(removed, added)
