"""`trace_numerics`: its arguments, its reports, and every number in them."""

import csv
import json
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import INF, NAN
from jax import lax
from tracing import run_eagerly, total

from optax_lossscale import LossScaleOptimizer
from optax_lossscale.diagnostics import trace_numerics

W = jnp.array([1.0, 2.0], jnp.float32)
# Two names of `jax.jit` in jaxprs, old and new.
CALLS = ("jit", "pjit", "custom_jvp_call", "custom_vjp_call")


def loss_fn(w, x=1.0):
    return total(jnp.square(w.astype(jnp.float16) * x))


def mlp_loss(params, x):
    """A perceptron with layer norm and softmax, in float16."""
    p = jax.tree.map(lambda a: a.astype(jnp.float16), params)
    x = jax.nn.relu(x @ p["in"])
    x = x - x.mean(-1, keepdims=True)
    x = x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-3)
    return -jnp.mean(jnp.log(jax.nn.softmax(x @ p["out"])[:, 0].astype(jnp.float32)))


class TestNumbers:
    @pytest.mark.parametrize("gain", [1.0, 1e4])
    def test_every_number_is_that_of_an_eager_run(self, gain):
        rng = np.random.default_rng(0)
        params = {"in": rng.normal(size=(5, 7)), "out": rng.normal(size=(7, 3)) * gain}
        params = jax.tree.map(lambda x: x.astype(np.float32), params)
        x = rng.normal(size=(3, 5)).astype(np.float16)
        scale = 2.0**9

        def scaled(params):
            return mlp_loss(params, x) * scale

        closed = jax.make_jaxpr(jax.value_and_grad(scaled))(params)
        expected = []
        for equation, found in run_eagerly(
            closed.jaxpr, closed.consts, jax.tree.leaves(params)
        ):
            for array in found:
                if jnp.issubdtype(array.dtype, jnp.floating):
                    name = equation.primitive.name
                    expected.append((name, *measure(np.asarray(array))))
        trace = trace_numerics(mlp_loss, params, x, scale=scale)
        actual = [(x.primitive, *numbers(x.output)) for x in trace.operations]
        assert len(actual) > 60
        actual, expected = Counter(actual), Counter(expected)
        assert not actual - expected
        assert (expected - actual).total() <= 2  # What scales the loss is left out.

    def test_what_it_would_be_in_float32(self):
        def loss_fn(w):
            return total(jnp.exp(w.astype(jnp.float16) * 10.0))

        trace = trace_numerics(loss_fn, W)
        found = trace.first_nonfinite
        assert np.isclose(found.output.float32_largest, np.exp(20.0))
        assert np.isclose(trace.float32_loss, np.exp(10.0) + np.exp(20.0))
        assert trace.loss == INF

    @pytest.mark.parametrize("exponent", [3, 8])
    def test_the_largest_scale(self, exponent):
        def loss_fn(w):
            return total(w.astype(jnp.float16) * 2.0**exponent)

        largest = trace_numerics(loss_fn, W).largest_scale
        assert largest == 2.0 ** (15 - exponent)
        for scale in (largest, 2 * largest):
            grads = jax.grad(lambda w, s=scale: loss_fn(w) * s)(W)
            assert np.isfinite(grads).all() == (scale == largest)


def numbers(x):
    counts = (round(v * np.prod(x.shape)) for v in (x.zeros, x.infs, x.nans))
    return x.dtype, x.shape, x.largest, x.smallest, *counts


def measure(x):
    finite = np.abs(x[np.isfinite(x)].astype(np.float64))
    nonzero = np.abs(x[(x != 0) & ~np.isnan(x)].astype(np.float64))
    counts = (np.sum(x == 0), np.sum(np.isinf(x)), np.sum(np.isnan(x)))
    largest, smallest = finite.max(initial=0.0), nonzero.min(initial=INF)
    smallest = 0.0 if smallest == INF else float(smallest)
    return x.dtype.name, x.shape, float(largest), smallest, *map(int, counts)


class TestFindings:
    @pytest.mark.parametrize(
        ("function", "advice"),
        [
            (lambda x: jnp.exp(x * 10.0), "compute this line in float32"),
            (lambda x: jnp.exp(x * 100.0), "too large for float32 as well"),
            (lambda x: jnp.log(x - x), "An input holds zeros"),
        ],
    )
    def test_the_advice_is_about_what_float32_would_do(self, function, advice):
        trace = trace_numerics(lambda w: total(function(w.astype(jnp.float16))), W)
        assert advice in trace.findings[0].message

    def test_a_sound_program(self):
        trace = trace_numerics(loss_fn, W, scale=2.0**10)
        assert [x.kind for x in trace.findings] == ["fine"]
        assert trace.first_nonfinite is None
        assert trace.loss == trace.float32_loss == 5
        assert (trace.scale, trace.dtype) == (2.0**10, "float16")

    def test_an_inf_that_is_swallowed(self):
        trace = trace_numerics(lambda w: total(jnp.tanh(jnp.exp(w * 1e4))), W)
        assert trace.first_nonfinite.primitive == "exp"
        assert trace.loss == 2
        assert trace.findings[0].kind == "forward"

    @pytest.mark.parametrize("bad", [INF, NAN])
    def test_what_it_was_given(self, bad):
        x = jnp.array([1, bad], jnp.float16)
        for trace, name in (
            (trace_numerics(loss_fn, W, x=x), "argument x"),
            (trace_numerics(loss_fn, W, x), "argument args[0]"),
            (trace_numerics(loss_fn, W * x.astype(jnp.float32)), "parameter params"),
        ):
            assert trace.findings[0].kind == "nonfinite_argument"
            assert name in trace.findings[0].message

    def test_a_masked_row_is_fine(self):
        def loss_fn(w):
            x = jnp.outer(w, w).astype(jnp.float16)
            x = jnp.where(jnp.eye(2, dtype=bool), x, -INF)
            return total(jax.nn.softmax(x) * x.shape[0])

        assert trace_numerics(loss_fn, W).first_nonfinite is None


