"""Many devices: all skip together, and train as one device does."""

import contextlib
import functools
import re
from pathlib import Path

import distributed
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import (
    exhaustive_but,
    plain_step,
    scaled_step,
)
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from pages import page_blocks
from runs import finish_all, free_port, start

from optax_lossscale import DynamicLossScale, LossScaleOptimizer, all_finite

KINDS = [AxisType.Auto, AxisType.Explicit]
# With a scale among the parameters, the gradients are computed as by a trainer.
every_leaf = pytest.mark.parametrize("leaf", [None, "loss_scale"])

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")


@functools.cache
def expected():
    return distributed.one_device()


def check_rows(rows):
    """Checks the scale, the skip and the counter of every step, on every device."""
    for row, wanted in zip(rows, expected()[2], strict=True):
        for value, one in zip(row, wanted, strict=True):
            np.testing.assert_array_equal(value, np.broadcast_to(one, value.shape))


def check_params(params, **options):
    for name, wanted in expected()[0].items():
        np.testing.assert_allclose(params[name], wanted, **options)
    if "loss_scale" in params:
        assert params["loss_scale"] == expected()[2][-1][0]


def check_devices_agree(tree):
    for leaf in jax.tree.leaves(tree):
        for device in leaf[1:]:
            np.testing.assert_array_equal(device, leaf[0])


def averaging(average):
    """Makes a transform of the user's that averages the gradients."""

    def transform(fun, **options):
        def value_and_grad(*args):
            value, grads = jax.value_and_grad(fun, **options)(*args)
            return value, average(grads)

        return value_and_grad

    return transform


class TestEquivalence:
    """Fifty steps, six of which overflow, against the same on one device."""

    def test_the_run_overflows_and_grows_as_it_should(self):
        params, state, rows = expected()
        assert [not applied for _, applied, _ in rows] == [
            step in distributed.OVERFLOWS for step in range(distributed.STEPS)
        ]
        assert state.skipped_steps == len(distributed.OVERFLOWS)
        scales = [float(scale) for scale, _, _ in rows]
        assert max(scales) > scales[0] > min(scales)
        assert all(np.isfinite(x).all() for x in params.values())

    @every_leaf
    def test_pmap(self, leaf):
        params, state, rows = distributed.pmap(leaf)
        check_devices_agree((params, state))
        check_rows(rows)
        check_params({k: v[0] for k, v in params.items()}, atol=1e-6)

    @every_leaf
    @pytest.mark.parametrize("check_vma", exhaustive_but([True, False], [True]))
    def test_shard_map(self, check_vma, leaf):
        params, _, rows = distributed.shard_map(check_vma, leaf)
        check_rows(rows)
        check_params(params, atol=1e-6)

    @pytest.mark.parametrize("kind", exhaustive_but(KINDS, KINDS[:1]), ids=str)
    @every_leaf
    def test_sharded_jit(self, kind, leaf):
        params, _, rows = distributed.sharded_jit(kind, leaf)
        check_rows(rows)
        check_params(params, atol=1e-6)


