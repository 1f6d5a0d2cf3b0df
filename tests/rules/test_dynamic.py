"""The loss scales: their rules against the reference, and what they refuse."""

import dataclasses
import fractions
import functools
import json
import math
import pickle
from typing import NamedTuple

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from helpers import replay, signature
from hypothesis import assume, given

from optax_lossscale import (
    DynamicLossScale,
    FixedLossScale,
    FixedLossScaleState,
    HeadroomLossScale,
    LogMaxLossScale,
    LossScale,
    LossScaleOptimizer,
    LossScaleState,
    TolerantLossScale,
    all_finite,
    get_loss_scale,
)

finite_runs = st.lists(st.booleans(), max_size=40)


@st.composite
def valid_dynamic(draw):
    """Draws valid hyperparameters, powers of two and others, all the way out."""
    scales = st.one_of(
        st.integers(-126, 126).map(lambda k: 2.0**k), st.floats(1e-30, 1e30)
    )
    low, initial, high = sorted(draw(st.tuples(scales, scales, scales)))
    return {
        "initial_scale": initial,
        "growth_interval": draw(st.integers(1, 5) | st.just(2**31 - 1)),
        "growth_factor": draw(st.sampled_from([2.0, 4.0, 1.001, 2.0**100])),
        "backoff_factor": draw(st.sampled_from([0.5, 0.25, 0.999, 2.0**-100])),
        "min_scale": low,
        "max_scale": high,
        "hysteresis": draw(st.integers(1, 4)),
        "consecutive_hysteresis": draw(st.booleans()),
    }


@given(valid_dynamic(), finite_runs)
def test_dynamic_is_the_reference_in_a_jitted_scan(config, run):
    states, should_apply = replay(DynamicLossScale(**config), run)
    rule = reference.Dynamic(**config)
    expected = [rule.step(finite) for finite in run]
    actual = list(zip(*(field.tolist() for field in states), strict=True))
    assert actual == expected
    assert should_apply.tolist() == run


@given(valid_dynamic(), finite_runs)
def test_dynamic_is_the_reference_step_by_step(config, run):
    scale, rule = DynamicLossScale(**config), reference.Dynamic(**config)
    state = scale.init()
    for finite in run:
        state, should_apply = scale.update(1.0 if finite else math.nan, state)
        assert tuple(field.item() for field in state) == rule.step(finite)
        assert bool(should_apply) is finite
        low, high = map(np.float32, (config["min_scale"], config["max_scale"]))
        assert low <= state.loss_scale.item() <= high


def test_growth_is_not_a_step_late():
    states, _ = replay(DynamicLossScale(8.0, growth_interval=3), [True] * 6)
    assert states.loss_scale.tolist() == [8, 8, 16, 16, 16, 32]
    assert states.good_steps.tolist() == [1, 2, 0, 1, 2, 0]


def test_minimum_survives_jit_and_tree_map():
    scale = DynamicLossScale(1.0, min_scale=0.25)
    state = jax.tree.map(lambda x: x, scale.init())
    update = jax.jit(scale.update)
    for _ in range(5):
        state, _ = update(jnp.inf, state)
    assert state.loss_scale == 0.25


def test_an_endless_storm_of_nans_ends_at_the_minimum():
    scale = DynamicLossScale(min_scale=2.0**-126)
    states, _ = replay(scale, [False] * 300)
    assert states.loss_scale[-1] == 2.0**-126
    assert jnp.all(states.loss_scale > 0)


def test_endless_growth_ends_at_the_maximum():
    states, _ = replay(DynamicLossScale(growth_interval=1), [True] * 300)
    assert states.loss_scale[-1] == 2.0**126
    assert jnp.isfinite(states.loss_scale).all()


def test_hysteresis_of_megatron_and_deepspeed():
    run = [False, False, True, False, True, True, False]
    states, _ = replay(DynamicLossScale(16.0, 2, hysteresis=2), run)
    # Used up once, it stays used up until the scale grows.
    assert states.loss_scale.tolist() == [16, 8, 8, 4, 4, 8, 8]
    assert states.hysteresis_left.tolist() == [1, 0, 0, 0, 0, 2, 1]


