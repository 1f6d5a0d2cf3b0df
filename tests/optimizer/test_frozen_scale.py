"""Functions made once, before the loop: which scale they use."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax

from optax_lossscale import FixedLossScale, LossScaleOptimizer

X = np.arange(6, dtype=np.float32).reshape(3, 2)


def loss_fn(params):
    return jnp.sum((X @ params) ** 2)


@pytest.fixture
def optimizer():
    return LossScaleOptimizer(
        optax.sgd(1e-3), initial_scale=2.0**10, dynamic_growth_steps=1
    )


class Model(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones(2, jnp.float32))


def model_loss(model):
    return loss_fn(model.w[...])


def test_a_state_that_changes_in_place_is_read_at_each_call(optimizer):
    """The scale doubles at each step: a stale one would show in the gradients."""
    model = Model()
    trainer = nnx.Optimizer(model, optimizer, wrt=nnx.Param)
    grad_fn = optimizer.value_and_grad(model_loss, trainer.opt_state)
    scaled_loss = optimizer.get_scaled_loss(loss_fn, trainer.opt_state)
    for step in range(4):
        scale = optimizer.current_loss_scale(trainer.opt_state)
        assert scale == 2.0 ** (10 + step)
        params = model.w[...]
        assert scaled_loss(params) == scale * loss_fn(params)
        value, grads = grad_fn(model)
        assert value == loss_fn(params)
        assert (grads["w"][...] == jax.grad(loss_fn)(params)).all()
        trainer.update(model, grads)


CALLS = {
    "value_and_grad": lambda o, s: o.value_and_grad(loss_fn, s),
    "get_scaled_loss": lambda o, s: o.get_scaled_loss(loss_fn, s),
    "get_scaled_loss of an array": lambda o, s: (
        lambda p: o.get_scaled_loss(jnp.sum(p), s)
    ),
    "get_unscaled_gradients": lambda o, s: lambda g: o.get_unscaled_gradients(g, s),
    "minimize": lambda o, s: lambda p: o.minimize(loss_fn, p, s),
}


@pytest.mark.parametrize("make", CALLS.values(), ids=CALLS)
class TestWarning:
    params = np.float32([1, 1])

    def test_of_a_scale_that_is_a_constant_under_jit(self, make, optimizer):
        call = make(optimizer, optimizer.init(self.params))

        def step(params):
            return call(params)

        def steps(params):
            return lax.map(call, params[None])

        for compiled in (jax.jit(call), jax.jit(step), jax.jit(steps)):
            with pytest.warns(UserWarning, match="inside the training step") as caught:
                compiled.trace(self.params)
            # It names a line of the user, not one of ours or of JAX.
            assert [warning.filename for warning in caught] == [__file__]

    def test_not_where_the_scale_is_that_of_the_state(self, make, optimizer):
        params, state = self.params, optimizer.init(self.params)
        jax.jit(lambda x, s: make(optimizer, s)(x)).trace(params, state)
        # Made there, fixed, or not compiled.
        jax.jit(lambda p: make(optimizer, optimizer.init(p))(p)).trace(params)
        fixed = LossScaleOptimizer(optax.sgd(1e-3), FixedLossScale(8.0, True))
        jax.jit(make(fixed, fixed.init(params))).trace(params)
        make(optimizer, state)(params)
        jax.vmap(make(optimizer, state))(params[None])

    def test_not_where_a_loop_carries_it(self, make, optimizer):
        state, batch = optimizer.init(self.params), self.params[None]

        def carried(state, params):
            return state, make(optimizer, state)(params)

        lax.scan(carried, state, batch)
        jax.jit(lambda state: lax.scan(carried, state, batch)).trace(state)


def test_a_loop_keeps_the_scale_of_its_first_call(optimizer):
    state = optimizer.init(jnp.ones(2, jnp.float32))

    def add(total, params):
        return total + optimizer.get_scaled_loss(loss_fn, state)(params), None

    start = jnp.float32(0), jnp.ones((1, 2), jnp.float32)
    with pytest.warns(UserWarning, match="inside the training step"):
        first, _ = lax.scan(add, *start)
    state = optax.tree.set(state, loss_scale=jnp.float32(1))
    assert lax.scan(add, *start)[0] == first


def test_reading_a_scale_under_jit_is_no_reason_to_warn(optimizer):
    state = optimizer.init(jnp.ones(2, jnp.float32))
    assert jax.jit(lambda x: x * optimizer.current_loss_scale(state))(1.0) == 1024
