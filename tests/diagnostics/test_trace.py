"""`trace_numerics` names the operation that breaks, in every construct of JAX."""

import jax
import jax.numpy as jnp
import pytest
from helpers import exhaustive_but
from jax import lax
from tracing import assert_found, half, line_of, total

from optax_lossscale.diagnostics import trace_numerics

pytestmark = pytest.mark.usefixtures("quick_compilation")
TWO = jnp.array([1.0, 2.0], jnp.float32)


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
        line = line_of("jax.nn", __file__)
        found = {x.line for x in trace.operations if x.file == __file__}
        assert found == {line - 1, line}

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

    def test_nested_scans(self):
        def loss_fn(w):
            def inner(x, _):
                return x * jnp.float16(4), None  # nested

            def outer(x, _):
                return lax.scan(inner, x, length=3)[0], None

            return total(lax.scan(outer, half(w), length=4)[0])

        trace = trace_numerics(loss_fn, TWO)
        assert_found(trace, "nested", iteration=(2, 1))

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
