"""`trace_numerics` names the operation that breaks, in every construct of JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import INF, exhaustive_but
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from tracing import TWO, assert_found, half, line_of, sites_of, total

from optax_lossscale.diagnostics import trace_numerics

CASES = []
# The others are exhaustive.
DEFAULT = ("custom_vjp", "backward_of_scan", "while_loop", "callback", "float8")


def case(*args, options=None, largest=None, marks=(), **expected):
    """Registers a loss function, whose line that breaks ends with its name.

    Args:
      *args: Its arguments.
      options: The options of the trace.
      largest: The largest loss scale.
      marks: The marks of the test.
      **expected: What is known of the operation that breaks.
    """

    def register(loss_fn):
        name, values = (
            loss_fn.__name__,
            (loss_fn, args, options or {}, largest, expected),
        )
        rare = [pytest.mark.exhaustive] * (name not in DEFAULT)
        CASES.append(pytest.param(*values, id=name, marks=[*marks, *rare]))
        return loss_fn

    return register


@case(TWO, primitive="exp")
def jit_called_twice(w):
    helper = jax.jit(lambda x: jnp.exp(x))  # jit_called_twice
    return total(helper(helper(half(w)) * 5.0))


@case(TWO * 1.5, primitive="mul")
def jax_nn_overflows_inside(w):
    w = jax.nn.silu(half(w) * 2e4) * half(TWO)  # jax_nn_overflows_inside
    return total(w)


@case(TWO, phase="backward", largest=0.5, primitive="mul", in_rule=False)
def custom_jvp(w):
    @jax.custom_jvp
    def f(x):
        return x

    @f.defjvp
    def _(primals, tangents):
        return f(*primals), tangents[0] * jnp.float16(3e4)  # custom_jvp

    return total(f(half(w)) * 4.0)


@case(TWO, phase="backward", largest=0.5, primitive="mul", in_rule=True)
def custom_vjp(w):
    f = jax.custom_vjp(lambda x: x)
    f.defvjp(lambda x: (x, None), lambda _, g: (g * jnp.float16(3e4),))
    x = f(half(w) * 1.0)  # custom_vjp
    return total(x * 4.0)


@case(TWO, np.array([1, 3, 9], np.float16), primitive="exp", shape=(3, 2))
def vmap(w, xs):
    return total(jax.vmap(lambda x: jnp.exp(half(w) * x))(xs))  # vmap


@case(TWO, True, primitive="mul")
def scan(w, reverse):
    def body(x, y):
        x = x * y  # scan
        return x, jnp.sin(x)

    # 2 * 16^4 overflows.
    xs = jnp.full(8, 16, jnp.float16)
    x, out = lax.scan(body, half(w), xs, reverse=reverse)
    return total(x) + total(out)


# It runs backwards: 4 * 8^5 is the first that overflows.
@case(TWO * 1e-3, phase="backward", largest=2.0**-3, options={"scale": 4.0})
def backward_of_scan(w):
    def body(x, _):
        return x * jnp.float16(8), None  # backward_of_scan

    return total(lax.scan(body, half(w), length=6)[0])


@case(TWO)
def nested_scans(w):
    def inner(x, _):
        return x * jnp.float16(4), None  # nested_scans

    def outer(x, _):
        return lax.scan(inner, x, length=3)[0], None

    return total(lax.scan(outer, half(w), length=4)[0])


# 16 * 16^3, in one part or the other.
@case(TWO * 8, primitive="mul")
def parts_change_places(w):
    def inner(state, _):
        x, y = state
        return (y, x * jnp.float16(16)), y  # parts_change_places

    def outer(state, _):
        return lax.scan(inner, state, length=2)

    state, out = lax.scan(outer, (half(w), half(w)), length=3)
    return total(state[0]) + total(out)


@case(TWO)
def fori_loop(w):
    body = lambda i, x: x * jnp.float16(8)  # noqa: E731 # fori_loop
    return total(lax.fori_loop(0, 9, body, half(w)))


@case(TWO)
def while_loop(w):
    def body(state):
        return state[0] + 1, state[1] * jnp.float16(256)  # while_loop

    start = 0, lax.stop_gradient(half(w))
    return total(lax.while_loop(lambda s: s[0] < 5, body, start)[1]) + total(w)


@case(TWO * 2, jax.random.PRNGKey, primitive="mul", shape=())
@case(TWO * 2, jax.random.key, primitive="mul", shape=())
def dropout(w, make_key):
    key = make_key(0)
    keep = jax.random.bernoulli(key, 0.5, (64,))
    x = jnp.where(keep, half(w)[0] * 4e4, 0)  # dropout
    return total(x + jax.random.normal(key, (64,), jnp.float16))


@case(TWO, np.array([2, 1]), primitive="mul", dtype="complex64")
def complex_numbers(w, i):
    x = w[jnp.argsort(i)] * 1e30
    z = lax.complex(x, x) * lax.complex(x, x)  # complex_numbers
    return jnp.real(z).sum() + jnp.imag(z).sum()


@case(TWO, primitive="pure_callback", opaque=True)
def callback(w):
    x = lax.stop_gradient(half(w))
    return total(jax.pure_callback(lambda x: x * INF, x, x)) + total(w)  # callback


@case(TWO, options={"dtype": "bfloat16"}, primitive="exp", dtype="bfloat16")
def bfloat16(w):
    return total(jnp.exp(w.astype(jnp.bfloat16) * 60))  # bfloat16


@case(TWO, options={"dtype": "float8_e5m2"}, primitive="mul", dtype="float16")
def float8(w):
    x = half((w * 250).astype(jnp.float8_e5m2))
    return total(x * x)  # float8


needs_float64 = [pytest.mark.skipif(not jax.config.jax_enable_x64, reason="no float64")]


@case(TWO, marks=needs_float64, primitive="exp", dtype="float64")
def float64(w):
    return jnp.sum(jnp.exp(w.astype(float) * 400))  # float64


@pytest.mark.parametrize(("loss_fn", "args", "options", "largest", "expected"), CASES)
def test_the_line_that_breaks(loss_fn, args, options, largest, expected):
    trace = trace_numerics(loss_fn, *args, **options)
    assert_found(trace, loss_fn.__name__, **expected)
    assert trace.computes_in_dtype == (loss_fn not in (float64, complex_numbers))
    assert largest in (None, trace.largest_scale)
    is_said = "in its backward rule" in trace.findings[0].message
    assert is_said == expected.get("in_rule", False)
    is_said = "Not followed in float32: pure_callback" in str(trace)
    assert is_said == expected.get("opaque", False)


def test_functions_of_jax_traced_before():
    def other(x):
        return jax.nn.softplus(half(x)) * 3e4

    def loss_fn(w):
        x = jax.nn.softplus(half(w))
        return total(jax.nn.elu(-jax.nn.silu(x * 6e4)))  # jax.nn

    jax.make_jaxpr(other)(TWO)
    jax.make_jaxpr(lambda x: jax.nn.silu(half(x)))(TWO)
    line, sources = (
        line_of("jax.nn", __file__),
        [x.source for x in sites_of(loss_fn, TWO)],
    )
    assert {x.line for x in sources if x.file == __file__} == {line - 1, line}


def test_checkpoint():
    @jax.checkpoint
    def block(x):
        return jnp.sin(jnp.square(x))  # checkpoint

    trace = trace_numerics(lambda w: total(block(half(w))), TWO * 300)
    assert_found(trace, "checkpoint", primitive="square")
    again = [x for x in trace.operations if x.primitive == "square"]
    assert [x.phase for x in again] == ["forward"] * 2  # The second is recomputed.


@pytest.mark.parametrize("chosen", exhaustive_but([0, 1, 2], [1]))
def test_switch(chosen):
    names = ["tanh", "exp", "log1p"]

    def loss_fn(w, index):
        return total(lax.switch(index, [getattr(jnp, x) for x in names], half(w)))

    trace = trace_numerics(loss_fn, TWO * 10, jnp.int32(chosen))
    forward = {x.primitive for x in trace.operations if x.phase == "forward"}
    assert forward & set(names) == {names[chosen]}
    assert (trace.first_nonfinite is not None) == (chosen == 1)


@pytest.mark.exhaustive
def test_leaks_nothing():
    def loss_fn(w):
        def body(x, i):
            return lax.cond(i == 2, lambda x: x * jnp.float16(300), jnp.sin, x), None

        return total(lax.scan(body, half(w) + 300, jnp.arange(4))[0])

    with jax.checking_leaks():
        assert trace_numerics(loss_fn, TWO).first_nonfinite is None


@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda w: total(lax.scan(lambda x, _: (jnp.exp(x), None), w, length=0)[0]),
        lambda w: total(jnp.exp(w[:0])) + total(w),
    ],
)
def test_what_never_runs_and_empty_arrays(loss_fn):
    trace = trace_numerics(lambda w: loss_fn(half(w)), TWO)
    assert trace.findings[0].kind == "fine"
    ran = [x for x in trace.operations if x.shape != (0,)]
    assert "exp" not in {x.primitive for x in ran}


def test_numbers_beside_parameters_are_settings():
    """As the rates of dropout in the models of Equinox."""

    def loss_fn(params):
        w = half(params["w"])
        return total(w * w if params["rate"] > 0.25 else w)

    trace = trace_numerics(loss_fn, {"w": jnp.full(2, 300.0), "rate": 0.5})
    assert trace.first_nonfinite.primitive == "mul"
    assert trace_numerics(lambda w: total(half(w) * 2), 3.0).loss == 6


def test_a_program_in_float32():
    trace = trace_numerics(lambda w: total(w * 6e4), TWO)
    assert not trace.computes_in_dtype
    assert trace.findings[0].kind == "fine"
    assert str(trace).startswith("No operation computes in float16")


@pytest.mark.parametrize("own", ["float16", "bfloat16"])
def test_a_program_in_another_dtype(own):
    (other,) = {"float16", "bfloat16"} - {own}
    with pytest.raises(ValueError, match=f"dtype='{own}'"):
        trace_numerics(lambda w: total(w.astype(own)), TWO, dtype=other)


@pytest.mark.skipif(jax.device_count() < 2, reason="needs 2 devices")
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

        specs = {"in_specs": (P(), P("x")), "out_specs": P()}
        loss_fn = jax.shard_map(local, mesh=self.mesh(), check_vma=check_vma, **specs)
        # Only the second device overflows.
        x = jnp.array([1.0, 2.0, 3.0, 6e4])
        trace = trace_numerics(loss_fn, TWO, x)
        assert_found(trace, "shard_map", primitive="mul", shape=(2,))
        assert trace.first_nonfinite.output.infs == 0.5  # Of the worst device.
        assert np.isnan(trace.loss)


def before_a_loop(w):
    x = half(w) * 6e4  # before_a_loop
    y, ys = lax.scan(lambda y, z: (jnp.sin(y) + x, z * 2), half(w), x)
    return total(y) + total(ys)


def before_a_branch(w):
    x = half(w) * 6e4  # before_a_branch
    return total(lax.cond(w[0] > 0, lambda x: x * 2, jnp.sin, x))


def beside_a_mask(w):
    mask = jnp.eye(2, dtype=bool)
    x = jnp.where(mask, half(w), jnp.float16(-INF))
    x = x * 4e4  # beside_a_mask
    return total(jnp.where(mask, x, 0))


@pytest.mark.parametrize("loss_fn", [before_a_loop, before_a_branch, beside_a_mask])
def test_inf_that_comes_from_outside(loss_fn):
    assert_found(trace_numerics(loss_fn, TWO), loss_fn.__name__, primitive="mul")


def test_a_mask_from_outside_is_no_origin():
    def loss_fn(w):
        mask = jnp.where(jnp.eye(2, dtype=bool), half(w) * 0, -INF)

        def body(x, m):
            y = lax.cond(w[0] > 0, lambda m: x + m, lambda m: x - m, m)
            return jax.nn.softmax(x + mask) + jax.nn.softmax(y), None

        x = jnp.outer(half(w), half(w))
        return total(lax.scan(body, x, jnp.stack([mask, mask]))[0] * x)

    assert trace_numerics(loss_fn, TWO).first_nonfinite is None
