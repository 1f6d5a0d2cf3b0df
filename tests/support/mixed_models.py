"""Models that hold integers, flags, keys, functions and settings beside parameters."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

X = np.sin(np.arange(8, dtype=np.float32)).reshape(2, 4)
PARAMS = {
    "w": np.linspace(-1, 2, 12, dtype=np.float32).reshape(4, 3),
    "b": np.float32([-0.0, 1, -2]),
}
# Large, so that a norm or a decay that counts them is another one.
REST = {"ids": np.int32([3000, 1000, 0, 2000]), "flag": np.array(True)}
REST |= {"f": jnp.tanh, "heads": 2}


def make_arrays():
    return jax.tree.map(jnp.asarray, PARAMS)


def make_dict():
    return make_arrays() | REST | {"key": jax.random.key(1)}


def loss_of_dict(p, x):
    noise = 0.1 * jax.random.normal(p["key"], (3,), jnp.float32)
    out = p["f"](x @ p["w"][p["ids"] // 1000] + noise)
    out = jnp.where(p["flag"], out + p["b"], out)
    return jnp.sum((out - 1) ** 2) / p["heads"]


class EquinoxNet(eqx.Module):
    layer: eqx.nn.Linear
    drop: eqx.nn.Dropout
    ids: jax.Array
    key: jax.Array
    scale: float
    heads: int

    def __init__(self):
        self.layer = eqx.nn.Linear(4, 3, dtype=jnp.float32, key=jax.random.key(0))
        self.drop, self.key = eqx.nn.Dropout(0.25), jax.random.key(1)
        self.ids, self.scale, self.heads = jnp.asarray(REST["ids"]), 0.5, 2

    def __call__(self, x):
        x = self.drop(x[self.ids // 1000], key=self.key)
        return self.scale * jnp.tanh(self.layer(x)) / self.heads


class NnxNet(nnx.Module):
    def __init__(self):
        self.layer = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
        self.norm = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
        self.ids = nnx.Variable(jnp.asarray(REST["ids"]))

    def __call__(self, x):
        x = jnp.asarray(x)[:, self.ids[...] // 1000]
        return self.norm(self.layer(x))


class Kind(NamedTuple):
    """A model, and how its library trains it.

    Attributes:
      make: Makes the model.
      loss_fn: Its loss.
      params: Its parameters.
      join: Returns a model with other parameters.
      value_and_grad: Differentiates with respect to the parameters.
    """

    make: Callable[[], Any]
    loss_fn: Callable[..., Any]
    params: Callable[[Any], Any]
    join: Callable[[Any, Any], Any]
    value_and_grad: Callable[..., Any]


def params_of_dict(model):
    return {name: model[name] for name in PARAMS}


def value_and_grad_of_dict(loss_fn):
    def value_and_grad(model, x):
        of_params = jax.value_and_grad(lambda params: loss_fn(model | params, x))
        return of_params(params_of_dict(model))

    return value_and_grad


def join_nnx(model, params):
    model = nnx.clone(model)
    nnx.update(model, params)
    return model


KINDS = {
    "arrays": Kind(
        make_arrays,
        lambda p, x: loss_of_dict(make_dict() | p, x),
        params_of_dict,
        lambda model, params: model | params,
        value_and_grad_of_dict,
    ),
    "dict": Kind(
        make_dict,
        loss_of_dict,
        params_of_dict,
        lambda model, params: model | params,
        value_and_grad_of_dict,
    ),
    "equinox": Kind(
        EquinoxNet,
        lambda model, x: jnp.sum((jax.vmap(model)(x) - 1) ** 2),
        lambda model: eqx.filter(model, eqx.is_inexact_array),
        lambda model, params: eqx.combine(params, model),
        eqx.filter_value_and_grad,
    ),
    "nnx": Kind(
        NnxNet,
        lambda model, x: jnp.sum((model(x) - 1) ** 2),
        lambda model: nnx.state(model, nnx.Param),
        join_nnx,
        nnx.value_and_grad,
    ),
}
