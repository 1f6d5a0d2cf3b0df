"""The training loop."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from examples.common.checkpoint import Checkpoints
from examples.common.interrupt import Interrupt
from examples.common.logs import Logs, describe_scaling
from examples.language_model.config import Config
from examples.language_model.data import Corpus
from examples.language_model.sharding import put_batch
from examples.language_model.step import Trainer

# The first columns of the logs. Only the rows of an evaluation have a perplexity.
COLUMNS = ("step", "loss", "perplexity", "loss_scale", "skipped_steps")


class Result(NamedTuple):
    """How a call of `train` ended.

    Attributes:
      step: The number of steps that were taken, in this call and before.
      perplexity: That of the averaged parameters on the validation files, if the run
        is complete.
      stopped_by: The signal that ended it early, if one did.
    """

    step: int
    perplexity: float | None
    stopped_by: int | None


def train(config: Config, corpus: Corpus, mesh: Mesh, out: Path) -> Result:
    """Trains until the last step, or until it is told to stop.

    It goes on from the last checkpoint in `out`. On the same devices it comes to the
    same end, bit for bit, as if it had never stopped.

    Args:
      config: The settings.
      corpus: The batches.
      mesh: The devices.
      out: The folder of checkpoints and logs.

    Raises:
      FloatingPointError: If the loss scale makes no progress any more, or the
        perplexity is not finite, with advice.
    """
    trainer = Trainer(config, mesh)
    # As in a step, no more than a micro-batch at a time has to fit into the memory.
    validation = corpus.validation_batches(
        config.eval_batches * config.accumulate, config.batch_size // config.accumulate
    )
    validation = put_batch(validation, mesh)
    with Interrupt() as interrupt, Checkpoints(out / "checkpoints") as checkpoints:
        if checkpoints.step:
            state = checkpoints.restore(trainer.state)
        else:
            state = trainer.init(jax.random.key(config.seed))
        step, stopped_by, perplexity = int(state.step), None, None
        with Logs(out, step, config.steps, COLUMNS, _describe) as logs:
            while step < config.steps and stopped_by is None:
                batch = corpus.training_batch(step, config.batch_size)
                state, metrics = trainer.step(state, put_batch(batch, mesh))
                step += 1
                is_last = step == config.steps
                stopped_by = interrupt.received(step)
                evaluates = step % config.eval_every == 0 or is_last
                if evaluates:
                    perplexity = trainer.evaluate(state, validation)
                    metrics["perplexity"] = perplexity
                logs.add(step, metrics, evaluates or step % config.log_every == 0)
                if step % config.save_every == 0 or is_last or stopped_by:
                    # First, so that the file has all rows up to the checkpoint.
                    logs.flush()
                    trainer.check_health(state)
                    checkpoints.save(step, state)
        if step < config.steps:
            return Result(step, None, stopped_by)
        if perplexity is None:  # nothing was left to do
            perplexity = trainer.evaluate(state, validation)
        if not jnp.isfinite(perplexity):
            text = f"the perplexity is {perplexity:.2f}; try a lower learning rate"
            raise FloatingPointError(text)
        return Result(step, float(perplexity), stopped_by)


def _describe(values: Mapping[str, float]) -> str:
    text = f"loss {values['loss']:.3f}  {describe_scaling(values)}"
    if "perplexity" in values:
        text += f"  perplexity {values['perplexity']:.1f}"
    return text
