"""What is trained: given gradients of many sizes, and whole float16 steps."""

import math
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.systems import SKIPS, System, make_systems


class Workload(NamedTuple):
    """One thing to train.

    Attributes:
      name: What it is called in tables.
      optimizer: A name in `systems.OPTIMIZERS`.
      init: Makes the parameters.
      loss_fn: Maps `params, *batch` to a loss.
      batches: Makes the batches, which are taken in turn.
      parameters: Number of parameters.
      given: Whether the gradients are given: see `systems.make_systems`.
      skips: The ways to skip that are compared.
      column: The head of its column in the README, if it has one.
      without: The names of systems that are left out.
    """

    name: str
    optimizer: str
    init: Callable[[], Any]
    loss_fn: Callable[..., jax.Array]
    batches: Callable[[], list[tuple]]
    parameters: int
    given: bool = False
    skips: tuple[str, ...] = ("auto",)
    column: str = ""
    without: tuple[str, ...] = ()

    def systems(self) -> dict[str, Callable[[], System]]:
        """Returns what is compared on it; the first is the plain step."""
        systems = make_systems(
            self.optimizer, self.loss_fn, given=self.given, skips=self.skips
        )
        return {name: systems[name] for name in systems if name not in self.without}


@jax.custom_vjp
def given_gradients(params: Any, grads: Any) -> jax.Array:
    """A loss of no cost whose gradients are `grads`, whatever it is scaled by."""
    return jnp.float32(0)


def _given_backward(grads, _cotangent):
    return grads, None


def _given_forward(params, grads):
    # mpx casts the parameters first, and then wants gradients of their dtype.
    return jnp.float32(0), jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params)


given_gradients.defvjp(_given_forward, _given_backward)


