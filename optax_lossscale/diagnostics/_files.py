"""Tables of Python numbers in CSV and JSON files, without loss."""

import contextlib
import csv
import io
import json
import math
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, TextIO

FORMAT = "optax_lossscale History"
COUNTS = ("capacity", "stride", "records")
# JSON has no such numbers: they are written as strings.
NOT_FINITE = {repr(x): x for x in (math.nan, math.inf, -math.inf)}

# The names of temporary files are short: the file's own name may already be as long as
# the file system allows.
ASIDE, ABANDONED_AFTER = ".optax_lossscale-", 24 * 60 * 60


class Table(NamedTuple):
    """What a file holds.

    Attributes:
      counts: A number for each name in `COUNTS`.
      steps: A list of integers.
      columns: By name, lists of as many bools, integers and floats; None where a step
        lacks the metric.
    """

    counts: dict[str, int]
    steps: list[int]
    columns: dict[str, list[Any]]


def write_table(path: str | os.PathLike[str], table: Table) -> None:
    """Writes a table to a file."""
    write = {".csv": _write_csv, ".json": _write_json}[_suffix(path)]
    write_file(path, lambda file: write(file, table))


def write_file(path: str | os.PathLike[str], write: Callable[[TextIO], object]) -> Path:
    """Writes a file atomically: a crash leaves the old file or the new one.

    Args:
      path: The file.
      write: Writes to an open file.

    Returns:
      The path, absolute.
    """
    path = Path(path).resolve()
    _remove_abandoned(path.parent)
    # Random: threads and containers may share a process id.
    aside = path.with_name(f"{ASIDE}{secrets.token_hex(8)}.tmp")
    try:
        with aside.open("x", encoding="utf-8", newline="") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        # Keep the permissions of the old file, if there is one.
        with contextlib.suppress(OSError):
            shutil.copymode(path, aside)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
    return path


def _remove_abandoned(folder: Path) -> None:
    """Removes the temporary files of processes that were killed while writing."""
    for aside in folder.glob(f"{ASIDE}*.tmp"):
        # Another process may have removed it, or only another user may.
        with contextlib.suppress(OSError):
            if time.time() - aside.stat().st_mtime > ABANDONED_AFTER:
                aside.unlink()


def read_table(path: str | os.PathLike[str]) -> Table:
    """Reads a file, without checking whether its numbers are consistent."""
    read = {".csv": _read_csv, ".json": _read_json}[_suffix(path)]
    with Path(path).open(encoding="utf-8", newline="") as file:
        return read(file)


def _suffix(path: str | os.PathLike[str]) -> str:
    suffix = Path(path).suffix.lower()
    if suffix not in (".csv", ".json"):
        raise ValueError(
            "path must end in .csv or .json, which selects the format, got "
            f"{os.fspath(path)!r}."
        )
    return suffix


def _write_csv(file: Any, table: Table) -> None:
    counts = " ".join(f"{name}={table.counts[name]}" for name in COUNTS)
    file.write(f"# {FORMAT}: {counts}\n")
    # Quoted: a name may contain any character.
    header = csv.writer(file, lineterminator="\n", quoting=csv.QUOTE_ALL)
    header.writerow(["step", *table.columns])
    # repr keeps the type: True, 1 or 1.0.
    for row in zip(table.steps, *table.columns.values(), strict=True):
        file.write(",".join("" if x is None else repr(x) for x in row) + "\n")


def _read_csv(file: Any) -> Table:
    pattern = rf"# {FORMAT}: " + " ".join(rf"{name}=([0-9]+)" for name in COUNTS)
    first = re.fullmatch(pattern, file.readline().rstrip())
    if first is None:
        raise ValueError(f"the first line is not the header of an {FORMAT}")
    counts = dict[str, int](zip(COUNTS, map(int, first.groups()), strict=True))
    text = file.read()
    # Otherwise a 12 at the end may be a 128.0 that was cut.
    if not text.endswith("\n"):
        raise ValueError("the last line is incomplete")
    names, *rows = csv.reader(io.StringIO(text, newline=""), strict=True)
    if names[:1] != ["step"]:
        raise ValueError('the first column is not "step"')
    rows = [[_read_cell(text) for text in row] for row in rows]
    if any(len(row) != len(names) for row in rows):
        raise ValueError(f"not all rows have {len(names)} cells")
    steps, *columns = (
        map(list, zip(*rows, strict=True)) if rows else [[] for _ in names]
    )
    return Table(counts, steps, _by_name(zip(names[1:], columns, strict=True)))


def _read_cell(text: str) -> bool | int | float | None:
    if text in ("", "True", "False"):
        return {"": None, "True": True, "False": False}[text]
    number = int(text) if re.fullmatch(r"-?[0-9]+", text) else float(text)
    # float also reads " 1_0", which `History.save` never writes.
    if repr(number) != text:
        raise ValueError(f"{text!r} is not a number as History.save writes it")
    return number


def _by_name(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Makes a dictionary; raises if a name occurs twice, as one would be lost."""
    pairs = list(pairs)
    named = dict(pairs)
    if len(named) != len(pairs):
        raise ValueError(f"a name occurs twice in {[name for name, _ in pairs]}")
    return named


def _write_json(file: Any, table: Table) -> None:
    def cell(value):
        return value if value is None or math.isfinite(value) else repr(value)

    columns = {name: list(map(cell, column)) for name, column in table.columns.items()}
    content = {
        "format": FORMAT,
        **table.counts,
        "steps": table.steps,
        "columns": columns,
    }
    json.dump(content, file, allow_nan=False)


def _read_json(file: Any) -> Table:
    content = json.load(file, object_pairs_hook=_by_name)

    def cell(value):
        return NOT_FINITE[value] if isinstance(value, str) else value

    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f'"format" is not "{FORMAT}"')
    columns = {k: list(map(cell, column)) for k, column in content["columns"].items()}
    counts = {name: content[name] for name in COUNTS}
    return Table(counts, content["steps"], columns)
