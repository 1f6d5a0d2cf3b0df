"""Float32 comes first, then inf of the forward pass; a loop that stands still."""

from functools import partial

import jax
import jax.numpy as jnp
import optax
import pytest
from arithmetic import normal
from helpers import exhaustive_but
from jax import lax

from optax_lossscale import LossScaleOptimizer, autocast
from optax_lossscale.diagnostics import float32_lines, report, trace_numerics

X, W = normal(32, 8), normal(8, 8, scale=1 / 3)


def logs(w, x):
    """The first product overflows in float16; float32 fails after it."""
    return jnp.sum((1e3 * x) @ (1e3 * w)) + jnp.mean(jnp.log(x @ jnp.zeros_like(w)))


def norms(w, x):
    """The value is right, and its derivative is nan."""
    return jnp.mean(jnp.tanh(x @ w)) + jnp.linalg.norm(w * 0)


def of_products(function, size=1.0):
    """A loss of a function of products, which is finite in float16."""
    return lambda w, x: jnp.mean(function(size * jnp.abs(x @ w) + size))


SMALLER = "make its inputs smaller: look for outliers"
GUARD = "a second jnp.where"
FAILS = {
    "squares": (lambda w, x: jnp.mean((x @ (1e20 * w)) ** 2), SMALLER),
    "logs": (logs, GUARD),
    "norms": (norms, GUARD),
    "exp": (of_products(jnp.exp, 100.0), "subtracting the maximum"),
    "cosh": (of_products(jnp.cosh, 100.0), SMALLER),
    "division": (of_products(lambda y: 1e30 / (1e-20 * y)), SMALLER),
    "power": (of_products(lambda y: (1e-20 * y) ** -3), SMALLER),
    "product": (of_products(lambda y: jnp.prod(1e20 * y)), SMALLER),
    "log": (of_products(lambda y: jnp.log(-y)), GUARD),
    "arccos": (of_products(lambda y: jnp.arccos(1 + y)), GUARD),
}


@pytest.mark.parametrize("name", exhaustive_but(FAILS, ["squares", "logs", "cosh"]))
def test_no_line_is_advised_for_what_float32_does_too(name):
    loss_fn, advice = FAILS[name]
    (finding,) = trace_numerics(autocast(loss_fn), W, X).findings
    assert advice in finding.message
    texts = "float32 itself makes inf or nan", "in float32 too", "float32 as well"
    assert any(x in finding.message for x in texts)
    assert ("If the loss grew from step to step" in finding.message) == (
        advice == SMALLER
    )
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


def fixed_point(w, x, tolerance=1e-5, limit=100):
    def goes_on(state):
        step, _, change = state
        return (change > tolerance) & (step < limit)

    def iterate(state):
        step, z, _ = state
        new = jnp.tanh(z @ w / 2 + x)
        return step + 1, new, jnp.max(jnp.abs(new - z))

    change = jnp.ones((), x.dtype)
    return lax.while_loop(goes_on, iterate, (0, jnp.zeros_like(x), change))[1]


def by_flag(w, x):
    def iterate(state):
        step, z, _ = state
        new = jnp.tanh(z @ w / 2 + x)
        goes_on = (jnp.max(jnp.abs(new - z)) > 1e-5) & (step < 99)
        return step + 1, new, goes_on

    return lax.while_loop(lambda s: s[2], iterate, (0, jnp.zeros_like(x), True))[1]


def mapped(w, x):
    return jax.vmap(fixed_point, (None, 0))(w, x)


def in_branch(w, x):
    return lax.cond(x[0, 0] < 9, fixed_point, lambda w, x: x, w, x)


def in_loop(w, x):
    return lax.fori_loop(0, 2, lambda _, z: fixed_point(w, z), x)


def solved(solve):
    def loss_fn(w, x, dtype):
        w, x = w.astype(dtype), x.astype(dtype)
        z = lax.stop_gradient(solve(w, x))
        return jnp.mean(jnp.tanh(z @ w).astype(jnp.float32) ** 2)

    return loss_fn


STILL = ": in float16 its numbers never reach the tolerance"
MAYBE = ". If that is its limit, float16 does not reach the tolerance"


