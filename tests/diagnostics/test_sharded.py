"""Arrays that are sharded over devices, on automatic and on explicit mesh axes."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import meshes
import numpy as np
import optax
import pytest
from helpers import exhaustive_but
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from meshes import mesh_of, over_devices, varying

from optax_lossscale import LossScaleOptimizer, all_finite, autocast, diagnostics

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")


@functools.cache
def first_state():
    return LossScaleOptimizer(optax.sgd(0.1)).init({})


KINDS = [AxisType.Auto, AxisType.Explicit]
SPECS = [P("a", "b"), P(None, "a"), P(("a", "b")), P(None, None, "b"), P()]


def make_grads():
    w = np.ones((8, 8, 4), np.float32)
    w[3, 2, 1], w[3, 5, 0], w[5, 0, 0] = np.nan, np.inf, 2**-130
    grads = {"w": w, "c": (2 * w).astype(np.complex64), "half": w.astype(np.float16)}
    return grads | {"finite": np.nan_to_num(w, posinf=3.0)}


def vertices(grads, state):
    import matplotlib.figure

    axes = matplotlib.figure.Figure().subplots()
    axes = diagnostics.plot_exponents(grads, state, ax=axes)
    return [patch.get_path().vertices for patch in axes.patches]


ON_HOST = {
    "describe_nonfinite": lambda grads, state: diagnostics.describe_nonfinite(grads),
    "report": lambda grads, state: diagnostics.report(state, grads),
    "plot_exponents": vertices,
}
ANYWHERE = {
    "all_finite": lambda grads, state: all_finite(grads),
    "nonfinite_leaves": lambda grads, state: diagnostics.nonfinite_leaves(grads),
    "exponent_histogram": lambda grads, state: diagnostics.exponent_histogram(grads),
    "underflow_stats": lambda grads, state: diagnostics.underflow_stats(
        {name: x for name, x in grads.items() if name != "half"}, state
    ),
    "suggest_loss_scale": lambda grads, state: diagnostics.suggest_loss_scale(
        grads["finite"]
    ),
    "metrics": lambda grads, state: diagnostics.metrics(state),
}


@functools.cache
def on_one_device(function):
    return jax.jit(function)(make_grads(), first_state())


def assert_equal(got, wanted):
    jax.tree.map(np.testing.assert_array_equal, *jax.device_get((got, wanted)))


@pytest.mark.parametrize("spec", exhaustive_but(SPECS, SPECS[:1]), ids=str)
@pytest.mark.parametrize(
    "kind", exhaustive_but(KINDS, [AxisType.Explicit]), ids=["auto", "explicit"]
)
class TestSharded:
    """The same results as of arrays on one device."""

    def check(self, function, wanted, kind, spec):
        mesh = mesh_of(kind, a=4, b=2)
        for context in (contextlib.nullcontext(), jax.set_mesh(mesh)):
            with context:
                grads = jax.device_put(make_grads(), NamedSharding(mesh, spec))
                state = jax.device_put(first_state(), NamedSharding(mesh, P()))
                assert_equal(function(grads, state), wanted)

    @pytest.mark.parametrize("name", ON_HOST)
    def test_on_the_host(self, name, kind, spec):
        wanted = ON_HOST[name](make_grads(), first_state())
        self.check(ON_HOST[name], wanted, kind, spec)

    @pytest.mark.parametrize("name", ANYWHERE)
    def test_compiled(self, name, kind, spec):
        function = ANYWHERE[name]
        self.check(jax.jit(function), on_one_device(function), kind, spec)


def test_an_eager_call_and_a_failing_report():
    mesh = mesh_of(AxisType.Explicit, a=8)
    wanted = {name: on_one_device(function) for name, function in ANYWHERE.items()}
    with jax.set_mesh(mesh):
        grads = jax.device_put(make_grads(), NamedSharding(mesh, P(None, "a")))
        for name, function in ANYWHERE.items():
            assert_equal(function(grads, first_state()), wanted[name])
        with pytest.raises(
            FloatingPointError, match=r"params\['c'\], complex64\[8,8,4\]"
        ):
            diagnostics.check_health(first_state(), grads)


def test_in_shard_map():
    # One axis is manual there, and the other one explicit.
    mesh = mesh_of(AxisType.Explicit, a=4, b=2)
    w = np.exp2(np.arange(-32, 32, dtype=np.float32)).reshape(8, 8)

    def statistics(w):
        counts = diagnostics.exponent_histogram(w).counts
        return counts, diagnostics.underflow_stats(w, first_state())

    @jax.jit
    @jax.shard_map(in_specs=P("a"), out_specs=P("a"), axis_names={"a"}, mesh=mesh)
    def local(w):
        return jax.tree.map(lambda x: x[None], statistics(w))

    with jax.set_mesh(mesh):
        found = local(jax.device_put(w, NamedSharding(mesh, P("a", "b"))))
    assert_equal(found, jax.vmap(statistics)(w.reshape(4, 2, 8)))


@jax.custom_vjp
def with_another_result(h):
    return jnp.mean(h * h), h


with_another_result.defvjp(
    lambda h: (with_another_result(h), h),
    lambda h, g: (2 * h * g[0] / h.size + g[1],),
)


@autocast
def loss_fn(w, x):
    """Reads one result of a rule, and loops over nothing."""
    h, _ = jax.lax.scan(lambda h, y: (h @ w + y, None), x @ w, x[None][:0])
    return with_another_result(h)[0]


W, X = np.eye(8, dtype=np.float32) / 3, np.ones((4, 8), np.float32)


def test_the_trace_and_float32_lines_on_an_explicit_mesh():
    def both(f, w, x):
        del f
        trace = diagnostics.trace_numerics(loss_fn, w, x)
        lines = diagnostics.float32_lines(loss_fn, w, x, scale=1.0)
        return trace.loss, trace.summary, lines.verified, len(lines.lines)

    found = meshes.on_one_device(AxisType.Explicit, loss_fn, W, X, run=both)
    assert found == both(None, W, X)
    assert found[1:3] == ("5 of 5 matrix products compute in float16.", True)


def test_the_trace_in_shard_map_where_all_arrays_vary():
    @over_devices(P(), P(), mesh_of(batch=1))
    def mapped(w, x):
        return jax.lax.pmean(loss_fn(varying(w), varying(x)), "batch")

    found, wanted = (diagnostics.trace_numerics(f, W, X) for f in (mapped, loss_fn))
    assert found.loss == wanted.loss
    assert found.summary == wanted.summary


def test_in_shard_map_the_trace_follows_the_branch_of_float32():
    @over_devices(P(), P(), mesh_of(batch=1))
    def mapped(w, x):
        @autocast
        def decides(w, x):
            h = x @ w  # 1.0001 in float32, and 1 in float16.
            branches = (lambda h: jnp.sum(h), lambda h: 3 * jnp.sum(h))
            return jax.lax.cond(h[0, 0] > 1.00005, *branches, h)

        return jax.lax.pmean(decides(varying(w), varying(x)), "batch")

    trace = diagnostics.trace_numerics(mapped, W * 3 * 1.0001, X)
    assert trace.findings[0].kind == "decision"
    np.testing.assert_allclose([trace.loss, trace.float32_loss], [96, 32.0032], 1e-5)
