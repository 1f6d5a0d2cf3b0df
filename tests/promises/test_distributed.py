"""Many devices: all skip together, and train as one device does."""

import contextlib
import functools
import itertools
import re
from pathlib import Path

import distributed
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from arithmetic import half, mean, total
from distributed import mean_over_devices
from flax import nnx
from helpers import assert_close, exhaustive_but, plain_step
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from meshes import PARTS, WHOLE, mesh_of, over_devices, varying
from pages import page_blocks
from runs import finish_all, free_port, start

from optax_lossscale import DynamicLossScale, LossScaleOptimizer

KINDS = [AxisType.Auto, AxisType.Explicit]
INDEX = np.arange(8, dtype=np.float32)  # a number of each device
# Of the ways to train, with and without a scale among the parameters.
CASES = list(itertools.product(distributed.WAYS, [None, "loss_scale"]))
BY_DEFAULT = [("pmap", None), ("shard_map", None), ("sharded jit", None)]
BY_DEFAULT += [("shard_map", "loss_scale")]

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")


def on_each(tree):
    """Returns the arrays of a tree, once for each of eight devices."""
    return jax.tree.map(lambda x: np.stack([x] * 8), tree)


def averaging(average):
    """Makes a transform of the user's that averages the gradients."""

    @functools.wraps(jax.value_and_grad)  # So that it takes the name of JAX's.
    def transform(fun, **options):
        def value_and_grad(*args):
            value, grads = jax.value_and_grad(fun, **options)(*args)
            return value, average(grads)

        return value_and_grad

    return transform


class TestEquivalence:
    """Fifty steps, six of which overflow, against the same on one device."""

    expected = staticmethod(functools.cache(distributed.one_device))

    def test_the_run_overflows_and_grows_as_it_should(self):
        params, _, (scales, applied, skipped) = self.expected()
        assert np.flatnonzero(~applied).tolist() == list(distributed.OVERFLOWS)
        assert skipped[-1] == len(distributed.OVERFLOWS)
        assert max(scales) > scales[0] > min(scales)
        assert all(np.isfinite(x).all() for x in params.values())

    # With a scale among the parameters, the gradients are computed as by a trainer.
    @pytest.mark.parametrize("case", exhaustive_but(CASES, BY_DEFAULT), ids=str)
    def test_every_way_trains_as_one_device(self, case):
        way, leaf = case
        params, _, rows = distributed.WAYS[way](leaf)
        expected, _, expected_rows = self.expected()
        # The scale, the skip and the counter of every step.
        for row, wanted in zip(rows, expected_rows, strict=True):
            np.testing.assert_array_equal(row, wanted)
        for name, wanted in expected.items():
            np.testing.assert_allclose(params[name], wanted, atol=1e-6)
        assert leaf is None or params[leaf] == expected_rows[0][-1]


