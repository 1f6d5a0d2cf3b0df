"""Gradients that are not scaled, are never unscaled, or are unscaled twice."""

import dataclasses
import functools
import itertools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from helpers import BackoffOnly, every_wrap

from optax_lossscale import (
    DynamicLossScale,
    FixedLossScale,
    LossScale,
    LossScaleOptimizer,
    scale_as_parameter,
    with_loss_scale,
)

PARAMS, X = {"w": np.ones(3, np.float32)}, np.ones((4, 3), np.float32)
UNSCALED = (
    "In place of jax.value_and_grad(loss_fn)(params, x) write optimizer.value_and"
)
STILL_SCALED = "No gradients have been unscaled, but get_scaled_loss has scaled a"
TWICE = "Leave it out: those of value_and_grad are unscaled already."
numbers = itertools.count(2001)


def fresh_rule():
    """Returns a rule that no other test of this process has used."""
    return DynamicLossScale(growth_interval=next(numbers))


def fresh(rule=None):
    return LossScaleOptimizer(optax.sgd(0.1), rule or fresh_rule())


def loss_fn(params, x):
    return jnp.mean((x @ params["w"]) ** 2)


def words(call):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        call()
    return [str(x.message) for x in seen]


def scaled_by_hand(optimizer, state):
    return jax.grad(optimizer.get_scaled_loss(loss_fn, state))(PARAMS, X)


def of_jax(optimizer, state):
    return jax.grad(loss_fn)(PARAMS, X)


def of_value_and_grad(optimizer, state):
    return optimizer.value_and_grad(loss_fn, state)(PARAMS, X)[1]


def by_hand(optimizer, state):
    grads = scaled_by_hand(optimizer, state)
    return optimizer.get_unscaled_gradients(grads, state)


def by_the_number(optimizer, state):
    scale = optimizer.current_loss_scale(state)
    grads = jax.grad(lambda params: scale * loss_fn(params, X))(PARAMS)
    return jax.tree.map(lambda x: x / scale, grads)


def unscaled_twice(optimizer, state):
    grads = of_value_and_grad(optimizer, state)
    return optimizer.get_unscaled_gradients(grads, state)


def unscaled_alone(optimizer, state):
    grads = of_jax(optimizer, state)
    return optimizer.get_unscaled_gradients(grads, state)


WAYS = {
    of_jax: [UNSCALED],
    scaled_by_hand: [STILL_SCALED],
    unscaled_twice: [TWICE],
    unscaled_alone: ["Scale the loss by optimizer.get_scaled_loss", UNSCALED],
    of_value_and_grad: [],
    by_hand: [],
    by_the_number: [],
}
UPDATES = {
    "update": lambda optimizer, grads, state: optimizer.update(grads, state, PARAMS),
    "apply_gradients": lambda optimizer, grads, state: optimizer.apply_gradients(
        grads, PARAMS, state
    ),
}


@pytest.mark.parametrize("update", UPDATES.values(), ids=UPDATES)
@pytest.mark.parametrize(("way", "expected"), WAYS.items())
@every_wrap
def test_a_warning_says_what_to_write(way, expected, update, wrap):
    optimizer = fresh()

    @wrap
    def step(state):
        return update(optimizer, way(optimizer, state), state)

    seen = words(lambda: step(optimizer.init(PARAMS)))
    assert len(seen) == len(expected)
    for text, part in zip(seen, expected, strict=True):
        assert part in text


@pytest.mark.parametrize("way", [of_jax, unscaled_alone])
@pytest.mark.parametrize(
    "rule",
    [FixedLossScale(1.0), FixedLossScale(1, True), DynamicLossScale(1, max_scale=1)],
)
def test_a_scale_of_1_needs_no_scaling(way, rule):
    optimizer = fresh(rule)
    state = optimizer.init(PARAMS)
    grads = way(optimizer, state)
    assert not words(lambda: optimizer.update(grads, state, PARAMS))


def test_an_equal_rule_may_be_made_again():
    number = next(numbers)
    for way in (of_value_and_grad, of_jax):
        optimizer = fresh(DynamicLossScale(growth_interval=number))
        state = optimizer.init(PARAMS)
        grads = way(optimizer, state)
        assert not words(lambda: optimizer.update(grads, state, PARAMS))  # noqa: B023


def test_so_may_a_rule_with_a_field_that_has_no_hash():
    @dataclasses.dataclass(frozen=True)
    class Mine(BackoffOnly):
        others: list = dataclasses.field(default_factory=list)

    state = fresh(Mine()).init(PARAMS)
    assert len(words(lambda: fresh(Mine()).update(PARAMS, state, PARAMS))) == 1
    of_value_and_grad(fresh(Mine()), state)
    assert not words(lambda: fresh(Mine()).update(PARAMS, state, PARAMS))


@pytest.mark.parametrize("options", [{"eq": False}, {"frozen": False}])
def test_so_may_a_rule_that_has_no_equality_or_no_hash(options):
    init, update = BackoffOnly.init, BackoffOnly.update
    make = functools.partial(type, "Mine", (LossScale,))
    Mine = dataclasses.dataclass(**{"frozen": True} | options)(
        make(
            {
                "init": init,
                "update": update,
                "__annotations__": {"initial_scale": float},
            }
        )
    )
    assert words(lambda: fresh(Mine(8.0)).update(PARAMS, fresh(Mine(8.0)).init(PARAMS)))
    for way in (of_value_and_grad, of_jax):
        optimizer = fresh(Mine(8.0))
        state = optimizer.init(PARAMS)
        grads = way(optimizer, state)
        assert not words(lambda: optimizer.update(grads, state, PARAMS))  # noqa: B023


def test_a_gradient_function_that_was_compiled_before():
    optimizer = fresh()
    state = optimizer.init(PARAMS)
    grads = jax.jit(lambda state: of_value_and_grad(optimizer, state))
    grads(state)
    assert not words(lambda: optimizer.update(grads(state), state, PARAMS))


def test_in_a_train_state():
    state = TrainState.create(apply_fn=None, params=PARAMS, tx=fresh())
    step = jax.jit(
        lambda state, x: state.apply_gradients(grads=jax.grad(loss_fn)(state.params, x))
    )
    (text,) = words(lambda: step(state, X))
    assert UNSCALED in text


def test_in_a_trainer_of_nnx():
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    trainer = nnx.Optimizer(model, fresh(), wrt=nnx.Param)
    grads = nnx.grad(lambda model: jnp.mean(model(X) ** 2))(model)
    (text,) = words(lambda: trainer.update(model, grads))
    assert UNSCALED in text


class TestAScaleAmongTheParameters:
    @pytest.mark.parametrize(
        ("name", "call"),
        [("loss_scale", "(loss_fn)"), ("of_mine", "(loss_fn, 'of_mine')")],
    )
    def test_needs_with_loss_scale(self, name, call, monkeypatch):
        monkeypatch.setattr("optax_lossscale._uses._uses", {name: set()})
        optimizer = scale_as_parameter(fresh(), name)
        params = PARAMS | {name: jnp.float32(2.0**15)}
        state = optimizer.init(params)
        grads = PARAMS | {name: jnp.float32(0)}
        (text,) = words(lambda: optimizer.update(grads, state, params))
        assert f"with_loss_scale{call} in place of loss_fn" in text
        grads = jax.grad(with_loss_scale(loss_fn, name))(params, X)
        assert not words(lambda: optimizer.update(grads, state, params))
