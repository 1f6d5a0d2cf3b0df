"""The verdict on a state: what it finds, what it advises, and when it raises."""

import dataclasses
import functools
import re
from typing import NamedTuple

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
    LossScale,
    LossScaleOptimizer,
    TolerantLossScale,
    all_finite,
)
from optax_lossscale._rules.dynamic import DynamicLossScaleState
from optax_lossscale.diagnostics import Report, check_health, metrics, report
from optax_lossscale.diagnostics._reading import Reason

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


ONE, HIGH = DynamicLossScale(1.0), DynamicLossScale(2.0**20)
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


def no_reason(*steps, **options):
    """Returns a state from before its field `skip_reasons`."""
    return run(*steps, **options)._replace(skip_reasons=None)


class AnyScale(NamedTuple):
    loss_scale: jax.Array


@dataclasses.dataclass(frozen=True)
class AtMostTwo(LossScale):
    """Skips larger gradients, although they are finite."""

    factor: float = 1.0

    def init(self):
        return AnyScale(jnp.float32(2.0**60))

    def update(self, grads, state, *, axis_name=None):
        passes = jnp.max(jnp.abs(grads["w"])) <= 2
        scale = jnp.where(passes, self(state), self(state) * self.factor)
        return AnyScale(scale), passes


ITS = "The last step was skipped: its gradients were not finite"
USUAL = (
    ". A few skips in a row are usual at the start, and a single one later, when the "
    "loss scale has grown too high."
)
TRACE = (
    "Run diagnostics.trace_numerics(loss_fn, params, batch, state=state) with the "
    "arguments of a skipped step. It names the line where inf or nan begins."
)
RETRIED = (
    "See why retries did not help: the loss is not finite, all retries are used up, "
    "minimize is not called, or the rule keeps the scale (min_scale, hysteresis)."
)
FROZEN = (
    "If the trace finds nothing at this scale, make sure that value_and_grad and "
    "get_scaled_loss are called inside the step, with the state that the update gets: "
    "a function made once before the loop keeps the first scale, and so does a second "
    "state. With scale_as_parameter, see whether the scale among the parameters is "
    "finite: report(state, params)."
)
GO_ON = "Then go on from here: skipped steps change neither parameters nor inner state."
KEEPS = "check_loss=True skips such steps without lowering the scale."
ALL = (
    "If you add gradients up yourself, start each step with zeros, also after a skip: "
    "an inf stays in the sum.",
    "If the loss is not finite, look for inf and nan in data and parameters, and for "
    f"an overflow in the forward pass. No loss scale helps there. {KEEPS}",
    "If the loss is finite, compute in float32 what overflows, clip gradients, lower "
    "the learning rate, or lower a high scale (fixed, min_scale or initial_scale).",
    GO_ON,
)
UPDATE = (
    "See by diagnostics.describe_nonfinite(grads) whether the skipped gradients are "
    "finite. If they are, your rule skips them for a reason of its own: its update "
    "says why."
)
# Of each reason an example, the diagnosis, and all of the advice.
WORDS = {
    "not_finite": (
        (lambda: (run(1.0), jnp.float16(INF))),
        "Not finite: params, float16[]: 1 inf, 0 nan of 1. No step was skipped.",
        (
            "Restore a checkpoint in which they are finite. Before the first step, "
            "initialize them anew.",
            "Keep parameters of float16 in float32 and cast them in the loss function: "
            "no step sees that a large value is inf once it is rounded.",
            "Take a rule that skips: dynamic, or FixedLossScale(..., "
            "skip_nonfinite=True). For updates that are not finite, chain "
            "optax.apply_if_finite(optax.identity(), 5) after the inner optimizer. "
            "Keep returned statistics by select_applied.",
        ),
    ),
    "damaged_scale": (
        lambda: with_numbers(NAN),
        "The loss scale is damaged: it is not a number from 2^-126 to 2^126. If it is "
        "inf or nan, the next step begins anew at the initial_scale of the rule.",
        (
            "Restore an earlier checkpoint, or begin the scale anew: state._replace("
            "loss_scale_state=optimizer.init(params).loss_scale_state).",
        ),
    ),
    "fixed_scale": (
        lambda: run(NAN, loss_scale=SKIPPING),
        f"{ITS} at this fixed loss scale.",
        (TRACE, *ALL),
    ),
    "at_minimum": (
        lambda: retry(NAN, loss_scale=ONE),
        f"{ITS}, though the loss scale cannot go lower.",
        (RETRIED, TRACE, *ALL),
    ),
    "retries_failed": (
        lambda: retry(NAN),
        f"{ITS}, in spite of retries.",
        (RETRIED, TRACE, *ALL),
    ),
    "loss": (
        lambda: run(LOST),
        "The last step was skipped: its loss was not finite.",
        (
            TRACE,
            "Look for inf and nan in data and parameters, and for an overflow in the "
            "forward pass. No loss scale helps there.",
            GO_ON,
        ),
    ),
    "loss_or_gradients": (
        lambda: run(*[LOST] * 3, OVERFLOW),
        "The last 4 steps were skipped: their loss or gradients were not finite.",
        (TRACE, *ALL),
    ),
    "long_overflow": (
        lambda: run(*[INF] * 25, loss_scale=DynamicLossScale(2.0**40)),
        "The last 25 steps were skipped: their gradients were not finite, for longer "
        "than is usual.",
        (TRACE, FROZEN, *ALL),
    ),
    "rule": (
        lambda: run(*[10.0] * 101, loss_scale=AtMostTwo()),
        "The last 101 steps were skipped: the rule did not let their gradients pass.",
        (UPDATE, TRACE, *ALL),
    ),
    "overflow": (
        lambda: run(INF, INF),
        "The last 2 steps were skipped: their gradients were not finite" + USUAL,
        (f"If they continue: {TRACE}",),
    ),
    "veto": (
        lambda: run(VETOED),
        "The last step was vetoed by skip_if. It counts as skipped, and check_health "
        "allows any number of vetoes.",
        (),
    ),
    "low_scale": (
        lambda: run(INF, 1.0, loss_scale=DynamicLossScale(2.0)),
        "The last step was applied, but the loss scale is too low to help.",
        (
            "Unless you chose it, run diagnostics.trace_numerics(loss_fn, params, "
            "batch, scale=2.0**15). It names the line that overflows at that scale, if "
            "one does.",
            f"If now and then a batch has a loss of nan or inf: {KEEPS}",
        ),
    ),
    "applied": (
        lambda: run(INF, 1.0, retries=24),
        "The last step was applied.",
        (),
    ),
    "repeated": (
        lambda: retry(1.0, 1.0),
        "No step was skipped. Passes repeated instead: 5.",
        (),
    ),
    "new_scale": (run, "No step has been taken yet, or the scale has just grown.", ()),
    "unchecked": (
        lambda: run(NAN, loss_scale=1.0),
        "No step was skipped. The state does not tell more: a fixed loss scale checks "
        "no gradients, unless it has skip_nonfinite=True.",
        (
            "Pass the parameters, report(state, params), to see whether they are "
            "finite.",
        ),
    ),
    "none_skipped": (lambda: run(1.0), "No step was skipped.", ()),
}


