"""Updates that are not finite though the gradients are."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import (
    INF,
    NAN,
    WRAPS,
    assert_same_bits,
    every_skip,
    relaxed,
    signature,
)
from jax.sharding import AxisType, PartitionSpec as P

from optax_lossscale import FixedLossScale, LossScaleOptimizer, check_health

PARAMS = {"w": jnp.array([0.5, -0.0], jnp.float32), "b": jnp.float32(-3)}
GOOD = jax.tree.map(jnp.ones_like, PARAMS)


def replace_updates():
    """An inner optimizer that returns what it is given as `returned`."""

    def update(updates, state, params=None, *, returned):
        del params
        return jax.tree.map(lambda u: -u * returned, updates), state + 1

    return optax.GradientTransformationExtraArgs(lambda _: jnp.int32(0), update)


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
@every_skip
def test_skips_and_backs_off(skip, wrap, bad):
    optimizer = LossScaleOptimizer(replace_updates(), skip=skip, check_updates=True)
    step = wrap(lambda p, s, r: optimizer.apply_gradients(GOOD, p, s, returned=r))
    params, before = step(PARAMS, optimizer.init(PARAMS), 0.5)
    assert_same_bits(params, jax.tree.map(lambda p: p - 0.5, PARAMS))
    assert before.last_step_applied
    params, state = step(PARAMS, before, bad)
    assert_same_bits((params, state.inner_state), (PARAMS, before.inner_state))
    assert signature(state) == signature(before)
    assert optimizer.current_loss_scale(state) == 2**14
    assert state[2:7] == (False, 1, 1, 0, 0)
    updates, after = wrap(optimizer.update)(GOOD, before, PARAMS, returned=bad)
    assert_same_bits(after, state)
    assert not any(np.any(u) for u in jax.tree.leaves(updates))


def test_without_it_such_a_step_is_applied():
    optimizer = LossScaleOptimizer(replace_updates())
    state = optimizer.init(PARAMS)
    params, state = optimizer.apply_gradients(GOOD, PARAMS, state, returned=INF)
    assert params["b"] == -INF
    assert state.last_step_applied


def test_gradients_are_still_checked():
    inner = relaxed(optax.chain(optax.clip(1.0), optax.sgd(0.1)))
    optimizer = LossScaleOptimizer(inner, check_updates=True)
    grads = GOOD | {"b": jnp.float32(INF)}
    params, state = optimizer.apply_gradients(grads, PARAMS, optimizer.init(PARAMS))
    assert_same_bits(params, PARAMS)
    assert not state.last_step_applied


def test_a_fixed_scale_skips_but_stays():
    optimizer = LossScaleOptimizer(replace_updates(), 8.0, check_updates=True)
    state = optimizer.init(PARAMS)
    params, state = optimizer.apply_gradients(GOOD, PARAMS, state, returned=NAN)
    assert_same_bits(params, PARAMS)
    assert (state.last_step_applied, state.skipped_steps) == (False, 1)
    assert optimizer.current_loss_scale(state) == 8


@pytest.mark.parametrize("rule", ["headroom", "logmax"])
def test_what_rules_measure_is_the_gradients(rule):
    inner = replace_updates()
    plain, checked = (
        LossScaleOptimizer(inner, rule, check_updates=c) for c in (False, True)
    )
    states = [o.init(PARAMS) for o in (plain, checked)]
    for _ in range(3):
        states = [
            o.apply_gradients(GOOD, PARAMS, s, returned=1e9)[1]
            for o, s in zip((plain, checked), states, strict=True)
        ]
    assert_same_bits(*states)


def test_each_of_several_losses_backs_off():
    optimizer = LossScaleOptimizer(replace_updates(), num_losses=2, check_updates=True)
    state = optimizer.init(PARAMS)
    params, state = optimizer.apply_gradients([GOOD, GOOD], PARAMS, state, returned=INF)
    assert_same_bits(params, PARAMS)
    assert optimizer.current_loss_scale(state).tolist() == [2**14, 2**14]


def test_values_that_are_no_updates_are_not_checked():
    mask = {"w": True, "b": False}
    optimizer = LossScaleOptimizer(optax.sgd(1.0), mask=mask, check_updates=True)
    grads = GOOD | {"b": jnp.float32(INF)}
    params, state = optimizer.apply_gradients(grads, PARAMS, optimizer.init(PARAMS))
    assert state.last_step_applied
    assert params["b"] == INF


@pytest.mark.skipif(jax.device_count() < 2, reason="needs 2 devices")
def test_devices_agree():
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))
    optimizer = LossScaleOptimizer(replace_updates(), axis_name="d", check_updates=True)

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(P("d"), P(), P("d")), out_specs=(P("d"), P()))
    def step(params, state, returned):
        return optimizer.apply_gradients(
            jnp.ones_like(params), params, state, returned=returned
        )

    params = jnp.ones(2, jnp.float32)
    state = optimizer.init(params)
    moved, state = step(params, state, jnp.array([0.5, 0.5], jnp.float32))
    assert moved.tolist() == [0.5, 0.5]
    kept, state = step(params, state, jnp.array([0.5, INF], jnp.float32))
    assert kept.tolist() == [1, 1]
    assert not state.last_step_applied


def sam(**options):
    """SAM in opaque mode, whose second gradient, at a distant point, overflows."""
    inner = optax.contrib.sam(
        optax.sgd(1e-6), optax.sgd(2.0), sync_period=2, opaque_mode=True
    )
    return LossScaleOptimizer(relaxed(inner), FixedLossScale(1.0, True), **options)


def sam_step(optimizer, params):
    def grad_fn(params, _):
        return jax.grad(lambda p: jnp.sum(jnp.exp(1e3 * (p - 1) ** 2)))(params)

    state = optimizer.init(params)
    return optimizer.apply_gradients(
        jnp.ones(1, jnp.float32), params, state, grad_fn=grad_fn
    )


def test_sam_in_opaque_mode():
    params = jnp.ones(1, jnp.float32)
    moved, state = sam_step(sam(), params)
    assert not jnp.isfinite(moved).any()
    assert state.last_step_applied
    kept, state = sam_step(sam(check_updates=True), params)
    assert kept == params
    assert not state.last_step_applied


def test_a_run_of_such_steps_is_not_healthy():
    optimizer = LossScaleOptimizer(replace_updates(), check_updates=True)
    state = optimizer.init(PARAMS)
    step = jax.jit(optimizer.update)
    for _ in range(15 + 3):
        _, state = step(GOOD, state, PARAMS, returned=INF)
    with pytest.raises(FloatingPointError):
        check_health(state, patience=3)


def test_is_part_of_the_configuration():
    inner = optax.sgd(1.0)
    checked = LossScaleOptimizer(inner, check_updates=True)
    assert checked != LossScaleOptimizer(inner)
    assert "check_updates=True" in repr(checked)
    with pytest.raises(TypeError, match="check_updates must be True or False"):
        LossScaleOptimizer(inner, check_updates=1)


def test_what_is_thrown_away_is_not_checked():
    # For integers Adafactor makes nan, which nobody sees.
    params = {"a": jnp.ones((2, 2), jnp.float32), "n": jnp.arange(3)}
    optimizer = LossScaleOptimizer(relaxed(optax.adafactor(0.1)), check_updates=True)
    grads = {"a": jnp.ones((2, 2), jnp.float32), "n": None}
    moved, state = optimizer.apply_gradients(grads, params, optimizer.init(params))
    assert state.last_step_applied
    assert_same_bits(moved["n"], params["n"])
    assert (moved["a"] < 1).all()


def test_updates_that_overflow_in_the_dtype_of_the_gradients():
    optimizer = LossScaleOptimizer(optax.sgd(1e6), check_updates=True)
    params = jnp.ones(3, jnp.float16)
    updates, state = optimizer.update(params, optimizer.init(params), params)
    assert not state.last_step_applied
    assert not updates.any()


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
def test_a_skip_is_differentiated_as_a_step_that_changes_nothing(wrap):
    optimizer = LossScaleOptimizer(relaxed(optax.adam(0.1)), check_updates=True)

    def after(params):
        state = optimizer.init(params)
        moved, state = optimizer.apply_gradients(params + INF, params, state)
        return jnp.sum(moved**2)

    gradient = wrap(jax.grad(after))(jnp.ones(2, jnp.float32))
    assert gradient.tolist() == [2, 2]
