"""A line that shows how the training goes; where there is no terminal, a few lines."""

from collections.abc import Mapping

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

LINES = 20


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
        columns = (
            BarColumn(bar_width=10),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
        )
        self._progress = Progress(
            *columns, console=self._console, disable=not self._console.is_terminal
        )
        self._task = self._progress.add_task("compiling", completed=step, total=steps)
        self._progress.start()

    def show(self, step: int, values: Mapping[str, float]) -> None:
        """Shows a step and its metrics."""
        text = (
            f"loss {values['loss']:.3f}  scale {values['loss_scale']:g}  "
            f"skipped {values['skipped_steps']:g}"
        )
        if "perplexity" in values:
            text += f"  perplexity {values['perplexity']:.1f}"
        self._progress.update(self._task, completed=step, description=text)
        if not self._console.is_terminal and step % self._every == 0:
            print(f"step {step} of {self._steps}  {text}", flush=True)

    def close(self) -> None:
        """Leaves the line as it is."""
        self._progress.stop()
