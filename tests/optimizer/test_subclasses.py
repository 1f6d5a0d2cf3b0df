"""Subclasses, copies, and optimizers as constants of compiled functions."""

import copy
import pickle

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest

from optax_lossscale import DynamicLossScale, LossScaleOptimizer

ONES = jnp.ones(2, jnp.float32)


def halve(updates, state, params=None):
    del params
    return jax.tree.map(lambda u: -0.5 * u, updates), state


# Of functions of modules, as pickle takes no others.
INNER = optax.GradientTransformation(optax.init_empty_state, halve)


class Weighted(LossScaleOptimizer):
    """Multiplies the gradients by an attribute of its own."""

    def __new__(cls, weight, inner, rule=None):
        self = super().__new__(cls, inner, rule, skip="where")
        self.weight = weight
        return self

    def apply_gradients(self, grads, params, state, **extra_args):
        grads = jax.tree.map(lambda g: g * self.weight, grads)
        return super().apply_gradients(grads, params, state, **extra_args)


BASE = LossScaleOptimizer(INNER, DynamicLossScale(8.0), axis_name=None)
WEIGHTED = Weighted(1.0, INNER)
every_optimizer = pytest.mark.parametrize(
    "optimizer", [BASE, WEIGHTED], ids=["base", "subclass"]
)


def one_step(optimizer, params=ONES):
    return optimizer.apply_gradients(ONES, params, optimizer.init(params))[0]


def test_minimize_calls_what_is_overridden():
    params, *_ = Weighted(2.0, INNER).minimize(jnp.sum, ONES, BASE.init(ONES))
    assert params.tolist() == [0, 0]


class Doubling(LossScaleOptimizer):
    """Doubles its updates."""

    def update(self, updates, state, params=None, **extra_args):
        updates, state = super().update(updates, state, params, **extra_args)
        return jax.tree.map(lambda u: 2 * u, updates), state


def doubling_function(optimizer):
    """Returns a copy whose function `update` doubles the updates."""

    def update(updates, state, params=None):
        updates, state = optimizer.update(updates, state, params)
        return jax.tree.map(lambda u: 2 * u, updates), state

    return optimizer._replace(update=update)


@pytest.mark.parametrize("retries", [0, 3])
@pytest.mark.parametrize(
    "make",
    [Doubling, lambda *args, **kw: doubling_function(LossScaleOptimizer(*args, **kw))],
)
def test_an_update_of_ones_own_takes_the_step(make, retries):
    optimizer = make(INNER, DynamicLossScale(8.0), retries=retries)
    state = optimizer.init(ONES)
    assert one_step(optimizer).tolist() == [0, 0]
    params, state, _ = optimizer.minimize(jnp.sum, ONES, state)
    assert params.tolist() == [0, 0]
    nan = lambda x: jnp.sum(x) * jnp.nan  # noqa: E731
    params, state, _ = optimizer.minimize(nan, ONES, state)
    assert params.tolist() == [1, 1]
    assert (state.skipped_steps, optimizer.current_loss_scale(state)) == (1, 4)


def test_a_veto_is_not_lost_on_an_update_that_takes_none():
    optimizer = doubling_function(BASE)
    with pytest.raises(TypeError, match="skip_if"):
        optimizer.apply_gradients(ONES, ONES, optimizer.init(ONES), skip_if=True)


def test_each_has_a_compiled_function_of_its_own():
    step = jax.jit(one_step, static_argnums=0)
    for weight in (1.0, 2.0, 4.0):
        optimizer = Weighted(weight, INNER)
        assert step(optimizer).tolist() == [1 - weight / 2] * 2
        assert jax.jit(one_step)(optimizer, ONES).tolist() == [1 - weight / 2] * 2


@pytest.mark.parametrize(
    "again",
    [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))],
    ids=["copy", "deepcopy", "pickle"],
)
@every_optimizer
def test_copies(optimizer, again):
    copied = again(optimizer)
    assert type(copied) is type(optimizer)
    assert copied == optimizer
    assert hash(copied) == hash(optimizer)
    if optimizer is WEIGHTED:
        # The functions of the tuple are those of the copy.
        copied.weight = 4.0
        init, _ = copied
        params, _ = copied.apply_gradients(ONES, ONES, init(ONES))
        assert params.tolist() == [-1, -1]
        assert optimizer.weight == 1
        assert copied != optimizer


class Trainer(eqx.Module):
    optimizer: LossScaleOptimizer
    params: jax.Array


@pytest.mark.parametrize("wrap", [jax.jit, eqx.filter_jit])
@every_optimizer
def test_is_an_argument_and_an_attribute(optimizer, wrap):
    assert wrap(one_step)(optimizer, ONES).tolist() == [0.5, 0.5]
    trainer = Trainer(optimizer, ONES)
    step = wrap(lambda trainer: one_step(trainer.optimizer, trainer.params))
    assert step(trainer).tolist() == [0.5, 0.5]
    assert len(jax.tree.leaves(trainer)) == 1


@every_optimizer
def test_functions_can_be_replaced_as_in_any_optimizer(optimizer):
    compiled = jax.jit(optimizer.update)
    replaced = optimizer._replace(update=compiled)
    assert isinstance(replaced, optax.GradientTransformation)
    assert replaced.update is compiled
    params, state = ONES, replaced.init(ONES)
    for grads, expected in ((ONES, 0.5), (jnp.nan * ONES, 0.5), (ONES, 0)):
        updates, state = replaced.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        assert params.tolist() == [expected] * 2
    assert state.skipped_steps == 1
    assert compiled._cache_size() == 1
