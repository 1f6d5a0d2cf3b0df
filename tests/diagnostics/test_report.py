"""The verdict on a state: what it finds, what it advises, and when it raises."""

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
    scale_as_parameter,
)
from optax_lossscale.diagnostics import (
    Report,
    check_health,
    metrics,
    report,
    trace_numerics,
)

PARAMS = {"b": jnp.zeros(2), "w": jnp.ones(3)}
# A step is a gradient, or a gradient and a loss.
LOST = (NAN, NAN)
COUNTING = optax.sgd(optax.constant_schedule(0.5))
NOTHING = """
What to do: nothing, as far as the state tells. If the loss does not fall, run
diagnostics.trace_numerics(loss_fn, params, batch, state=state)."""
SKIPPING = FixedLossScale(8.0, skip_nonfinite=True)
MISTAKE = "value_and_grad and get_scaled_loss are called inside the step"


def run(*steps, loss_scale="dynamic", inner=None, **options):
    """Returns the state after steps with these gradients, or gradients and losses."""
    check_loss = any(isinstance(step, tuple) for step in steps)
    inner = optax.sgd(0.5) if inner is None else inner
    optimizer = LossScaleOptimizer(inner, loss_scale, check_loss=check_loss, **options)
    pairs = [step if isinstance(step, tuple) else (step, 1.0) for step in steps]

    def step(state, pair):
        grads = jax.tree.map(lambda x: jnp.full_like(x, pair[0]), PARAMS)
        extra = {"value": pair[1]} if check_loss else {}
        return optimizer.update(grads, state, PARAMS, **extra)[1], None

    state = optimizer.init(PARAMS)
    if pairs:
        state, _ = jax.lax.scan(step, state, jnp.array(pairs, jnp.float32))
    return state


def with_numbers(scale=4.0, **numbers):
    """Returns a state with this loss scale and these counts."""
    state = run()
    rule = state.loss_scale_state._replace(loss_scale=jnp.float32(scale))
    numbers = {name: jnp.asarray(x, jnp.int32) for name, x in numbers.items()}
    return state._replace(loss_scale_state=rule, **numbers)


def text_of(found):
    return " ".join(f"{found}".split())


class TestThresholds:
    @pytest.mark.parametrize(
        ("name", "limit"), [("stuck_steps", 100), ("consecutive_skipped_steps", 1000)]
    )
    def test_from_its_limit_on(self, name, limit):
        counts = {"skipped_steps": limit, "consecutive_skipped_steps": limit}
        state = with_numbers(**counts | {name: limit})
        found = report(state)
        assert not found.healthy
        assert getattr(found, name) == limit
        with pytest.raises(FloatingPointError) as error:
            check_health(state)
        assert str(error.value) == str(found)
        below = {key: n - 1 for key, n in (counts | {name: limit}).items()}
        state = with_numbers(**below)
        assert check_health(state) == report(state)
        assert report(state).healthy

    def test_after_steps_that_are_all_skipped(self):
        state = run(*[NAN] * 101, loss_scale=DynamicLossScale(2.0))
        with pytest.raises(FloatingPointError, match="The last 101 steps were skipped"):
            check_health({"opt_state": (state, None), "step": 101})
        assert report(state)[3:7] == (1.0, 101, 101, 100)

    @pytest.mark.parametrize(
        "scale", [0.0, -0.0, -1.0, INF, -INF, NAN, 1e-40, 2.0**-127, 2.0**127]
    )
    def test_a_damaged_scale(self, scale):
        state = with_numbers(scale)
        with pytest.raises(FloatingPointError, match="The loss scale is damaged"):
            check_health(state)
        found = report(state)
        assert f"loss scale       {np.float32(scale):.10g}\n" in str(found)
        assert "loss_scale_state=optimizer.init" in found.advice[0]
        # The advice helps.
        new = LossScaleOptimizer(optax.sgd(0.5)).init(PARAMS).loss_scale_state
        assert report(state._replace(loss_scale_state=new)).healthy

    @pytest.mark.parametrize("scale", [2.0**-126, 2.0**126])
    def test_the_bounds_themselves_are_no_damage(self, scale):
        assert check_health(with_numbers(scale)).loss_scale == scale

    def test_plain_numbers(self):
        found = report(run(1.0, INF, LOST))
        assert found == (True, *found[1:3], 2.0**14, 2, 2, 0, 1, None)
        assert [type(x) for x in found[3:-1]] == [float, int, int, int, int]
        assert isinstance(found, Report)
        assert repr(found) == str(found)


