"""Accumulation around a loss-scaled optimizer: whole windows or nothing."""

import functools
import itertools

import distributed
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import (
    INF,
    NAN,
    WRAPS,
    assert_close,
    assert_same_bits,
    auto_skip,
    every_skip,
    exhaustive_but,
    relaxed,
    signature,
)
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from optax_lossscale import (
    AccumulationState,
    LossScaleOptimizer,
    accumulate_gradients,
    has_updated,
    select_applied,
)

pytestmark = pytest.mark.usefixtures("quick_compilation")
PARAMS = {"w": jnp.array([[0.5, -0.0]] * 2, jnp.float32), "b": jnp.float32(-3)}
INNER = relaxed(optax.chain(optax.clip_by_global_norm(9.0), optax.adam(0.1)))


def gradients(size):
    return jax.tree.map(lambda x: jnp.full_like(x, size), PARAMS)


@functools.cache
def make_step(optimizer, wrap):
    def step(params, state, grads):
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return wrap(step)


def train(optimizer, sizes, wrap=jax.jit):
    """Takes a step with gradients of each size; returns the end of every step."""
    step = make_step(optimizer, wrap)
    params, state = PARAMS, optimizer.init(PARAMS)
    ends = []
    for size in sizes:
        params, state = step(params, state, gradients(size))
        ends.append((params, state))
    return ends


class TestWindows:
    @every_skip
    @pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
    def test_finite_windows_are_large_batches(self, wrap, skip):
        scaler = LossScaleOptimizer(INNER, skip=skip)
        ends = train(accumulate_gradients(scaler, 2), [1, 3, -2, 1], wrap)
        large = train(scaler, [2, -0.5], wrap)
        for window in range(2):
            params, state = ends[2 * window + 1]
            check = assert_same_bits if wrap is not jax.jit else assert_close
            check(params, large[window][0])
            check(state.inner_state, large[window][1])
        assert_same_bits(ends[0][0], PARAMS)
        assert_same_bits(ends[2][0], ends[1][0])

    @every_skip
    @pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
    def test_a_non_finite_micro_batch_discards_its_window(self, wrap, skip):
        scaler = LossScaleOptimizer(INNER, skip=skip)
        optimizer = accumulate_gradients(scaler, 3)
        window = [1.0, 2.0, 3.0]
        wanted = train(optimizer, window * 2, wrap)
        fresh = optimizer.init(PARAMS)
        for bad, position in itertools.product([INF, -INF, NAN], range(3)):
            lost = window.copy()
            lost[position] = bad
            ends = train(optimizer, [*window, *lost, *window], wrap)
            scales = [float(scaler.current_loss_scale(state)) for _, state in ends]
            # Constant within a window, whatever is met: it adapts at the end.
            assert scales == [2**15] * 5 + [2**14] * 4
            before, after = ends[2], ends[5]
            assert_same_bits(after[0], before[0])
            assert_same_bits(
                after[1].inner_state.inner_state, before[1].inner_state.inner_state
            )
            assert after[1].inner_state[2:7] == (False, 1, 1, 0, 0)
            # Nothing of the lost window is left: the next is as if it had not been.
            assert_same_bits(
                after[1]._replace(inner_state=()), fresh._replace(inner_state=())
            )
            assert_same_bits(ends[-1][0], wanted[-1][0])
            assert ends[-1][1].inner_state.last_step_applied

    def test_opposite_infinities_do_not_cancel(self):
        scaler = LossScaleOptimizer(INNER)
        params, state = train(accumulate_gradients(scaler, 2), [INF, -INF])[-1]
        assert_same_bits(params, PARAMS)
        assert state.inner_state.skipped_steps == 1

    def test_an_overflow_of_the_sum_alone_is_skipped(self):
        scaler = LossScaleOptimizer(optax.sgd(1e-37))
        largest = [3e38, 3e38]
        _, state = train(accumulate_gradients(scaler, 2, average=False), largest)[-1]
        assert state.inner_state.skipped_steps == 1
        params, state = train(accumulate_gradients(scaler, 2), largest)[-1]
        assert state.inner_state.skipped_steps == 0
        np.testing.assert_allclose(params["b"], -33, rtol=1e-6)
        # Of opposite signs: the difference of a running mean would overflow.
        _, state = train(accumulate_gradients(scaler, 2), [3e38, -3e38])[-1]
        assert state.inner_state.skipped_steps == 0

    def test_sums_on_request(self):
        scaler = LossScaleOptimizer(optax.sgd(0.5))
        params, _ = train(accumulate_gradients(scaler, 3, average=False), [1, 2, 3])[-1]
        assert params["b"] == -3 - 3

    def test_windows_of_one(self):
        scaler = LossScaleOptimizer(INNER)
        sizes = [1, NAN, 3]
        ends, plain = (
            train(optimizer, sizes)
            for optimizer in (accumulate_gradients(scaler, 1), scaler)
        )
        for (params, state), (wanted, wanted_state) in zip(ends, plain, strict=True):
            assert_close(params, wanted)
            assert_close(state.inner_state, wanted_state)

    def test_a_storm_of_nans_ends(self):
        scaler = LossScaleOptimizer(INNER)
        ends = train(accumulate_gradients(scaler, 2), [NAN] * 60 + [1, 1])
        assert_same_bits(ends[-3][0], PARAMS)
        assert scaler.current_loss_scale(ends[-3][1]) == 1
        assert ends[-1][1].inner_state.skipped_steps == 30
        assert ends[-1][0]["b"] < -3


