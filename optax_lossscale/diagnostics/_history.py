"""A record of metrics on the host: bounded in size, and saved to files."""

import bisect
import itertools
import os
from collections.abc import Mapping
from csv import Error
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale import _check as check
from optax_lossscale.diagnostics._common import check_host
from optax_lossscale.diagnostics._files import COUNTS, Table, read_table, write_table


class History:
    """Records metrics over a training run, for plots and files.

    It lives on the host, next to the training loop, and its size is bounded. When it
    exceeds `capacity` rows, it drops every second one, and from then on keeps only
    every second recorded step; later every fourth, and so on. The whole run stays
    visible, at a lower resolution. The first and the last recorded step are always
    kept. Counts over the whole run, such as `skipped_steps`, stay exact.

    Args:
      capacity: The largest number of rows to keep, at least 2.

    Raises:
      TypeError: If `capacity` is not a number.
      ValueError: If `capacity` is not a whole number of at least 2.

    Examples:
      >>> import jax.numpy as jnp
      >>> from optax_lossscale.diagnostics import History
      >>> history = History(capacity=4)
      >>> for step in range(8):
      ...     history.record(step, {"loss_scale": jnp.float32(2.0**step)})
      >>> len(history), history.steps.tolist()
      (3, [0, 4, 7])
      >>> history.columns["loss_scale"].tolist()
      [1.0, 16.0, 128.0]
    """

    def __init__(self, capacity: int = 10_000):
        self._capacity = check.count("capacity", capacity, at_least=2)
        self._steps: list[int] = []
        self._values: list[dict[str, bool | int | float]] = []
        # Records are numbered from zero. Row k holds record k * stride, except for the
        # last row, which holds record records - 1. The next record replaces it unless
        # it too is at a multiple of the stride.
        self._stride = 1
        self._records = 0

    @property
    def capacity(self) -> int:
        """The largest number of rows to keep."""
        return self._capacity

    def __len__(self) -> int:
        return len(self._steps)

    def record(self, step: Any, metrics: Mapping[str, Any]) -> None:
        """Records the metrics of a step.

        Numbers are copied to the host immediately, because the next step may reuse the
        memory of a donated state. The copy waits for the step to end: call this where
        you log, not in every step of a fast loop.

        A run that is restored from a checkpoint repeats steps: if `step` is not above
        the last recorded one, all rows from that step on are removed first. New rows
        are then as dense as the remaining ones, or, if at most one remains, as dense as
        in a new history.

        Args:
          step: The number of the step, an integer.
          metrics: Scalars by name, as `metrics` returns them: arrays or Python
            numbers, real or bool. The names may differ between steps.

        Returns:
          None.

        Raises:
          TypeError: Under a transformation of JAX, such as `jax.jit`; if `step` is not
            an integer, a name not a string, or a metric not a real number or a bool.
          ValueError: If a metric is not a scalar, or is named "step"; if an integer
            needs more than 64 bits.
        """
        if not isinstance(metrics, Mapping):
            raise TypeError(
                f"metrics must be a dictionary of scalars, got {type(metrics).__name__}"
                ". diagnostics.metrics(state) returns one."
            )
        for name in metrics:
            if not isinstance(name, str):
                raise TypeError(f"Names of metrics must be strings, got {name!r}.")
            _check_name(name)
        arrays = [step, *metrics.values()]
        check_host("History.record", arrays)
        step, *scalars = jax.device_get(arrays)
        number = _to_python("step", step)
        if type(number) is not int:
            raise TypeError(f"step must be an integer, got {step!r}.")
        pairs = zip(metrics, scalars, strict=True)
        values = {name: _to_python(f"metrics[{name!r}]", x) for name, x in pairs}
        self._truncate(number)
        if self._records and (self._records - 1) % self._stride:
            del self._steps[-1], self._values[-1]
        self._steps.append(number)
        self._values.append(values)
        self._records += 1
        if len(self) > self._capacity:
            self._thin()

    def _truncate(self, step: int) -> None:
        """Removes the rows from `step` on."""
        rows = bisect.bisect_left(self._steps, step)
        if rows < len(self):
            del self._steps[rows:], self._values[rows:]
            # Rows are a stride apart: the records between them are lost.
            self._stride = self._stride if rows > 1 else 1
            self._records = (rows - 1) * self._stride + 1 if rows else 0

    def _thin(self) -> None:
        """Drops every second row, except for the last."""
        self._stride *= 2
        self._steps = [*self._steps[:-1:2], self._steps[-1]]
        self._values = [*self._values[:-1:2], self._values[-1]]

    @property
    def steps(self) -> np.ndarray:
        """The steps of the rows, int64[rows], ascending."""
        return np.array(self._steps, np.int64)

    @property
    def columns(self) -> dict[str, np.ndarray]:
        """The metrics by name, each an array of shape [rows].

        Its dtype is bool, int64 or float64, whichever holds all values of the metric.
        If some rows lack the metric, it is a masked array (`numpy.ma`).
        """
        names = dict.fromkeys(name for row in self._values for name in row)
        return {name: self._column(name) for name in names}

    def _column(self, name: str) -> np.ndarray:
        present = [row[name] for row in self._values if name in row]
        mask = np.array([name not in row for row in self._values])
        values = np.array(present)
        if not mask.any():
            return values
        column = np.zeros(len(self), values.dtype)
        column[~mask] = values
        return np.ma.array(column, mask=mask)

    @property
    def rows(self) -> list[dict[str, bool | int | float]]:
        """The rows, each a dictionary of "step" and its metrics."""
        pairs = zip(self._steps, self._values, strict=True)
        return [{"step": step, **values} for step, values in pairs]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the history to a file, without loss.

        The file is written under another name and then renamed, so that a crash leaves
        the old file or the new one, never a part. If several threads or processes save
        to one path, the last one wins. A process that is killed while it saves leaves a
        hidden file, `.optax_lossscale-*.tmp`, in that folder; the first save there
        after a day removes it.

        You can read CSV with `pandas.read_csv(path, comment="#")`. JSON is strict: nan
        and infinities are strings, and a metric that a row lacks is null.

        Args:
          path: The file. Its suffix, ".csv" or ".json", selects the format.

        Returns:
          None.

        Raises:
          ValueError: If the suffix is another one.
        """
        names = self.columns
        columns = {k: [row.get(k) for row in self._values] for k in names}
        counts = (self._capacity, self._stride, self._records)
        numbers = dict[str, int](zip(COUNTS, counts, strict=True))
        write_table(path, Table(numbers, self._steps, columns))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "History":
        """Reads a file that `save` has written.

        Args:
          path: The file, ".csv" or ".json".

        Returns:
          A `History` that continues as the saved one would have.

        Raises:
          ValueError: If the suffix is another one, or the file is damaged or was not
            written by `save`.

        Examples:
          >>> import tempfile
          >>> from optax_lossscale.diagnostics import History
          >>> history = History()
          >>> history.record(0, {"loss_scale": 2.0**15, "last_step_applied": True})
          >>> with tempfile.TemporaryDirectory() as folder:
          ...     history.save(f"{folder}/run.csv")
          ...     history = History.load(f"{folder}/run.csv")
          >>> history.rows
          [{'step': 0, 'loss_scale': 32768.0, 'last_step_applied': True}]
        """
        try:
            counts, steps, columns = read_table(path)
            if not isinstance(steps, list):
                raise TypeError("steps must be a list")
            for name in columns:
                _check_name(name)
            history = cls(counts["capacity"])
            history._stride = check.count("stride", counts["stride"])
            history._records = check.count("records", counts["records"], at_least=0)
            history._steps = steps
            rows = zip(*columns.values(), strict=True) if columns else [()] * len(steps)
            for row in rows:
                pairs = zip(columns, row, strict=True)
                history._values.append({k: v for k, v in pairs if v is not None})
            history._check()
        except (
            AttributeError,
            Error,
            LookupError,
            RecursionError,
            TypeError,
            ValueError,
        ) as error:
            raise ValueError(
                f"{os.fspath(path)!r} cannot be loaded. It must be a .csv or .json "
                f"file that History.save has written: {error}"
            ) from error
        return history

    def _check(self) -> None:
        """Raises if the numbers that were read are inconsistent."""
        expected = -(-(self._records - 1) // self._stride) + 1 if self._records else 0
        if not len(self) == len(self._values) == expected <= self._capacity:
            raise ValueError(
                f"there are {len(self)} steps and {len(self._values)} rows, not "
                f"{expected}"
            )
        for step in self._steps:
            if type(_to_python("step", step)) is not int:
                raise ValueError("steps must be integers")
        if any(x >= y for x, y in itertools.pairwise(self._steps)):
            raise ValueError("steps must ascend")
        for row in self._values:
            for name, value in row.items():
                _to_python(name, value)


def _check_name(name: str) -> None:
    if name == "step":
        raise ValueError('A metric must not be named "step", the column of steps.')


def _to_python(name: str, value: Any) -> bool | int | float:
    """Returns a scalar on the host as a Python number."""
    if np.shape(value) != ():
        raise ValueError(
            f"{name} must be a scalar, got shape {np.shape(value)}. If the state "
            "belongs to many members or devices, record one of them, or each under its "
            "own name."
        )
    dtype = getattr(value, "dtype", None)
    kinds = (bool, jnp.bool_), (int, jnp.integer), (float, jnp.floating)
    for python, kind in kinds:
        is_python = dtype is None and isinstance(value, python)
        if is_python or (dtype is not None and jnp.issubdtype(dtype, kind)):
            number = python(value)
            if python is int and not -(2**63) <= number < 2**63:
                raise ValueError(f"{name} must fit into 64 bits, got {number}.")
            return number
    raise TypeError(
        f"{name} must be a real number or a bool, got {value!r} of type "
        f"{type(value).__name__}."
    )
