"""Each step stores why it was skipped."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import INF, NAN, every_wrap, signature
from ways import by_update, every_way

from optax_lossscale import DynamicLossScale, LossScaleOptimizer

# Of each step: the loss, the gradient, and whether skip_if vetoes it.
KINDS = [*itertools.product((1.0, NAN), (1.0, INF), (0.0, 1.0))]
GRADIENTS, LOSS, VETO = 1, 2, 4
ONE = np.float32(1)


def stored(steps, check_loss):
    """Returns the reasons after each step, by sets."""
    seen, found = set(), []
    for loss, grad, veto in steps:
        seen -= {VETO}
        if check_loss and loss != 1:
            seen |= {LOSS}
        elif grad != 1:
            seen |= {GRADIENTS}
        elif veto:
            seen |= {VETO}
        else:
            seen = set()
        found.append(sum(seen))
    return found


@pytest.mark.parametrize("check_loss", [False, True])
def test_every_sequence_of_three_steps(check_loss):
    optimizer = LossScaleOptimizer(optax.sgd(0.5), check_loss=check_loss)

    def step(state, numbers):
        loss, grad, veto = numbers
        extra = {"value": loss} if check_loss else {}
        _, state = optimizer.update(grad, state, ONE, skip_if=veto > 0, **extra)
        return state, state.skip_reasons

    @jax.jit
    @jax.vmap
    def run(steps):
        return jax.lax.scan(step, optimizer.init(ONE), steps)[1]

    sequences = [*itertools.product(KINDS, repeat=3)]
    found = run(jnp.array(sequences, jnp.float32))
    assert found.tolist() == [stored(steps, check_loss) for steps in sequences]


@every_wrap
@every_way
def test_in_every_way(way, wrap):
    optimizer = LossScaleOptimizer(optax.sgd(0.5), check_loss=True)
    step = wrap(functools.partial(way, optimizer))
    param, state = ONE, optimizer.init(ONE)
    assert state.skip_reasons == 0
    types = signature(state)
    for loss, grad, reasons in [(1, INF, 1), (NAN, 1, 3), (1, 1, 0), (NAN, NAN, 2)]:
        param, state = step(param, state, jnp.float32(loss), jnp.float32(grad))
        assert state.skip_reasons == reasons
        assert signature(state) == types


def test_with_retries_the_last_pass_counts():
    rule = DynamicLossScale(2.0**20)
    optimizer = LossScaleOptimizer(optax.sgd(0.5), rule, check_loss=True, retries=8)

    def loss_fn(param, loss, factor):
        half = param.astype(jnp.float16).astype(jnp.float32) * factor
        return half - jax.lax.stop_gradient(half) + loss

    @jax.jit
    def step(*numbers, skip_if=None):
        start = optimizer.init(ONE)
        state = optimizer.minimize(loss_fn, ONE, start, *numbers, skip_if=skip_if)[1]
        return state.skip_reasons, state.retries

    assert step(ONE, ONE) == (0, 5)
    assert step(ONE, ONE, skip_if=True) == (VETO, 5)
    assert step(ONE, 2**10 * ONE) == (GRADIENTS, 8)
    assert step(INF * ONE, ONE) == (LOSS, 0)


def test_a_step_that_is_never_skipped_clears_them():
    optimizer = LossScaleOptimizer(optax.sgd(0.5), 8.0)
    state = optimizer.init(ONE)._replace(skip_reasons=np.int32(3))
    assert optimizer.update(ONE, state)[1].skip_reasons == 0


@every_wrap
@pytest.mark.parametrize("loss_scale", ["dynamic", 8.0])
def test_a_state_from_before_the_field_keeps_its_structure(loss_scale, wrap):
    optimizer = LossScaleOptimizer(optax.sgd(0.5), loss_scale)
    step = wrap(functools.partial(by_update, optimizer))
    new = optimizer.init(ONE)
    old = new._replace(skip_reasons=None)
    types = signature(old)
    for grad in (INF, 1.0):
        _, new = step(ONE, new, ONE, grad * ONE)
        _, old = step(ONE, old, ONE, grad * ONE)
        assert old == new._replace(skip_reasons=None)
        assert signature(old) == types
