"""Scaling losses, unscaling gradients, and the values in between."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import WRAPS, assert_same_bits
from jax.dtypes import float0

from optax_lossscale import LossScaleOptimizer

X64 = jax.config.jax_enable_x64
optimizer = LossScaleOptimizer(optax.sgd(0.25))
state: Any = None


@pytest.fixture(autouse=True, scope="module")
def initialize():
    global state
    state = optimizer.init(jnp.float32(1))


ignore_float16_losses = pytest.mark.filterwarnings("ignore:The loss is float16")


def with_scale(scale):
    return optax.tree.set(state, loss_scale=jnp.float32(scale))


class TestGetScaledLoss:
    def test_arrays_numbers_and_callables(self):
        assert optimizer.get_scaled_loss(jnp.float32(0.25), state) == 8192
        assert optimizer.get_scaled_loss(0.25, state) == 8192
        assert optimizer.get_scaled_loss(2, state) == 65536
        scaled = optimizer.get_scaled_loss(lambda x, *, y: x + y, state)
        assert scaled(jnp.float32(1), y=jnp.float32(2)) == 3 * 2**15

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    @ignore_float16_losses
    def test_half_precision_is_scaled_in_float32(self, dtype):
        scaled = optimizer.get_scaled_loss(jnp.asarray(30000, dtype), state)
        assert scaled.dtype == jnp.float32
        assert scaled == float(jnp.asarray(30000, dtype)) * 2**15

    def test_refuses_auxiliary_data(self):
        one = jnp.float32(1)
        for loss in ((one, one), [one], None):
            with pytest.raises(TypeError, match="array or a number"):
                optimizer.get_scaled_loss(loss, state)
            with pytest.raises(TypeError, match="array or a number"):
                optimizer.get_scaled_loss(lambda loss=loss: loss, state)()

    def test_wider_dtypes_are_kept(self):
        for dtype in ("float32", "complex64", *(["float64", "complex128"] * X64)):
            loss = jnp.asarray(1.1, dtype)
            scaled = optimizer.get_scaled_loss(loss, state)
            assert scaled.dtype == loss.dtype
            assert scaled == loss * np.asarray(2**15, dtype)


class TestGetUnscaledGradients:
    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    def test_half_precision_comes_back_as_float32(self, dtype):
        grad = optimizer.get_unscaled_gradients(jnp.asarray(2.0**-14, dtype), state)
        assert grad.dtype == jnp.float32
        assert grad == 2.0**-29

    def test_what_is_no_gradient_is_untouched(self):
        grads = {
            "none": None,
            "int": jnp.arange(3),
            "float0": np.zeros(3, float0),
            "bool": jnp.array(True),
            "key": jax.random.key(0),
            "function": jnp.tanh,
        }
        unscaled = optimizer.get_unscaled_gradients(grads, state)
        assert all(unscaled[name] is grads[name] for name in grads)

    def test_complex_gradients_keep_both_parts(self):
        grad = optimizer.get_unscaled_gradients(
            jnp.complex64(2**15 + 2**16 * 1j), state
        )
        assert grad == 1 + 2j
        assert grad.dtype == jnp.complex64

    @pytest.mark.skipif(not X64, reason="needs JAX_ENABLE_X64=1")
    def test_float64_gradients_keep_their_precision(self):
        grad = jnp.float64(1 / 3)
        unscaled = optimizer.get_unscaled_gradients(grad, state)
        assert unscaled == np.float64(1 / 3) / 2**15
        # A scale that is no power of two, too: its reciprocal is a float64.
        unscaled = optimizer.get_unscaled_gradients(grad, with_scale(1000))
        np.testing.assert_allclose(unscaled, np.float64(1 / 3) / 1000, rtol=1e-15)


class TestValueAndGrad:
    params = {"w": np.float32([0.3, -1.7]), "b": np.float32(0.1)}

    @staticmethod
    def loss(params, x, *, power=2):
        return jnp.sum((params["w"] * x + params["b"]) ** power)

    # Of a cube, XLA fuses the two programs in two ways.
    @pytest.mark.parametrize(
        ("wrap", "power"), [(WRAPS["eager"], 2), (WRAPS["eager"], 3), (WRAPS["jit"], 2)]
    )
    @pytest.mark.parametrize("exponent", [0, 15, 40])
    def test_is_that_of_jax_to_the_bit(self, wrap, power, exponent):
        """Without overflow or underflow a power of two cancels."""

        @wrap
        def ours(state, *args):
            return optimizer.value_and_grad(self.loss, state)(*args, power=power)

        plain = jax.value_and_grad(functools.partial(self.loss, power=power))
        x, now = jnp.float32(1.25), with_scale(2.0**exponent)
        assert_same_bits(ours(now, self.params, x), wrap(plain)(self.params, x))

    @pytest.mark.parametrize("argnums", [1, (0, 2)])
    def test_argnums(self, argnums):
        def loss(a, b, c):
            return a * b * c

        args = tuple(map(jnp.float32, (2, 3, 5)))
        plain = jax.value_and_grad(loss, argnums=argnums)(*args)
        ours = optimizer.value_and_grad(loss, state, argnums=argnums)
        assert_same_bits(ours(*args), plain)

    def test_value_is_the_loss_itself_when_the_scaled_loss_overflows(self):
        huge = jnp.float32(3e38)
        value, grad = optimizer.value_and_grad(lambda x: x * huge, state)(
            jnp.float32(1)
        )
        assert value == huge
        assert jnp.isinf(grad)
        # ... and when scaling and unscaling would have lost its last bits.
        value, _ = optimizer.value_and_grad(lambda x: x, with_scale(1000))(
            jnp.float32(1 / 3)
        )
        assert value == np.float32(1 / 3)

    def test_bfloat16_is_scaled_and_unscaled(self):
        value, grad = optimizer.value_and_grad(lambda x: x, state)(jnp.bfloat16(3))
        assert (value, grad) == (3, 1)
        assert (value.dtype, grad.dtype) == (jnp.bfloat16, jnp.float32)

    @ignore_float16_losses
    def test_float16_loss_overflows_from_2_to_the_16_on(self):
        # Its cotangent is the scale in float16: documented, and skipped.
        for exponent, expected in ((15, 1), (16, np.inf)):
            grad_fn = optimizer.value_and_grad(lambda x: x, with_scale(2.0**exponent))
            assert grad_fn(jnp.float16(3))[1] == expected

    @pytest.mark.parametrize(
        ("has_aux", "fun"),
        [
            (False, lambda x: 3),
            (False, lambda x: (x, x)),
            (False, lambda x: None),
            (False, lambda x: jnp.int32(x)),
            (True, lambda x: x),
            (True, lambda x: (x, x, x)),
            (True, lambda x: jnp.stack([x, x])),
        ],
    )
    def test_refuses_what_is_no_loss(self, has_aux, fun):
        wanted = "a floating-point scalar" + ", and auxiliary data" * has_aux
        with pytest.raises(TypeError, match=f"loss_fn must return {wanted}, got"):
            optimizer.value_and_grad(fun, state, has_aux=has_aux)(jnp.float32(1))

    @pytest.mark.parametrize("dtype", ["complex64", *(["float64"] * X64)])
    def test_other_dtypes(self, dtype):
        loss, x = lambda x: jnp.abs(x) ** 3, jnp.asarray(1 / 3, dtype)
        ours = optimizer.value_and_grad(loss, state)(x)
        assert_same_bits(ours, jax.value_and_grad(loss)(x))


class TestReading:
    def test_properties_of_a_fixed_scale(self):
        fixed = LossScaleOptimizer(optax.sgd(1.0), 4)
        assert not fixed.dynamic
        assert fixed.initial_scale == 4
        assert fixed.dynamic_growth_steps is None
        assert fixed.dynamic_counter(fixed.init(None)) is None
        assert fixed.current_loss_scale(fixed.init(None)) == 4