class TestWhatNoStateTells:
    """Training that gets nowhere, with finite gradients."""

    x = jnp.ones((8, 4), jnp.float32)
    params = {"w": jnp.ones((4, 4), jnp.float32)}

    @staticmethod
    def hidden_overflow(params, x):
        hidden = (x @ params["w"]).astype(jnp.float16) * jnp.float16(100)
        norm = jax.lax.rsqrt(jnp.mean(hidden * hidden, axis=-1, keepdims=True))
        return jnp.mean(((hidden * norm).astype(jnp.float32) - 2) ** 2)

    @staticmethod
    def in_float32(params, x):
        return jnp.mean((x @ params["w"] - 1) ** 2)

    @pytest.mark.parametrize(
        ("name", "finding"),
        [
            ("hidden_overflow", r"mul float16\[8,4\], forward pass: inf begins"),
            ("in_float32", "No operation computes in float16"),
        ],
    )
    def test_the_report_names_what_does(self, name, finding):
        loss_fn = getattr(self, name)
        optimizer = LossScaleOptimizer(optax.sgd(0.1), DynamicLossScale(2.0))
        params, state = self.params, optimizer.init(self.params)
        for _ in range(3):
            params, state, loss = optimizer.minimize(loss_fn, params, state, self.x)
        assert (float(loss) == 4) == (name == "hidden_overflow")
        found = report(state, params)
        assert found[:3] == (True, "No step was skipped.", ())
        assert str(found).endswith(NOTHING)
        trace = trace_numerics(loss_fn, params, self.x, state=state)
        assert re.search(finding, " ".join(str(trace).split()))

    def test_a_trainer_that_does_not_scale(self):
        params = self.params | {"loss_scale": jnp.float32(2.0**15)}
        optimizer = scale_as_parameter(LossScaleOptimizer(optax.sgd(0.1)))
        grads = jax.grad(self.in_float32)(params, self.x)
        updates, state = optimizer.update(grads, optimizer.init(params), params)
        params = optax.apply_updates(params, updates)
        assert str(report(state, params)).endswith(NOTHING)


