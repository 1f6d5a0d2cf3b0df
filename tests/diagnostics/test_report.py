"""The verdict on a state: its reason, the worst member, and when it raises."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import INF, NAN
from rules import RULES
from states import (
    LOST,
    ONE,
    OVERFLOW,
    PARAMS,
    SKIPPING,
    VETOED,
    VETOED_OVERFLOW,
    retry,
    rows_of,
    run,
    trainer,
    with_numbers,
)

from optax_lossscale import (
    DynamicLossScale,
    HeadroomLossScale,
    LossScale,
    LossScaleOptimizer,
    TolerantLossScale,
    all_finite,
)
from optax_lossscale._rules.dynamic import DynamicLossScaleState
from optax_lossscale.diagnostics import (
    Report,
    _reading,
    check_health,
    metrics,
    report,
)


class TestThresholds:
    @pytest.mark.parametrize(
        ("name", "limit"), [("stuck_steps", 100), ("consecutive_skipped_steps", 1000)]
    )
    def test_from_its_limit_on(self, name, limit):
        counts = {"skipped_steps": limit, "consecutive_skipped_steps": limit}
        state = with_numbers(**counts | {name: limit})
        verdict = report(state)
        assert not verdict.healthy
        assert getattr(verdict, name) == limit
        with pytest.raises(FloatingPointError) as error:
            check_health(state)
        assert str(error.value) == str(verdict)
        below = {key: n - 1 for key, n in (counts | {name: limit}).items()}
        state = with_numbers(**below)
        assert check_health(state) == report(state)
        assert report(state).healthy

    @pytest.mark.parametrize(
        "scale", [0.0, -1.0, INF, -INF, NAN, 1e-40, 2.0**-127, 2.0**127]
    )
    def test_a_damaged_scale(self, scale):
        state = with_numbers(scale)
        with pytest.raises(FloatingPointError, match="The loss scale is damaged"):
            check_health(state)
        verdict = report(state)
        assert rows_of(verdict)["loss scale"] == f"{np.float32(scale):.10g}"
        assert "loss_scale_state=optimizer.init" in verdict.advice[0]
        # After one step.
        assert "begins anew at the initial_scale" in verdict.diagnosis
        state = trainer("dynamic", False)[0].update(PARAMS, state, PARAMS)[1]
        assert np.isfinite(scale) or check_health(state).loss_scale == 2.0**15

    @pytest.mark.parametrize("scale", [2.0**-126, 2.0**126])
    def test_the_bounds_themselves_are_no_damage(self, scale):
        assert check_health(with_numbers(scale)).loss_scale == scale

    def test_plain_numbers(self):
        verdict = report(run(1.0, INF, LOST))
        numbers = 2.0**14, 2, 2, 0, 1, None, ()
        assert verdict == (True, *verdict[1:3], *numbers, "loss_or_gradients")
        assert [type(x) for x in verdict[3:-3]] == [float, int, int, int, int]

    def test_the_reason_is_logged_as_a_string(self):
        reason = report(run(INF)).reason
        assert [str(reason), f"{reason}"] == ["overflow"] * 2
        assert repr({"reason": reason}) == "{'reason': 'overflow'}"

    def test_is_a_report(self):
        verdict = report(run())
        assert isinstance(verdict, Report)


LATE_LOSS = (1.0, 1.0), LOST, LOST
EARLY_OVERFLOW = *[OVERFLOW] * 3, *LATE_LOSS
OVERFLOWS = 1.0, VETOED_OVERFLOW, INF, VETOED
NO_CHECK = {"check_loss": False}
HEADROOM = {"loss_scale": HeadroomLossScale()}
# How the state is made, and the reason that the report names.
REASONS = [
    (run, [], {}, "new_scale"),
    (run, [1.0], {"loss_scale": DynamicLossScale(8, 1)}, "new_scale"),
    (run, [1.0] * 12, {}, "none_skipped"),
    (run, [1.0], {"loss_scale": TolerantLossScale(0.1)}, "none_skipped"),
    (run, [LOST, (1.0, 1.0)], {}, "applied"),
    (run, [1.0], HEADROOM, "none_skipped"),
    (run, [LOST, (1.0, 1.0)], {"loss_scale": SKIPPING}, "applied"),
    (run, [LOST, OVERFLOW, (1.0, 1.0)], {}, "applied"),
    (run, [1.0, INF], {}, "overflow"),
    (run, [INF] * 2, {}, "overflow"),
    (run, [INF, 1.0], {}, "applied"),
    (run, [NAN] * 2, {"loss_scale": ONE}, "at_minimum"),
    (run, [INF, 1.0], {"loss_scale": DynamicLossScale(2.0)}, "low_scale"),
    # Nothing is checked, and the state says so: a gradient may have been nan.
    (run, [1.0, NAN], {"loss_scale": 1.0}, "unchecked"),
    (run, [NAN, 1.0], {"loss_scale": SKIPPING}, "applied"),
    (run, [NAN], {"loss_scale": SKIPPING}, "fixed_scale"),
    (run, [INF] * 25, {"loss_scale": DynamicLossScale(2.0**40)}, "long_overflow"),
    # The loss is the cause, though an early gradient overflowed.
    (run, EARLY_OVERFLOW, {}, "loss"),
    (run, EARLY_OVERFLOW, {"loss_scale": TolerantLossScale(0.1)}, "loss"),
    (run, EARLY_OVERFLOW, HEADROOM, "loss"),
    (run, LATE_LOSS, {"loss_scale": 8.0}, "loss"),
    # The gradients are the cause, though an early loss was not finite.
    (run, [LOST, (1.0, 1.0), OVERFLOW], {"loss_scale": SKIPPING}, "fixed_scale"),
    (run, [LOST, (1.0, 1.0), OVERFLOW], {}, "overflow"),
    (run, [LOST, LOST], {}, "loss"),
    # No loss is as is usual, also after a step whose gradients alone overflowed.
    (run, [OVERFLOW, LOST], {}, "loss_or_gradients"),
    (run, [*[LOST] * 3, OVERFLOW], {}, "loss_or_gradients"),
    (run, [*[OVERFLOW] * 9, LOST], {"loss_scale": ONE}, "loss_or_gradients"),
    (run, [LOST, OVERFLOW], {"loss_scale": SKIPPING}, "loss_or_gradients"),
    (retry, [1.0, 1.0], {}, "repeated"),
    (retry, [1.0], {"loss_scale": DynamicLossScale(8.0)}, "none_skipped"),
    (retry, [1.0, NAN], {}, "retries_failed"),
    (retry, [1.0], {"retries": 2}, "retries_failed"),
    (retry, [NAN], {"check_loss": True}, "loss"),
    (retry, [NAN], {"loss_scale": ONE}, "at_minimum"),
    (retry, [2.0**15, 1.0], {}, "low_scale"),
    # As if `minimize` were not called.
    (run, [INF, 1.0], {"retries": 24}, "applied"),
    (run, [VETOED] * 1000, NO_CHECK, "veto"),
    (run, [VETOED] * 1000, HEADROOM | NO_CHECK, "veto"),
    (run, [VETOED] * 1000, {"loss_scale": 8.0} | NO_CHECK, "veto"),
    (run, [VETOED, 1.0], NO_CHECK, "applied"),
    (run, OVERFLOWS, NO_CHECK, "overflow"),
    (run, OVERFLOWS, {"loss_scale": SKIPPING} | NO_CHECK, "fixed_scale"),
    (run, [VETOED, VETOED_OVERFLOW], NO_CHECK, "overflow"),
    (run, [(1.0, NAN, True)], {}, "loss"),
]


@pytest.mark.filterwarnings("ignore:update repeats nothing")
@pytest.mark.parametrize(("make", "steps", "options", "reason"), REASONS)
def test_the_reason(make, steps, options, reason):
    assert check_health(make(*steps, **options)).reason == reason


def test_a_state_that_looks_like_one_of_ours_is_not():
    class State(DynamicLossScaleState):
        pass

    state = run(INF)
    rule_state = State(*state.loss_scale_state)
    verdict = report(state._replace(loss_scale_state=rule_state))
    assert verdict.reason == "rule"
    assert verdict.diagnosis == (
        "The last step was skipped: the rule did not let its gradients pass."
    )


class AnyState(NamedTuple):
    """Fields that mean something else in the states of this package."""

    loss_scale: jax.Array
    good_steps: jax.Array
    overflowed: jax.Array
    hysteresis_left: jax.Array
    retries: jax.Array
    nonfinite_loss_steps: jax.Array
    skip_reasons: jax.Array
    is_fixed: jax.Array


class AnyRule(LossScale):
    def init(self):
        return AnyState(jnp.float32(1024), *[jnp.int32(0)] * 7)

    def update(self, grads, state, *, axis_name=None):
        finite = all_finite(grads, axis_name=axis_name)
        scale = jnp.where(finite, self(state), self(state) / 2)
        return state._replace(loss_scale=scale), finite


ANY_RULE = {"loss_scale": AnyRule()}


@pytest.mark.parametrize(
    ("steps", "options", "reason"),
    [
        ([], {}, "none_skipped"),
        ([1.0], {}, "none_skipped"),
        ([INF, 1.0], {}, "applied"),
        ([INF], {}, "rule"),
        ([INF] * 2, {}, "rule"),
        ([VETOED], NO_CHECK, "veto"),
        ([LOST] * 2, {}, "loss"),
        ([LOST, OVERFLOW], {}, "loss_or_gradients"),
    ],
)
def test_a_rule_may_call_its_fields_as_it_likes(steps, options, reason):
    state = run(*steps, **options | ANY_RULE)
    for number in range(5):
        numbers = dict.fromkeys(AnyState._fields[1:], jnp.int32(number))
        rule_state = state.loss_scale_state._replace(**numbers)
        verdict = report(state._replace(loss_scale_state=rule_state))
        assert verdict == report(state)
        assert verdict.reason == reason
        assert verdict.retries is None


class TestNotFinite:
    def test_parameters_are_named_and_counted(self):
        narrow = {"half": jnp.array([1, INF], jnp.float16), "wide": jnp.ones(2)}
        verdict = report(run(1.0), narrow)
        half = "params['half'], float16[2]: 1 inf, 0 nan of 2, first at [1]"
        assert verdict.diagnosis == f"Not finite: {half}. No step was skipped."
        with pytest.raises(FloatingPointError, match=r"params\['half'\]"):
            check_health(run(1.0), narrow)
        many = dict.fromkeys("abcde", jnp.float32(NAN))
        verdict = report(run(NAN, loss_scale=8.0), many)
        assert "'b'], float32[]: 0 inf, 1 nan of 1; params['c']" in verdict.diagnosis
        assert "params['d']" not in verdict.diagnosis
        assert "; and 2 more. No step was skipped." in verdict.diagnosis
        verdict = report(run(1.0, loss_scale=8.0), PARAMS)
        assert verdict[:3] == (True, "No step was skipped.", ())

    @pytest.mark.parametrize(("value", "healthy"), [(NAN, False), (INF, True)])
    def test_the_inner_state(self, value, healthy):
        state = run(1.0)._replace(inner_state={"nu": jnp.array([1.0, value])})
        assert report(state) == report(run(1.0))
        verdict = report(state, {})
        assert verdict.healthy == healthy
        assert "Not finite: inner_state['nu'], float32[2]" in verdict.diagnosis
        assert verdict.advice[0].startswith("Restore a checkpoint")

    def test_an_optimizer_that_begins_with_inf(self):
        state = LossScaleOptimizer(optax.contrib.reduce_on_plateau()).init(PARAMS)
        assert "inner_state.best_value" in check_health(state, PARAMS).diagnosis

    def test_models(self):
        model = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
        model.mean[...] = jnp.array([NAN, 1.0])
        assert "params.mean.value" in report(run(), model).diagnosis
        assert "params['mean'].value" in report(run(), nnx.state(model)).diagnosis
        verdict = report(run(), (jnp.tanh, jnp.ones(2), jnp.arange(2), None))
        assert verdict == report(run(), {})

    @pytest.mark.parametrize("params", ["params", jnp.tanh, [object()]])
    def test_what_holds_no_array_is_refused(self, params):
        with pytest.raises(TypeError, match=r"params must hold arrays.*got .* without"):
            report(run(), params)


COUNTS = "stuck_steps", "skipped_steps", "consecutive_skipped_steps"
# Numbers of members; the worst of them, and what is said of all.
MEMBERS = {
    "one skipped a step before": (
        {"scale": [4, 4, 8], "skipped_steps": [0, 0, 1]},
        (2,),
        "1 of 3; the last step: 0. The worst is member [2]. The last step was applied.",
    ),
    "one skipped the last step": (
        {"skipped_steps": [2, 3, 3, 0], "last_step_applied": [1, 0, 1, 1]},
        (1,),
        "3 of 4; the last step: 1. The worst is member [1].",
    ),
    "retries": (
        {"skipped_steps": [0] * 3, "retries": [0, 5, 2]},
        (1,),
        "0 of 3; the last step: 0. The worst is member [1]. No step was skipped. Pass",
    ),
    "none skipped": (
        {"skipped_steps": [0] * 3, "scale": [4, 8, 2]},
        (2,),
        "0 of 3; the last step: 0. The worst is member [2]. No step has been taken yet",
    ),
    # One that is skipped for long is not hidden by one that is stuck.
    "skipped for long": (
        dict.fromkeys(COUNTS[1:], (2, 2000))
        | {"stuck_steps": [2, 0], "skip_reasons": [1, 1]},
        (1,),
        "2 of 2; the last step: 0. The worst is member [1]. The last 2000 steps",
    ),
}


class TestManyMembers:
    @pytest.mark.parametrize(
        ("numbers", "member", "words"), MEMBERS.values(), ids=MEMBERS
    )
    def test_the_worst_is_named(self, numbers, member, words):
        state = with_numbers(**{"scale": [4] * len(numbers["skipped_steps"])} | numbers)
        verdict = report(state)
        assert verdict.diagnosis.startswith(f"Members that skipped steps: {words}")
        assert verdict.member == member
        assert verdict.loss_scale == state.loss_scale_state.loss_scale[member]
        assert verdict.skipped_steps == state.skipped_steps[member]
        assert verdict.healthy == (verdict.skipped_steps < 1000)

    # Some optimizers begin with inf.
    INNER = {"mu": np.float32([1, 1, NAN]), "best": np.float32([1, INF, 1])}
    MODEL = {"w": np.float32([[1, 1], [1, NAN], [1, 1]]), "shared": np.ones(2)}

    @pytest.mark.parametrize(
        ("inner", "params", "member", "healthy"),
        [
            ((), MODEL, 1, False),
            (INNER, np.ones(2), 2, False),
            ((), MODEL | {"w": np.ones((3, 2))}, 0, True),
        ],
    )
    def test_one_that_is_not_finite_is_worse(self, inner, params, member, healthy):
        state = with_numbers(scale=[4] * 3, skipped_steps=[5, 0, 0])
        verdict = report(state._replace(inner_state=inner), params)
        assert (verdict.healthy, verdict.member) == (healthy, (member,))

    def test_a_rule_with_arrays_of_its_own(self):
        state = with_numbers(scale=[4, 8], skipped_steps=[1, 0])
        rule = AnyState(jnp.array([4.0, 8.0]), *[jnp.arange(5)] * 7)
        assert report(state._replace(loss_scale_state=rule)).member == (0,)

    def test_the_reason_is_that_of_the_worst(self):
        optimizer = LossScaleOptimizer(optax.sgd(0.5), check_loss=True)

        @jax.vmap
        def step(grad, loss, veto):
            state = optimizer.init(grad)
            return optimizer.update(grad, state, grad, skip_if=veto, value=loss)[1]

        grads, losses = jnp.array([1.0, 1.0, INF]), jnp.array([1.0, NAN, 1.0])
        state = step(grads, losses, jnp.array([True, False, False]))
        assert state.skip_reasons.tolist() == [4, 2, 1]
        # Whatever was skipped before, a loss is worse than a usual overflow.
        for skipped in ([1, 1, 1], [1, 1, 9]):
            verdict = report(state._replace(skipped_steps=jnp.array(skipped)))
            assert (verdict.member, verdict.reason) == ((1,), "loss")
            assert verdict.diagnosis.startswith(
                "Members that skipped steps: 3 of 3; the last step: 3 (1 loss, "
                "1 overflow, 1 veto). The worst is member [1]. The last step was"
            )

    def test_the_reason_ranks_only_those_that_skip_now_and_within_the_limits(self):
        numbers = {
            "scale": [4] * 3,
            "skip_reasons": [0, 2, 1],
            "skipped_steps": [9] * 3,
        }
        numbers["last_step_applied"] = [0] * 3
        state = with_numbers(**numbers, consecutive_skipped_steps=[0, 1, 9])
        assert (report(state).member, report(state).reason) == ((1,), "loss")
        state = state._replace(stuck_steps=jnp.array([0, 0, 100]))
        assert (report(state).member, report(state).reason) == ((2,), "at_minimum")
        nothing = jnp.zeros(3, jnp.int32)
        state = state._replace(stuck_steps=nothing, consecutive_skipped_steps=nothing)
        assert report(state).member == (0,)
        # A veto is no loss: the one that lost more is worse, though it goes on.
        applied, skipped = jnp.array([False, False, True]), jnp.array([1, 1, 9])
        state = state._replace(last_step_applied=applied, skipped_steps=skipped)
        assert report(state).member == (2,)

    def test_their_leaves_come_first(self):
        state = with_numbers(scale=[4, 8], skipped_steps=[1, 0])
        verdict = report(state, jnp.array([1.0, NAN])).diagnosis
        assert verdict.startswith("Not finite: params, float32[2]: 0 inf, 1 nan")
        assert "first at [1]. Members that skipped steps: 1 of 2;" in verdict

    def test_the_worst_counts(self):
        state = with_numbers(
            scale=[[4, 8], [32, 16]],
            stuck_steps=[[1, 0], [5, 4]],
            consecutive_skipped_steps=[[9, 0], [6, 5]],
            skipped_steps=[[9, 0], [8, 7]],
            nonfinite_loss_steps=[[0, 0], [3, 0]],
        )
        verdict = report(state)
        assert verdict[3:] == (32, 8, 6, 5, 3, None, (1, 0), "loss_or_gradients")
        assert "Members that skipped steps: 3 of 4" in verdict.diagnosis
        assert "The worst is member [1, 0]." in verdict.diagnosis

    def test_a_damaged_scale_is_worse_than_all_others(self):
        state = with_numbers([4, NAN, 8], **dict.fromkeys(COUNTS, (500, 0, 0)))
        for params in (None, np.float32([NAN, 1, 1])):
            verdict = report(state, params)
            assert verdict.member == (1,)
            assert "member [1]. The loss scale is damaged" in verdict.diagnosis


class TestWhere:
    def test_finds_the_state_wherever_it_is(self):
        assert check_health({"a": [run()], "b": 1}).healthy
        for state in ((), (run(), run())):
            with pytest.raises(ValueError, match="exactly one"):
                report(state)

    def test_boxed_arrays(self):
        tx = LossScaleOptimizer(optax.adam(0.5), initial_scale=16.0)
        model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        verdict = report(optimizer.opt_state, nnx.state(model, nnx.Param))
        assert verdict.loss_scale == 16
        assert "No step has been taken yet" in verdict.diagnosis
        assert metrics(optimizer.opt_state)["log2_loss_scale"] == 4
        model.kernel[...] = model.kernel[...] * NAN
        with pytest.raises(FloatingPointError, match="kernel"):
            check_health(optimizer.opt_state, nnx.state(model, nnx.Param))


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_the_rules_of_the_package_skip_only_what_is_not_finite(rule):
    """The report knows their states; of other rules it says less."""
    assert isinstance(rule.init(), _reading.OURS)
