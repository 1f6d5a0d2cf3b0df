"""How many updates are lost if parameters are in half precision.

The page about such parameters has the table.
"""

import functools

import jax
import jax.numpy as jnp
import optax
from sklearn.datasets import load_digits

from optax_lossscale import LossScaleOptimizer, autocast

STEPS = 150


def init(key, dtype):
    first, last = jax.random.split(key)
    params = {
        "first": jax.random.normal(first, (64, 64)) / 8,
        "last": jax.random.normal(last, (64, 10)) / 8,
    }
    return optax.tree.cast(params, dtype)


@autocast
def loss_fn(params, x, y):
    params = optax.tree.cast(params, jnp.float32)
    logits = jax.nn.relu(x @ params["first"]) @ params["last"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def run(apply_by_chance):
    """Returns the losses of three seeds, and the shares of lost updates, by row.

    An update is lost if it is not zero, but leaves the parameter as it was.
    """
    digits = load_digits()
    images, labels = jnp.float32(digits.data / 16), jnp.int32(digits.target)
    adam = optax.adam(optax.cosine_decay_schedule(3e-3, STEPS))
    optimizer = LossScaleOptimizer(adam)

    def scaled(params, opt_state, x, y):
        _, grads = optimizer.value_and_grad(loss_fn, opt_state)(params, x, y)
        return optimizer.update(grads, opt_state, params)

    def alone(params, opt_state, x, y):
        return adam.update(jax.grad(loss_fn)(params, x, y), opt_state, params)

    def to_nearest(params, updates, key):
        return optax.apply_updates(params, updates)

    def draw(i):
        return jax.random.randint(jax.random.key(i), (128,), 0, len(images))

    batches = jax.vmap(draw)(jnp.arange(STEPS))

    def train(init_state, get_updates, apply, dtype, seed):
        def step(carry, rows_and_key):
            (params, opt_state), (rows, key) = carry, rows_and_key
            batch = images[rows], labels[rows]
            updates, opt_state = get_updates(params, opt_state, *batch)
            new_params = apply(params, updates, key)

            def count(update, old, new):
                moving = update != 0
                return jnp.stack([jnp.sum(moving & (old == new)), jnp.sum(moving)])

            counts = jax.tree.map(count, updates, params, new_params)
            return (new_params, opt_state), sum(jax.tree.leaves(counts))

        params = init(jax.random.key(seed), dtype)
        start = params, init_state(params)
        keys = jax.random.split(jax.random.key(seed), STEPS)
        (params, _), counts = jax.lax.scan(step, start, (batches, keys))
        lost, moving = counts.sum(axis=0)
        return loss_fn(params, images, labels), lost / moving

    kinds = [
        *((optimizer.init, scaled, to_nearest, x) for x in ("float32", "float16")),
        (optimizer.init, scaled, to_nearest, "bfloat16"),
        (optimizer.init, scaled, apply_by_chance, "bfloat16"),
        (adam.init, alone, to_nearest, "float16"),
    ]
    return [
        jax.jit(jax.vmap(functools.partial(train, *kind)))(jnp.arange(3))
        for kind in kinds
    ]
