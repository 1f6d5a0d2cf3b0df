"""`trace_numerics` with all dtypes, many devices, and operations of all kinds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import INF, exhaustive_but
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from tracing import assert_found, half, line_of, total

from optax_lossscale.diagnostics import trace_numerics

X64 = jax.config.jax_enable_x64
pytestmark = pytest.mark.usefixtures("quick_compilation")
TWO = jnp.array([1.0, 2.0], jnp.float32)
needs_devices = pytest.mark.skipif(jax.device_count() < 2, reason="needs 2 devices")


class TestOperations:
    def test_dropout(self):
        def loss_fn(w, key):
            keep = jax.random.bernoulli(key, 0.5, (64,))
            x = jnp.where(keep, half(w)[0] * 4e4, 0)  # dropout
            return total(x + jax.random.normal(key, (64,), jnp.float16))

        for key in (jax.random.key(0), jax.random.PRNGKey(0)):
            trace = trace_numerics(loss_fn, TWO * 2, key)
            assert_found(trace, "dropout", primitive="mul", shape=())

    def test_integer_and_complex(self):
        def loss_fn(w, i):
            x = w[jnp.argsort(i)] * 1e30
            z = lax.complex(x, x) * lax.complex(x, x)  # complex
            return jnp.real(z).sum() + jnp.imag(z).sum()

        trace = trace_numerics(loss_fn, TWO, jnp.array([2, 1]))
        assert_found(trace, "complex", primitive="mul", dtype="complex64")
        assert trace.dtype == "float16"

    def test_pure_callback_is_opaque(self):
        def loss_fn(w):
            x = jax.lax.stop_gradient(half(w))
            x = jax.pure_callback(lambda x: x * INF, x, x)  # callback
            return total(x) + total(w)

        trace = trace_numerics(loss_fn, TWO)
        assert_found(trace, "callback", primitive="pure_callback", opaque=True)
        assert "Not followed in float32: pure_callback" in str(trace)

    def test_empty_arrays(self):
        def loss_fn(w):
            return total(jnp.exp(half(w["none"]))) + total(half(w["some"]))

        params = {"none": jnp.zeros((0, 2)), "some": TWO}
        trace = trace_numerics(loss_fn, params)
        assert trace.findings[0].kind == "fine"

    @pytest.mark.skipif(not X64, reason="needs float64")
    def test_float64(self):
        def loss_fn(w):
            return jnp.sum(jnp.exp(w * 400))  # float64

        trace = trace_numerics(loss_fn, TWO.astype(jnp.float64))
        assert_found(trace, "float64", primitive="exp", dtype="float64")


class TestDtypes:
    def test_bfloat16(self):
        def loss_fn(w):
            x = jnp.exp(w.astype(jnp.bfloat16) * 60)  # bfloat16
            return total(x)

        trace = trace_numerics(loss_fn, TWO, dtype="bfloat16")
        assert trace.computes_in_dtype
        assert_found(trace, "bfloat16", primitive="exp", dtype="bfloat16")

    @pytest.mark.parametrize(
        ("dtype", "factor"), [("float16", 6e4), ("float8_e4m3fn", 400)]
    )
    def test_a_float32_program_in_another_dtype(self, dtype, factor):
        def loss_fn(w):
            return jnp.sum(w * factor)  # would

        trace = trace_numerics(loss_fn, TWO, dtype=dtype)
        assert not trace.computes_in_dtype
        assert trace.first_nonfinite is None
        finding = trace.findings[0]
        assert finding.kind == "would_overflow"
        assert finding.operation.line == line_of("would", __file__)
        assert np.isclose(trace.loss, 3 * factor)
        assert f"No operation computes in {dtype}" in str(trace)

    def test_a_bfloat16_program_in_float16(self):
        def loss_fn(w):
            x = w.astype(jnp.bfloat16)
            return total(x * jnp.bfloat16(1e5))  # wider

        trace = trace_numerics(loss_fn, TWO)
        assert not trace.computes_in_dtype
        assert trace.first_nonfinite is None
        finding = trace.findings[0]
        assert finding.kind == "would_overflow"
        assert finding.operation.dtype == "bfloat16"
        assert finding.operation.line == line_of("wider", __file__)
        assert "float16 ends at 2^16" in finding.message
        own = trace_numerics(loss_fn, TWO, dtype="bfloat16")
        assert own.findings[0].kind == "fine"

    def test_a_float8_program(self):
        def loss_fn(w):
            x = (w * 250).astype(jnp.float8_e5m2).astype(jnp.float16)
            return total(x * x)  # float8

        trace = trace_numerics(loss_fn, TWO, dtype="float8_e5m2")
        assert trace.computes_in_dtype
        assert_found(trace, "float8", primitive="mul", dtype="float16")


@needs_devices
class TestDevices:
    def mesh(self):
        return jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))

    def test_sharded_arrays(self):
        mesh = self.mesh()
        x = jax.device_put(jnp.arange(4.0) * 3e2, NamedSharding(mesh, P("x")))
        w = jax.device_put(TWO, NamedSharding(mesh, P()))

        def loss_fn(w, x):
            return total(jnp.square(half(w)[:, None] * half(x)))  # sharded

        assert_found(trace_numerics(loss_fn, w, x), "sharded", primitive="square")

    @pytest.mark.parametrize("check_vma", exhaustive_but([True, False], [True]))
    def test_shard_map(self, check_vma):
        def local(w, x):
            y = half(w) * half(x)  # shard_map
            y, _ = lax.scan(lambda y, _: (jnp.sin(y), None), y, length=2)
            y = lax.cond(w[0] > 0, jnp.cos, jnp.sin, y)
            return lax.psum(total(y), "x")

        loss_fn = jax.shard_map(
            local,
            mesh=self.mesh(),
            in_specs=(P(), P("x")),
            out_specs=P(),
            check_vma=check_vma,
        )
        # Only the second device overflows.
        x = jnp.array([1.0, 2.0, 3.0, 6e4])
        trace = trace_numerics(loss_fn, TWO, x)
        assert_found(trace, "shard_map", primitive="mul", shape=(2,))
        assert trace.first_nonfinite.output.infs == 0.25
        assert np.isnan(trace.loss)
