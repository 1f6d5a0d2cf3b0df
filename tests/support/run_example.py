"""A script that runs an example on little data.

Its arguments are the name of the example, then those of its command line. Between them
`SIGKILL 8` kills the process while it saves the state of step 8.
"""

import contextlib
import os
import signal
import sys
from unittest import mock

import grpo_run
import language_model_run

from examples.common.checkpoint import Checkpoints

EXAMPLES = {"language_model": language_model_run.main, "grpo": grpo_run.main}


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
    _, example, *arguments = sys.argv
    sent = contextlib.nullcontext()
    if arguments[0].startswith("SIG"):
        name, step, *arguments = arguments
        sent = signal_while_saving(signal.Signals[name], int(step))
    with sent:
        EXAMPLES[example](*arguments)