class TestRetries:
    """The gradients of one device overflow: all repeat the backward pass."""

    @pytest.mark.parametrize("way", [("sharded jit",), ("shard_map", "i")])
    def test_all_take_the_step(self, way):
        param, state, loss = distributed.one_overflow(*way)
        mean = 64.875 / 8
        assert (param, loss) == (1 - 0.5 * mean, mean)
        assert state.inner_state[0].trace == mean
        assert state.loss_scale_state[:2] == (2**12, 1)
        assert (state.skipped_steps, state.retries) == (0, 8)
        # No scale helps if the loss of one device is not finite.
        param, state, _ = distributed.one_overflow(*way, bad=np.nan)
        assert (param, state.skipped_steps, state.retries) == (1, 1, 0)

    def test_gradients_that_vary_over_one_of_two_axes(self):
        optimizer = LossScaleOptimizer(
            optax.sgd(0.5), DynamicLossScale(2.0**20), axis_name="p", retries=24
        )
        mesh = jax.make_mesh((4, 2), ("p", "d"), axis_types=(AxisType.Auto,) * 2)
        params = jnp.arange(8, dtype=jnp.float32).reshape(4, 2)

        def loss_fn(params):
            half = params.astype(jnp.float16).astype(jnp.float32)
            return jnp.sum(half**2)

        def step(params, state):
            params, state, _ = optimizer.minimize(loss_fn, params, state)
            return params, state

        step = jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(P("p"), P()),
            out_specs=(P("p"), P()),
            axis_names={"p"},
        )
        params, state = jax.jit(step)(params, optimizer.init(params))
        # The largest gradient is 14.
        assert (state.retries, state.skipped_steps) == (8, 0)
        np.testing.assert_array_equal(params, 0)

    def test_devices_that_would_repeat_apart_are_refused(self):
        message = r"retries=24, axis_name must contain 'i', got None"
        with pytest.raises(ValueError, match=message):
            distributed.one_overflow("shard_map")

        optimizer = LossScaleOptimizer(optax.sgd(0.5), 2.0**20, retries=24)
        state = optimizer.init(jnp.float32(1))
        mean = functools.partial(jax.lax.pmean, axis_name="i")
        step = functools.partial(optimizer.minimize, transform=averaging(mean))
        with pytest.raises(ValueError, match=message):
            jax.pmap(lambda x: step(jnp.square, x, state), "i")(jnp.ones(8))
        # Also where they communicate in the forward pass alone.
        with pytest.raises(ValueError, match=message):
            jax.vmap(
                lambda x: optimizer.minimize(
                    lambda w, x: (w * jax.lax.pmax(x, "i")) ** 2, x, state, x
                ),
                axis_name="i",
            )(jnp.ones(8))

    def test_a_device_that_asks_for_its_index_may_repeat_alone(self):
        optimizer = LossScaleOptimizer(
            optax.sgd(0.5), DynamicLossScale(2.0**20), retries=24
        )

        def loss_fn(w):
            size = jnp.float16(4) ** jax.lax.axis_index("i").astype(jnp.float16)
            return (w.astype(jnp.float16) * size).astype(jnp.float32)

        step = jax.vmap(
            lambda w: optimizer.minimize(loss_fn, w, optimizer.init(w)), axis_name="i"
        )
        _, state, _ = step(jnp.ones(3))
        assert state.retries.tolist() == [5, 7, 9]


class TestShardedParameters:
    """Each device holds a slice of parameters, gradients and inner state."""

    params = np.arange(8 * 6, dtype=np.float32).reshape(8, 6) / 10

    def step(self, optimizer, check_vma, in_state):
        mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
        specs = jax.tree.map(lambda x: P("model") if x.ndim else P(), in_state)
        slices = P("model")

        def step(params, state, grads):
            updates, _ = optimizer.update(grads, state, params)
            params, state = optimizer.apply_gradients(grads, params, state)
            return params, state, updates

        return jax.jit(
            jax.shard_map(
                step,
                mesh=mesh,
                in_specs=(slices, specs, slices),
                out_specs=(slices, specs, slices),
                check_vma=check_vma,
            )
        )

    @pytest.mark.parametrize("check_vma", exhaustive_but([True, False], [True]))
    def test_an_inf_in_one_slice_skips_all(self, check_vma):
        optimizer = LossScaleOptimizer(optax.sgd(0.5, 0.9), axis_name=("data", "model"))
        plain = LossScaleOptimizer(optax.sgd(0.5, 0.9))
        state = wanted_state = optimizer.init(self.params)
        step = self.step(optimizer, check_vma, state)
        params = wanted = self.params
        for bad in (None, (7, 5), (0, 0), None):
            grads = jnp.ones_like(params)
            grads = grads if bad is None else grads.at[bad].set(jnp.inf)
            old, (params, state, updates) = params, step(params, state, grads)
            wanted, wanted_state = plain.apply_gradients(grads, wanted, wanted_state)
            np.testing.assert_allclose(params, wanted, rtol=1e-6)
            np.testing.assert_allclose(old + updates, wanted, rtol=1e-6)
        assert state.skipped_steps == 2
        assert optimizer.current_loss_scale(state) == 2**13
        assert state.inner_state[0].trace.sharding.spec[0] == "model"


