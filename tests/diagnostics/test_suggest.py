"""The scale that gradients suggest, against exact arithmetic."""

import functools
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import INF, NAN, every_wrap

from optax_lossscale.diagnostics import suggest_loss_scale

DTYPES = ["float16", "bfloat16", "float8_e5m2", "float8_e4m3fn"]


def suggested_exponent(largest, dtype, margin):
    """Finds, with fractions, the largest exponent within the bounds that fits."""
    limit = Fraction(float(jnp.finfo(dtype).max) * 2.0**-margin)
    fits = (e for e in range(126, -127, -1) if Fraction(2) ** e * largest <= limit)
    return next(fits, -126)


class TestSuggestLossScale:
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_any_float32(self, dtype):
        some = np.random.default_rng(0).integers(1, 0x7F800000, 100, np.int32)
        # Subnormal and normal numbers: the smallest and the largest.
        x = np.int32([1, 0x7FFFFF, 0x800000, 0x7F7FFFFF, *some]).view(np.float32)
        numbers = [Fraction(float(y)) for y in x]
        for margin in (0, 0.3, 2.0):
            suggest = functools.partial(suggest_loss_scale, dtype=dtype, margin=margin)
            expected = [suggested_exponent(y, dtype, margin) for y in numbers]
            for tree in ({"a": 0 * x, "b": -x, "c": None}, [x * 1j]):
                found = jax.jit(jax.vmap(suggest))(tree)
                assert np.log2(found).tolist() == expected

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_at_the_limit(self, dtype):
        top = np.float32(jnp.finfo(dtype).max)
        for exponent in (-30, 0, 20):
            with np.errstate(over="ignore"):
                at = np.ldexp(top, -exponent, dtype=np.float32)
            if np.isfinite(at):
                assert suggest_loss_scale(at, dtype, 0) == 2.0**exponent
                above = np.nextafter(at, np.float32(INF))
                assert suggest_loss_scale(above, dtype, 0) == 2.0 ** (exponent - 1)
                assert suggest_loss_scale(at, dtype, 3.0) == 2.0 ** (exponent - 3)

    @every_wrap
    def test_gradients_that_say_nothing(self, wrap):
        suggest = wrap(suggest_loss_scale)
        zeros = jnp.zeros((0, 2)), jnp.zeros(3)
        for grads in (None, [], jnp.arange(3), *zeros, [1.0, INF], [NAN, 1.0]):
            scale = suggest(grads)
            assert (scale, scale.dtype, scale.shape) == (1, jnp.float32, ())

    @pytest.mark.parametrize("name", [*DTYPES, "float32"])
    def test_leaves_of_any_dtype(self, name):
        x = jnp.asarray(np.array([0.25, -4, 0], jnp.dtype(name)))
        assert suggest_loss_scale([x, jnp.float32(1)]) == 2.0**11
        assert jax.vmap(suggest_loss_scale)(x).tolist() == [2**15, 2**11, 1]

    def test_wrong_arguments(self):
        for margin in (-1, 129, NAN):
            with pytest.raises(ValueError, match=f"margin must be .* got {margin}"):
                suggest_loss_scale(1.0, margin=margin)
        with pytest.raises(TypeError, match="margin must be a Python number"):
            suggest_loss_scale(1.0, margin=jnp.ones(()))
