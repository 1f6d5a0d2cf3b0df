"""Numbers that many tests compute with, and what they are compared with."""

import jax
import jax.numpy as jnp
import numpy as np

TWO = np.array([1.0, 2.0], np.float32)


def normal(*shape, scale=1.0, seed=0):
    """Returns random numbers, f32[shape]."""
    numbers = np.random.default_rng(seed + sum(shape)).normal(size=shape)
    return (scale * numbers).astype(np.float32)


def total(x):
    return jnp.sum(x.astype(jnp.float32))


def mean(x):
    return jnp.mean(x.astype(jnp.float32))


def half(x):
    return x.astype(jnp.float16)


def by_hand(loss_fn, params, *args):
    """Returns a function of the scale: the loss, and all gradients without the scale.

    It computes operation by operation as written: XLA may keep more bits otherwise.
    """

    def scaled(params, scale):
        loss = loss_fn(params, *args).astype(jnp.float32)
        return loss * scale, loss

    step = jax.jit(jax.value_and_grad(scaled, has_aux=True))
    options = {"xla_allow_excess_precision": False}
    compiled = step.lower(params, jnp.float32(1)).compile(compiler_options=options)

    def run(scale):
        (_, loss), grads = compiled(params, jnp.float32(scale))
        flat = [np.ravel(x).astype(float) for x in jax.tree.leaves(grads)]
        return float(loss), np.concatenate(flat) / scale

    return run


def relative_errors(found, desired):
    """Returns the errors of the loss and of the gradients, relative to what is desired.

    Both are what a function of `by_hand` returns.
    """
    pairs = zip(found, desired, strict=True)
    return [np.linalg.norm(x - y) / np.linalg.norm(y) for x, y in pairs]
