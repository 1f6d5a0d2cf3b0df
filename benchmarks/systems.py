"""The training steps to compare: plain Optax, this package and its peers.

A step maps `(params, state)` to their new values, so that both can be donated.
"""

import functools
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_lossscale import LossScaleOptimizer, scale_as_parameter, with_loss_scale
from optax_lossscale.diagnostics import _compare

PLAIN, PLAIN_KERAS = "optax, no scaling", "Keras 3, no scaling"
OPTIMIZERS = {"sgd": optax.sgd(1e-3), "adam": optax.adam(1e-3)}
SCALE = 2.0**15


class System(NamedTuple):
    """One way to train.

    Attributes:
      init: Maps parameters to the initial state.
      step: Maps `params, state, *batch` to new `params, state` and the loss.
      baseline: The name of the same system without loss scaling, to compare with.
    """

    init: Callable[..., Any]
    step: Callable[..., Any]
    baseline: str = PLAIN


def lower(system: System, params: Any, state: Any, *batch: Any) -> jax.stages.Lowered:
    """Lowers a step with donated parameters and state.

    It takes and returns the leaves of the state, as the state of jmp itself cannot be
    lowered.
    """
    leaves, treedef = jax.tree.flatten(state)

    def step(params, leaves, *batch):
        state = treedef.unflatten(leaves)
        params, state, loss = system.step(params, state, *batch)
        return params, jax.tree.leaves(state), loss

    return jax.jit(step, donate_argnums=(0, 1)).lower(params, leaves, *batch)


def _apply(inner, grads, state, params):
    updates, state = inner.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def _scaled_grad(loss_fn, scale, params, batch):
    """Returns the gradients of the loss after the function `scale`, and the loss."""

    def scaled_loss_fn(params):
        loss = loss_fn(params, *batch)
        return scale(loss), loss

    return jax.grad(scaled_loss_fn, has_aux=True)(params)


def plain(inner, loss_fn):
    """Returns the step of an optimizer without loss scaling."""

    def step(params, state, *batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, *batch)
        return *_apply(inner, grads, state, params), loss

    return System(inner.init, step)


def static(inner, loss_fn, scale):
    """Returns the step that scales by a constant, and checks nothing."""

    def step(params, state, *batch):
        grads, loss = _scaled_grad(loss_fn, lambda x: x * scale, params, batch)
        grads = jax.tree.map(lambda g: g / scale, grads)
        return *_apply(inner, grads, state, params), loss

    return System(inner.init, step)


def minimize(inner, loss_fn, **options):
    """Returns the step of `minimize`, given options of `LossScaleOptimizer`."""
    way = _compare.minimize(loss_fn, inner, **options)
    return System(way.init, way.step)


def in_two(inner, loss_fn, *, call="update", given=False, **options):
    """Returns the step of `value_and_grad` and a call that applies the gradients."""
    optimizer = LossScaleOptimizer(inner, **options)

    def step(params, state, *batch):
        value_and_grad = optimizer.value_and_grad(loss_fn, state)
        if given:  # The gradients of this loss are not scaled.
            value_and_grad = jax.value_and_grad(loss_fn)
        loss, grads = value_and_grad(params, *batch)
        if call == "apply_gradients":
            params, state = optimizer.apply_gradients(grads, params, state)
        else:
            params, state = _apply(optimizer, grads, state, params)
        return params, state, loss

    return System(optimizer.init, step)


def _in_a_trainer(inner, loss_fn):
    inside = LossScaleOptimizer(inner)
    optimizer = scale_as_parameter(inside)
    grad_fn = jax.value_and_grad(with_loss_scale(lambda x, *b: loss_fn(x["all"], *b)))

    def init(params):
        scale = jnp.float32(inside.initial_scale)
        return scale, optimizer.init({"all": params, "loss_scale": scale})

    def step(params, state, *batch):
        params = {"all": params, "loss_scale": state[0]}
        loss, grads = grad_fn(params, *batch)
        params, state = _apply(optimizer, grads, state[1], params)
        return params["all"], (params["loss_scale"], state), loss

    return System(init, step)


