"""Runs of the examples in processes of their own, and what they leave."""

import csv
import os
import socket
import subprocess
import sys

import jax
import numpy as np
import orbax.checkpoint as ocp
from helpers import ROOT, SUPPORT

# An old Flax uses what the JAX of its time deprecates.
WARNINGS = ["-W", "error", "-W", "ignore::DeprecationWarning"]


def read_rows(out):
    with (out / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def column(out, name):
    return [float(row[name]) for row in read_rows(out) if row[name]]


def last_state(out):
    """Returns the arrays of the last checkpoint, in whatever trees."""
    with ocp.CheckpointManager(out / "checkpoints") as manager:
        restored = manager.restore(
            manager.latest_step(), args=ocp.args.StandardRestore()
        )
    return jax.tree.map(np.asarray, restored)


def environment(devices, **more):
    """Returns the variables of a process with so many devices."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    found = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": " ".join(x for x in flags if "device_count" not in x),
        "JAX_NUM_CPU_DEVICES": str(devices),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # compiling takes most of the time
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    if folder := jax.config.jax_compilation_cache_dir:
        found["JAX_COMPILATION_CACHE_DIR"] = folder
    return found | more


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def start(*arguments, devices=1, script=SUPPORT / "language_model_run.py", **variables):
    """Starts a script in a process of its own: that of the language model, or one."""
    return subprocess.Popen(
        [sys.executable, *WARNINGS, str(script), *map(str, arguments)],
        env=environment(devices, **variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process, code=0):
    """Waits for a process, and returns what it printed."""
    try:
        output, _ = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == code, output
    return output


def finish_all(processes, codes=(0, 0)):
    """Waits for processes that belong together, and returns what each printed."""
    try:
        return [finish(*pair) for pair in zip(processes, codes, strict=True)]
    finally:
        for process in processes:
            process.kill()
