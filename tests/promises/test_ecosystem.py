"""At home in Optax: every position, every state.

`docs/test_optax_table.py` has more positions. The recipes are at home in Flax and
Equinox.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import NAN

from optax_lossscale import LossScaleOptimizer, scale_as_parameter, select_applied

pytestmark = pytest.mark.usefixtures("standard_dtype_promotion")
PARAMS = jax.device_put({"a": np.float32([1, 2]), "b": np.float32(3)})
GOOD = jax.device_put({"a": np.float32([1, 1]), "b": np.float32(1)})
END = {"a": np.float32([-0.45, 0.55]), "b": np.float32(1.55)}
BAD = GOOD | {"b": jax.device_put(np.float32(NAN))}


def scaler():
    return LossScaleOptimizer(optax.sgd(0.5, momentum=0.9))


POSITIONS = {
    "alone": scaler,
    "inside a chain": lambda: optax.chain(optax.identity(), scaler()),
    "deep inside": lambda: optax.chain(optax.chain(scaler()), optax.scale(1.0)),
    "inject_hyperparams of a factory": lambda: optax.inject_hyperparams(
        lambda rate: LossScaleOptimizer(optax.sgd(rate, momentum=0.9))
    )(rate=0.5),
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
    tx = make()
    update = jax.jit(tx.update)
    params, state = PARAMS, tx.init(PARAMS)
    for grads in (GOOD, BAD, GOOD):
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
    # Two steps of 0.5 with momentum: 1 and 1.9 times the gradient.
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), params, END)
    # Read through whatever is around it, by any optimizer and by Optax.
    reader = LossScaleOptimizer(optax.identity())
    assert reader.current_loss_scale(state) == 2**14
    assert reader.dynamic_counter(state) == 1
    assert reader.get_scaled_loss(1.0, state) == 2**14
    assert optax.tree.get(state, "loss_scale") == 2**14
    assert optax.tree.get(state, "skipped_steps") == 1
    assert select_applied(state, 1.0, 0.0) == 1
    state = optax.tree.set(state, loss_scale=np.float32(4))
    assert reader.current_loss_scale(state) == 4
    assert reader.value_and_grad(jnp.square, state)(np.float32(3)) == (9, 6)
    assert update._cache_size() == 1


@pytest.mark.parametrize("scale", [{}, {"loss_scale": np.float32(2**15)}])
def test_map_params_sees_the_parameters_in_the_state(scale):
    reader = LossScaleOptimizer(optax.adam(0.1))
    optimizer = scale_as_parameter(reader) if scale else reader
    state = optimizer.init(PARAMS | scale)
    state = optax.tree.map_params(optimizer, lambda x: x + 1, state)
    assert state.inner_state[0].mu["b"] == 1
    assert reader.current_loss_scale(state) == 2**15
