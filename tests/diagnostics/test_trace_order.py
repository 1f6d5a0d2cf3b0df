"""Float32 comes first, then inf of the forward pass; a loop that stands still."""

import jax
import jax.numpy as jnp
import pytest
from helpers import exhaustive_but
from jax import lax

from optax_lossscale import autocast
from optax_lossscale.diagnostics import trace_numerics

X = jax.random.normal(jax.random.key(0), (32, 8))
W = jax.random.normal(jax.random.key(1), (8, 8)) / 3


def squares(w, x):
    return jnp.mean((x @ w) ** 2)


def logs(w, x):
    """The first product overflows in float16; float32 fails after it."""
    return jnp.sum((1e3 * x) @ (1e3 * w)) + jnp.mean(jnp.log(x @ jnp.zeros_like(w)))


def norms(w, x):
    """The value is right, and its derivative is nan."""
    return jnp.mean(jnp.tanh(x @ w)) + jnp.linalg.norm(w * 0)


@pytest.mark.parametrize(
    ("loss_fn", "size", "words"),
    [
        (squares, 1e20, ["float32 itself makes inf", "diverges", "learning rate"]),
        (logs, 1.0, ["here, in float32 too", "a second jnp.where"]),
        (norms, 1.0, ["here, in float32 too", "a second jnp.where"]),
    ],
)
def test_no_line_is_advised_for_what_float32_does_too(loss_fn, size, words):
    trace = trace_numerics(autocast(loss_fn), size * W, X)
    (finding,) = trace.findings
    assert all(x in finding.message for x in words), trace
    assert finding.kind in ("forward", "backward")
    assert "autocast(" not in finding.message


def test_a_gradient_that_a_scale_lifts_above_float32_is_no_fault_of_float32():
    def loss_fn(w, x):
        return 1e32 * jnp.mean(x @ w)

    (finding,) = trace_numerics(autocast(loss_fn), W, X, scale=2.0**24).findings
    assert finding.kind == "scale_too_high"


@pytest.mark.parametrize(("size", "is_huge"), [(1e-3, True), (1e-6, False)])
def test_a_huge_loss_is_said_beside_the_line(size, is_huge):
    def loss_fn(w, x):
        return jnp.mean((size * ((1e3 * x) @ (1e3 * w))) ** 2)

    first = trace_numerics(autocast(loss_fn), W, X).findings[0]
    assert first.kind == "forward"
    assert ("In float32, too, the loss is" in first.message) == is_huge


@pytest.mark.parametrize("scale", [1.0, 2.0**10])
def test_an_inf_that_is_swallowed_comes_before_gradients_that_underflow(scale):
    def loss_fn(w, x):
        hidden = jnp.tanh(((300 * x) @ (300 * w)) / 9e4)
        return 1e-5 * jnp.mean(hidden**2)

    trace = trace_numerics(autocast(loss_fn), W, X, scale=scale)
    first, second, *_ = trace.findings
    assert (first.kind, first.operation.primitive) == ("forward", "dot_general")
    assert "inf begins here" in first.message
    assert "No loss scale helps: compute this line in float32" in first.message
    assert second.kind == "underflow"
    assert jnp.isfinite(trace.loss)


def fixed_point(w, x, tolerance=1e-5):
    def goes_on(state):
        step, _, change = state
        return (change > tolerance) & (step < 100)

    def iterate(state):
        step, z, _ = state
        new = jnp.tanh(z @ w / 2 + x)
        return step + 1, new, jnp.max(jnp.abs(new - z))

    change = jnp.ones((), x.dtype)
    return lax.while_loop(goes_on, iterate, (0, jnp.zeros_like(x), change))[1]


def mapped(w, x):
    return jax.vmap(fixed_point, (None, 0))(w, x)


def in_branch(w, x):
    return lax.cond(x[0, 0] < 9, fixed_point, lambda w, x: x, w, x)


def in_loop(w, x):
    return lax.fori_loop(0, 2, lambda _, z: fixed_point(w, z), x)


@pytest.mark.parametrize(
    "solve", exhaustive_but([fixed_point, mapped, in_branch, in_loop], [fixed_point])
)
def test_a_solver_that_stands_still_is_named(solve):
    def loss_fn(w, x, dtype):
        w, x = w.astype(dtype), x.astype(dtype)
        z = lax.stop_gradient(solve(w, x))
        return jnp.mean(jnp.tanh(z @ w).astype(jnp.float32) ** 2)

    first, *others = trace_numerics(loss_fn, W, X, jnp.float16).findings
    assert "loop at" in first.message
    assert "it takes 100 iterations, in float32 " in first.message
    assert first.operation.output.largest == 100
    assert 4 < first.operation.output.float32_largest < 50
    assert first.operation.line == goes_on_line()
    assert [x.kind for x in others] == ["fine"]
    # Of autocast, the loop is float32.
    (finding,) = trace_numerics(autocast(loss_fn), W, X, jnp.float32).findings
    assert finding.kind == "fine"


def goes_on_line():
    code = fixed_point.__code__
    return max(line for *_, line in code.co_lines() if line)


def test_a_solver_that_needs_a_few_more_iterations_is_not():
    def loss_fn(w, x):
        w, x = w.astype(jnp.float16), x.astype(jnp.float16)
        z = lax.stop_gradient(fixed_point(w, x, 1e-2))
        return jnp.mean(jnp.tanh(z @ w).astype(jnp.float32) ** 2)

    (finding,) = trace_numerics(loss_fn, W, X).findings
    assert finding.kind == "fine"
