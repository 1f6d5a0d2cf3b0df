"""What the checks of the recipes share; they stand in comments of the pages."""

import jax
import numpy as np
import optax
from helpers import INF, arrays, assert_same_bits

from optax_lossscale import select_applied


def check_training(optimizer, data, losses, step, *state, read=lambda *state: state):
    """Asserts that a page has trained, and that a poisoned step is skipped.

    Args:
      optimizer: The optimizer of the page.
      data: Its images and labels.
      losses: The losses that it saw.
      step: Takes the state, images and labels; returns a tuple that begins with the new
        state.
      *state: What the last step of the page left.
      read: Takes the state; returns what a skip leaves alone, and the state of ours.

    Returns:
      The state after a poisoned step and one that was applied.
    """
    images, labels = (x[:128] for x in data)
    assert len(losses) == 60
    assert losses[-1] < losses[0] / 3

    def now(state):
        # In NumPy: what a page changes in place stays here as it was.
        tree = read(*state)
        scale = float(optimizer.current_loss_scale(tree))
        return arrays(tree), scale, int(optax.tree.get(tree, "skipped_steps")[...])

    before, scale, skips = now(state)
    state = step(*state, images.at[5, 20].set(INF), labels)[: len(state)]
    after, new_scale, new_skips = now(state)
    assert_same_bits(after, before)
    assert (new_scale, new_skips) == (scale / 2, skips + 1)
    assert optimizer.dynamic_counter(read(*state)) == 0
    assert select_applied(read(*state), 1.0, 2.0) == 2
    state = step(*state, images, labels)[: len(state)]
    after, _, new_skips = now(state)
    assert new_skips == skips + 1
    for old, new in zip(before, after, strict=True):
        assert np.all(np.isfinite(new))
        # Flax's float8 scales, f32[1], go by the largest number of many steps.
        assert np.any(old != new) or new.shape == (1,)
    return state


def of_nnx(train_step, *kinds):
    """Returns the step and the reading of a model with a trainer."""
    from flax import nnx

    def step(model, trainer, *batch):
        train_step(model, trainer, *batch)
        return model, trainer

    def read(model, trainer):
        params = nnx.to_pure_dict(nnx.state(model, nnx.Any(*kinds)))
        return params, trainer.opt_state

    return step, read


def assert_near(actual, desired, **options):
    for x, y in zip(*map(jax.tree.leaves, (actual, desired)), strict=True):
        if isinstance(x, jax.Array | np.ndarray):
            np.testing.assert_allclose(x, y, **options)