def test_shard_map_refuses_devices_that_decide_apart():
    # Without axis_name: what is said to be replicated would differ between devices.
    optimizer = LossScaleOptimizer(optax.sgd(0.5, 0.9))
    mesh = jax.make_mesh((8,), ("batch",), axis_types=(AxisType.Auto,))
    params = {"sliced": jnp.ones((8, 2), jnp.float32), "copied": jnp.float32(1)}
    state = optimizer.init(params)
    specs = jax.tree.map(lambda x: P("batch") if x.ndim else P(), (params, state))

    def step(params, state, grads):
        return optimizer.apply_gradients(grads, params, state)[0]

    specs = {"in_specs": (*specs, specs[0]), "out_specs": specs[0]}
    step = jax.shard_map(step, mesh=mesh, **specs)
    with pytest.raises(ValueError, match="out_specs"):
        jax.jit(step)(params, state, params)


def test_updates_of_sharded_parameters_from_a_state_of_zeros():
    # The new momentum varies over the devices; the zeros that it begins with do not.
    optimizer = LossScaleOptimizer(optax.sgd(0.5, 0.9), axis_name="batch")
    mesh = jax.make_mesh((8,), ("batch",), axis_types=(AxisType.Auto,))

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P("batch"), out_specs=P())
    def any_update(grads):
        updates, state = optimizer.update(grads, optimizer.init(jnp.zeros(1)))
        return jax.lax.psum((updates, state.inner_state), "batch")

    grads = jnp.arange(8, dtype=jnp.float32)
    updates, state = jax.jit(any_update)(grads)
    assert (updates, state[0].trace) == (-14, 28)
    updates, state = jax.jit(any_update)(grads.at[5].set(jnp.nan))
    assert (updates, state[0].trace) == (0, 0)


COLLECTIVES = re.compile(
    r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(-start)?\("
)


def collectives(step, *shapes):
    text = jax.jit(step).lower(*shapes).compile().as_text()
    return [line for line in text.splitlines() if COLLECTIVES.search(line)]


@pytest.mark.parametrize("kind", exhaustive_but(KINDS, KINDS[:1]), ids=str)
def test_sharded_jit_adds_one_scalar_reduction(kind):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)
    put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))  # noqa: E731
    params = {
        "w1": put(jnp.ones((64, 64), jnp.float32), None, "model"),
        "w2": put(jnp.ones((64, 64), jnp.float32), "model", None),
    }
    x = put(jnp.ones((16, 64), jnp.float32), "data", None)

    def loss_fn(params, x):
        hidden = jnp.tanh(x @ params["w1"])
        explicit = {"out_sharding": P("data", None)} if kind is KINDS[1] else {}
        return jnp.mean(jnp.square(jnp.matmul(hidden, params["w2"], **explicit)))

    inner = optax.sgd(0.1, 0.9)
    optimizer = LossScaleOptimizer(inner)
    plain, scaled = plain_step(loss_fn, inner), scaled_step(loss_fn, optimizer)
    with jax.set_mesh(mesh):
        theirs = collectives(plain, params, jax.jit(inner.init)(params), x)
        ours = collectives(scaled, params, jax.jit(optimizer.init)(params), x)
    assert len(theirs) > 0
    assert len(ours) == len(theirs) + 1
    gathers = [sum("all-gather" in line for line in x) for x in (theirs, ours)]
    assert gathers[0] == gathers[1]
    scalar = re.compile(r"= \(?(f32\[\](, )?)+\)? all-reduce")
    assert sum(bool(scalar.search(line)) for line in ours) == 1


@pytest.mark.parametrize("in_mesh", [False, True])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_init_places_the_moments_with_the_parameters(kind, in_mesh):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)
    shardings = {"w": NamedSharding(mesh, P(None, "model"))}
    shardings["b"] = NamedSharding(mesh, P())
    params = {"w": jnp.ones((8, 16), jnp.float16), "b": jnp.ones(16, jnp.float32)}
    params = jax.device_put(params, shardings)
    optimizer = LossScaleOptimizer(optax.sgd(0.1, 0.9))

    def are_placed(state):
        trace = state.inner_state[0].trace
        assert trace["w"].dtype == jnp.float32
        return [
            trace[name].sharding.is_equivalent_to(wanted, trace[name].ndim)
            for name, wanted in shardings.items()
        ]

    with jax.set_mesh(mesh) if in_mesh else contextlib.nullcontext():
        state = optimizer.init(params)
        assert all(are_placed(state))
        step = jax.jit(optimizer.apply_gradients)
        params, state = step(params, params, state)
        assert all(are_placed(state))


