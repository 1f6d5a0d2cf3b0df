"""`trace_numerics` says "fine" if the loss and the gradients agree with float32."""

import re
import threading
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import exhaustive_but
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P
from tracing import TWO, Casts, by_hand, errors, half, line_of, total

from optax_lossscale.diagnostics import trace_numerics

# A mask constant is -inf in float16.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in cast")
CLOSE = 0.01
needs_devices = pytest.mark.skipif(jax.device_count() < 2, reason="needs 2 devices")


def normal(*shape, std=1.0):
    rng = np.random.default_rng(sum(shape))
    return (std * rng.standard_normal(shape)).astype(np.float32)


def mean(x):
    return jnp.mean(x.astype(jnp.float32))


def distance(x, y):
    return mean(jnp.square(x.astype(jnp.float32) - y))


def on_devices(local):
    """Maps a loss over two devices, and averages it."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    averaged = lambda w, x: lax.pmean(local(w, x), "x")  # noqa: E731
    specs = {"in_specs": (P(), P("x")), "out_specs": P()}
    return jax.shard_map(averaged, mesh=mesh, **specs)


# Each takes `cast`, which casts to float16, or to float32 for the truth.

X, W = normal(8, 6), normal(6, 6, std=0.4)
ATTENTION = {"q": W, "k": W.T, "bias": normal(6), "v": normal(6, 2)}


def attention(cast, params, x, mask=-1e30):
    p, x = cast((params, x))
    scores = (x @ p["q"]) @ (x @ p["k"] + p["bias"]).T
    causal = jnp.tri(len(x), dtype=bool)
    return mean(
        jnp.square(jax.nn.softmax(jnp.where(causal, scores, mask)) @ x @ p["v"])
    )


def dropped_nan(cast, w, x):
    w, x = cast((w, x))
    hidden = jax.nn.relu(x @ w)
    return mean(jnp.where(hidden > 0, jnp.sqrt(hidden + 0), 0) * x)


def bias_before_normalization(cast, params, x):
    p, x = cast((params, x))
    x = x @ p["w"] + p["b"]
    x = x - x.mean(0)
    return distance(x / jnp.sqrt(jnp.square(x).mean(0) + 0.1), X)


def recomputed(cast, params, x):
    @jax.checkpoint
    def block(x, p):
        return jnp.tanh(x @ p["w"] + p["b"] * 2.0**-14)

    p, x = cast((params, x))
    return distance(block(block(x, p), p), X)


def signs(cast, w, x):
    """Some numbers before the ReLU have another sign in float16."""
    w, x = cast((w, x))
    return distance(jax.nn.relu(x @ w), x.astype(jnp.float32))


def ties(cast, w, x):
    """Some numbers of a pool are equal in float16, and share its gradient."""
    numbers = np.random.default_rng(0).integers(0, len(w), (32, 64))
    return mean(jnp.square(jnp.max(cast(w)[numbers], 1).astype(jnp.float32)))


def padded(cast, w, x):
    y = cast(x) @ cast(w)
    places = jnp.argsort(jnp.where(jnp.arange(40) % 5 == 0, jnp.nan, y), -1)[:, :2]
    return mean(jnp.square(jnp.take_along_axis(y, places, -1).astype(jnp.float32)))


def devices(cast, w, x):
    def local(w, x):
        w, x = cast((w, x))
        return distance(jnp.sin(x @ w), 0.5)

    return on_devices(local)(w, x)


def surrogate(cast, w, x):
    """A loss that is zero but for roundoff; its gradient is not."""
    w, x = cast((w, x))
    logs = jax.nn.log_softmax(jnp.sin(x @ w))[:, 0].astype(jnp.float32)
    advantages = X[:, 0] - X[:, 0].mean()
    return -mean(jnp.exp(logs - lax.stop_gradient(logs)) * advantages)


AFFINE = {"w": W, "b": normal(6)}
HEALTHY = {
    attention: (ATTENTION, X),
    dropped_nan: (W, X * np.float32([[0]] + [[1]] * 7)),
    bias_before_normalization: (AFFINE, X),
    recomputed: (AFFINE, X),
    signs: (normal(40, 40), normal(300, 40)),
    ties: (normal(1000, 256), X),
    padded: (normal(40, 40), normal(300, 40)),
    devices: (W, X),
    surrogate: (W, X),
}
DEFAULT = [attention, dropped_nan]


@pytest.mark.parametrize("loss_fn", exhaustive_but(HEALTHY, DEFAULT))
def test_healthy(loss_fn):
    if loss_fn is devices and jax.device_count() < 2:
        pytest.skip("needs 2 devices")
    params, x = HEALTHY[loss_fn]
    trace = trace_numerics(partial(loss_fn, Casts()), params, x, scale=2.0**10)
    assert [x.kind for x in trace.findings] == ["fine"], str(trace)
    # In these, rounded parameters decide otherwise, too.
    is_rounded = "rounded parameters and data" in str(trace)
    assert is_rounded == (loss_fn in (ties, padded))
    run = by_hand(partial(loss_fn, Casts()), params, x)
    truth = by_hand(partial(loss_fn, Casts(jnp.float32)), params, x)(1.0)
    loss, gradients = errors(run(2.0**10), truth)
    assert loss < CLOSE or loss_fn is surrogate
    assert gradients < CLOSE or loss_fn in (signs, ties, padded)
    finite = [e for e in range(30) if np.isfinite(run(2.0**e)[1]).all()]
    assert trace.largest_scale == 2.0 ** finite[-1]


# Faults: `cast(x, True)` casts to float32 in the version that is repaired as advised.


def regression(cast, params, x):
    x = cast(cast(x) @ cast(params["w"][:, :1]), True)
    x = x + cast(params["b"], True) - 1990  # regression
    return mean(jnp.square(x))


def counter(cast, w, x):
    def body(count, _):
        return count + 1, None  # counter

    count, _ = lax.scan(body, cast(jnp.zeros(()), True), length=2200)
    return distance(cast(w), X[:6]) * count.astype(jnp.float32)


def positions(cast, w, x):
    index = jnp.cumsum(cast(jnp.ones(3000), True))  # positions
    table = jnp.cos(jnp.pi * jnp.arange(3001.0))[:, None] * x[:1]
    chosen = table[index.astype(jnp.int32)]
    return distance(cast(chosen) @ cast(w), table[1:])


def small_maximum(cast, w, x):
    x = jax.nn.softmax(cast(cast(x) @ cast(w) * 20, True))
    x = jnp.log(jnp.maximum(x, 1e-8))  # small_maximum
    return mean(x)


def silent_inf(cast, w, x):
    x = cast(cast(x) * 200, True)
    size = jnp.square(x).mean(-1, keepdims=True)  # silent_inf
    return distance(cast(x * lax.rsqrt(size)) @ cast(w), X)


def small_variance(cast, w, x):
    x = cast(cast(x) @ cast(w) * 2.0**-9, True)
    x = x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)  # small_variance
    return distance(x, X)


def summed(cast, w, x):
    x = jnp.square(cast(cast(x) @ cast(w) * 100, True))
    x = x.sum() / x.size  # summed
    return jnp.log(x.astype(jnp.float32))


def one_device(cast, w, x):
    def local(w, x):
        x = cast(jnp.abs(cast(x) @ cast(w)) * 50, True)
        return jnp.log(mean(jnp.square(x)))  # one_device

    return on_devices(local)(w, x)


def in_rule(cast, params, x):
    """Beside a mask constant, which is no fault."""
    f = jax.custom_vjp(lambda x: jnp.tanh(x))
    f.defvjp(lambda x: (jnp.tanh(x), x), lambda x, g: (cast(wide(x) * wide(g)),))
    wide = lambda x: jnp.square(cast(x, True)) * 2.0**-14  # noqa: E731
    loss = attention(cast, params, x)
    return loss + mean(f(cast(x) * cast(params["q"][0]) * 300))  # in_rule


def power_iteration(cast, w, x):
    """Each iteration but the first reads what is inf."""
    w, x = cast((w * 2.0**-14, x))

    def body(u, _):
        u = cast(x @ w + u @ w @ w, True)
        u = u * lax.rsqrt(jnp.square(u).sum(-1, keepdims=True))  # power_iteration
        return cast(u), None

    u, _ = lax.scan(body, cast(jnp.ones((8, 6))), length=3)
    return distance(u, X)


AS_PARAMS = {"w": W, "b": np.array([1990.3], np.float32)}
FAULTY = {
    regression: ("precision", AS_PARAMS, X),
    counter: ("precision", W, X),
    positions: ("decision", W, X),
    small_maximum: ("forward", W, X),
    silent_inf: ("forward", W, X),
    small_variance: ("forward", W, X),
    summed: ("forward", W, X),
    one_device: ("forward", W, X * np.float32([[1]] * 7 + [[10]])),
    in_rule: ("forward", ATTENTION, X),
    power_iteration: ("forward", W, X),
}
DEFAULT = [regression]


@pytest.mark.parametrize("loss_fn", exhaustive_but(FAULTY, DEFAULT))
def test_faulty(loss_fn):
    if loss_fn is one_device and jax.device_count() < 2:
        pytest.skip("needs 2 devices")
    kind, *args = FAULTY[loss_fn]
    trace = trace_numerics(partial(loss_fn, Casts()), *args, scale=2.0**4)
    finding = trace.findings[0]
    assert finding.kind == kind, str(trace)
    line = line_of(loss_fn.__name__, __file__)
    place = finding.operation.file, finding.operation.line
    if kind == "decision":  # It names what was chosen, and what among.
        assert f"{Path(__file__).name}:{line}, in" in finding.message
    else:
        assert place == (__file__, line)
    assert finding.operation.in_rule == (loss_fn is in_rule)
    assert re.search("(compute|and) this line( and .*)? in float32", finding.message)

    truth = by_hand(partial(loss_fn, Casts(jnp.float32)), *args)(1.0)
    for repaired in ([], [True]):
        run = by_hand(partial(loss_fn, Casts(repaired=repaired)), *args)
        assert (np.max(errors(run(2.0**4), truth)) < CLOSE) == bool(repaired)


# The twin is nan, too, so float32 is no help.


def log_in_where(x):
    return jnp.where(x > 0, jnp.log(x), 0)  # log_in_where


def norm_of_zero(x):
    return jnp.linalg.norm(x, axis=-1)  # norm_of_zero


def sqrt_of_maximum(x):
    return jnp.sqrt(jnp.maximum(x, 0))  # sqrt_of_maximum


GUARDED = {
    log_in_where: lambda x: jnp.where(x > 0, jnp.log(jnp.where(x > 0, x, 1)), 0),
    norm_of_zero: lambda x: jnp.sqrt(jnp.square(x).sum(-1) + 1e-3),
    sqrt_of_maximum: lambda x: jnp.sqrt(jnp.maximum(x, 1e-3)),
}


@pytest.mark.parametrize("function", exhaustive_but(GUARDED, [log_in_where]))
def test_advice_where_float32_is_no_help(function):
    x = jnp.zeros((2, 3)).at[1].set(2.0)
    trace = trace_numerics(lambda w: total(function(half(w))), x)
    finding = trace.findings[0]
    assert finding.operation.line == line_of(function.__name__, __file__)
    assert not np.isfinite(jax.grad(lambda w: total(function(w)))(x)).all()
    assert "in float32 too" in finding.message
    assert "compute this line in float32" not in finding.message
    guarded = trace_numerics(lambda w: total(GUARDED[function](half(w))), x)
    assert guarded.findings[0].kind == "fine", str(guarded)


# What the loss scale does.


def test_an_error_of_what_is_zero_in_float32():
    def loss_fn(w, x):
        rounded = x.astype(jnp.float16).astype(jnp.float32)  # begins
        error = 1e4 * (rounded @ w - x @ w)  # In float32 it is zero, and its gradient.
        harmless = jnp.sum(w.astype(jnp.float16).astype(jnp.float32))
        return jnp.mean(jnp.tanh(x @ w)) + jnp.mean(error**2) + harmless * 1e-3

    (finding,) = trace_numerics(loss_fn, W, X).findings
    assert finding.operation.line == line_of("begins", __file__)


@needs_devices
def test_gradients_that_are_flushed_on_devices():
    def local(w, x):
        x = jnp.sin(half(x) @ half(w)).astype(jnp.float32)  # flushed
        return jnp.mean(x) * 2.0**-24

    trace = trace_numerics(on_devices(local), W, X)
    assert not any(map(np.any, by_hand(on_devices(local), W, X)(1.0)[1]))
    assert trace.findings[0].kind == "underflow"
    assert trace.findings[0].operation.line == line_of("flushed", __file__)
    assert "Not followed" not in str(trace)


def test_a_scale_that_is_too_high_beside_a_mask():
    trace = trace_numerics(partial(attention, Casts()), ATTENTION, X, scale=2.0**30)
    (finding,) = trace.findings
    assert finding.kind == "scale_too_high"
    assert finding.operation.phase == "backward"


def test_what_is_computed_again_is_no_backward_pass():
    trace = trace_numerics(partial(recomputed, Casts()), AFFINE, X)
    found = [x.phase for x in trace.operations if x.primitive == "tanh"]
    assert found == ["forward"] * len(found)
    assert len(found) > 2
    transposed = {x.phase for x in trace.operations if x.primitive == "transpose"}
    assert transposed <= {"backward"}


def test_quantized_numbers_are_followed():
    def loss_fn(cast, w):
        w = cast(w)
        return total(jnp.round(w * 100).astype(jnp.int8).astype(w.dtype) * w)

    trace = trace_numerics(partial(loss_fn, Casts()), W)
    assert trace.float32_loss == loss_fn(Casts(jnp.float32), W)
    assert trace.loss != trace.float32_loss


def test_what_is_close_depends_on_the_dtype():
    trace = trace_numerics(
        lambda w: mean(w.astype("bfloat16")), jnp.full(3, 1.003), dtype="bfloat16"
    )
    assert trace.findings[0].kind == "fine"
    assert trace.loss == 1


# JAX is not patched.


def test_rules_of_derivatives_while_it_runs():
    """The line is that of the call, whether the rule was traced before or not."""
    f = jax.custom_vjp(lambda x: x * 1)
    f.defvjp(lambda x: (x, None), lambda _, g: (g * jnp.float16(3e4),))
    before = vars(jax.custom_vjp).copy()
    seen = []

    def loss_fn(w):
        seen.append(vars(jax.custom_vjp) == before)
        return total(f(half(w)) * 4.0)  # rule

    def train():
        jax.grad(loss_fn)(TWO)

    first = trace_numerics(loss_fn, TWO)
    train()
    thread = threading.Thread(target=train)
    thread.start()
    second = trace_numerics(loss_fn, TWO)
    thread.join()
    assert str(first) == str(second)
    assert first.findings[0].operation.line == line_of("rule", __file__)
    assert all(seen)
    f.defvjp(lambda x: (x, None), lambda _, g: (g * 100,))
    assert jax.grad(lambda w: total(f(w)))(TWO).tolist() == [100, 100]
