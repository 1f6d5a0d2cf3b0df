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

# One of each structure: moments, loops and extra arguments, other parameters inside,
# random keys. All others are exhaustive.
TYPICAL = {"adam", "lookahead", "noisy_sgd", "scale_by_backtracking_linesearch"}


# By module, so that the tests of one optimizer run in a row and share its programs.
every_optimizer = pytest.mark.parametrize(
    "name", exhaustive_but(NAMES, TYPICAL), scope="module"
)

# The numbers are of the order of one: some dozens of units in the last place.
CLOSE = {"rtol": 1e-5, "atol": 1e-5}

# Of the gradients, one element is not finite: of the first or of the last leaf.
BAD = [(0, np.inf), (0, -np.inf), (-1, np.nan)]


def spoil(target, leaf, value):
    """Makes a gradient non-finite, through what the loss aims at."""
    leaves, treedef = jax.tree.flatten(jax.tree.map(np.array, target))
    leaves[leaf].flat[-1] = value
    return treedef.unflatten(leaves)


def with_minus_zeros(params):
    """Gives each leaf an element that the sum with a zero can change: -0.0."""
    return jax.tree.map(lambda x: x.at[(0,) * x.ndim].set(-0.0), params)


def in_float32(tree):
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


def arguments(name, params, target, **changed):
    """Returns gradients and extra arguments, in the dtype of the target."""
    params = optax.tree.cast(params, jax.tree.leaves(target)[0].dtype)
    grads = gradients(name, params, target)
    return grads, extra_args(name, params, target, grads) | changed


def step(name, optimizer, params, state, target, **changed):
    """Takes a step with `update` and `optax.apply_updates`."""
    grads, options = arguments(name, params, target, **changed)
    updates, state = optimizer.update(grads, state, params, **options)
    with jax.numpy_dtype_promotion("standard"):
        return optax.apply_updates(params, updates), state, updates


def step_in_one(name, optimizer, params, state, target, **changed):
    """Takes a step with `apply_gradients`."""
    grads, options = arguments(name, params, target, **changed)
    return optimizer.apply_gradients(grads, params, state, **options)


def both_steps(name, optimizer, params, state, *args, **changed):
    """Takes the step of `update`, and asserts that `apply_gradients` takes the same."""
    *carry, updates = step(name, optimizer, params, state, *args, **changed)
    in_one = step_in_one(name, optimizer, params, state, *args, **changed)
    assert_same_bits(in_one, tuple(carry))
    assert signature(carry[1]) == signature(state)
    return *carry, updates


def minimize(name, optimizer, params, state, target):
    """Takes a step with `minimize`, or with `apply_gradients` where it cannot."""
    if name not in NOT_FOR_MINIMIZE:
        return optimizer.minimize(loss_fn, params, state, target)[:2]
    return step_in_one(name, optimizer, params, state, target)


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
def inner_steps(name, dtype="float32"):
    """Returns what three steps of the inner optimizer in float32 give: the truth."""
    inner, params = make_compiled(name), make_params(name, dtype)
    state, steps = inner.init(in_float32(params)), []
    for target in in_float32(make_targets(name, dtype)):
        moved, state, updates = step(name, inner, in_float32(params), state, target)
        params = jax.tree.map(lambda x: x.astype(dtype), moved)
        steps.append((params, state, updates))
    return steps


def test_finds_the_optimizers():
    assert len(NAMES) >= 40
    assert TYPICAL | {"contrib.muon", "contrib.prodigy"} <= set(NAMES)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@every_optimizer
def test_finite_steps_are_those_of_the_inner_optimizer(name, dtype):
    optimizer = LossScaleOptimizer(make_compiled(name))
    params = make_params(name, dtype)
    state = optimizer.init(params)
    assert signature(jax.eval_shape(optimizer.init, params)) == signature(state)
    targets = in_float32(make_targets(name, dtype))
    for target, expected in zip(targets, inner_steps(name, dtype), strict=True):
        params, state, updates = both_steps(name, optimizer, params, state, target)
        assert_same_bits((params, state.inner_state, updates), expected)
        assert state.last_step_applied


@every_optimizer
def test_skipped_steps_change_nothing(name):
    checks = name not in REFUSES_EXTRA_ARGS
    optimizer = LossScaleOptimizer(make_compiled(name), check_loss=checks)
    params, inner_state, _ = inner_steps(name)[1]
    *_, target = make_targets(name)
    marked = with_minus_zeros(params)
    state = optimizer.init(make_params(name))._replace(inner_state=inner_state)

    def skip(target, **changed):
        kept, after, updates = both_steps(
            name, optimizer, marked, state, target, **changed
        )
        assert_same_bits(inner_part(kept, after), inner_part(marked, state))
        assert not any(np.any(x) for x in jax.tree.leaves(updates))
        assert not after.last_step_applied
        return after

    finite_loss = {"value": jnp.float32(1)} if checks else {}
    for skips, bad in enumerate(BAD, start=1):
        state = skip(spoil(target, *bad), **finite_loss)
        assert state.loss_scale_state == (2.0 ** (15 - skips), 0, None)
        assert state.skipped_steps == state.consecutive_skipped_steps == skips
    if checks:
        # No scale mends a loss that is not finite: it stays as it is.
        for bad_target in (target, spoil(target, *BAD[-1])):
            after = skip(bad_target, value=jnp.float32(jnp.nan))
            assert_same_bits(after.loss_scale_state, state.loss_scale_state)
            counts = after.skipped_steps, after.nonfinite_loss_steps
            assert counts == (len(BAD) + 1, 1)
    params, state, updates = step(name, optimizer, params, state, target)
    assert_same_bits((params, state.inner_state, updates), inner_steps(name)[2])
    assert state.last_step_applied
    assert state.loss_scale_state[:2] == (2.0 ** (15 - len(BAD)), 1)
    assert (state.skipped_steps, state.consecutive_skipped_steps) == (len(BAD), 0)


@pytest.mark.optimized
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
    carries = [(params, optimizer.init(params))]
    for target, wanted in zip(make_targets(name), inner_steps(name), strict=True):
        carries.append(run(carries[-1], target))
        assert_close(inner_part(*carries[-1]), wanted[:2])
    *_, (params, state), expected = carries
    skipped = marked = (with_minus_zeros(params), state)
    for bad in BAD:
        skipped = run(skipped, spoil(target, *bad))
        assert_same_bits(inner_part(*skipped), inner_part(*marked))
    assert skipped[1].skipped_steps == len(BAD)
    resumed = run((params, skipped[1]), target)
    assert_same_bits(inner_part(*resumed), inner_part(*expected))
    assert traces == 1


@every_optimizer
def test_types_are_stable(name):
    optimizer = LossScaleOptimizer(make(name))
    params, (target, *_) = make_params(name, "float16"), make_targets(name, "float16")
    state = jax.eval_shape(optimizer.init, params)
    assert not any(weak for *_, weak in signature(state)[1])

    # `minimize` makes float32 gradients of narrower ones, `step` does not.
    for way in (minimize, step):
        take_step = functools.partial(way, name, optimizer)
        after = jax.eval_shape(take_step, params, state, target)[:2]
        assert signature(after) == signature((params, state))


# The typical one has moments, counts and random keys.
@pytest.mark.parametrize(
    "name",
    exhaustive_but(["adam", "noisy_sgd", "lookahead", "contrib.dpsgd"], ["noisy_sgd"]),
)
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
