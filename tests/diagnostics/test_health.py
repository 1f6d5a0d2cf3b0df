"""Losses that are not finite, and telling when training gets nowhere."""

import dataclasses
import functools
import pickle
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import (
    INF,
    NAN,
    WRAPS,
    as_bits,
    assert_same_bits,
    count_branches,
    every_skip,
    signature,
)
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from optax_lossscale import (
    DynamicLossScale,
    FixedLossScale,
    FixedLossScaleState,
    Health,
    LossScale,
    LossScaleOptimizer,
    TolerantLossScale,
    all_finite,
    check_health,
)
from optax_lossscale.diagnostics import nonfinite_leaves, report

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


@dataclasses.dataclass(frozen=True)
class BackoffOnly(LossScale):
    """A rule from outside the package, with a minimum of 1 that it does not name."""

    initial_scale: float = 4.0

    def init(self):
        return FixedLossScaleState(jnp.float32(self.initial_scale))

    def update(self, grads, state, *, axis_name=None):
        finite = all_finite(grads, axis_name=axis_name)
        lower = jnp.maximum(state.loss_scale / 2, 1.0)
        scale = jnp.where(finite, state.loss_scale, lower)
        return FixedLossScaleState(scale), finite


def loss_fn(param, loss, grad):
    """Has the value and the gradient that it is told to have, whatever they are."""

    @jax.custom_vjp
    def told(param):
        return loss

    told.defvjp(lambda param: (loss, None), lambda _, scale: (scale * grad,))
    return told(param)


def by_minimize(optimizer, param, state, loss, grad):
    return optimizer.minimize(loss_fn, param, state, loss, grad)[:2]


def by_update(optimizer, param, state, loss, grad):
    updates, state = optimizer.update(grad, state, param, value=loss)
    return optax.apply_updates(param, updates), state


def by_apply_gradients(optimizer, param, state, loss, grad):
    return optimizer.apply_gradients(grad, param, state, value=loss)


WAYS = [by_minimize, by_update, by_apply_gradients]


def counts(state):
    return (
        state.skipped_steps,
        state.consecutive_skipped_steps,
        state.nonfinite_loss_steps,
        state.stuck_steps,
    )


def stuck_after(scale, grads, **options):
    """Returns the stuck steps after each step of an optimizer with that scale."""
    optimizer = LossScaleOptimizer(optax.sgd(0.5), scale, **options)

    def step(state, grad):
        state = optimizer.update(grad, state)[1]
        return state, state.stuck_steps

    grads = jnp.array(grads, jnp.float32)
    return lax.scan(step, optimizer.init(grads[0]), grads)[1].tolist()


@every_skip
@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
@pytest.mark.parametrize("way", WAYS)
def test_step_by_step(way, wrap, skip):
    optimizer = LossScaleOptimizer(
        optax.sgd(0.5, momentum=0.5), SCALE, skip=skip, check_loss=True
    )
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


def test_under_disable_jit():
    with jax.disable_jit():
        test_the_default_backs_off_and_counts_no_losses()


def test_the_default_backs_off_and_counts_no_losses():
    optimizer = LossScaleOptimizer(optax.sgd(0.5), SCALE)
    param, state = jnp.float32(1), optimizer.init(jnp.float32(1))
    param, state = by_minimize(optimizer, param, state, NAN, jnp.float32(NAN))
    assert optimizer.current_loss_scale(state) == 8
    assert counts(state) == (1, 1, 0, 0)
    param, state = by_minimize(optimizer, param, state, NAN, jnp.float32(1))
    assert param == 0.5
    assert counts(state) == (1, 0, 0, 0)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("loss_scale", [8.0, TolerantLossScale(0.5), BackoffOnly()])
def test_with_any_rule(loss_scale, way):
    optimizer = LossScaleOptimizer(optax.sgd(0.5), loss_scale, check_loss=True)
    start = (jnp.float32(1), optimizer.init(jnp.float32(1)))
    step = jax.jit(functools.partial(way, optimizer))
    param, state = step(*start, jnp.float32(NAN), jnp.float32(1))
    assert_same_bits(
        (param, state.loss_scale_state), (start[0], start[1].loss_scale_state)
    )
    assert counts(state) == (1, 1, 1, 0)
    param, state = step(param, state, jnp.float32(3), jnp.float32(1))
    assert param == 0.5
    assert counts(state) == (1, 0, 1, 0)


