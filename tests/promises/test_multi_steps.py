"""`LossScaleOptimizer(optax.MultiSteps(inner, k))` leaves micro-batches out."""

import functools
import itertools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import INF, NAN, assert_close, assert_same_bits

from optax_lossscale import DynamicLossScale, LossScaleOptimizer
from optax_lossscale.diagnostics import check_health

pytestmark = pytest.mark.usefixtures("standard_dtype_promotion")
PARAMS = {"w": np.array([[0.5, -1.0]] * 2, np.float32), "b": np.float32(-3)}
INNER = optax.adam(0.1)


def loss_fn(params, size):
    """The sum of the parameters, times `size`: which is every gradient."""
    return size * optax.tree.sum(params)


@functools.cache
def make_step(optimizer):
    return jax.jit(functools.partial(optimizer.minimize, loss_fn))


def train(optimizer, sizes):
    """Takes a step with gradients of each size; returns the end of every step."""
    step = make_step(optimizer)
    carry, ends = (PARAMS, optimizer.init(PARAMS)), []
    for size in sizes:
        *carry, _ = step(*carry, np.float32(size))
        ends.append(carry)
    return ends


def moved(ends):
    """Tells after which of the steps the parameters were others than before."""
    params = [float(PARAMS["b"]), *(float(params["b"]) for params, _ in ends)]
    return [new != old for old, new in itertools.pairwise(params)]


class TestInside:
    def test_finite_windows_are_large_batches(self):
        ends = train(LossScaleOptimizer(optax.MultiSteps(INNER, 2)), [1, 3, -2, 1])
        large = train(LossScaleOptimizer(INNER), [2, -0.5])
        assert_close([params for params, _ in ends[1::2]], [x for x, _ in large])

    def test_a_non_finite_micro_batch_is_left_out(self):
        optimizer = LossScaleOptimizer(optax.MultiSteps(INNER, 3))
        finite = [1.0, 2.0, 6.0, 4.0, 5.0, 9.0]
        wanted = train(optimizer, finite)
        for position, bad in enumerate([INF, NAN, -INF, NAN]):
            before = [(PARAMS, optimizer.init(PARAMS)), *wanted][position]
            ends = train(optimizer, [*finite[:position], bad, *finite[position:]])
            left_out = ends.pop(position)
            # The scale adapts at once; the rest is as if nothing had been.
            assert optimizer.current_loss_scale(left_out[1]) == 2**14
            found, expected = [left_out, *ends], [before, *wanted]
            for (params, state), (same, other) in zip(found, expected, strict=True):
                assert_same_bits((params, state.inner_state), (same, other.inner_state))
            # So a window is of three finite micro-batches, as ever.
            assert moved(ends) == [False, False, True] * 2
            assert ends[-1][1].skipped_steps == 1

    def test_windows_of_a_schedule_count_applied_windows(self):
        optimizer = LossScaleOptimizer(optax.MultiSteps(INNER, lambda step: step + 1))
        ends = train(optimizer, [1, 1, NAN, 1, 1, INF, NAN, 1, 1, 1])
        applied = [0, 3, 8]  # after one, two and three finite micro-batches
        assert [i for i, is_moved in enumerate(moved(ends)) if is_moved] == applied

    def test_the_growth_interval_counts_micro_batches(self):
        rule = DynamicLossScale(growth_interval=3)
        optimizer = LossScaleOptimizer(optax.MultiSteps(INNER, 2), rule)
        assert optimizer.current_loss_scale(train(optimizer, [1] * 6)[-1][1]) == 2**17


skip_large = functools.partial(optax.skip_large_updates, max_squared_norm=100.0)


@pytest.mark.parametrize(
    ("inner", "expected"),
    [
        (optax.MultiSteps(INNER, 2), [0, 1, 0, 0, 1, 0]),
        # It leaves out the micro-batch of 50.
        (optax.MultiSteps(INNER, 2, True, skip_large), [0, 1, 0, 0, 0, 1]),
        # A window of windows moves as the outer one does.
        (optax.MultiSteps(optax.MultiSteps(INNER, 1), 2), [0, 1, 0, 0, 1, 0]),
    ],
    ids=["alone", "should_skip_update_fn", "nested"],
)
def test_gradient_step_tells_what_moved(inner, expected):
    """The recipe's line, where `last_step_applied` alone would not do."""
    ends = train(LossScaleOptimizer(inner), [1, 3, NAN, 1, 50, 2])
    counts = [0, *(int(state.inner_state.gradient_step) for _, state in ends)]
    told = [new != old for old, new in itertools.pairwise(counts)]
    assert told == moved(ends) == [bool(x) for x in expected]


def test_around_it_warns_of_each_line_once_and_not_of_reading():
    scaler, param = LossScaleOptimizer(optax.sgd(0.1)), jnp.float32(2)
    around = optax.chain(optax.MultiSteps(scaler, 2).gradient_transformation())
    state = around.init(param)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        assert scaler.current_loss_scale(state) == 2**15
        check_health(state)
        assert not caught
        for _ in range(3):
            scaler.value_and_grad(jnp.square, state)(param)
            scaler.get_unscaled_gradients(param, state)
    assert [warning.filename for warning in caught] == [__file__] * 2
    fix = "LossScaleOptimizer(optax.MultiSteps(inner, k))"
    assert all(fix in str(warning.message) for warning in caught)


def test_does_not_warn_of_what_works():
    scaler, windows = LossScaleOptimizer(INNER), optax.MultiSteps(INNER, 2)
    next_to_it = optax.chain(scaler, windows.gradient_transformation())
    for optimizer in (LossScaleOptimizer(windows), next_to_it):
        state = optimizer.init(jnp.float32(2))
        scaler.value_and_grad(jnp.square, state)(jnp.float32(2))