class TestInnerOptimizer:
    def test_runs_once_a_window(self):
        # Where it branches: the inner optimizer is spared, not just its result.
        calls = []
        counted = optax.stateless(
            lambda grads, _: (jax.debug.callback(lambda: calls.append(1)), grads)[1]
        )
        scaler = LossScaleOptimizer(optax.chain(counted, optax.sgd(0.5)))
        ends = train(accumulate_gradients(scaler, 4), [1] * 8)
        jax.block_until_ready(ends)
        jax.effects_barrier()
        assert len(calls) == 2

    def test_gets_the_mean_loss_and_other_arguments(self):
        seen = []

        def update(updates, state, params=None, *, value, factor):
            seen.append(value)
            return jax.tree.map(lambda g: g * factor * value, updates), state

        inner = optax.GradientTransformationExtraArgs(lambda _: (), update)
        optimizer = accumulate_gradients(LossScaleOptimizer(inner), 2)
        state = optimizer.init(PARAMS)
        step = jax.jit(optimizer.update)
        for value, factor in ((1, 5), (3, 7), (10, 1), (20, 1)):
            extra = {"value": jnp.float32(value), "factor": jnp.float32(factor)}
            updates, state = step(gradients(1), state, PARAMS, **extra)
            if value == 3:
                assert updates["b"] == 7 * 2
        assert updates["b"] == 15
        assert len(seen) == 1

    def test_checks_the_loss_of_the_window(self):
        scaler = LossScaleOptimizer(optax.sgd(0.5), check_loss=True)
        optimizer = accumulate_gradients(scaler, 2)
        state = optimizer.init(PARAMS)
        for value in (NAN, 1.0):
            _, state = optimizer.update(gradients(1), state, PARAMS, value=value)
        assert state.inner_state.nonfinite_loss_steps == 1
        assert scaler.current_loss_scale(state) == 2**15
        for value in (2.0, 1.0):
            updates, state = optimizer.update(gradients(1), state, PARAMS, value=value)
        assert updates["b"] == -0.5

    def test_schedules_count_windows_that_were_applied(self):
        rates = optax.piecewise_constant_schedule(1.0, {1: 0.5, 2: 0.5})
        scaler = LossScaleOptimizer(relaxed(optax.sgd(rates)))
        ends = train(accumulate_gradients(scaler, 2), [1, 1, NAN, 1, 1, 1])
        assert [float(params["b"]) for params, _ in ends] == [-3, -4, -4, -4, -4, -4.5]

    def test_may_hold_the_scaler_anywhere(self):
        scaler = LossScaleOptimizer(optax.sgd(0.5))
        optimizer = accumulate_gradients(optax.chain(scaler, optax.identity()), 2)
        params, state = train(optimizer, [1, 3, NAN, 3])[-1]
        assert params["b"] == -4
        assert scaler.current_loss_scale(state) == 2**14

    def test_inside_a_scaler_drops_the_micro_batch(self):
        optimizer = LossScaleOptimizer(accumulate_gradients(optax.sgd(0.5), 2))
        ends = train(optimizer, [1, NAN, 3, 1])
        assert [float(params["b"]) for params, _ in ends] == [-3, -3, -4, -4]


