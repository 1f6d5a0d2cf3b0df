"""The loss scale in 60 lines of Optax: `docs/test_pages.py` runs the page."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import INF, NAN, assert_same_bits
from pages import page_blocks

from optax_lossscale import DynamicLossScale, LossScaleOptimizer

PATH = "docs/guide/in-60-lines-of-optax.md"
WRAPPER, _ = page_blocks(PATH)[0]
SCOPE = {"__name__": "page"}
exec(WRAPPER, SCOPE)
dynamic_loss_scale = SCOPE["dynamic_loss_scale"]


def test_is_60_lines_of_jax_and_optax():
    assert sum(bool(line.strip()) for line in WRAPPER.splitlines()) <= 60
    assert "optax_lossscale" not in WRAPPER


@pytest.mark.usefixtures("standard_dtype_promotion")
def test_scales_are_those_of_the_rule():
    """Any run of inf, nan and finite gradients, up to both bounds."""
    bounds = 2.0, 64.0
    choice = np.random.default_rng(0).choice
    gradients = choice([1.0, 0.5, INF, -INF, NAN], 300, p=[0.4, 0.4, 0.1, 0.05, 0.05])
    arguments = 8.0, 2
    theirs = dynamic_loss_scale(optax.adam(0.1), *arguments, *bounds)
    rule = DynamicLossScale(*arguments, min_scale=bounds[0], max_scale=bounds[1])
    ours = LossScaleOptimizer(optax.adam(0.1), rule)

    @jax.jit
    def run(gradients):
        def step(carry, gradient):
            their_state, our_state = carry
            scaled = gradient * their_state.loss_scale
            updates, their_state = theirs.update(scaled, their_state, jnp.float32(1))
            wanted, our_state = ours.update(gradient, our_state, jnp.float32(1))
            scales = their_state.loss_scale, ours.current_loss_scale(our_state)
            return (their_state, our_state), (updates, wanted, *scales)

        states = theirs.init(jnp.float32(1)), ours.init(jnp.float32(1))
        return jax.lax.scan(step, states, gradients)

    (their_state, our_state), (updates, wanted, *scales) = run(jnp.float32(gradients))
    assert_same_bits(*scales)
    assert (scales[0].min(), scales[0].max()) == bounds
    np.testing.assert_allclose(updates, wanted, rtol=1e-5, atol=1e-7)
    skipped = np.sum(~np.isfinite(gradients))
    assert their_state.total_skipped == our_state.skipped_steps == skipped
