"""Leaves that are no gradients: new values, untouched, unchecked, kept on a skip."""

import copy
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from helpers import (
    INF,
    NAN,
    WRAPS,
    assert_same_bits,
    every_skip,
    relaxed,
    signature,
)
from jax.experimental import sparse

from optax_lossscale import LossScaleOptimizer, select_applied
from optax_lossscale.diagnostics import nonfinite_leaves

PARAMS = {"params": {"w": jnp.ones(2, jnp.float32)}, "new": {"scale": jnp.float32(7)}}
GRADS = {"params": {"w": jnp.float32([3, 3])}, "new": {"scale": jnp.float32(5)}}
TREE = {"params": True, "new": False}
MASKS = {"tree": TREE, "function": lambda tree: {k: k != "new" for k in tree}}


def masked(mask=TREE, **options):
    return LossScaleOptimizer(optax.sgd(0.5, momentum=0.9), mask=mask, **options)


@every_skip
@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
class TestStep:
    def test_new_values_take_their_places_or_old_ones_stay(self, mask, wrap, skip):
        optimizer = masked(mask, skip=skip)
        start = optimizer.init(PARAMS)
        step = wrap(optimizer.apply_gradients)
        # What is no gradient may be inf: it is not looked at.
        for new in (5.0, INF):
            grads = GRADS | {"new": {"scale": jnp.float32(new)}}
            params, state = step(grads, PARAMS, start)
            assert params["params"]["w"].tolist() == [-0.5, -0.5]
            assert params["new"]["scale"] == new
            assert signature(state) == signature(start)
            bad = grads | {"params": {"w": jnp.float32([1, NAN])}}
            params, state = step(bad, PARAMS, start)
            assert_same_bits(params, PARAMS)
            assert_same_bits(state.inner_state, start.inner_state)
            assert not state.last_step_applied

    def test_update_returns_values_in_place_of_updates(self, mask, wrap, skip):
        optimizer = masked(mask, skip=skip)
        start = optimizer.init(PARAMS)
        update = wrap(optimizer.update)
        updates, _ = update(GRADS, start, PARAMS)
        assert updates["params"]["w"].tolist() == [-1.5, -1.5]
        assert updates["new"]["scale"] == 5
        bad = GRADS | {"params": {"w": jnp.float32([INF, 1])}}
        updates, state = update(bad, start, PARAMS)
        assert updates["params"]["w"].tolist() == [0, 0]
        assert updates["new"]["scale"] == 7
        assert not state.last_step_applied

    def test_value_and_grad_unscales_gradients_alone(self, mask, wrap, skip):
        optimizer = masked(mask, skip=skip)
        state = optimizer.init(PARAMS)

        @jax.custom_vjp
        def deliver(new, x):
            return x

        deliver.defvjp(lambda new, x: (x, None), lambda _, g: (jnp.float32(5), g))

        def loss_fn(tree):
            return deliver(tree["new"]["scale"], 3 * jnp.sum(tree["params"]["w"]))

        def value_and_grad(params, state):
            return optimizer.value_and_grad(loss_fn, state)(params)

        _, grads = wrap(value_and_grad)(PARAMS, state)
        assert_same_bits(grads, GRADS)

        def minimize(params, state):
            return optimizer.minimize(loss_fn, params, state)

        params, *_ = wrap(minimize)(PARAMS, state)
        assert params["new"]["scale"] == 5
        assert params["params"]["w"].tolist() == [-0.5, -0.5]


def test_inner_optimizer_never_sees_them():
    optimizer = LossScaleOptimizer(relaxed(optax.adam(0.1)), mask=TREE)
    moments = optimizer.init(PARAMS).inner_state.inner_state[0].mu
    assert jax.tree.leaves(moments, is_leaf=lambda x: x is None)[0].shape == (2,)
    assert len(jax.tree.leaves(moments)) == 1
    norm = LossScaleOptimizer(
        optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0)), mask=TREE
    )
    huge = {"params": {"w": jnp.array([0.6, 0.8])}, "new": {"scale": jnp.float32(1e9)}}
    updates, _ = norm.update(huge, norm.init(PARAMS), PARAMS)
    np.testing.assert_allclose(updates["params"]["w"], [-0.6, -0.8], rtol=1e-6)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_line_searches_evaluate_all_parameters(mask):
    def loss_fn(params):
        return jnp.sum((params["params"]["w"] * params["new"]["scale"] - 1) ** 2)

    inner = relaxed(
        optax.chain(optax.sgd(0.5), optax.scale_by_backtracking_linesearch(20))
    )
    optimizer = LossScaleOptimizer(inner, 1.0, mask=mask)
    minimize = jax.jit(functools.partial(optimizer.minimize, loss_fn))
    params, _, _ = minimize(PARAMS, optimizer.init(PARAMS))
    alone = LossScaleOptimizer(inner, 1.0)
    expected, _, _ = alone.minimize(
        lambda w: loss_fn({"params": w, "new": PARAMS["new"]}),
        PARAMS["params"],
        alone.init(PARAMS["params"]),
    )
    assert not np.allclose(expected["w"], PARAMS["params"]["w"])
    np.testing.assert_allclose(params["params"]["w"], expected["w"], rtol=1e-6)


