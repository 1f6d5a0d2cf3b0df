"""At home in Optax, Flax and Equinox: every position, every state.

`support/optax_table.py` has more positions, and what is to be known of them.
"""

import functools

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
    "inside a chain": lambda: optax.chain(optax.identity(), scaler()),
    "deep inside": lambda: optax.chain(optax.chain(scaler()), optax.scale(1.0)),
    "inject_hyperparams of a factory": injected_by_factory,
    "inject_hyperparams of the class": lambda: optax.inject_hyperparams(
        LossScaleOptimizer
    )(optax.sgd(0.5, momentum=0.9)),
    "inject_hyperparams, loss scale static": lambda: optax.inject_hyperparams(
        LossScaleOptimizer, static_args=("loss_scale",)
    )(optax.sgd(0.5, momentum=0.9), loss_scale="dynamic"),
    "masked": lambda: optax.masked(scaler(), {"a": True, "b": True}),
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


X = jnp.linspace(-1, 1, 16)[:, None]
ADAM = LossScaleOptimizer(optax.adam(0.03))


def tiny_loss(y, target):
    # As small as an auxiliary loss: without scaling its gradients vanish.
    return 1e-6 * jnp.mean((y.astype(jnp.float32) - target) ** 2)


def check_training(step, read):
    """Trains, with one poisoned batch; `read` returns parameters and state."""
    losses, traces = [], []

    def counted(*args):
        traces.append(1)
        return tiny_loss(*args)

    for i in range(60):
        before, _ = jax.tree.map(jnp.copy, read())
        losses.append(step(counted, X**2 * (NAN if i == 10 else 1)))
        params, state = read()
        if i == 10:
            assert_same_bits(params, before)
    assert losses[-1] < losses[0] / 5
    assert len(traces) == 1
    assert ADAM.current_loss_scale(state) == 2**14
    assert ADAM.dynamic_counter(state) == 49
    assert ADAM.get_scaled_loss(1.0, state) == 2**14
    assert select_applied(state, 1.0, 2.0) == 1
    assert optax.tree.get(state, "skipped_steps") == 1


def test_linen_train_state():
    model = linen.Sequential(
        [
            linen.Dense(8, dtype=jnp.float16),
            linen.tanh,
            linen.Dense(1, dtype=jnp.float16),
        ]
    )
    params = model.init(jax.random.key(0), X)
    trainer = TrainState.create(apply_fn=model.apply, params=params, tx=ADAM)

    @functools.partial(jax.jit, static_argnums=2)
    def train_step(trainer, y, loss):
        def loss_fn(params):
            return loss(trainer.apply_fn(params, X), y)

        value_and_grad = ADAM.value_and_grad(loss_fn, trainer.opt_state)
        value, grads = value_and_grad(trainer.params)
        return trainer.apply_gradients(grads=grads), value

    def step(loss, y):
        nonlocal trainer
        trainer, value = train_step(trainer, y, loss)
        return value

    check_training(step, lambda: (trainer.params, trainer.opt_state))


def test_nnx_optimizer():
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(
        nnx.Linear(1, 8, dtype=jnp.float16, rngs=rngs),
        jnp.tanh,
        nnx.Linear(8, 1, dtype=jnp.float16, rngs=rngs),
    )
    trainer = nnx.Optimizer(model, ADAM, wrt=nnx.Param)

    @functools.partial(nnx.jit, static_argnums=3)
    def train_step(model, trainer, y, loss):
        value, grads = ADAM.value_and_grad(
            lambda model: loss(model(X), y),
            trainer.opt_state,
            transform=nnx.value_and_grad,
        )(model)
        trainer.update(model, grads)
        return value

    def read():
        return nnx.to_pure_dict(nnx.state(model, nnx.Param)), trainer.opt_state

    check_training(lambda loss, y: train_step(model, trainer, y, loss), read)
    merged = nnx.merge(*nnx.split(trainer))
    assert merged.tx == ADAM
    assert ADAM.current_loss_scale(merged.opt_state) == 2**14


def test_equinox_passes_the_optimizer_through_filter_jit():
    model = eqx.nn.MLP(1, 1, 8, 1, key=jax.random.key(0))
    state = ADAM.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def train_step(model, state, y, loss, optimizer):
        value, grads = optimizer.value_and_grad(
            lambda model: loss(jax.vmap(model)(X), y),
            state,
            transform=eqx.filter_value_and_grad,
        )(model)
        params = eqx.filter(model, eqx.is_inexact_array)
        updates, state = optimizer.update(grads, state, params)
        return eqx.apply_updates(model, updates), state, value

    def step(loss, y):
        nonlocal model, state
        model, state, value = train_step(model, state, y, loss, ADAM)
        return value

    check_training(step, lambda: (eqx.filter(model, eqx.is_array), state))


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
