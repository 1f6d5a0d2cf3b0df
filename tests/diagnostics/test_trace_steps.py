"""A trace runs step by step: equal steps compile once, and leave nothing behind."""

import functools
import gc
import weakref
from concurrent import futures

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arithmetic import TWO, half, total
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from meshes import mesh_of

from optax_lossscale import autocast
from optax_lossscale.diagnostics import float32_lines, trace_numerics
from optax_lossscale.diagnostics._trace.measure import tape

EYE = np.eye(2, dtype=np.float32)


def decides(w):
    x = half(w) * 3e4
    return total(jnp.where(x > 5e4, jnp.sqrt(x), 2 * x) ** 2)


def loops(w):
    def step(x, w):
        return jnp.tanh(x @ half(w)), x.sum()

    x, sums = lax.scan(step, half(EYE), w)
    return total(x) + total(lax.cond(sums[0] > 3, jnp.exp, jnp.cos, sums))


def saves(w):
    return total(jax.checkpoint(lambda w: jnp.exp(half(w) * 6) * (1 / half(w)))(w))


def constant(w):
    return jnp.float32(3)


@pytest.mark.parametrize(
    ("loss_fn", "w"),
    [(decides, TWO), (loops, np.stack([EYE] * 3)), (saves, TWO), (constant, TWO)],
)
def test_it_keeps_to_the_ranks_and_holds_no_tracers(loss_fn, w):
    with jax.numpy_rank_promotion("raise"), jax.checking_leaks():
        trace = trace_numerics(loss_fn, w, scale=2.0**12)
    assert trace.scale == 2.0**12


def test_equal_steps_compile_once():
    def loss_fn(params):
        x = EYE
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.sum(x)

    made = []
    for depth in (4, 16):
        trace_numerics(autocast(loss_fn), [EYE] * depth)
        made.append(set(tape._last))
    assert made[0] == made[1]


def test_steps_are_kept_until_another_program_is_traced():
    def trace(size):
        trace_numerics(autocast(lambda w: jnp.sum(w @ w)), np.eye(size) / size)
        return tape._last

    first, again = trace(2), trace(2)
    assert [id(x) for x in first.values()] == [id(again[x]) for x in first]
    assert not set(first) <= set(trace(3))


def step_with_a_loop(function):
    """Returns the equation of a loop, traced anew."""
    closed = jax.make_jaxpr(
        lambda x: lax.scan(lambda x, _: (function(x), None), x, length=3)
    )
    return closed(TWO).eqns[-1]


def test_loops_with_equal_bodies_have_equal_keys():
    def key(function):
        return tape.key_of(total, step_with_a_loop(function))

    functions = jnp.sin, jnp.cos, lambda x: x * 0.0, lambda x: x * -0.0
    functions += lambda x: x * 1e-8, lambda x: jnp.sin(jnp.cos(x))
    functions += (lambda x: lax.fori_loop(0, 2, lambda _, x: jnp.sin(x), x),)
    functions += (lambda x: lax.fori_loop(0, 2, lambda _, x: jnp.cos(x), x),)
    keys = list(map(key, functions))
    assert None not in keys
    assert len(set(keys)) == len(functions)
    assert keys == [key(lambda x, f=f: f(x)) for f in functions]


def test_a_loop_with_a_callback_has_no_key():
    def function(x):
        return jax.pure_callback(lambda x: x, jax.typeof(x), x)

    assert tape.key_of(total, step_with_a_loop(function)) is None


def test_only_long_loops_are_worth_optimization():
    def loop(length):
        def function(x):
            def inner(x, _):
                return lax.scan(lambda x, _: (x * 2, None), x, length=3)[0], None

            return lax.cond(
                x > 0, lambda x: lax.scan(inner, x, length=length)[0], lambda x: x, x
            )

        return jax.make_jaxpr(function)(1.0).jaxpr

    assert [tape._iterations(loop(n)) for n in (2, 1000)] == [6, 3000]


def in_a_thread(function, *args):
    with futures.ThreadPoolExecutor(1) as threads:
        return threads.submit(function, *args).result()


def nested(function, *args):
    with jax.ensure_compile_time_eval():
        return function(*args)