def test_with_a_fixed_scale_the_loss_alone_decides():
    optimizer = LossScaleOptimizer(optax.sgd(0.5), 8.0, check_loss=True)
    param, state = jnp.float32(1), optimizer.init(jnp.float32(1))
    param, state = by_update(optimizer, param, state, 1.0, jnp.float32(INF))
    assert param == -INF
    assert counts(state) == (0, 0, 0, 0)


class TestValue:
    one = jnp.float32(1)
    optimizer = LossScaleOptimizer(optax.sgd(0.5), check_loss=True)
    state = optimizer.init(one)

    @pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
    @pytest.mark.parametrize("options", [{}, {"value": None}, {"loss": 1.0}])
    def test_has_to_be_given(self, wrap, options):
        for call in (
            lambda: self.optimizer.update(self.one, self.state, **options),
            lambda: self.optimizer.apply_gradients(
                self.one, self.one, self.state, **options
            ),
        ):
            with pytest.raises(TypeError, match=r"value= is missing.*value=loss"):
                wrap(call)()

    @pytest.mark.parametrize(
        "value",
        [jnp.ones(1), jnp.ones((), complex), (1.0, 2.0), "1.0", True, {"loss": 1.0}],
    )
    def test_has_to_be_a_real_scalar(self, value):
        with pytest.raises(TypeError, match="value must be the loss, a real scalar"):
            self.optimizer.update(self.one, self.state, value=value)

    @pytest.mark.parametrize("kind", [float, np.float64, jnp.float16, jnp.bfloat16])
    def test_may_be_any_real_scalar(self, kind):
        for number, count in ((1, 0), (NAN, 1), (-INF, 1)):
            _, state = self.optimizer.update(self.one, self.state, value=kind(number))
            assert state.nonfinite_loss_steps == count
        assert (
            self.optimizer.update(self.one, self.state, value=3)[1].skipped_steps == 0
        )

    def test_reaches_an_inner_optimizer_that_takes_it(self):
        seen = []

        def update(updates, state, params=None, *, value):
            seen.append(value)
            return updates, state

        inner = optax.GradientTransformationExtraArgs(optax.init_empty_state, update)
        optimizer = LossScaleOptimizer(inner, check_loss=True)
        for way in WAYS:
            way(optimizer, self.one, optimizer.init(None), self.one * 3, self.one)
        assert seen == [3, 3, 3]

    def test_does_not_reach_one_that_does_not(self):
        class Strict:
            def init(self, params):
                return ()

            def update(self, updates, state, params=None, *, other=None):
                return updates, state

        optimizer = LossScaleOptimizer(Strict(), check_loss=True)
        for way in WAYS:
            _, state = way(optimizer, self.one, optimizer.init(None), NAN, self.one)
            assert state.nonfinite_loss_steps == 1

    def test_comes_through_a_chain(self):
        optimizer = optax.chain(self.optimizer, optax.scale(2.0))
        state = optimizer.init(self.one)
        updates, state = optimizer.update(self.one, state, value=NAN)
        assert updates == 0
        with pytest.raises(TypeError, match="value= is missing"):
            optimizer.update(self.one, state)

    def test_with_auxiliary_data(self):
        def fun(param, loss):
            return loss_fn(param, loss, self.one), {"nan": NAN}

        for loss, skipped in ((self.one, 0), (self.one * NAN, 1)):
            _, state, _ = self.optimizer.minimize(
                fun, self.one, self.state, loss, has_aux=True
            )
            assert state.nonfinite_loss_steps == skipped


def test_is_a_checked_part_of_the_configuration():
    inner = optax.GradientTransformation(optax.init_empty_state, max)
    off, on = (
        LossScaleOptimizer(inner, 8, check_loss=check) for check in (False, True)
    )
    assert off == LossScaleOptimizer(inner, 8)
    assert off != on
    assert hash(off) != hash(on)
    assert pickle.loads(pickle.dumps(on)) == on
    assert "check_loss=True" in repr(on)
    with pytest.raises(TypeError, match="check_loss must be True or False, got 1"):
        LossScaleOptimizer(inner, check_loss=1)