def flax_scale(inner, loss_fn):
    """Returns the step of Flax's `DynamicScale`."""
    from flax.training.dynamic_scale import DynamicScale

    def init(params):
        scale = DynamicScale(scale=jnp.float32(SCALE), fin_steps=jnp.int32(0))
        return inner.init(params), scale

    def step(params, state, *batch):
        inner_state, scale = state
        scale, finite, loss, grads = scale.value_and_grad(loss_fn)(params, *batch)
        new = _apply(inner, grads, inner_state, params)
        params, inner_state = optax.tree.where(finite, new, (params, inner_state))
        return params, (inner_state, scale), loss

    return System(init, step)


def _jmp(inner, loss_fn):
    import jmp

    def init(params):
        return inner.init(params), jmp.DynamicLossScale(jnp.float32(SCALE))

    def step(params, state, *batch):
        inner_state, scale = state
        grads, loss = _scaled_grad(loss_fn, scale.scale, params, batch)
        grads = scale.unscale(grads)
        finite = jmp.all_finite(grads)
        new = _apply(inner, grads, inner_state, params)
        params, inner_state = jmp.select_tree(finite, new, (params, inner_state))
        return params, (inner_state, scale.adjust(finite)), loss

    return System(init, step)


def _mpx(inner, loss_fn):
    import mpx

    def init(params):
        scale, least = jnp.float32(SCALE), jnp.float32(1)
        # Its hyperparameters are leaves. Only arrays can be donated.
        scaling = mpx.DynamicLossScaling(scale, least)
        return inner.init(params), jax.tree.map(jnp.asarray, scaling)

    def step(params, state, *batch):
        inner_state, scaling = state
        value_and_grad = mpx.filter_value_and_grad(loss_fn, scaling)
        loss, scaling, finite, grads = value_and_grad(params, *batch)
        params, inner_state = mpx.optimizer_update(
            params, inner, inner_state, grads, finite
        )
        return params, (inner_state, scaling), loss

    return System(init, step)


def _keras(name, loss_fn, *, scaled):
    """Uses the optimizer of Keras 3 with this name, with or without loss scaling."""
    os.environ.setdefault("KERAS_BACKEND", "jax")
    import keras

    config = {"class_name": name, "config": {"learning_rate": 1e-3}}
    optimizer = keras.optimizers.get(config)
    if scaled:
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)

    def init(params):
        leaves = jax.tree.leaves(params)
        optimizer.build([keras.Variable(jnp.zeros(x.shape)) for x in leaves])
        return [jnp.array(variable.value) for variable in optimizer.variables]

    def step(params, state, *batch):
        scale = 1
        if scaled:
            is_scale = [v is optimizer.dynamic_scale for v in optimizer.variables]
            scale = state[is_scale.index(True)]
        grads, loss = _scaled_grad(loss_fn, lambda x: x * scale, params, batch)
        leaves, treedef = jax.tree.flatten(params)
        grads = treedef.flatten_up_to(grads)
        leaves, state = optimizer.stateless_apply(state, grads, leaves)
        return treedef.unflatten(leaves), state, loss

    return System(init, step, PLAIN_KERAS if scaled else PLAIN)


def make_systems(
    optimizer: str,
    loss_fn: Callable[..., jax.Array],
    given: bool,
) -> dict[str, Callable[[], System]]:
    """Returns functions that make the systems, by name.

    Args:
      optimizer: A name in `OPTIMIZERS`.
      loss_fn: Maps `params, *batch` to a loss.
      given: Whether the gradients of `loss_fn` do not depend on the scale. They stand
        for gradients that were computed before, and count as unscaled where a system
        takes unscaled gradients.

    Returns:
      A dictionary that starts with the plain step.
    """
    inner = OPTIMIZERS[optimizer]
    make = functools.partial
    systems = {PLAIN: make(plain, inner, loss_fn)}
    systems["minimize"] = make(minimize, inner, loss_fn)
    for call in ("apply_gradients", "update"):
        label = f"{call} of unscaled" if given else call
        systems[label] = make(in_two, inner, loss_fn, call=call, given=given)
    systems["minimize, fixed scale"] = make(minimize, inner, loss_fn, loss_scale=SCALE)
    systems["with_loss_scale, update"] = make(_in_a_trainer, inner, loss_fn)
    systems["flax DynamicScale"] = make(flax_scale, inner, loss_fn)
    systems["jmp"] = make(_jmp, inner, loss_fn)
    systems["mpx"] = make(_mpx, inner, loss_fn)
    systems[PLAIN_KERAS] = make(_keras, optimizer, loss_fn, scaled=False)
    systems["Keras 3"] = make(_keras, optimizer, loss_fn, scaled=True)
    return systems
