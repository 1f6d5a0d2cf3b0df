"""The training loop."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from examples.common.checkpoint import Checkpoints
from examples.common.interrupt import Interrupt
from examples.common.logs import Logs, describe_scaling
from examples.grpo.config import Config
from examples.grpo.step import Trainer
from optax_lossscale.diagnostics import check_health

# The first columns of the logs. Supervised steps have neither rewards nor differences.
COLUMNS = (
    *("step", "reward", "mean_difference", "largest_difference", "clipped"),
    *("loss", "loss_scale", "skipped_steps", "retries"),
)


class Result(NamedTuple):
    """How a call of `train` ended.

    Attributes:
      step: The number of steps that were taken, in this call and before.
      stopped_by: The signal that ended it early, if one did.
    """

    step: int
    stopped_by: int | None


def train(config: Config, out: Path) -> Result:
    """Trains until the last step, or until it is told to stop.

    It goes on from the last checkpoint in `out`, to the same end, bit for bit, as if it
    had never stopped.

    Args:
      config: The settings.
      out: The folder of checkpoints and logs.

    Raises:
      FloatingPointError: If the loss scale makes no progress any more, with advice.
    """
    trainer = Trainer(config)
    with Interrupt() as interrupt, Checkpoints(out / "checkpoints") as checkpoints:
        state = trainer.init(checkpoints.step)
        if checkpoints.step:
            state = checkpoints.restore(state)
        step, stopped_by, last = checkpoints.step, None, config.all_steps
        with Logs(out, step, last, COLUMNS, _describe) as logs:
            while step < last and stopped_by is None:
                state, metrics = trainer.step(state, step)
                step += 1
                stopped_by = interrupt.received(step)
                logs.add(step, metrics)
                if step % config.save_every == 0 or step == last or stopped_by:
                    # First, so that the file has all rows up to the checkpoint.
                    logs.flush()
                    check_health(state.opt_state)
                    checkpoints.save(step, state)
    return Result(step, stopped_by)


def _describe(values: Mapping[str, float]) -> str:
    text = f"loss {values['loss']:.3f}"
    if "reward" in values:
        difference = f"diff {values['mean_difference']:.0e}"
        text = f"reward {values['reward']:.2f}  {difference}"
    return f"{text}  {describe_scaling(values)}"
