"""Runs the language model on a few tokens; an example of a batch may overflow.

Imported by the tests, and run by them as a script, with the step after whose save the
process kills itself (0: never), and the arguments of the command line.
"""

import contextlib
import os
import signal
import sys
from unittest import mock

import jax
import jax.numpy as jnp

from examples.language_model import cli
from examples.language_model.checkpoint import Checkpoints
from examples.language_model.data import Corpus
from examples.language_model.model import Transformer

ARGUMENTS = [
    *("--corpus=[a-c]*.py", "--vocabulary=512", "--context=16"),
    *("--layers=2", "--width=32", "--heads=2", "--scan-layers"),
    *("--batch-size=16", "--steps=12", "--warmup-steps=2", "--learning-rate=1e-2"),
    *("--eval-every=6", "--eval-batches=2", "--log-every=1", "--save-every=4"),
]
# The step whose gradients overflow, and the sequence that makes them do so: of eight
# devices that of the third.
OVERFLOW, SEQUENCE = 7, 5
# No file of the standard library begins a sequence with this token.
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


@contextlib.contextmanager
def death(fatal_step):
    """Kills this process while it saves the state of a step."""
    save = Checkpoints.save

    def fatal_save(self, step, state):
        save(self, step, state)
        if step == fatal_step:
            os.kill(os.getpid(), signal.SIGKILL)

    with mock.patch.object(Checkpoints, "save", fatal_save):
        yield


if __name__ == "__main__":
    with overflow(), death(int(sys.argv[1])):
        cli.main([*ARGUMENTS, *sys.argv[2:]])
