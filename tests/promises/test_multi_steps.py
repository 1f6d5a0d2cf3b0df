"""The ways to accumulate gradients, those of the documentation among them."""

import functools
import itertools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import (
    INF,
    NAN,
    RECIPES,
    WRAPS,
    assert_close,
    assert_same_bits,
    auto_skip,
    every_skip,
    signature,
)
from jax import lax

from optax_lossscale import (
    DynamicLossScale,
    LossScaleOptimizer,
    accumulate_gradients,
    all_finite,
    check_health,
    select_applied,
)

pytestmark = pytest.mark.usefixtures("quick_compilation")
PAGE = RECIPES / "accumulation.md"
PARAMS = {"w": jnp.array([[0.5, -1.0]] * 2, jnp.float32), "b": jnp.float32(-3)}
INNER = optax.adam(0.1)


@pytest.fixture(autouse=True)
def standard_dtype_promotion():
    """MultiSteps promotes dtypes as JAX does by default."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def loss_fn(params, size):
    """The sum of the parameters, times `size`: which is every gradient."""
    return size * optax.tree.sum(params)


def by_update(optimizer, scaler):
    def step(params, state, size):
        loss, grads = scaler.value_and_grad(loss_fn, state)(params, size)
        updates, state = optimizer.update(grads, state, params, value=loss)
        return optax.apply_updates(params, updates), state

    return step


def by_apply_gradients(optimizer, scaler):
    def step(params, state, size):
        _, grads = scaler.value_and_grad(loss_fn, state)(params, size)
        return optimizer.apply_gradients(grads, params, state)

    return step


def by_minimize(optimizer, scaler):
    def step(params, state, size):
        return optimizer.minimize(loss_fn, params, state, size)[:2]

    return step


STEPS = {
    "update": by_update,
    "apply_gradients": by_apply_gradients,
    "minimize": by_minimize,
}


@functools.cache
def make_step(optimizer, step, wrap, scaler):
    return wrap(step(optimizer, scaler))


def train(optimizer, sizes, step=by_update, wrap=jax.jit, scaler=None):
    """Takes a step with gradients of each size; returns the end of every step."""
    step = make_step(optimizer, step, wrap, scaler or optimizer)
    carry, ends = (PARAMS, optimizer.init(PARAMS)), []
    for size in sizes:
        carry = step(*carry, jnp.float32(size))
        ends.append(carry)
    return ends


def moved(ends):
    """Tells after which of the steps the parameters were others than before."""
    params = [float(PARAMS["b"]), *(float(params["b"]) for params, _ in ends)]
    return [new != old for old, new in itertools.pairwise(params)]


class TestMultiStepsInside:
    """`LossScaleOptimizer(optax.MultiSteps(inner, k))` leaves micro-batches out."""

    @pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
    @auto_skip
    @pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
    def test_finite_windows_are_large_batches(self, wrap, skip, step):
        optimizer = LossScaleOptimizer(optax.MultiSteps(INNER, 2), skip=skip)
        ends = train(optimizer, [1, 3, -2, 1], step, wrap)
        assert moved(ends) == [False, True] * 2
        large = train(LossScaleOptimizer(INNER), [2, -0.5], step, wrap)
        check = assert_close if wrap is jax.jit else assert_same_bits
        check(ends[1][0], large[0][0])
        check(ends[3][0], large[1][0])

    @pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
    @auto_skip
    def test_a_non_finite_micro_batch_is_left_out(self, skip, step):
        optimizer = LossScaleOptimizer(optax.MultiSteps(INNER, 3), skip=skip)
        finite = [1.0, 2.0, 6.0, 4.0, 5.0, 9.0]
        wanted = train(optimizer, finite, step)
        for bad, position in itertools.product([INF, NAN], range(4)):
            sizes = finite.copy()
            sizes.insert(position, bad)
            ends = train(optimizer, sizes, step)
            left_out = ends.pop(position)
            before = (PARAMS, optimizer.init(PARAMS))
            before = ends[position - 1] if position else before
            assert_same_bits(left_out[0], before[0])
            assert_same_bits(left_out[1].inner_state, before[1].inner_state)
            # The scale adapts at once; the rest is as if nothing had been.
            assert optimizer.current_loss_scale(left_out[1]) == 2**14
            for end, wanted_end in zip(ends, wanted, strict=True):
                assert_same_bits(end[0], wanted_end[0])
                assert_same_bits(end[1].inner_state, wanted_end[1].inner_state)
            # So a window is of three finite micro-batches, as ever.
            assert moved(ends) == [False, False, True] * 2
            assert ends[-1][1].skipped_steps == 1

    def test_windows_of_one(self):
        sizes = [1, NAN, 3]
        optimizer = LossScaleOptimizer(optax.MultiSteps(INNER, 1))
        for (params, _), (wanted, _) in zip(
            train(optimizer, sizes),
            train(LossScaleOptimizer(INNER), sizes),
            strict=True,
        ):
            assert_close(params, wanted)

    def test_windows_of_a_schedule_count_applied_windows(self):
        optimizer = LossScaleOptimizer(optax.MultiSteps(INNER, lambda step: step + 1))
        ends = train(optimizer, [1, 1, NAN, 1, 1, INF, NAN, 1, 1, 1])
        applied = [0, 3, 8]  # after one, two and three finite micro-batches
        assert [i for i, is_moved in enumerate(moved(ends)) if is_moved] == applied

    @every_skip
    def test_is_a_legal_carry(self, skip):
        optimizer = LossScaleOptimizer(optax.MultiSteps(INNER, 2), skip=skip)
        sizes = jnp.array([1, 2, NAN, 3, INF, 4, 5, 6], jnp.float32)
        start = PARAMS, optimizer.init(PARAMS)
        end, _ = lax.scan(
            lambda carry, size: (by_minimize(optimizer, None)(*carry, size), None),
            start,
            sizes,
        )
        assert signature(end) == signature(start)
        assert_close(end, train(optimizer, sizes, by_minimize)[-1])
        assert end[1].skipped_steps == 2

    def test_the_growth_interval_counts_micro_batches(self):
        scale = DynamicLossScale(growth_interval=3)
        inner = LossScaleOptimizer(optax.MultiSteps(INNER, 2), scale)
        assert inner.current_loss_scale(train(inner, [1] * 6)[-1][1]) == 2**17
        scaler = LossScaleOptimizer(INNER, scale)
        around = accumulate_gradients(scaler, 2)
        state = train(around, [1] * 6, scaler=scaler)[-1][1]
        assert scaler.current_loss_scale(state) == 2**16


@pytest.mark.filterwarnings("ignore:A LossScaleOptimizer is inside optax.MultiSteps")
class TestMultiStepsAround:
    """What the documentation warns of; to be rewritten if Optax mends it."""

    def test_one_inf_poisons_all_that_follows(self):
        scaler = LossScaleOptimizer(optax.sgd(0.1))
        optimizer = optax.MultiSteps(scaler, 2)
        ends = train(optimizer, [1, 1, INF, *[1] * 41], scaler=scaler)
        assert moved(ends)[:2] == [False, True]
        # All later micro-batches are finite, and yet nothing moves any more.
        assert not any(moved(ends)[2:])
        state = ends[-1][1]
        assert not all_finite(state.acc_grads)
        assert scaler.current_loss_scale(state) == 1
        assert state.inner_opt_state.skipped_steps == 21

    def test_an_inf_at_the_end_of_a_window_poisons_as_well(self):
        scaler = LossScaleOptimizer(optax.sgd(0.1))
        optimizer = optax.MultiSteps(scaler, 2)
        ends = train(optimizer, [1, INF, *[1] * 6], scaler=scaler)
        assert not any(moved(ends))
        assert not all_finite(ends[-1][1].acc_grads)

    def test_with_skip_not_finite_the_scale_never_backs_off(self):
        scaler = LossScaleOptimizer(optax.sgd(0.1), initial_scale=2.0**120)
        optimizer = optax.MultiSteps(
            scaler, 2, should_skip_update_fn=optax.skip_not_finite
        )
        # Gradients that overflow at this scale, and would not at a lower one.
        ends = train(optimizer, [2.0**10] * 20, scaler=scaler)
        assert not any(moved(ends))
        assert scaler.current_loss_scale(ends[-1][1]) == 2.0**120
        mended = accumulate_gradients(scaler, 2)
        assert any(moved(train(mended, [2.0**10] * 20, scaler=scaler)))


class TestWarning:
    scaler = LossScaleOptimizer(optax.sgd(0.1))
    param = jnp.float32(2)

    def state(self):
        around = optax.chain(optax.MultiSteps(self.scaler, 2).gradient_transformation())
        return around.init(self.param)

    @pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
    def test_of_training(self, wrap):
        def step(state):
            return self.scaler.value_and_grad(jnp.square, state)(self.param)

        def by_hand(state):
            loss_fn = self.scaler.get_scaled_loss(jnp.square, state)
            grads = jax.grad(loss_fn)(self.param)
            return self.scaler.get_unscaled_gradients(grads, state)

        for training in (step, by_hand):
            with pytest.warns(UserWarning, match="inside optax.MultiSteps") as caught:
                wrap(training)(self.state())
            assert len(caught) == 1
            for fix in (
                "LossScaleOptimizer(optax.MultiSteps(inner, k))",
                "accumulate_gradients(LossScaleOptimizer(inner), k)",
            ):
                assert fix in str(caught[0].message)

    def test_is_shown_once(self):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            for _ in range(3):
                state = self.state()
                self.scaler.value_and_grad(jnp.square, state)(self.param)
                self.scaler.get_unscaled_gradients(self.param, state)
        assert len(caught) == 1

    def test_not_of_reading(self):
        state = self.state()
        assert self.scaler.current_loss_scale(state) == 2**15
        assert self.scaler.dynamic_counter(state) == 0
        assert check_health(state).healthy

    @pytest.mark.parametrize(
        "optimizer",
        [
            LossScaleOptimizer(optax.MultiSteps(INNER, 2)),
            accumulate_gradients(LossScaleOptimizer(INNER), 2),
            # Next to it, not inside.
            optax.chain(
                LossScaleOptimizer(INNER),
                optax.MultiSteps(INNER, 2).gradient_transformation(),
            ),
        ],
        ids=["inside", "accumulate_gradients", "next to it"],
    )
    def test_not_of_what_works(self, optimizer):
        state = optimizer.init(self.param)
        self.scaler.value_and_grad(jnp.square, state)(self.param)


def blocks():
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


class TestPage:
    def run(self, block):
        scope = {}
        exec(block, scope)
        return scope

    def expected(self, scope):
        """The parameters after one step with the whole batch."""
        optimizer = optax.adam(1e-2)
        params, batch = jnp.ones(3), scope["batch"].reshape(8, 3)
        grads = jax.grad(scope["loss_fn"])(params, batch)
        updates, _ = optimizer.update(grads, optimizer.init(params))
        return params + updates

    @pytest.mark.parametrize("block", range(3))
    def test_takes_the_step_of_the_whole_batch(self, block):
        scope = self.run(blocks()[block])
        np.testing.assert_allclose(
            scope["params"], self.expected(scope), rtol=1e-6, atol=0
        )
        assert (scope["params"] != 1).all()

    def test_there_are_no_other_blocks(self):
        assert len(blocks()) == 4

    def again(self, scope, batch):
        """Takes all micro-batches of a batch; returns what became of the state."""
        params, state = scope["params"], scope["opt_state"]
        for x in batch:
            params, state, _ = scope["train_step"](params, state, x)
        scale = optax.tree.get(state, "loss_scale")
        return params, float(scale), int(optax.tree.get(state, "skipped_steps"))

    def test_an_inf_leaves_out_a_micro_batch(self):
        scope = self.run(blocks()[0])
        batch = scope["batch"]
        lost = batch.at[1, 0, 0].set(INF)
        params, *rest = self.again(scope, lost)
        assert rest == [2**14, 1]
        assert_same_bits(params, scope["params"])
        params, *rest = self.again(scope, [*lost, batch[1]])
        wanted, *_ = self.again(scope, batch[jnp.array([0, 2, 3, 1])])
        assert_same_bits(params, wanted)

    def test_an_inf_discards_a_window(self):
        scope = self.run(blocks()[1])
        batch = scope["batch"]
        lost = batch.at[1, 0, 0].set(INF)
        params, *rest = self.again(scope, lost)
        assert rest == [2**14, 1]
        assert_same_bits(params, scope["params"])
        params, *rest = self.again(scope, [*lost, *batch])
        assert rest == [2**14, 1]
        assert_same_bits(params, self.again(scope, batch)[0])

    def test_an_inf_skips_the_one_step(self):
        scope = self.run(blocks()[2])
        batch = scope["batch"]
        lost = batch.at[1, 0].set(INF)
        params, *rest = self.again(scope, [lost])
        assert rest == [2**14, 1]
        assert_same_bits(params, scope["params"])
        # Several steps, against the large batch in each.
        params, *_ = self.again(scope, [batch, batch])
        wanted, state = jnp.ones(3), optax.adam(1e-2).init(jnp.ones(3))
        for _ in range(3):
            grads = jax.grad(scope["loss_fn"])(wanted, batch)
            updates, state = optax.adam(1e-2).update(grads, state)
            wanted += updates
        np.testing.assert_allclose(params, wanted, rtol=1e-6)

    @pytest.mark.parametrize("is_inside", [False, True])
    def test_averages_and_statistics(self, is_inside):
        block = blocks()[3]
        if is_inside:
            around = "optimizer = accumulate_gradients(scaler, micro_steps=4)\n# Or: "
            assert around in block
            block = block.replace(around, "")
        scope = self.run(block)
        batch, state = scope["batch"], scope["state"]
        lost = batch.at[1, 0, 0].set(INF)
        for i, x in enumerate([*lost, *batch]):
            *state, _ = scope["train_step"](*state, x)
            if i == 1:
                # As the page says, of the last window.
                applied = select_applied(state[-1], jnp.float32(NAN), jnp.float32(0))
                assert bool(all_finite(applied)) == is_inside

        left_out = batch[jnp.array([0, 2, 3, 0])]
        params, inner = jnp.ones(3), optax.adam(1e-2)
        average, mean, inner_state = params, np.zeros(3), inner.init(params)
        for window in (batch, left_out if is_inside else batch):
            grads = jax.grad(lambda p, x: jnp.mean((x @ p) ** 2))(params, window)
            updates, inner_state = inner.update(grads, inner_state)
            params += updates
            average = 0.9 * average + 0.1 * params
        for x in (*batch, *batch[jnp.array([0, 2, 3])], *batch):
            mean = 0.9 * mean + 0.1 * np.mean(x, axis=0)
        for actual, desired in zip(state[:3], (params, average, mean), strict=True):
            np.testing.assert_allclose(actual, desired, rtol=1e-6)
        assert (params != average).all()
