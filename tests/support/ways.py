"""The three ways to take a step, with whatever loss and gradients."""

import jax
import jax.numpy as jnp
import optax
import pytest


def as_given(params, loss, grads):
    """Has the value and the gradients that the arguments say."""

    @jax.custom_vjp
    def loss_of(params):
        return loss

    def backward(_, scale):
        scaled = jax.tree.map(lambda g: scale * jnp.float32(g), grads)
        return (jax.tree.map(lambda x, g: x.astype(g.dtype), scaled, grads),)

    loss_of.defvjp(lambda params: (loss, None), backward)
    return loss_of(params)


def by_minimize(optimizer, params, state, loss, grads, skip_if=None):
    flag = None if skip_if is None else lambda value, grads: skip_if
    return optimizer.minimize(as_given, params, state, loss, grads, skip_if=flag)[:2]


def by_update(optimizer, params, state, loss, grads, **options):
    updates, state = optimizer.update(grads, state, params, value=loss, **options)
    return optax.apply_updates(params, updates), state


def by_apply_gradients(optimizer, params, state, loss, grads, **options):
    return optimizer.apply_gradients(grads, params, state, value=loss, **options)


every_way = pytest.mark.parametrize("way", [by_minimize, by_update, by_apply_gradients])
