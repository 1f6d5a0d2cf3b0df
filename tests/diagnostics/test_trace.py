"""`trace_numerics` names the operation that breaks, in every construct of JAX."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import INF, exhaustive_but
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from optax_lossscale.diagnostics import trace_numerics

X64 = jax.config.jax_enable_x64
TWO = jnp.array([1.0, 2.0])
of_loops_in_loops = pytest.mark.xfail(
    strict=False, reason="an inner loop takes the outer loop's results for its inputs"
)
needs_devices = pytest.mark.skipif(jax.device_count() < 2, reason="needs 2 devices")


def line_of(mark):
    """Returns the number of the line of this file that ends with a comment."""
    lines = Path(__file__).read_text().splitlines()
    (found,) = (i for i, text in enumerate(lines, 1) if text.endswith(f"# {mark}"))
    return found


def total(x):
    return jnp.sum(x.astype(jnp.float32))


def half(x):
    return x.astype(jnp.float16)


def assert_found(trace, mark, phase="forward", **expected):
    found = trace.first_nonfinite
    assert found.file == __file__
    assert (found.line, found.phase) == (line_of(mark), phase), str(found)
    assert {k: getattr(found, k) for k in expected} == expected
    assert not found.output.is_finite
    assert trace.findings[0].kind != "fine"


class TestCalls:
    def test_a_jitted_function_called_twice(self):
        @jax.jit
        def helper(x):
            return jnp.exp(x)  # helper

        def loss_fn(w):
            small = helper(half(w))
            return total(helper(small * 5.0))

        assert_found(trace_numerics(loss_fn, TWO), "helper", primitive="exp")

    def test_functions_of_jax_traced_before(self):
        def other(x):
            return jax.nn.softplus(half(x)) * 3e4

        def loss_fn(w):
            x = jax.nn.softplus(half(w))
            return total(jax.nn.elu(-jax.nn.silu(x * 6e4)))  # jax.nn

        jax.make_jaxpr(other)(TWO)
        jax.make_jaxpr(lambda x: jax.nn.silu(half(x)))(TWO)
        trace = trace_numerics(loss_fn, TWO)
        assert_found(trace, "jax.nn", primitive="mul")
        first = [x for x in trace.operations if x.file == __file__ and x.line]
        lines = {line_of("jax.nn") - 1, line_of("jax.nn")}
        assert {x.line for x in first} - lines == set(cast_lines())

    def test_jax_nn_overflows_inside(self):
        def loss_fn(w):
            return total(jax.nn.silu(half(w) * 2e4) * TWO.astype(jnp.float16))  # silu

        trace = trace_numerics(loss_fn, TWO * 1.5)
        assert_found(trace, "silu", primitive="mul")

    def test_checkpoint(self):
        @jax.checkpoint
        def block(x):
            return jnp.sin(jnp.square(x))  # checkpoint

        trace = trace_numerics(lambda w: total(block(half(w))), TWO * 300)
        assert_found(trace, "checkpoint", primitive="square")
        again = [x for x in trace.operations if x.primitive == "square"]
        assert {x.phase for x in again} == {"forward", "backward"}

    def test_custom_jvp(self):
        @jax.custom_jvp
        def f(x):
            return x

        @f.defjvp
        def _(primals, tangents):
            return f(*primals), tangents[0] * jnp.float16(3e4)  # custom_jvp

        trace = trace_numerics(lambda w: total(f(half(w)) * 4.0), TWO)
        assert_found(trace, "custom_jvp", "backward", primitive="mul")
        assert trace.largest_scale == 0.5

    def test_custom_vjp(self):
        @jax.custom_vjp
        def f(x):
            return x

        def backward(_, grads):
            grads = grads * jnp.float16(3e4)  # custom_vjp
            return (grads,)

        f.defvjp(lambda x: (x, None), backward)
        trace = trace_numerics(lambda w: total(f(half(w)) * 4.0), TWO)
        assert_found(trace, "custom_vjp", "backward", primitive="mul")
        assert f.bwd is backward

    def test_vmap(self):
        def one(w, x):
            return jnp.exp(half(w) * x)  # vmap

        xs = jnp.array([1, 3, 9], jnp.float16)
        trace = trace_numerics(lambda w: total(jax.vmap(one, (None, 0))(w, xs)), TWO)
        assert_found(trace, "vmap", primitive="exp", shape=(3, 2))


def cast_lines():
    """The lines of `total` and `half`."""
    lines = Path(__file__).read_text().splitlines()
    start = lines.index("def total(x):") + 2
    return start, start + 4


class TestLoops:
    @pytest.mark.parametrize(("reverse", "iteration"), [(False, 3), (True, 4)])
    def test_scan(self, reverse, iteration):
        def loss_fn(w, xs):
            def body(x, y):
                x = x * y  # scan
                return x, jnp.sin(x)

            x, out = lax.scan(body, half(w), xs, reverse=reverse)
            return total(x) + total(out)

        # 2 * 16^4 overflows.
        xs = jnp.full(8, 16, jnp.float16)
        trace = trace_numerics(loss_fn, TWO, xs)
        assert_found(trace, "scan", primitive="mul", iteration=iteration)

    def test_backward_pass_of_a_scan(self):
        def loss_fn(w):
            def body(x, _):
                return x * jnp.float16(8), None  # backward of scan

            x, _ = lax.scan(body, half(w), length=6)
            return total(x)

        # It runs backwards: 4 * 8^5 is the first that overflows.
        trace = trace_numerics(loss_fn, TWO * 1e-3, scale=4.0)
        assert_found(trace, "backward of scan", "backward", iteration=1)
        assert trace.largest_scale == 2.0**-3

    @of_loops_in_loops
    def test_nested_scans(self):
        def loss_fn(w):
            def inner(x, _):
                return x * jnp.float16(4), None  # nested

            def outer(x, _):
                return lax.scan(inner, x, length=3)[0], None

            return total(lax.scan(outer, half(w), length=4)[0])

        trace = trace_numerics(loss_fn, TWO)
        assert_found(trace, "nested", iteration=(2, 1))

    @of_loops_in_loops
    def test_a_state_whose_parts_change_places(self):
        def loss_fn(w):
            def inner(state, _):
                x, y = state
                return (y, x * jnp.float16(16)), y  # places

            def outer(state, _):
                state, out = lax.scan(inner, state, length=2)
                return state, out

            state, out = lax.scan(outer, (half(w), half(w)), length=3)
            return total(state[0]) + total(out)

        trace = trace_numerics(loss_fn, TWO * 8)
        # 16 * 16^3, in one part or the other.
        assert_found(trace, "places", primitive="mul", iteration=(2, 0))

    def test_fori_loop(self):
        def loss_fn(w):
            x = lax.fori_loop(0, 9, lambda i, x: x * jnp.float16(8), half(w))  # fori
            return total(x)

        assert_found(trace_numerics(loss_fn, TWO), "fori", iteration=5 - 1)

    def test_while_loop(self):
        def loss_fn(w):
            def body(state):
                i, x = state
                return i + 1, x * jnp.float16(256)  # while

            x = lax.stop_gradient(half(w))
            _, x = lax.while_loop(lambda s: s[0] < 5, body, (0, x))
            return total(x) + total(w)

        assert_found(trace_numerics(loss_fn, TWO), "while", iteration=1)

    def test_a_loop_that_never_runs(self):
        def loss_fn(w):
            body = lambda x, _: (jnp.exp(x), None)  # noqa: E731
            return total(lax.scan(body, half(w), length=0)[0])

        trace = trace_numerics(loss_fn, TWO)
        assert trace.findings[0].kind == "fine"
        assert not [x for x in trace.operations if x.primitive == "exp"]


class TestBranches:
    @pytest.mark.parametrize("chosen", exhaustive_but([0, 1, 2], [1]))
    def test_switch(self, chosen):
        def loss_fn(w, index):
            branches = [jnp.tanh, jnp.exp, jnp.log1p]
            return total(lax.switch(index, branches, half(w)))

        trace = trace_numerics(loss_fn, TWO * 10, jnp.int32(chosen))
        forward = {x.primitive for x in trace.operations if x.phase == "forward"}
        names = ["tanh", "exp", "log1p"]
        assert forward & set(names) == {names[chosen]}
        assert (trace.first_nonfinite is not None) == (chosen == 1)

    def test_cond_in_a_loop(self):
        def loss_fn(w):
            def body(x, i):
                grow = lambda x: x * jnp.float16(300)  # noqa: E731 # cond
                return lax.cond(i == 2, grow, jnp.sin, x), None

            return total(lax.scan(body, half(w) + 300, jnp.arange(4))[0])

        assert trace_numerics(loss_fn, TWO).first_nonfinite is None


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
        assert finding.operation.line == line_of("would")
        assert np.isclose(trace.loss, 3 * factor)
        assert f"No operation computes in {dtype}" in str(trace)

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