def test_the_structure_is_the_same_with_and_without():
    init = [
        LossScaleOptimizer(optax.adam(0.1), check_loss=check).init(jnp.ones(3))
        for check in (True, False)
    ]
    assert signature(init[0]) == signature(init[1])


def test_a_fixed_scale_compiles_no_check_unless_asked():
    def lowered(**options):
        optimizer = LossScaleOptimizer(optax.sgd(0.5), 8.0, skip="cond", **options)
        step = jax.jit(lambda p, s: optimizer.minimize(lambda p: jnp.sum(p**2), p, s))
        params = jnp.ones(3, jnp.float32)
        return step.lower(params, optimizer.init(params)).as_text()

    assert "is_finite" not in lowered()
    assert count_branches(lowered()) == 0
    assert "is_finite" in lowered(check_loss=True)
    assert count_branches(lowered(check_loss=True)) == 1


def test_counters_saturate_and_are_restored():
    top = 2**31 - 1
    optimizer = LossScaleOptimizer(optax.sgd(0.5), SCALE, check_loss=True)
    one = jnp.float32(1)
    start = optimizer.init(one)
    scale = start.loss_scale_state._replace(loss_scale=4.0, good_steps=1)
    state = start._replace(
        nonfinite_loss_steps=top, stuck_steps=top, loss_scale_state=scale
    )
    for value, grad in ((NAN, 1), (1, NAN)):
        _, state = optimizer.update(one * grad, state, value=value)
        assert counts(state)[2:] == (top, top)
        assert signature(state) == signature(start)


class TestStuckSteps:
    def test_only_at_the_minimum_and_in_a_row(self):
        run = [NAN, NAN, NAN, INF, 1, NAN, 1, 1, 1, NAN, NAN]
        assert stuck_after(SCALE, run) == [0, 0, 1, 2, 0, 1, 0, 0, 0, 0, 1]

    def test_hysteresis_counts_at_the_minimum_alone(self):
        scale = DynamicLossScale(2.0, hysteresis=3)
        assert stuck_after(scale, [NAN] * 5) == [0, 0, 0, 1, 2]

    def test_tolerance_counts_at_the_minimum_alone(self):
        scale = TolerantLossScale(0.5, 2.0)
        assert stuck_after(scale, [1, 1, NAN, NAN, NAN]) == [0, 0, 0, 0, 1]

    def test_a_rule_without_minimum_is_stuck_when_it_does_not_fall(self):
        assert stuck_after(FixedLossScale(8.0, True), [NAN, NAN, 1]) == [1, 2, 0]
        assert stuck_after(FixedLossScale(8.0), [NAN, NAN, 1]) == [0, 0, 0]
        run = [NAN] * 3
        assert stuck_after(BackoffOnly(), run) == [0, 0, 1]


