"""What the guide says to write in place of PyTorch's lines is a line that works."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import ROOT

from optax_lossscale import LossScaleOptimizer, autocast

GUIDE = ROOT / "docs/guide/coming-from-another-loss-scaler.md"


def lines():
    """Returns PyTorch's lines, and what stands for them here."""
    text = GUIDE.read_text().split("### Line by line")[1].split("\n## ")[0]
    for theirs, ours in re.findall(r"^\| (.*) \| (.*) \|$", text, re.MULTILINE)[1:]:
        code = re.match("`([^`]+)`", ours.removeprefix("nothing: "))
        yield re.sub("`", "", theirs), code and code[1]


def head(x):
    return x @ jnp.ones((4, 2))


def loss_fn(params, x, y):
    return jnp.mean((head(x @ params) - y) ** 2)


def dtypes(f, *args):
    """Returns the dtypes of the two products."""
    text = str(jax.make_jaxpr(f)(*args))
    return " ".join(re.findall(r":(\w+)\[[\d,]+\] = dot_general", text))


def test_every_line_works():
    inner, params = optax.sgd(0.01), jnp.ones((4, 4))
    batch = jnp.ones((3, 4)), jnp.zeros((3, 2))
    optimizer = LossScaleOptimizer(inner)
    scope = globals() | {
        "autocast": autocast,
        "use_amp": False,
        "kernel": head,
        "inner": inner,
    }
    scope |= {"optimizer": optimizer, "opt_state": optimizer.init(params)}
    scope |= {"params": params, "x": batch[0], "y": batch[1]}
    found, before = {}, jax.config.jax_default_matmul_precision
    with jax.numpy_dtype_promotion("standard"):
        for theirs, code in lines():
            if code is None:
                assert theirs == 'torch.set_float32_matmul_precision("high")'
            elif " = " in code:
                exec(code, scope)
            else:
                found[theirs] = eval(code, scope)
        jax.config.update("jax_default_matmul_precision", before)
        casts = [f for name, f in found.items() if re.search("autocast|fwd", name)]
        kinds = [dtypes(f, params, *batch) for f in casts]
    assert kinds == ["f16 f16", "bf16 bf16", "f32 f32", "f16 f32", "f16 f32"]
    assert found['torch.amp.GradScaler("cuda", enabled=False)'].initial_scale == 1
    assert found["scaler.get_scale()"] == 2**15
    assert found["scaler.state_dict()"].last_step_applied
    right = jax.grad(loss_fn)(params, *batch)
    np.testing.assert_allclose(scope["grads"], right, rtol=1e-3)
    # Two steps: `apply_gradients`, and `minimize`.
    assert np.all(scope["params"] < params - 0.01 * right)


def test_one_flag_switches_autocast_off():
    args = jnp.ones((4, 4)), jnp.ones((3, 4)), jnp.zeros((3, 2))
    (flag,) = re.findall(r"`JAX_(\w+)=(\w+) python", GUIDE.read_text())
    assert flag[0].lower() == "default_matmul_precision"
    with jax.default_matmul_precision(flag[1]):
        with pytest.warns(match="asks for precision"):
            program = str(jax.make_jaxpr(autocast(loss_fn))(*args))
        assert ":f16" not in program