class TestState:
    def test_keeps_its_types_whatever_the_leaves_are(self):
        params = {"half": jnp.ones(2, jnp.float16), "n": jnp.int32(1), "none": None}
        scaler = LossScaleOptimizer(relaxed(optax.sgd(0.5)))
        optimizer = accumulate_gradients(scaler, 2)
        state = optimizer.init(params)
        assert isinstance(state, AccumulationState)
        assert state.accumulated_grads["half"].dtype == jnp.float32
        assert state.accumulated_grads["n"] is None
        grads = {"half": jnp.ones(2, jnp.float16), "n": jnp.int32(0), "none": None}
        frozen = grads | {"half": None}
        for given in (grads, frozen):
            updates, new = jax.jit(optimizer.update)(given, state, params)
            assert signature(new) == signature(state)
            assert jax.tree.structure(updates) == jax.tree.structure(given)

    def test_gradients_in_half_precision_are_summed_in_float32(self):
        scaler = LossScaleOptimizer(optax.sgd(1.0))
        optimizer = accumulate_gradients(scaler, 4096, average=False)
        param, one = jnp.zeros((), jnp.float16), jnp.float16(1)

        @jax.jit
        def window(state):
            def body(state, _):
                updates, state = optimizer.update(one, state, param)
                return state, updates

            return lax.scan(body, state, length=4096)

        _, updates = window(optimizer.init(param))
        # In float16 the sum would stay at 2048.
        assert updates[-1] == -4096
        assert not updates[:-1].any()

    def test_keeps_complex_numbers(self):
        param = jnp.complex64(0)
        optimizer = accumulate_gradients(LossScaleOptimizer(optax.sgd(0.5)), 2)
        state = optimizer.init(param)
        for grad in (1 + 2j, 3 + 4j):
            updates, state = optimizer.update(jnp.complex64(grad), state, param)
        assert updates == -1 - 1.5j

    @every_skip
    def test_is_one_trace_and_a_legal_carry_and_donated(self, skip):
        scaler = LossScaleOptimizer(INNER, skip=skip)
        optimizer = accumulate_gradients(scaler, 3)
        sizes = jnp.array([1, 2, 3, 4, INF, 5, 6, 7, 8], jnp.float32)
        traces = []

        def step(carry, size):
            traces.append(1)
            params, state = carry
            grads = jax.tree.map(lambda x: jnp.full_like(x, size), params)
            updates, state = optimizer.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        start = PARAMS, optimizer.init(PARAMS)
        (scanned, scanned_state), _ = lax.scan(step, start, sizes)
        assert signature(scanned_state) == signature(start[1])
        wanted = train(optimizer, sizes)[-1]
        assert_close((scanned, scanned_state), wanted)
        traces.clear()
        donated = jax.jit(step, donate_argnums=0)
        carry = jax.tree.map(jnp.copy, start)
        for size in sizes:
            carry, _ = donated(carry, size)
        assert len(traces) == 1
        assert_close(carry, wanted)

    def test_may_be_set_by_hand(self):
        scaler = LossScaleOptimizer(optax.sgd(0.5))
        optimizer = accumulate_gradients(scaler, 2)
        state = optax.tree.set(optimizer.init(PARAMS), loss_scale=4.0)
        assert scaler.current_loss_scale(state) == 4
        step = jax.jit(lambda state, grads: optimizer.update(grads, state, PARAMS))
        for size in (1, NAN):
            _, state = step(state, gradients(size))
        assert scaler.current_loss_scale(state) == 2
        # Eager too, where Python numbers stay what they are.
        state = optax.tree.set(optimizer.init(PARAMS), loss_scale=4.0)
        for size in (1, NAN):
            _, state = optimizer.update(gradients(size), state, PARAMS)
        assert scaler.current_loss_scale(state) == 2

    def test_is_strongly_typed_whatever_the_inner_one_is(self):
        def update(updates, state, params=None):
            return updates, state + 1

        counted = optax.GradientTransformation(lambda params: jnp.asarray(0.0), update)
        optimizer = accumulate_gradients(counted, 2)
        state = optimizer.init(PARAMS)
        step = jax.jit(optimizer.update)
        for _ in range(4):
            _, state = step(gradients(1), state)
        assert state.inner_state == 2
        assert step._cache_size() == 1

    def test_another_number_of_micro_steps_holds_from_the_next_window_on(self):
        scaler = LossScaleOptimizer(optax.sgd(1.0))
        four, two = (accumulate_gradients(scaler, k) for k in (4, 2))
        state = four.init(PARAMS)
        for _ in range(3):
            _, state = four.update(gradients(1), state, PARAMS)
        updates = []
        for _ in range(3):
            update, state = two.update(gradients(1), state, PARAMS)
            updates.append(float(update["b"]))
        assert updates == [-(3 / 4 + 1 / 2), 0, -1]

    def test_an_abstract_state(self):
        optimizer = accumulate_gradients(LossScaleOptimizer(INNER), 2)
        shapes = jax.eval_shape(optimizer.init, PARAMS)
        _, state = jax.eval_shape(optimizer.update, gradients(1), shapes, PARAMS)
        assert jax.tree.structure(state) == jax.tree.structure(shapes)

    def test_select_applied_reads_the_last_window(self):
        optimizer = accumulate_gradients(LossScaleOptimizer(optax.sgd(0.5)), 2)
        ends = train(optimizer, [NAN, 1, 1, 1])
        kept = [float(select_applied(state, 1.0, 0.0)) for _, state in ends]
        assert kept == [1, 0, 0, 1]


