"""`trace_numerics` and `float32_lines` of a loss with a `jax.Ref`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arithmetic import half, total
from tracing import line_of

from optax_lossscale import autocast
from optax_lossscale.diagnostics import float32_lines, trace_numerics

W = np.linspace(-1, 1, 16, dtype=np.float32).reshape(4, 4)
X = np.linspace(0.1, 3, 8, dtype=np.float32).reshape(2, 4)


def plain(w, x, factor=1.0):
    return factor * jnp.mean(jnp.tanh(x @ w) ** 2)


def made_inside(w, x):
    ref = jax.new_ref(jnp.zeros((2, 4)))
    for i in range(2):
        ref[i, :] = x[i] @ w
    ref[...] = jnp.tanh(ref[...])
    return jnp.mean(jax.freeze(ref) ** 2)


@jax.jit
def write(ref, x):
    ref[...] = x


def written_by_a_jitted_function(w, x):
    ref = jax.new_ref(jnp.zeros((2, 4)))
    write(ref, jnp.tanh(x @ w))
    return jnp.mean(ref[...] ** 2)


def made_in_a_loop(w, x):
    def body(sum_of_all, x):
        ref = jax.new_ref(sum_of_all)
        ref[...] += jnp.sum(jnp.tanh(x @ w) ** 2)
        return ref[...], None

    return jax.lax.scan(body, jnp.float32(0), x)[0] / 8


def filled_by_a_loop(w, x):
    ref = jax.new_ref(jnp.zeros((2, 4)))

    def body(i, x):
        ref[i] = jnp.tanh(x[i] @ w)
        return x

    jax.lax.fori_loop(0, 2, body, x)
    return jnp.mean(ref[...] ** 2)


INSIDE = [made_inside, written_by_a_jitted_function, made_in_a_loop, filled_by_a_loop]


def assert_same_verdict(trace, wanted):
    assert trace.findings[0].kind == wanted.findings[0].kind
    assert trace.largest_scale == wanted.largest_scale
    assert np.isclose(trace.float32_loss, wanted.float32_loss)
    assert np.isclose(trace.loss, wanted.loss, rtol=1e-3)


@pytest.mark.parametrize("loss_fn", INSIDE)
def test_one_that_is_made_inside(loss_fn):
    trace = trace_numerics(autocast(loss_fn), W, X, scale=8.0)
    assert_same_verdict(trace, trace_numerics(autocast(plain), W, X, scale=8.0))
    # What a loop gets runs as it is.
    is_followed = loss_fn is not filled_by_a_loop
    assert ("Not followed in float32: scan" in str(trace)) == (not is_followed)
    assert float32_lines(autocast(loss_fn), W, X).verified


def closed_over(ref):
    return lambda w, x: plain(w, x, ref[...])


@pytest.mark.parametrize("is_passed", [False, True])
def test_one_of_outside_is_read_and_not_written(is_passed):
    ref = jax.new_ref(jnp.float32(2))

    def loss_fn(w, x, given=ref):
        loss = plain(w, x, given[...])
        given[...] = jax.lax.stop_gradient(loss)
        return loss

    args = (W, X, ref) if is_passed else (W, X)
    trace = trace_numerics(autocast(loss_fn), *args)
    assert_same_verdict(trace, trace_numerics(autocast(plain), W, X, 2.0))
    assert float32_lines(autocast(loss_fn), *args).verified
    assert ref[...] == 2


def test_the_line_that_overflows_in_one_is_named():
    def loss_fn(w, x):
        ref = jax.new_ref(jnp.zeros((2, 4), jnp.float16))
        ref[...] = half(x) @ half(w * 300)
        ref[...] = jnp.square(ref[...])  # overflows
        return 1e-6 * total(ref[...])

    trace = trace_numerics(loss_fn, W, X)
    assert trace.findings[0].kind == "forward"
    first = trace.first_nonfinite
    assert (first.line, first.primitive) == (line_of("overflows", __file__), "square")
    assert np.isclose(trace.float32_loss, 1e-6 * np.sum((300 * X @ W) ** 2), rtol=1e-3)