def _shape(parameters, leaves):
    size = parameters // leaves
    return (size // 1000, 1000) if size % 1000 == 0 and size > 1000 else (size,)


def optimizer_step(
    parameters: int, leaves: int, optimizer: str = "adam", *, overflow: bool = False
) -> Workload:
    """The optimizer's step alone, on gradients that are there already."""
    shape = _shape(parameters, leaves)

    def full(value):
        return [jnp.full(shape, value * (i + 1), jnp.float32) for i in range(leaves)]

    def batches():
        grads = full(1e-3)
        if not overflow:
            return [(grads,)]
        bad = [*grads[:-1], grads[-1].at[-1].set(jnp.inf)]
        return [(grads,)] * 9 + [(bad,)]

    words = f"{parameters:.0e}".replace("e+0", "e")
    name = f"{optimizer} step, {words} parameters, {leaves} leaves"
    return Workload(
        name + ", overflow every 10th step" * overflow,
        optimizer,
        lambda: full(0.01),
        given_gradients,
        batches,
        parameters,
        given=True,
    )


def mlp(layers: int = 20, width: int = 1000, batch: int = 16) -> Workload:
    """A multilayer perceptron in float16, as in Micikevicius et al. 2018."""

    def init():
        keys = jax.random.split(jax.random.key(0), layers)
        scale = (2 / width) ** 0.5
        return [
            scale * jax.random.normal(key, (width, width), jnp.float32) for key in keys
        ]

    def loss_fn(params, x, y):
        hidden = x
        for weights in params:
            hidden = jax.nn.gelu(hidden @ weights.astype(jnp.float16))
        return jnp.mean(jnp.square(hidden - y), dtype=jnp.float32)

    def batches():
        # Noise, of which there is nothing to learn: gradients stay as they are, and
        # Adam's moments do not become denormal numbers, which are slow on CPU.
        shape = (4, 2, batch, width)
        return [*jax.random.normal(jax.random.key(1), shape, jnp.float16)]

    name = f"float16 MLP, {layers} layers of {width} x {width}, batch {batch}"
    return Workload(name, "adam", init, loss_fn, batches, layers * width**2)


def text(length: int) -> np.ndarray:
    """The first characters of the standard library's own source, as bytes."""
    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    source = b"".join(path.read_bytes() for path in paths)
    return np.frombuffer(source[:length], np.uint8) % 128


def transformer(
    layers: int = 2, width: int = 128, context: int = 128, batch: int = 16
) -> Workload:
    """A character-level language model in float16, on Python source."""

    def init():
        keys = iter(jax.random.split(jax.random.key(0), 6 * layers + 2))

        def matrix(rows, columns):
            shape = (rows, columns)
            return rows**-0.5 * jax.random.normal(next(keys), shape, jnp.float32)

        shapes = {"qkv": (width, 3 * width), "out": (width, width)}
        shapes |= {"up": (width, 4 * width), "down": (4 * width, width)}
        blocks = [{k: matrix(*s) for k, s in shapes.items()} for _ in range(layers)]
        return {
            "embed": matrix(128, width),
            "blocks": blocks,
            "head": matrix(width, 128),
        }

    def normalized(x):
        x = x.astype(jnp.float32)
        x = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(
            x.var(-1, keepdims=True) + 1e-5
        )
        return x.astype(jnp.float16)

    def loss_fn(params, tokens):
        params = jax.tree.map(lambda p: p.astype(jnp.float16), params)
        x = params["embed"][tokens[:, :-1]]
        for block in params["blocks"]:
            q, k, v = jnp.split(normalized(x) @ block["qkv"], 3, axis=-1)
            heads = (*x.shape[:2], 4, width // 4)
            q, k, v = (t.reshape(heads) for t in (q, k, v))
            scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * (width // 4) ** -0.5
            causal = jnp.tri(x.shape[1], dtype=bool)
            scores = jnp.where(causal, scores.astype(jnp.float32), -jnp.inf)
            weights = jax.nn.softmax(scores).astype(jnp.float16)
            mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
            x = x + mixed.reshape(x.shape) @ block["out"]
            x = x + jax.nn.gelu(normalized(x) @ block["up"]) @ block["down"]
        logits = (normalized(x) @ params["head"]).astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return losses.mean()

    def batches():
        shape = (4, 1, batch, context + 1)
        return [*jnp.asarray(text(math.prod(shape)).reshape(shape), jnp.int32)]

    parameters = sum(x.size for x in jax.tree.leaves(jax.eval_shape(init)))
    name = f"float16 transformer on text, {parameters:.1e} parameters, batch {batch}"
    return Workload(name, "adam", init, loss_fn, batches, parameters)


def make_workloads(quick: bool, *, accelerator: bool) -> list[Workload]:
    """Returns what is trained, the smaller part of it where `quick`.

    The largest, of a billion parameters, is for accelerators.
    """
    if quick:
        return [
            optimizer_step(10**5, 20)._replace(column="1e5"),
            optimizer_step(10**5, 20, overflow=True)._replace(column="1e5, overflows"),
            mlp(layers=4, width=128)._replace(column="MLP"),
            transformer(1, 64, context=32, batch=4)._replace(column="transformer"),
        ]
    every_skip = {"skips": SKIPS}
    # On CPU what selects takes XLA a time that grows with the square of the leaves: a
    # minute for 200, and 1000 did not compile in 4 minutes and 12 GB.
    endless = () if accelerator else ("flax DynamicScale", "jmp", "mpx")
    workloads = [
        optimizer_step(10**5, 20)._replace(column="1e5"),
        optimizer_step(10**6, 20)._replace(column="1e6"),
        optimizer_step(2 * 10**7, 20)._replace(column="2e7", **every_skip),
        optimizer_step(10**8, 20)._replace(column="1e8"),
    ]
    if accelerator:
        workloads += [optimizer_step(10**9, 20)._replace(column="1e9")]
    return [
        *workloads,
        *(optimizer_step(2 * 10**7, leaves) for leaves in (1, 200)),
        optimizer_step(2 * 10**7, 1000)._replace(without=endless),
        optimizer_step(2 * 10**7, 20, "sgd")._replace(column="2e7, SGD"),
        optimizer_step(2 * 10**7, 20, "adafactor"),
        optimizer_step(2 * 10**7, 20, overflow=True)._replace(column="2e7, overflows"),
        mlp()._replace(column="MLP", **every_skip),
        transformer()._replace(column="transformer"),
    ]
