"""Every optimizer of Optax keeps every promise of the wrapper.

Finite steps are compared to those of the inner optimizer: to the bit where operations
run one by one, and within `CLOSE` under jit, where the compiler may fuse the wrapped
and the inner program differently. What must not change is compared to the bit always.

With float16 parameters the truth is the inner optimizer in float32, whose parameters
are rounded after each step. (`optimizer/test_half_precision.py` has bfloat16, too.)
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_same_bits, exhaustive_but, signature, to_numpy
from jax import lax
from optimizers import (
    NAMES,
    NOT_FOR_MINIMIZE,
    REFUSES_EXTRA_ARGS,
    extra_args,
    gradients,
    loss_fn,
    make,
    make_params,
    make_targets,
)

from optax_lossscale import LossScaleOptimizer

pytestmark = pytest.mark.optimized
# One of each structure: moments, loops and extra arguments, other parameters inside,
# random keys. All others are exhaustive.
TYPICAL = {"adam", "lbfgs", "lookahead", "noisy_sgd"}


def some_optimizers(*names, **options):
    """Runs a test with these optimizers, by default with the typical ones of them."""
    return pytest.mark.parametrize("name", exhaustive_but(names, TYPICAL), **options)


# By module, so that the tests of one optimizer run in a row and share its programs.
every_optimizer = some_optimizers(*NAMES, scope="module")


# The numbers are of the order of one: some dozens of units in the last place.
CLOSE = {"rtol": 1e-5, "atol": 1e-5}

BAD = [("first leaf", np.inf), ("one element", -np.inf), ("last leaf", np.nan)]


def spoil(target, position, value):
    """Makes gradients non-finite at one position, through what the loss aims at."""
    leaves, treedef = jax.tree.flatten(jax.tree.map(np.array, target))
    if position == "one element":
        leaves[0].flat[-1] = value
    else:
        leaves[0 if position == "first leaf" else -1][...] = value
    return treedef.unflatten(leaves)


def with_minus_zeros(params):
    """Gives each leaf an element that the sum with a zero can change: -0.0."""
    return jax.tree.map(lambda x: x.at[(0,) * x.ndim].set(-0.0), params)


def step(name, optimizer, params, state, target):
    """Takes a step with `update` and `optax.apply_updates`."""
    grads = gradients(name, params, target)
    options = extra_args(name, params, target, grads)
    updates, state = optimizer.update(grads, state, params, **options)
    with jax.numpy_dtype_promotion("standard"):
        return optax.apply_updates(params, updates), state, updates


def step_in_one(name, optimizer, params, state, target):
    """Takes a step with `apply_gradients`."""
    grads = gradients(name, params, target)
    options = extra_args(name, params, target, grads)
    return optimizer.apply_gradients(grads, params, state, **options)


def minimize(name, optimizer, params, state, target):
    """Takes a step with `minimize`, or with `apply_gradients` where it cannot."""
    if name in NOT_FOR_MINIMIZE:
        return step_in_one(name, optimizer, params, state, target)
    return optimizer.minimize(loss_fn, params, state, target)[:2]


def inner_part(params, state):
    """Returns what the inner optimizer knows of, and a skip must not change."""
    return params, state.inner_state


def on_host(tree):
    """Copies a tree to NumPy, which takes it apart without compiling anything."""
    return jax.tree.map(to_numpy, tree)


def assert_close(actual, desired):
    compare = functools.partial(np.testing.assert_allclose, **CLOSE)
    jax.tree.map(compare, on_host(actual), on_host(desired))


@functools.cache
def make_compiled(name):
    """Makes an optimizer whose update is one program, compiled once.

    Outside jit each step would compile the loops and branches of some of Optax's
    optimizers again. The operations of the wrapper still run one by one.
    """
    inner = make(name)
    return inner._replace(update=jax.jit(inner.update))


@functools.cache
def inner_steps(name):
    """Returns what three steps of the inner optimizer give: the truth."""
    inner, params = make_compiled(name), make_params(name)
    state, steps = inner.init(params), []
    for target in make_targets(name):
        params, state, updates = step(name, inner, params, state, target)
        steps.append((params, state, updates))
    return steps


@functools.cache
def after_two_steps(name):
    """Returns a wrapped optimizer, parameters and state in the midst of training."""
    optimizer, params = LossScaleOptimizer(make_compiled(name)), make_params(name)
    state = optimizer.init(params)
    for target in make_targets(name)[:2]:
        params, state, _ = step(name, optimizer, params, state, target)
    return optimizer, params, state


def test_finds_the_optimizers():
    assert len(NAMES) >= 40
    assert TYPICAL | {"contrib.muon", "contrib.prodigy"} <= set(NAMES)


@every_optimizer
def test_finite_steps_are_those_of_the_inner_optimizer(name):
    optimizer, params = LossScaleOptimizer(make_compiled(name)), make_params(name)
    state = optimizer.init(params)
    initial = signature(state)
    assert signature(jax.eval_shape(optimizer.init, params)) == initial
    for target, expected in zip(make_targets(name), inner_steps(name), strict=True):
        in_one = step_in_one(name, optimizer, params, state, target)
        params, state, updates = step(name, optimizer, params, state, target)
        assert_same_bits((params, state.inner_state, updates), expected)
        assert_same_bits(in_one, (params, state))
        assert signature(state) == initial
        assert state.last_step_applied


@every_optimizer
def test_skipped_steps_change_nothing(name):
    optimizer, params, state = after_two_steps(name)
    *_, target = make_targets(name)
    marked = with_minus_zeros(params)
    for skips, bad in enumerate(BAD, start=1):
        before, bad_target = state, spoil(target, *bad)
        kept, state, updates = step(name, optimizer, marked, before, bad_target)
        in_one = step_in_one(name, optimizer, marked, before, bad_target)
        assert_same_bits(in_one, (kept, state))
        assert_same_bits(inner_part(kept, state), inner_part(marked, before))
        assert not any(np.any(x) for x in jax.tree.leaves(updates))
        assert signature(state) == signature(before)
        assert not state.last_step_applied
        assert state.loss_scale_state.loss_scale == 2.0 ** (15 - skips)
        assert state.loss_scale_state.good_steps == 0
        assert state.skipped_steps == state.consecutive_skipped_steps == skips
    params, state, updates = step(name, optimizer, params, state, target)
    assert_same_bits((params, state.inner_state, updates), inner_steps(name)[2])
    assert state.last_step_applied
    assert state.loss_scale_state.loss_scale == 2.0 ** (15 - len(BAD))
    assert state.loss_scale_state.good_steps == 1
    assert state.skipped_steps == len(BAD)
    assert state.consecutive_skipped_steps == 0


@every_optimizer
def test_a_loss_that_is_not_finite_changes_nothing(name):
    if name in REFUSES_EXTRA_ARGS:
        pytest.skip("refuses the loss, which `relaxed` hides from the wrapper")
    _, params, state = after_two_steps(name)
    optimizer = LossScaleOptimizer(make_compiled(name), check_loss=True)
    state = state._replace(nonfinite_loss_steps=jnp.int32(0))
    params, (*_, target) = with_minus_zeros(params), make_targets(name)
    for value, bad in ((np.nan, None), (np.inf, BAD[-1])):
        bad_target = spoil(target, *bad) if bad else target
        grads = gradients(name, params, bad_target)
        options = extra_args(name, params, bad_target, grads)
        options["value"] = jnp.float32(value)
        updates, skipped = optimizer.update(grads, state, params, **options)
        assert not any(np.any(x) for x in jax.tree.leaves(updates))
        assert_same_bits(
            optimizer.apply_gradients(grads, params, state, **options),
            (params, skipped),
        )
        assert_same_bits(skipped[:2], state[:2])
        assert signature(skipped) == signature(state)
        assert (skipped.skipped_steps, skipped.nonfinite_loss_steps) == (1, 1)
        assert not skipped.last_step_applied


@every_optimizer
def test_jitted_steps(name):
    optimizer = LossScaleOptimizer(make(name))
    traces = 0

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def donating_step(params, state, target):
        nonlocal traces
        traces += 1
        return minimize(name, optimizer, params, state, target)

    def run(carry, target):
        # On copies: what is donated is gone, and is wanted again below.
        return donating_step(*jax.tree.map(jnp.copy, carry), target)

    params = make_params(name)
    carry = (params, optimizer.init(params))
    *before, target = make_targets(name)
    for i, earlier in enumerate(before):
        carry = run(carry, earlier)
        assert_close(inner_part(*carry), inner_steps(name)[i][:2])
    expected = run(carry, target)
    assert_close(inner_part(*expected), inner_steps(name)[2][:2])
    params, state = carry
    skipped = marked = (with_minus_zeros(params), state)
    for bad in BAD:
        skipped = run(skipped, spoil(target, *bad))
        assert_same_bits(inner_part(*skipped), inner_part(*marked))
    assert skipped[1].skipped_steps == len(BAD)
    resumed = run((params, skipped[1]), target)
    assert_same_bits(inner_part(*resumed), inner_part(*expected))
    assert traces == 1


def in_float32(tree):
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


@every_optimizer
def test_half_precision_parameters_take_the_steps_of_float32(name):
    inner, params = make_compiled(name), make_params(name, "float16")
    optimizer = LossScaleOptimizer(inner)
    expected, inner_state = params, inner.init(in_float32(params))
    state = optimizer.init(params)
    initial = signature(state)
    for target in in_float32(make_targets(name, "float16")):
        wide = in_float32(expected)
        grads = gradients(name, wide, target)
        options = extra_args(name, wide, target, grads)
        updates, inner_state = inner.update(grads, inner_state, wide, **options)
        moved = jax.tree.map(jnp.add, wide, updates)
        expected = jax.tree.map(lambda x: x.astype("float16"), moved)
        # What `update` returns, added in float32, is what `apply_gradients` makes.
        assert_same_bits(optimizer.update(grads, state, params, **options)[0], updates)
        params, state = optimizer.apply_gradients(grads, params, state, **options)
        assert_same_bits((params, state.inner_state), (expected, inner_state))
        assert signature(state) == initial
    assert state.last_step_applied


@every_optimizer
def test_types_are_stable(name):
    optimizer = LossScaleOptimizer(make(name))
    params, (target, *_) = make_params(name, "float16"), make_targets(name, "float16")
    state = jax.eval_shape(optimizer.init, params)
    assert not any(weak for *_, weak in signature(state)[1])

    # `minimize` makes float32 gradients of narrower ones, `step` does not.
    for way in (minimize, step):

        def loop(*carry, way=way):
            return lax.while_loop(
                lambda carry: carry[1].last_step_applied,
                lambda carry: way(name, optimizer, *carry, target)[:2],
                carry,
            )

        carry = (params, state)
        assert signature(jax.eval_shape(loop, *carry)) == signature(carry)


@some_optimizers("adam", "noisy_sgd", "lookahead", "contrib.dpsgd")
def test_ensemble_skips_one_member_alone(name):
    optimizer = LossScaleOptimizer(make(name))
    step_of_all = jax.jit(jax.vmap(functools.partial(step, name, optimizer)))

    def stack(*members):
        return jax.tree.map(lambda *x: np.stack(x), *members)

    def member(tree, index):
        return jax.tree.map(lambda x: x[index], on_host(tree))

    params = jax.tree.map(jnp.asarray, stack(*[make_params(name)] * 3))
    state = jax.vmap(optimizer.init)(params)
    first, second, third = make_targets(name)
    for target in (first, second):
        params, state, _ = step_of_all(params, state, stack(target, target, first))
    before = inner_part(params, state)
    assert_close(member(before, 0), inner_steps(name)[1][:2])

    expected = step_of_all(params, state, stack(third, third, third))
    for bad in BAD:
        targets = stack(third, spoil(third, *bad), third)
        *carry, updates = step_of_all(params, state, targets)
        for index in (0, 2):
            assert_same_bits(member((*carry, updates), index), member(expected, index))
        assert_same_bits(member(inner_part(*carry), 1), member(before, 1))
        scales = carry[1].loss_scale_state.loss_scale
        np.testing.assert_array_equal(scales, [2.0**15, 2.0**14, 2.0**15])
        np.testing.assert_array_equal(carry[1].skipped_steps, [0, 1, 0])
