"""Runs the language model on a few tokens, in which one batch overflows.

As a script it takes the arguments of the command line. Before them `SIGKILL 8` kills
the process while it saves the state of step 8.
"""

import contextlib
import os
import signal
import sys
from unittest import mock

import jax
import jax.numpy as jnp

from examples.common.checkpoint import Checkpoints
from examples.language_model import cli
from examples.language_model.data import Corpus
from examples.language_model.model import Transformer

STEPS = 12
# The learning rate rises to the end, so runs of any length begin alike.
ARGUMENTS = [
    *("--corpus=[a-c]*.py", "--vocabulary=512", "--context=16"),
    *("--layers=2", "--width=32", "--heads=2", "--scan-layers"),
    *(f"--steps={STEPS}", "--batch-size=16", "--learning-rate=5"),
    *("--warmup-steps=5000", "--eval-every=6", "--eval-batches=2"),
    *("--log-every=1", "--save-every=4"),
]
# The step whose gradients overflow, and the sequence that makes them do so: of eight
# devices that of the third alone.
OVERFLOW, SEQUENCE = 7, 5
# No file of the standard library has this token.
MARK = 0


@contextlib.contextmanager
def overflow():
    """Makes the gradients of one sequence overflow in float16; its loss stays."""
    batch, call = Corpus.training_batch, Transformer.__call__

    def marked_batch(self, step, size):
        tokens = batch(self, step, size)
        if step + 1 == OVERFLOW:
            tokens[SEQUENCE, 0] = MARK
        return tokens

    def overflowing_call(self, tokens):
        logits = call(self, tokens)
        steep = jnp.where(tokens[:, 0] == MARK, 2.0**40, 0.0)[:, None, None]
        return logits + steep * (logits - jax.lax.stop_gradient(logits))

    with (
        mock.patch.object(Corpus, "training_batch", marked_batch),
        mock.patch.object(Transformer, "__call__", overflowing_call),
    ):
        yield


def main(*arguments):
    with overflow():
        cli.main([*ARGUMENTS, *arguments])


@contextlib.contextmanager
def signal_while_saving(number, fatal_step):
    """Sends this process a signal while it saves the state of a step."""
    save = Checkpoints.save

    def fatal_save(self, step, state):
        save(self, step, state)
        if step == fatal_step:
            os.kill(os.getpid(), number)

    with mock.patch.object(Checkpoints, "save", fatal_save):
        yield


if __name__ == "__main__":
    _, *arguments = sys.argv
    sent = contextlib.nullcontext()
    if arguments[0].startswith("SIG"):
        name, step, *arguments = arguments
        sent = signal_while_saving(signal.Signals[name], int(step))
    with sent:
        main(*arguments)
