"""The headroom loss scale: what is particular to it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import scan_updates

from optax_lossscale import DynamicLossScale, HeadroomLossScale


def run(scale, grads):
    return scan_updates(scale, jnp.array(grads, jnp.float32))


def test_steps_down_before_gradients_that_grow_overflow():
    grads = np.float32(2.0 ** np.linspace(-8, 8, 400))
    states, _ = run(HeadroomLossScale(), grads)
    # What the next gradient is multiplied by.
    assert np.all(grads[1:] * states.loss_scale[:-1] < 65504)
    dynamic, _ = run(DynamicLossScale(), grads)
    assert not np.all(grads[1:] * dynamic.loss_scale[:-1] < 65504)


def test_rises_as_gradients_shrink():
    grads = np.float32(2.0 ** np.linspace(0, -10, 1000))
    states, _ = run(HeadroomLossScale(), grads)
    room = 16 - np.log2(grads * states.loss_scale)
    assert np.all(room[300:] < 5)


def test_follows_the_dynamic_rule_where_gradients_stay():
    """With an unseen limit: one overflow in each growth interval."""

    @jax.jit
    def step(state, _):
        grad = jnp.where(scale(state) > 2.0**10, jnp.inf, 0.9)
        state, should_apply = scale.update(grad, state)
        return state, (scale(state), should_apply)

    scale = HeadroomLossScale(growth_interval=50, hysteresis_bits=0)
    _, (scales, applied) = jax.lax.scan(step, scale.init(), length=1000)
    assert np.all(scales[20:] >= 2.0**10)
    assert int(np.sum(~applied[:20])) == 5
    assert 18 <= int(np.sum(~applied[20:])) <= 21


def test_rounding_does_not_halve_the_scale_that_it_keeps():
    scale = HeadroomLossScale(release_steps=1, hysteresis_bits=0)
    for grad in 2.0 ** np.linspace(-3, -2, 97):
        states, _ = run(scale, [grad, np.inf, np.inf, grad])
        assert states.loss_scale[3] == states.loss_scale[2] == states.loss_scale[0] / 4


def test_learns_the_margin_from_what_did_not_overflow():
    scale = HeadroomLossScale(initial_scale=2.0**13, release_steps=1)
    # Nothing that the gradients show explains it: four bits more are needed.
    states, _ = run(scale, [0.9] * 3 + [np.inf] * 4 + [0.9])
    assert states.loss_scale.tolist()[2:] == [2.0**n for n in (14, 13, 12, 11, 10, 10)]
    assert np.isclose(states.margin[-1], 16 - np.log2(0.9) - 10, atol=2e-3)
    # Here it is the gradients that have grown, and the margin remains.
    states, _ = run(scale, [0.9] * 3 + [np.inf] * 4 + [20.0])
    assert states.loss_scale[-1] == 2.0**10
    assert np.isclose(states.margin[-1], 16 - np.log2(20.0) - 10, atol=2e-3)


def test_does_not_flutter():
    rng = np.random.default_rng(0)
    grads = 2.0 ** rng.normal(-5, 0.3, 1000)
    states, _ = run(HeadroomLossScale(), grads)
    assert np.sum(np.diff(states.loss_scale[300:]) != 0) <= 4


@pytest.mark.parametrize("interval", [10**8, 2**31 - 1])
def test_the_longest_intervals_release_something_in_every_step(interval):
    scale = HeadroomLossScale(growth_interval=interval, release_steps=interval)
    state = scale.init()._replace(margin=jnp.float32(9.0), peak=jnp.float32(-3.0))
    for gradient in (0.0, 2.0**-10):
        after = state
        for _ in range(3):
            before, (after, _) = after, scale.update(gradient, after)
            # 1e-8 less is the same in float32.
            assert before.margin - 2e-6 < after.margin < before.margin
            assert before.peak - 2e-6 < after.peak < before.peak


@pytest.mark.parametrize("exponent", [4, 15, 20])
def test_a_damaged_peak_keeps_the_scale(exponent):
    scale = HeadroomLossScale()
    state = scale.init()._replace(loss_scale=jnp.float32(2.0**exponent))
    for peak in (np.nan, np.inf, -1e9):
        after, _ = scale.update(0.0, state._replace(peak=jnp.float32(peak)))
        assert after.loss_scale == state.loss_scale