class TestArguments:
    def test_kinds_of_arguments(self):
        def loss_fn(params, activation, *, power, names, none=None):
            assert (power, names, none) == (2, ["a"], None)
            return total(activation(params["w"] ** power)), {"aux": names}

        params = {"w": W, "steps": jnp.arange(3), "name": "model", "none": None}
        trace = trace_numerics(
            loss_fn, params, jnp.tanh, power=2, names=["a"], has_aux=True
        )
        assert np.isclose(trace.loss, np.tanh(1) + np.tanh(4))

    @pytest.mark.parametrize("masked", [False, True])
    def test_state(self, masked):
        optimizer = LossScaleOptimizer(optax.sgd(0.1), initial_scale=2.0**14)
        if masked:
            optimizer = optax.masked(optimizer, {"w": True, "b": False})
        state = optimizer.init({"w": W, "b": W})
        trace = trace_numerics(
            lambda p, x: loss_fn(p["w"] + p["b"], x), {"w": W, "b": W}, 1.0, state=state
        )
        assert trace.scale == 2.0**14
        assert trace.findings[0].kind == "scale_too_high"
        assert trace.largest_scale == 2.0**12

    def test_several_losses(self):
        optimizer = LossScaleOptimizer(
            optax.sgd(0.1), initial_scale=2.0**14, num_losses=2
        )

        def losses(w):
            return loss_fn(w), loss_fn(w) / 2.0**20

        trace = trace_numerics(losses, W, state=optimizer.init(W))
        assert trace.scale == (2.0**14, 2.0**14)
        assert trace.largest_scale == (2.0**13, 2.0**33)
        assert trace.first_nonfinite.loss == 0
        assert len(trace.loss) == len(trace.float32_loss) == 2
        assert trace_numerics(losses, W, scale=[1, 2]).scale == (1, 2)

    @pytest.mark.parametrize(
        ("error", "match", "options"),
        [
            (ValueError, "state or scale", {"scale": 1.0, "state": W}),
            (ValueError, "scale", {"scale": 0.0}),
            (ValueError, "scale", {"scale": 2.0**127}),
            (ValueError, "scale", {"scale": NAN}),
            (ValueError, r"scale\[1\]", {"scale": [1.0, INF]}),
            (ValueError, "scale", {"scale": [[1.0]]}),
            (ValueError, "dtype", {"dtype": "float32"}),
            (ValueError, "dtype", {"dtype": "int8"}),
            ((ValueError, TypeError), "dtype", {"dtype": "half precision"}),
            (ValueError, "state", {"state": {"w": W}}),
            (TypeError, "has_aux", {"has_aux": True}),
            (TypeError, "2 loss", {"scale": [1.0, 2.0]}),
        ],
    )
    def test_wrong_arguments(self, error, match, options):
        with pytest.raises(error, match=match):
            trace_numerics(loss_fn, W, **options)

    @pytest.mark.parametrize("params", [{}, None, {"n": 1}, jnp.arange(3)])
    def test_params_without_arrays(self, params):
        with pytest.raises(TypeError, match="params"):
            trace_numerics(lambda p: jnp.float32(0), params)

    @pytest.mark.parametrize(
        "loss_fn",
        [
            lambda w: w,
            lambda w: (w[0], w),
            lambda w: w[0].astype("complex64"),
            lambda w: "a",
        ],
    )
    def test_a_loss_that_is_no_real_scalar(self, loss_fn):
        with pytest.raises(TypeError, match=r"loss|scalar|real"):
            trace_numerics(loss_fn, W)

    def test_under_jit(self):
        with pytest.raises(TypeError, match="trace_numerics"):
            jax.jit(lambda w: trace_numerics(loss_fn, w).loss)(W)


class TestReports:
    @pytest.fixture
    def trace(self):
        def loss_fn(w):
            x = w.astype(jnp.float16)
            for i in range(8):
                x = jnp.exp(x) if i % 2 else -x * 1e3
            return total(x)

        return trace_numerics(loss_fn, W * jnp.array([1.0, -1.0]), scale=2.0**10)

    def test_one_screen(self, trace):
        lines = str(trace).splitlines()
        assert 2 <= len(lines) <= 30
        assert max(map(len, lines)) <= 79
        assert "exp" in lines[0] + lines[1]

    def test_csv(self, trace, tmp_path):
        trace.to_csv(tmp_path / "trace.csv")
        with (tmp_path / "trace.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert len(rows) == len(trace.operations)
        for row, operation in zip(rows, trace.operations, strict=True):
            assert row["primitive"] == operation.primitive
            assert int(row["line"]) == operation.line
            assert float(row["largest"]) == operation.output.largest

    def test_json(self, trace, tmp_path):
        trace.to_json(tmp_path / "trace.json")
        found = json.loads((tmp_path / "trace.json").read_text())
        assert found["first_nonfinite"]["primitive"] == "exp"
        assert len(found["operations"]) == len(trace.operations)
        assert found["findings"][0]["message"] == trace.findings[0].message
        assert found["scale"] == 2.0**10