@pytest.mark.parametrize("micro_steps", [0, -1, 1.5, NAN])
def test_refuses_windows_of_no_length(micro_steps):
    with pytest.raises(ValueError, match=f"micro_steps must be .*{micro_steps}"):
        accumulate_gradients(optax.sgd(0.5), micro_steps)


def test_refuses_what_is_of_the_wrong_type():
    with pytest.raises(TypeError, match="micro_steps"):
        accumulate_gradients(optax.sgd(0.5), "2")
    with pytest.raises(TypeError, match="average must be True or False"):
        accumulate_gradients(optax.sgd(0.5), 2, average=1)
    for options in ({"num_losses": 2}, {"mask": True}):
        scaler = LossScaleOptimizer(INNER, **options)
        with pytest.raises(TypeError, match="without num_losses and mask"):
            accumulate_gradients(scaler, 2)
    with pytest.raises(TypeError, match="inner_optimizer"):
        accumulate_gradients(optax.sgd, 2)
    optimizer = accumulate_gradients(optax.sgd(0.5), 2)
    with pytest.raises(TypeError, match="value must be the loss"):
        optimizer.update(1.0, optimizer.init(1.0), 1.0, value=jnp.ones(2))
    for state in (optimizer.init(1.0)._asdict(), LossScaleOptimizer(INNER).init(1.0)):
        with pytest.raises(
            ValueError, match=f"AccumulationState .*got {type(state).__name__}"
        ):
            optimizer.update(1.0, state, 1.0)
    # Twice is a bug here too.
    twice = LossScaleOptimizer(accumulate_gradients(LossScaleOptimizer(INNER), 2))
    with pytest.raises(TypeError, match="scaling twice"):
        twice.init(PARAMS)