PER_DEVICE = {
    "pmap": lambda f, mesh: jax.pmap(f, axis_name="batch"),
    "shard_map": lambda f, mesh: jax.shard_map(
        lambda *args: jax.tree.map(
            lambda x: x[None], f(*jax.tree.map(lambda x: x[0], args))
        ),
        mesh=mesh,
        in_specs=P("batch"),
        out_specs=P("batch"),
        check_vma=False,
    ),
}


@pytest.mark.parametrize("per_device", PER_DEVICE.values(), ids=PER_DEVICE)
class TestMinimizeWithoutAveraging:
    """Where JAX does not average the gradients of replicated parameters itself."""

    x = np.arange(8, dtype=np.float32)

    @staticmethod
    def loss_fn(params, x):
        return 0.5 * (params - x) ** 2

    def step(self, per_device, optimizer, **options):
        def step(params, state, x):
            return optimizer.minimize(self.loss_fn, params, state, x, **options)[:2]

        mesh = jax.make_mesh((8,), ("batch",), axis_types=(AxisType.Auto,))
        start = jnp.float32(1), optimizer.init(jnp.float32(1))
        start = jax.tree.map(lambda x: jnp.stack([x] * 8), start)
        return jax.jit(per_device(step, mesh))(*start, self.x)

    def test_is_refused(self, per_device):
        optimizer = LossScaleOptimizer(optax.sgd(0.5), axis_name="batch")
        calls = r"value_and_grad, jax\.lax\.pmean\(grads, 'batch'\), apply_gradients"
        with pytest.raises(ValueError, match=calls):
            self.step(per_device, optimizer)

    def test_is_left_to_a_transform_of_the_user(self, per_device):
        optimizer = LossScaleOptimizer(optax.sgd(0.5), axis_name="batch")
        mean = functools.partial(jax.lax.pmean, axis_name="batch")
        params, state = self.step(per_device, optimizer, transform=averaging(mean))
        assert params.tolist() == [1 - 0.5 * (1 - 3.5)] * 8
        assert state.last_step_applied.all()

    def test_members_may_train_apart(self, per_device):
        optimizer = LossScaleOptimizer(optax.sgd(0.5))
        params, state = self.step(per_device, optimizer)
        np.testing.assert_array_equal(params, 1 - 0.5 * (1 - self.x))
        assert state.last_step_applied.all()


class TestLocalLoss:
    """`jax.shard_map` sums the gradients of devices that share their parameters."""

    x = np.arange(8, dtype=np.float32)

    def minimize(
        self,
        loss_fn,
        spec,
        transform=jax.value_and_grad,
        *,
        in_one_call=True,
        **options,
    ):
        """Takes a step from ones; returns the parameters, and raises what it warns."""
        mesh = jax.make_mesh((8,), ("batch",), axis_types=(AxisType.Auto,))
        optimizer = LossScaleOptimizer(optax.sgd(1.0), **options)

        @jax.jit
        @functools.partial(
            jax.shard_map, mesh=mesh, in_specs=(spec, P("batch")), out_specs=spec
        )
        def step(params, x):
            state = optimizer.init(params)
            if in_one_call:
                call = functools.partial(optimizer.minimize, transform=transform)
                return call(loss_fn, params, state, x)[0]
            grad_fn = optimizer.value_and_grad(loss_fn, state, transform=transform)
            _, grads = grad_fn(params, x)
            return optimizer.apply_gradients(grads, params, state)[0]

        return step(jax.tree.map(lambda _: jnp.ones(8), spec), self.x)

    @staticmethod
    def local(params, x):
        return jnp.sum(params * x) / 8

    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"axis_name": "batch"},
            {"axis_name": "batch", "retries": 2},
            {"in_one_call": False},
        ],
        ids=str,
    )
    def test_of_shared_parameters_warns(self, options):
        axes = r"\('batch',\)"
        warning = rf"differs along {axes}.*In loss_fn write .*pmean\(loss, {axes}\)"
        with pytest.warns(UserWarning, match=warning) as caught:
            params = self.minimize(self.local, P(), **options)
        assert [Path(x.filename).name for x in caught] == [Path(__file__).name]
        np.testing.assert_array_equal(params, np.full(8, 1 - 28 / 8))
        # What the warning recommends.
        params = self.minimize(
            lambda params, x: jax.lax.pmean(self.local(params, x), "batch"),
            P(),
            **options,
        )
        np.testing.assert_array_equal(params, np.full(8, 1 - 28 / 64))

    def test_of_all_devices_is_quiet(self):
        # Parts of one loss: a sum is right.
        params = self.minimize(
            lambda params, x: jax.lax.psum(self.local(params, x), "batch"), P()
        )
        np.testing.assert_array_equal(params, np.full(8, 1 - 28 / 8))

    def test_of_sharded_parameters_is_quiet(self):
        params = self.minimize(self.local, P("batch"), axis_name="batch")
        np.testing.assert_array_equal(params, 1 - self.x / 8)
        # As of a stage, with an embedding that all stages share.
        params = self.minimize(
            lambda params, x: self.local(params["own"] * params["shared"][0], x),
            {"own": P("batch"), "shared": P()},
            axis_name="batch",
        )
        np.testing.assert_array_equal(params["own"], 1 - self.x / 8)

    def test_of_a_transform_that_averages_is_quiet(self):
        transform = averaging(lambda grads: grads / 8)
        params = self.minimize(self.local, P(), transform=transform)
        np.testing.assert_array_equal(params, np.full(8, 1 - 28 / 64))


