"""The scale that gradients suggest, and what a sweep of scales finds."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import INF, NAN, WRAPS, assert_same_bits, count_scalar_operations
from hypothesis import given, strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from optax_lossscale import LossScaleOptimizer
from optax_lossscale.diagnostics import _sweep, scale_sweep, suggest_loss_scale

X64 = jax.config.jax_enable_x64
DTYPES = ["float16", "bfloat16", "float8_e5m2", "float8_e4m3fn"]


def suggested_exponent(largest, dtype, margin):
    """Finds, with fractions, the largest exponent within the bounds that fits."""
    limit = Fraction(float(jnp.finfo(dtype).max) * 2.0**-margin)
    fits = (e for e in range(126, -127, -1) if Fraction(2) ** e * largest <= limit)
    return next(fits, -126)


class TestSuggestLossScale:
    @given(
        bits=st.integers(1, 0x7F7FFFFF),
        dtype=st.sampled_from(DTYPES),
        margin=st.sampled_from([0, 1.0, 2, 0.3]),
    )
    def test_any_float32(self, bits, dtype, margin):
        x = np.array([0, bits], np.int32).view(np.float32)
        expected = suggested_exponent(Fraction(float(x[1])), dtype, margin)
        for grads in ({"a": -x, "b": x[:1], "c": None}, [x[1] * 1j]):
            assert suggest_loss_scale(grads, dtype, margin) == 2.0**expected

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

    @pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
    def test_gradients_that_say_nothing(self, wrap):
        suggest = wrap(suggest_loss_scale)
        zeros = jnp.zeros((0, 2)), jnp.zeros(3)
        for grads in (None, [], jnp.arange(3), *zeros, [1.0, INF], [NAN, 1.0]):
            scale = suggest(grads)
            assert (scale, scale.dtype, scale.shape) == (1, jnp.float32, ())

    @pytest.mark.parametrize("name", [*DTYPES, "float32", *["float64"] * X64])
    def test_leaves_of_any_dtype(self, name):
        x = jnp.asarray(np.array([0.25, -4, 0], jnp.dtype(name)))
        assert suggest_loss_scale([x, jnp.float32(1)]) == 2.0**11
        assert jax.vmap(suggest_loss_scale)(x).tolist() == [2**15, 2**11, 1]

    def test_many_leaves_are_as_one(self):
        rng = np.random.default_rng(0)
        for largest in (-9, 0, 30):
            x = np.ldexp(rng.normal(size=120), rng.integers(-40, largest, size=120))
            leaves = np.split(x.astype(np.float32), 40)
            top = Fraction(float(np.abs(x.astype(np.float32)).max()))
            expected = 2.0 ** suggested_exponent(top, "float16", 2)
            assert suggest_loss_scale(leaves) == expected
            assert suggest_loss_scale([*leaves, np.float16(NAN)]) == 1

    def test_scalar_operations_are_not_more_of_many_leaves(self):
        few, many = (
            count_scalar_operations(suggest_loss_scale, [jnp.ones(3)] * n)
            for n in (2, 50)
        )
        assert few == many

    @pytest.mark.skipif(not X64, reason="needs JAX_ENABLE_X64=1")
    def test_float64_by_its_own_bits(self):
        at = 65504 * 2.0**-60
        assert suggest_loss_scale(jnp.float64(at), margin=0) == 2.0**60
        assert suggest_loss_scale(np.nextafter(at, 1.0), margin=0) == 2.0**59
        assert suggest_loss_scale(jnp.float64(1e-300)) == 2.0**126
        assert suggest_loss_scale(jnp.float64(1e300)) == 2.0**-126

    def test_wrong_arguments(self):
        for margin in (-1, 129, NAN):
            with pytest.raises(ValueError, match=f"margin must be .* got {margin}"):
                suggest_loss_scale(1.0, margin=margin)
        with pytest.raises(TypeError, match="margin must be a Python number"):
            suggest_loss_scale(1.0, margin=jnp.ones(()))
        with pytest.raises(ValueError, match=r"dtype must be .*'float32'"):
            suggest_loss_scale(1.0, "float32")


def loss_fn(params, batch):
    """Has the gradients batch * 2**-20, computed in float16."""
    products = params["w"].astype(jnp.float16) * batch.astype(jnp.float16)
    return jnp.sum(products.astype(jnp.float32)) * 2.0**-20


PARAMS = {"w": jnp.ones(3)}
BATCH = jnp.array([2.0**-10, 2.0**-3, 1.0])


def naive_sweep(params, batch, scales):
    """The definition of a sweep, with all gradients in memory."""
    unscaled = []
    for scale in scales:
        optimizer = LossScaleOptimizer(optax.identity(), scale)
        state = optimizer.init(params)
        grads = optimizer.value_and_grad(loss_fn, state)(params, batch)[1]
        unscaled.append(np.asarray(grads["w"], np.float64).ravel())
    finite = [np.isfinite(x).all() for x in unscaled]
    seen = sum(x != 0 for x, ok in zip(unscaled, finite, strict=True) if ok) > 0
    n = seen.sum()
    lost = [(seen & (x == 0)).sum() / n for x in unscaled]
    tiny = [
        ((x != 0) & (abs(x * scale) < 2.0**-14)).sum() / n
        for x, scale in zip(unscaled, scales, strict=True)
    ]
    return np.where([finite, finite], [lost, tiny], np.nan).astype(np.float32)


class TestScaleSweep:
    def test_by_hand(self):
        sweep = scale_sweep(
            loss_fn, PARAMS, BATCH, scales=[1, 2.0**6, 2.0**35, 2.0**36]
        )
        assert sweep.scales.tolist() == [1, 2**6, 2**35, 2**36]
        # 2**-30 rounds to zero, 2**-23 and 2**-20 are subnormal. Then 2**-24, 2**-17
        # and 2**-14, the least normal number. 2**16 is inf in float16.
        third = np.float32(1 / 3)
        np.testing.assert_array_equal(sweep.lost, [third, 0, 0, np.nan])
        np.testing.assert_array_equal(sweep.subnormal, [2 * third, 2 * third, 0, NAN])
        assert sweep.overflows.tolist() == [False, False, False, True]
        assert sweep.suggested == 2**6
        assert [x.dtype.name for x in sweep] == [*["float32"] * 3, "bool", "float32"]
        assert [x.shape for x in sweep] == [(4,)] * 4 + [()]

    def test_is_its_definition(self):
        rng = np.random.default_rng(0)
        batch = jnp.asarray(rng.normal(size=300) * 2.0 ** rng.integers(-20, 1, 300))
        params = {"w": jnp.ones(300)}
        scales = [2.0**i for i in range(0, 40, 3)]
        sweep = scale_sweep(loss_fn, params, batch.astype(jnp.float32), scales=scales)
        lost, tiny = naive_sweep(params, batch.astype(jnp.float32), scales)
        np.testing.assert_array_equal(sweep.lost, lost)
        np.testing.assert_array_equal(sweep.subnormal, tiny)
        assert 0 < lost[1] < lost[0] < 1
        assert sweep.overflows.tolist() == np.isnan(lost).tolist()
        assert sweep.overflows[-1]

    def test_keeps_the_order_and_the_union_of_all(self):
        scales = [2.0**36, 2.0**10, 2.0**0, 2.0**35]
        sweep = scale_sweep(loss_fn, PARAMS, BATCH, scales=scales)
        assert sweep.scales.tolist() == scales
        np.testing.assert_array_equal(sweep.lost, [NAN, 0, np.float32(1 / 3), 0])
        # What is not zero because it has overflowed was not seen.
        found = scale_sweep(loss_fn, PARAMS, BATCH, scales=[2.0**36, 1.0])
        np.testing.assert_array_equal(found.lost, [NAN, 0])
        # Alone, a scale that loses everything has seen nothing.
        alone = scale_sweep(loss_fn, PARAMS, BATCH * 2.0**-14, scales=[1.0])
        assert (alone.lost[0], alone.subnormal[0]) == (0, 0)

    @pytest.mark.parametrize(
        ("exponents", "expected"),
        [
            ([0, 10, 20], 20),  # none overflows
            ([36, 33, 34, 35], 34),  # a factor of 4 below
            ([33, 36], 33),
            ([35, 36], 35),  # none is: the smallest
            ([36, 35, 35.5], 35),
            ([36], 0),  # all overflow
            ([40, 37], 0),
        ],
    )
    def test_suggests(self, exponents, expected):
        scales = [2.0**e for e in exponents]
        sweep = scale_sweep(loss_fn, PARAMS, BATCH, scales=scales)
        assert sweep.suggested == 2.0**expected

    def test_default_scales(self):
        sweep = scale_sweep(loss_fn, PARAMS, BATCH)
        assert sweep.scales.tolist() == [2.0**i for i in range(32)]
        assert sweep.suggested == 2.0**31

    def test_traces_once_and_needs_not_the_loss_itself(self):
        traces = []

        def loss(params, batch):
            traces.append(params)
            x, text = batch
            return jnp.sum(params["w"] * x[0]), {"aux": (text, None)}

        batch = (jnp.ones((2, 3)), 3.0)
        sweep = scale_sweep(loss, PARAMS, batch, scales=range(1, 9), has_aux=True)
        assert len(traces) == 1
        assert sweep.lost.tolist() == [0] * 8

    def test_passes_all_other_arguments_to_the_loss(self):
        def loss(params, x, y, dtype, *, mode, weight):
            assert (dtype, mode) == (jnp.float16, "sum")
            products = params["w"].astype(dtype) * (x * y).astype(dtype)
            return weight * jnp.sum(products.astype(jnp.float32))

        scales = [1, 2.0**6, 2.0**35, 2.0**36]
        keywords = {"mode": "sum", "weight": jnp.float32(2.0**-20)}
        arguments = (PARAMS, BATCH, jnp.ones(3), jnp.float16)
        found = scale_sweep(loss, *arguments, scales=scales, **keywords)
        assert_same_bits(found, scale_sweep(loss_fn, PARAMS, BATCH, scales=scales))

    @pytest.mark.parametrize("guard", [jax.debug_nans, jax.debug_infs])
    def test_nan_is_an_answer(self, guard):
        scales = [1, 2.0**35, 2.0**36]
        expected = scale_sweep(loss_fn, PARAMS, BATCH, scales=scales)
        with guard(True):
            found = scale_sweep(loss_fn, PARAMS, BATCH, scales=scales)
        assert_same_bits(found, expected)
        assert np.isnan(found.lost).tolist() == [False, False, True]

    def test_scales_at_the_bounds(self):
        def loss(params, batch):
            return jnp.sum(params * batch)

        scales = [2.0**-126, 3.0, 2.0**126]
        sweep = scale_sweep(loss, PARAMS["w"][:2], BATCH[::2], scales=scales)
        assert sweep.overflows.tolist() == [False] * 3
        # 2**-136 is zero on hardware that has no subnormals, and subnormal elsewhere.
        assert sweep.subnormal[0] + sweep.lost[0] == 1
        assert sweep.subnormal[1:].tolist() == sweep.lost[1:].tolist() == [0, 0]

    def test_scalar_operations_are_not_more_of_many_leaves(self):
        def count(n):
            step = _sweep._make_step(lambda p, x: p[0] * x, "float16", False)
            text = str(jax.make_jaxpr(step)([jnp.float32(1)] * n, 1.0, jnp.float32(2)))
            return text.count("clz")

        assert count(2) == count(20) > 0

    def test_params_of_any_kind(self):
        def loss(params, batch):
            z = jnp.sum(jnp.abs(params["z"]))
            return z + jnp.sum(params["w"][params["n"]]).astype(jnp.float32) * batch

        params = {
            "w": jnp.ones((2, 2), jnp.float16),
            "z": jnp.ones(2, jnp.complex64),
            "n": jnp.int32(0),
            "none": None,
            "number": 2.0,
        }
        sweep = scale_sweep(loss, params, jnp.float32(2.0**-30), scales=[1.0, 2.0**10])
        # The real parts, and half of w at the second scale; 2**-20 is subnormal.
        np.testing.assert_array_equal(sweep.lost, [0.5, 0])
        np.testing.assert_array_equal(sweep.subnormal, [0, 0.5])

    def test_degenerate_gradients(self):
        zero = scale_sweep(
            lambda w, x: jnp.sum(w * 0), jnp.ones(2), None, scales=[1, 2]
        )
        assert zero.lost.tolist() == zero.subnormal.tolist() == [0, 0]
        assert zero.suggested == 2
        bad = scale_sweep(lambda w, x: jnp.sum(w * x), jnp.ones(2), NAN, scales=[1, 2])
        assert bad.overflows.tolist() == [True, True]
        assert np.isnan(bad.lost).all()
        assert bad.suggested == 1
        empty = scale_sweep(lambda w, x: jnp.float32(x), {}, 1.0, scales=[4])
        assert (empty.lost.tolist(), empty.suggested) == ([0], 4)

    @pytest.mark.parametrize("kind", AxisType)
    def test_sharded_parameters(self, kind):
        if kind == AxisType.Manual:
            pytest.skip("inside jax.shard_map only")
        mesh = jax.make_mesh((8,), ("a",), axis_types=(kind,))
        sharding = NamedSharding(mesh, P("a"))
        params = {"w": jnp.ones(16)}
        batch = 2.0 ** -jnp.arange(16, dtype=jnp.float32)
        scales = [1.0, 2.0**10, 2.0**36]
        expected = scale_sweep(loss_fn, params, batch, scales=scales)
        sharded = jax.device_put((params, batch), sharding)
        assert_same_bits(scale_sweep(loss_fn, *sharded, scales=scales), expected)

    @pytest.mark.parametrize(
        ("scales", "error", "message"),
        [
            ([], ValueError, "scales must hold at least one loss scale, got none"),
            (3.0, TypeError, r"scales must be a sequence of numbers.*got 3\.0"),
            ([[1.0]], TypeError, "scales must be a sequence of numbers"),
            ([1, 0], ValueError, r"scales\[1\] must be at least .* got 0"),
            ([1, INF], ValueError, r"scales\[1\] must be finite, got inf"),
            ([2.0**127], ValueError, r"scales\[0\] must be .* at most 2\*\*126"),
            (["8"], TypeError, r"scales\[0\] must be a Python number, got '8'"),
        ],
    )
    def test_wrong_scales(self, scales, error, message):
        with pytest.raises(error, match=message):
            scale_sweep(loss_fn, PARAMS, BATCH, scales=scales)

    def test_scales_may_be_an_array_or_an_iterator(self):
        expected = scale_sweep(loss_fn, PARAMS, BATCH, scales=[1, 4])
        for scales in (np.array([1, 4]), jnp.array([1.0, 4.0]), iter((1, 4))):
            assert_same_bits(
                scale_sweep(loss_fn, PARAMS, BATCH, scales=scales), expected
            )

    def test_wrong_losses_and_places(self):
        for loss, has_aux, message in [
            (lambda p, b: p["w"], False, "scalar"),
            (lambda p, b: (loss_fn(p, b), 1), False, "return a loss alone"),
            (lambda p, b: loss_fn(p, b), True, "return a loss and auxiliary data"),
            (lambda p, b: 3, False, "floating-point scalar"),
        ]:
            with pytest.raises(TypeError, match=message):
                scale_sweep(loss, PARAMS, BATCH, scales=[1.0], has_aux=has_aux)
        with pytest.raises(TypeError, match="scale_sweep is for the host"):
            jax.jit(lambda p: scale_sweep(loss_fn, p, BATCH))(PARAMS)
        with pytest.raises(ValueError, match=r"dtype must be .*'float32'"):
            scale_sweep(loss_fn, PARAMS, BATCH, scales=[1.0], dtype="float32")