class TestRetries:
    """The gradients of one device overflow: all repeat the backward pass."""

    RULE = DynamicLossScale(2.0**20)

    def step(self, way, bad, axis_name=None):
        """Takes a step with one number on each of eight devices, one of them bad."""
        optimizer = LossScaleOptimizer(
            optax.sgd(0.5, momentum=0.9), self.RULE, axis_name=axis_name, retries=24
        )

        def loss_fn(param, x):
            loss = mean(half(param) * half(x))
            return loss if way == "sharded jit" else mean_over_devices(loss)

        x = np.full(8, 0.125, np.float32)
        x[3] = bad
        args = (np.float32(1), optimizer.init(np.float32(1))), x
        places = [NamedSharding(mesh_of(batch=8), spec) for spec in (WHOLE, PARTS)]
        start, x = map(jax.device_put, args, places)
        step = functools.partial(optimizer.minimize, loss_fn)
        if way == "shard_map":
            step = over_devices((WHOLE, WHOLE, PARTS), WHOLE)(step)
        return jax.device_get(jax.jit(step, donate_argnums=(0, 1))(*start, x))

    @pytest.mark.parametrize(
        ("way", "axis_name"), [("sharded jit", None), ("shard_map", "batch")]
    )
    def test_all_take_the_step(self, way, axis_name):
        param, state, loss = self.step(way, 64.0, axis_name)
        expected = 64.875 / 8
        assert (param, loss) == (1 - 0.5 * expected, expected)
        assert state.inner_state[0].trace == expected
        assert state.loss_scale_state[:2] == (2**12, 1)
        assert (state.skipped_steps, state.retries) == (0, 8)
        # No scale helps if the loss of one device is not finite.
        param, state, _ = self.step(way, np.nan, axis_name)
        assert (param, state.skipped_steps, state.retries) == (1, 1, 0)

    def test_gradients_that_vary_over_one_of_two_axes(self):
        optimizer = LossScaleOptimizer(
            optax.sgd(0.5), self.RULE, axis_name="p", retries=24
        )
        params = np.arange(8, dtype=np.float32).reshape(4, 2)

        def loss_fn(params):
            return total(jnp.square(half(params).astype(jnp.float32)))

        specs, mesh = (P("p"), P()), mesh_of(p=4, d=2)

        @over_devices(specs, specs, mesh, axis_names={"p"})
        def step(params, state):
            return optimizer.minimize(loss_fn, params, state)[:2]

        params, state = step(params, optimizer.init(params))
        # The largest gradient is 14.
        assert (state.retries, state.skipped_steps) == (8, 0)
        np.testing.assert_array_equal(params, 0)

    def test_devices_that_would_repeat_apart_are_refused(self):
        x = np.ones(8, np.float32)
        optimizer = LossScaleOptimizer(optax.sgd(0.5), 2.0**20, retries=24)
        start = x[0], optimizer.init(x[0])
        averaged = {"transform": averaging(mean_over_devices)}

        def square_of_largest(w, x):
            return (w * jax.lax.pmax(x, "batch")) ** 2

        for call in (
            lambda: self.step("shard_map", bad=64.0),
            lambda: jax.pmap(
                lambda x: optimizer.minimize(jnp.square, x, start[1], **averaged),
                "batch",
            )(x),
            # Also where they communicate in the forward pass alone.
            lambda: jax.vmap(
                lambda x: optimizer.minimize(square_of_largest, *start, x),
                axis_name="batch",
            )(x),
        ):
            message = "retries=24, axis_name must contain 'batch', got None"
            with pytest.raises(ValueError, match=message):
                call()

    @pytest.mark.parametrize("kind", KINDS)
    def test_some_members_of_an_ensemble_on_each_device(self, kind):
        optimizer = LossScaleOptimizer(optax.sgd(0.5), self.RULE, retries=24)
        shared = np.float32([1, 2, 3])

        def step(params, state):
            def loss_fn(params):
                return mean(half(params * shared).astype(jnp.float32) ** 2)

            return optimizer.minimize(loss_fn, params, state)

        step, mesh = jax.vmap(step), mesh_of(kind, batch=8)
        params = 1.0 + np.arange(48, dtype=np.float32).reshape(16, 3)
        args = params, jax.vmap(optimizer.init)(params)
        expected = jax.jit(step)(*args)
        with jax.set_mesh(mesh):
            args = jax.device_put(args, NamedSharding(mesh, PARTS))
            found = jax.device_get(over_devices(PARTS, PARTS, mesh)(step)(*args))
        assert_close(found, expected)
        assert found[1].retries.tolist() == expected[1].retries.tolist()
        # The largest scaled gradients are 6 and 96 times the scale.
        assert (found[1].retries[0], found[1].retries[-1]) == (7, 11)

    def test_a_device_that_asks_for_its_index_may_repeat_alone(self):
        optimizer = LossScaleOptimizer(optax.sgd(0.5), self.RULE, retries=24)

        def loss_fn(w):
            size = jnp.float16(4) ** half(jax.lax.axis_index("i"))
            return total(half(w) * size)

        # Without `jit`, where the members are tracers all the same.
        @functools.partial(jax.vmap, axis_name="i")
        def step(w):
            return optimizer.minimize(loss_fn, w, optimizer.init(w))[1].retries

        assert step(np.ones(3, np.float32)).tolist() == [5, 7, 9]


@pytest.mark.parametrize("check_vma", exhaustive_but([True, False], [True]))
def test_an_inf_in_one_slice_of_the_parameters_skips_all(check_vma):
    """Each device holds a slice of parameters, gradients and inner state."""
    optimizer = LossScaleOptimizer(optax.sgd(0.5, 0.9), axis_name=("data", "model"))
    start = params = np.arange(8 * 6, dtype=np.float32).reshape(8, 6) / 10
    state = optimizer.init(params)
    slices, mesh = P("model"), mesh_of(data=4, model=2)
    specs = jax.tree.map(lambda x: slices if x.ndim else P(), state)
    specs = slices, specs, slices

    @over_devices(specs, specs, mesh, check_vma=check_vma)
    def step(params, state, grads):
        updates, _ = optimizer.update(grads, state, params)
        return *optimizer.apply_gradients(grads, params, state), updates

    # Two steps of 0.5 with momentum: 1 and 1.9 times the gradient.
    for bad, moved in ((None, 0.5), ((7, 5), 0.5), ((0, 0), 0.5), (None, 1.45)):
        grads = np.ones_like(start)
        if bad is not None:
            grads[bad] = np.inf
        old, (params, state, updates) = params, step(params, state, grads)
        np.testing.assert_allclose(params, start - moved, atol=1e-6)
        np.testing.assert_array_equal(np.add(old, updates), params)
    assert state.skipped_steps == 2
    assert optimizer.current_loss_scale(state) == 2**13
    assert state.inner_state[0].trace.sharding.spec[0] == "model"


