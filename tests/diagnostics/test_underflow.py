"""What underflows, and the histogram of exponents, against NumPy's own conversions."""

import functools
import math
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from casting import x64
from helpers import INF, NAN, assert_same_bits, every_wrap, signature
from hypothesis import given, strategies as st

from optax_lossscale import LossScaleOptimizer
from optax_lossscale.diagnostics import (
    _bits,
    exponent_histogram,
    suggest_loss_scale,
    underflow_stats,
)

# What is of float16 already has been rounded: a test below is about the warning.
pytestmark = pytest.mark.filterwarnings("ignore:The gradients are")
NARROW = ["float16", "bfloat16", "float8_e5m2", "float8_e4m3fn", "float8_e4m3fnuz"]
FLOAT0 = np.zeros(2, jax.dtypes.float0)


def reference(x, scale, dtype):
    """Returns of each number whether it is of each kind, by converting it."""
    dtype = jnp.dtype(dtype)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        x = np.asarray(x).astype(np.float64)
        product = x * scale
        converted = product.astype(dtype).astype(np.float64)
        unscaled = x.astype(dtype).astype(np.float64)
        below_normal = abs(product) < float(jnp.finfo(dtype).tiny)
    nonzero = x != 0
    return {
        "zero": ~nonzero,
        "subnormal": nonzero & (converted != 0) & below_normal,
        "flushed": nonzero & (converted == 0),
        "flushed_unscaled": nonzero & (unscaled == 0),
        "nonfinite": ~np.isfinite(converted),
    }


@functools.partial(jax.jit, static_argnames="dtype")
def each(x, scale, dtype):
    """Returns the statistics of every number of a vector alone."""
    return jax.vmap(lambda x: underflow_stats(x, scale, dtype).overall)(x)


def assert_is_reference(x, scale, dtype):
    x = np.array(x)
    if dtype == "bfloat16":
        # NumPy converts to bfloat16 by way of float32: what rounds twice is left out.
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            product = x.astype(np.float64) * scale
            narrow = product.astype(np.float32)
        x[np.isfinite(narrow) & (narrow != product)] = 0
    found = each(x, jnp.float32(scale), dtype)
    for kind, expected in reference(x, scale, dtype).items():
        actual = np.asarray(getattr(found, kind))
        wrong = np.flatnonzero(actual != expected)
        assert not wrong.size, (kind, np.asarray(x)[wrong[:5]], scale)


def around(x):
    """Adds to float32 numbers those next to them, and the negative ones."""
    bits = x.astype(np.float32).view(np.int32)
    bits = (bits[:, None] + np.arange(-1, 2, dtype=np.int32)).ravel()
    bits = bits[bits >= 0]
    return np.concatenate([bits.view(np.float32), -bits.view(np.float32)])


def all_numbers(dtype):
    """Returns the numbers of a narrow dtype, the positive ones first."""
    kind = np.uint8 if "8" in dtype[5:7] else np.uint16
    return np.arange(np.iinfo(kind).max + 1).astype(kind).view(jnp.dtype(dtype))


