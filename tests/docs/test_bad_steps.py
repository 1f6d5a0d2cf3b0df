"""The guard on the page about bad steps: what it vetoes, and what it learns."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits
from pages import page_blocks

pytestmark = pytest.mark.usefixtures("standard_dtype_promotion")
BLOCKS = page_blocks("docs/guide/guard-a-run.md")
(CODE,) = (code for code, _ in BLOCKS if "class Guard" in code)
GUARD = {"jax": jax, "jnp": jnp}
exec(CODE, GUARD)
NOISE = np.random.default_rng(0).lognormal(0, 0.2, (300, 2)).astype(np.float32)


def follow(values):
    """Returns the steps that the guard vetoes, and what it knows in the end."""

    def step(guard, values):
        seen = jnp.log(values)
        veto = GUARD["is_outlier"](guard, seen)
        is_applied = ~veto & jnp.isfinite(values[1])  # as with `skip_nonfinite`
        return GUARD["learn"](guard, seen, is_applied), veto

    guard = GUARD["Guard"](*jnp.zeros((4, 2)))
    guard, vetoed = jax.lax.scan(step, guard, jnp.asarray(values))
    return np.flatnonzero(vetoed).tolist(), guard


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, 100.0])
def test_bad_steps_leave_no_trace(bad):
    where = [150, 160] if bad == 100 else [0, 1, 150]
    assert_same_bits(follow(np.insert(NOISE, where, bad, 0))[1], follow(NOISE)[1])


def test_what_is_vetoed():
    steps = np.arange(300)[:, None]
    vetoed, guard = follow(NOISE * 1e6 ** (steps / 300))
    assert vetoed == []
    assert np.all(guard.mean > np.log(1e6) / 2 + 1)  # above the mean of all steps
    assert follow(np.where(steps == 10, 100, NOISE))[0] == []
    # A new level, of the norm alone, where no loss has a log.
    levels = NOISE * [-1, 1] * np.where(steps < 150, 1, 100)
    vetoed, guard = follow(levels)
    assert vetoed == list(range(150, 170))
    np.testing.assert_allclose(guard.mean, [0, np.log(100)], atol=0.1)