class TestDevices:
    """One device, or one of its losses, is not finite: all skip, or that member."""

    losses = jnp.ones(8, jnp.float32).at[3].set(NAN)
    grads = jnp.ones(8, jnp.float32)

    def test_pmap(self):
        optimizer = LossScaleOptimizer(
            optax.sgd(0.5), SCALE, axis_name="i", check_loss=True
        )
        init = jax.pmap(optimizer.init, axis_name="i")
        for way in WAYS:
            step = jax.pmap(functools.partial(way, optimizer), axis_name="i")
            params, state = step(self.grads, init(self.grads), self.losses, self.grads)
            assert params.tolist() == [1] * 8
            assert state.nonfinite_loss_steps.tolist() == [1] * 8
            assert set(optimizer.current_loss_scale(state).tolist()) == {16}
            assert check_health(state).nonfinite_loss_steps == 1

    def test_shard_map(self):
        optimizer = LossScaleOptimizer(
            optax.sgd(0.5), SCALE, axis_name="i", check_loss=True
        )
        mesh = jax.make_mesh((8,), ("i",), axis_types=(AxisType.Auto,))

        @jax.jit
        @functools.partial(
            jax.shard_map, mesh=mesh, in_specs=(P(), P(), P("i")), out_specs=P()
        )
        def step(param, state, x):
            loss = lax.pmean(x[0], "i")
            return optimizer.apply_gradients(param, param, state, value=loss)

        param = jnp.float32(1)
        param, state = step(param, optimizer.init(param), self.losses)
        assert (param, state.nonfinite_loss_steps) == (1, 1)

    def test_sharded_arrays(self):
        optimizer = LossScaleOptimizer(optax.sgd(0.5), SCALE, check_loss=True)
        mesh = jax.make_mesh((8,), ("i",), axis_types=(AxisType.Auto,))
        x = jax.device_put(self.losses, NamedSharding(mesh, P("i")))
        step = jax.jit(
            lambda p, s, x: optimizer.minimize(lambda p: p * jnp.mean(x), p, s)
        )
        param = jnp.float32(1)
        param, state, _ = step(param, optimizer.init(param), x)
        assert (param, state.nonfinite_loss_steps) == (1, 1)
        assert optimizer.current_loss_scale(state) == 16

    def test_vmap(self):
        optimizer = LossScaleOptimizer(optax.sgd(0.5), SCALE, check_loss=True)
        for way in WAYS:
            state = jax.vmap(optimizer.init)(self.grads)
            step = jax.jit(jax.vmap(functools.partial(way, optimizer)))
            params, state = step(self.grads, state, self.losses, self.grads)
            expected = [0, 0, 0, 1, 0, 0, 0, 0]
            assert params.tolist() == [0.5 + e / 2 for e in expected]
            assert state.nonfinite_loss_steps.tolist() == expected
            assert state.skipped_steps.tolist() == expected

    def test_scan(self):
        optimizer = LossScaleOptimizer(optax.sgd(0.5, 0.5), SCALE, check_loss=True)
        numbers = jnp.array([numbers for numbers, _ in STEPS], jnp.float32)
        for way in WAYS:

            def body(carry, numbers, way=way):
                carry = way(optimizer, *carry, *numbers)
                scale = optimizer.current_loss_scale(carry[1])
                return carry, (scale, *counts(carry[1]))

            start = (jnp.float32(1), optimizer.init(jnp.float32(1)))
            _, seen = lax.scan(body, start, numbers)
            assert list(zip(*(x.tolist() for x in seen), strict=True)) == [
                expected for _, expected in STEPS
            ]