@pytest.mark.filterwarnings("ignore:update repeats nothing")
@pytest.mark.parametrize("reason", Reason)
def test_the_words_of_each_reason(reason):
    make, diagnosis, advice = WORDS[reason]
    made = make()
    verdict = report(*made) if type(made) is tuple else report(made)
    assert verdict.reason == reason
    assert (verdict.diagnosis, verdict.advice) == (diagnosis, advice)


@pytest.mark.filterwarnings("ignore:update repeats nothing")
@pytest.mark.parametrize("skipped", [VETOED, LOST, OVERFLOW])
def test_retries_are_no_topic_once_a_step_is_applied(skipped):
    verdict = report(run(skipped, (1.0, 1.0), retries=2))
    assert (verdict.reason, verdict.retries, verdict.advice) == ("applied", 0, ())


def test_a_rule_of_a_user_may_skip_finite_gradients():
    verdict = report(run(LOST, LOST, (10.0, 1.0), loss_scale=AtMostTwo()))
    assert verdict.diagnosis == (
        "The last 3 steps were skipped: their loss was not finite, or the rule did not "
        "let their gradients pass."
    )
    assert verdict.advice == (UPDATE, TRACE, *ALL)
    # If the scale falls, a few skips are no reason to worry.
    again = UPDATE, f"If they continue: {TRACE}"
    for steps, advice in ((1, ()), (2, again), (25, (UPDATE, TRACE, FROZEN, *ALL))):
        verdict = report(run(*[10.0] * steps, loss_scale=AtMostTwo(0.5)))
        assert (verdict.reason, verdict.advice) == ("rule", advice)
        assert verdict.diagnosis.endswith("gradients pass.")


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


