"""Parameters among which there are leaves that have no gradient."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
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
    heads: int
    scale: float

    def __init__(self):
        # Few shapes: each is a program for each operation.
        self.mlp = eqx.nn.MLP(2, 2, 2, 1, dtype=jnp.float32, key=jax.random.key(0))
        self.dropout = eqx.nn.Dropout(0.5)
        self.key = jax.random.key(1)
        self.steps = jnp.array([1, 2], jnp.int32)
        self.table = jnp.array([1, 2], jnp.int4)
        self.name, self.heads, self.scale = "model", 4, 2.0

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


# As line searches name it, and `optax.contrib.sophia`.
@pytest.mark.parametrize("name", ["value_fn", "obj_fn"])
def test_a_loss_that_is_passed_to_update_takes_the_whole_model(name):
    def update(updates, state, params=None, **extra_args):
        return jax.tree.map(lambda x: x * extra_args[name](params), updates), state

    inner = optax.GradientTransformationExtraArgs(lambda _: (), update)
    optimizer, model = LossScaleOptimizer(inner), WithInteger(jnp.ones(2, jnp.float32))
    loss = {name: lambda model: jnp.sum(model.w) / model.heads}
    grads, state = trainable(model), optimizer.init(model)
    updates, _ = optimizer.update(grads, state, model, **loss)
    assert updates.w.tolist() == [0.5, 0.5]


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


def is_no_vector(tree):
    """Makes a mask of all leaves: integers, keys and functions have their entries."""
    return jax.tree.map(lambda x: np.ndim(x) != 1, tree)


@pytest.mark.parametrize("is_function", [False, True], ids=["tree", "function"])
@pytest.mark.parametrize(
    "wrap",
    [
        lambda mask: optax.adamw(0.1, mask=mask),
        lambda mask: optax.masked(optax.adam(0.1), mask),
        lambda mask: optax.partition({True: optax.adam(0.1), False: INNER}, mask),
        optax.freeze,
    ],
    ids=["adamw", "masked", "partition", "freeze"],
)
def test_masks_and_labels_of_all_leaves(wrap, is_function):
    def inner_of(tree):
        return relaxed(wrap(is_no_vector if is_function else is_no_vector(tree)))

    def loss(params, x):
        return loss_fn(params["model"], x)

    # In a dictionary, as Optax would call a tree of labels that can be called.
    params = {"model": Model()}
    bare, rest = eqx.partition(params, eqx.is_inexact_array)
    optimizer, inner = LossScaleOptimizer(inner_of(params)), inner_of(bare)
    state, bare_state = optimizer.init(params), inner.init(bare)
    assert_same_bits(jax.tree.leaves(state.inner_state), jax.tree.leaves(bare_state))
    for _ in range(2):
        params, state, _ = optimizer.minimize(loss, params, state, X)
        grads = eqx.filter_grad(loss)(eqx.combine(bare, rest), X)
        updates, bare_state = inner.update(grads, bare_state, bare)
        bare = eqx.apply_updates(bare, updates)
    assert_same_bits(trainable(params), bare)


W, B = np.float32([[1, -2], [3, 4]]), np.float32([0.5, -1])
IDS = np.int32([1000, 0])
CLIPPED = relaxed(
    optax.chain(
        optax.scale_by_adam(),
        optax.add_decayed_weights(0.1),
        optax.clip_by_global_norm(1.0),
        optax.scale(-0.1),
    )
)


def loss_of_rows(params):
    rows = params["w"][params["ids"] // 1000] + params["b"]
    return jnp.sum(jnp.where(params["flag"], rows**2, 0))


@pytest.fixture
def beside_integers():
    params = {"w": W, "b": B, "ids": IDS, "flag": np.array(True)}
    params = jax.tree.map(jnp.asarray, params)
    optimizer = LossScaleOptimizer(CLIPPED)
    return optimizer, params, optimizer.init(params)


def test_integers_neither_decay_nor_count_in_a_norm(beside_integers):
    optimizer, params, state = beside_integers
    bare = {name: params[name] for name in "wb"}
    bare_state = CLIPPED.init(bare)
    for _ in range(2):
        params, state, _ = optimizer.minimize(loss_of_rows, params, state)
        grads = jax.grad(lambda bare, p=params: loss_of_rows(p | bare))(bare)
        updates, bare_state = CLIPPED.update(grads, bare_state, bare)
        bare = optax.apply_updates(bare, updates)
        assert_same_bits({name: params[name] for name in "wb"}, bare)
    assert_same_bits((params["ids"], params["flag"]), (IDS, np.array(True)))


def test_gradients_that_are_float0(beside_integers):
    optimizer, params, state = beside_integers
    grads = jax.grad(loss_of_rows, allow_int=True)(params)
    bare = {name: params[name] for name in "wb"}
    of_bare = {name: grads[name] for name in "wb"}
    wanted, bare_state = CLIPPED.update(of_bare, CLIPPED.init(bare), bare)
    for skip in (False, True):
        updates, after = optimizer.update(grads, state, params, skip_if=skip)
        assert {updates[x].dtype for x in ("ids", "flag")} == {jax.dtypes.float0}
        if not skip:
            assert_same_bits({name: updates[name] for name in "wb"}, wanted)
            leaves = map(jax.tree.leaves, (after.inner_state, bare_state))
            assert_same_bits(*leaves)
    moved, _ = optimizer.apply_gradients(grads, params, state)
    assert_same_bits(moved, params | optax.apply_updates(bare, wanted))


@pytest.mark.parametrize("knows", [True, False])
def test_a_parameter_whose_gradient_is_none(beside_integers, knows):
    """The state tells whether the optimizer knows the parameter."""
    optimizer, params, state = beside_integers
    grads = {"w": jnp.asarray(W), "b": None, "ids": None, "flag": None}
    bare, zeros = {"w": params["w"]}, {"w": grads["w"]}
    if knows:
        bare, zeros = bare | {"b": params["b"]}, zeros | {"b": jnp.zeros(2)}
    else:
        state = optimizer.init(params | {"b": None})
    wanted, bare_state = CLIPPED.update(zeros, CLIPPED.init(bare), bare)
    updates, after = optimizer.update(grads, state, params)
    assert (updates["b"], updates["ids"]) == (None, None)
    assert_same_bits(updates["w"], wanted["w"])
    leaves = map(jax.tree.leaves, (after.inner_state, bare_state))
    assert_same_bits(*leaves)
    moved, _ = optimizer.apply_gradients(grads, params, state)
    assert_same_bits(moved["b"], params["b"])


def loss_with_temperature(params, x):
    return params["temperature"] * loss_fn(params["model"], x)


def test_a_number_beside_a_module_is_trained_and_one_inside_is_not():
    params = {"model": Model(), "temperature": 0.5}
    optimizer = LossScaleOptimizer(INNER)
    state = optimizer.init(params)
    moments = state.inner_state[1][0].mu
    assert (moments["temperature"], moments["model"].scale) == (0, None)
    _, grads = optimizer.value_and_grad(loss_with_temperature, state)(params, X)
    assert grads["temperature"] == loss_fn(Model(), X)
    assert grads["model"].scale is grads["model"].dropout.p is None
    moved, *_ = optimizer.minimize(loss_with_temperature, params, state, X)
    np.testing.assert_allclose(moved["temperature"], 0.49, rtol=1e-4)
    assert (moved["model"].scale, type(moved["model"].scale)) == (2, float)
