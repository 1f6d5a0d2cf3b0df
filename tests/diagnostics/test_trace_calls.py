"""`trace_numerics`: its arguments, its reports, and every number in them."""

import json
import re
import sys
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from arithmetic import TWO, half, total
from helpers import INF, NAN
from jax import lax
from tracing import run_eagerly

from optax_lossscale import LossScaleOptimizer, autocast
from optax_lossscale.diagnostics import float32_lines, trace_numerics
from optax_lossscale.diagnostics._trace.measure import tape


def loss_fn(w, x=1.0):
    return total(jnp.square(half(w) * x))


def mlp_loss(params, x):
    """A perceptron with layer norm and softmax, in float16."""
    p = jax.tree.map(lambda a: a.astype(jnp.float16), params)
    x = jax.nn.relu(x @ p["in"])
    x = x - x.mean(-1, keepdims=True)
    x = x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-3)
    return -jnp.mean(jnp.log(jax.nn.softmax(x @ p["out"])[:, 0].astype(jnp.float32)))


@pytest.mark.exhaustive
def test_every_number_is_that_of_an_eager_run():
    rng = np.random.default_rng(0)
    params = {"in": rng.normal(size=(5, 7)), "out": 1e4 * rng.normal(size=(7, 3))}
    params = jax.tree.map(lambda x: x.astype(np.float32), params)
    x = rng.normal(size=(3, 5)).astype(np.float16)
    scale = 2.0**9

    scaled = jax.value_and_grad(lambda params: mlp_loss(params, x) * scale)
    closed = jax.make_jaxpr(scaled)(params)
    ran = []
    run_eagerly(closed.jaxpr, [*closed.consts, *jax.tree.leaves(params)], ran)
    expected = [
        (equation.primitive.name, *measure(np.asarray(array)))
        for equation, found in ran
        for array in found
        if jnp.issubdtype(array.dtype, jnp.floating)
    ]
    trace = trace_numerics(mlp_loss, params, x, scale=scale)
    actual = [(x.primitive, *numbers(x.output)) for x in trace.operations]
    assert len(actual) > 60
    actual, expected = Counter(actual), Counter(expected)
    assert not actual - expected
    assert (expected - actual).total() <= 2  # What scales the loss is left out.


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
        trace = trace_numerics(lambda w: total(function(half(w))), TWO)
        assert advice in trace.findings[0].message
        in_float32 = function(TWO)
        assert np.isclose(trace.float32_loss, np.sum(in_float32))
        finite = np.abs(in_float32[np.isfinite(in_float32)])
        largest = trace.first_nonfinite.output.float32_largest
        assert np.isclose(largest, finite.max(initial=0))
        assert not np.isfinite(trace.loss)

    def test_a_sound_program(self):
        trace = trace_numerics(loss_fn, TWO, scale=2.0**10)
        assert [x.kind for x in trace.findings] == ["fine"]
        assert trace.first_nonfinite is None
        assert trace.loss == trace.float32_loss == 5
        assert (trace.scale, trace.dtype) == (2.0**10, "float16")

    def test_an_inf_that_is_swallowed(self):
        def loss_fn(w):
            # It holds a constant of nan, which nobody made.
            spread = lax.stop_gradient(jnp.var(w))
            large = lax.stop_gradient(jnp.exp(half(w) * 12))
            return total(half(w) + jnp.tanh(large)) + 0 * spread

        trace = trace_numerics(loss_fn, TWO)
        assert trace.first_nonfinite.primitive == "exp"
        assert trace.loss == 5
        assert "changes nothing" in trace.findings[0].message

    @pytest.mark.parametrize(
        ("name", "args", "kwargs"),
        [
            ("argument x", (TWO,), {"x": np.array([1, INF], np.float16)}),
            ("argument args[0]", (TWO, np.array([1, NAN], np.float16)), {}),
            ("parameter params", (TWO * NAN,), {}),
        ],
    )
    def test_an_argument_that_is_not_finite(self, name, args, kwargs):
        finding, *_ = trace_numerics(loss_fn, *args, **kwargs).findings
        assert finding.kind == "nonfinite_argument"
        assert name in finding.message

    def test_an_array_that_the_function_closes_over(self):
        data = jax.device_put(np.float32([1, NAN]))
        finding, *_ = trace_numerics(lambda w: total(half(w * data)), TWO).findings
        assert "(array 0 that loss_fn closes over) held nan" in finding.message

    def test_a_masked_row_is_fine(self):
        def loss_fn(w):
            x = jnp.outer(w, w).astype(jnp.float16)
            x = jnp.where(jnp.eye(2, dtype=bool), x, -INF)
            return total(jax.nn.softmax(x) * x.shape[0])

        assert trace_numerics(loss_fn, TWO).first_nonfinite is None


