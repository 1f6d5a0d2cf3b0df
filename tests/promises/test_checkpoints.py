"""Training goes on from a checkpoint as if it had never stopped.

`test_recipes.py` runs the page; `examples/test_language_model.py` kills a run.
"""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import serialization
from helpers import INF, assert_same_bits, signature
from jax.sharding import NamedSharding, PartitionSpec as P

from optax_lossscale import (
    DynamicLossScale,
    FixedLossScale,
    LossScaleOptimizer,
    LossScaleOptimizerState,
    scale_as_parameter,
)

pytestmark = pytest.mark.usefixtures("standard_dtype_promotion")
PARAMS = {"w": np.arange(16, dtype=np.float32).reshape(8, 2)}
PARAMS["b"] = np.zeros(2, np.float32)
GOOD = jax.tree.map(np.ones_like, PARAMS)
BAD = GOOD | {"b": GOOD["b"] * INF}


def through_orbax(saved, like, path):
    with ocp.CheckpointManager(path / "orbax") as manager:
        manager.save(1, args=ocp.args.StandardSave(saved))
        manager.wait_until_finished()
        like = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        return manager.restore(1, args=ocp.args.StandardRestore(like))


def through_flax(saved, like, path):
    file = path / "checkpoint.msgpack"
    file.write_bytes(serialization.to_bytes(saved))
    return serialization.from_bytes(like, file.read_bytes())


LIBRARIES = pytest.mark.parametrize(
    "library", [through_orbax, through_flax], ids=["orbax", "flax"]
)


@pytest.mark.filterwarnings("ignore:update repeats nothing")
@LIBRARIES
def test_restores_in_the_middle_of_an_interval(library, tmp_path):
    loss_scale = DynamicLossScale(2.0**10, 3, hysteresis=2)
    optimizer = LossScaleOptimizer(optax.adam(0.1), loss_scale, retries=5)
    traces = []

    @jax.jit
    def update(grads, state):
        traces.append(1)
        return optimizer.update(grads, state)

    state = optimizer.init(PARAMS)._replace(retries=jnp.int32(7))
    for grads in (GOOD, BAD, GOOD, GOOD):
        _, state = update(grads, state)
    restored = library(state, optimizer.init(PARAMS), tmp_path)
    assert_same_bits(restored, state)
    assert restored.loss_scale_state[1:] == (2, 1)
    assert restored.retries == 7
    for grads in (GOOD, BAD, BAD, GOOD):
        _, state = update(grads, state)
        _, restored = update(grads, restored)
        assert_same_bits(restored, state)
    assert restored.loss_scale_state.loss_scale == 2**10
    assert restored.skipped_steps == 3
    assert len(traces) == 1
    assert signature(restored) == signature(state)


@LIBRARIES
def test_the_scale_among_the_parameters(library, tmp_path):
    optimizer = scale_as_parameter(LossScaleOptimizer(optax.adam(0.1)))

    @jax.jit
    def step(grad_of_scale, state, params):
        grads = GOOD | {"loss_scale": grad_of_scale}
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    start = PARAMS | {"loss_scale": jnp.float32(2**15)}
    state = optimizer.init(start)
    saved = step(np.float32(0.25), state, start)
    restored = library(saved, (start, state), tmp_path)
    assert_same_bits(restored, saved)
    # With parameters of another time, their scale is that of the state after a step.
    params, _ = step(np.float32(0), restored[1], start)
    assert params["loss_scale"] == 2**14


@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")
def test_arrays_are_restored_to_the_devices_of_the_passed_state(tmp_path):
    optimizer = LossScaleOptimizer(optax.adam(0.1))

    def on(devices):
        mesh = jax.sharding.Mesh(jax.devices()[:devices], ("devices",))

        def place(x):
            spec = P("devices") if jnp.ndim(x) == 2 else P()
            return jax.device_put(x, NamedSharding(mesh, spec))

        params = jax.tree.map(place, PARAMS)
        return jax.tree.map(place, (params, optimizer.init(params)))

    @jax.jit
    def step(params, state):
        return optimizer.apply_gradients(GOOD, params, state)

    saved, like = step(*on(8)), on(2)
    restored = through_orbax(saved, like, tmp_path)
    assert_same_bits(restored, saved)
    assert jax.tree.map(lambda x: x.sharding, restored) == jax.tree.map(
        lambda x: x.sharding, like
    )
    assert_same_bits(step(*restored), step(*saved))


@pytest.mark.exhaustive
def test_a_step_of_the_leaves_can_be_exported():
    """`jax.export` serializes no named tuples, such as the states of Optax."""
    pytest.importorskip("flatbuffers")
    optimizer = LossScaleOptimizer(optax.adam(0.1))
    leaves, treedef = jax.tree.flatten((PARAMS, optimizer.init(PARAMS)))

    @jax.jit
    def step(leaves, grads):
        after = optimizer.apply_gradients(grads, *treedef.unflatten(leaves))
        return jax.tree.leaves(after)

    exported = jax.export.export(step, platforms=["cpu", "cuda"])(leaves, GOOD)
    after = jax.export.deserialize(exported.serialize()).call(leaves, GOOD)
    assert_same_bits(after, step(leaves, GOOD))


