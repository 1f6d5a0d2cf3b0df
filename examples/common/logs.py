"""Logs that do not make the device wait: a CSV file, TensorBoard, a progress line."""

import collections
import csv
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.progress import (
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from tensorboardX import SummaryWriter

# The metrics of a step are read when this many later steps are under way: the device
# has something to do while the host waits, and the host cannot run far ahead.
LAG = 2
# Where there is no terminal, this many lines show how the training goes.
LINES = 20


class Logs:
    """The logs of a run; a context manager. Of several processes the first one writes.

    Args:
      out: The folder. Rows of an earlier process are kept up to `step`.
      step: The steps that were taken before.
      steps: The number of all steps.
      columns: The first columns of the CSV file. The others are the remaining metrics
        of the first row.
      describe: Maps the metrics of a step to the text of the progress line.
    """

    def __init__(
        self,
        out: Path,
        step: int,
        steps: int,
        columns: Sequence[str],
        describe: Callable[[Mapping[str, float]], str],
    ):
        self._describe = describe
        self._pending = collections.deque()
        self._writes = jax.process_index() == 0
        if self._writes:
            self._table = Table(out / "metrics.csv", step, columns)
            self._board = SummaryWriter(str(out / "tensorboard"), purge_step=step + 1)
            self._line = ProgressLine(step, steps)

    def __enter__(self) -> "Logs":
        return self

    def __exit__(self, *_: object) -> None:
        self.flush()
        if self._writes:
            self._table.close()
            self._board.close()
            self._line.close()

    def add(
        self, step: int, metrics: Mapping[str, jax.Array], has_row: bool = True
    ) -> None:
        """Logs the metrics of a step some steps later.

        Args:
          step: The number of the step.
          metrics: Scalars on the device, by name.
          has_row: Whether the CSV file and TensorBoard get them, or the progress line
            alone.
        """
        self._pending.append((step, metrics, has_row))
        if len(self._pending) > LAG:
            self._write(*self._pending.popleft())

    def flush(self) -> None:
        """Waits for all steps so far, and writes their rows to the disk."""
        while self._pending:
            self._write(*self._pending.popleft())
        if self._writes:
            self._table.flush()
            self._board.flush()

    def _write(self, step, metrics, has_row) -> None:
        values = {name: x.item() for name, x in jax.device_get(metrics).items()}
        if not self._writes:
            return
        self._line.show(step, self._describe(values))
        if has_row:
            self._table.add({"step": step, **values})
            for name, value in values.items():
                if math.isfinite(value):  # of others TensorBoard only warns
                    self._board.add_scalar(name, value, step)


class Table:
    """A CSV file with a row per step; its columns are those of its first row.

    Args:
      path: The file.
      step: Rows beyond this step, of a process that died, are dropped.
      columns: The first columns, of which a row may lack some.
    """

    def __init__(self, path: Path, step: int, columns: Sequence[str]):
        kept = list(_rows_until(path, step))
        write_whole(path, "".join(kept))
        self._file = path.open("a", newline="")
        self._columns = columns
        self._names = kept[0].strip().split(",") if kept else []

    def add(self, row: Mapping[str, Any]) -> None:
        """Adds a row, which everyone who reads the file sees at once."""
        if not self._names:
            self._names = [*dict.fromkeys((*self._columns, *row))]
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


class ProgressLine:
    """Shows the last step on one line.

    Args:
      step: The steps that were taken before.
      steps: The number of all steps.
    """

    def __init__(self, step: int, steps: int):
        self._console = Console()
        self._every = max(steps // LINES, 1)
        self._steps = steps
        # Without a bar, for which a terminal of 80 columns has no place.
        columns = (
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(compact=True),
        )
        self._progress = Progress(
            *columns, console=self._console, disable=not self._console.is_terminal
        )
        self._task = self._progress.add_task("compiling", completed=step, total=steps)
        self._progress.start()

    def show(self, step: int, text: str) -> None:
        """Shows a step and its metrics."""
        self._progress.update(self._task, completed=step, description=text)
        if not self._console.is_terminal and step % self._every == 0:
            print(f"step {step} of {self._steps}  {text}", flush=True)

    def close(self) -> None:
        """Leaves the line as it is."""
        self._progress.stop()


def describe_scaling(values: Mapping[str, float]) -> str:
    """Returns the loss scale and its counters, for the progress line."""
    text = f"scale {values['loss_scale']:g}  skipped {values['skipped_steps']:g}"
    if "retries" in values:
        text += f"  repeated {values['retries']:g}"
    return text


def write_whole(path: Path, text: str) -> None:
    """Writes a file that is whole whenever the process dies: renames a draft."""
    draft = path.with_name(path.name + ".partial")
    draft.write_text(text)
    draft.replace(path)
