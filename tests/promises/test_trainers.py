"""Trainers that nobody edited train in float16: the scale is among the parameters."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from helpers import NAN, assert_same_bits, exhaustive_but

from optax_lossscale import LossScaleOptimizer, scale_as_parameter, with_loss_scale

pytestmark = pytest.mark.usefixtures("standard_dtype_promotion")
# Parameters, the scale among them, and a function of them and of a batch.
LEAF = jax.device_put(np.float32(2**20))


def linen_model(dtype):
    layers = linen.Dense(8, dtype=dtype), linen.tanh, linen.Dense(1, dtype=dtype)
    model = linen.Sequential(layers)
    params = jax.jit(model.init)(jax.random.key(0), np.ones((1, 1)))["params"]
    params["loss_scale"] = LEAF
    return params, lambda params, x: model.apply({"params": params}, x)


class Model(eqx.Module):
    network: eqx.nn.MLP
    loss_scale: jax.Array


def equinox_model(dtype):
    def apply(params, x):
        arrays, rest = eqx.partition((params, x), eqx.is_array)
        params, x = eqx.combine(optax.tree.cast(arrays, dtype), rest)
        return jax.vmap(params.network)(x)

    network = eqx.nn.MLP(1, 1, 8, 1, jnp.tanh, key=jax.random.key(0))
    return Model(network=network, loss_scale=LEAF), apply


def nnx_model(kind, dtype):
    options = {"dtype": dtype, "rngs": nnx.Rngs(0)}
    frozen = {"param_dtype": jnp.float16} if kind is nnx.LoRAParam else {}
    first = nnx.Linear(1, 8, **options, **frozen)
    extra = [nnx.BatchNorm(8, **options), nnx.Dropout(0.1, rngs=nnx.Rngs(0))]
    if frozen:
        first, extra = nnx.LoRA(1, 4, 8, base_module=first, **options), []
    last = nnx.Linear(8, 1, **options, **frozen)
    model = nnx.Sequential(first, *extra, jnp.tanh, last)
    model.loss_scale = kind(LEAF)
    return model, lambda model, x: model(x.reshape(-1, 1)).reshape(x.shape)


# Trainers that nobody edited return the losses and the new parameters.


def one_program(loss_fn, params, tx, data):
    """Clips each example; compiles all steps of two seeds as one program."""
    arrays, rest = eqx.partition(params, eqx.is_inexact_array)
    clip = optax.clip_by_global_norm(1e-8)

    def step(carry, batch):
        arrays, state = carry

        def clipped(*example):
            grad = eqx.filter_value_and_grad(loss_fn)
            loss, grads = grad(eqx.combine(arrays, rest), *example)
            return loss, clip.update(grads, None)[0]

        losses, grads = jax.vmap(clipped)(*batch)
        grads = jax.tree.map(lambda x: jnp.mean(x, 0), grads)
        updates, state = tx.update(grads, state, arrays)
        return (eqx.apply_updates(arrays, updates), state), jnp.mean(losses)

    @jax.jit
    def run(carry):
        seeds = jax.tree.map(lambda x: jnp.stack([x, x]), carry)
        ends = jax.vmap(lambda carry: jax.lax.scan(step, carry, data))(seeds)
        return jax.tree.map(lambda x: x[1], ends)

    (arrays, _), losses = run((arrays, tx.init(arrays)))
    return losses, arrays


def nnx_loop(kind, loss_fn, model, tx, data):
    """Clips and accumulates before the optimizer."""
    tx = optax.chain(optax.clip_by_global_norm(1e-8), optax.MultiSteps(tx, 2))
    optimizer = nnx.Optimizer(model, tx, wrt=kind)

    @nnx.jit
    def step(model, optimizer, batch):
        grad = nnx.value_and_grad(loss_fn, argnums=nnx.DiffState(0, kind))
        loss, grads = grad(model, *batch)
        optimizer.update(model, grads)
        return loss

    losses = [step(model, optimizer, batch) for batch in zip(*data, strict=True)]
    return losses, nnx.state(model, nnx.Param)


TRAINERS = {
    "linen": (linen_model, one_program),
    "Equinox": (equinox_model, one_program),
    "nnx": [functools.partial(f, nnx.Param) for f in (nnx_model, nnx_loop)],
    "LoRA": [functools.partial(f, nnx.LoRAParam) for f in (nnx_model, nnx_loop)],
}


@pytest.mark.parametrize("name", exhaustive_but(TRAINERS, ["linen"]))
def test_a_trainer_that_nobody_edited(name):
    make, train = TRAINERS[name]
    bare = optax.sgd(1e7)
    ours = scale_as_parameter(LossScaleOptimizer(bare, initial_scale=2.0**20))

    def numbers(params):
        if isinstance(params, nnx.Module):
            params = nnx.state(params, nnx.Param)
        params = jax.tree.leaves(eqx.filter(params, eqx.is_inexact_array))
        return np.hstack([np.ravel(x) for x in params])

    def run(dtype, bad=1.0, wrap=lambda f: f, tx=bare):
        params, apply = make(dtype)

        def loss_fn(params, x, y, weights):
            # Gradients below 2**-25 vanish in float16.
            errors = (apply(params, x).astype(jnp.float32) - y) * weights
            return 1e-8 * jnp.mean(errors**2)

        start = numbers(params)
        x = np.random.default_rng(1).standard_normal((8, 4, 16, 1), np.float32)
        # No gradient in two steps: ours skips one of them, or both if it accumulates.
        weights, targets = np.ones_like(x), np.sin(2 * x)
        weights[4:6] = 0
        x[4, 3] *= bad
        data = x, targets, weights
        losses, params = train(wrap(loss_fn), params, tx, data)
        return start, numbers(params), np.array(losses)

    start, wanted, wanted_losses = run(jnp.float32)
    assert_same_bits(*run(jnp.float16)[:2])
    _, found, losses = run(jnp.float16, NAN, with_loss_scale, ours)
    assert found[start == LEAF] == LEAF / 2
    error = np.where(start == LEAF, 0, found - wanted)
    assert np.linalg.norm(error) < 0.02 * np.linalg.norm(wanted - start)
    wanted_losses[4] = NAN
    np.testing.assert_allclose(losses, wanted_losses, rtol=0.02)
