"""Metrics, and the names of non-finite gradients."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import INF, NAN, every_wrap

from optax_lossscale import DynamicLossScale, LossScale, LossScaleOptimizer, all_finite
from optax_lossscale.diagnostics import (
    NonfiniteGradient,
    check_health,
    describe_nonfinite,
    metrics,
    nonfinite_leaves,
    report,
)


def ones(shape):
    return jax.device_put(np.ones(shape, np.float32))


PARAMS = {"block": {"ln": {"scale": ones(3)}, "w": ones((2, 2))}}
GOOD = PARAMS
SCALE = jax.device_put(np.float32([1, INF, 1]))
BAD = {"block": PARAMS["block"] | {"ln": {"scale": SCALE}}}
COUNTERS = {
    "last_step_applied",
    "skipped_steps",
    "consecutive_skipped_steps",
    "stuck_steps",
    "skip_reasons",
}


def run(*grads, loss_scale=None, **options):
    """Returns the state after a step for each of the gradients."""
    optimizer = LossScaleOptimizer(optax.sgd(0.5), loss_scale, **options)
    update = jax.jit(lambda grads, state: optimizer.update(grads, state)[1])
    state = optimizer.init(PARAMS)
    for tree in grads:
        state = update(tree, state)
    return state


class TestMetrics:
    @every_wrap
    def test_values_and_dtypes(self, wrap):
        state = run(GOOD, BAD, BAD, GOOD, loss_scale=DynamicLossScale(4.0))
        found = wrap(metrics)(state)
        assert {name: (x.item(), x.dtype.name) for name, x in found.items()} == {
            "loss_scale": (1.0, "float32"),
            "log2_loss_scale": (0.0, "float32"),
            "good_steps": (1, "int32"),
            "last_step_applied": (True, "bool"),
            "skipped_steps": (2, "int32"),
            "consecutive_skipped_steps": (0, "int32"),
            "stuck_steps": (0, "int32"),
            "skip_reasons": (0, "int32"),
        }

    @every_wrap
    def test_logarithms(self, wrap):
        read, state = wrap(metrics), run()

        def log2(scale):
            scale = jnp.asarray(scale, jnp.float32)
            rule = state.loss_scale_state._replace(loss_scale=scale)
            return read(state._replace(loss_scale_state=rule))["log2_loss_scale"]

        for exponent in range(-149, 128):
            assert log2(np.ldexp(np.float32(1), exponent, dtype=np.float32)) == exponent
        # Of many members, some damaged.
        scales = [1000.0, 3e-40, 3e38, 0.0, -0.0, INF, NAN, -INF, -1.0, -1e-40]
        logs = [*np.log2(scales[:3]), -INF, -INF, INF, NAN, NAN, NAN, NAN]
        np.testing.assert_allclose(log2(scales), logs, rtol=1e-6)

    def test_losses_that_were_not_finite(self):
        optimizer = LossScaleOptimizer(optax.sgd(0.5), check_loss=True)
        state = optimizer.init(PARAMS)
        assert metrics(state)["nonfinite_loss_steps"] == 0
        _, state = optimizer.update(GOOD, state, value=jnp.float32(NAN))
        assert metrics(state, "a/")["a/nonfinite_loss_steps"] == 1
        assert "nonfinite_loss_steps" not in metrics(run(GOOD))

    def test_nothing_is_transferred_unasked(self):
        state = run(BAD)
        with jax.transfer_guard("disallow"):
            metrics(state, "s/")
            nonfinite_leaves(BAD)
            describe_nonfinite(BAD)
            check_health(state)
            report(state, PARAMS)

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

    def test_the_optimizer_wins_where_a_rule_uses_its_names(self):
        class State(NamedTuple):
            loss_scale: jax.Array
            log2_loss_scale: jax.Array
            skip_reasons: jax.Array

        class Rule(LossScale):
            def init(self):
                return State(jnp.float32(4), jnp.float32(99), jnp.int32(99))

            def update(self, grads, state, *, axis_name=None):
                return state, all_finite(grads)

        found = metrics(run(BAD, loss_scale=Rule()))
        assert found.keys() == {"loss_scale", "log2_loss_scale"} | COUNTERS
        assert (found["log2_loss_scale"], found["skip_reasons"]) == (2, 1)


class TestNonfiniteLeaves:
    @every_wrap
    def test_names_what_describe_nonfinite_names(self, wrap):
        for grads in (GOOD, BAD, {}, None, [BAD, jnp.float16(NAN), jnp.arange(2)]):
            found = wrap(nonfinite_leaves)(grads)
            assert all((x.shape, x.dtype) == ((), bool) for x in found.values())
            names = [name for name, is_nonfinite in found.items() if is_nonfinite]
            assert names == [gradient.name for gradient in describe_nonfinite(grads)]
        names = {"grads['block']['ln']['scale']", "grads['block']['w']"}
        assert nonfinite_leaves(BAD).keys() == names

    def test_of_each_member(self):
        grads = {"w": jnp.array([[1, 2], [INF, 1], [1, NAN]])}
        found = jax.jit(jax.vmap(nonfinite_leaves))(grads)
        assert found["grads['w']"].tolist() == [False, True, True]


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
        bad = [
            (jnp.array([1, complex(INF, 0), complex(0, NAN)], jnp.complex64), 1, 1, 1),
            (jnp.array([NAN, 1], jnp.float8_e4m3fn), 0, 1, 0),
            (np.float64(INF), 1, 0),
            (NAN, 0, 1),
        ]
        others = [None, jnp.arange(3), np.zeros(2, jax.dtypes.float0), 7]
        others += [jax.random.key(0), jnp.zeros((0, 3))]
        found = describe_nonfinite([x for x, *_ in bad] + others)
        assert [(x.name, *x[3:]) for x in found] == [
            (f"grads[{i}]", infs, nans, tuple(place))
            for i, (_, infs, nans, *place) in enumerate(bad)
        ]
        assert str(found[3]).endswith("[]: 0 inf, 1 nan of 1")

    @pytest.mark.parametrize("grads", [{}, None, (), 1.0, ones(0), GOOD])
    def test_nothing_to_find(self, grads):
        assert describe_nonfinite(grads) == []

    def test_all_of_a_leaf_and_a_bare_array(self):
        (found,) = describe_nonfinite(jnp.full((4, 5), NAN, jnp.float32))
        assert found == ("grads", (4, 5), "float32", 0, 20, (0, 0))