def test_consecutive_hysteresis_is_restored_by_any_finite_step():
    scale = DynamicLossScale(16.0, hysteresis=2, consecutive_hysteresis=True)
    states, _ = replay(scale, [False, True, False, True, False, False])
    assert states.loss_scale.tolist() == [16, 16, 16, 16, 16, 8]


def test_a_counter_restored_beyond_the_interval_still_grows():
    scale = DynamicLossScale(8.0, growth_interval=3)
    state = scale.init()._replace(good_steps=jnp.int32(100))
    state, _ = scale.update(1.0, state)
    assert (state.loss_scale, state.good_steps) == (16, 0)


def test_a_state_of_python_numbers_becomes_one_of_arrays():
    scale = DynamicLossScale(8.0, hysteresis=2)
    for gradient in (1.0, jnp.nan):
        after, _ = scale.update(gradient, LossScaleState(8.0, 0, 2))
        assert signature(after) == signature(scale.init())


def test_a_counter_at_the_end_of_int32_does_not_wrap():
    scale = DynamicLossScale(8.0, growth_interval=2**31 - 1)
    state = scale.init()._replace(good_steps=jnp.int32(2**31 - 1))
    state, _ = scale.update(1.0, state)
    assert (state.loss_scale, state.good_steps) == (16, 0)


@pytest.mark.parametrize("restored", [0.0, 1e-30, 2.0**40, math.inf, math.nan])
def test_a_scale_restored_out_of_bounds_comes_back_within(restored):
    scale = DynamicLossScale(min_scale=0.5, max_scale=2.0**20)
    state = scale.init()._replace(loss_scale=jnp.float32(restored))
    for gradient in (1.0, jnp.inf):
        after, _ = scale.update(gradient, state)
        assert 0.5 <= after.loss_scale <= 2.0**20


# What a hand-set or restored scale may be, and what is out of all bounds.
OUT_OF_BOUNDS = [math.nan, math.inf, -math.inf, 0.0, -8.0, 1e-40, 2.0**127, 3e38]


@pytest.mark.parametrize("restored", [*OUT_OF_BOUNDS, 0.25, 2.0**40])
def test_the_scale_that_is_read_is_the_one_that_update_starts_from(restored):
    low, high = 0.5, 2.0**20
    expected = min(max(restored, low), high) if restored == restored else low
    bounds = {"initial_scale": 8.0, "min_scale": low, "max_scale": high}
    for scale in (DynamicLossScale(**bounds), TolerantLossScale(0, **bounds)):
        state = scale.init()._replace(loss_scale=jnp.float32(restored))
        assert scale(state) == jax.jit(scale.loss_scale)(state) == expected
        after, _ = scale.update(1.0, state)
        assert scale(after) == after.loss_scale == expected
        after, _ = scale.update(jnp.inf, state)
        assert scale(after) == after.loss_scale == max(expected / 2, low)


@pytest.mark.parametrize("restored", OUT_OF_BOUNDS)
def test_a_scale_set_by_hand_loses_no_gradient(restored):
    optimizer = LossScaleOptimizer(optax.sgd(0.5))
    params = jnp.array([1.0, 2.0], jnp.float32)
    state = optax.tree.set(optimizer.init(params), loss_scale=jnp.float32(restored))

    def loss_fn(params):
        return 1e-3 * jnp.sum(params**2)

    grads = optimizer.value_and_grad(loss_fn, state)(params)[1]
    np.testing.assert_allclose(grads, 2e-3 * params, rtol=1e-6)
    step = jax.jit(functools.partial(optimizer.minimize, loss_fn))
    after, state, _ = step(params, state)
    np.testing.assert_allclose(after, params - 1e-3 * params, rtol=1e-6)
    assert 1 <= optimizer.current_loss_scale(state) <= 2.0**126


@pytest.mark.parametrize("set_by_hand", [128, 128.0, np.float64(128), jnp.int32(128)])
def test_a_scale_set_by_hand_becomes_float32(set_by_hand):
    scale = DynamicLossScale()
    state = scale.init()._replace(loss_scale=set_by_hand)
    assert scale(state).dtype == jnp.float32
    after, _ = scale.update(1.0, state)
    assert signature(after) == signature(scale.init())
    assert after.loss_scale == 128


