"""Metrics, the names of non-finite gradients, and the report."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import INF, NAN, WRAPS

from optax_lossscale import (
    DynamicLossScale,
    FixedLossScale,
    HeadroomLossScale,
    LogMaxLossScale,
    LossScale,
    LossScaleOptimizer,
    all_finite,
    check_health,
)
from optax_lossscale.diagnostics import (
    History,
    NonfiniteGradient,
    describe_nonfinite,
    metrics,
    report,
)

pytestmark = pytest.mark.usefixtures("quick_compilation")
PARAMS = {"block": {"ln": {"scale": jnp.ones(3)}, "w": jnp.ones((2, 2))}}
GOOD = jax.tree.map(jnp.ones_like, PARAMS)
BAD = {"block": {"ln": {"scale": jnp.array([1, INF, 1])}, "w": jnp.ones((2, 2))}}
COUNTERS = {
    "last_step_applied",
    "skipped_steps",
    "consecutive_skipped_steps",
    "nonfinite_loss_steps",
    "stuck_steps",
}


def run(*grads, loss_scale=None, steps=None, **options):
    """Returns the state after a step for each of the gradients."""
    optimizer = LossScaleOptimizer(optax.sgd(0.5), loss_scale, **options)
    update = jax.jit(lambda grads, state: optimizer.update(grads, state)[1])
    state = optimizer.init(PARAMS)
    for tree in grads:
        state = update(tree, state)
    return state


def with_scale(state, scale):
    """Puts a loss scale, or that of each member, into a state."""
    scale = jnp.asarray(scale, jnp.float32)
    rule = state.loss_scale_state._replace(loss_scale=scale)
    counters = {
        name: jnp.broadcast_to(getattr(state, name), scale.shape) for name in COUNTERS
    }
    return state._replace(loss_scale_state=rule, **counters)


class TestMetrics:
    @pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
    def test_values_and_dtypes(self, wrap):
        state = run(GOOD, BAD, BAD, GOOD, loss_scale=DynamicLossScale(4.0))
        found = wrap(metrics)(state)
        assert {name: (x.item(), x.dtype.name) for name, x in found.items()} == {
            "loss_scale": (1.0, "float32"),
            "log2_loss_scale": (0.0, "float32"),
            "good_steps": (1, "int32"),
            "hysteresis_left": (0, "int32"),
            "last_step_applied": (True, "bool"),
            "skipped_steps": (2, "int32"),
            "consecutive_skipped_steps": (0, "int32"),
            "nonfinite_loss_steps": (0, "int32"),
            "stuck_steps": (0, "int32"),
        }

    @pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
    def test_logarithms_of_powers_of_two_are_exact(self, wrap):
        read = wrap(metrics)
        state = LossScaleOptimizer(optax.sgd(0.5), 1.0).init(PARAMS)
        for exponent in range(-149, 128):
            number = np.ldexp(np.float32(1), exponent, dtype=np.float32)
            scale = state.loss_scale_state._replace(loss_scale=jnp.asarray(number))
            found = read(state._replace(loss_scale_state=scale))
            assert found["log2_loss_scale"] == exponent
        scale = state.loss_scale_state._replace(loss_scale=jnp.float32(1000))
        found = read(state._replace(loss_scale_state=scale))
        np.testing.assert_allclose(found["log2_loss_scale"], np.log2(1000), rtol=1e-6)

    @pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
    def test_logarithms_of_damaged_scales(self, wrap):
        scales = [0.0, -0.0, INF, NAN, -INF, -1.0, -1e-40, 3e-40, 3e38]
        state = with_scale(run(), scales)
        found = wrap(metrics)(state)["log2_loss_scale"]
        logs = [-INF, -INF, INF, NAN, NAN, NAN, NAN, np.log2(3e-40), np.log2(3e38)]
        np.testing.assert_allclose(found, logs, rtol=1e-6)

    def test_nothing_is_transferred_unasked(self):
        optimizer = LossScaleOptimizer(optax.sgd(0.5), num_losses=2)
        states = [run(BAD, track_leaves=True), optimizer.init(PARAMS)]
        history, step = History(), jax.device_put(np.int32(3))
        with jax.transfer_guard("disallow"):
            for state in states:
                found = metrics(state, "s/")
                history.record(step, found)
                check_health(state)
                report(state, PARAMS)
        assert history.rows[0]["s/log2_loss_scale_1"] == 15

    @pytest.mark.parametrize(
        ("loss_scale", "further"),
        [
            (FixedLossScale(8.0), set()),
            (HeadroomLossScale(), {"peak", "margin", "overflowed"}),
            (LogMaxLossScale(), {"mean", "variance", "good_steps", "ceiling"}),
        ],
    )
    def test_of_any_rule(self, loss_scale, further):
        found = metrics(run(loss_scale=loss_scale)).keys()
        assert further | {"loss_scale", "log2_loss_scale"} | COUNTERS <= found

    def test_of_a_rule_whose_state_is_a_dataclass(self):
        @jax.tree_util.register_dataclass
        @dataclasses.dataclass
        class State:
            loss_scale: jax.Array
            drops: jax.Array
            pair: tuple

        @dataclasses.dataclass(frozen=True)
        class Rule(LossScale):
            def init(self):
                return State(jnp.float32(4), jnp.int32(0), (jnp.ones(2), jnp.ones(2)))

            def update(self, grads, state, *, axis_name=None):
                return state, all_finite(grads)

        found = metrics(run(GOOD, loss_scale=Rule()))
        assert found.keys() == {"loss_scale", "log2_loss_scale", "drops"} | COUNTERS

    def test_from_any_nested_state_with_a_prefix(self):
        tx = optax.chain(optax.identity(), LossScaleOptimizer(optax.sgd(0.5), 8))
        found = metrics(tx.init(PARAMS), prefix="train/")
        assert found["train/loss_scale"] == 8
        assert all(name.startswith("train/") for name in found)

    def test_of_several_losses_each_has_its_scale(self):
        optimizer = LossScaleOptimizer(optax.sgd(0.5), num_losses=2)
        _, state = optimizer.update([GOOD, BAD], optimizer.init(PARAMS))
        found = {name: x.item() for name, x in metrics(state, "s/").items()}
        assert found["s/log2_loss_scale_0"] == 15
        assert found["s/log2_loss_scale_1"] == 14
        assert (found["s/good_steps_0"], found["s/good_steps_1"]) == (1, 0)
        assert not {"s/loss_scale", "s/good_steps"} & found.keys()
        assert found["s/skipped_steps"] == 1
        states = jax.tree.map(lambda x: jnp.stack([x, x, x]), state)
        assert metrics(states)["loss_scale_1"].tolist() == [2**14] * 3

    def test_from_nnx(self):
        model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        tx = LossScaleOptimizer(optax.sgd(0.5), track_leaves=True)
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        found = metrics(optimizer.opt_state)
        assert found["log2_loss_scale"] == 15
        assert found["skipped_steps"] == 0

    def test_goes_into_json(self):
        found = {name: x.item() for name, x in metrics(run(BAD)).items()}
        assert json.loads(json.dumps(found))["skipped_steps"] == 1

    def test_in_a_scan_of_an_ensemble(self):
        optimizer = LossScaleOptimizer(optax.sgd(0.5))

        def member(scale):
            state = optimizer.init(PARAMS)
            rule = state.loss_scale_state._replace(loss_scale=scale)

            def step(state, grads):
                state = optimizer.update(grads, state)[1]
                return state, metrics(state)

            grads = jax.tree.map(lambda *x: jnp.stack(x), GOOD, BAD, GOOD)
            return jax.lax.scan(step, state._replace(loss_scale_state=rule), grads)[1]

        found = jax.jit(jax.vmap(member))(jnp.float32([8, 4]))
        assert found["loss_scale"].tolist() == [[8, 4, 4], [4, 2, 2]]
        assert found["log2_loss_scale"].tolist() == [[3, 2, 2], [2, 1, 1]]
        assert found["last_step_applied"].tolist() == [[True, False, True]] * 2

    def test_on_eight_devices(self):
        optimizer = LossScaleOptimizer(optax.sgd(0.5), axis_name="batch")

        def step(grads):
            state = optimizer.update(grads, optimizer.init(PARAMS))[1]
            return metrics(state)

        grads = jax.tree.map(lambda *x: jnp.stack(x), *[GOOD] * 7, BAD)
        found = jax.pmap(step, axis_name="batch")(grads)
        assert found["skipped_steps"].tolist() == [1] * 8

    def test_errors(self):
        with pytest.raises(ValueError, match="exactly one LossScaleOptimizerState"):
            metrics(PARAMS)
        with pytest.raises(TypeError, match="prefix must be a string, got None"):
            metrics(run(), prefix=None)


class TestDescribeNonfinite:
    def test_names_counts_and_places(self):
        grads = {
            "z": jnp.array([[1, INF, -INF], [NAN, 1, 1]], jnp.float16),
            "a": {"w": jnp.array([1, 2, NAN], jnp.bfloat16), "fine": jnp.ones(3)},
        }
        found = describe_nonfinite(grads)
        assert found == [
            NonfiniteGradient("grads['a']['w']", (3,), "bfloat16", 0, 1, (2,)),
            NonfiniteGradient("grads['z']", (2, 3), "float16", 2, 1, (0, 1)),
        ]
        assert [str(x) for x in found] == [
            "grads['a']['w'], bfloat16[3]: 0 inf, 1 nan of 3, first at [2]",
            "grads['z'], float16[2,3]: 2 inf, 1 nan of 6, first at [0, 1]",
        ]

    def test_leaves_of_every_kind(self):
        grads = [
            jnp.array([1, complex(INF, 0), complex(0, NAN)], jnp.complex64),
            jnp.array([NAN, 1], jnp.float8_e4m3fn),
            np.float64(INF),
            NAN,
            None,
            jnp.arange(3),
            np.zeros(2, jax.dtypes.float0),
            jax.random.key(0),
            jnp.zeros((0, 3)),
            7,
        ]
        found = describe_nonfinite(grads)
        assert [x[0] for x in found] == ["grads[0]", "grads[1]", "grads[2]", "grads[3]"]
        assert [x[3:] for x in found] == [
            (1, 1, (1,)),
            (0, 1, (0,)),
            (1, 0, ()),
            (0, 1, ()),
        ]
        assert str(found[3]).endswith("[]: 0 inf, 1 nan of 1")

    @pytest.mark.parametrize("grads", [{}, None, (), 1.0, jnp.zeros(0), GOOD])
    def test_nothing_to_find(self, grads):
        assert describe_nonfinite(grads) == []

    def test_all_of_a_leaf_and_a_bare_array(self):
        (found,) = describe_nonfinite(jnp.full((4, 5), NAN, jnp.float32))
        assert found == ("grads", (4, 5), "float32", 0, 20, (0, 0))

    def test_float64(self):
        with jax.enable_x64(True):
            (found,) = describe_nonfinite(np.array([1e300, INF]))
            assert found == ("grads", (2,), "float64", 1, 0, (1,))

    def test_sharded_over_eight_devices(self):
        mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
        grads = jax.device_put(jnp.ones((16, 2)).at[13, 1].set(INF), sharding)
        (found,) = describe_nonfinite(grads)
        assert found[3:] == (1, 0, (13, 1))

    def test_is_for_the_host(self):
        with pytest.raises(TypeError, match="describe_nonfinite is for the host"):
            jax.jit(lambda grads: len(describe_nonfinite(grads)))(GOOD)


TRACE = (
    "diagnostics.trace_numerics(loss_fn, params, batch, state=state) names the "
    "operation and its line."
)


def advice(text):
    return " ".join(text.split("What to do: ")[1].split())


class TestReport:
    def test_nothing_wrong(self):
        text = report(run(GOOD, GOOD))
        assert text.splitlines() == [
            "The last step was applied.",
            "  loss scale           32768 (2^15)",
            "  skipped steps        0",
            "What to do: nothing.",
        ]

    def test_at_the_start(self):
        text = report(run(BAD, BAD, track_leaves=True), PARAMS)
        name = "params['block']['ln']['scale']"
        assert text.splitlines()[:-3] == [
            "The last step was skipped, and the loss scale is still adjusting.",
            "  loss scale           8192 (2^13)",
            "  skipped steps        2, of which 2 in a row",
            "Steps with non-finite gradients:",
            "     inf     nan  last",
            f"       2       0  inf      {name}",
        ]
        assert advice(text).startswith("nothing yet.")
        assert advice(text).endswith(f"If they continue, look at {name}.")
        without = report(run(BAD, BAD))
        assert "gradients" not in without
        assert "If they continue, call check_health." in advice(without)

    def test_stuck_names_the_leaf(self):
        state = run(*[BAD] * 5, loss_scale=DynamicLossScale(4.0), track_leaves=True)
        text = report(state, PARAMS)
        assert text.startswith("Steps are skipped, and the loss scale cannot go lower.")
        assert "1 (2^0), could not go lower for 3 skipped steps" in text
        assert advice(text) == (
            "compute params['block']['ln']['scale'] (inf) in float32, lower the "
            "learning rate or clip gradients."
        )
        assert advice(report(state)).startswith("compute leaf 0 (inf) in float32")

    def test_stuck_at_nan(self):
        bad = jax.tree.map(lambda x: jnp.where(jnp.isinf(x), NAN, x), BAD)
        state = run(bad, loss_scale=DynamicLossScale(1.0), track_leaves=True)
        assert "nan rather than inf comes from 0/0" in advice(report(state, PARAMS))

    @pytest.mark.parametrize("kind", [INF, NAN])
    @pytest.mark.parametrize("start", [2.0**15, 1.0], ids=["adjusting", "stuck"])
    def test_blames_no_leaf_if_several_are_bad(self, start, kind):
        bad = jax.tree.map(lambda x: x * kind, GOOD)
        rule = DynamicLossScale(start)
        text = report(run(bad, bad, loss_scale=rule, track_leaves=True), PARAMS)
        table, _ = text.split("What to do: ")
        counts = "2       0  inf" if kind == INF else "0       2  nan"
        for name in ("params['block']['ln']['scale']", "params['block']['w']"):
            assert f"       {counts}      {name}\n" in table
        assert "params[" not in advice(text)
        assert "find where the inf or nan began" in advice(text)
        assert "in the layers nearer to the input" in advice(text)
        assert advice(text).endswith(TRACE)
        # One leaf alone afterwards is named again.
        text = report(run(bad, BAD, loss_scale=rule, track_leaves=True), PARAMS)
        assert "params['block']['ln']['scale']" in advice(text)
        assert "trace_numerics" not in advice(text)

    @pytest.mark.parametrize("start", [2.0**15, 1.0], ids=["adjusting", "stuck"])
    def test_blames_no_leaf_if_there_is_no_other(self, start):
        optimizer = LossScaleOptimizer(
            optax.sgd(0.5), DynamicLossScale(start), track_leaves=True
        )
        params = {"w": jnp.ones(2)}
        state = optimizer.update({"w": params["w"] * INF}, optimizer.init(params))[1]
        assert "params['w']" not in advice(report(state, params))
        assert advice(report(state, params)).endswith(TRACE)

    def test_stuck_everywhere(self):
        params = {f"w{i}": jnp.ones(2) for i in range(20)}
        optimizer = LossScaleOptimizer(optax.sgd(0.5), "dynamic", track_leaves=True)
        state = optimizer.init(params)
        rule = state.loss_scale_state._replace(loss_scale=jnp.float32(1))
        state = state._replace(loss_scale_state=rule)
        nans = jax.tree.map(lambda x: x * NAN, params)
        text = report(optimizer.update(nans, state)[1], params)
        assert "  and 12 more: see nonfinite_leaves" in text
        assert advice(text).startswith("find where the inf or nan began.")
        assert len(text.splitlines()) <= 24
        assert max(map(len, text.splitlines())) <= 80

    def test_stuck_without_leaves_says_what_check_health_says(self):
        text = report(run(*[BAD] * 3, loss_scale=DynamicLossScale(1.0)))
        assert "look at the loss" in advice(text)

    def test_many_skips_that_lead_nowhere(self):
        rule = DynamicLossScale(2.0**100, backoff_factor=0.999)
        optimizer = LossScaleOptimizer(optax.sgd(0.5), rule)

        def step(state, _):
            return optimizer.update(BAD, state)[1], None

        state = jax.lax.scan(step, optimizer.init(PARAMS), length=1000)[0]
        text = report(state)
        assert text.startswith("Many steps in a row were skipped.")
        assert "1000 steps in a row" in advice(text)
        assert "(2^98.56)" in text

    def test_a_scale_that_does_nothing(self):
        text = report(run(BAD, BAD, GOOD, loss_scale=DynamicLossScale(2.0)))
        assert text.startswith(
            "The last step was applied, but its loss scale is too low"
        )
        assert "underflow_stats" in advice(text)

    def test_losses_that_were_not_finite(self):
        optimizer = LossScaleOptimizer(optax.sgd(0.5), check_loss=True)
        state = optimizer.init(PARAMS)
        state = optimizer.update(GOOD, state, value=jnp.float32(NAN))[1]
        text = report(state)
        assert "  loss not finite      1 steps" in text
        # Such a skip does not lower the scale.
        assert text.startswith("The last step was skipped, because its loss was not")
        assert "scale" not in advice(text)
        state = optimizer.update(BAD, state, value=jnp.float32(1))[1]
        assert advice(report(state)).startswith("nothing yet. Each skip lowers")

    def test_names_the_leaf_of_the_last_skip(self):
        other = jax.tree.map(jnp.ones_like, PARAMS)
        other["block"]["w"] = other["block"]["w"] * INF
        text = report(run(BAD, BAD, GOOD, other, track_leaves=True), PARAMS)
        assert advice(text).endswith("look at params['block']['w'].")

    def test_non_finite_gradients_that_were_applied(self):
        state = run(BAD, GOOD, loss_scale=FixedLossScale(8), track_leaves=True)
        text = report(state, PARAMS)
        assert text.startswith("Steps were applied though their gradients were not")
        assert "skip_nonfinite=True" in advice(text)
        skipping = FixedLossScale(8, skip_nonfinite=True)
        state = run(BAD, GOOD, loss_scale=skipping, track_leaves=True)
        assert advice(report(state, PARAMS)) == "nothing."

    def test_of_an_ensemble_the_one_that_is_worst_off(self):
        states = [run(GOOD, GOOD, track_leaves=True), run(BAD, BAD, track_leaves=True)]
        state = jax.tree.map(lambda *x: jnp.stack(x), *states)
        assert "8192 (2^13)" in report(state, PARAMS)

    def test_errors(self):
        with pytest.raises(ValueError, match="exactly one LossScaleOptimizerState"):
            report(PARAMS)
        with pytest.raises(ValueError, match="params must have the 2 leaves"):
            report(run(track_leaves=True), [1.0])
        with pytest.raises(TypeError, match="for the host"):
            jax.jit(lambda state: len(report(state)))(run())
