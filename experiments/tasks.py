"""Three small float16 trainings: a perceptron, a transformer, a recurrent network."""

import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

CONTEXT, WIDTH, HEADS = 32, 32, 2


class Task(NamedTuple):
    """A training.

    Attributes:
      name: What the figures call it.
      init: Makes float32 parameters of a random key.
      loss_fn: The loss of parameters and a batch, computed in a given dtype.
      batch: Draws a batch with a random key.
      optimizer: The inner optimizer.
      steps: How many steps a run takes.
    """

    name: str
    init: Callable[[jax.Array], Any]
    loss_fn: Callable[..., jax.Array]
    batch: Callable[[jax.Array], Any]
    optimizer: optax.GradientTransformation
    steps: int


def dense(key, inputs, outputs, gain=1.0):
    """Returns random weights, of variance gain**2 / inputs."""
    return gain * jax.random.normal(key, (inputs, outputs)) / inputs**0.5


def mean_loss(logits, labels):
    """Returns the mean cross entropy, in float32."""
    logits = logits.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def digits():
    """Returns scikit-learn's images of digits, and a function that draws of them."""
    pixels, labels = load_digits(return_X_y=True)
    images = jnp.asarray(pixels / 8 - 1, jnp.float32)
    labels = jnp.asarray(labels, jnp.int32)

    def batch(key):
        rows = jax.random.randint(key, (64,), 0, len(images))
        return images[rows], labels[rows]

    return batch


def perceptron(steps: int) -> Task:
    """A perceptron of four layers on images of digits."""

    def init(key):
        keys = jax.random.split(key, 4)
        sizes = [(64, 64), (64, 64), (64, 64), (64, 10)]
        pairs = zip(keys, sizes, strict=True)
        return [{"w": dense(k, *s, 1.4), "b": jnp.zeros(s[1])} for k, s in pairs]

    def loss_fn(params, batch, dtype):
        x, labels = batch
        params, x = jax.tree.map(lambda a: a.astype(dtype), (params, x))
        for layer in params[:-1]:
            x = jax.nn.relu(x @ layer["w"] + layer["b"])
        return mean_loss(x @ params[-1]["w"] + params[-1]["b"], labels)

    optimizer = optax.sgd(0.05, momentum=0.9)
    return Task("perceptron, digits", init, loss_fn, digits(), optimizer, steps)


def source_text() -> np.ndarray:
    """Returns some hundred kilobytes of the standard library's source, in ASCII."""
    library = Path(sysconfig.get_path("stdlib"))
    names = ["argparse.py", "ast.py", "dataclasses.py", "inspect.py", "pathlib.py"]
    text = b"".join(
        (library / name).read_bytes() for name in names if (library / name).exists()
    )
    codes = np.frombuffer(text, np.uint8)
    return np.where(codes < 128, codes, ord("?")).astype(np.int32)


def normalize(x):
    """Returns `x` with mean 0 and variance 1, computed in float32."""
    wide = x.astype(jnp.float32)
    wide = wide - wide.mean(-1, keepdims=True)
    wide = wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-5)
    return wide.astype(x.dtype)


def attend(x, block):
    """Returns causal self-attention of `x`, of [batch, time, channel]."""
    heads = (*x.shape[:2], HEADS, -1)
    q, k, v = (y.reshape(heads) for y in jnp.split(x @ block["qkv"], 3, axis=-1))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32)
    mask = jnp.tril(jnp.ones((x.shape[1],) * 2, bool))
    scores = jnp.where(mask, scores / (WIDTH / HEADS) ** 0.5, -1e9)
    weights = jax.nn.softmax(scores).astype(x.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape) @ block["out"]


def transformer(steps: int) -> Task:
    """A transformer of two blocks that predicts characters of Python's source."""
    text = jnp.asarray(source_text())

    def init(key):
        keys = iter(jax.random.split(key, 16))
        blocks = [
            {
                "qkv": dense(next(keys), WIDTH, 3 * WIDTH),
                "out": dense(next(keys), WIDTH, WIDTH),
                "up": dense(next(keys), WIDTH, 4 * WIDTH),
                "down": dense(next(keys), 4 * WIDTH, WIDTH),
            }
            for _ in range(2)
        ]
        return {
            "tokens": jax.random.normal(next(keys), (128, WIDTH)),
            "positions": jax.random.normal(next(keys), (CONTEXT, WIDTH)),
            "blocks": blocks,
            "logits": dense(next(keys), WIDTH, 128),
        }

    def loss_fn(params, batch, dtype):
        params = jax.tree.map(lambda a: a.astype(dtype), params)
        x = params["tokens"][batch[:, :-1]] + params["positions"]
        for block in params["blocks"]:
            x = x + attend(normalize(x), block)
            x = x + jax.nn.gelu(normalize(x) @ block["up"]) @ block["down"]
        return mean_loss(normalize(x) @ params["logits"], batch[:, 1:])

    def batch(key):
        starts = jax.random.randint(key, (8,), 0, len(text) - CONTEXT - 1)
        return text[starts[:, None] + jnp.arange(CONTEXT + 1)]

    return Task(
        "transformer, source text", init, loss_fn, batch, optax.adam(3e-3), steps
    )


def recurrent(steps: int) -> Task:
    """A plain recurrent network that reads digits row by row until it knows them."""

    def init(key):
        keys = jax.random.split(key, 3)
        return {
            "read": dense(keys[0], 8, 64),
            "loop": dense(keys[1], 64, 64, 1.5),
            "write": dense(keys[2], 64, 10),
        }

    def loss_fn(params, batch, dtype):
        x, labels = batch
        params, x = jax.tree.map(lambda a: a.astype(dtype), (params, x))
        rows = x.reshape(-1, 8, 8).swapaxes(0, 1)

        def step(state, row):
            return jnp.tanh(row @ params["read"] + state @ params["loop"]), None

        state = jnp.zeros((rows.shape[1], 64), dtype)
        state, _ = jax.lax.scan(step, state, rows)
        return mean_loss(state @ params["write"], labels)

    return Task("recurrent, digits", init, loss_fn, digits(), optax.adam(2e-3), steps)


TASKS = (perceptron, transformer, recurrent)
