"""At home in Optax, Flax and Equinox: every position, every state.

`support/optax_table.py` has more positions, and what is to be known of them.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState
from helpers import NAN, assert_same_bits, relaxed

from optax_lossscale import FixedLossScale, LossScaleOptimizer, select_applied

PARAMS = {"a": jnp.array([1.0, 2.0], jnp.float32), "b": jnp.float32(3)}
GOOD = jax.tree.map(jnp.ones_like, PARAMS)
BAD = GOOD | {"b": jnp.float32(NAN)}


@pytest.fixture(autouse=True)
def standard_dtype_promotion():
    """These libraries promote dtypes as JAX does by default."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def scaler(**options):
    return LossScaleOptimizer(optax.sgd(0.5, momentum=0.9), **options)


def injected_by_factory():
    def make(learning_rate):
        return LossScaleOptimizer(optax.sgd(learning_rate, momentum=0.9))

    return optax.inject_hyperparams(make)(learning_rate=0.5)


POSITIONS = {
    "alone": scaler,
    "around a chain": lambda: LossScaleOptimizer(
        optax.chain(optax.identity(), optax.sgd(0.5, momentum=0.9))
    ),
    "inside a chain": lambda: optax.chain(optax.identity(), scaler()),
    "deep inside": lambda: optax.chain(optax.chain(scaler()), optax.scale(1.0)),
    "inject_hyperparams of a factory": injected_by_factory,
    "inject_hyperparams of the class": lambda: optax.inject_hyperparams(
        LossScaleOptimizer
    )(optax.sgd(0.5, momentum=0.9)),
    "inject_hyperparams, loss scale static": lambda: optax.inject_hyperparams(
        LossScaleOptimizer, static_args=("loss_scale",)
    )(optax.sgd(0.5, momentum=0.9), loss_scale="dynamic"),
    "around inject_hyperparams": lambda: LossScaleOptimizer(
        optax.inject_hyperparams(optax.sgd)(learning_rate=0.5, momentum=0.9)
    ),
    "masked": lambda: optax.masked(scaler(), {"a": True, "b": True}),
    "around masked": lambda: LossScaleOptimizer(
        optax.masked(optax.sgd(0.5, momentum=0.9), {"a": True, "b": True})
    ),
    "partition": lambda: optax.partition({"all": scaler()}, {"a": "all", "b": "all"}),
    "named_chain": lambda: optax.named_chain(("scaler", scaler())),
}


@pytest.mark.parametrize("make", POSITIONS.values(), ids=POSITIONS)
def test_every_position(make):
    tx, plain = make(), optax.sgd(0.5, momentum=0.9)
    update = jax.jit(tx.update)
    params, state = PARAMS, tx.init(PARAMS)
    expected, plain_state = PARAMS, plain.init(PARAMS)
    for grads in (GOOD, BAD, GOOD):
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
        if grads is GOOD:
            updates, plain_state = plain.update(grads, plain_state, expected)
            expected = optax.apply_updates(expected, updates)
    assert_same_bits(params, expected)
    # Read through whatever is around it, by any optimizer and by Optax.
    reader = LossScaleOptimizer(optax.identity())
    assert reader.current_loss_scale(state) == 2**14
    assert reader.dynamic_counter(state) == 1
    assert reader.get_scaled_loss(1.0, state) == 2**14
    assert optax.tree.get(state, "loss_scale") == 2**14
    assert optax.tree.get(state, "skipped_steps") == 1
    kept = select_applied(state, jnp.ones(2), jnp.zeros(2))
    assert kept.tolist() == [1, 1]
    state = optax.tree.set(state, loss_scale=jnp.float32(4))
    assert reader.current_loss_scale(state) == 4
    _, grads = reader.value_and_grad(lambda x: x * x, state)(jnp.float32(3))
    assert grads == 6
    assert update._cache_size() == 1


def test_map_params_sees_the_parameters_in_the_state():
    optimizer = LossScaleOptimizer(optax.adam(0.1))
    state = optax.tree.map_params(optimizer, lambda x: x + 1, optimizer.init(PARAMS))
    assert state.inner_state[0].mu["b"] == 1
    assert optimizer.current_loss_scale(state) == 2**15