class TestManyDevices:
    """Eight micro-batches in windows of two, with an overflow on one device."""

    MICRO_STEPS = 2
    pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")

    def batches(self):
        x, y = distributed.make_batches()
        x = np.where(np.isfinite(x), x, 0)[:8]
        x[2, 9, 3] = np.inf  # first of its window
        x[7, 31, 3] = np.inf  # last of its window
        return x, y[:8]

    def optimizer(self, average=False, **options):
        inner = optax.sgd(0.5, momentum=0.9)
        if average:
            mean = optax.stateless(lambda grads, _: lax.pmean(grads, "batch"))
            inner = optax.chain(mean, inner)
        scaler = LossScaleOptimizer(inner, distributed.SCALE, **options)
        return scaler, accumulate_gradients(scaler, self.MICRO_STEPS)

    def step(self, scaler, optimizer, loss_fn, reduce=lambda grads: grads):
        def step(params, state, x, y):
            _, grads = scaler.value_and_grad(loss_fn, state)(params, x, y)
            updates, state = optimizer.update(reduce(grads), state, params)
            params = optax.apply_updates(params, updates)
            return params, state, distributed.record(scaler, state.inner_state)

        return step

    @classmethod
    @functools.cache
    def expected(cls):
        self = cls()
        scaler, optimizer = self.optimizer()
        step = jax.jit(self.step(scaler, optimizer, distributed.loss_fn))
        params = distributed.init_params()
        return distributed.train(step, params, optimizer.init(params), self.batches())

    def check(self, params, rows):
        wanted, _, wanted_rows = self.expected()
        for row, wanted_row in zip(rows, wanted_rows, strict=True):
            for value, one in zip(row, wanted_row, strict=True):
                np.testing.assert_array_equal(value, np.broadcast_to(one, value.shape))
        for name, param in params.items():
            np.testing.assert_allclose(
                param, np.broadcast_to(wanted[name], param.shape), atol=1e-6
            )

    def test_the_run_skips_two_windows_of_four(self):
        _, state, rows = self.expected()
        assert state.inner_state.skipped_steps == 2
        assert [float(scale) for scale, _, _ in rows] == [1024] * 3 + [512] * 4 + [256]

    @pytest.mark.parametrize("when", ["every micro-batch", "once a window"])
    @auto_skip
    def test_pmap(self, skip, when):
        once = when == "once a window"
        scaler, optimizer = self.optimizer(once, axis_name="batch", skip=skip)
        reduce = (lambda x: x) if once else (lambda x: lax.pmean(x, "batch"))
        step = self.step(scaler, optimizer, distributed.loss_fn, reduce)
        step = jax.pmap(step, axis_name="batch")
        params = distributed.init_params()
        state = jax.tree.map(
            lambda x: jnp.stack([x] * 8), (params, optimizer.init(params))
        )
        batches = [b.reshape(8, 8, -1, 16) for b in self.batches()]
        params, _, rows = distributed.train(step, *state, batches)
        self.check(params, rows)

    @pytest.mark.parametrize("check_vma", exhaustive_but([True, False], [True]))
    @every_skip
    def test_shard_map(self, skip, check_vma):
        scaler, optimizer = self.optimizer(axis_name="batch", skip=skip)
        mesh = jax.make_mesh((8,), ("batch",), axis_types=(AxisType.Auto,))

        def mean(x):
            return lax.pmean(x, "batch")

        def mean_loss_fn(*args):
            return mean(distributed.loss_fn(*args))

        if check_vma:
            step = self.step(scaler, optimizer, mean_loss_fn)
        else:
            step = self.step(scaler, optimizer, distributed.loss_fn, mean)
        specs = (P(), P(), P("batch"), P("batch"))
        step = jax.jit(
            jax.shard_map(
                step, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check_vma
            )
        )
        params = distributed.init_params()
        state = optimizer.init(params)
        params, _, rows = distributed.train(step, params, state, self.batches())
        self.check(params, rows)

    @pytest.mark.parametrize("check_vma", exhaustive_but([True, False], [True]))
    @auto_skip
    def test_sharded_parameters(self, skip, check_vma):
        _, optimizer = self.optimizer(axis_name="d", skip=skip)
        mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
        params = jnp.ones((8, 2), jnp.float32)
        state = optimizer.init(params)
        specs = jax.tree.map(lambda x: P("d") if x.ndim else P(), (params, state))

        def step(params, state, grads):
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        sharded = jax.jit(
            jax.shard_map(
                step,
                mesh=mesh,
                in_specs=(*specs, P("d")),
                out_specs=specs,
                check_vma=check_vma,
            )
        )
        for bad in (None, None, (7, 1), None, None, None):
            grads = jnp.ones_like(params)
            grads = grads if bad is None else grads.at[bad].set(jnp.inf)
            params, state = jax.block_until_ready(sharded(params, state, grads))
        # Two windows were applied: 0.5, then 0.5 + 0.9 * 0.5.
        wanted = jnp.full_like(params, 1 - 0.5 - 0.95)
        np.testing.assert_allclose(params, wanted, rtol=1e-6)
        assert state.inner_state.skipped_steps == 1
        assert state.accumulated_grads.sharding.spec[0] == "d"

    @pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
    @auto_skip
    def test_sharded_jit(self, skip, kind):
        scaler, optimizer = self.optimizer(skip=skip)
        mesh = jax.make_mesh((8,), ("batch",), axis_types=(kind,))
        step = jax.jit(self.step(scaler, optimizer, distributed.loss_fn))
        with jax.set_mesh(mesh):
            put = functools.partial(jax.device_put, device=NamedSharding(mesh, P()))
            params = jax.tree.map(put, distributed.init_params())
            state = jax.jit(optimizer.init)(params)
            by_batch = NamedSharding(mesh, P(None, "batch"))
            batches = [jax.device_put(b, by_batch) for b in self.batches()]
            batches = [[b[i] for i in range(8)] for b in batches]
            params, _, rows = distributed.train(step, params, state, batches)
        self.check(params, rows)

    def test_vmap_has_a_window_and_a_scale_each(self):
        _, optimizer = self.optimizer()
        params = jnp.ones((3, 2), jnp.float32)
        state = jax.vmap(optimizer.init)(params)
        step = jax.jit(jax.vmap(optimizer.update))
        for _ in range(2):
            grads = jnp.ones_like(params).at[1, 0].set(jnp.inf)
            updates, state = step(grads, state, params)
        assert state.inner_state.skipped_steps.tolist() == [0, 1, 0]
        assert updates.tolist() == [[-0.5, -0.5], [0, 0], [-0.5, -0.5]]


