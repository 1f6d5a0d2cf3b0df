"""The rows of all sites of a program: one by one, or those of equal sizes together."""

import abc
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optax_lossscale.diagnostics._trace.measure.statistics import (
    NOTHING,
    Comparable,
    row_of,
)
from optax_lossscale.diagnostics._trace.run import FIELDS, FROM_FINITE, MORE, NOWHERE

BEGINS = FIELDS.index("begins")
# The shares of inf and of nan, which stand side by side.
NONFINITE = slice(FIELDS.index("infs"), FIELDS.index("nans") + 1)
# A group has at most GROUPED numbers, to save memory, and MEMBERS arrays: more of them
# compile slowly. Small arrays are repeated up to ROW numbers, if that is a multiple of
# their size. More numbers compile no faster, and each iteration of a loop counts them.
ROW, GROUPED, MEMBERS = 2**8, 2**20, 2**8
# Three more operands, after the rows, with their shares of inf and nan together and of
# nan: none, to fill up short lists; a constant of inf; and that of a row which is no
# result of an operation, as if all of its inf and nan were there before.
NO_OPERAND, INF_MASK, NOTHING_BEGINS = range(3)
EXTRA_SHARES = np.array([[0, 0], [1, 0], [1, 1]], np.float32)


class Operands(NamedTuple):
    """The operands of a result, from which inf and nan may come.

    Attributes:
      inputs: The sites of the operands.
      constants: The operands that are constants.
      is_elementwise: Whether each number is made of one of each operand, so that new
        inf and nan can be counted.
    """

    inputs: Sequence[int]
    constants: Sequence[float]
    is_elementwise: bool


class Rows(abc.ABC):
    """The statistics of arrays: one row for each site.

    Attributes:
      sites: The sites, in the order of their rows.
      rows: The rows, in parts: each i32[n, len(FIELDS)], of some of the sites.
      operands: By site, the operands of a result in which inf or nan may begin.
    """

    def __init__(self):
        """Begins without rows."""
        self.sites: list[int] = []
        self.rows: list[Any] = []
        self.operands: dict[int, Operands] = {}

    @abc.abstractmethod
    def call(self, function: Callable[..., Any], *args: Any, key: Any = None) -> Any:
        """Calls a function of pytrees of arrays; functions of one key do the same."""

    @abc.abstractmethod
    def add(self, site: int, real: Any, twin: Any) -> None:
        """Adds the row of an array and its twin.

        Args:
          site: The number of its site.
          real: The array.
          twin: Its twin in float32; None if it has none.
        """

    def extend(self, sites: Sequence[int], rows: Any) -> None:
        """Adds the rows of a loop, a branch or a device, and their sites."""
        self.sites += sites
        self.rows.append(rows)

    def with_beginnings(self, rows: Any) -> Any:
        """Fills in the column "begins" of all rows; see `run.FROM_FINITE`."""
        index, is_elementwise = self._operand_table()
        xp = np if isinstance(rows, np.ndarray) else jnp
        infs, nans = rows[:, NONFINITE].view(np.float32).T
        # Of each row the share of inf and nan together, and that of nan.
        shares = xp.stack([infs + nans, nans], 1)
        before = xp.concatenate([shares, EXTRA_SHARES])[index].sum(1)
        is_first = (shares[:, 0] > 0) & (before[:, 0] == 0)
        is_more = (shares[:, 1] > 0) & (before[:, 1] == 0)
        is_more |= is_elementwise & (shares[:, 0] > 1.001 * before[:, 0])
        begins = xp.where(is_first, FROM_FINITE, xp.where(is_more, MORE, NOWHERE))
        # The rows of a loop or a branch inside have this column already.
        column = np.eye(len(FIELDS), dtype=np.int32)[[BEGINS]]
        bits = begins.astype(np.float32).view(np.int32)
        return xp.maximum(rows, bits[:, None] * column)

    def _operand_table(self):
        """Returns the rows of each row's operands, and whether it is elementwise.

        Returns:
          i32[rows, operands]: indices of rows, then of `EXTRA_SHARES`.
          bool[rows].
        """
        n = len(self.sites)
        place_of = {site: i for i, site in enumerate(self.sites)}
        operands: list[list[int]] = [[n + NOTHING_BEGINS]] * n
        is_elementwise = np.zeros(n, bool)
        for site, (inputs, constants, each) in self.operands.items():
            is_elementwise[place_of[site]] = each
            # An inf may be a mask, but with a constant of nan the nan begins here.
            masks = [n + INF_MASK] * any(map(math.isinf, constants))
            known = [place_of[k] for k in inputs if k in place_of]
            operands[place_of[site]] = known + masks
        width = max(map(len, operands), default=0)
        padded = [x + [n + NO_OPERAND] * (width - len(x)) for x in operands]
        return np.array(padded, np.int32).reshape(n, width), is_elementwise


