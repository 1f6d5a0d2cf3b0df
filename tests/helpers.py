"""What several test modules need."""

import re

import jax
import numpy as np
import optax


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


def as_bits(x):
    """Returns the bytes of an array or PRNG key, which tell -0.0 from 0.0."""
    if isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    x = np.asarray(x)
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