def test_shard_map_refuses_devices_that_decide_apart():
    # Without axis_name: what is said to be replicated would differ between devices.
    optimizer = LossScaleOptimizer(optax.sgd(0.5, 0.9))
    params = {"sliced": np.ones((8, 2), np.float32), "copied": np.float32(1)}
    state = optimizer.init(params)
    specs = jax.tree.map(lambda x: PARTS if x.ndim else WHOLE, (params, state))

    @over_devices((*specs, specs[0]), specs[0])
    def step(params, state, grads):
        return optimizer.apply_gradients(grads, params, state)[0]

    with pytest.raises(ValueError, match="out_specs"):
        jax.eval_shape(step, params, state, params)


def test_updates_of_sharded_parameters_from_a_state_of_zeros():
    # The new momentum varies over the devices; the zeros that it begins with do not.
    optimizer = LossScaleOptimizer(optax.sgd(0.5, 0.9), axis_name="batch")

    @over_devices(PARTS, WHOLE)
    def any_update(grads):
        updates, state = optimizer.update(grads, optimizer.init(jnp.zeros(1)))
        return jax.lax.psum((updates, state.inner_state), "batch")

    grads = INDEX.copy()
    updates, state = any_update(grads)
    assert (updates, state[0].trace) == (-14, 28)
    grads[5] = np.nan
    updates, state = any_update(grads)
    assert (updates, state[0].trace) == (0, 0)


