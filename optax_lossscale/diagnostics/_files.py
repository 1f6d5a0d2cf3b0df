"""Tables of Python numbers in CSV and JSON files, without loss."""

import csv
import json
import math
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

FORMAT = "optax_lossscale History"
COUNTS = ("capacity", "stride", "records")


class Table(NamedTuple):
    """What a file holds.

    Attributes:
      counts: The numbers of COUNTS, by name.
      steps: A list of integers.
      columns: By name, lists of as many bools, integers and floats, and None where
        there is nothing.
    """

    counts: dict[str, int]
    steps: list[int]
    columns: dict[str, list[Any]]


def write_table(path: str | os.PathLike[str], table: Table) -> None:
    """Writes a file as a whole: there is the old one or the new one, never a part."""
    write = {".csv": _write_csv, ".json": _write_json}[_suffix(path)]
    path = Path(path).resolve()
    aside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with aside.open("w", encoding="utf-8", newline="") as file:
            write(file, table)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def read_table(path: str | os.PathLike[str]) -> Table:
    """Reads a file; the numbers are not checked."""
    read = {".csv": _read_csv, ".json": _read_json}[_suffix(path)]
    with Path(path).open(encoding="utf-8", newline="") as file:
        return read(file)


def _suffix(path: str | os.PathLike[str]) -> str:
    suffix = Path(path).suffix.lower()
    if suffix not in (".csv", ".json"):
        raise ValueError(
            "path must end in .csv or .json, which chooses the format, got "
            f"{os.fspath(path)!r}."
        )
    return suffix


def _write_csv(file: Any, table: Table) -> None:
    counts = " ".join(f"{name}={table.counts[name]}" for name in COUNTS)
    file.write(f"# {FORMAT}: {counts}\n")
    # Quoted, as a name may hold anything.
    header = csv.writer(file, lineterminator="\n", quoting=csv.QUOTE_ALL)
    header.writerow(["step", *table.columns])
    # What is written tells its type: True, 1 or 1.0.
    for row in zip(table.steps, *table.columns.values(), strict=True):
        file.write(",".join("" if x is None else repr(x) for x in row) + "\n")


def _read_csv(file: Any) -> Table:
    pattern = rf"# {FORMAT}: " + " ".join(rf"{name}=(\d+)" for name in COUNTS)
    first = re.fullmatch(pattern, file.readline().rstrip())
    if first is None:
        raise ValueError(f"the first line is not that of an {FORMAT}")
    counts = dict[str, int](zip(COUNTS, map(int, first.groups()), strict=True))
    names, *rows = csv.reader(file)
    rows = [[_read_cell(text) for text in row] for row in rows]
    if any(len(row) != len(names) for row in rows):
        raise ValueError(f"not all rows have {len(names)} cells")
    steps, *columns = (
        map(list, zip(*rows, strict=True)) if rows else [[] for _ in names]
    )
    return Table(counts, steps, dict(zip(names[1:], columns, strict=True)))


def _read_cell(text: str) -> bool | int | float | None:
    if text in ("", "True", "False"):
        return {"": None, "True": True, "False": False}[text]
    return int(text) if re.fullmatch(r"-?[0-9]+", text) else float(text)


def _write_json(file: Any, table: Table) -> None:
    def cell(value):
        # Strict JSON knows no nan and no infinities: "nan", "inf", "-inf".
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
    content = json.load(file)

    def cell(value):
        return float(value) if isinstance(value, str) else value

    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f'"format" is not "{FORMAT}"')
    columns = {k: list(map(cell, column)) for k, column in content["columns"].items()}
    counts = {name: content[name] for name in COUNTS}
    return Table(counts, content["steps"], columns)