class TestCheckHealth:
    optimizer = LossScaleOptimizer(optax.sgd(0.5), SCALE)
    state = optimizer.init(jnp.float32(1))

    def state_with(self, scale=4.0, **numbers):
        numbers = {k: jnp.asarray(v, jnp.int32) for k, v in numbers.items()}
        scale = self.state.loss_scale_state._replace(loss_scale=jnp.float32(scale))
        return self.state._replace(loss_scale_state=scale, **numbers)

    def test_healthy(self):
        assert check_health(self.state) == Health(
            True, "No sign of trouble.", 16.0, 0, 0, 0, 0
        )
        assert (
            list(map(type, check_health(self.state))) == [bool, str, float] + [int] * 4
        )

    @pytest.mark.parametrize(
        ("numbers", "options", "message"),
        [
            (
                {"stuck_steps": 100},
                {},
                "4.0, could not go lower, and 100 steps in a row",
            ),
            ({"stuck_steps": 3}, {"patience": 3}, "and 3 steps in a row"),
            ({"consecutive_skipped_steps": 1000}, {}, "^1000 steps in a row"),
            (
                {"consecutive_skipped_steps": 7, "nonfinite_loss_steps": 9},
                {"max_consecutive_skipped_steps": 7},
                "^7 steps in a row.* 9 steps had a non-finite loss",
            ),
        ],
    )
    def test_from_its_limit_on(self, numbers, options, message):
        state = self.state_with(**numbers)
        with pytest.raises(FloatingPointError, match=message) as error:
            check_health(state, **options)
        health = check_health(state, raise_error=False, **options)
        assert not health.healthy
        assert health.message == str(error.value)
        assert health.loss_scale == 4
        for name, number in numbers.items():
            assert getattr(health, name) == number
        below = self.state_with(**{name: n - 1 for name, n in numbers.items()})
        assert check_health(below, **options).healthy

    def test_after_a_storm(self):
        _, state = lax.scan(
            lambda state, grad: (self.optimizer.update(grad, state)[1], None),
            self.state,
            jnp.full(102, NAN, jnp.float32),
        )[::-1]
        with pytest.raises(FloatingPointError, match="100 steps in a row"):
            check_health({"opt_state": (state, None), "step": 102})

    def test_finds_the_state_wherever_it_is(self):
        assert check_health({"a": [self.state], "b": 1}).healthy
        for state in ((), (self.state, self.state)):
            with pytest.raises(ValueError, match="exactly one"):
                check_health(state)

    def test_of_many_members_the_worst_counts(self):
        state = self.state_with(
            scale=[[4, 8], [16, 32]],
            stuck_steps=[[1, 0], [4, 5]],
            consecutive_skipped_steps=[[9, 0], [5, 6]],
            skipped_steps=[[9, 0], [7, 8]],
            nonfinite_loss_steps=[[0, 0], [0, 3]],
        )
        assert check_health(state)[2:] == (32, 5, 6, 8, 3)
        with pytest.raises(FloatingPointError, match=r"skipped \(member 3 of 4\):"):
            check_health(state, patience=5)

    def test_one_that_is_skipped_for_long_is_not_hidden_by_one_that_is_stuck(self):
        state = self.state_with(
            scale=[4, 8], stuck_steps=[2, 0], consecutive_skipped_steps=[2, 2000],
            skipped_steps=[2, 2000], nonfinite_loss_steps=[0, 2000],
        )  # fmt: skip
        with pytest.raises(FloatingPointError, match=r"^2000 .*\(member 1 of 2\)"):
            check_health(state)

    @pytest.mark.parametrize("members", [2, 3])
    def test_of_several_losses_the_lowest_scale_counts(self, members):
        optimizer = LossScaleOptimizer(optax.sgd(0.5), SCALE, num_losses=2)
        update = jax.jit(jax.vmap(lambda *args: optimizer.update(*args)[1]))
        one = jnp.ones(members, jnp.float32)
        # Of the last member the second loss overflows in each step, of the first once.
        state = jax.vmap(optimizer.init)(one)
        for first in (INF, 1, 1):
            second = one.at[-1].set(INF)
            state = update([one, second.at[0].set(first)], state)
        scales = optimizer.current_loss_scale(state).tolist()
        assert scales[0] == [32, 16]
        assert scales[-1] == [32, 4]
        assert check_health(state)[2:] == (4, 1, 3, 3, 0)
        where = rf"skipped \(member {members - 1} of {members}\):"
        with pytest.raises(FloatingPointError, match=where):
            check_health(state, patience=1)
        assert "4 (2^2), could not go lower for 1 skipped" in report(state)
        for member, scale in enumerate([16, 32, 4] if members == 3 else [16, 4]):
            alone = jax.tree.map(lambda x, member=member: x[member], state)
            assert check_health(alone).loss_scale == scale
            assert f"  loss scale           {scale} (" in report(alone)
        # Not a member: of losses there is nothing to be told apart.
        with pytest.raises(FloatingPointError, match="still skipped:"):
            check_health(alone, patience=1)

    def test_of_no_members_there_is_nothing_to_say(self):
        for options in ({}, {"num_losses": 2}, {"track_leaves": True}):
            optimizer = LossScaleOptimizer(optax.sgd(0.5), **options)
            state = jax.vmap(optimizer.init)(jnp.zeros((0, 3)))
            for function in (check_health, report):
                with pytest.raises(ValueError, match=r"of no members.*shape \(0,\)"):
                    function(state)
        assert nonfinite_leaves(state, jnp.zeros(3)) == []

    @pytest.mark.parametrize(
        "scale", [0.0, -0.0, -1.0, INF, -INF, NAN, 1e-40, 2.0**-127, 2.0**127]
    )
    def test_a_damaged_scale_is_named(self, scale):
        number = repr(float(np.float32(scale))).replace("+", r"\+")
        message = f"The loss scale is {number}, .* damaged.*loss_scale_state=optimizer"
        state = self.state_with(scale)
        with pytest.raises(FloatingPointError, match=message):
            check_health(state)
        text = report(state)
        assert text.startswith("The loss scale is damaged.\n  loss scale     ")
        assert "which is not a valid loss scale" in text
        assert "begin the scale anew" in " ".join(text.split())
        # The advice helps.
        new = self.optimizer.init(jnp.float32(1)).loss_scale_state
        assert check_health(state._replace(loss_scale_state=new)).healthy

    @pytest.mark.parametrize("scale", [2.0**-126, 2.0**126])
    def test_the_bounds_themselves_are_no_damage(self, scale):
        assert check_health(self.state_with(scale)).loss_scale == scale
        assert "damaged" not in report(self.state_with(scale))

    def test_a_damaged_scale_is_worse_than_all_others(self):
        zeros = [0, 0, 0]
        state = self.state_with(
            scale=[4, NAN, 8], stuck_steps=[500, 0, 0],
            consecutive_skipped_steps=[500, 0, 0], skipped_steps=[500, 0, 0],
            nonfinite_loss_steps=zeros,
        )  # fmt: skip
        with pytest.raises(FloatingPointError, match=r"nan \(member 1 of 3\)"):
            check_health(state)
        state = self.state_with(
            scale=[[4, 8], [INF, 1], [8, 4]], stuck_steps=zeros,
            consecutive_skipped_steps=zeros, skipped_steps=zeros,
            nonfinite_loss_steps=zeros,
        )  # fmt: skip
        with pytest.raises(FloatingPointError, match=r"inf \(member 1 of 3\)"):
            check_health(state)

    def test_is_for_the_host(self):
        for transform in (jax.jit, lambda f: lambda s: lax.scan(f, s, length=1)):
            with pytest.raises(TypeError, match=r"for the host.*outside of jit"):
                transform(lambda s, _=None: (s, check_health(s).stuck_steps))(
                    self.state
                )

    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            ({"patience": 0}, ValueError, "patience must be .*at least 1"),
            ({"patience": "9"}, TypeError, "patience must be a Python number"),
            (
                {"max_consecutive_skipped_steps": 1.5},
                ValueError,
                "max_consecutive_skipped_steps must be a whole number",
            ),
            ({"raise_error": 0}, TypeError, "raise_error must be True or False"),
        ],
    )
    def test_refuses_invalid_arguments(self, options, error, message):
        with pytest.raises(error, match=message):
            check_health(self.state, **options)

    def test_changes_nothing(self):
        before = jax.tree.map(as_bits, self.state)
        check_health(self.state)
        assert jax.tree.map(as_bits, self.state) == before

    def test_boxed_arrays(self):
        nnx = pytest.importorskip("flax.nnx")
        model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, self.optimizer, wrt=nnx.Param)
        assert check_health(optimizer.opt_state).loss_scale == 16