COLLECTIVES = re.compile(
    r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(-start)?\("
)


def collectives(step, *shapes):
    text = jax.jit(step).lower(*shapes).compile().as_text()
    return [line for line in text.splitlines() if COLLECTIVES.search(line)]


@pytest.mark.parametrize("kind", exhaustive_but(KINDS, KINDS[:1]), ids=str)
def test_sharded_jit_adds_one_scalar_reduction(kind):
    mesh = mesh_of(kind, data=4, model=2)
    ones = {"w1": np.ones((64, 64), np.float32), "w2": np.ones((64, 64), np.float32)}
    specs = {"w1": P(None, "model"), "w2": P("model", None)}, P("data", None)
    places = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    params, x = jax.device_put((ones, np.ones((16, 64), np.float32)), places)

    def loss_fn(params, x):
        hidden = jnp.tanh(x @ params["w1"])
        explicit = {"out_sharding": P("data", None)} if kind is KINDS[1] else {}
        return jnp.mean(jnp.square(jnp.matmul(hidden, params["w2"], **explicit)))

    inner = optax.sgd(0.1, 0.9)
    optimizer = LossScaleOptimizer(inner)
    plain = plain_step(loss_fn, inner)
    scaled = functools.partial(optimizer.minimize, loss_fn)
    with jax.set_mesh(mesh):
        theirs = collectives(plain, params, jax.jit(inner.init)(params), x)
        ours = collectives(scaled, params, jax.jit(optimizer.init)(params), x)
    assert len(theirs) > 0
    assert len(ours) == len(theirs) + 1
    gathers, more = (sum("all-gather" in line for line in x) for x in (theirs, ours))
    assert gathers == more
    scalar = re.compile(r"= \(?(f32\[\](, )?)+\)? all-reduce")
    assert sum(bool(scalar.search(line)) for line in ours) == 1


PLACES = list(itertools.product(KINDS, [False, True]))


@pytest.mark.parametrize("place", exhaustive_but(PLACES, PLACES[::3]), ids=str)
def test_init_places_the_moments_with_the_parameters(place):
    kind, in_mesh = place
    mesh = mesh_of(kind, data=4, model=2)
    shardings = {"w": NamedSharding(mesh, P(None, "model"))}
    shardings["b"] = NamedSharding(mesh, P())
    params = {"w": np.ones((8, 16), np.float16), "b": np.ones(16, np.float32)}
    params = jax.device_put(params, shardings)
    optimizer = LossScaleOptimizer(optax.sgd(0.1, 0.9))

    with jax.set_mesh(mesh) if in_mesh else contextlib.nullcontext():
        begun = optimizer.init(params)
        _, after = jax.jit(optimizer.apply_gradients)(params, params, begun)
    for state in (begun, after):
        trace = state.inner_state[0].trace
        assert trace["w"].dtype == jnp.float32
        for name, wanted in shardings.items():
            assert trace[name].sharding.is_equivalent_to(wanted, trace[name].ndim)


def unchecked_shard_map(f):
    @over_devices(PARTS, PARTS, check_vma=False)
    def one_device(*args):
        results = f(*jax.tree.map(lambda x: x[0], args))
        return jax.tree.map(lambda x: x[None], results)

    return one_device


@pytest.mark.parametrize(
    "per_device", [functools.partial(jax.pmap, axis_name="batch"), unchecked_shard_map]
)
class TestMinimizeWithoutAveraging:
    """Where JAX does not average the gradients of replicated parameters itself."""

    def step(self, per_device, axis_name="batch", **options):
        optimizer = LossScaleOptimizer(optax.sgd(0.5), axis_name=axis_name)
        start = on_each((np.float32(1), optimizer.init(np.float32(1))))

        def step(params, state, x):
            loss_fn = lambda params: 0.5 * (params - x) ** 2  # noqa: E731
            return optimizer.minimize(loss_fn, params, state, **options)[:2]

        params, state = jax.jit(per_device(step))(*start, INDEX)
        assert state.last_step_applied.all()
        return params.tolist()

    def test_is_refused(self, per_device):
        calls = r"value_and_grad, jax\.lax\.pmean\(grads, 'batch'\), apply_gradients"
        with pytest.raises(ValueError, match=calls):
            self.step(per_device)

    def test_is_left_to_a_transform_of_the_user(self, per_device):
        params = self.step(per_device, transform=averaging(mean_over_devices))
        assert params == [1 - 0.5 * (1 - 3.5)] * 8

    def test_without_a_name_warns_and_trains_apart(self, per_device):
        calls = r"own gradients.*pmean\(grads, \('batch',\)\).*leave pmean out"
        with pytest.warns(UserWarning, match=calls):
            params = self.step(per_device, axis_name=None)
        assert params == (1 - 0.5 * (1 - INDEX)).tolist()


@pytest.mark.parametrize("is_pmap", [False, True])
def test_members_may_train_apart(is_pmap):
    optimizer = LossScaleOptimizer(optax.sgd(0.5))

    def step(params, x):
        state = optimizer.init(params)
        return optimizer.minimize(lambda w: 0.5 * (w - x) ** 2, params, state)[0]

    step = jax.pmap(step) if is_pmap else over_devices(PARTS, PARTS)(jax.vmap(step))
    found = step(np.ones(8, np.float32), INDEX)
    assert found.tolist() == (1 - 0.5 * (1 - INDEX)).tolist()


def local_loss(params, x):
    return jnp.sum(params * x) / 8


def mean_loss(params, x):
    return mean_over_devices(local_loss(params, x))


def sum_loss(params, x):
    return jax.lax.psum(local_loss(params, x), "batch")


def loss_of_stages(params, x):
    """Has parameters of each device, and an embedding that all share."""
    return local_loss(params["own"] * params["shared"][0], x)


class TestLocalLoss:
    """`jax.shard_map` sums the gradients of devices that share their parameters."""

    def step(self, loss_fn, spec=WHOLE, transform=jax.value_and_grad, **options):
        """Makes a step from ones to new parameters, and the arguments to call it with.

        What it warns of is an error, unless it is expected.
        """
        optimizer = LossScaleOptimizer(optax.sgd(1.0), **options)

        @over_devices((spec, PARTS), spec)
        def step(params, x):
            minimize = functools.partial(optimizer.minimize, transform=transform)
            return minimize(loss_fn, params, optimizer.init(params), x)[0]

        return step, jax.tree.map(lambda _: np.ones(8, np.float32), spec), INDEX

    @pytest.mark.parametrize("options", [{}, {"axis_name": "batch", "retries": 2}])
    def test_of_shared_parameters_warns(self, options):
        axes = r"\('batch',\)"
        warning = rf"differs along {axes}.*In loss_fn write .*pmean\(loss, {axes}\)"
        with pytest.warns(UserWarning, match=warning) as caught:
            jax.eval_shape(*self.step(local_loss, **options))
        assert [Path(x.filename).name for x in caught] == [Path(__file__).name]
        # What the warning recommends.
        jax.eval_shape(*self.step(mean_loss, **options))

    @pytest.mark.parametrize(
        ("loss_fn", "transform", "parts"),
        [
            (mean_loss, jax.value_and_grad, 64),
            (sum_loss, jax.value_and_grad, 8),
            (local_loss, averaging(lambda grads: grads / 8), 64),
        ],
    )
    def test_of_all_devices_is_quiet(self, loss_fn, transform, parts):
        step, *args = self.step(loss_fn, transform=transform)
        np.testing.assert_array_equal(step(*args), np.full(8, 1 - 28 / parts))

    def test_of_sharded_parameters_is_quiet(self):
        spec = {"own": PARTS, "shared": WHOLE}
        step, *args = self.step(loss_of_stages, spec, axis_name="batch")
        np.testing.assert_array_equal(step(*args)["own"], 1 - INDEX / 8)


class TestBatchStatistics:
    """One device overflows, and all average their gradients afterwards."""

    x = np.arange(64, dtype=np.float32).reshape(8, 4, 2)
    factors = np.float32([1, 6e4, *[1] * 6])

    def step(self, axis_name, name="batch", norm=True):
        """Makes a step to parameters, statistics and a state, and its arguments."""
        optimizer = LossScaleOptimizer(
            optax.sgd(0.5), initial_scale=2.0**10, axis_name=axis_name
        )
        rngs = nnx.Rngs(0)
        model = nnx.Sequential(
            *[nnx.BatchNorm(2, axis_name=name, rngs=rngs)] * norm,
            nnx.Linear(2, 1, rngs=rngs),
        )
        graph, params, rest = nnx.split(model, nnx.Param, ...)

        def loss_fn(model, x, factor):
            return mean(half(model(x)) * half(factor))

        def step(params, rest, state, x, factor):
            model = nnx.merge(graph, params, rest)
            grad_fn = optimizer.value_and_grad(loss_fn, state)
            _, grads = grad_fn(model, x, factor)
            if name:
                grads = mean_over_devices(grads)
            params, state = optimizer.apply_gradients(grads, params, state)
            return params, nnx.state(model, nnx.BatchStat), state

        start = on_each((params, rest, optimizer.init(params)))
        return jax.pmap(step, name), *start, self.x, self.factors

    def test_of_all_devices_are_those_of_the_decision(self):
        step, *args = self.step("batch")
        params, rest, state = step(*args)
        assert state.skipped_steps.tolist() == [1] * 8
        for x in jax.tree.leaves((params, rest)):
            np.testing.assert_array_equal(x, on_each(x[0]))

    def test_without_a_name_warn(self):
        name = r"\('batch',\)"
        with pytest.warns(UserWarning, match=rf"{name} decides.*axis_name={name}"):
            jax.eval_shape(*self.step(None))

    @pytest.mark.parametrize("options", [{"name": None}, {"norm": False}])
    def test_of_each_member_and_of_no_model_are_quiet(self, options):
        jax.eval_shape(*self.step(None, **options))


@pytest.mark.parametrize("retries", [0, 4])
def test_devices_with_a_scale_and_a_loss_of_their_own(retries):
    optimizer = LossScaleOptimizer(optax.sgd(0.5), retries=retries)

    def step(params, state, x, convert=lambda x: x):
        state = jax.tree.map(convert, state)
        loss_fn = lambda params: jnp.sum(params * x)  # noqa: E731
        params, state, _ = optimizer.minimize(loss_fn, params, state)
        return params, jax.tree.map(lambda x: x[None], state)

    def run(**options):
        over = over_devices((PARTS, WHOLE, PARTS), PARTS)
        args = np.ones(8, np.float32), optimizer.init(INDEX), INDEX
        return over(functools.partial(step, **options))(*args)[0]

    np.testing.assert_array_equal(run(convert=varying), 1 - 0.5 * INDEX)
    if retries:
        with pytest.raises(ValueError, match="axis_name must contain 'batch', got"):
            run()


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
    params = np.ones((8, 2), np.float32)
    grads = params.copy()
    grads[3, 0] = np.inf

    @functools.partial(jax.pmap, axis_name="batch")
    def step(params, grads):
        return optimizer.apply_gradients(grads, params, optimizer.init(params))

    params, state = step(params, grads)
    applied = np.arange(8) != 3
    assert (state.last_step_applied == applied).all()
    # The gradients of the one that skips are left out of the sum.
    expected = np.where(applied, 1 - 0.5 * 7 / 8, 1)
    np.testing.assert_allclose(params[:, 0], expected, rtol=1e-6)
