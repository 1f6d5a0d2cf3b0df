"""Extra arguments of the inner optimizer: what reaches it, and what does not."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest

from optax_lossscale import LossScaleOptimizer, diagnostics, with_loss_scale


def square(x):
    return x**2


def shifted_power(x, power, *, offset):
    return (x - offset) ** power, {"aux": x}


def test_reach_the_inner_optimizer():
    seen = {}

    def update(updates, state, params=None, **extra_args):
        seen.update(extra_args)
        return updates, state

    inner = optax.GradientTransformationExtraArgs(optax.init_empty_state, update)
    optimizer = LossScaleOptimizer(inner)
    one = jnp.float32(1)
    state = optimizer.init(one)
    for call in (optimizer.update, jax.jit(optimizer.update, static_argnames="f")):
        seen.clear()
        call(one, state, value=one, note={"a": one}, f=max)
        assert seen.keys() == {"value", "note", "f"}
        assert seen["f"] is max
    seen.clear()
    optimizer.apply_gradients(one, one, state, value=one)
    assert seen == {"value": 1}


@pytest.mark.parametrize("retries", [0, 3])
@pytest.mark.parametrize(
    "name", ["scale", "state", "params", "rule", "args", "self", "method", "loss_fn"]
)
def test_of_the_loss_have_any_name(name, retries):
    def loss_fn(params, /, **named):
        return params * named[name]

    def check(function, *args):
        assert function(*args, **{name: jnp.float32(3)})[0] == 3

    one = jnp.float32(1)
    optimizer = LossScaleOptimizer(optax.sgd(1.0), retries=retries)
    args = loss_fn, one, optimizer.init(one)
    assert optimizer.minimize(*args, **{name: jnp.float32(3)})[0] == -2
    if not retries:
        check(optimizer.value_and_grad(loss_fn, args[2]), one)
    scaled = with_loss_scale(lambda params, /, **named: loss_fn(params["w"], **named))
    check(jax.value_and_grad(scaled), {"w": one, "loss_scale": one})
    if name not in ("scale", "state"):  # These two choose the scale there.
        diagnostics.trace_numerics(loss_fn, one, **{name: jnp.float32(3)})


def test_of_the_loss_that_a_trace_has_too_are_refused():
    def loss_fn(params, x, scale=1.0):
        return params * x * scale

    one = jnp.float32(1)
    for function in (loss_fn, with_loss_scale(loss_fn)):
        with pytest.raises(
            TypeError, match=r"'scale' of its own.*partial\(loss_fn, sc"
        ):
            diagnostics.trace_numerics(function, one, one, scale=3.0)
    bound = functools.partial(loss_fn, scale=3.0)
    for function, args in ((loss_fn, (one, one, 3.0)), (bound, (one, one))):
        trace = diagnostics.trace_numerics(function, *args, scale=2.0)
        assert (trace.loss, trace.scale) == (3, 2)


def test_of_the_inner_optimizer_have_any_name():
    def update(updates, state, params=None, *, method):
        return method * updates, state

    inner = optax.GradientTransformationExtraArgs(optax.init_empty_state, update)
    optimizer, one = LossScaleOptimizer(inner), jnp.float32(1)
    assert optimizer.update(one, optimizer.init(one), method=2)[0] == 2


AROUND = {
    "nothing": lambda inner: inner,
    "chain": lambda inner: optax.chain(optax.identity(), inner),
    "partial": lambda inner: inner._replace(update=functools.partial(inner.update)),
    "named chain": lambda inner: optax.named_chain(("inner", inner)),
    "partition": lambda inner: optax.partition({"all": inner}, "all"),
    "factory": lambda inner: optax.inject_hyperparams(lambda rate: inner)(rate=0.1),
}


@pytest.mark.parametrize("wrap", AROUND.values(), ids=AROUND)
def test_minimize_passes_what_line_searches_need(wrap):
    seen = {}

    def named(updates, state, params=None, *, value, grad, value_fn, **others):
        seen.update(value=value, grad=grad, value_fn=value_fn, **others)
        return updates, state

    def unnamed(updates, state, params=None, **extra_args):
        seen.update(extra_args)
        return updates, state

    for update in (named, unnamed):
        inner = optax.GradientTransformationExtraArgs(lambda _: (), update)
        optimizer, three = LossScaleOptimizer(wrap(inner)), jnp.float32(3)
        seen.clear()
        state, options = optimizer.init(three), {"has_aux": True, "offset": 1.0}
        optimizer.minimize(shifted_power, jnp.float32(4), state, 2, **options)
        assert (seen["value"], seen["grad"]) == (9, 6)
        assert seen["value_fn"](jnp.float32(5)) == 16


def test_minimize_of_a_compiled_inner_optimizer():
    inner, three = optax.lbfgs(1.0, linesearch=None), jnp.float32(3)
    for update in (inner.update, jax.jit(inner.update)):
        optimizer = LossScaleOptimizer(inner._replace(update=update))
        params, *_ = optimizer.minimize(square, three, optimizer.init(three))
        assert params == 2


def test_minimize_passes_no_more_than_is_taken():
    def update(updates, state, params=None, *, value):
        return jax.tree.map(lambda u: -u * value, updates), state

    # Against Optax's convention it takes no others; optax.contrib.sam is such.
    inner = optax.GradientTransformationExtraArgs(lambda _: (), update)
    optimizer, three = LossScaleOptimizer(inner), jnp.float32(3)
    params, *_ = optimizer.minimize(square, three, optimizer.init(three))
    assert params == 3 - 6 * 9