# Rules whose states differ, and ways to skip.
KINDS = [
    (8.0, "auto"),
    ("logmax", "where"),
    ("dynamic", "auto"),
    pytest.param("headroom", "auto", marks=pytest.mark.exhaustive),
    pytest.param("dynamic", "where", marks=pytest.mark.exhaustive),
    pytest.param("dynamic", "cond", marks=pytest.mark.exhaustive),
]


@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")
@pytest.mark.parametrize("axis_name", [None, "d"])
@pytest.mark.parametrize(("rule", "skip"), KINDS)
def test_a_state_for_each_device_of_a_shard_map(rule, skip, axis_name):
    """Each device accumulates for itself; an overflow is that of one, or of all."""
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    scaler = LossScaleOptimizer(optax.sgd(0.5, momentum=0.9), rule, axis_name=axis_name)
    optimizer = accumulate_gradients(scaler, 2)
    params = jnp.arange(8, dtype=jnp.float32)
    # Arrays of all devices side by side.
    state = jax.tree.map(
        lambda x: jnp.tile(x, 8) if jnp.ndim(x) else jnp.stack([x] * 8),
        optimizer.init(params[:1]),
    )

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    def step(params, state, grads):
        is_scalar = jax.tree.map(jnp.ndim, optimizer.init(params))
        own = jax.tree.map(lambda x, n: x if n else x[0], state, is_scalar)
        updates, own = optimizer.update(grads, own, params)
        state = jax.tree.map(lambda x, n: x if n else x[None], own, is_scalar)
        return optax.apply_updates(params, updates), state

    expected = np.arange(8, dtype=np.float32)
    momentum = np.zeros(8, np.float32)
    skips = scaler.loss_scale.skip_nonfinite
    for window in range(3):
        for micro_step in range(2):
            grads = jnp.arange(1, 9, dtype=jnp.float32)
            if window == 1 and micro_step == 0 and skips:
                grads = grads.at[3].set(INF)
            params, state = step(params, state, grads)
        applied = np.ones(8, bool)
        if window == 1 and skips:
            applied[... if axis_name else 3] = False
        new = np.arange(1, 9) + np.float32(0.9) * momentum
        momentum = np.where(applied, new, momentum)
        expected = np.where(applied, expected - 0.5 * momentum, expected)
        np.testing.assert_allclose(params, expected, rtol=1e-6)
        inner = state.inner_state
        assert (inner.last_step_applied == applied).all()
        assert (state.micro_step == 0).all()
        assert not state.accumulated_grads.any()


