"""Checkpoints, written in the background."""

from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

KEPT = 2


class Checkpoints:
    """The checkpoints of a run; a context manager that waits for the last one.

    Orbax writes a checkpoint under another name and then renames it: whenever the
    process dies, the checkpoints that can be found are whole.

    Args:
      folder: Where they are. All processes pass the same.
    """

    def __init__(self, folder: Path):
        options = ocp.CheckpointManagerOptions(
            max_to_keep=KEPT, cleanup_tmp_directories=True
        )
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self._manager.close()

    @property
    def step(self) -> int:
        """The step of the last state that was saved; 0 without one."""
        return self._manager.latest_step() or 0

    def restore(self, like: Any) -> Any:
        """Returns the last state that was saved.

        Args:
          like: The shapes, dtypes and shardings of the state. The latter may differ
            from those with which it was saved.
        """
        return self._manager.restore(self.step, args=ocp.args.StandardRestore(like))

    def save(self, step: int, state: Any) -> None:
        """Copies the state to the host, and saves it while training goes on."""
        self._manager.save(step, args=ocp.args.StandardSave(state))