# Sentences about skipped steps. The last step alone may be a veto.
SENTENCES = [
    (
        run,
        [INF] * 2,
        "The last 2 steps were skipped: their gradients were not finite. A",
    ),
    (run, [OVERFLOW, LOST], "The last 2 steps were skipped: their loss or gradients"),
    (run, [LOST, (1.0, 1.0), OVERFLOW], "The last step was skipped: its gradients"),
    (run, [OVERFLOW, (1.0, 1.0), LOST], "The last step was skipped: its loss was"),
    (run, [LOST, (1.0, 1.0, True), LOST], "The last 2 steps were skipped: their loss"),
    (
        run,
        [1.0, VETOED_OVERFLOW, INF, VETOED],
        "The last step was vetoed by skip_if. Before it, the last 2 steps were "
        "skipped: their gradients were not finite. A few",
    ),
    (
        run,
        [LOST, VETOED],
        "The last step was vetoed by skip_if. Before it, the last step was skipped: "
        "its loss was not finite.",
    ),
    # No reasons are stored, but the counters tell something.
    (no_reason, [VETOED], "The last step was vetoed by skip_if. It counts"),
    (no_reason, [INF], "Apart from vetoes, the last step was skipped: its gradients"),
    (no_reason, [INF, VETOED], "Apart from vetoes, the last step was skipped: its"),
    (
        no_reason,
        [LOST] * 2,
        "Apart from vetoes, the last 2 steps were skipped: their l",
    ),
    (
        no_reason,
        [LOST, (1.0, 1.0), OVERFLOW],
        "Apart from vetoes, the last step was skipped: its loss or gradients were not",
    ),
    (
        no_reason,
        [*[LOST] * 5, OVERFLOW],
        "Apart from vetoes, the last 6 steps were skipped: their loss or gradients w",
    ),
]


@pytest.mark.parametrize(("make", "steps", "words"), SENTENCES)
def test_sentences_about_skipped_steps(make, steps, words):
    assert report(make(*steps)).diagnosis.startswith(words)


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


def rows_of(verdict):
    """Returns the rows of numbers of a printed report, by their names."""
    return dict(re.findall(r"^  (\S.*?)  +(.*)$", str(verdict), re.M))


def test_every_number_that_tells_something_has_a_row():
    verdict = report(run(*[NAN] * 5, LOST, loss_scale=DynamicLossScale(4.0)))
    assert rows_of(verdict) == {
        "loss scale": "1 (2^0)",
        "skipped steps": "6, of which 6 in a row",
        "stuck steps": "3 of these",
        "loss not finite": "1 steps",
    }
    assert max(map(len, str(verdict).splitlines())) < 80
    steps = re.findall(r"^(\d)\. ", str(verdict), re.M)
    assert list(map(int, steps)) == [*range(1, 1 + len(verdict.advice))]
    state = retry(1.0, 1.0)
    assert rows_of(report(state))["repeated passes"] == "5"
    assert report(state)[3:] == (2.0**15, 0, 0, 0, None, 5, (), "repeated")
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
