"""The set-up of the tests: quick to import, and on the devices that you choose."""

import os
import subprocess
import sys

import pytest
from helpers import ROOT

PROGRAM = "import conftest, jax; print(jax.default_backend(), jax.device_count())"


def test_compiles_nothing(compiled_at_import):
    text = "Make constants of test modules with NumPy, or in a function"
    assert compiled_at_import == [], text


@pytest.mark.parametrize(
    ("chosen", "devices"),
    [
        ({}, "cpu 8"),
        ({"XLA_FLAGS": "--xla_force_host_platform_device_count=1"}, "cpu 1"),
        (
            {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_cpu_enable_xprof_traceme"},
            "cpu 8",
        ),
    ],
)
def test_runs_on_eight_cpu_devices_unless_told_otherwise(chosen, devices):
    unset = ("JAX_PLATFORMS", "XLA_FLAGS")
    inherited = {k: x for k, x in os.environ.items() if k not in unset}
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=ROOT / "tests",
        env=inherited | chosen,
        capture_output=True,
        text=True,
    )
    assert run.stdout.split("\n")[0] == devices, run.stderr


def test_a_platform_that_is_chosen_is_kept():
    program = "import os, conftest; print(os.environ['JAX_PLATFORMS'])"
    env = os.environ | {"JAX_PLATFORMS": "cuda,cpu"}
    command = [sys.executable, "-c", program]
    found = subprocess.check_output(command, cwd=ROOT / "tests", env=env, text=True)
    assert found == "cuda,cpu\n"
