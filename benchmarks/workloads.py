"""The workloads: optimizer steps on given gradients, and float16 training steps."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.systems import System, make_systems
from examples.common.precision import compute_in
from examples.language_model.config import Config
from examples.language_model.data import make_corpus
from examples.language_model.model import make_functions

# The smallest vocabulary of the language model: bytes, and one word.
BYTES = 257


class Workload(NamedTuple):
    """A training step on which systems are compared.

    Attributes:
      name: Its name in tables.
      optimizer: A name in `systems.OPTIMIZERS`.
      init: Returns the initial parameters.
      loss_fn: Maps `params, *batch` to a loss.
      batches: Returns the batches, which the steps use in turn.
      given: Whether the gradients are given: see `systems.make_systems`.
      column: The title of its column in the guide; empty if it has none.
    """

    name: str
    optimizer: str
    init: Callable[[], Any]
    loss_fn: Callable[..., jax.Array]
    batches: Callable[[], list[tuple]]
    given: bool = False
    column: str = ""

    def systems(self) -> dict[str, Callable[[], System]]:
        """Returns functions that make the systems; the first makes the plain step."""
        return make_systems(self.optimizer, self.loss_fn, self.given)


@jax.custom_vjp
def given_gradients(params: Any, grads: Any) -> jax.Array:
    """Returns a loss whose gradients are `grads`, even if the loss is scaled."""
    return jnp.float32(0)


def _given_backward(grads, _cotangent):
    return grads, None


def _given_forward(params, grads):
    # mpx casts the parameters first, and then requires gradients of that dtype.
    return jnp.float32(0), jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params)


given_gradients.defvjp(_given_forward, _given_backward)


def written(parameters: int) -> str:
    """Writes a number of parameters with one digit, 2e7 for example."""
    return f"{parameters:.0e}".replace("e+0", "e")


def optimizer_step(
    parameters: int, leaves: int, optimizer: str = "adam", *, overflow: bool = False
) -> Workload:
    """The step of the optimizer alone, on given gradients."""
    size = parameters // leaves
    shape = (size // 1000, 1000) if size % 1000 == 0 and size > 1000 else (size,)

    def full(value):
        return [jnp.full(shape, value * (i + 1), jnp.float32) for i in range(leaves)]

    def batches():
        grads = full(1e-3)
        if not overflow:
            return [(grads,)]
        bad = [*grads[:-1], grads[-1].at[-1].set(jnp.inf)]
        return [(grads,)] * 9 + [(bad,)]

    name = f"{optimizer} step, {written(parameters)} parameters, {leaves} leaves"
    name += ", overflow every 10th step" * overflow
    return Workload(name, optimizer, lambda: full(0.01), given_gradients, batches, True)


def mlp(
    optimizer: str = "adam", layers: int = 20, width: int = 1000, batch: int = 16
) -> Workload:
    """A multilayer perceptron in float16, as in Micikevicius et al. 2018."""

    def init():
        keys = jax.random.split(jax.random.key(0), layers)
        scale = (2 / width) ** 0.5
        return [scale * jax.random.normal(key, (width, width)) for key in keys]

    def loss_fn(params, x, y):
        hidden = x
        for weights in params:
            hidden = jax.nn.gelu(hidden @ weights.astype(jnp.float16))
        return jnp.mean(jnp.square(hidden - y), dtype=jnp.float32)

    def batches():
        # There is nothing to learn from noise, so gradients keep their size. Otherwise
        # Adam's moments could become subnormal numbers, which are slow on CPU.
        shape = (4, 2, batch, width)
        return [*jax.random.normal(jax.random.key(1), shape, jnp.float16)]

    name = f"float16 MLP, {layers} layers of {width} x {width}, batch {batch}"
    name += f", {optimizer}" * (optimizer != "adam")
    return Workload(name, optimizer, init, loss_fn, batches)


def convnet(layers: int = 12, width: int = 256, side: int = 56) -> Workload:
    """A residual convolutional network with batch norms, on 64 images."""

    def init():
        keys = jax.random.split(jax.random.key(0), layers)
        inputs = [3] + [width] * (layers - 1)
        return [
            {
                "kernel": jax.random.normal(key, (3, 3, n, width)) / (4.5 * n) ** 0.5,
                "scale": jnp.ones(width),
                "bias": jnp.zeros(width),
            }
            for key, n in zip(keys, inputs, strict=True)
        ]

    def loss_fn(params, x):
        stream = None
        for p in params:
            kernel = p["kernel"].astype(jnp.float16)
            layout = ("NHWC", "HWIO", "NHWC")
            y = x if stream is None else stream
            y = jax.lax.conv_general_dilated(
                y, kernel, (1, 1), "SAME", None, None, layout
            )
            y = jax.nn.standardize(y.astype(jnp.float32), (0, 1, 2))
            y = jax.nn.relu(y * p["scale"] + p["bias"]).astype(jnp.float16)
            stream = y if stream is None else stream + y
        return jnp.mean(jnp.square(stream), dtype=jnp.float32)

    def batches():
        shape = (4, 64, side, side, 3)
        return [(x,) for x in jax.random.normal(jax.random.key(1), shape, jnp.float16)]

    name = f"float16 convnet, {layers} layers of {width}, 64 images of {side} x {side}"
    return Workload(name, "adam", init, loss_fn, batches)


def transformer(
    layers: int = 2,
    width: int = 128,
    context: int = 128,
    batch: int = 16,
    vocabulary: int = BYTES,
    **settings: Any,
) -> Workload:
    """The language model of the examples in float16, on Python source: its bytes."""
    config = Config("a*.py", vocabulary, context, layers, width, **settings)
    init, loss = make_functions(config)
    loss_fn = compute_in(config.dtype, loss)

    def batches():
        corpus = make_corpus(config)
        return [(jnp.asarray(corpus.training_batch(i, batch)),) for i in range(4)]

    def initial():
        return init(jax.random.key(0))

    parameters = sum(x.size for x in jax.tree.leaves(jax.eval_shape(initial)))
    name = f"float16 transformer on text, {parameters:.1e} parameters, batch {batch}"
    return Workload(name, "adam", initial, loss_fn, batches)


def make_workloads(quick: bool, *, accelerator: bool) -> list[Workload]:
    """Returns the workloads.

    Args:
      quick: Whether to return only a few small ones.
      accelerator: Whether they run on an accelerator. On CPU, the largest ones are
        left out.
    """
    if quick:
        return [
            optimizer_step(10**5, 20)._replace(column="1e5"),
            optimizer_step(10**5, 20, overflow=True)._replace(column="1e5, overflows"),
            mlp(layers=4, width=128)._replace(column="MLP"),
            transformer(1, 64, context=32, batch=4)._replace(column="transformer"),
        ]
    workloads = [
        optimizer_step(10**5, 20)._replace(column="1e5"),
        optimizer_step(10**6, 20)._replace(column="1e6"),
        optimizer_step(2 * 10**7, 20)._replace(column="2e7"),
        optimizer_step(10**8, 20)._replace(column="1e8"),
    ]
    if accelerator:
        large = mlp(width=4096, batch=4096)._replace(column="large MLP")
        workloads += [optimizer_step(10**9, 20)._replace(column="1e9"), large]
    return [
        *workloads,
        optimizer_step(2 * 10**7, 1),
        optimizer_step(2 * 10**7, 20, "sgd")._replace(column="2e7, SGD"),
        optimizer_step(2 * 10**7, 20, overflow=True)._replace(column="2e7, overflows"),
        optimizer_step(2 * 10**7, 200),
        mlp()._replace(column="MLP"),
        mlp("sgd")._replace(column="MLP, SGD"),
        transformer()._replace(column="transformer"),
    ]