SCALES = [
    FixedLossScale(8.0),
    FixedLossScale(8.0, skip_nonfinite=True),
    DynamicLossScale(),
    DynamicLossScale(
        2.0**10, 7, 4.0, 0.25, 0.5, 2.0**20, hysteresis=3, consecutive_hysteresis=True
    ),
    TolerantLossScale(0.05),
]


@pytest.mark.parametrize("scale", SCALES, ids=repr)
class TestEveryLossScale:
    def test_state_is_strongly_typed_and_stable(self, scale):
        state = scale.init()
        assert not any(x.weak_type for x in jax.tree.leaves(state))
        for update in (scale.update, jax.jit(scale.update)):
            for gradient in (jnp.float32(1), jnp.float32(jnp.nan)):
                after, should_apply = update(gradient, state)
                assert signature(after) == signature(state)
                assert signature(should_apply) == signature(jnp.ones((), bool))
        assert signature(jax.eval_shape(scale.init)) == signature(state)

    def test_scale_is_a_strong_float32_scalar(self, scale):
        state = scale.init()
        assert scale.loss_scale(state) == scale(state)
        assert signature(scale(state)) == signature(jnp.float32(1))

    def test_config_round_trips_through_json(self, scale):
        config = json.loads(json.dumps(scale.get_config()))
        copy = type(scale).from_config(config)
        assert copy == scale
        assert hash(copy) == hash(scale)
        assert copy.get_config() == config
        types = {type(value) for value in config.values()}
        assert types <= {int, float, bool, str}

    def test_is_frozen_picklable_and_no_pytree(self, scale):
        assert pickle.loads(pickle.dumps(scale)) == scale
        with pytest.raises(dataclasses.FrozenInstanceError):
            scale.initial_scale = 3.0
        assert jax.tree.leaves(scale) == [scale]

    def test_no_leaves_are_finite(self, scale):
        for empty in (None, (), {"a": None, "b": jnp.arange(3)}):
            _, should_apply = scale.update(empty, scale.init())
            assert should_apply


def test_fixed_is_tensorflows():
    scale = FixedLossScale(1024)
    state, should_apply = scale.update(jnp.nan, scale.init())
    assert should_apply
    assert state == FixedLossScaleState(1024)
    assert scale.get_config() == {"loss_scale_value": 1024.0, "skip_nonfinite": False}
    state, should_apply = FixedLossScale(1024, True).update(jnp.nan, state)
    assert not should_apply


def boxed(x):
    """Returns an array in a box, as Flax nnx has it."""
    return {"value": x}


class TestFixedScaleInAStateThatSaysOtherwise:
    @pytest.mark.parametrize("skip", [False, True])
    @pytest.mark.parametrize("restored", [*OUT_OF_BOUNDS, 1.0, 64.0])
    def test_is_the_hyperparameter(self, restored, skip):
        scale = FixedLossScale(8.0, skip)
        state = FixedLossScaleState(jnp.float32(restored))
        assert scale(state) == jax.jit(scale)(state) == 8
        for gradient in (1.0, jnp.nan):
            after, _ = scale.update(gradient, state)
            assert signature(after) == signature(scale.init())
            assert after.loss_scale == 8

    def test_is_of_the_shape_of_the_state(self):
        scale, several = FixedLossScale(8.0), jnp.array([jnp.nan, 8, jnp.inf])
        assert scale(FixedLossScaleState(several)).tolist() == [8, 8, 8]
        assert scale(FixedLossScaleState(boxed(several))).tolist() == [8, 8, 8]
        assert scale(FixedLossScaleState(128)) == 8
        states = FixedLossScaleState(several)
        assert jax.vmap(scale)(states).tolist() == [8, 8, 8]
        after, _ = jax.vmap(scale.update)(jnp.ones(3), states)
        assert after.loss_scale.tolist() == [8, 8, 8]

    @pytest.mark.parametrize("num_losses", [None, 2])
    def test_trains_as_if_it_said_so(self, num_losses):
        optimizer = LossScaleOptimizer(optax.sgd(0.5), 8.0, num_losses=num_losses)
        params = jnp.array([1.0, 2.0], jnp.float32)
        fresh = optimizer.init(params)
        state = optax.tree.set(fresh, loss_scale=fresh.loss_scale_state.loss_scale * 0)

        def loss_fn(params):
            loss = jnp.sum(params**2)
            return loss if num_losses is None else (loss / 2, loss / 2)

        after, state, _ = optimizer.minimize(loss_fn, params, state)
        assert after.tolist() == [0.0, 0.0]
        assert signature(state) == signature(fresh)


