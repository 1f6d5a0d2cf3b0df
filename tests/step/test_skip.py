"""Skipped steps: what they change, and what is compiled for them."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import (
    INF,
    NAN,
    WRAPS,
    assert_close,
    assert_same_bits,
    count_branches,
    every_wrap,
    relaxed,
)

from optax_lossscale import DynamicLossScale, FixedLossScale, LossScaleOptimizer

pytestmark = pytest.mark.optimized
fuses_the_check = pytest.mark.skipif(
    jax.__version_info__ < (0, 10), reason="XLA did not fuse the check on CPU"
)


class TestSkip:
    params = {"w": np.array([[0.5, -0.0]] * 2, np.float32), "b": np.float32(-3)}
    good = jax.tree.map(np.ones_like, params)
    # As long as the parameters: the norm of no gradients is zero, and divides.
    as_long = optax.stateless(
        lambda g, p: optax.tree.scale(optax.tree.norm(p) / optax.tree.norm(g), g)
    )
    inner = relaxed(optax.chain(as_long, optax.adam(0.1)))

    # Under jit a CPU branches; without it, each device selects.
    @pytest.mark.parametrize(
        ("wrap", "bad"), [(WRAPS["eager"], INF), (jax.jit, NAN)], ids=WRAPS
    )
    def test_is_differentiated_as_a_step_that_changes_nothing(self, bad, wrap):
        optimizer = LossScaleOptimizer(
            self.inner, DynamicLossScale(growth_interval=1), check_loss=True
        )

        def train(params, *bad_step, skips=0):
            """Takes two steps, and between them some that are skipped."""
            state, good_step = optimizer.init(params), (self.good, jnp.float32(1))
            for grads, loss in [good_step, *[bad_step] * skips, good_step]:
                params, state = optimizer.apply_gradients(
                    grads, params, state, value=loss
                )
            return sum(jnp.sum(x**2) for x in jax.tree.leaves(params))

        args = self.params, self.good | {"b": jnp.float32(bad)}, jnp.float32(bad)
        skipping = jax.grad(functools.partial(train, skips=2), argnums=(0, 1))
        by_params, by_grads = wrap(skipping)(*args)
        assert_close(by_params, wrap(jax.grad(train))(*args))
        assert not any(np.any(x) for x in jax.tree.leaves(by_grads))

    def test_vmap_alone_compiles_nothing_again(self):
        optimizer = LossScaleOptimizer(optax.sgd(0.1))
        params = jnp.ones((3, 2), jnp.float32)
        state = jax.vmap(optimizer.init)(params)
        compiled = []
        jax.monitoring.register_event_duration_secs_listener(
            lambda event, *_, **__: compiled.append(event)
        )
        counts = []
        for bad in (1, INF, 1, INF):
            grads = params.at[1, 0].set(jnp.float32(bad))
            compiled.clear()
            updates, state = jax.vmap(optimizer.update)(grads, state, params)
            counts.append(sum("backend_compile" in event for event in compiled))
        assert counts[0] > 0
        assert counts[2:] == [0, 0]
        assert state.skipped_steps.tolist() == [0, 2, 0]
        np.testing.assert_allclose(updates[::2], np.full((2, 2), -0.1), rtol=1e-6)
        assert not updates[1].any()


class TestCompiledPrograms:
    params = np.ones((8, 8), np.float32)

    def lowered(self, optimizer, platform):
        step = jax.jit(lambda p, s: optimizer.minimize(lambda p: jnp.sum(p**2), p, s))
        shapes = (self.params, optimizer.init(self.params))
        return jax.export.export(step, platforms=[platform])(*shapes).mlir_module()

    @pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
    def test_branches_on_cpu_and_selects_elsewhere(self, platform):
        optimizer = LossScaleOptimizer(optax.sgd(1.0))
        text = self.lowered(optimizer, platform)
        branches = platform == "cpu"
        assert count_branches(text) == branches
        selects = re.search(r"stablehlo.select .*tensor<i1>, tensor<8x8xf32>", text)
        assert bool(selects) != branches

    @pytest.mark.parametrize(
        ("platform", "check"), [("cpu", "subtract"), ("tpu", "is_finite")]
    )
    def test_fixed_scale_compiles_no_check_unless_asked(self, platform, check):
        text = self.lowered(LossScaleOptimizer(optax.sgd(1.0), 8), platform)
        for operation in (check, "select", "case", "maximum"):
            assert f"stablehlo.{operation}" not in text
        for options in ({"check_loss": True}, {}):
            rule = FixedLossScale(8, skip_nonfinite=not options)
            optimizer = LossScaleOptimizer(optax.sgd(1.0), rule, **options)
            assert f"stablehlo.{check}" in self.lowered(optimizer, platform)

    @fuses_the_check
    def test_minimize_does_not_store_unscaled_gradients(self):
        optimizer = LossScaleOptimizer(optax.sgd(1.0))
        params = jnp.ones((256, 256), jnp.float32)

        def loss(params, x):
            return jnp.sum(jnp.sin(x @ params))

        def plain(params, state, x):
            value, grads = jax.value_and_grad(loss)(params, x)
            return params - grads, state, value

        shapes = (params, optimizer.init(params), jnp.ones((4, 256), jnp.float32))
        ours, theirs = (
            jax.jit(f, donate_argnums=0).lower(*shapes).compile().memory_analysis()
            for f in (functools.partial(optimizer.minimize, loss), plain)
        )
        size = params.nbytes
        assert ours.temp_size_in_bytes < 1.5 * size
        assert theirs.temp_size_in_bytes < 1.5 * size


class TestUpdate:
    """The updates of a step that is skipped, and those of the steps after it."""

    params = jax.device_put(np.ones((256, 256), np.float32))
    good = jax.device_put(np.full((256, 256), 0.5, np.float32))

    def step_of(self, inner):
        optimizer = LossScaleOptimizer(relaxed(inner))

        def step(params, state, grads):
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        return optimizer, step

    @pytest.mark.parametrize(
        ("inner", "branches"),
        [
            (optax.sgd(0.1), 0),
            (optax.adafactor(0.1, min_dim_size_to_factor=2), 0),
            (optax.sgd(0.1, momentum=0.9), 1),
            (optax.adamw(0.1), 1),
        ],
    )
    def test_selects_on_cpu_where_the_state_is_small(self, inner, branches):
        optimizer, step = self.step_of(inner)
        shapes = (self.params, optimizer.init(self.params), self.good)
        text = jax.export.export(jax.jit(step), platforms=["cpu"])(*shapes)
        assert count_branches(text.mlir_module()) == branches

    def test_a_skipped_first_step_changes_no_value_or_derivative(self):
        # Adam divides by zero in an update from its first state.
        optimizer, step = self.step_of(optax.adam(0.1))
        bad = self.good.at[3, 5].set(NAN)

        def distance(params, *batches):
            state = optimizer.init(params)
            for grads in batches:
                params, state = step(params, state, grads)
            return jnp.sum(params**2)

        function = jax.jit(jax.value_and_grad(distance))
        expected = function(self.params, self.good)
        assert_close(function(self.params, bad, self.good), expected)

    @every_wrap
    def test_updates_may_be_python_numbers(self, wrap):
        inner = optax.stateless(lambda g, p=None: jax.tree.map(lambda _: -0.5, g))
        params = {"a": jnp.float32(1), "b": jnp.ones(2, jnp.float16)}
        optimizer = LossScaleOptimizer(inner)
        state, good = optimizer.init(params), jax.tree.map(jnp.ones_like, params)
        wanted = {"a": jnp.float32(0.5), "b": jnp.full(2, 0.5, jnp.float16)}
        assert_same_bits(
            wrap(optimizer.apply_gradients)(good, params, state)[0], wanted
        )
        updates = wrap(optimizer.update)(good, state, params)[0]
        assert_same_bits(optax.apply_updates(params, updates), wanted)
