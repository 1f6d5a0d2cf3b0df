"""The CSV file of metrics."""

import csv
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from examples.language_model.files import write_whole

# The first columns. Only the rows of an evaluation have a perplexity.
COLUMNS = ("step", "loss", "perplexity", "loss_scale", "skipped_steps")


class Table:
    """A CSV file with a row per step; its columns are those of its first row.

    Args:
      path: The file.
      step: Rows beyond this step, of a process that died, are dropped.
    """

    def __init__(self, path: Path, step: int):
        kept = list(_rows_until(path, step))
        write_whole(path, "".join(kept))
        self._file = path.open("a", newline="")
        self._names = kept[0].strip().split(",") if kept else []

    def add(self, row: Mapping[str, Any]) -> None:
        """Adds a row, which others who read the file see at once."""
        if not self._names:
            self._names = [*dict.fromkeys((*COLUMNS, *row))]
            self._writer().writeheader()
        self._writer().writerow(row)
        self._file.flush()

    def _writer(self) -> csv.DictWriter:
        return csv.DictWriter(self._file, self._names, lineterminator="\n")

    def flush(self) -> None:
        """Returns when all rows are on the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _rows_until(path: Path, step: int) -> Iterator[str]:
    """Yields the header of a CSV file, if there is one, and its rows up to a step."""
    if step == 0 or not path.exists():
        return
    with path.open(newline="") as file:
        yield file.readline()
        for row in file:
            # The last row may be incomplete; it is beyond the last checkpoint then.
            if not row.endswith("\n") or int(row.split(",")[0]) > step:
                return
            yield row