class TestAxisName:
    def test_an_unknown_axis_is_named(self):
        optimizer = LossScaleOptimizer(optax.sgd(0.1), axis_name="bacth")
        one = jnp.float32(1)
        with pytest.raises(NameError, match="axis_name='bacth' was given to LossScale"):
            jax.jit(optimizer.update)(one, optimizer.init(one))
        with pytest.raises(NameError, match="axis_name='bacth'"):
            jax.pmap(lambda x: all_finite(x, axis_name="bacth"), "batch")(jnp.ones(8))


@pytest.mark.exhaustive
def test_the_guide_on_two_processes(tmp_path):
    codes = [code for code, _ in page_blocks("docs/guide/many-devices.md")]
    (script,) = [code for code in codes if "jax.distributed.initialize()" in code]
    checks = """
assert jax.device_count() == 8 and jax.process_count() == 2
assert float(loss) < 1
# An inf in the part of one process: both skip.
local_x[0] = jax.process_index() * np.inf
before, scale = state[0], optimizer.current_loss_scale(state[1])
x = jax.make_array_from_process_local_data(by_batch, local_x)
*state, _ = train_step(*state, x)
assert np.array_equal(state[0], before)
assert float(optimizer.current_loss_scale(state[1])) == float(scale) / 2
"""
    # On a cluster jax.distributed.initialize finds its arguments by itself.
    launcher = f"""
import functools, sys, jax
jax.distributed.initialize = functools.partial(
    jax.distributed.initialize, "127.0.0.1:{free_port()}", 2, int(sys.argv[1])
)
"""
    path = tmp_path / "script.py"
    path.write_text(launcher + script + checks)
    finish_all([start(rank, devices=4, script=path) for rank in range(2)])


def test_a_forgotten_axis_name_does_not_wait_for_ever():
    """Devices decide apart. One that branched would not join the mean of the others."""
    inner = optax.chain(
        optax.stateless(lambda grads, _: jax.lax.pmean(grads, "batch")), optax.sgd(0.5)
    )
    optimizer = LossScaleOptimizer(inner)
    params = jnp.ones((8, 2), jnp.float32)
    state = jax.pmap(optimizer.init)(params)
    grads = jnp.ones((8, 2), jnp.float32).at[3, 0].set(jnp.inf)

    @functools.partial(jax.pmap, axis_name="batch")
    def step(params, state, grads):
        return optimizer.apply_gradients(grads, params, state)

    params, state = step(params, state, grads)
    applied = np.arange(8) != 3
    assert (state.last_step_applied == applied).all()
    # The gradients of the one that skips are left out of the sum.
    expected = np.where(applied, 1 - 0.5 * 7 / 8, 1)
    np.testing.assert_allclose(params[:, 0], expected, rtol=1e-6)