class TestHasUpdated:
    def follow(self, optimizer, sizes, wrap=jax.jit):
        """Returns in which steps the parameters moved, and what `has_updated` says."""
        params, state = PARAMS, optimizer.init(PARAMS)
        step, told = make_step(optimizer, wrap), wrap(has_updated)
        moved, said = [], []
        for size in sizes:
            before = params
            params, state = step(params, state, gradients(size))
            moved.append(bool((params["w"] != before["w"]).any()))
            said.append(bool(told(state)))
        assert said == moved
        return said

    @pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
    def test_a_plain_step(self, wrap):
        optimizer = LossScaleOptimizer(INNER)
        assert self.follow(optimizer, [1, NAN, 2, INF, 3], wrap) == [1, 0, 1, 0, 1]

    @pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
    def test_accumulation_outside(self, wrap):
        optimizer = accumulate_gradients(LossScaleOptimizer(INNER), 2)
        said = self.follow(optimizer, [1, 2, NAN, 1, 1, 1, 3], wrap)
        assert said == [0, 1, 0, 0, 0, 1, 0]

    # Outside jit each step compiles the branches of `MultiSteps` again.
    @pytest.mark.parametrize(
        "wrap", exhaustive_but(WRAPS.values(), [jax.jit]), ids=WRAPS
    )
    def test_multi_steps_inside(self, wrap):
        optimizer = LossScaleOptimizer(relaxed(optax.MultiSteps(INNER, 2)))
        said = self.follow(optimizer, [NAN, 1, 2, NAN, 1, INF, 1, 3], wrap)
        assert said == [0, 0, 1, 0, 0, 0, 1, 0]

    def test_fixed_scale(self):
        assert self.follow(LossScaleOptimizer(INNER, 8.0), [1, 2]) == [1, 1]

    def test_a_moving_average_counts_updates(self):
        """An average of the parameters at each update, and not at each micro-batch."""
        optimizer = accumulate_gradients(LossScaleOptimizer(INNER), 3)
        params, state = PARAMS, optimizer.init(PARAMS)
        average, all_params = PARAMS, []
        for size in (1, 2, 3, NAN, 1, 1, 4, 4, 4):
            params, state = make_step(optimizer, jax.jit)(
                params, state, gradients(size)
            )
            new = optax.incremental_update(params, average, 0.5)
            select = functools.partial(jnp.where, has_updated(state))
            average = jax.tree.map(select, new, average)
            all_params.append(params)
        first, last = all_params[2], all_params[8]
        expected = jax.tree.map(
            lambda a, b, c: 0.25 * a + 0.25 * b + 0.5 * c, PARAMS, first, last
        )
        for x, y in zip(*map(jax.tree.leaves, (average, expected)), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-6)

    def test_of_an_ensemble(self):
        optimizer = LossScaleOptimizer(optax.sgd(0.1))
        params = jnp.ones((3, 2), jnp.float32)
        state = jax.vmap(optimizer.init)(params)
        grads = params.at[1].set(NAN)
        _, state = jax.jit(jax.vmap(optimizer.update))(grads, state, params)
        assert has_updated(state).tolist() == [True, False, True]

    def test_wants_one_state(self):
        with pytest.raises(ValueError, match="exactly one"):
            has_updated(())

    def test_accumulation_twice(self):
        inner = accumulate_gradients(LossScaleOptimizer(INNER), 2)
        optimizer = accumulate_gradients(inner, 2)
        assert self.follow(optimizer, [1, 2, 3, 4, 5]) == [0, 0, 0, 1, 0]


@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")
@pytest.mark.parametrize("axis_name", [None, "d"])
@pytest.mark.parametrize("rule", [8.0, "dynamic"])
def test_a_scan_in_a_shard_map_with_a_state_for_each_device(rule, axis_name):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    optimizer = LossScaleOptimizer(optax.sgd(0.5), rule, axis_name=axis_name)
    state = jax.vmap(optimizer.init)(jnp.zeros((8, 1), jnp.float32))

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    def run(params, state, grads):
        def body(carry, _):
            return optimizer.apply_gradients(grads, *carry), None

        own = jax.tree.map(lambda x: x[0], state)
        (params, own), _ = lax.scan(body, (params, own), length=2)
        return params, jax.tree.map(lambda x: x[None], own)

    params, state = run(jnp.zeros(8), state, jnp.ones(8))
    assert params.tolist() == [-1] * 8
    assert state.last_step_applied.all()
