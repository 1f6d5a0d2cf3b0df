"""What a type checker finds in a user's file."""

import shutil
import subprocess
import sys

import pytest

USES = """
import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax_lossscale import LossScaleOptimizer, autocast, get_loss_scale


def loss_fn(params: dict[str, jax.Array], x: jax.Array, *, flag: bool) -> jax.Array:
    return jnp.mean(x @ params["w"])


half = autocast(loss_fn, jnp.bfloat16, float32=[loss_fn, "encoder"])
reveal_type(half)
reveal_type(autocast(loss_fn, "float16")({}, jnp.ones(1), flag=True))
autocast(loss_fn, np.float16), autocast(loss_fn, np.dtype("float16"))
LossScaleOptimizer(optax.sgd(0.1), "dynamic"), get_loss_scale("headroom")


@autocast
def decorated(x: jax.Array) -> tuple[jax.Array, int]:
    return x, 1


decorated(jnp.ones(1))[1].bit_length()
half({}, jnp.ones(1))  # wrong: no flag
half({}, 3, flag=True)  # wrong: no array
autocast(loss_fn, "float61")  # wrong
LossScaleOptimizer(optax.sgd(0.1), "dynamc")  # wrong
get_loss_scale("dynamc")  # wrong
"""


@pytest.mark.exhaustive
def test_a_file_of_a_user(tmp_path):
    if shutil.which("pyright", path=sys.prefix + "/bin") is None:
        pytest.skip("needs pyright")
    file = tmp_path / "uses.py"
    file.write_text(USES)
    command = [sys.prefix + "/bin/pyright", "--pythonpath", sys.executable, str(file)]
    found = subprocess.run(command, capture_output=True, text=True).stdout
    lines = USES.split("\n")
    wrong = [i for i, line in enumerate(lines, 1) if "# wrong" in line]
    errors = [int(x.split(":")[1]) for x in found.split("\n") if " - error: " in x]
    assert sorted(set(errors)) == wrong, found
    assert "(params: dict[str, Array], x: Array, *, flag: bool) -> Array" in found
    assert 'is "Array"' in found
