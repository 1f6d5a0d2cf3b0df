"""The optimizer itself: construction, steps, skips, states."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import (
    INF,
    NAN,
    OUT_OF_BOUNDS,
    assert_close,
    every_wrap,
    relaxed,
    signature,
)

from optax_lossscale import (
    DynamicLossScale,
    FixedLossScale,
    LossScaleOptimizer,
    LossScaleOptimizerState,
)
from optax_lossscale.diagnostics import metrics


class TestConstruction:
    def test_default_is_dynamic(self):
        made = LossScaleOptimizer(optax.sgd(1.0))
        assert made.loss_scale == DynamicLossScale()
        assert made.dynamic
        assert (made.initial_scale, made.dynamic_growth_steps) == (2**15, 2000)

    def test_keras_arguments(self):
        made = LossScaleOptimizer(
            optax.sgd(1.0), initial_scale=8.0, dynamic_growth_steps=3
        )
        assert made.loss_scale == DynamicLossScale(8.0, 3)
        made = LossScaleOptimizer(optax.sgd(1.0), dynamic=False, initial_scale=8.0)
        assert made.loss_scale == FixedLossScale(8.0)

    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            ({"loss_scale": 8, "initial_scale": 8}, ValueError, "not both"),
            ({"loss_scale": 8, "dynamic": False}, ValueError, "not both"),
            ({"loss_scale": 8, "dynamic_growth_steps": 8}, ValueError, "not both"),
            ({"dynamic": False}, ValueError, "dynamic=False needs initial_scale"),
            ({"dynamic": False, "dynamic_growth_steps": 9}, ValueError, "growth.*9"),
            ({"dynamic_growth_steps": 0}, ValueError, "dynamic_growth_steps.*got 0"),
            ({"dynamic_growth_steps": "9"}, TypeError, "dynamic_growth_steps.*'9'"),
            ({"dynamic": 1}, TypeError, "dynamic must be True or False, got 1"),
            ({"loss_scale": jax.device_put(np.float32(8))}, ValueError, "static_args"),
            ({"check_loss": 1}, TypeError, "check_loss must be True or False, got 1"),
        ],
    )
    def test_refuses_invalid_arguments(self, options, error, message):
        with pytest.raises(error, match=message):
            LossScaleOptimizer(optax.sgd(1.0), **options)

    @pytest.mark.parametrize("bad", [None, 3, "sgd", [optax.sgd(1.0)], object()])
    def test_refuses_what_is_no_optimizer(self, bad):
        with pytest.raises(TypeError, match=r"inner_optimizer must be an optax\."):
            LossScaleOptimizer(bad)

    def test_says_so_when_the_optimizer_was_not_called(self):
        with pytest.raises(TypeError, match="Call it to make an optimizer"):
            LossScaleOptimizer(optax.sgd)

    def test_refuses_to_scale_twice(self):
        scaler = LossScaleOptimizer(optax.sgd(1.0))
        for inner in (scaler, optax.chain(optax.clip(1.0), scaler)):
            with pytest.raises(TypeError, match="scaling twice"):
                LossScaleOptimizer(inner).init(jnp.ones(3))


def test_is_a_gradient_transformation_by_type_and_by_unpacking():
    optimizer = LossScaleOptimizer(optax.sgd(0.5))
    assert isinstance(optimizer, optax.GradientTransformationExtraArgs)
    init, update = optimizer
    updates, state = update(np.float32(2), init(jnp.float32(1)))
    assert updates == -1
    assert isinstance(state, LossScaleOptimizerState)


@every_wrap
def test_keras_example(wrap):
    def square(x):
        return x**2

    optimizer = LossScaleOptimizer(optax.sgd(0.25))
    var = jnp.float32(1)
    state = optimizer.init(var)
    minimize = wrap(lambda v, s: optimizer.minimize(square, v, s))
    var, state, loss = minimize(var, state)
    assert (var, loss) == (0.5, 1)
    scaled = optimizer.get_scaled_loss(square(var), state)
    assert scaled == 8192
    grad = jax.grad(optimizer.get_scaled_loss(square, state))(var)
    assert grad == 32768
    grad = optimizer.get_unscaled_gradients(grad, state)
    var, state = wrap(optimizer.apply_gradients)(grad, var, state)
    assert var == 0.25


class TestState:
    params = {"w": np.float32([1, 1]), "b": np.float32(0)}

    def test_is_a_legal_carry_donated_in_one_trace(self):
        optimizer = LossScaleOptimizer(
            optax.sgd(0.1, 0.9), DynamicLossScale(growth_interval=2)
        )
        traces = []

        def step(carry, factor):
            traces.append(1)
            grads = jax.tree.map(lambda x: x * factor, self.params)
            return optimizer.apply_gradients(grads, *carry), None

        factors = jnp.array([1, NAN, 1, 1, INF, 1], jnp.float32)
        start = (self.params, optimizer.init(self.params))
        scanned, _ = jax.lax.scan(step, start, factors)
        traces.clear()
        donating = jax.jit(step, donate_argnums=0)
        carry = jax.tree.map(jnp.copy, start)
        for factor in factors:
            donated, (carry, _) = carry, donating(carry, factor)
            # But what no operation reads, such as whether the last step was applied.
            used = donated[0], donated[1].inner_state, donated[1].loss_scale_state
            assert all(x.is_deleted() for x in jax.tree.leaves(used))
        assert len(traces) == 1
        assert signature(carry) == signature(start) == signature(scanned)
        assert_close(carry, scanned)
        assert optimizer.current_loss_scale(carry[1]) == 2**14
        looped = jax.lax.while_loop(
            lambda carry: carry[1].loss_scale_state.good_steps < 1,
            lambda carry: step(carry, jnp.float32(1))[0],
            start,
        )
        assert signature(looped) == signature(start)

    def test_the_inner_optimizer_is_traced_once(self):
        traces = []

        def update(updates, state, params=None):
            traces.append(1)
            return updates, state

        inner = optax.GradientTransformation(lambda params: jnp.zeros(3), update)
        optimizer = LossScaleOptimizer(inner)
        jax.jit(optimizer.update)(self.params, optimizer.init(self.params))
        assert len(traces) == 1

    def test_keys_of_the_inner_optimizer_are_used_once(self):
        inner = relaxed(optax.noisy_sgd(0.1, key=jax.random.key(0)))
        optimizer = LossScaleOptimizer(inner)
        with jax.debug_key_reuse(True):
            carry = self.params, optimizer.init(self.params)
            step = jax.jit(optimizer.apply_gradients)
            for _ in range(3):
                carry = step(self.params, *carry)

    @pytest.mark.parametrize("start", [1.0, np.float32(1), np.ones(())])
    def test_numbers_and_numpy_as_parameters(self, start):
        optimizer = LossScaleOptimizer(optax.sgd(0.25))
        params, state = {"x": start}, optimizer.init({"x": start})
        step = jax.jit(lambda p, s: optimizer.minimize(lambda p: p["x"] ** 2, p, s))
        for _ in range(2):
            params, state, loss = step(params, state)
        assert (params["x"], loss) == (0.25, 0.25)

    @every_wrap
    def test_a_restored_state_of_python_numbers(self, wrap):
        schedule = optax.piecewise_constant_schedule(1.0, {1: 0.5, 2: 0.5})
        optimizer = LossScaleOptimizer(relaxed(optax.sgd(schedule)))
        start = optimizer.init(jnp.float32(1))
        state = jax.tree.map(lambda x: x.item(), start)
        update = wrap(optimizer.update)
        seen = []
        for _ in range(3):
            updates, state = update(jnp.float32(1), state)
            seen.append(float(updates))
        assert seen == [-1, -0.5, -0.25]
        if not jax.config.jax_enable_x64:  # where Python's integers are int64
            assert signature(state) == signature(start)

    @every_wrap
    @pytest.mark.parametrize("scale", OUT_OF_BOUNDS)
    def test_a_scale_out_of_bounds_heals_in_any_step(self, wrap, scale):
        rule = DynamicLossScale(8.0, min_scale=2.0, max_scale=1024.0)
        optimizer = LossScaleOptimizer(optax.sgd(0.5), rule, check_loss=True)
        one = jnp.float32(1)
        state = optax.tree.set(optimizer.init(one), loss_scale=jnp.float32(scale))
        used = float(optimizer.current_loss_scale(state))
        assert 2 <= used <= 1024
        assert np.isfinite(scale) or used == 8  # It begins anew.
        loss_fn = lambda x: 1e-3 * x**2  # noqa: E731
        grad = optimizer.value_and_grad(loss_fn, state)(one)[1]
        moved = wrap(lambda x, s: optimizer.minimize(loss_fn, x, s)[0])(one, state)
        np.testing.assert_allclose((grad, moved), (2e-3, 0.999), rtol=1e-6)
        step = wrap(lambda g, s, loss: optimizer.update(g, s, one, value=loss)[1])
        for grad, loss, expected in (
            (1, 1, used),
            (INF, 1, max(used / 2, 2)),
            (1, NAN, used),  # the scale stays, within its bounds
        ):
            after = step(jnp.float32(grad), state, jnp.float32(loss))
            assert after.loss_scale_state.loss_scale == expected
            assert metrics(after)["loss_scale"] == expected
            assert signature(after) == signature(optimizer.init(one))

    @every_wrap
    @pytest.mark.parametrize("convert", [lambda x: x, np.asarray, lambda x: x.item()])
    def test_check_loss_may_differ_from_that_of_the_saved_state(self, wrap, convert):
        one = jnp.float32(1)
        off, on = (
            LossScaleOptimizer(optax.sgd(0.5), check_loss=check_loss)
            for check_loss in (False, True)
        )
        assert off.init(one).nonfinite_loss_steps is None
        assert on.init(one).nonfinite_loss_steps == 0
        state = jax.tree.map(convert, off.init(one))
        step = wrap(lambda s, loss: on.update(one, s, one, value=loss))
        for loss, count in ((1, 0), (NAN, 1), (1, 1), (INF, 2)):
            updates, state = step(state, jnp.float32(loss))
            assert state.nonfinite_loss_steps == state.skipped_steps == count
            assert updates == (-0.5 if loss == 1 else 0)
        assert signature(state) == signature(on.init(one))
        state = jax.tree.map(convert, state)
        updates, state = wrap(off.update)(one, state, one)
        assert (updates, state.skipped_steps) == (-0.5, 2)

    @pytest.mark.parametrize("empty", [(), {}, None, {"a": None}])
    def test_empty_trees(self, empty):
        optimizer = LossScaleOptimizer(optax.sgd(0.1))
        params, state = optimizer.apply_gradients(empty, empty, optimizer.init(empty))
        assert params == empty
        assert state.last_step_applied

    @every_wrap
    def test_integer_parameters_and_their_float0_gradients(self, wrap):
        params = {"w": jnp.ones(2, jnp.float32), "n": jnp.arange(2), "none": None}
        float0 = np.zeros(2, jax.dtypes.float0)
        optimizer = LossScaleOptimizer(
            optax.masked(optax.scale(-0.5), {"w": True, "n": False, "none": False})
        )
        state = optimizer.init(params)
        for factor, expected in ((1, 0.5), (NAN, 1)):
            grads = {"w": factor * params["w"], "n": float0, "none": None}
            updates, _ = wrap(optimizer.update)(grads, state, params)
            assert updates["w"].tolist() == [expected - 1] * 2
            assert updates["n"].dtype == jax.dtypes.float0
            assert updates["none"] is None
            new, _ = wrap(optimizer.apply_gradients)(grads, params, state)
            assert new["w"].tolist() == [expected] * 2
            assert new["n"].tolist() == [0, 1]
            assert new["n"].dtype == params["n"].dtype
