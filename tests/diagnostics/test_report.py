"""The verdict on a state: what it finds, what it advises, and when it raises."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import INF, NAN

from optax_lossscale import (
    DynamicLossScale,
    FixedLossScale,
    HeadroomLossScale,
    LossScaleOptimizer,
    TolerantLossScale,
)
from optax_lossscale.diagnostics import Report, check_health, metrics, report

PARAMS = {"b": np.zeros(2, np.float32), "w": np.ones(3, np.float32)}
# A step is a gradient, perhaps with a loss, and perhaps with a veto.
LOST, OVERFLOW = (NAN, NAN), (INF, 1.0)
VETOED, VETOED_OVERFLOW = (1.0, 1.0, True), (INF, 1.0, True)
SKIPPING = FixedLossScale(8.0, skip_nonfinite=True)
MISTAKE = "value_and_grad and get_scaled_loss are called inside the step"


@functools.cache
def trainer(loss_scale, check_loss, **options):
    """Returns an optimizer, and a function that takes its state through steps."""
    inner = optax.sgd(0.5)
    optimizer = LossScaleOptimizer(inner, loss_scale, check_loss=check_loss, **options)

    @jax.jit
    def train(state, columns, count):
        def step(i, state):
            grad, loss, veto = (x[i] for x in columns)
            grads = jax.tree.map(lambda x: jnp.full_like(x, grad), PARAMS)
            extra = {"value": loss} if check_loss else {}
            return optimizer.update(grads, state, PARAMS, skip_if=veto, **extra)[1]

        return jax.lax.fori_loop(0, count, step, state)

    return optimizer, train


def run(*steps, loss_scale="dynamic", check_loss=None, **options):
    """Returns the state after steps."""
    if check_loss is None:
        check_loss = any(isinstance(step, tuple) for step in steps)
    optimizer, train = trainer(loss_scale, check_loss, **options)
    state = optimizer.init(PARAMS)
    if not steps:
        return state
    steps = [step if isinstance(step, tuple) else (step,) for step in steps]
    steps = [step + (1.0, False)[len(step) - 1 :] for step in steps]
    # The first steps alone run. Of few lengths: few programs.
    grads, losses, vetoes = np.resize(np.float32(steps), (max(8, len(steps)), 3)).T
    return train(state, (grads, losses, vetoes > 0), len(steps))


def retry(*factors, **options):
    """Returns the state after steps of `minimize` in which the loss has these factors.

    The derivative with respect to float16 numbers overflows at 2**20, not at 2**15.
    """
    options = {"loss_scale": HIGH, "retries": 24} | options
    optimizer = LossScaleOptimizer(optax.sgd(0.5), **options)

    def loss_fn(params, factor):
        half = params.astype(jnp.float16)
        return jnp.sum(half.astype(jnp.float32)) * factor

    def step(carry, factor):
        return optimizer.minimize(loss_fn, *carry, factor)[:2], None

    param = jnp.float32(1)
    carry = param, optimizer.init(param)
    return jax.lax.scan(step, carry, jnp.array(factors, jnp.float32))[0][1]


def with_numbers(scale=4.0, **numbers):
    """Returns a state with this loss scale and these counts."""
    state = run()
    rule = state.loss_scale_state._replace(loss_scale=jnp.float32(scale))
    numbers = {name: jnp.asarray(x, jnp.int32) for name, x in numbers.items()}
    return state._replace(loss_scale_state=rule, **numbers)


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
        assert verdict == (True, *verdict[1:3], 2.0**14, 2, 2, 0, 1, None, ())
        assert [type(x) for x in verdict[3:-2]] == [float, int, int, int, int]
        assert isinstance(verdict, Report)


ONE, HIGH = DynamicLossScale(1.0), DynamicLossScale(2.0**20)
LATE_LOSS = (1.0, 1.0), LOST, LOST
EARLY_OVERFLOW = *[OVERFLOW] * 3, *LATE_LOSS
OVERFLOWS = 1.0, VETOED_OVERFLOW, INF, VETOED
NOT_FINITE, NO_CHECK = "gradients were not finite", {"check_loss": False}
BEFORE = "Before it, the last 2 steps were skipped: their gradients"
AGAIN, TRACE = "If they continue", "Run diagnostics"
# How the state is made, what the diagnosis says, and how the advice begins.
DIAGNOSES = [
    (run, [], {}, "No step has been taken yet, or the scale has just grown.", ""),
    (run, [1.0], {"loss_scale": DynamicLossScale(8, 1)}, "has just grown.", ""),
    (run, [1.0] * 12, {}, "No step was skipped.", ""),
    (run, [1.0], {"loss_scale": TolerantLossScale(0.1)}, "No step was skipped.", ""),
    (run, [LOST, (1.0, 1.0)], {}, "The last step was applied.", ""),
    (run, [1.0], {"loss_scale": HeadroomLossScale()}, "No step was skipped.", ""),
    (run, [LOST, (1.0, 1.0)], {"loss_scale": SKIPPING}, "last step was applied.", ""),
    (run, [LOST, OVERFLOW, (1.0, 1.0)], {}, "The last step was applied.", ""),
    (run, [1.0, INF], {}, "The last step was skipped: its gradients", ""),
    (run, [INF] * 2, {}, "A few skips in a row are usual at the start", AGAIN),
    (run, [INF, 1.0], {}, "The last step was applied.", ""),
    (run, [NAN] * 2, {"loss_scale": ONE}, "the loss scale cannot go lower", TRACE),
    (run, [INF, 1.0], {"loss_scale": DynamicLossScale(2.0)}, "too low", "Unless"),
    # Nothing is checked, and the state says so: a gradient may have been nan.
    (run, [1.0, NAN], {"loss_scale": 1.0}, "loss scale checks no gradients", "Pass"),
    (run, [NAN, 1.0], {"loss_scale": SKIPPING}, "The last step was applied.", ""),
    (run, [NAN], {"loss_scale": SKIPPING}, "at this fixed loss scale", TRACE),
    # The loss is the cause, though an early gradient overflowed.
    (run, EARLY_OVERFLOW, {}, "skipped: their loss was not finite.", TRACE),
    *(
        (run, EARLY_OVERFLOW, {"loss_scale": rule}, "their loss was not finite.", TRACE)
        for rule in (TolerantLossScale(0.1), HeadroomLossScale())
    ),
    (run, LATE_LOSS, {"loss_scale": 8.0}, "their loss was not finite.", TRACE),
    # The gradients are the cause, though an early loss was not finite. At a fixed scale
    # steps that are not stuck were skipped because of the loss.
    (run, [LOST, (1.0, 1.0), OVERFLOW], {"loss_scale": SKIPPING}, NOT_FINITE, TRACE),
    (run, [OVERFLOW, (1.0, 1.0), LOST, OVERFLOW], {}, "their loss or gradients", AGAIN),
    # All skips are in a row, so the counts tell.
    (run, [LOST, LOST], {}, "their loss was not finite.", TRACE),
    (retry, [1.0, 1.0], {}, "Overflows that cost no batch: 5.", ""),
    (retry, [1.0], {"loss_scale": DynamicLossScale(8.0)}, "No step was skipped.", ""),
    (retry, [1.0, NAN], {}, f"{NOT_FINITE}, in spite of retries.", "See why"),
    (retry, [1.0], {"retries": 2}, f"{NOT_FINITE}, in spite of retries.", "See why"),
    (retry, [NAN], {"check_loss": True}, "its loss was not finite.", TRACE),
    (retry, [NAN], {"loss_scale": ONE}, "though the loss scale cannot go", "See why"),
    (retry, [2.0**15, 1.0], {}, "too low to help.", "Unless"),
    # As if `minimize` were not called.
    (run, [INF, 1.0], {"retries": 24}, "The last step was applied.", "See why"),
    *(
        (run, [VETOED] * 1000, {"loss_scale": rule} | NO_CHECK, "vetoed by skip_if", "")
        for rule in ("dynamic", HeadroomLossScale(), 8.0)
    ),
    (run, [VETOED, 1.0], NO_CHECK, "The last step was applied.", ""),
    (run, OVERFLOWS, NO_CHECK, BEFORE, AGAIN),
    (run, OVERFLOWS, {"loss_scale": HeadroomLossScale()} | NO_CHECK, BEFORE, AGAIN),
    (run, [VETOED, VETOED_OVERFLOW], NO_CHECK, "last step was skipped: its grad", ""),
    (run, [(1.0, NAN, True)], {}, "its loss was not finite.", TRACE),
]


@pytest.mark.filterwarnings("ignore:update repeats nothing")
@pytest.mark.parametrize(("make", "steps", "options", "diagnosis", "advice"), DIAGNOSES)
def test_diagnosis_and_advice(make, steps, options, diagnosis, advice):
    with jax.numpy_dtype_promotion("standard"):  # For MultiSteps.
        verdict = check_health(make(*steps, **options))
    assert diagnosis in verdict.diagnosis
    first = verdict.advice[0] if verdict.advice else ""
    assert (first[: len(advice)], bool(first)) == (advice, bool(advice))


def rows_of(verdict):
    """Returns the rows of numbers of a printed report, by their names."""
    return dict(re.findall(r"^  (\S.*?)  +(.*)$", str(verdict), re.M))


def test_every_number_that_tells_something_has_a_row():
    verdict = report(run(*[NAN] * 5, LOST, loss_scale=DynamicLossScale(4.0)))
    assert rows_of(verdict) == {
        "loss scale": "1 (2^0)",
        "skipped steps": "6, of which 6 in a row",
        "at lowest scale": "3 of these",
        "loss not finite": "1 steps",
    }
    assert max(map(len, str(verdict).splitlines())) < 80
    steps = re.findall(r"^(\d)\. ", str(verdict), re.M)
    assert list(map(int, steps)) == [*range(1, 1 + len(verdict.advice))]
    state = retry(1.0, 1.0)
    assert rows_of(report(state))["repeated passes"] == "5"
    assert report(state)[3:] == (2.0**15, 0, 0, 0, None, 5, ())
    assert metrics(state)["retries"] == 5


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


class TestFrozenScale:
    """A function that was made once, before the loop, keeps the first scale."""

    @pytest.mark.filterwarnings("ignore:The loss scale is a constant")
    def test_is_named(self):
        optimizer = LossScaleOptimizer(
            optax.sgd(2.0**-5), DynamicLossScale(min_scale=2.0**-126)
        )
        param = jnp.float32(1)
        state = optimizer.init(param)
        grad_fn = optimizer.value_and_grad(  # At 2**15 this overflows.
            lambda x: (x.astype(jnp.float16) * 8).astype(jnp.float32), state
        )
        for _ in range(26):
            param, state = optimizer.apply_gradients(grad_fn(param)[1], param, state)
        assert param == 1
        verdict = report(state)
        assert MISTAKE in verdict.advice[1]
        assert "for longer than is usual" in verdict.diagnosis

    @pytest.mark.parametrize(
        ("steps", "loss_scale"),
        [
            ([INF] * 24, DynamicLossScale(2.0**40)),  # A start that is usual.
            ([LOST] * 120, DynamicLossScale()),  # The loss explains the skips.
            ([OVERFLOW] * 120, SKIPPING),  # It does not fall.
            ([INF] * 120, ONE),
        ],
    )
    def test_is_not_suspected_where_it_cannot_be_the_cause(self, steps, loss_scale):
        verdict = report(run(*steps, loss_scale=loss_scale))
        assert not any(MISTAKE in text for text in verdict.advice)


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
        "0 of 3; the last step: 0. The worst is member [1]. No step was skipped. Over",
    ),
    "none skipped": (
        {"skipped_steps": [0] * 3, "scale": [4, 8, 2]},
        (2,),
        "0 of 3; the last step: 0. The worst is member [2]. No step has been taken yet",
    ),
    # One that is skipped for long is not hidden by one that is stuck.
    "skipped for long": (
        dict.fromkeys(COUNTS[1:], (2, 2000)) | {"stuck_steps": [2, 0]},
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
        rule = state.loss_scale_state._replace(good_steps=jnp.arange(5))
        assert report(state._replace(loss_scale_state=rule)).member == (0,)

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
        assert verdict[3:] == (32, 8, 6, 5, 3, None, (1, 0))
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
