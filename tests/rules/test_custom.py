"""Rules from outside the package."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from helpers import BackoffOnly, signature

from optax_lossscale import (
    DynamicLossScale,
    FixedLossScaleState,
    LossScale,
    LossScaleOptimizer,
    all_finite,
)


class HalvingState(NamedTuple):
    loss_scale: jax.Array
    history: tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True)
class Halving(LossScale):
    """A rule from outside the package, with a state of its own."""

    start: float = 64.0

    def init(self):
        return HalvingState(jnp.float32(self.start), (jnp.int32(0),))

    def update(self, grads, state, *, axis_name=None):
        finite = all_finite(grads, axis_name=axis_name)
        (count,) = state.history
        return HalvingState(state.loss_scale / 2, (count + 1,)), finite


@dataclasses.dataclass(frozen=True)
class Careless(LossScale):
    """A rule whose types are not what they should be."""

    def init(self):
        return FixedLossScaleState(jnp.asarray(8.0))

    def update(self, grads, state, *, axis_name=None):
        return FixedLossScaleState(state.loss_scale / 2), jnp.array(1)


class TestSubclass:
    def test_careless_types_become_stable(self):
        optimizer = LossScaleOptimizer(optax.sgd(0.5), Careless())
        one = jnp.float32(1)
        state = optimizer.init(one)
        for update in (optimizer.update, jax.jit(optimizer.update)):
            after = update(one, state)[1]
            assert signature(after) == signature(state)
            assert optimizer.current_loss_scale(after) == 4

    def test_drives_an_optimizer(self):
        optimizer = LossScaleOptimizer(optax.sgd(0.5), Halving())
        assert optimizer.dynamic
        assert optimizer.initial_scale is None
        assert optimizer.dynamic_growth_steps is None
        one = jnp.float32(1)
        assert optimizer.dynamic_counter(optimizer.init(one)) is None
        param, state, _ = optimizer.minimize(jnp.square, one, optimizer.init(one))
        assert (param, optimizer.current_loss_scale(state)) == (0, 32)

    def test_its_own_bounds_hold_where_it_has_any(self):
        @dataclasses.dataclass(frozen=True)
        class Bounded(Halving):
            min_scale: float | None = None
            max_scale: float = 2.0**10

        def read(number, **bounds):
            state = Bounded(**bounds).init()._replace(loss_scale=jnp.float32(number))
            return Bounded(**bounds)(state)

        assert read(2.0**12) == 2.0**10
        assert read(0.0) == 2.0**-126
        assert read(3e38, max_scale=3e38) == 2.0**126
        # The first scale, 64, is brought within them, too.
        assert read(np.nan, min_scale=128) == 128
        assert read(np.inf, max_scale=16) == 16
        # Bounds out of all bounds do not make it worse.
        assert read(0.0, min_scale=0) == 2.0**-126


@dataclasses.dataclass(frozen=True)
class Scheduled(BackoffOnly):
    """A rule with a hyperparameter that cannot be hashed."""

    milestones: tuple | list = ()


def test_hyperparameters_may_be_of_any_type():
    rule = Scheduled(milestones=[1, 2])
    optimizer, one = LossScaleOptimizer(optax.sgd(0.5), rule), jnp.float32(1)
    state = optimizer.update(one * np.inf, optimizer.init(one), one)[1]
    assert optimizer.current_loss_scale(state) == 2


class CountingState(NamedTuple):
    loss_scale: jax.Array
    inner: Any
    ema: dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Counting(DynamicLossScale):
    """A public rule with a state of its own around that of its base class."""

    def init(self):  # pyright: ignore[reportIncompatibleMethodOverride]
        inner = super().init()
        return CountingState(jnp.array(inner.loss_scale), inner, {"a": jnp.float32(0)})

    def update(self, grads, state, *, axis_name=None):
        inner, applied = super().update(grads, state.inner, axis_name=axis_name)
        ema = {"a": state.ema["a"] + 1}
        return CountingState(jnp.array(inner.loss_scale), inner, ema), applied


def test_a_subclass_of_a_public_rule_has_a_state_of_its_own():
    optimizer = LossScaleOptimizer(optax.sgd(0.5), Counting(growth_interval=2))
    params = jnp.ones(2)
    state = optimizer.init(params)
    scales = []
    for value in (1, np.inf, 1, 1):
        grads = jnp.full(2, value, jnp.float32)
        params, state = optimizer.apply_gradients(grads, params, state)
        scales.append(float(state.loss_scale_state.loss_scale))
    assert scales == [2.0**15, 2.0**14, 2.0**14, 2.0**15]
    assert state.loss_scale_state.ema["a"] == 4
    assert params.tolist() == [-0.5, -0.5]


@dataclasses.dataclass(frozen=True)
class Named(LossScale):
    """A rule with a hyperparameter of the same name as the field of its state."""

    loss_scale: float = 8.0

    def init(self):
        return FixedLossScaleState(jnp.float32(self.loss_scale))

    def update(self, grads, state, *, axis_name=None):
        return state, all_finite(grads, axis_name=axis_name)


def test_a_hyperparameter_may_be_named_loss_scale():
    optimizer = LossScaleOptimizer(optax.sgd(0.5), Named(16.0))
    state = optimizer.init(jnp.float32(1))
    param, state, _ = optimizer.minimize(jnp.square, jnp.float32(1), state)
    assert (param, optimizer.current_loss_scale(state)) == (0, 16)
    assert Named.from_config(Named(16.0).get_config()) == Named(16.0)
