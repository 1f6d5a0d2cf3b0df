"""A diagnosis and a training step of one function leave each other alone.

JAX keeps the programs of functions that it has traced.
"""

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

from optax_lossscale import autocast
from optax_lossscale.diagnostics import trace_numerics

ROOT = Path(__file__).parents[2]
rng = np.random.default_rng(0)
W, X = (rng.normal(size=size).astype(np.float32) for size in ((8, 8), (4, 8)))


def loss_fn(w, x):
    """Its constants are rounded in float16, and cast in a diagnosis."""
    x = jnp.tanh(x @ w) * 0.37
    x = jnp.where(x > 0.1, 0.3 * (x @ w) + 0.1, x)
    return jnp.mean(x**2)


def in_scan(f):
    def body(carry, x):
        w, total = carry
        return (w, total + f(w, x)), None

    return lambda w, x: lax.scan(body, (w, 0.0), jnp.stack([x, x]))[0][1]


def in_custom_jvp(f):
    g = jax.custom_jvp(f)
    g.defjvp(lambda primals, tangents: jax.jvp(f, primals, tangents))
    return g


def in_custom_vjp(f):
    g = jax.custom_vjp(f)
    g.defvjp(lambda w, x: jax.vjp(f, w, x), lambda pull, y: pull(y))
    return g


class Model(nnx.Module):
    def __init__(self, w):
        self.w = nnx.Param(w)


def in_nnx(f):
    g = nnx.jit(autocast(lambda model, x: f(model.w[...], x)))
    return lambda w, x: g(Model(w), x)


MAKE = {
    "jit": lambda: autocast(loss_fn),
    "scan": lambda: in_scan(autocast(loss_fn)),
    "checkpoint": lambda: jax.checkpoint(autocast(loss_fn)),
    "custom_jvp": lambda: in_custom_jvp(autocast(loss_fn)),
    "custom_vjp": lambda: in_custom_vjp(autocast(loss_fn)),
    "nnx": lambda: in_nnx(loss_fn),
}


def step(f):
    """Returns the program that is trained, and its loss."""
    value_and_grad = jax.value_and_grad(f)
    text = str(jax.make_jaxpr(value_and_grad)(W, X))
    return re.sub("0x[0-9a-f]+", "", text), float(jax.jit(value_and_grad)(W, X)[0])


def trace(f):
    found = trace_numerics(f, W, X)
    return str(found), found.float32_loss, list(map(str, found.operations))


ACTIONS = {"step": step, "trace": trace}


@functools.cache
def alone(name, action):
    """Returns what an action finds of a function that nobody has called."""
    return ACTIONS[action](jax.jit(MAKE[name]()))


@pytest.mark.parametrize("name", MAKE)
def test_a_step_and_a_diagnosis_in_any_order(name):
    text, loss = alone(name, "step")
    assert "optimization_barrier" not in text
    assert "f16" in text
    assert alone(name, "trace")[1] == pytest.approx(loss, rel=1e-2)
    for order in ("trace", "step", "trace"), ("step", "trace", "step"):
        f = jax.jit(MAKE[name]())
        assert [ACTIONS[x](f) for x in order] == [alone(name, x) for x in order]


@pytest.mark.exhaustive
def test_a_step_and_a_diagnosis_in_a_fresh_process():
    command, env = [sys.executable, __file__], os.environ | {"PYTHONPATH": str(ROOT)}
    found = json.loads(subprocess.check_output(command, text=True, env=env))
    for name in MAKE:
        for action in ("step", "trace"):
            assert list(alone(name, action)) == found[name][action], name


if __name__ == "__main__":
    json.dump(
        {x: {y: alone(x, y) for y in ("trace", "step")} for x in MAKE}, sys.stdout
    )