def test_fixed_compiles_no_check():
    for scale, checked in ((FixedLossScale(8.0), False), (SCALES[1], True)):
        text = jax.jit(scale.update).lower(jnp.ones(3), scale.init()).as_text()
        assert ("stablehlo.reduce" in text) is checked
        assert ("is_finite" in text) is checked


def test_normalizes_what_numbers_it_takes():
    scale = DynamicLossScale(
        np.float32(16), np.int64(3), fractions.Fraction(2), min_scale=2, hysteresis=2.0
    )
    assert scale == DynamicLossScale(16.0, 3, 2.0, min_scale=2.0, hysteresis=2)
    assert type(scale.growth_interval) is int
    assert type(scale.initial_scale) is float


not_numbers = st.sampled_from(
    [True, False, "8", None, [8.0], 1j, np.ones(()), np.ones(2), b"8"]
)
bad_scales = st.one_of(
    st.sampled_from([0, -0.0, math.inf, -math.inf, math.nan, 1e-46, 2.0**-127]),
    st.sampled_from([2.0**127, 1e39, 10**400]),
    st.floats(max_value=0),
)
bad_counts = st.one_of(
    st.integers(max_value=0),
    st.sampled_from([0.5, 1.5, math.nan, math.inf, 2**31, 2**40]),
)
BAD_VALUES = {
    "initial_scale": bad_scales,
    "min_scale": bad_scales,
    "max_scale": bad_scales,
    "growth_interval": bad_counts,
    "hysteresis": bad_counts,
    # The last two of each are 1, or 0, in float32 alone.
    "growth_factor": st.floats(max_value=1.0)
    | st.sampled_from([math.inf, math.nan, 1 + 1e-9, 1 + 2.0**-24]),
    "backoff_factor": st.floats(max_value=0)
    | st.floats(min_value=1)
    | st.sampled_from([math.nan, 1 - 1e-8, 1e-46]),
    "consecutive_hysteresis": st.nothing(),
}


@given(st.data())
def test_dynamic_refuses_invalid_values(data):
    name = data.draw(st.sampled_from([n for n in BAD_VALUES if n[0] != "c"]))
    value = data.draw(BAD_VALUES[name])
    with pytest.raises(ValueError, match=name) as error:
        DynamicLossScale(**{name: value})
    assert repr(value) in str(error.value)


def test_the_smallest_factors_that_it_takes_do_change_the_scale():
    factors = {"growth_factor": 1 + 2.0**-23, "backoff_factor": 1 - 2.0**-24}
    for initial in (2.0**15, np.float32(2.0**15 * 1.3), np.nextafter(np.float32(2), 1)):
        for rule in (DynamicLossScale, functools.partial(TolerantLossScale, 0)):
            scale = rule(initial_scale=initial, growth_interval=1, **factors)
            grown, _ = scale.update(1.0, scale.init())
            lower, _ = scale.update(jnp.nan, scale.init())
            assert lower.loss_scale < initial < grown.loss_scale
    for factor in (1 + 1e-9, 1 - 1e-8):
        name = "growth_factor" if factor > 1 else "backoff_factor"
        for rule in (DynamicLossScale, functools.partial(TolerantLossScale, 0)):
            with pytest.raises(ValueError, match=rf"{name}.*float32.*usual.*{factor}"):
                rule(**{name: factor})


@given(st.data())
def test_dynamic_refuses_invalid_types(data):
    name = data.draw(st.sampled_from(list(BAD_VALUES)))
    value = data.draw(not_numbers)
    assume(name != "consecutive_hysteresis" or not isinstance(value, bool))
    with pytest.raises(TypeError, match=name) as error:
        DynamicLossScale(**{name: value})
    assert repr(value) in str(error.value)


def test_refuses_jax_arrays():
    with pytest.raises(TypeError, match="growth_factor"):
        DynamicLossScale(growth_factor=jnp.float32(2))
    with pytest.raises(TypeError, match="loss_scale_value"):
        FixedLossScale(jnp.float32(2))


