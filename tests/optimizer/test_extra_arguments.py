"""Extra arguments of the inner optimizer: what reaches it, and what does not."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import auto_skip

from optax_lossscale import LossScaleOptimizer


def square(x):
    return x**2


NEED_EXTRA_ARGUMENTS = {
    "lbfgs": optax.lbfgs,
    "backtracking": lambda: optax.chain(
        optax.sgd(0.1), optax.scale_by_backtracking_linesearch(5, store_grad=True)
    ),
    "polyak_sgd": optax.polyak_sgd,
}


def test_reach_the_inner_optimizer():
    seen = {}

    def update(updates, state, params=None, **extra_args):
        seen.update(extra_args)
        return updates, state

    inner = optax.GradientTransformationExtraArgs(optax.init_empty_state, update)
    optimizer = LossScaleOptimizer(inner)
    one = jnp.float32(1)
    state = optimizer.init(one)
    for call in (optimizer.update, jax.jit(optimizer.update, static_argnames="f")):
        seen.clear()
        call(one, state, value=one, note={"a": one}, f=max)
        assert seen.keys() == {"value", "note", "f"}
        assert seen["f"] is max
    seen.clear()
    optimizer.apply_gradients(one, one, state, value=one)
    assert seen == {"value": 1}


AROUND = {
    "nothing": lambda inner: inner,
    "chain": lambda inner: optax.chain(optax.identity(), inner),
    "partial": lambda inner: inner._replace(update=functools.partial(inner.update)),
    "named chain": lambda inner: optax.named_chain(("inner", inner)),
    "partition": lambda inner: optax.partition({"all": inner}, "all"),
    "factory": lambda inner: optax.inject_hyperparams(lambda rate: inner)(rate=0.1),
}


@pytest.mark.parametrize("wrap", AROUND.values(), ids=AROUND)
def test_minimize_passes_what_line_searches_need(wrap):
    seen = {}

    def named(updates, state, params=None, *, value, grad, value_fn, **others):
        seen.update(value=value, grad=grad, value_fn=value_fn, **others)
        return updates, state

    def unnamed(updates, state, params=None, **extra_args):
        seen.update(extra_args)
        return updates, state

    for update in (named, unnamed):
        inner = optax.GradientTransformationExtraArgs(lambda _: (), update)
        optimizer, three = LossScaleOptimizer(wrap(inner)), jnp.float32(3)
        seen.clear()
        optimizer.minimize(square, three, optimizer.init(three))
        assert (seen["value"], seen["grad"]) == (9, 6)
        assert seen["value_fn"](jnp.float32(4)) == 16


def test_minimize_of_a_compiled_inner_optimizer():
    inner, three = optax.lbfgs(1.0, linesearch=None), jnp.float32(3)
    for update in (inner.update, jax.jit(inner.update)):
        optimizer = LossScaleOptimizer(inner._replace(update=update))
        params, *_ = optimizer.minimize(square, three, optimizer.init(three))
        assert params == 2


def test_minimize_passes_no_more_than_is_taken():
    def update(updates, state, params=None, *, value):
        return jax.tree.map(lambda u: -u * value, updates), state

    # Against Optax's convention it takes no others; optax.contrib.sam is such.
    inner = optax.GradientTransformationExtraArgs(lambda _: (), update)
    optimizer, three = LossScaleOptimizer(inner), jnp.float32(3)
    params, *_ = optimizer.minimize(square, three, optimizer.init(three))
    assert params == 3 - 6 * 9


@pytest.mark.parametrize(
    "make", NEED_EXTRA_ARGUMENTS.values(), ids=NEED_EXTRA_ARGUMENTS
)
@auto_skip
def test_minimize_serves_what_needs_them(make, skip):
    inner = make()

    def loss_fn(params, power, *, offset):
        return jnp.sum((params["w"] - offset) ** power), {"aux": params}

    def plain(params, state):
        def loss(params):
            return loss_fn(params, 4, offset=3.0)[0]

        value, grad = jax.value_and_grad(loss)(params)
        extra_args = {"value": value, "grad": grad, "value_fn": loss}
        updates, state = inner.update(grad, state, params, **extra_args)
        return optax.apply_updates(params, updates), state, value

    def step(params, state):
        return optimizer.minimize(loss_fn, params, state, 4, has_aux=True, offset=3.0)

    optimizer = LossScaleOptimizer(inner, skip=skip)
    params = expected = {"w": jnp.array([1, -2], jnp.float32)}
    with jax.numpy_dtype_promotion("standard"):
        state, inner_state = optimizer.init(params), inner.init(params)
        for _ in range(2):
            expected, inner_state, value = jax.jit(plain)(expected, inner_state)
            params, state, (loss, aux) = jax.jit(step)(params, state)
    np.testing.assert_allclose(loss, value, rtol=1e-5)
    np.testing.assert_allclose(params["w"], expected["w"], rtol=1e-5)
    assert aux.keys() == {"aux"}
