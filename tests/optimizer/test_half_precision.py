"""Half-precision parameters: the inner optimizer computes in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_same_bits, every_wrap, relaxed, signature

from optax_lossscale import LossScaleOptimizer

HALVES = ["float16", "bfloat16"]


def in_float32(tree):
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


def train(optimizer, loss_fn, params, steps, wrap=lambda f: f, state=None):
    step = wrap(lambda params, state: optimizer.minimize(loss_fn, params, state))
    state = optimizer.init(params) if state is None else state
    before = signature(state)
    for _ in range(steps):
        params, state, _ = step(params, state)
        assert signature(state) == before
        assert state.last_step_applied
    return params


@every_wrap
def test_momenta_of_large_gradients_do_not_overflow(wrap):
    def loss_fn(params):
        return jnp.sum((params * jnp.float16(4e4)).astype(jnp.float32))

    inner = optax.sgd(1e-6, momentum=0.9)
    optimizer = LossScaleOptimizer(inner, initial_scale=1.0)
    params = train(optimizer, loss_fn, jnp.zeros(1, jnp.float16), 3, wrap)
    # 1, 1.9 and 2.71 times the gradient, 4e4, and the rate.
    np.testing.assert_allclose(params, [-0.2244], rtol=1e-3)


@pytest.mark.parametrize("dtype", HALVES)
def test_squares_of_small_gradients_do_not_vanish(dtype):
    def loss_fn(params):
        return jnp.sum(1e-6 * params.astype(jnp.float32))

    optimizer = LossScaleOptimizer(relaxed(optax.adam(0.25)))
    params = train(optimizer, loss_fn, jnp.zeros(1, dtype), 2)
    # Adam's steps are as long as the rate, by gradients of whatever size; epsilon
    # takes a hundredth of it.
    np.testing.assert_allclose(in_float32(params), [-0.495], rtol=2e-2)


def halved(state, dtype):
    """Returns a state as a checkpoint in half precision restores it."""

    def half(x):
        return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return state._replace(inner_state=jax.tree.map(half, state.inner_state))


@every_wrap
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("params_dtype", [*HALVES, "float32"])
def test_moments_that_come_back_in_half_precision_are_refused(
    dtype, params_dtype, wrap
):
    optimizer = LossScaleOptimizer(relaxed(optax.adam(0.25)))
    params = {"w": jnp.ones(2, params_dtype)}
    state = halved(optimizer.init(params), dtype)
    message = rf"inner_state\[0\]\.mu\['w'\] must be float32.*got {dtype}.*in float32"
    for call in (
        lambda: wrap(optimizer.update)(params, state),
        lambda: wrap(optimizer.update)(params, state, params),
        lambda: wrap(optimizer.apply_gradients)(params, params, state),
        lambda: train(
            optimizer, lambda p: jnp.float32(p["w"][0]), params, 1, wrap, state
        ),
    ):
        with pytest.raises(TypeError, match=message):
            call()


def test_moments_of_another_half_precision_are_refused():
    optimizer = LossScaleOptimizer(relaxed(optax.lion(0.25, mu_dtype=jnp.bfloat16)))
    params = jnp.ones(2)
    state = halved(optimizer.init(params), jnp.float16)
    with pytest.raises(TypeError, match=r"mu must be bfloat16.*got float16"):
        optimizer.update(params, state, params)


def test_moments_of_parameters_with_a_gradient_are_refused_too():
    optimizer = LossScaleOptimizer(relaxed(optax.adam(0.25)))
    params, grads = {"a": jnp.ones(2), "b": jnp.ones(2)}, {"a": jnp.ones(2), "b": None}
    state = halved(optimizer.init(grads), jnp.float16)
    with pytest.raises(TypeError, match=r"\['a'\] must be float32"):
        optimizer.apply_gradients(grads, params, state)


@pytest.mark.parametrize(
    "inner",
    [
        optax.adam(0.25, mu_dtype=jnp.bfloat16),
        optax.sgd(0.25, 0.9, accumulator_dtype=jnp.float16),
        optax.MultiSteps(optax.adam(0.25, mu_dtype=jnp.bfloat16), 2),
    ],
    ids=["adam", "sgd", "MultiSteps"],
)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_an_optimizer_may_choose_half_precision(inner, dtype):
    optimizer, params = LossScaleOptimizer(relaxed(inner)), jnp.ones(2, dtype)
    state = start = optimizer.init(params)
    assert {"float16", "bfloat16"} & {str(x.dtype) for x in jax.tree.leaves(state)}
    for _ in range(2):
        params, state = optimizer.apply_gradients(params, params, state)
    assert signature(state) == signature(start)
    assert (params < 1).all()


@pytest.mark.parametrize("dtype", HALVES)
def test_updates_of_half_precision_gradients_are_rounded_at_last(dtype):
    """As Optax's own optimizers return the dtype that they are given."""
    inner = relaxed(optax.adam(0.25))
    optimizer, params = LossScaleOptimizer(inner), jnp.ones(2, dtype)
    grads = jnp.asarray([1e-4, -3.0], dtype)
    updates, state = optimizer.update(grads, optimizer.init(params), params)
    wide = in_float32((grads, params))
    expected, inner_state = inner.update(wide[0], inner.init(wide[1]), wide[1])
    assert_same_bits(updates, expected.astype(dtype))
    assert_same_bits(state.inner_state, inner_state)