class TestDiagnosis:
    @pytest.mark.parametrize(
        ("inner", "steps", "diagnosis"),
        [
            (COUNTING, 0, "No step has been taken yet."),
            (COUNTING, 1, "No step was skipped."),
            # Only a part of the window: the inner optimizer has counted no step.
            (optax.MultiSteps(COUNTING, 2), 1, "No step was skipped."),
            # The scale has just grown, and SGD counts no steps.
            (optax.sgd(1.0), 2, "No step was skipped."),
        ],
    )
    def test_nothing_was_skipped(self, inner, steps, diagnosis):
        with jax.numpy_dtype_promotion("standard"):  # For MultiSteps.
            optimizer = {"inner": inner, "dynamic_growth_steps": 2}
            state = run(*[1.0] * steps, loss_scale=None, **optimizer)
        found = report(state)
        assert found[:3] == (True, diagnosis, ())
        assert str(found).endswith(NOTHING)

    def test_a_single_late_skip_asks_for_nothing(self):
        found = report(run(*[1.0] * 9, INF))
        assert found.diagnosis.startswith("The last step was skipped: its gradients")
        assert "a single one later, when the loss scale has grown" in found.diagnosis
        assert (found.healthy, found.advice) == (True, ())

    def test_a_few_skips_at_the_start(self):
        found = report(run(INF, INF, INF))
        assert str(found).splitlines()[3:6] == [
            "  loss scale       4096 (2^12)",
            "  skipped steps    3, of which 3 in a row",
            "What to do:",
        ]
        assert "A few skips in a row are usual at the start" in found.diagnosis
        (advice,) = found.advice
        assert advice.startswith("If they continue: Run diagnostics.trace_numerics(")
        assert max(map(len, str(found).splitlines())) < 80
        assert report(run(INF, INF, 1.0))[1:3] == ("The last step was applied.", ())

    def test_at_the_lowest_scale_the_trace_comes_first(self):
        found = report(run(*[NAN] * 5, loss_scale=DynamicLossScale(4.0)))
        assert "though the loss scale cannot go lower" in found.diagnosis
        assert found.advice[0].startswith("Run diagnostics.trace_numerics(loss_fn,")
        assert found.advice[1].startswith("If the loss is not finite")
        assert found.advice[2].startswith("If the loss is finite")
        assert "  at lowest scale  3 of these\n" in str(found)
        numbers = [line[:3] for line in str(found).splitlines() if line[0].isdigit()]
        assert numbers == ["1. ", "2. ", "3. ", "4. "]

    def test_a_scale_that_has_fallen_to_one(self):
        found = report(run(INF, INF, 1.0, loss_scale=DynamicLossScale(2.0)))
        assert "loss scale is too low to help" in found.diagnosis
        assert "scale=2.0**15" in found.advice[0]
        assert found.healthy

    @pytest.mark.parametrize("scale", [1.0, 8.0])
    def test_a_fixed_scale_is_what_its_user_wants(self, scale):
        # Nothing is checked, and the state says so: a gradient may have been nan.
        state = run(1.0, NAN, loss_scale=scale)
        found = report(state)
        assert "a fixed loss scale checks no gradients" in text_of(found)
        assert "low" not in text_of(found)
        assert found.healthy
        assert report(state, PARAMS)[:3] == (True, "No step was skipped.", ())
        skipping = FixedLossScale(scale, skip_nonfinite=True)
        found = report(run(1.0, NAN, 1.0, loss_scale=skipping))
        assert found[1:3] == ("The last step was applied.", ())
        found = report(run(1.0, NAN, NAN, loss_scale=skipping))
        assert "not finite at this fixed loss scale." in found.diagnosis
        assert "trace_numerics" in found.advice[0]

    @pytest.mark.parametrize(
        "loss_scale", ["dynamic", TolerantLossScale(0.1), HeadroomLossScale(), 8.0]
    )
    def test_the_loss_is_the_cause_though_an_early_gradient_overflowed(
        self, loss_scale
    ):
        early = [(INF, 1.0)] * 3 if loss_scale != 8.0 else []
        found = report(run(*early, (1.0, 1.0), LOST, LOST, loss_scale=loss_scale))
        assert found.diagnosis == (
            "The last 2 steps were skipped: their loss was not finite."
        )
        assert "No loss scale helps" in found.advice[1]
        assert "  loss not finite  2 steps\n" in str(found)

    def test_the_gradients_are_the_cause_though_an_early_loss_was_not_finite(self):
        # At a fixed scale, steps that are not stuck were skipped because of the loss.
        steps = [LOST, (1.0, 1.0), (INF, 1.0)]
        assert (
            "its gradients were" in report(run(*steps, loss_scale=SKIPPING)).diagnosis
        )
        steps = [(INF, 1.0), (1.0, 1.0), LOST, (NAN, 1.0)]
        assert "their loss or gradients" in report(run(*steps)).diagnosis
        # All skips are in a row, so the counts tell.
        assert report(run(LOST, LOST)).diagnosis.endswith("their loss was not finite.")

    def test_parameters_that_are_not_finite_are_named(self):
        narrow = {"half": jnp.array([1, INF], jnp.float16), "wide": jnp.ones(2)}
        found = report(run(1.0), narrow)
        assert found.diagnosis == (
            "Parameters are not finite: params['half'] (float16)."
        )
        assert "rounded" in text_of(found)
        with pytest.raises(FloatingPointError, match=r"params\['half'\]"):
            check_health(run(1.0), narrow)
        many = dict.fromkeys("abcde", jnp.float32(NAN))
        found = report(run(NAN, loss_scale=8.0), many)
        assert found.diagnosis.endswith("params['c'] (float32) and 2 more.")
        assert "skip_nonfinite=True" in text_of(found)
        assert check_health(run(1.0), PARAMS).healthy

    def test_rounding_to_float16_that_no_step_sees(self):
        optimizer = LossScaleOptimizer(optax.sgd(1.0))
        params = {"w": jnp.full(2, 60_000, jnp.float16)}
        grads = jax.tree.map(lambda x: jnp.full(2, -10_000, jnp.float32), params)
        state = optimizer.init(params)
        new, state = optimizer.apply_gradients(grads, params, state)
        if jnp.all(jnp.isfinite(new["w"])):
            pytest.skip("the step keeps such values away")
        assert check_health(state).healthy
        with pytest.raises(FloatingPointError, match=r"params\['w'\] \(float16\)"):
            check_health(state, new)


