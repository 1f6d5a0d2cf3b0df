"""`trace_numerics` says "fine" if the loss and the gradients agree with float32."""

import threading
from functools import partial

import faulty_arithmetic as faulty
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arithmetic import TWO, by_hand, half, mean, normal, relative_errors, total
from faults import BROKEN, EXACT, W, X
from faulty_arithmetic import distance
from helpers import exhaustive_but
from jax import lax
from tracing import line_of

from optax_lossscale.diagnostics import trace_numerics

# A mask constant is -inf in float16.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in cast")
CLOSE = 0.01


# Each takes `cast`, which casts to float16, or to float32 for the truth.


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

    return faulty.on_devices(local)(w, x)


def surrogate(cast, w, x):
    """A loss that is zero but for roundoff; its gradient is not."""
    w, x = cast((w, x))
    logs = jax.nn.log_softmax(jnp.sin(x @ w))[:, 0].astype(jnp.float32)
    advantages = X[:, 0] - X[:, 0].mean()
    return -mean(jnp.exp(logs - lax.stop_gradient(logs)) * advantages)


AFFINE = {"w": W, "b": normal(6)}
HEALTHY = {
    faulty.attention: (faulty.ATTENTION, X),
    dropped_nan: (W, faulty.ONE_EMPTY),
    bias_before_normalization: (AFFINE, X),
    recomputed: (AFFINE, X),
    signs: (normal(40, 40), normal(300, 40)),
    ties: (normal(1000, 256), X),
    padded: (normal(40, 40), normal(300, 40)),
    devices: (W, X),
    faulty.small_weight: (normal(2, 8, 8, scale=2.0), normal(6, 8)),
    surrogate: (W, X),
}
DEFAULT = [faulty.attention, dropped_nan]


@pytest.mark.parametrize("loss_fn", exhaustive_but(HEALTHY, DEFAULT))
def test_healthy(loss_fn):
    if loss_fn is devices and jax.device_count() < 2:
        pytest.skip("needs 2 devices")
    params, x = HEALTHY[loss_fn]
    trace = trace_numerics(partial(loss_fn, BROKEN), params, x, scale=2.0**10)
    assert [x.kind for x in trace.findings] == ["fine"], str(trace)
    # In these, rounded parameters decide otherwise, too.
    is_rounded = "rounded parameters and data" in str(trace)
    assert is_rounded == (loss_fn in (ties, padded))
    run = by_hand(partial(loss_fn, BROKEN), params, x)
    truth = by_hand(partial(loss_fn, EXACT), params, x)(1.0)
    loss, gradients = relative_errors(run(2.0**10), truth)
    assert loss < CLOSE or loss_fn is surrogate
    assert gradients < CLOSE or loss_fn in (signs, ties, padded)
    finite = [e for e in range(40) if np.isfinite(run(2.0**e)[1]).all()]
    assert trace.largest_scale == 2.0 ** finite[-1]


def test_what_is_computed_again_is_no_backward_pass():
    trace = trace_numerics(partial(recomputed, BROKEN), AFFINE, X)
    found = [x.phase for x in trace.operations if x.primitive == "tanh"]
    assert found == ["forward"] * len(found)
    assert len(found) > 2
    transposed = {x.phase for x in trace.operations if x.primitive == "transpose"}
    assert transposed <= {"backward"}


def test_quantized_numbers_are_followed():
    def loss_fn(cast, w):
        w = cast(w)
        return total(jnp.round(w * 100).astype(jnp.int8).astype(w.dtype) * w)

    trace = trace_numerics(partial(loss_fn, BROKEN), W)
    assert trace.float32_loss == loss_fn(EXACT, W)
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