def test_a_line_search_evaluates_what_it_returns():
    seen = []

    def loss_fn(params):
        seen.append(params.dtype)
        return jnp.sum((params.astype(jnp.float32) - 1) ** 2)

    optimizer = LossScaleOptimizer(relaxed(optax.lbfgs()), initial_scale=2.0**10)
    params = train(optimizer, loss_fn, jnp.zeros(3, jnp.float16), 3, jax.jit)
    np.testing.assert_allclose(params, np.ones(3), rtol=1e-3)
    assert set(seen) == {jnp.dtype("float16")}


@pytest.mark.parametrize("inner", [optax.sgd(0.5), optax.sgd(0.25, momentum=0.5)])
@every_wrap
def test_float8_parameters_train_as_with_optax_alone(wrap, inner):
    """Of numbers that float8 holds exactly: what remains is the order of casts."""
    params = expected = jnp.array([1, -2], jnp.float8_e4m3fn)

    def loss_fn(params, factor):
        return 0.5 * jnp.sum((factor * params.astype(jnp.float32)) ** 2)

    # The gradient is float8 too, which ends at 448.
    optimizer = LossScaleOptimizer(inner, initial_scale=8.0)
    state, inner_state = optimizer.init(params), inner.init(expected)
    minimize = wrap(lambda *args: optimizer.minimize(loss_fn, *args))
    one = jnp.float32(1)
    for _ in range(2):
        grads = jax.grad(loss_fn)(expected, one)
        by_grads, _ = wrap(optimizer.apply_gradients)(grads, params, state)
        updates, inner_state = inner.update(grads, inner_state, expected)
        expected = optax.apply_updates(expected, updates)
        params, state, _ = minimize(params, state, one)
        assert_same_bits((params, by_grads), (expected, expected))
    kept, state, _ = minimize(params, state, jnp.float32(jnp.nan))
    assert_same_bits(kept, params)
    assert state.skipped_steps == 1


# Of these 12, 8 have small constants that are zero in float16: they divide 0 by 0.
NAMES = ["adabelief", "adafactor", "adagrad", "adam", "adamax", "adamw", "amsgrad"]
NAMES += ["lamb", "lion", "nadam", "rmsprop", "sgd"]


def test_a_zero_gradient_in_float16():
    @jax.jit
    def first_updates(grads, params):
        found = {}
        for name in NAMES:
            inner = relaxed(getattr(optax, name)(1e-3))
            found[name] = [
                optimizer.update(grads, optimizer.init(params), params)[0]
                for optimizer in (inner, LossScaleOptimizer(inner))
            ]
        return found

    grads, params = np.array([0, 1], np.float16), np.ones(2, np.float16)
    are_finite = {
        name: [np.isfinite(x).all() for x in updates]
        for name, updates in first_updates(grads, params).items()
    }
    by_itself = ("adagrad", "lamb", "lion", "sgd")
    assert are_finite == {name: [name in by_itself, True] for name in NAMES}