@pytest.mark.parametrize("run", [in_a_thread, nested])
def test_a_call_goes_on_where_another_ends_and_one_fails(run):
    def fails(w):
        run(trace_numerics, lambda w: total(jnp.sin(half(w))), TWO)
        raise KeyError("w")

    def loss_fn(w):
        with pytest.raises(KeyError):
            run(trace_numerics, fails, TWO)
        seen.append(tape._last)
        return decides(w)

    seen, alone = [], trace_numerics(decides, TWO)
    before = tape._last
    found = trace_numerics(loss_fn, TWO)
    assert [x.output for x in found.operations] == [x.output for x in alone.operations]
    assert set(seen[0]) != set(before)  # They are of the call that ended first.
    assert [id(x) for x in tape._last.values()] == [id(x) for x in before.values()]


def test_what_a_call_compiled_is_dropped_with_it():
    def trace(size):
        trace_numerics(autocast(lambda w: jnp.sum(jnp.tanh(w @ w))), np.eye(size))
        return [weakref.ref(x.compiled) for x in tape._last.values()]

    gc.collect()
    gc.disable()
    try:
        compiled = trace(2)
        trace(3)
        # The others are steps of both: of scalars, that is.
        left = [x() for x in compiled if x() is not None]
        assert set(left) <= {x.compiled for x in tape._last.values()}
        assert len(left) < len(compiled)
    finally:
        gc.enable()


def test_what_does_not_depend_on_the_scale_runs_once():
    seen = []

    def loss_fn(w):
        y = half(w) ** 2
        jax.debug.callback(seen.append, y[0])
        return total(y)

    trace_numerics(loss_fn, TWO)
    jax.effects_barrier()
    assert len(seen) == 1


@pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices")
def test_arrays_on_several_devices():
    """Steps with collectives run one after the other."""

    def loss_fn(params, x):
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    x = jax.device_put(np.ones((8, 2), np.float32), NamedSharding(mesh, P("data")))
    everywhere = jax.device_put([EYE] * 24, NamedSharding(mesh, P()))
    here = trace_numerics(autocast(loss_fn), [EYE] * 24, np.ones((8, 2), np.float32))
    trace = trace_numerics(autocast(loss_fn), everywhere, x)
    assert trace.findings == here.findings
    assert trace.largest_scale == here.largest_scale


@pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices")
def test_steps_wait_where_the_program_itself_spreads_arrays(monkeypatch):
    """Otherwise collectives of two steps may wait for each other's threads."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P("data"), out_specs=P())
    def mean(x):
        return lax.pmean(jnp.mean(half(x)), "data")

    waited = []
    monkeypatch.setattr(jax, "block_until_ready", waited.append)
    trace_numerics(lambda w: total(mean(w)), np.ones(8, np.float32))
    assert waited


@pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint, autocast])
def test_in_shard_map(wrap, kind):
    """The mean over devices is inside what casts, or computes again."""

    def mean(w, x):
        if wrap is not autocast:
            w, x = half(w), half(x)
        return lax.pmean(jnp.mean(jnp.tanh(x @ w).astype(jnp.float32)), "x")

    mesh = mesh_of(kind, x=4)
    f = jax.shard_map(wrap(mean), mesh=mesh, in_specs=(P(), P("x")), out_specs=P())
    x = np.linspace(-2, 2, 16, dtype=np.float32).reshape(8, 2)
    w = jax.device_put(EYE, NamedSharding(mesh, P()))
    trace = trace_numerics(f, w, jax.device_put(x, NamedSharding(mesh, P("x"))))
    assert trace.findings[0].kind == "fine"
    assert np.isclose(trace.loss, np.mean(np.tanh(x)), atol=1e-3)


@pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices")
def test_explicit_axes_without_a_mesh_that_is_set():
    mesh = mesh_of(AxisType.Explicit, x=4)
    x = jax.device_put(np.ones((8, 2), np.float32), NamedSharding(mesh, P("x")))
    w = jax.device_put(EYE, NamedSharding(mesh, P()))
    loss_fn = autocast(lambda w, x: jnp.mean((jnp.tanh(x @ w) @ w + 1) ** 2))
    trace = trace_numerics(loss_fn, w, x)
    here = trace_numerics(loss_fn, EYE, np.ones((8, 2), np.float32))
    assert trace.findings[0].kind == "fine"
    assert trace.largest_scale == here.largest_scale


@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_parameters_sharded_along_their_second_axis_alone(kind):
    """Devices have parts of each row, so no gradient has one order of its numbers."""

    def loss_fn(params, x):
        hidden = jnp.square(x @ params["in"]["w"] + params["in"]["b"])
        return 1e-6 * jnp.mean((params["out"] @ hidden) ** 2)

    rng = np.random.default_rng(0)
    w, b, out, x = (
        rng.normal(size=size).astype(np.float32)
        for size in ((8, 16), (16,), (4, 4), (4, 8))
    )
    params, x = {"in": {"w": w, "b": b}, "out": out}, 100 * x
    specs = {"in": {"w": P(None, "m"), "b": P("m")}, "out": P()}
    mesh, loss_fn = mesh_of(kind, d=4, m=2), autocast(loss_fn)
    with jax.set_mesh(mesh):
        places = jax.tree.map(functools.partial(NamedSharding, mesh), specs)
        args = jax.device_put(params, places), jax.device_put(x, places["out"])
        trace, lines = trace_numerics(loss_fn, *args), float32_lines(loss_fn, *args)
    here = trace_numerics(loss_fn, params, x)
    assert trace.findings[0].kind == here.findings[0].kind == "forward"
    assert trace.largest_scale == here.largest_scale
    np.testing.assert_allclose(trace.float32_loss, here.float32_loss, rtol=1e-5)
    assert lines.lines
    assert lines.verified


def test_no_arrays_are_left():
    def loss_fn(w):
        x = jnp.exp(-(jnp.sin(half(w)) ** 2))
        return total(lax.cond(x[0] > 0, jnp.cos, jnp.sin, x))

    trace_numerics(loss_fn, TWO)
    gc.collect()
    before = len(jax.live_arrays())
    gc.disable()
    try:
        trace = trace_numerics(loss_fn, TWO)
        assert len(jax.live_arrays()) == before, str(trace)
    finally:
        gc.enable()


@pytest.mark.parametrize("fill", [0.0, -0.0])
def test_steps_with_zeros_of_another_sign_differ(fill):
    whole = lax.GatherDimensionNumbers((0,), (), (0,))

    def loss_fn(w):
        outside = {"mode": "fill", "fill_value": fill}
        taken = lax.gather(half(w), np.array([7]), whole, (1,), **outside)
        return total(1 / taken)

    assert trace_numerics(loss_fn, TWO).loss == np.copysign(np.inf, fill)


@pytest.mark.parametrize("loss", [np.inf, np.nan])
def test_a_loss_that_depends_on_nothing(loss):
    (finding,) = trace_numerics(lambda w: jnp.float16(loss), TWO).findings
    assert finding.message.startswith(f"The loss is {loss:g}, a constant")


def test_a_callback_is_not_kept():
    class Model:
        def __call__(self, x):
            return x

    def loss_fn(w, model):
        y = lax.stop_gradient(w)
        y = jax.pure_callback(model, jax.ShapeDtypeStruct((2,), np.float32), y)
        return total(half(w)) + jnp.sum(y)

    model = Model()
    reference = weakref.ref(model)
    trace_numerics(functools.partial(loss_fn, model=model), TWO)
    del model
    jax.clear_caches()
    gc.collect()
    assert reference() is None


def test_lines_step_by_step():
    def loss_fn(w):
        w = w * 300 * lax.iota(jnp.int32, 2).astype(jnp.float32)
        return jnp.sum(w @ w) * 1e-4

    found = float32_lines(autocast(loss_fn), EYE)
    assert len(found.lines) == 1
    assert found.verified


@pytest.mark.filterwarnings("ignore:autocast computes nothing")
def test_another_precision_is_another_step():
    def loss_fn(w):
        return jnp.sum((w @ w) ** 2)

    traces = []
    for precision in ("default", "highest"):
        with jax.default_matmul_precision(precision):
            traces.append(trace_numerics(autocast(loss_fn), EYE))
    # autocast leaves a product with a precision as it is.
    assert [x.computes_in_dtype for x in traces] == [True, False]


def test_an_error_of_the_compiler_says_what_to_do(monkeypatch):
    def fail(*_):
        raise jax.errors.JaxRuntimeError("UNKNOWN: Unknown MLIR failure")

    monkeypatch.setattr(tape, "_execute", fail)
    with pytest.raises(
        jax.errors.JaxRuntimeError, match="Unknown MLIR failure"
    ) as caught:
        trace_numerics(lambda w: total(half(w)), TWO)
    assert "fewer layers" in caught.value.__notes__[0]
