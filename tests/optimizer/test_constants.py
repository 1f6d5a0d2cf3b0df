"""Parameters among which there are leaves that have no gradient."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from helpers import NAN, assert_close, assert_same_bits, relaxed

from optax_lossscale import LossScaleOptimizer

X = np.linspace(-1, 1, 4, dtype=np.float32).reshape(2, 2)


class Model(eqx.Module):
    """Has every kind of leaf that is no parameter, besides the parameters."""

    mlp: eqx.nn.MLP
    dropout: eqx.nn.Dropout
    key: jax.Array
    steps: jax.Array
    table: jax.Array
    name: str
    heads: int = 4
    scale: float = 2.0

    def __init__(self):
        # Few shapes: each is a program for each operation.
        self.mlp = eqx.nn.MLP(2, 2, 2, 1, dtype=jnp.float32, key=jax.random.key(0))
        self.dropout = eqx.nn.Dropout(0.5)
        self.key = jax.random.key(1)
        self.steps = jnp.array([1, 2], jnp.int32)
        self.table = jnp.array([1, 2], jnp.int4)
        self.name = "model"

    def __call__(self, x):
        noise = 0.1 * jax.random.normal(self.key, (2,), jnp.float32)
        return self.scale / self.heads * (jax.vmap(self.mlp)(x) + noise)


def loss_fn(model, x):
    return jnp.sum((model(x) - 1) ** 2)


def loss_and_aux(model, x):
    return loss_fn(model, x), {"twice": 2 * x, "kind": None}


def trainable(model):
    return eqx.filter(model, eqx.is_inexact_array)


INNER = relaxed(optax.chain(optax.add_decayed_weights(0.1), optax.adam(0.01)))


def assert_same_model(actual, desired):
    dynamic, static = eqx.partition(actual, eqx.is_array)
    wanted, wanted_static = eqx.partition(desired, eqx.is_array)
    assert_same_bits(dynamic, wanted)
    # Functions are compared as such, and 0.5 is a Python number still.
    assert eqx.tree_equal(static, wanted_static) is True


def test_a_model_trains_as_by_equinox_alone():
    """`test_models.py` compares ways to write it; here, aux and a skipped step."""
    optimizer, model = LossScaleOptimizer(INNER), Model()
    state = optimizer.init(model)
    moments = state.inner_state[1][0].mu
    # A Python number is a setting, as for Equinox.
    assert (moments.key, moments.dropout.p) == (None, None)
    bare, traces = (Model(), INNER.init(trainable(Model()))), []

    @eqx.filter_jit
    def step(model, state, x):
        traces.append(1)
        return optimizer.minimize(loss_and_aux, model, state, x, has_aux=True)

    @eqx.filter_jit
    def bare_step(model, state):
        loss, grads = eqx.filter_value_and_grad(loss_fn)(model, X)
        updates, state = INNER.update(grads, state, trainable(model))
        return (eqx.apply_updates(model, updates), state), loss

    for _ in range(3):
        model, state, (loss, aux) = step(model, state, X)
        bare, wanted = bare_step(*bare)
    assert_close((trainable(model), loss), (trainable(bare[0]), wanted))
    assert (aux["twice"] == 2 * X).all()
    assert len(traces) == 1
    kept, skipped, _ = step(model, state, X * NAN)
    assert_same_model(kept, model)
    assert_same_bits(skipped.inner_state, state.inner_state)
    assert not skipped.last_step_applied


def test_none_for_a_whole_branch():
    ones = jnp.ones(2, jnp.float32)
    params = {"w": ones, "frozen": {"a": ones, "b": (ones, "x")}}
    optimizer = LossScaleOptimizer(optax.sgd(0.5, momentum=0.9))
    state = optimizer.init(params)
    moved, state = optimizer.apply_gradients({"w": ones, "frozen": None}, params, state)
    assert moved["w"].tolist() == [0.5, 0.5]
    assert_same_bits(moved["frozen"]["a"], ones)
    assert moved["frozen"]["b"][1] == "x"


class WithInteger(eqx.Module):
    """Has an integer field that is not static, as is common."""

    w: jax.Array
    heads: int = 4


def moved_by(inner):
    """Returns the model after one step."""
    optimizer, model = LossScaleOptimizer(inner), WithInteger(jnp.ones(2, jnp.float32))
    moved, *_ = optimizer.minimize(
        lambda model: jnp.sum(model.w**2) / model.heads, model, optimizer.init(model)
    )
    return moved


def test_an_integer_field_and_clipping_by_the_global_norm():
    inner = relaxed(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.01)))
    moved = moved_by(inner)
    assert (moved.heads, type(moved.heads)) == (4, int)
    np.testing.assert_allclose(moved.w, np.full(2, 0.99), rtol=1e-3)


def test_a_line_search_evaluates_the_whole_model():
    def update(updates, state, params=None, *, value_fn, **_):
        return jax.tree.map(lambda x: -x * value_fn(params), updates), state

    inner = optax.GradientTransformationExtraArgs(lambda _: (), update)
    moved = moved_by(inner)
    assert moved.w.tolist() == [1 - 0.5 * 0.5] * 2


def test_a_state_with_constants_under_filter_jit():
    def update(updates, state, params=None):
        network, count, name = state
        updates = jax.tree.map(network, updates)
        return updates, (network, count + 1, name)

    network = Model().mlp
    inner = optax.GradientTransformation(
        lambda params: (network, jnp.int32(0), "learned"), update
    )
    optimizer = LossScaleOptimizer(inner)
    params = jnp.ones(2, jnp.float32)
    state = optimizer.init(params)
    for method in (optimizer.update, optimizer.apply_gradients):
        arguments = (state, params) if method == optimizer.update else (params, state)
        result, applied = eqx.filter_jit(method)(params, *arguments)
        assert_same_model(applied.inner_state, (network, jnp.int32(1), "learned"))
        assert not (result == params).any()
        _, skipped = eqx.filter_jit(method)(NAN * params, *arguments)
        assert_same_model(skipped.inner_state, state.inner_state)