class TestFrozenScale:
    """A function that was made once, before the loop, keeps the first scale."""

    MISTAKE = "value_and_grad and get_scaled_loss are called inside the step"
    START = jnp.float32(1)

    @staticmethod
    def half(param):
        """Overflows from a scale of 2**13 on; the loss itself is finite."""
        return (param.astype(jnp.float16) * 8).astype(jnp.float32)

    def train(self, optimizer, way, *, inside, steps=120):
        param, state = self.START, optimizer.init(self.START)
        before = state
        for _ in range(steps):
            current = state if inside else before
            # A warning of this mistake is not what is tested here.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                if way == "value_and_grad":
                    grad_fn = optimizer.value_and_grad(self.half, current)
                    _, grad = grad_fn(param)
                else:
                    scaled = optimizer.get_scaled_loss(self.half, current)
                    grad = optimizer.get_unscaled_gradients(
                        jax.grad(scaled)(param), state
                    )
            param, state = optimizer.apply_gradients(grad, param, state)
        return param, state

    @pytest.mark.parametrize("way", ["value_and_grad", "get_scaled_loss"])
    def test_is_named(self, way):
        optimizer = LossScaleOptimizer(optax.sgd(2.0**-5), track_leaves=True)
        param, state = self.train(optimizer, way, inside=False)
        assert param == self.START
        assert counts(state) == (120, 120, 0, 105)
        with pytest.raises(
            FloatingPointError, match=f"If it is finite, .*{self.MISTAKE}"
        ):
            check_health(state)
        untracked = state._replace(leaf_statistics=None)
        for seen, then in ((state, "trace_numerics"), (untracked, "learning rate")):
            text = " ".join(report(seen, self.START).split())
            assert text.index(self.MISTAKE) < text.index(then)
            assert "still adjusting" not in text

    @pytest.mark.parametrize("way", ["value_and_grad", "get_scaled_loss"])
    def test_is_not_named_where_the_step_has_the_current_state(self, way):
        optimizer = LossScaleOptimizer(optax.sgd(2.0**-5))
        param, state = self.train(optimizer, way, inside=True, steps=9)
        assert param == 1 - 6 * 8 * 2.0**-5
        assert optimizer.current_loss_scale(state) == 2**12
        assert counts(state) == (3, 0, 0, 0)
        assert report(state).startswith("The last step was applied.")
        assert check_health(state).healthy

    def test_is_named_before_the_scale_is_at_its_minimum(self):
        scale = DynamicLossScale(min_scale=2.0**-126)
        optimizer = LossScaleOptimizer(optax.sgd(0.5), scale, track_leaves=True)
        _, state = self.train(optimizer, "value_and_grad", inside=False, steps=40)
        assert counts(state) == (40, 40, 0, 0)
        text = " ".join(report(state, self.START).split())
        assert text.startswith("Many steps in a row were skipped.")
        assert self.MISTAKE in text
        with pytest.raises(FloatingPointError, match=self.MISTAKE):
            check_health(state, max_consecutive_skipped_steps=40)

    @pytest.mark.parametrize("skips", [1, 9, 18, 24])
    def test_is_not_suspected_at_the_start(self, skips):
        optimizer = LossScaleOptimizer(
            optax.sgd(0.5), DynamicLossScale(2.0**40), track_leaves=True
        )
        state = optimizer.init(self.START)
        for _ in range(skips):
            _, state = optimizer.update(self.START * INF, state)
        assert check_health(state).healthy
        text = report(state, self.START)
        assert self.MISTAKE not in " ".join(text.split())
        assert "still adjusting" in text

    def test_a_start_that_takes_dozens_of_steps_is_not_usual(self):
        optimizer = LossScaleOptimizer(optax.sgd(0.5), DynamicLossScale(2.0**100))
        state = optimizer.init(self.START)
        for _ in range(36):
            _, state = optimizer.update(self.START * INF, state)
        assert check_health(state).healthy
        text = " ".join(report(state).split())
        assert "still adjusting" not in text
        assert "start from a lower initial_scale" in text

    @pytest.mark.parametrize(
        ("scale", "value"),
        [
            (DynamicLossScale(), NAN),  # The loss explains the skips.
            (FixedLossScale(8.0, skip_nonfinite=True), 1),  # It does not fall.
            (DynamicLossScale(1.0), 1),
        ],
    )
    def test_is_not_suspected_where_it_cannot_be_the_cause(self, scale, value):
        optimizer = LossScaleOptimizer(
            optax.sgd(0.5), scale, check_loss=True, track_leaves=True
        )

        def step(state, grad):
            return optimizer.update(grad, state, value=jnp.float32(value))[1], None

        bad = jnp.full(120, INF, jnp.float32)
        state = lax.scan(step, optimizer.init(self.START), bad)[0]
        health = check_health(
            state, max_consecutive_skipped_steps=120, raise_error=False
        )
        assert not health.healthy
        assert health.consecutive_skipped_steps == 120
        for text in (health.message, report(state), report(state, self.START)):
            text = " ".join(text.split())
            assert self.MISTAKE not in text
            assert "still adjusting" not in text