def test_dtypes_and_leaves_that_are_no_floats():
    params = {
        "w": jnp.ones(2, jnp.float16),
        "half": jnp.ones(2, jnp.float16),
        "count": jnp.int32(3),
        "none": None,
    }
    grads = params | {"half": jnp.full(2, 2.0), "count": jnp.int32(4)}
    mask = {"w": True, "half": False, "count": False, "none": True}
    optimizer = LossScaleOptimizer(relaxed(optax.sgd(0.5)), 8.0, mask=mask)
    state = optimizer.init(params)
    unscaled = optimizer.get_unscaled_gradients(grads, state)
    assert unscaled["w"].tolist() == [1 / 8, 1 / 8]
    assert unscaled["half"].tolist() == [2, 2]
    new, _ = optimizer.apply_gradients(unscaled, params, state)
    assert new["half"].dtype == jnp.float16
    assert new["half"].tolist() == [2, 2]
    assert new["count"] == 4


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_parameters_in_the_state_are_mapped(mask):
    optimizer = masked(mask, track_leaves=True)
    state = optimizer.init(PARAMS)
    mapped = optax.tree_map_params(optimizer, lambda x: x + 5, state)
    trace = mapped.inner_state.inner_state[0].trace
    assert [x.tolist() for x in jax.tree.leaves(trace)] == [[5, 5]]
    assert_same_bits(mapped._replace(inner_state=()), state._replace(inner_state=()))


def test_tracked_leaves_keep_their_names():
    params = {"a": jnp.ones(1), "new": jnp.ones(1), "z": jnp.ones(1)}
    optimizer = masked({"a": True, "new": False, "z": True}, track_leaves=True)
    grads = params | {"new": jnp.array([INF]), "z": jnp.array([INF])}
    _, state = optimizer.update(grads, optimizer.init(params), params)
    assert [x.name for x in nonfinite_leaves(state, params)] == ["params['z']"]


def test_a_tree_that_may_be_called_is_a_tree():
    layer = eqx.nn.Linear(2, 2, key=jax.random.key(0))
    mask = eqx.tree_at(lambda x: (x.weight, x.bias), layer, (True, False))
    assert callable(mask)
    optimizer = masked(mask)
    state = optimizer.init(layer)
    grads = jax.tree.map(jnp.ones_like, layer)
    new, _ = optimizer.apply_gradients(grads, layer, state)
    assert_same_bits(new.weight, layer.weight - 0.5)
    assert_same_bits(new.bias, grads.bias)
    assert hash(optimizer) == hash(copy.copy(optimizer))
    # An activation function left in it is no bool.
    with pytest.raises(TypeError, match="mask must be a tree of True and False"):
        masked(eqx.tree_at(lambda x: x.bias, mask, jax.nn.relu))


def test_all_and_nothing():
    plain = LossScaleOptimizer(optax.sgd(0.5, momentum=0.9))
    everything = masked(True)
    args = GRADS, PARAMS
    expected, _ = plain.apply_gradients(*args, plain.init(PARAMS))
    params, _ = everything.apply_gradients(*args, everything.init(PARAMS))
    assert_same_bits(params, expected)
    nothing = masked(False)
    params, state = nothing.apply_gradients(*args, nothing.init(PARAMS))
    assert_same_bits(params, GRADS)
    assert state.last_step_applied


def test_errors_say_what_is_wanted():
    with pytest.raises(TypeError, match=r"mask must be a tree of True and False.* 1"):
        masked({"params": 1})
    with pytest.raises(TypeError, match=r"mask must be a tree of .* got a leaf 'yes'"):
        masked(lambda tree: "yes").get_unscaled_gradients(GRADS, masked().init(PARAMS))
    with pytest.raises(TypeError, match=r"mask must be a tree of .* got a leaf 'yes'"):
        masked(lambda tree: "yes").init(PARAMS)
    with pytest.raises(ValueError, match="mask must be a prefix"):
        masked({"params": True}).init(PARAMS)
    state = masked().init(PARAMS)
    with pytest.raises(ValueError, match="mask must be a prefix"):
        masked().get_unscaled_gradients(GRADS["params"], state)
    with pytest.raises(ValueError, match="With a mask update needs params"):
        masked().update(GRADS, state)


def test_is_part_of_the_configuration():
    inner = optax.sgd(0.5)

    def make(mask):
        return LossScaleOptimizer(inner, mask=mask)

    assert make(TREE) == make(dict(TREE)) != make(None)
    assert hash(make(TREE)) == hash(make(dict(TREE)))
    assert make(TREE) != make({"params": True, "new": True})
    assert copy.deepcopy(make(TREE)) == make(TREE)
    assert repr(make(TREE)).endswith("mask={'params': True, 'new': False})")


