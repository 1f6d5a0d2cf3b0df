"""What several test modules need."""

import dataclasses
import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from optax_lossscale import (
    FixedLossScaleState,
    LossScale,
    LossScaleOptimizerState,
    all_finite,
)

WRAPS = {"eager": lambda f: f, "jit": jax.jit}
every_wrap = pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
SUPPORT = Path(__file__).parent
ROOT = SUPPORT.parents[1]
RECIPES = ROOT / "docs" / "recipes"
INF, NAN = float("inf"), float("nan")
# What a scale that was restored or set by hand may be, and what is out of all bounds.
OUT_OF_BOUNDS = [NAN, INF, -INF, 0.0, -8.0, 1e-40, 2.0**127, 3e38]


def exhaustive_but(values, by_default):
    """Marks the parameters of a test as exhaustive, but those that run by default."""
    return [
        pytest.param(x, marks=() if x in by_default else pytest.mark.exhaustive)
        for x in values
    ]


@dataclasses.dataclass(frozen=True)
class BackoffOnly(LossScale):
    """A rule from outside the package, with a minimum of 1 that it does not name."""

    initial_scale: float = 4.0

    def init(self):
        return FixedLossScaleState(jnp.float32(self.initial_scale))

    def update(self, grads, state, *, axis_name=None):
        finite = all_finite(grads, axis_name=axis_name)
        lower = jnp.maximum(state.loss_scale / 2, 1.0)
        scale = jnp.where(finite, state.loss_scale, lower)
        return FixedLossScaleState(scale), finite


def relaxed(inner):
    """Gives an optimizer of Optax, which promotes dtypes freely, leave to do so."""
    inner = optax.with_extra_args_support(inner)

    def init(params):
        with jax.numpy_dtype_promotion("standard"):
            return inner.init(params)

    def update(updates, state, params=None, **extra_args):
        with jax.numpy_dtype_promotion("standard"):
            return inner.update(updates, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(init, update)


def plain_step(loss_fn, inner):
    """Makes the step that `minimize` takes, without loss scaling."""

    def step(params, state, *args):
        loss, grads = jax.value_and_grad(loss_fn)(params, *args)
        updates, state = inner.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    return step


@functools.partial(jax.jit, static_argnums=0)
def scan_updates(scale, grads, state=None):
    """Runs a scale over gradients, and returns the states and the decisions."""

    def step(state, grad):
        state, should_apply = scale.update({"w": grad, "none": None}, state)
        return state, (state, should_apply)

    start = scale.init() if state is None else state
    return jax.lax.scan(step, start, grads)[1]


def replay(scale, run, state=None):
    """Runs a scale over finite and non-finite steps in one jitted scan."""
    grads = np.where(run, np.float32(1), np.float32(INF))
    return scan_updates(scale, grads, state)


def to_numpy(x):
    """Copies an array, or the data of a PRNG key, to NumPy."""
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.array(x)


def arrays(tree):
    """Copies the arrays of a tree, without the counters and the scale of ours."""

    def is_ours(node):
        return isinstance(node, LossScaleOptimizerState)

    def strip(node):
        return node.inner_state if is_ours(node) else node

    leaves = jax.tree.leaves(jax.tree.map(strip, tree, is_leaf=is_ours))
    return [to_numpy(x) for x in leaves if isinstance(x, jax.Array)]


def as_bits(x):
    """Returns the bytes of an array or PRNG key, which tell -0.0 from 0.0."""
    x = to_numpy(x)
    return x.dtype, x.shape, x.tobytes()


def assert_same_bits(actual, desired):
    """Asserts that two trees are equal in structure, dtypes, and bit for bit."""
    assert jax.tree.structure(actual) == jax.tree.structure(desired)
    pairs = zip(
        jax.tree_util.tree_leaves_with_path(actual),
        jax.tree.leaves(desired),
        strict=True,
    )
    for (path, x), y in pairs:
        assert as_bits(x) == as_bits(y), (jax.tree_util.keystr(path), x, y)


def signature(tree):
    """Returns what makes jit trace again: structure, shapes, dtypes, weak types."""
    avals = [jax.typeof(x) for x in jax.tree.leaves(tree)]
    types = [(a.shape, a.dtype, getattr(a, "weak_type", False)) for a in avals]
    return jax.tree.structure(tree), types


def assert_close(actual, desired):
    """Asserts that two trees agree up to the compiler's choice of fusions."""
    assert signature(actual) == signature(desired)
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(desired), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5)


def count_branches(text):
    """Counts the branches in a StableHLO text that return arrays.

    `lax.platform_dependent` leaves a case of one branch behind, and one that
    computes a constant index: neither is a branch at run time.
    """
    count = 0
    for start in re.finditer(r'^( *)%.*"stablehlo\.(?:case|if)"', text, re.MULTILINE):
        body = text[start.start() :]
        body = body[: body.index(f"\n{start[1]}}}) :")]
        result = text[start.start() + len(body) :].splitlines()[1]
        regions = body.count(f"\n{start[1]}}}, {{") + 1
        count += regions > 1 and "x" in result.split("->")[1]
    return count