def positive_numbers(dtype):
    """Returns all finite positive numbers of a dtype, and those halfway between."""
    numbers = all_numbers(dtype)
    with np.errstate(invalid="ignore"):  # nan
        numbers = numbers[: len(numbers) // 2].astype(np.float64)
    numbers = numbers[np.isfinite(numbers)]
    beyond = [2 * numbers[-1] - numbers[-2]]
    numbers = np.concatenate([numbers, beyond])
    return np.concatenate([numbers, (numbers[1:] + numbers[:-1]) / 2])


def borders_of(dtype):
    """Returns the numbers between which numbers are of one kind."""
    limits = _bits.limits_of(dtype)
    return np.array([limits.flushed, limits.normal, limits.overflow])


class TestBorders:
    @pytest.mark.parametrize("dtype", NARROW)
    def test_around_every_number(self, dtype):
        numbers = positive_numbers(dtype)
        for scale in (1.0, 2.0**-7) if dtype == "bfloat16" else (1.0, 2.0**24):
            with np.errstate(over="ignore"):
                scaled = (numbers / scale).astype(np.float32)
            assert_is_reference(around(scaled), scale, dtype)

    @given(
        exponent=st.integers(-126, 126),
        dtype=st.sampled_from(["float16", "bfloat16", "float8_e4m3fn"]),
    )
    def test_next_to_the_borders(self, exponent, dtype):
        borders = borders_of(dtype)
        with np.errstate(over="ignore", under="ignore"):
            borders = np.concatenate([borders, borders * 2.0**-exponent])
            borders = np.clip(borders, 2.0**-149, np.finfo(np.float32).max)
        assert_is_reference(around(borders), 2.0**exponent, dtype)

    @given(st.floats(2.0**-126, 2.0**126, width=32))
    def test_other_scales_are_exact_up_to_rounding(self, scale):
        x = borders_of("float16") / scale
        x = np.concatenate([x * (1 - 2.0**-22), x * (1 + 2.0**-22)])
        with np.errstate(over="ignore", under="ignore"):
            x = x.astype(np.float32)
        # A subnormal is too coarse, and beyond float32 nothing is near.
        x = np.where((x < 2.0**-126) | ~np.isfinite(x), 0, x).astype(np.float32)
        assert_is_reference(x, scale, "float16")


class TestUnderflowStats:
    grads = {
        "w": np.array([[0.0, 1.0], [2.0**-30, 2.0**-50]], np.float32),
        "b": np.array([2.0**-26, INF, NAN, 2.0**10], np.float32),
        "none": None,
        "int": np.arange(7),
    }

    @every_wrap
    def test_by_hand(self, wrap):
        stats = wrap(underflow_stats)(self.grads, 2.0**8)
        assert list(stats.leaves) == ["grads['b']", "grads['w']"]
        w, b = stats.leaves["grads['w']"], stats.leaves["grads['b']"]
        assert list(map(float, w[:-1])) == [4, 0.25, 0.25, 0.25, 0.5, 0]
        # 2**10 times 2**8 is inf as well.
        assert list(map(float, b[:-1])) == [4, 0, 0.25, 0, 0.25, 0.75]
        overall = list(map(float, stats.overall[:-1]))
        assert overall == [8, 0.125, 0.25, 0.125, 0.375, 0.375]
        top = math.log2(65504)
        np.testing.assert_allclose(w.headroom, top - 8, rtol=1e-6)
        np.testing.assert_allclose(b.headroom, top - 18, rtol=1e-6)
        assert stats.overall.headroom == b.headroom
        assert all(signature(x) == signature(jnp.float32(0)) for x in (*w, *b))

    def test_state_is_one_or_a_number(self):
        optimizer = LossScaleOptimizer(optax.sgd(1.0), 2.0**8)
        expected = underflow_stats(self.grads, 256)
        state = (None, optimizer.init(self.grads["w"]))
        for given_state in (256.0, np.float32(256), jnp.asarray(256), state):
            assert_same_bits(underflow_stats(self.grads, given_state), expected)

    @pytest.mark.parametrize("dtype", [*NARROW, "float32"])
    def test_leaves_of_any_dtype(self, dtype):
        info = jnp.finfo(dtype)
        small = info.smallest_subnormal
        x = jnp.asarray(np.array([0, small, 1, -2], dtype))
        assert_is_reference(x, 4, "float16")
        assert exponent_histogram(x).counts.sum() == 3

    def test_complex_numbers_are_two(self):
        grads = jnp.array([1e-9 + 0j, complex(INF, 8)], "complex64")
        overall = underflow_stats([grads], 1).overall
        assert list(map(float, overall[:-1])) == [4, 0.25, 0, 0.25, 0.25, 0.25]
        assert overall.headroom == np.float32(math.log2(65504) - 3)
        assert exponent_histogram(grads).zeros == 1

    @every_wrap
    def test_without_numbers_all_is_zero(self, wrap):
        key = jax.random.key(0)
        for grads in (None, (), [jnp.arange(3), None], jnp.zeros((0, 3)), [key]):
            overall, leaves = wrap(underflow_stats)(grads, 2.0)
            assert len(leaves) == (getattr(grads, "size", None) == 0)
            assert list(map(float, overall)) == [0, 0, 0, 0, 0, 0, INF]
            histogram = wrap(exponent_histogram)(grads)
            assert sum(float(x.sum()) for x in histogram[1:]) == 0
        assert not underflow_stats([FLOAT0, print], 2.0).leaves

    def test_headroom_is_exact_for_powers_of_two(self):
        for exponent in (-149, -140, -126, -3, 0, 127):
            x = np.ldexp(np.float32(1), exponent).astype(np.float32)
            for scale in (1.0, 2.0**20, 2.0**126):
                room = underflow_stats(x, scale, "bfloat16").overall.headroom
                top = math.log2(float(jnp.finfo("bfloat16").max))
                assert room == np.float32(top - math.log2(scale) - exponent)

    def test_what_overflows_float32_is_not_finite(self):
        overall = underflow_stats(jnp.float32(1e30), 2.0**126).overall
        assert overall.nonfinite == 1
        np.testing.assert_allclose(
            overall.headroom, math.log2(65504 / 1e30) - 126, rtol=1e-6
        )

    def test_counts_beyond_float32(self):
        n = 2**24 + 8
        x = jnp.zeros(n, jnp.float16)
        overall = underflow_stats([x, jnp.ones(8)], 1.0).overall
        assert (overall.size, overall.zero) == (n + 8, np.float32(n / (n + 8)))
        assert exponent_histogram(x).zeros == n

    def test_gradients_that_are_rounded_already(self):
        grads = {"w": jnp.ones(2, jnp.float16), "b": jnp.ones(2)}
        for function in (jax.jit(underflow_stats), underflow_stats):
            with pytest.warns(UserWarning, match="are float16 already") as seen:
                function(grads, 2.0)
            assert len(seen) == 1
        assert seen[0].filename == __file__
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            underflow_stats(grads, 2.0, "bfloat16")
            underflow_stats(grads["b"], 2.0)


class TestTable:
    def test_one_row_for_each_leaf_the_worst_first(self):
        grads = {
            "fine": jnp.ones(3000),
            "flushed": jnp.array([1.0, 2.0**-26, 0.0]),
            "subnormal": jnp.array([1.0, 2.0**-20]),
            "bad": jnp.array([1.0, INF]),
        }
        stats = underflow_stats(grads, 1.0)
        assert repr(stats) == str(stats)
        header, *rows = [line.split() for line in str(stats).splitlines()]
        assert header == list(stats.overall._fields)
        assert [name for name, *_ in rows] == [
            "all", *(f"grads['{x}']" for x in ("bad", "flushed", "subnormal", "fine"))
        ]  # fmt: skip
        assert rows[2][1:] == ["3", "33.3%", "0.0%", "33.3%", "33.3%", "0.0%", "16.0"]
        assert rows[-1][1] == "3,000"
        assert len({len(line) for line in str(stats).splitlines()}) == 1

    def test_of_many_leaves_the_worst_are_shown(self):
        leaves = [jnp.float32(2.0**-26)] + [jnp.ones(3)] * 299
        text = str(underflow_stats(leaves[::-1], 1.0))
        assert len(text) < 2000
        assert text.splitlines()[2].startswith("grads[299]")
        assert text.endswith("\nand 288 more")


class TestExponentHistogram:
    def check(self, x):
        """Asserts that numbers are counted as one by one."""
        _, *found = jax.jit(exponent_histogram)(x)
        with np.errstate(invalid="ignore"):  # nan
            x = np.asarray(x).astype(np.float64)
        counts = np.zeros(277)
        for number in x[np.isfinite(x) & (x != 0)]:
            counts[math.frexp(number)[1] - 1 + 149] += 1
        expected = counts, (x == 0).sum(), np.isinf(x).sum(), np.isnan(x).sum()
        for numbers, wanted in zip(found, expected, strict=True):
            np.testing.assert_array_equal(numbers, wanted)

    def test_every_power_of_two_and_what_is_next_to_it(self):
        powers = np.ldexp(np.float64(1), np.arange(-149, 128)).astype(np.float32)
        x = np.concatenate([powers, np.nextafter(powers, np.float32(0)), [INF, NAN]])
        x = np.concatenate([x, np.nextafter(powers, np.float32(INF))])
        self.check(x.astype(np.float32))

    @pytest.mark.parametrize("dtype", NARROW)
    def test_every_number_of_a_narrow_dtype(self, dtype):
        self.check(all_numbers(dtype))

    def test_sums_leaves(self):
        found = exponent_histogram([jnp.ones(2), [3.0, 0.0], None, jnp.arange(3)])
        assert found.counts[found.counts > 0].tolist() == [2, 1]
        assert found.zeros == 1

    def test_float64_counts_as_float32(self):
        x = np.array([5e-324, 2.0**-126, 1.5, 65519.9, 1e308, 0.0, INF, NAN])
        with np.errstate(over="ignore", under="ignore"):
            narrow = x.astype(np.float32)
        for function in (
            exponent_histogram,
            lambda x: underflow_stats(x, 2.0**15),
            lambda x: suggest_loss_scale(x[:4]),
        ):
            expected = function(jnp.asarray(narrow))
            with x64():
                found = function(jnp.asarray(x))
            for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
                assert a.dtype == b.dtype
                np.testing.assert_array_equal(a, b)


def count_scalar_operations(function, *args):
    """Counts the operations of a trace that make scalars of scalars.

    XLA repeats them wherever their results are used. If there are more for each leaf of
    a tree, a few hundred leaves take minutes to compile.
    """
    text = str(jax.make_jaxpr(function)(*args))
    results = re.findall(r":\w+\[\] = (\w+)", text)
    others = "reduce", "reshape", "jit", "pjit"
    return sum(not name.startswith(others) for name in results)


class TestManyLeaves:
    @staticmethod
    def tree(n):
        """Returns n leaves of a few shapes, dtypes and magnitudes."""
        rng = np.random.default_rng(n)
        leaves = []
        for i in range(n):
            x = rng.normal(size=[(3,), (2, 2), (), (7,)][i % 4])
            x = np.ldexp(x, rng.integers(-40, 20)) * (rng.random(x.shape) > 0.1)
            leaves.append(x.astype([np.float32, np.complex64][i % 5 == 0]))
        return [*leaves, np.float32([1, INF, NAN])]

    def test_together_they_are_as_one(self):
        tree = self.tree(8)
        numbers = [np.ravel(x) for x in tree]
        parts = [x.view(np.float32) for x in numbers]
        together = np.concatenate(parts)
        stats = jax.jit(lambda x: underflow_stats(x, 2.0**9))
        found, expected = map(stats, (tree, together))
        assert_same_bits(found.overall, expected.overall)
        assert 0 < found.overall.subnormal < found.overall.flushed_unscaled < 1
        for leaf, part in zip(found.leaves.values(), parts, strict=True):
            assert_same_bits(leaf, stats(part).overall)
        histograms = map(jax.jit(exponent_histogram), (tree, together))
        assert_same_bits(*histograms)

    @pytest.mark.parametrize(
        "function", [underflow_stats, exponent_histogram, suggest_loss_scale]
    )
    def test_scalar_operations_are_not_more(self, function):
        scale = (jnp.float32(2),) if function is underflow_stats else ()
        few, many = (
            count_scalar_operations(function, [jnp.ones(3)] * n, *scale)
            for n in (2, 50)
        )
        assert few == many


class TestTransformations:
    x = np.ldexp(np.float32(1), np.arange(-60, 4)).reshape(8, 8)

    @staticmethod
    def both(x, state=2.0**10):
        grads = {"w": x, "none": None}
        return underflow_stats(grads, state), exponent_histogram(grads)

    def test_jit_scan_and_vmap_are_eager(self):
        scales = 2.0 ** jnp.arange(8, dtype=jnp.float32)
        rows = [self.both(*row) for row in zip(self.x, scales, strict=True)]
        expected = jax.tree.map(lambda *rows: jnp.stack(rows), *rows)

        def step(carry, row):
            found = self.both(*row)
            assert signature(found) == signature(carry)
            return found, found

        scan = jax.jit(lambda *rows: jax.lax.scan(step, self.both(self.x[0]), rows)[1])
        for mapped in (jax.vmap(self.both), scan):
            assert_same_bits(mapped(self.x, scales), expected)
