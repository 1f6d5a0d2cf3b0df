"""Ctrl-C and SIGTERM, as cluster managers send it, end the training between steps."""

import os
import signal

import jax
from jax.experimental import multihost_utils

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """Catches signals while it is entered; the second one is no longer caught.

    Of several processes perhaps only one gets the signal, but all must stop after the
    same step. JAX, which catches SIGTERM in each, makes them agree on that step.
    """

    def __init__(self):
        self._received: int | None = None
        self._is_alone = jax.process_count() == 1

    def __enter__(self) -> "Interrupt":
        caught = SIGNALS if self._is_alone else (signal.SIGINT,)
        self._before = {number: signal.getsignal(number) for number in caught}
        for number in caught:
            signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _frame: object) -> None:
        self._received = number
        signal.signal(number, signal.SIG_DFL)
        if not self._is_alone:
            os.kill(os.getpid(), signal.SIGTERM)

    def received(self, step: int) -> int | None:
        """Returns the signal if training must stop after this step, on all processes.

        Args:
          step: The number of the step. Each process calls this after each step.
        """
        if self._is_alone:
            return self._received
        if multihost_utils.reached_preemption_sync_point(step):
            return self._received or signal.SIGTERM
        return None