@pytest.mark.parametrize("half", [np.float16, jnp.float16, jnp.bfloat16])
def test_refuses_scales_of_half_precision(half):
    for name in ("initial_scale", "min_scale", "max_scale"):
        with pytest.raises(ValueError, match=f"{name} must not be of half precision"):
            DynamicLossScale(**{name: half(8)})
    with pytest.raises(ValueError, match=r"loss_scale_value.*Pass a Python float"):
        FixedLossScale(half(8))


@pytest.mark.parametrize(
    "bounds", [{"initial_scale": 0.5}, {"max_scale": 8.0}, {"min_scale": 2.0**16}]
)
def test_dynamic_refuses_an_initial_scale_out_of_bounds(bounds):
    with pytest.raises(ValueError, match="initial_scale must lie between") as error:
        DynamicLossScale(**bounds)
    assert repr(next(iter(bounds.values()))) in str(error.value)


@pytest.mark.parametrize("value", [0.5, 0, -1, math.inf, math.nan, 2.0**127])
def test_fixed_refuses_invalid_values(value):
    with pytest.raises(ValueError, match=r"loss_scale_value.*(at least|finite)"):
        FixedLossScale(value)


def test_fixed_refuses_invalid_types():
    for value in ("8", True, None):
        with pytest.raises(TypeError, match="loss_scale_value"):
            FixedLossScale(value)
    with pytest.raises(TypeError, match="skip_nonfinite"):
        FixedLossScale(8, skip_nonfinite=1)


def test_from_config_refuses_unknown_keys():
    with pytest.raises(TypeError, match="increment_period"):
        DynamicLossScale.from_config({"increment_period": 3})


class TestGetLossScale:
    def test_takes_what_users_write(self):
        scale = DynamicLossScale(4.0)
        assert get_loss_scale(scale) is scale
        assert get_loss_scale(8) == get_loss_scale(8.0) == FixedLossScale(8.0)
        assert get_loss_scale(np.float32(8)) == FixedLossScale(8.0)
        assert get_loss_scale("dynamic") == DynamicLossScale()
        assert get_loss_scale("headroom") == HeadroomLossScale()
        assert get_loss_scale("logmax") == LogMaxLossScale()

    @pytest.mark.parametrize(
        "bad", [None, True, "static", "", [8], DynamicLossScale, jnp.float32(8)]
    )
    def test_refuses_the_rest(self, bad):
        with pytest.raises(ValueError, match='number, or one of "dynamic", '):
            get_loss_scale(bad)

    def test_refuses_numbers_below_one(self):
        with pytest.raises(ValueError, match="at least 1"):
            get_loss_scale(0.5)


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
        params = jnp.float32(1)
        state = optimizer.init(params)
        assert optimizer.dynamic_counter(state) is None
        step = jax.jit(lambda p, s: optimizer.minimize(lambda p: p**2, p, s))
        for expected in (32, 16, 8):
            params, state, _ = step(params, state)
            assert optimizer.current_loss_scale(state) == expected
        assert params == 0

    def test_config(self):
        assert Halving(8.0).get_config() == {"start": 8.0}
        assert Halving.from_config({"start": 8.0}) == Halving(8.0)

    @pytest.mark.parametrize("restored", OUT_OF_BOUNDS)
    def test_its_scale_is_read_within_bounds(self, restored):
        state = Halving().init()._replace(loss_scale=jnp.float32(restored))
        expected = restored if restored >= 2.0**-126 else 2.0**-126
        assert Halving()(state) == min(expected, 2.0**126)

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
        assert read(math.nan, min_scale=4) == 4
        # Bounds out of all bounds do not make it worse.
        assert read(0.0, min_scale=0) == 2.0**-126
        assert read(math.inf, max_scale=math.inf) == 2.0**126

    def test_needs_its_methods(self):
        class Nothing(LossScale):
            pass

        with pytest.raises(TypeError, match="abstract"):
            Nothing()

    def test_config_of_a_plain_class_says_what_is_missing(self):
        class Plain(Halving):
            pass

        with pytest.raises(TypeError, match="dataclass"):
            Plain().get_config()


def test_state_has_the_documented_fields():
    assert LossScaleState._fields == ("loss_scale", "good_steps", "hysteresis_left")
    state = DynamicLossScale(hysteresis=3).init()
    assert [x.dtype.name for x in state] == ["float32", "int32", "int32"]
    assert state == LossScaleState(2.0**15, 0, 3)
