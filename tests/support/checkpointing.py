"""Runs the page on checkpoints, in a process of its own that may kill itself."""

import os
import signal
import sys
from pathlib import Path

import jax
import numpy as np
from flax import serialization
from pages import page_blocks, page_fragments
from sklearn import datasets


def main(line: str = "", count: str = "0"):
    """Trains in the working directory.

    Args:
      line: How a line begins that the page prints.
      count: The process dies when it has printed this many such lines.
    """
    printed = []

    def killing_print(text):
        print(text, flush=True)
        printed.append(text)
        if sum(text.startswith(line) for text in printed) == int(count):
            os.kill(os.getpid(), signal.SIGKILL)

    # Batches with this image are skipped. An overflow would depend on rounding, which
    # is another one on another number of devices.
    digits = datasets.load_digits()
    digits.data[0, 20] = np.inf
    datasets.load_digits = lambda: digits
    page = {"__name__": "checkpoints", "print": killing_print}
    path = "docs/recipes/checkpoints.md"
    (many_devices,) = page_fragments(path)
    for code, _ in page_blocks(path):
        exec(code, page)
        if code.startswith("like ="):
            exec(many_devices, page)
    for name in ("state", "restored"):
        assert {x.sharding.num_devices for x in jax.tree.leaves(page[name])} == {
            jax.device_count()
        }
        Path(f"{name}.msgpack").write_bytes(serialization.to_bytes(page[name]))


if __name__ == "__main__":
    main(*sys.argv[1:])
