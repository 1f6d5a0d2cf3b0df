"""The words of a report: of each reason the diagnosis, and all of the advice."""

import dataclasses
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest
from helpers import INF, NAN
from states import (
    LOST,
    ONE,
    OVERFLOW,
    SKIPPING,
    VETOED,
    VETOED_OVERFLOW,
    retry,
    rows_of,
    run,
    with_numbers,
)

from optax_lossscale import DynamicLossScale, LossScale, LossScaleOptimizer
from optax_lossscale.diagnostics import metrics, report
from optax_lossscale.diagnostics._reading import Reason

MISTAKE = "value_and_grad and get_scaled_loss are called inside the step"


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