class TapeRows(Rows):
    """Rows of which each is a step of a tape."""

    def __init__(self, call: Callable[..., Any]):
        """Begins without rows.

        Args:
          call: Adds a step to the tape; see `Tape.call`.
        """
        super().__init__()
        self._call = call

    def call(self, function: Callable[..., Any], *args: Any, key: Any = None) -> Any:
        """Adds a step; returns the slots of its results."""
        return self._call(function, *args, key=key)

    def add(self, site: int, real: Any, twin: Any) -> None:
        """Adds a step that computes the row of an array and its twin."""
        self.extend([site], self.call(row_of, real, twin, key=row_of))


class GroupedRows(Rows):
    """Rows in one program: those of arrays of one size are computed together.

    That compiles faster.
    """

    def __init__(self):
        """Begins without groups."""
        super().__init__()
        self._groups: dict[Any, list[tuple[int, Comparable]]] = {}

    def call(self, function: Callable[..., Any], *args: Any, key: Any = None) -> Any:
        """Calls a function."""
        del key
        return function(*args)

    def add(self, site: int, real: Any, twin: Any) -> None:
        """Adds an array and its twin to the group of their size."""
        arrays = Comparable.of(real, twin)
        size = arrays.real.size
        if not size or 2 * size > GROUPED or not _is_replicated(arrays.real):
            row = arrays.reduced(tuple(range(arrays.real.ndim)))
            self.extend([site], row[None])
            return
        size = ROW if size < ROW and ROW % size == 0 else size
        kind = arrays.edge, arrays.twin is not arrays.real, size
        group = self._groups.setdefault(kind, [])
        group.append((site, arrays))
        if (len(group) + 1) * size > GROUPED or len(group) == MEMBERS:
            self._reduce_group(kind)

    def finish(self) -> Any:
        """Returns all rows, i32[len(sites), len(FIELDS)], with the column "begins"."""
        for kind in list(self._groups):
            self._reduce_group(kind)
        return self.with_beginnings(jnp.concatenate([NOTHING[None][:0], *self.rows]))

    def _reduce_group(self, kind):
        edge, has_twin, size = kind
        sites, arrays = zip(*self._groups.pop(kind), strict=True)
        real = _stacked([x.real for x in arrays], size)
        twin = _stacked([x.twin for x in arrays], size) if has_twin else real
        self.extend(sites, Comparable(real, twin, edge).reduced((1,)))


def _stacked(arrays, size):
    """Returns arrays as rows of a matrix, each repeated up to `size` numbers."""
    rows = []
    for x in arrays:
        # Not padded: on CPU, fusions with a pad read beyond the array.
        flat = lax.reshape(x, (1, x.size))
        repeated = lax.broadcast_in_dim(flat, (size // x.size, x.size), (0, 1))
        rows.append(lax.reshape(repeated, (1, size)))
    return lax.concatenate(rows, 0)


def _is_replicated(x: Any) -> bool:
    spec = getattr(getattr(jax.typeof(x), "sharding", None), "spec", ())
    return not any(axis is not None for axis in spec or ())
