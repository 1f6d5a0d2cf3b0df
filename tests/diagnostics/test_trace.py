"""What `trace_numerics` follows: what runs, and where, in the constructs of JAX."""

import faulty_constructs  # noqa: F401 # It fills the table.
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arithmetic import TWO, half, mean, total
from faults import FAULTS, Fault, W, X, assert_named, needs_devices
from helpers import INF, exhaustive_but
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from tracing import line_of, program_of, sites_of

from optax_lossscale.diagnostics import trace_numerics
from optax_lossscale.diagnostics._trace.trace import summarize

EYE = np.eye(2, dtype=np.float32)


def test_functions_of_jax_traced_before():
    def other(x):
        return jax.nn.softplus(half(x)) * 3e4

    def loss_fn(w):
        x = jax.nn.softplus(half(w))
        return total(jax.nn.elu(-jax.nn.silu(x * 6e4)))  # jax.nn

    jax.make_jaxpr(other)(TWO)
    jax.make_jaxpr(lambda x: jax.nn.silu(half(x)))(TWO)
    line = line_of("jax.nn", __file__)
    sources = [x.source for x in sites_of(loss_fn, TWO)]
    assert {x.line for x in sources if x.file == __file__} == {line - 1, line}


def test_checkpoint():
    again = [
        x for x in FAULTS["checkpoint"].trace.operations if x.primitive == "square"
    ]
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


def summary(loss_fn, *args):
    """Returns what is said of the program, before it is compiled."""
    return summarize(program_of(loss_fn, *args), "")


@pytest.mark.parametrize(("own", "count"), [("float32", 0), ("float16", 2)])
def test_how_much_computes_in_the_dtype(own, count):
    def loss_fn(params, x):
        with jax.numpy_dtype_promotion("standard"):
            return total(x.astype(jnp.float16) @ params["w"].astype(own))

    text = summary(loss_fn, {"w": EYE}, EYE)
    assert text.startswith(f"{count} of 2 matrix products")


def test_ragged_products_compute_in_the_dtype():
    def loss_fn(w):
        sizes = jnp.array([1, 1], jnp.int32)
        return total(lax.ragged_dot(half(w), half(w)[None].repeat(2, 0), sizes))

    assert summary(loss_fn, EYE).startswith("3 of 3 ")


def test_a_result_that_is_cast_on_purpose():
    def loss_fn(w):
        return total(half(w @ w) @ half(w))

    # Its gradient comes from a cast, but nothing was promoted.
    assert "float32" not in summary(loss_fn, EYE)


@needs_devices
def test_sharded_arrays():
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    x = jax.device_put(jnp.arange(4.0) * 3e2, NamedSharding(mesh, P("x")))
    w = jax.device_put(TWO, NamedSharding(mesh, P()))

    def loss_fn(w, x):
        return total(jnp.square(half(w)[:, None] * half(x)))  # sharded

    operation = {"primitive": "square"}
    assert_named(Fault(loss_fn, (w, x), __file__, "sharded", operation=operation))


def test_places_along_a_sharded_axis():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,))

    def loss_fn(w, x):
        h = half(x) * half(w[0])
        return mean(jnp.square(h)) + mean(jnp.argmax(h, 0))

    with jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, P("x")))
        assert trace_numerics(loss_fn, W, x).findings[0].kind == "fine"


def test_a_mask_from_outside_is_no_origin():
    def loss_fn(w):
        mask = jnp.where(jnp.eye(2, dtype=bool), half(w) * 0, -INF)

        def body(x, m):
            y = lax.cond(w[0] > 0, lambda m: x + m, lambda m: x - m, m)
            return jax.nn.softmax(x + mask) + jax.nn.softmax(y), None

        x = jnp.outer(half(w), half(w))
        return total(lax.scan(body, x, jnp.stack([mask, mask]))[0] * x)

    assert trace_numerics(loss_fn, TWO).first_nonfinite is None


def test_the_nan_of_a_branch_that_nobody_takes_is_no_finding():
    def loss_fn(w):
        h = half(w) * 6e4  # overflows
        return total(h / jnp.sqrt(jnp.var(h)))  # jnp.var holds a nan.

    (finding,) = trace_numerics(loss_fn, TWO).findings
    assert finding.operation.line == line_of("overflows", __file__)
