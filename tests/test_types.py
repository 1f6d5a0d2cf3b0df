"""What a type checker finds in a user's file."""

import shutil
import subprocess
import sys

import pytest

AUTOCAST = """
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


MODELS = """
import functools
from typing import NamedTuple, TypedDict

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from optax_lossscale import (
    LossScaleOptimizer, LossScaleOptimizerState, autocast, diagnostics,
    scale_gradient, select_applied, with_loss_scale,
)

x = jnp.ones((4, 2))
optimizer = LossScaleOptimizer(optax.adam(0.1))


class Linear(NamedTuple):
    w: jax.Array


class Weights(TypedDict):
    w: jax.Array


class Net(eqx.Module):
    layer: eqx.nn.Linear

    def __init__(self):
        self.layer = eqx.nn.Linear(2, 2, key=jax.random.key(0))


class Model(nnx.Module):
    def __init__(self):
        self.layer = nnx.Linear(2, 2, rngs=nnx.Rngs(0))


def dict_loss(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return jnp.mean(x @ params["w"])


def tuple_loss(params: Linear, x: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    return jnp.mean(x @ params.w), {"x": x}


def typed_loss(params: Weights, x: jax.Array) -> jax.Array:
    return jnp.mean(x @ params["w"])


def net_loss(net: Net, x: jax.Array) -> jax.Array:
    return jnp.mean(jax.vmap(net.layer)(x))


def model_loss(model: Model, x: jax.Array, *, train: bool = True) -> jax.Array:
    return jnp.mean(model.layer(x))


params = {"w": jnp.ones((2, 2))}
state = optimizer.init(params)
params, state, loss = optimizer.minimize(autocast(dict_loss), params, state, x)
params["w"].astype(loss.dtype)
loss, grads = optimizer.value_and_grad(autocast(dict_loss), state)(params, x)
updates, state = optimizer.update(grads, state, params)
params, state = optimizer.apply_gradients(grads, params, state, skip_if=loss > 3)
kept: dict[str, jax.Array] = select_applied(state, params, scale_gradient(params, 2.0))


def step(
    params: dict[str, jax.Array], state: LossScaleOptimizerState, x: jax.Array
) -> tuple[dict[str, jax.Array], LossScaleOptimizerState, jax.Array]:
    return optimizer.minimize(dict_loss, params, state, x)


layer, state, (loss, aux) = optimizer.minimize(
    tuple_loss, Linear(x), optimizer.init(Linear(x)), x, has_aux=True,
    skip_if=lambda out, grads: out[0] > 3,
)
layer.w.astype(aux["x"].dtype)
weights: Weights = {"w": jnp.ones((2, 2))}
state = optimizer.init(weights)
weights, state, loss = optimizer.minimize(typed_loss, weights, state, x)
net = Net()
state = optimizer.init(net)
net, state, loss = optimizer.minimize(autocast(net_loss), net, state, x)
net.layer.weight.astype(loss.dtype)
diagnostics.report(state, net)
diagnostics.trace_numerics(autocast(net_loss), net, x, state=state)
diagnostics.compare(net_loss, net, x)
model = Model()
state = optimizer.init(model)
model, state, loss = optimizer.minimize(
    functools.partial(model_loss, train=False), model, state, x
)
model.layer.kernel[...].astype(loss.dtype)
loss, grads = optimizer.value_and_grad(model_loss, state)(model, x, train=False)
model, state = optimizer.apply_gradients(grads, model, state)
optimizer.get_scaled_loss(dict_loss, state)(params, x).astype(loss.dtype)
optimizer.get_scaled_loss(loss, state).astype(loss.dtype)
with_loss_scale(dict_loss)(params, x)


@autocast(dtype=jnp.bfloat16)
def decorated(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return jnp.mean(x @ params["w"])


params, state, loss = optimizer.minimize(decorated, params, optimizer.init(params), x)
optimizer.minimize(net_loss, params, state, x)  # wrong: another model
optimizer.value_and_grad(dict_loss, state)(params)  # wrong: no batch
optimizer.value_and_grad(net_loss, state)(model, x)  # wrong: another model
decorated(params, 3)  # wrong: no array
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("script", [AUTOCAST, MODELS], ids=["autocast", "models"])
def test_a_file_of_a_user(script, tmp_path):
    if shutil.which("pyright", path=sys.prefix + "/bin") is None:
        pytest.skip("needs pyright")
    file = tmp_path / "uses.py"
    file.write_text(script)
    command = [sys.prefix + "/bin/pyright", "--pythonpath", sys.executable, str(file)]
    found = subprocess.run(command, capture_output=True, text=True).stdout
    lines = script.split("\n")
    wrong = [i for i, line in enumerate(lines, 1) if "# wrong" in line]
    errors = [int(x.split(":")[1]) for x in found.split("\n") if " - error: " in x]
    assert sorted(set(errors)) == wrong, found
    if script == AUTOCAST:
        assert "(params: dict[str, Array], x: Array, *, flag: bool) -> Array" in found
        assert 'is "Array"' in found