class MLP(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.tanh(linen.Dense(8, dtype=jnp.float16)(x))
        return linen.Dense(1, dtype=jnp.float16)(x).astype(jnp.float32)


def test_linen_train_state():
    optimizer = LossScaleOptimizer(optax.adam(0.03))
    model, x = MLP(), jnp.linspace(-1, 1, 16)[:, None]
    state = TrainState.create(
        apply_fn=model.apply, params=model.init(jax.random.key(0), x), tx=optimizer
    )

    traces = []

    @jax.jit
    def train_step(state, x, y):
        traces.append(1)

        def loss_fn(params):
            # As small as an auxiliary loss: without scaling its gradients vanish.
            return 1e-6 * jnp.mean((state.apply_fn(params, x) - y) ** 2)

        loss, grads = optimizer.value_and_grad(loss_fn, state.opt_state)(state.params)
        return state.apply_gradients(grads=grads), loss

    first = None
    for step in range(60):
        y = x**2 * (NAN if step == 10 else 1)
        before, (state, loss) = state, train_step(state, x, y)
        if step == 10:
            assert_same_bits(state.params, before.params)
        first = loss if first is None else first
    assert loss < first / 5
    assert optimizer.current_loss_scale(state.opt_state) == 2**14
    assert state.opt_state.skipped_steps == 1
    assert len(traces) == 1


def test_nnx_optimizer():
    optimizer = LossScaleOptimizer(optax.adam(0.03))

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(1, 8, dtype=jnp.float16, rngs=rngs)
            self.last = nnx.Linear(8, 1, dtype=jnp.float16, rngs=rngs)

        def __call__(self, x):
            return self.last(jnp.tanh(self.first(x))).astype(jnp.float32)

    model = Model(nnx.Rngs(0))
    trainer = nnx.Optimizer(model, optimizer, wrt=nnx.Param)
    x = jnp.linspace(-1, 1, 16)[:, None]

    @nnx.jit
    def train_step(model, trainer, y):
        def loss_fn(model):
            return 1e-6 * jnp.mean((model(x) - y) ** 2)

        loss, grads = optimizer.value_and_grad(
            loss_fn, trainer.opt_state, transform=nnx.value_and_grad
        )(model)
        trainer.update(model, grads)
        return loss

    losses = [
        train_step(model, trainer, x**2 * (NAN if step == 10 else 1))
        for step in range(60)
    ]
    assert losses[-1] < losses[0] / 5
    assert optimizer.current_loss_scale(trainer.opt_state) == 2**14
    assert optimizer.dynamic_counter(trainer.opt_state) == 49
    assert optimizer.get_scaled_loss(1.0, trainer.opt_state) == 2**14
    assert select_applied(trainer.opt_state, 1.0, 2.0) == 1
    assert optax.tree.get(trainer.opt_state, "skipped_steps")[...] == 1


def test_nnx_split_and_merge():
    optimizer = scaler()
    model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    trainer = nnx.Optimizer(model, optimizer, wrt=nnx.Param)
    merged = nnx.merge(*nnx.split(trainer))
    assert merged.tx == optimizer
    assert optimizer.current_loss_scale(merged.opt_state) == 2**15


def test_equinox_passes_the_optimizer_through_filter_jit():
    optimizer = LossScaleOptimizer(optax.adam(0.03))
    model = eqx.nn.MLP(1, "scalar", 8, 1, key=jax.random.key(0))
    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    x = jnp.linspace(-1, 1, 16)[:, None]
    traces = []

    @eqx.filter_jit
    def train_step(model, state, y, optimizer):
        traces.append(1)

        def loss_fn(model, x):
            return 1e-6 * jnp.mean((jax.vmap(model)(x) - y) ** 2)

        loss, grads = optimizer.value_and_grad(
            loss_fn, state, transform=eqx.filter_value_and_grad
        )(model, x)
        params = eqx.filter(model, eqx.is_inexact_array)
        updates, state = optimizer.update(grads, state, params)
        return eqx.apply_updates(model, updates), state, loss

    losses = []
    for step in range(60):
        y = x[:, 0] ** 2 * (NAN if step == 10 else 1)
        model, state, loss = train_step(model, state, y, optimizer)
        losses.append(loss)
    assert losses[-1] < losses[0] / 5
    assert state.skipped_steps == 1
    assert len(traces) == 1


def test_differentiates_through_an_update():
    # Meta-learning: the gradient of what a step achieves.
    optimizer = LossScaleOptimizer(relaxed(optax.sgd(0.1)), FixedLossScale(8, True))

    def after_one_step(x):
        grads = 2 * x
        updates, _ = optimizer.update(grads, optimizer.init(x), x)
        return optax.apply_updates(x, updates) ** 2

    for wrap in (lambda f: f, jax.jit):
        gradient = wrap(jax.grad(after_one_step))(jnp.float32(1))
        np.testing.assert_allclose(gradient, 2 * 0.8**2, rtol=1e-6)