class TestFlaxFloat8:
    """Flax's own layer, which delivers scales and histories of magnitudes."""

    # With dtype=float16 it adds up unscaled products, and they overflow.
    model = linen.Dense(16, dot_general_cls=linen.Fp8DirectDotGeneralOp)
    x = jax.random.normal(jax.random.key(1), (16, 16))

    @pytest.fixture(autouse=True)
    def standard_dtype_promotion(self):
        with jax.numpy_dtype_promotion("standard"):
            yield

    def loss_fn(self, variables, x):
        out = self.model.apply(variables, x).astype(jnp.float32)
        return jnp.mean(out**2)

    def optimizer(self):
        return LossScaleOptimizer(
            optax.adam(1e-2),
            mask=lambda tree: {k: k != OVERWRITE_WITH_GRADIENT for k in tree},
        )

    def test_trains_and_survives_a_nan(self):
        optimizer = self.optimizer()
        variables = self.model.init(jax.random.key(0), self.x)
        state = optimizer.init(variables)
        start = float(self.loss_fn(variables, self.x))

        @jax.jit
        def step(variables, state, x):
            return optimizer.minimize(self.loss_fn, variables, state, x)

        for _ in range(50):
            variables, state, loss = step(variables, state, self.x)
        assert loss < start / 4
        found = variables[OVERWRITE_WITH_GRADIENT]["Fp8DirectDotGeneralOp_0"]
        # The layer saw scaled gradients, and its history is of these.
        assert found["output_grad_amax_history"].max() > 1
        assert 1 < found["input_amax_history"].max() < 10
        nan = self.x.at[0, 0].set(NAN)
        after, state, _ = step(variables, state, nan)
        assert not state.last_step_applied
        assert_same_bits(after, variables)

    def test_values_are_those_without_a_mask_and_scale(self):
        optimizer = self.optimizer()
        variables = self.model.init(jax.random.key(0), self.x)
        state = optimizer.init(variables)
        scaled = optimizer.get_scaled_loss(self.loss_fn, state)
        expected = jax.grad(scaled)(variables, self.x)
        _, grads = optimizer.value_and_grad(self.loss_fn, state)(variables, self.x)
        kept = OVERWRITE_WITH_GRADIENT
        assert_same_bits(grads[kept], expected[kept])
        unscaled = jax.tree.map(lambda g: g / 2**15, expected["params"])
        assert_same_bits(grads["params"], unscaled)

    def test_train_state_overwrites_by_itself(self):
        from flax.training.train_state import TrainState

        optimizer = self.optimizer()
        variables = self.model.init(jax.random.key(0), self.x)
        ts = TrainState.create(
            apply_fn=self.model.apply, params=variables, tx=optimizer
        )
        for x, applied in ((self.x, True), (self.x.at[0, 0].set(NAN), False)):
            call = optimizer.value_and_grad(self.loss_fn, ts.opt_state)
            new = ts.apply_gradients(grads=call(ts.params, x)[1])
            # It overwrites on a skip as well: keep the old values.
            params = select_applied(new.opt_state, new.params, ts.params)
            assert bool(new.opt_state.last_step_applied) == applied
            if not applied:
                assert_same_bits(params, ts.params)
            ts = new.replace(params=params)


class TestSparse:
    grads = sparse.BCOO(
        (jnp.array([8.0, 16.0], jnp.float16), jnp.array([[1], [3]])), shape=(5,)
    )

    @pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
    def test_values_are_unscaled_and_indices_are_not(self, wrap):
        optimizer = LossScaleOptimizer(optax.identity(), 8.0)
        state = optimizer.init(self.grads)
        found = wrap(optimizer.get_unscaled_gradients)({"w": self.grads}, state)["w"]
        assert isinstance(found, sparse.BCOO)
        assert found.data.tolist() == [1, 2]
        assert found.data.dtype == jnp.float32
        assert_same_bits(found.indices, self.grads.indices)

    @every_skip
    def test_a_step_is_skipped(self, skip):
        optimizer = LossScaleOptimizer(optax.identity(), skip=skip)
        update = jax.jit(optimizer.update)
        state = optimizer.init(jnp.zeros(5))
        updates, state = update(self.grads, state)
        assert_same_bits(updates.indices, self.grads.indices)
        assert updates.todense().tolist() == [0, 8, 0, 16, 0]
        bad = sparse.BCOO((self.grads.data * INF, self.grads.indices), shape=(5,))
        updates, state = update(bad, state)
        assert not state.last_step_applied
        assert updates.todense().tolist() == [0] * 5

    def test_value_and_grad_of_sparse_arrays(self):
        optimizer = LossScaleOptimizer(optax.identity())
        matrix = sparse.BCOO.fromdense(jnp.diag(jnp.array([1.0, 2.0])))
        state = optimizer.init(jnp.zeros(2))

        def loss_fn(matrix):
            return jnp.sum((matrix @ jnp.ones(2)) ** 2)

        _, grads = optimizer.value_and_grad(
            loss_fn, state, transform=sparse.value_and_grad
        )(matrix)
        assert grads.data.tolist() == [2, 4]
        assert_same_bits(grads.indices, matrix.indices)
