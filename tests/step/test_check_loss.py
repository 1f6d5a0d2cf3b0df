"""Steps whose loss is not finite, and the counters of skipped steps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import INF, NAN, BackoffOnly, assert_same_bits, every_wrap, signature
from jax import lax
from ways import as_given, by_apply_gradients, by_minimize, by_update, every_way

from optax_lossscale import (
    DynamicLossScale,
    FixedLossScale,
    LossScaleOptimizer,
    TolerantLossScale,
)

# Of each step: the loss, the gradient, and what is to be seen after it: the scale, and
# the steps that were skipped, in a row, for their loss, and at the minimum of 4.
STEPS = [
    ((1, 1), (16, 0, 0, 0, 0)),
    ((NAN, NAN), (16, 1, 1, 1, 0)),
    ((1, 1), (32, 1, 0, 1, 0)),  # the loss took nothing from the two finite steps
    ((INF, 1), (32, 2, 1, 2, 0)),
    ((1, INF), (16, 3, 2, 2, 0)),
    ((-INF, -INF), (16, 4, 3, 3, 0)),
    ((1, NAN), (8, 5, 4, 3, 0)),
    ((1, NAN), (4, 6, 5, 3, 0)),
    ((1, NAN), (4, 7, 6, 3, 1)),
    ((NAN, NAN), (4, 8, 7, 4, 1)),
    ((1, NAN), (4, 9, 8, 4, 2)),
    ((1, 1), (4, 9, 0, 4, 0)),
]
SCALE = DynamicLossScale(16.0, growth_interval=2, min_scale=4.0)


def counts(state):
    loss = state.nonfinite_loss_steps
    return (
        state.skipped_steps,
        state.consecutive_skipped_steps,
        0 if loss is None else loss,  # None without check_loss.
        state.stuck_steps,
    )


@every_wrap
@every_way
def test_step_by_step(way, wrap):
    optimizer = LossScaleOptimizer(optax.sgd(0.5, momentum=0.5), SCALE, check_loss=True)
    step = wrap(functools.partial(way, optimizer))
    param = jnp.float32(1)
    state = optimizer.init(param)
    types = signature(state)
    for numbers, expected in STEPS:
        before = param, state
        param, state = step(param, state, *map(jnp.float32, numbers))
        scale = optimizer.current_loss_scale(state)
        assert (scale, *counts(state)) == expected
        assert state.last_step_applied == np.isfinite(numbers).all()
        assert signature(state) == types
        if not state.last_step_applied:
            assert_same_bits((param, state.inner_state), (before[0], before[1][0]))
        if not np.isfinite(numbers[0]):
            assert_same_bits(state.loss_scale_state, before[1].loss_scale_state)


def test_the_default_backs_off_and_counts_no_losses():
    optimizer = LossScaleOptimizer(optax.sgd(0.5), SCALE)
    param, state = jnp.float32(1), optimizer.init(jnp.float32(1))
    nan = jnp.float32(NAN)
    param, state, loss = optimizer.minimize(as_given, param, state, nan, nan)
    assert (param, str(loss)) == (1, "nan")
    assert optimizer.current_loss_scale(state) == 8
    assert counts(state) == (1, 1, 0, 0)
    param, state = by_minimize(optimizer, param, state, NAN, jnp.float32(1))
    assert param == 0.5
    assert counts(state) == (1, 0, 0, 0)


def test_with_a_fixed_scale_the_loss_alone_decides():
    optimizer = LossScaleOptimizer(optax.sgd(0.5), 8.0, check_loss=True)
    param, state = jnp.float32(1), optimizer.init(jnp.float32(1))
    param, state = by_update(optimizer, param, state, 1.0, jnp.float32(INF))
    assert param == -INF
    assert counts(state) == (0, 0, 0, 0)


def test_a_step_that_checks_nothing_says_that_it_was_applied():
    one = jnp.float32(1)
    checking, other = (
        LossScaleOptimizer(optax.sgd(0.5), 8.0, check_loss=check)
        for check in (True, False)
    )
    _, state = checking.update(one, checking.init(one), value=NAN)
    assert state[2:7] == (False, 1, 1, 0, 1)
    assert other.update(one, state)[1][2:7] == (True, 1, 0, 0, 1)


class TestValue:
    one = np.float32(1)
    optimizer = LossScaleOptimizer(optax.sgd(0.5), check_loss=True)

    @pytest.fixture(autouse=True)
    def initialize(self):
        self.state = self.optimizer.init(self.one)

    @pytest.mark.parametrize("options", [{}, {"value": None}, {"loss": 1.0}])
    def test_has_to_be_given(self, options):
        message = r"^value must be the loss.* got None.*value=loss"
        with pytest.raises(TypeError, match=message):
            self.optimizer.update(self.one, self.state, **options)
        with pytest.raises(TypeError, match=message):
            jax.jit(self.optimizer.apply_gradients)(
                self.one, self.one, self.state, **options
            )

    @pytest.mark.parametrize(
        "value",
        [np.ones(1), np.ones((), complex), (1.0, 2.0), "1.0", True, {"loss": 1.0}],
    )
    def test_has_to_be_a_real_scalar(self, value):
        with pytest.raises(TypeError, match="value must be the loss, a real scalar"):
            self.optimizer.update(self.one, self.state, value=value)

    @pytest.mark.parametrize("kind", [float, np.float64, jnp.float16, jnp.bfloat16])
    def test_may_be_any_real_scalar(self, kind):
        for number, count in ((kind(1), 0), (kind(NAN), 1), (kind(-INF), 1), (3, 0)):
            _, state = self.optimizer.update(self.one, self.state, value=number)
            assert state.nonfinite_loss_steps == count

    def test_with_auxiliary_data(self):
        def fun(param, loss):
            return as_given(param, loss, self.one), {"nan": NAN}

        for loss, skipped in ((self.one, 0), (self.one * NAN, 1)):
            _, state, _ = self.optimizer.minimize(
                fun, self.one, self.state, loss, has_aux=True
            )
            assert state.nonfinite_loss_steps == skipped


def test_counters_saturate_and_are_restored():
    top = 2**31 - 1
    optimizer = LossScaleOptimizer(optax.sgd(0.5), SCALE, check_loss=True)
    one = jnp.float32(1)
    start = optimizer.init(one)
    scale = start.loss_scale_state._replace(loss_scale=4.0, good_steps=1)
    names = "skipped_steps consecutive_skipped_steps nonfinite_loss_steps stuck_steps"
    full = dict.fromkeys(names.split(), top)
    state = start._replace(**full, loss_scale_state=scale)
    for value, grad in ((NAN, 1), (1, NAN)):
        _, state = optimizer.update(one * grad, state, value=value)
        assert counts(state) == (top, top, top, top)
        assert signature(state) == signature(start)
    _, state = optimizer.update(one, state, value=1.0)
    assert counts(state) == (top, 0, top, 0)


@pytest.mark.parametrize(
    ("scale", "grads", "stuck"),
    [
        # Only at the minimum and in a row.
        (
            SCALE,
            [NAN, NAN, NAN, INF, 1, NAN, 1, 1, 1, NAN, NAN],
            [0, 0, 1, 2, 0, 1, 0, 0, 0, 0, 1],
        ),
        # Hysteresis and tolerance count at the minimum alone.
        (DynamicLossScale(2.0, hysteresis=3), [NAN] * 5, [0, 0, 0, 1, 2]),
        (TolerantLossScale(0.5, 2.0), [1, 1, NAN, NAN, NAN], [0, 0, 0, 0, 1]),
        # A rule without minimum is stuck when it does not fall.
        (FixedLossScale(8.0, True), [NAN, NAN, 1], [1, 2, 0]),
        (FixedLossScale(8.0), [NAN, NAN, 1], [0, 0, 0]),
        (BackoffOnly(), [NAN] * 3, [0, 0, 1]),
    ],
)
def test_stuck_steps(scale, grads, stuck):
    optimizer = LossScaleOptimizer(optax.sgd(0.5), scale)

    def step(state, grad):
        state = optimizer.update(grad, state)[1]
        return state, state.stuck_steps

    grads = jnp.array(grads, jnp.float32)
    assert lax.scan(step, optimizer.init(grads[0]), grads)[1].tolist() == stuck


@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")
def test_one_device_whose_loss_is_not_finite():
    losses, grads = jnp.ones(8).at[3].set(NAN), jnp.ones(8)
    options = {"axis_name": "i", "check_loss": True}
    optimizer = LossScaleOptimizer(optax.sgd(0.5), SCALE, **options)
    init = jax.pmap(optimizer.init, axis_name="i")
    for way in (by_update, by_apply_gradients):  # minimize is refused here
        step = jax.pmap(functools.partial(way, optimizer), axis_name="i")
        params, state = step(grads, init(grads), losses, grads)
        assert params.tolist() == [1] * 8
        assert state.nonfinite_loss_steps.tolist() == [1] * 8
        assert state.skip_reasons.tolist() == [2] * 8
        assert set(optimizer.current_loss_scale(state).tolist()) == {16}