class TestRetries:
    # The derivative with respect to float16 numbers overflows at 2**20, not at 2**15.
    @staticmethod
    def run(*factors, **options):
        """Returns the state after steps in which the loss has these factors."""
        options = {"loss_scale": DynamicLossScale(2.0**20)} | options
        optimizer = LossScaleOptimizer(optax.sgd(0.5), **{"retries": 24} | options)

        def loss_fn(params, factor):
            half = params.astype(jnp.float16)
            return jnp.sum(half.astype(jnp.float32)) * factor

        def step(carry, factor):
            return optimizer.minimize(loss_fn, *carry, factor)[:2], None

        param = jnp.float32(1)
        carry = param, optimizer.init(param)
        (_, state), _ = jax.lax.scan(step, carry, jnp.array(factors, jnp.float32))
        return state

    def test_retries_that_no_step_uses_are_pointed_out(self):
        optimizer = LossScaleOptimizer(optax.sgd(0.5), retries=24)
        param = jnp.float32(1)
        state = optimizer.init(param)
        for gradient in (jnp.inf, 1.0):
            _, state = optimizer.update(param * gradient, state, param)
        assert "minimize is not called" in report(state).advice[0]

    def test_overflows_that_cost_no_batch_are_counted(self):
        found = report(self.run(1.0, 1.0))
        assert found[:3] == (
            True,
            "No step was skipped. Overflows that cost no batch: 5.",
            (),
        )
        assert found[3:] == (2.0**15, 0, 0, 0, None, 5)
        assert str(found).endswith("\n  repeated passes  5" + NOTHING)
        assert metrics(self.run(1.0))["retries"] == 5
        assert "retries" not in metrics(run(1.0))

    def test_without_overflow_it_is_as_without_the_option(self):
        found = report(self.run(1.0, loss_scale=DynamicLossScale(8.0)))
        assert (found.diagnosis, found.retries) == ("No step was skipped.", 0)
        assert "repeated" not in str(found)

    def test_steps_that_are_skipped_all_the_same(self):
        found = report(self.run(1.0, NAN))
        assert found.diagnosis == (
            "The last step was skipped: its gradients were not finite, in spite of "
            "retries."
        )
        assert found.advice[0].startswith("See why retries did not help: the loss is")
        assert found.advice[1].startswith("Run diagnostics.trace_numerics(")
        assert "  repeated passes  5\n" in str(found)
        found = report(self.run(1.0, retries=2))
        assert (found.skipped_steps, found.retries) == (1, 2)
        assert "all retries are used up" in text_of(found)
        assert report(self.run(NAN, 1.0)).diagnosis == "The last step was applied."
        found = report(self.run(NAN, check_loss=True))
        assert found.diagnosis == "The last step was skipped: its loss was not finite."
        assert "retries" not in text_of(found)
        found = report(self.run(NAN, NAN, loss_scale=DynamicLossScale(1.0)))
        assert found.diagnosis.endswith("though the loss scale cannot go lower.")
        assert "the rule keeps the scale (min_scale" in found.advice[0]

    def test_a_scale_that_has_fallen_to_one_without_a_skip(self):
        found = report(self.run(2.0**15, 1.0, loss_scale=DynamicLossScale(2.0**20)))
        assert (found.loss_scale, found.skipped_steps, found.retries) == (1, 0, 20)
        assert "loss scale is too low to help" in found.diagnosis