class TestArguments:
    def test_kinds_of_arguments(self):
        def loss_fn(params, activation, *, power, names, none=None):
            assert (power, names, none) == (2, ["a"], None)
            return total(activation(params["w"] ** power)), {"aux": names}

        params = {"w": TWO, "steps": jnp.arange(3), "name": "model", "none": None}
        trace = trace_numerics(
            loss_fn, params, jnp.tanh, power=2, names=["a"], has_aux=True
        )
        assert np.isclose(trace.loss, np.tanh(1) + np.tanh(4))

    @pytest.mark.parametrize("is_inside", [False, True])
    def test_state(self, is_inside):
        optimizer = LossScaleOptimizer(optax.sgd(0.1), initial_scale=2.0**14)
        if is_inside:
            optimizer = optax.masked(optimizer, {"w": True, "b": False})
        params = {"w": TWO, "b": TWO}
        state = optimizer.init(params)
        trace = trace_numerics(lambda p: loss_fn(p["w"] + p["b"]), params, state=state)
        assert trace.scale == 2.0**14
        assert trace.findings[0].kind == "scale_too_high"
        assert trace.largest_scale == 2.0**12

    @pytest.mark.parametrize("scale", [2, 2.0, np.float32(2)])
    def test_scale(self, scale):
        assert trace_numerics(loss_fn, TWO, scale=scale).scale == 2.0

    @pytest.mark.parametrize(
        ("error", "match", "options"),
        [
            (ValueError, "Pass state or scale", {"scale": 1.0, "state": TWO}),
            (ValueError, "scale must be from 2.* got nan", {"scale": NAN}),
            (ValueError, "losses .* one by one", {"scale": [1.0, 2.0]}),
            (TypeError, "a floating-point scalar, and aux", {"has_aux": True}),
        ],
    )
    def test_wrong_arguments(self, error, match, options):
        with pytest.raises(error, match=match):
            trace_numerics(loss_fn, TWO, **options)

    @pytest.mark.parametrize("params", [{}, None, {"n": 1}, np.arange(3)])
    def test_params_without_arrays(self, params):
        with pytest.raises(TypeError, match="params must have a floating"):
            trace_numerics(lambda p: jnp.float32(0), params)

    @pytest.mark.parametrize(
        ("loss", "match"),
        [
            (TWO, "return a scalar loss, got"),
            ((TWO[0], TWO), "must return a floating-point scalar, got"),
            (np.complex64(1), "floating-point scalar, got complex64"),
            ("a", "must return a floating-point scalar, got str"),
        ],
    )
    def test_a_loss_that_is_no_real_scalar(self, loss, match):
        with pytest.raises(TypeError, match=match):
            trace_numerics(lambda w: loss, TWO)

    def test_an_error_of_the_loss_says_how_it_was_called(self):
        with pytest.raises(TypeError) as caught:
            trace_numerics(loss_fn, TWO, TWO, TWO)
        text = "loss_fn(params=float32[2], args[0]=float32[2], args[1]=float32[2])"
        assert any(text in note for note in caught.value.__notes__)

    def test_a_transform_is_not_needed(self):
        with pytest.raises(TypeError) as caught:
            trace_numerics(loss_fn, TWO, transform=jax.value_and_grad)
        notes = caught.value.__notes__
        assert "trace_numerics needs no transform: leave it out." in notes

    def test_a_guard_of_transfers_stays_outside(self):
        with jax.transfer_guard("disallow"):
            assert trace_numerics(loss_fn, TWO).loss == 5
            found = float32_lines(autocast(lambda w: jnp.sum(w @ w)), np.eye(2))
        assert found.verified

    @pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
    @pytest.mark.parametrize("function", [trace_numerics, float32_lines])
    def test_arguments_on_two_devices_are_named(self, function):
        here, there = jax.devices()[:2]
        params = {"w": jax.device_put(TWO, here)}
        f = autocast(lambda params, x: jnp.sum(params["w"] @ x))
        match = r"params\['w'\] is on \[.*\], and args\[0\] on \[.*same devices"
        with pytest.raises(ValueError, match=match):
            function(f, params, jax.device_put(TWO, there))

    def test_a_function_that_raises_under_tracing(self):
        def branches(w, x):
            return jnp.sum(w if w[0] > 0 else x)

        with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
            trace_numerics(branches, TWO, TWO)
        assert any("traced as by jax.jit" in note for note in caught.value.__notes__)

    def test_an_array_of_several_processes(self, monkeypatch):
        two = jax.device_put(TWO)
        monkeypatch.setattr(type(two), "is_fully_addressable", False)
        with pytest.raises(ValueError, match=r"args\[0\] is spread over several proc"):
            trace_numerics(loss_fn, np.ones(2, np.float32), two)

    def test_too_little_memory(self, monkeypatch):
        def fail(*_):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

        monkeypatch.setattr(jax, "device_get", fail)
        with pytest.raises(jax.errors.JaxRuntimeError) as caught:
            trace_numerics(loss_fn, TWO)
        assert "Pass a smaller batch" in caught.value.__notes__[0]

    def test_it_says_how_far_it_is_if_somebody_watches(self, monkeypatch, capsys):
        monkeypatch.setattr(tape, "PATIENCE", 0.0)
        trace_numerics(loss_fn, TWO)
        assert capsys.readouterr().err == ""  # A log is no terminal.
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
        trace_numerics(loss_fn, TWO)
        first, *_, last = capsys.readouterr().err.splitlines()
        assert re.match(r"0 of \d+ operations", first)
        assert re.match(r"\d+ of \d+ operations", last)


def test_report_and_table():
    def loss_fn(w):
        x = half(w)
        for i in range(8):
            x = jnp.exp(x) if i % 2 else -x * 1e3
        return total(x)

    trace = trace_numerics(loss_fn, TWO * jnp.array([1.0, -1.0]), scale=2.0**10)
    lines = str(trace).splitlines()
    assert 2 <= len(lines) <= 30
    assert max(map(len, lines)) <= 79
    assert "exp" in " ".join(lines[:3])
    rows = [x._asdict() | x.output._asdict() for x in trace.operations]
    found = json.loads(json.dumps(rows))
    assert [x["primitive"] for x in found] == [x.primitive for x in trace.operations]
    assert [x["largest"] for x in found] == [x.output.largest for x in trace.operations]