def test_second_moments_vanish_in_float16_but_not_in_bfloat16():
    optimizer = LossScaleOptimizer(optax.adam(0.1))
    small = jax.tree.map(lambda x: np.float32(1e-4) * x, GOOD)
    _, state = jax.jit(optimizer.update)(small, optimizer.init(PARAMS))
    (moments,) = {float(x) for x in state.inner_state[0].nu["w"].ravel()}
    assert moments > 0
    assert np.float16(moments) == 0
    assert jnp.bfloat16(moments) > 0
    # A scale of 2**16 is inf in float16, and the next step begins at the first scale.
    stored = jnp.float32(2**16).astype("float16")
    high = optax.tree.set(state, loss_scale=stored.astype("float32"))
    _, state = jax.jit(optimizer.update)(GOOD, high)
    assert optimizer.current_loss_scale(state) == 2**15


class TestOtherHyperparameters:
    """On restoring, the scale is that of the checkpoint, and the rest is new."""

    OLD = DynamicLossScale(2.0**10, 10, max_scale=2.0**20, hysteresis=2)

    @pytest.mark.parametrize(
        ("changed", "steps", "scales"),
        [
            ({}, "GGGG", [1024, 1024, 1024, 2048, 2048]),
            ({"growth_interval": 3}, "GGGG", [1024, 2048, 2048, 2048, 4096]),
            ({"growth_interval": 7}, "BBG", [1024, 1024, 512, 512]),
            ({"initial_scale": 4.0}, "GG", [1024, 1024, 1024]),
            ({"initial_scale": 4.0, "max_scale": 64.0}, "GBB", [64, 64, 64, 32]),
            ({"initial_scale": 2.0**20, "min_scale": 2.0**14}, "G", [2**14, 2**14]),
            # Until the scale has grown, the restored hysteresis holds.
            ({"hysteresis": 3}, "GGGBBB", [1024] * 3 + [2048] * 3 + [1024]),
            ({"hysteresis": 3}, "BB", [1024, 1024, 512]),
        ],
    )
    def test_restored_state_wins(self, changed, steps, scales):
        rule = DynamicLossScale.from_config(self.OLD.get_config() | changed)
        old, new = (LossScaleOptimizer(optax.identity(), x) for x in (self.OLD, rule))
        saved = optax.tree.set(old.init(PARAMS), good_steps=np.int32(7))
        saved = serialization.to_bytes(saved)
        state = serialization.from_bytes(new.init(PARAMS), saved)
        found, update = [new.current_loss_scale(state)], jax.jit(new.update)
        for step in steps:
            _, state = update(GOOD if step == "G" else BAD, state)
            found.append(new.current_loss_scale(state))
        assert found == scales


class TestOtherStates:
    """A state of another kind is refused, and all ways to go on with it work."""

    DYNAMIC = LossScaleOptimizer(optax.adam(0.1))
    FIXED = LossScaleOptimizer(optax.adam(0.1), FixedLossScale(8.0, True))

    def test_a_step_says_what_is_wrong(self):
        dynamic, fixed = self.DYNAMIC.init(PARAMS), self.FIXED.init(PARAMS)
        three = jax.tree.map(lambda x: np.stack([x] * 3), dynamic.loss_scale_state)
        kind = r"DynamicLossScaleState\(.*good.* got FixedLossScaleState\("
        three, shape = dynamic._replace(loss_scale_state=three), r"shape \(\), got \(3,"
        for optimizer, state, wanted in [
            (self.DYNAMIC, fixed, kind),
            (self.FIXED, dynamic, r"FixedLossScaleState\(loss_scale=.* good_steps"),
            (self.DYNAMIC, three, f"loss_scale must be of {shape}"),
            (self.DYNAMIC, dynamic._replace(stuck_steps=None), "stuck_steps must .*No"),
        ]:
            with pytest.raises(ValueError, match=wanted):
                optimizer.update(GOOD, state)

    @LIBRARIES
    def test_a_state_from_before_skip_reasons(self, library, tmp_path):
        fields = self.DYNAMIC.init(PARAMS)._asdict()
        names = [name for name in fields if name != "skip_reasons"]
        update = jax.jit(self.DYNAMIC.update)
        _, after = update(BAD, self.DYNAMIC.init(PARAMS))
        # As a class without the field saved it.
        saved = collections.namedtuple("LossScaleOptimizerState", names)
        saved = saved(*(getattr(after, name) for name in names))
        restored = library(saved, {name: fields[name] for name in names}, tmp_path)
        old = LossScaleOptimizerState(**restored)
        assert_same_bits(old, after._replace(skip_reasons=None))
        for grads in (BAD, GOOD):
            (_, old), (_, after) = update(grads, old), update(grads, after)
            assert_same_bits(old, after._replace(skip_reasons=None))

    def test_ways_to_go_on(self, tmp_path):
        update = jax.jit(self.DYNAMIC.update)
        # With the state of another rule.
        _, fixed = jax.jit(self.FIXED.update)(GOOD, self.FIXED.init(PARAMS))
        restored = through_flax(fixed, self.FIXED.init(PARAMS), tmp_path)
        state = restored._replace(loss_scale_state=self.DYNAMIC.loss_scale.init())
        assert signature(state) == signature(self.DYNAMIC.init(PARAMS))
        assert self.DYNAMIC.current_loss_scale(state) == 2**15
        assert state.inner_state[0].count == 1
        _, state = update(BAD, state)
        assert self.DYNAMIC.current_loss_scale(state) == 2**14
        # With the state of plain Optax.
        state = self.DYNAMIC.init(PARAMS)._replace(inner_state=restored.inner_state)
        assert update(GOOD, state)[1].inner_state[0].count == 2
