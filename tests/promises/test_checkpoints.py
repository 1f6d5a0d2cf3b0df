"""Training goes on from a checkpoint as if it had never stopped.

`test_recipes.py` runs the page; `examples/test_language_model.py` kills a run.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import serialization
from helpers import INF, assert_same_bits, signature

from optax_lossscale import (
    DynamicLossScale,
    FixedLossScale,
    LossScaleOptimizer,
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
    path.mkdir(exist_ok=True)
    file = path / "checkpoint.msgpack"
    file.write_bytes(serialization.to_bytes(saved))
    return serialization.from_bytes(like, file.read_bytes())


LIBRARIES = pytest.mark.parametrize(
    "library", [through_orbax, through_flax], ids=["orbax", "flax"]
)


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
    assert restored.loss_scale_state.good_steps == 2
    assert restored.loss_scale_state.hysteresis_left == 1
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
    start = PARAMS | {"loss_scale": jnp.float32(2**15)}
    state = optimizer.init(start)
    told, quiet = (GOOD | {"loss_scale": jnp.float32(x)} for x in (0.25, 0))
    updates, state = optimizer.update(told, state, start)
    saved = optax.apply_updates(start, updates), state
    restored = library(saved, (start, state), tmp_path)
    assert_same_bits(restored, saved)
    # With parameters of another time, their scale is that of the state after a step.
    updates, _ = optimizer.update(quiet, restored[1], start)
    assert optax.apply_updates(start, updates)["loss_scale"] == 2**14


class TestOtherHyperparameters:
    """What holds on restoring is said in a table of docs/recipes/checkpoints.md."""

    SAVED = DynamicLossScale(2.0**10, growth_interval=10, max_scale=2.0**20)

    def after(self, path, library, steps, *, saved=SAVED, **hyperparameters):
        """Restores with other hyperparameters, and returns the scales from then on."""
        old = LossScaleOptimizer(optax.sgd(0.1), saved)
        state = old.init(PARAMS)
        for _ in range(7):
            _, state = old.update(GOOD, state)
        config = saved.get_config() | hyperparameters
        new = LossScaleOptimizer(optax.sgd(0.1), DynamicLossScale.from_config(config))
        state = library(state, new.init(PARAMS), path)
        scales = [float(new.current_loss_scale(state))]
        for grads in steps:
            _, state = new.update(grads, state)
            scales.append(float(new.current_loss_scale(state)))
        return scales

    @LIBRARIES
    @pytest.mark.parametrize(
        ("changed", "steps", "scales"),
        [
            ({}, [GOOD] * 4, [1024, 1024, 1024, 2048, 2048]),
            ({"growth_interval": 3}, [GOOD] * 4, [1024, 2048, 2048, 2048, 4096]),
            ({"growth_interval": 7}, [BAD, GOOD], [1024, 512, 512]),
            ({"initial_scale": 4.0}, [GOOD, GOOD], [1024, 1024, 1024]),
            ({"initial_scale": 4.0, "max_scale": 64.0}, [GOOD, BAD], [64, 64, 32]),
            ({"initial_scale": 2.0**20, "min_scale": 2.0**14}, [GOOD], [2**14] * 2),
        ],
    )
    def test_restored_state_wins(self, tmp_path, library, changed, steps, scales):
        assert self.after(tmp_path, library, steps, **changed) == scales

    def test_hysteresis_holds_once_the_scale_has_grown(self, tmp_path):
        saved = DynamicLossScale(2.0**10, growth_interval=10, hysteresis=2)
        args = tmp_path, through_flax, [GOOD] * 3 + [BAD] * 3
        scales = self.after(*args, saved=saved, hysteresis=3)
        assert scales == [1024] * 3 + [2048] * 3 + [1024]


class TestOtherStates:
    """A state of another kind is refused, and all ways to go on with it work."""

    DYNAMIC = LossScaleOptimizer(optax.adam(0.1))
    FIXED = LossScaleOptimizer(optax.adam(0.1), FixedLossScale(8.0, True))

    def test_a_step_says_what_is_wrong(self):
        dynamic, fixed = self.DYNAMIC.init(PARAMS), self.FIXED.init(PARAMS)
        three = jax.tree.map(lambda x: jnp.stack([x] * 3), dynamic.loss_scale_state)
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
            with pytest.raises(ValueError, match=wanted):
                optimizer.apply_gradients(GOOD, PARAMS, state)

    def test_a_tree_of_dicts_is_no_state(self):
        saved = serialization.to_bytes(self.DYNAMIC.init(PARAMS))
        restored = serialization.msgpack_restore(saved)
        optimizer = self.DYNAMIC
        for call in (
            lambda: optimizer.update(GOOD, restored, PARAMS),
            lambda: optimizer.value_and_grad(optax.tree.sum, restored),
            lambda: optimizer.minimize(optax.tree.sum, PARAMS, restored),
            lambda: optimizer.current_loss_scale({"opt_state": restored}),
        ):
            with pytest.raises(ValueError, match="restore into the state of init"):
                call()

    @LIBRARIES
    def test_ways_to_go_on(self, tmp_path, library):
        _, fixed = self.FIXED.update(GOOD, self.FIXED.init(PARAMS))
        restored = library(fixed, self.FIXED.init(PARAMS), tmp_path / "fixed")
        loss_scale_state = self.DYNAMIC.loss_scale.init()
        state = restored._replace(loss_scale_state=loss_scale_state)
        assert signature(state) == signature(self.DYNAMIC.init(PARAMS))
        assert self.DYNAMIC.current_loss_scale(state) == 2**15
        assert state.inner_state[0].count == 1
        _, state = self.DYNAMIC.update(BAD, state)
        assert self.DYNAMIC.current_loss_scale(state) == 2**14

        plain = optax.adam(0.1)
        _, inner_state = plain.update(GOOD, plain.init(PARAMS))
        restored = library(inner_state, plain.init(PARAMS), tmp_path / "plain")
        state = self.DYNAMIC.init(PARAMS)._replace(inner_state=restored)
        _, state = self.DYNAMIC.update(GOOD, state)
        assert state.inner_state[0].count == 2