@pytest.mark.parametrize(
    "solve",
    exhaustive_but([fixed_point, by_flag, mapped, in_branch, in_loop], [fixed_point]),
)
def test_a_solver_that_stands_still_is_named(solve):
    words = MAYBE if solve is by_flag else STILL
    findings = trace_numerics(solved(solve), W, X, jnp.float16).findings
    (finding,) = (x for x in findings if x.kind == "decision")
    assert "solver at" in finding.message
    assert "this loop takes 100 iterations, in float32 " in finding.message
    assert words in finding.message
    # Alone it is no fault, so it comes first only if it never ends by itself.
    assert findings.index(finding) == (words == MAYBE)
    assert finding.operation.output.largest == 100
    assert 4 < finding.operation.output.float32_largest < 50
    # Of autocast, the loop is float32.
    (finding,) = trace_numerics(autocast(solved(solve)), W, X, jnp.float32).findings
    assert finding.kind == "fine"


@pytest.mark.parametrize(("limit", "words"), [(29, STILL), (9, "")])
def test_a_solver_stands_still_at_any_limit_that_float32_does_not_reach(limit, words):
    solve = partial(fixed_point, limit=limit)
    text = str(trace_numerics(solved(solve), W, X, jnp.float16))
    assert ("solver at" in text) == bool(words)
    assert words in " ".join(text.split())


def test_a_solver_that_stands_still_comes_after_gradients_that_underflow():
    def loss_fn(w, x):
        return 1e-9 * solved(fixed_point)(w, x, jnp.float16)

    findings = trace_numerics(loss_fn, W, X).findings
    assert [findings[0].kind, findings[-1].kind] == ["underflow", "decision"]


def test_a_solver_that_float32_cannot_follow_is_not_counted():
    def with_bits(w, x):
        def iterate(state):
            step, z, _ = state
            new = jnp.tanh(z @ w / 2 + x)
            bits = lax.bitcast_convert_type(new, jnp.int16)
            new = lax.bitcast_convert_type(bits, jnp.float16)
            return step + 1, new, jnp.max(jnp.abs(new - z))

        start = 0, jnp.zeros_like(x), jnp.ones((), x.dtype)
        return lax.while_loop(lambda s: (s[2] > 1e-5) & (s[0] < 9), iterate, start)[1]

    assert "solver at" not in str(trace_numerics(solved(with_bits), W, X, jnp.float16))


def test_a_loop_that_ends_by_a_choice_is_no_solver():
    def generated(w, x):
        def iterate(state):
            step, token = state
            return step + 1, jnp.argmax(x @ w[:, token % 8])

        def goes_on(state):
            return (state[1] != 31) & (state[0] < 50)

        steps, _ = lax.while_loop(goes_on, iterate, (0, 0))
        return x + steps.astype(x.dtype)

    assert "solver at" not in str(trace_numerics(solved(generated), W, X, jnp.float16))


@pytest.mark.filterwarnings("ignore:autocast computes nothing")
def test_a_jitted_autocast_that_casts_nothing_is_not_advised_again():
    trace = trace_numerics(jax.jit(autocast(lambda w, x: jnp.sum(w * x))), W[:1], X)
    assert "trace autocast(loss_fn) without jax.jit to see why" in trace.summary


def test_of_a_jitted_autocast_float32_lines_wants_what_is_inside():
    loss_fn = jax.jit(autocast(lambda w, x: jnp.sum(x @ w)))
    with pytest.raises(TypeError, match="pass the function inside"):
        float32_lines(loss_fn, W, X)


@pytest.mark.parametrize("size", [1e5, 1.0])
def test_gradients_beyond_float16_come_with_a_huge_loss(size):
    def loss_fn(w, x):
        return jnp.sum((x @ w + size) ** 2)

    (first,) = trace_numerics(autocast(loss_fn), W, X).findings
    is_huge = size > 1
    assert first.kind == ("scale_too_high" if is_huge else "fine")
    assert ("In float32, too, the loss is" in first.message) == is_huge


def test_a_donated_state_is_refused_by_name():
    optimizer = LossScaleOptimizer(optax.sgd(0.1))
    state = optimizer.init(jnp.asarray(W))
    for x in jax.tree.leaves(state):
        x.delete()
    for call in (
        lambda: trace_numerics(
            autocast(lambda w, x: jnp.sum(x @ w)), W, X, state=state
        ),
        lambda: report(state),
    ):
        with pytest.raises(ValueError, match="the step donated it"):
            call()
