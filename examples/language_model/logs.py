"""Logs that do not make the device wait: a CSV file, TensorBoard, a progress line."""

import collections
import math
from collections.abc import Mapping
from pathlib import Path

import jax
from tensorboardX import SummaryWriter

from examples.language_model.config import Config
from examples.language_model.progress import ProgressLine
from examples.language_model.table import Table

# The metrics of a step are read when this many later steps are under way: the device
# has something to do while the host waits, and the host cannot run far ahead.
LAG = 2


class Logs:
    """The logs of a run; a context manager. Of several processes the first one writes.

    Args:
      out: The folder. What an earlier process logged there is kept up to `step`.
      config: The settings.
      step: The steps that were taken before.
    """

    def __init__(self, out: Path, config: Config, step: int):
        self._every = config.log_every
        self._pending = collections.deque()
        self._writes = jax.process_index() == 0
        if self._writes:
            self._table = Table(out / "metrics.csv", step)
            self._board = SummaryWriter(str(out / "tensorboard"), purge_step=step + 1)
            self._line = ProgressLine(step, config.steps)

    def __enter__(self) -> "Logs":
        return self

    def __exit__(self, *_: object) -> None:
        self.flush()
        if self._writes:
            self._table.close()
            self._board.close()
            self._line.close()

    def add(self, step: int, metrics: Mapping[str, jax.Array]) -> None:
        """Logs the metrics of a step some steps later.

        Args:
          step: The number of the step.
          metrics: Scalars on the device, by name.
        """
        self._pending.append((step, metrics))
        if len(self._pending) > LAG:
            self._write(*self._pending.popleft())

    def flush(self) -> None:
        """Waits for all steps so far, and writes their rows to the disk."""
        while self._pending:
            self._write(*self._pending.popleft())
        if self._writes:
            self._table.flush()
            self._board.flush()

    def _write(self, step: int, metrics: Mapping[str, jax.Array]) -> None:
        values = {name: x.item() for name, x in jax.device_get(metrics).items()}
        if not self._writes:
            return
        self._line.show(step, values)
        if step % self._every == 0 or "perplexity" in values:
            self._table.add({"step": step, **values})
            for name, value in values.items():
                if math.isfinite(value):  # of others TensorBoard only warns
                    self._board.add_scalar(name, value, step)