class TestVetoes:
    @staticmethod
    def run(*steps, **options):
        """Returns the state after steps: gradients, and whether they are vetoed."""
        optimizer = LossScaleOptimizer(optax.sgd(0.5), **options)
        extra = {"value": jnp.float32(NAN)} if options.get("check_loss") else {}

        def step(state, pair):
            grads, veto = pair
            state = optimizer.update(grads, state, skip_if=veto, **extra)[1]
            return state, None

        grads, vetoes = map(jnp.array, zip(*steps, strict=True))
        return jax.lax.scan(step, optimizer.init(1.0), (grads, vetoes))[0]

    @pytest.mark.parametrize("loss_scale", ["dynamic", HeadroomLossScale(), 8.0])
    def test_any_number_of_them_is_healthy(self, loss_scale):
        found = check_health(self.run(*[(1.0, True)] * 1000, loss_scale=loss_scale))
        assert found[1:3] == (
            "The last step was vetoed by skip_if. It counts as skipped, and "
            "check_health allows any number of vetoes.",
            (),
        )
        assert found[4:] == (1000, 0, 0, None, None)

    def test_after_a_step_that_is_applied(self):
        found = report(self.run((1.0, True), (1.0, False)))
        assert found[1:3] == ("The last step was applied.", ())
        assert found.skipped_steps == 1

    @pytest.mark.parametrize("loss_scale", ["dynamic", HeadroomLossScale()])
    def test_after_overflows(self, loss_scale):
        steps = [(1.0, False), (INF, True), (INF, False), (1.0, True)]
        found = report(self.run(*steps, loss_scale=loss_scale))
        assert found.diagnosis.startswith(
            "The last step was vetoed by skip_if. Before it, the last 2 steps were "
            "skipped: their gradients were not finite."
        )
        assert (found.skipped_steps, found.consecutive_skipped_steps) == (3, 2)
        one = report(self.run(*steps[2:], loss_scale=loss_scale)).diagnosis
        assert "Before it, the last step was skipped: its gradients" in one

    def test_a_veto_of_an_overflow_is_an_overflow(self):
        found = report(self.run((1.0, True), (INF, True)))
        assert found.diagnosis.startswith("The last step was skipped: its gradients")
        assert found.consecutive_skipped_steps == 1

    def test_a_veto_of_a_loss_that_is_not_finite_is_put_down_to_the_loss(self):
        found = report(self.run((1.0, True), check_loss=True))
        assert found.diagnosis == "The last step was skipped: its loss was not finite."


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
        assert MISTAKE in report(state).advice[1]

    @pytest.mark.parametrize(
        ("steps", "loss_scale"),
        [
            ([INF] * 24, DynamicLossScale(2.0**40)),  # A start that is usual.
            ([LOST] * 120, DynamicLossScale()),  # The loss explains the skips.
            ([(INF, 1.0)] * 120, SKIPPING),  # It does not fall.
            ([INF] * 120, DynamicLossScale(1.0)),
        ],
    )
    def test_is_not_suspected_where_it_cannot_be_the_cause(self, steps, loss_scale):
        assert MISTAKE not in text_of(report(run(*steps, loss_scale=loss_scale)))

    def test_a_start_that_takes_dozens_of_steps_is_not_usual(self):
        found = report(run(*[INF] * 36, loss_scale=DynamicLossScale(2.0**100)))
        assert "for longer than is usual" in found.diagnosis
        assert "initial_scale" in text_of(found)


class TestManyMembers:
    def test_the_worst_counts(self):
        state = with_numbers(
            scale=[[4, 8], [16, 32]],
            stuck_steps=[[1, 0], [4, 5]],
            consecutive_skipped_steps=[[9, 0], [5, 6]],
            skipped_steps=[[9, 0], [7, 8]],
            nonfinite_loss_steps=[[0, 0], [0, 3]],
        )
        found = report(state)
        assert found[3:] == (32, 8, 6, 5, 3, None)
        assert found.diagnosis.endswith("(Member 3 of 4.)")
        # One that is skipped for long is not hidden by one that is stuck.
        state = with_numbers(
            scale=[4, 8],
            stuck_steps=[2, 0],
            consecutive_skipped_steps=[2, 2000],
            skipped_steps=[2, 2000],
        )
        with pytest.raises(FloatingPointError, match=r"last 2000 steps.*\n?.*Member 1"):
            check_health(state)

    def test_a_damaged_scale_is_worse_than_all_others(self):
        state = with_numbers(
            scale=[4, NAN, 8],
            stuck_steps=[500, 0, 0],
            consecutive_skipped_steps=[500, 0, 0],
            skipped_steps=[500, 0, 0],
        )
        assert report(state).diagnosis.endswith("(Member 1 of 3.)")
        assert np.isnan(report(state).loss_scale)

    def test_under_vmap_and_pmap(self):
        for map_over in (jax.vmap, jax.pmap):
            optimizer = LossScaleOptimizer(optax.sgd(0.5))
            grads = jnp.array([1.0, INF])
            state = map_over(optimizer.init)(grads)
            _, state = map_over(optimizer.update)(grads, state)
            assert report(state)[3:5] == (2.0**14, 1)


class TestWhere:
    def test_finds_the_state_wherever_it_is(self):
        assert check_health({"a": [run()], "b": 1}).healthy
        for state in ((), (run(), run())):
            with pytest.raises(ValueError, match="exactly one"):
                report(state)

    def test_is_for_the_host(self):
        for function in (report, check_health):
            with pytest.raises(TypeError, match=r"for the host.*outside of jit"):
                jax.jit(lambda s, f=function: f(s).stuck_steps)(run())

    def test_boxed_arrays(self):
        tx = LossScaleOptimizer(optax.adam(0.5), initial_scale=16.0)
        model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        found = report(optimizer.opt_state, nnx.state(model, nnx.Param))
        assert (found.loss_scale, found.diagnosis) == (
            16,
            "No step has been taken yet.",
        )
        kernel = model.kernel[...]
        model.kernel[...] = kernel * NAN
        with pytest.raises(FloatingPointError, match="kernel"):
            check_health(optimizer.opt_state, nnx.state(model, nnx.Param))
