"""Small tasks for float16: three that need no loss scaling, and one that does."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from benchmarks.workloads import BYTES
from examples.common.precision import compute_in
from examples.digits import train as patches
from examples.language_model.config import Config
from examples.language_model.data import make_corpus
from examples.language_model.model import make_functions


class Task(NamedTuple):
    """A network, its data and its optimizer.

    Attributes:
      name: Its name in figures.
      init: Returns float32 parameters, given a random key.
      loss_fn: Maps parameters, a batch and the dtype of the computation to the loss.
      batch: Returns a random batch, given a random key.
      optimizer: The inner optimizer.
      steps: The number of steps per run.
    """

    name: str
    init: Callable[[jax.Array], Any]
    loss_fn: Callable[..., jax.Array]
    batch: Callable[[jax.Array], Any]
    optimizer: optax.GradientTransformation
    steps: int


def dense(key, inputs, outputs, gain=1.0):
    """Returns random weights with variance gain**2 / inputs."""
    return gain * jax.random.normal(key, (inputs, outputs)) / inputs**0.5


def mean_loss(logits, labels):
    """Returns the mean cross entropy, in float32."""
    logits = logits.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def digits():
    """Returns a function that draws random batches of scikit-learn's digits."""
    from sklearn.datasets import load_digits  # It takes seconds.

    pixels, labels = load_digits(return_X_y=True)
    images = jnp.asarray(pixels / 8 - 1, jnp.float32)
    labels = jnp.asarray(labels, jnp.int32)

    def batch(key):
        rows = jax.random.randint(key, (64,), 0, len(images))
        return images[rows], labels[rows]

    return batch


def perceptron(steps: int) -> Task:
    """A four-layer perceptron that classifies images of digits."""

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


def transformer(steps: int) -> Task:
    """The language model of the examples, on the bytes of Python source code."""
    config = Config("a*.py", BYTES, context=32, layers=2, width=32, heads=2)
    text = jnp.asarray(make_corpus(config).training, jnp.int32)
    init, loss = make_functions(config)

    def loss_fn(params, batch, dtype):
        return compute_in(jnp.dtype(dtype).name, loss)(params, batch)

    def batch(key):
        starts = jax.random.randint(key, (8,), 0, len(text) - config.context - 1)
        return text[starts[:, None] + jnp.arange(config.context + 1)]

    name, optimizer = "transformer, source text", optax.adam(3e-3)
    return Task(name, init, loss_fn, batch, optimizer, steps)


def recurrent(steps: int) -> Task:
    """A plain recurrent network that classifies digits, reading them row by row."""

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


def detector(steps: int, size: int = 2**16) -> Task:
    """The network of the digits, which needs loss scaling in large batches.

    Args:
      steps: The number of steps per run.
      size: The number of patches in a batch.
    """
    photos, digits = patches.load_pictures()

    def init(key):
        return patches.Detector(jnp.float32).init(key, jnp.zeros((1, 64)))["params"]

    def loss_fn(params, batch, dtype):
        x, has_digit = batch
        logits = patches.Detector(dtype).apply({"params": params}, x)
        return optax.sigmoid_binary_cross_entropy(logits, has_digit).mean()

    make = functools.partial(patches.make_batch, photos=photos, digits=digits)
    batch = functools.partial(make, size=size)
    name = f"detector, 2^{size.bit_length() - 1} patches"
    return Task(name, init, loss_fn, batch, optax.adam(3e-3), steps)


# The tasks that need no loss scaling.
TASKS = (perceptron, transformer, recurrent)
