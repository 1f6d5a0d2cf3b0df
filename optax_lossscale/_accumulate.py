"""Gradient accumulation around a loss-scaled optimizer: whole windows or nothing."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_lossscale import _check as check
from optax_lossscale._optimizer import LossScaleOptimizer
from optax_lossscale._scaling import at_least_float32
from optax_lossscale._state import find_state, nodes_of, unbox
from optax_lossscale._step.inner import check_loss_value, check_optimizer, map_with_none
from optax_lossscale._step.skip import run_or_skip
from optax_lossscale._tree import is_inexact, strongly_typed, zero_update


class AccumulationState(NamedTuple):
    """The state of `accumulate_gradients`.

    Attributes:
      inner_state: The state of the wrapped optimizer. It changes only at the end of a
        window.
      micro_step: i32[], the micro-batches seen in this window; zero right after an
        update.
      accumulated_grads: The sum of the gradients so far, each divided by the number of
        micro-batches if they are averaged, like the parameters but at least float32;
        zero at the start of a window. None where a parameter is not floating-point.
      accumulated_value: f32[], the same for the losses, if they are passed.
    """

    inner_state: Any
    micro_step: jax.Array
    accumulated_grads: Any
    accumulated_value: jax.Array


def accumulate_gradients(
    inner_optimizer: optax.GradientTransformation | Any,
    micro_steps: int,
    *,
    average: bool = True,
) -> optax.GradientTransformationExtraArgs:
    """Updates once for every window of micro-batches, with their mean gradient.

    Wrap it around a `LossScaleOptimizer`, which then sees only whole windows: the
    scale is the same for all micro-batches of a window, and adapts after it. A window
    with a non-finite gradient is skipped as a whole, and the next starts from zero.
    (`LossScaleOptimizer(optax.MultiSteps(inner, k))` drops only the micro-batch.)

    `has_updated` tells whether the parameters changed. `select_applied` refers to the
    last whole window: for other results of a micro-batch, such as batch statistics,
    use `all_finite` of its gradients.

    Args:
      inner_optimizer: A `LossScaleOptimizer`, or any optimizer that holds one, without
        `num_losses` and `mask`: gradients must be a tree like the parameters, and all
        of them are added up. (Inside a chain this is not checked.)
      micro_steps: The micro-batches in a window.
      average: Whether to average gradients over the window. Pass False to sum them, if
        each loss is already divided by the size of the whole batch.

    Returns:
      An optimizer. Its `update` takes the unscaled gradients of a micro-batch, which
      `value_and_grad` of the `LossScaleOptimizer` computes with this optimizer's
      state. Its updates are zero except at the end of a window. The inner optimizer
      gets the extra arguments of the last micro-batch, but the mean (or sum) of
      `value`, the loss.

    Raises:
      ValueError: If `micro_steps` is not a whole number of at least 1; from `update`,
        if its state is not an `AccumulationState`.
      TypeError: If an argument is of the wrong type.

    Examples:
      >>> import jax.numpy as jnp
      >>> import optax
      >>> from optax_lossscale import LossScaleOptimizer, accumulate_gradients
      >>> scaler = LossScaleOptimizer(optax.sgd(0.5))
      >>> optimizer = accumulate_gradients(scaler, micro_steps=2)
      >>> params = jnp.array(1.0)
      >>> state = optimizer.init(params)
      >>> loss_fn = lambda params, x: params * x
      >>> for x in (1.0, 3.0):
      ...     loss, grads = scaler.value_and_grad(loss_fn, state)(params, x)
      ...     updates, state = optimizer.update(grads, state, params)
      ...     print(updates)
      -0.0
      -1.0

      A window with a non-finite gradient:

      >>> for grads in (jnp.array(jnp.inf), jnp.array(1.0)):
      ...     updates, state = optimizer.update(grads, state, params)
      ...     print(updates, scaler.current_loss_scale(state))
      -0.0 32768.0
      -0.0 16384.0
    """
    is_ours = isinstance(inner_optimizer, LossScaleOptimizer)
    if is_ours and not inner_optimizer._options.is_plain:
        raise TypeError(
            "inner_optimizer must be without num_losses and mask, got "
            f"{inner_optimizer!r}: all gradients, of a single loss, are added up."
        )
    inner = check_optimizer("inner_optimizer", inner_optimizer)
    micro_steps = check.count("micro_steps", micro_steps)
    parts = micro_steps if check.boolean("average", average) else 1

    def init(params):
        return AccumulationState(
            inner_state=strongly_typed(inner.init(params)),
            micro_step=jnp.zeros((), jnp.int32),
            accumulated_grads=jax.tree.map(_zeros, params),
            accumulated_value=jnp.zeros((), jnp.float32),
        )

    def add(total, x):
        # Not a running mean, which takes a difference that may overflow.
        return total + jnp.asarray(x).astype(total.dtype) / parts

    def update(updates, state, params=None, **extra_args):
        if not isinstance(state, AccumulationState):
            raise ValueError(
                "state must be the AccumulationState that the init of "
                f"accumulate_gradients returned, got {type(state).__name__}."
            )
        # A restored or hand-set state may hold Python numbers.
        state = strongly_typed(state)
        # Its count may be beyond the window.
        micro_step = jnp.clip(state.micro_step, 0, micro_steps - 1)
        is_last = micro_step == micro_steps - 1
        total = map_with_none(
            lambda grad, total: add(total, grad) if is_inexact(grad) else total,
            updates,
            state.accumulated_grads,
        )
        value = state.accumulated_value
        if extra_args.get("value") is not None:
            check_loss_value(extra_args["value"])
            value = add(value, extra_args["value"])
            extra_args = extra_args | {"value": value}

        def run(inputs, total, _value, inner_state, params):
            grads, extra_args = inputs
            grads = map_with_none(lambda g, t: t if is_inexact(g) else g, grads, total)
            new = inner.update(grads, inner_state, params, **extra_args)
            zeros = jax.tree.map(jnp.zeros_like, total)
            return *new, zeros, jnp.zeros((), jnp.float32)

        # Multiplying by zero would keep inf and nan. "cond" branches wherever it can,
        # so that only the last micro-batch runs the inner optimizer.
        inputs = (updates, extra_args)
        operands = (total, value, state.inner_state, params)
        updates, *new = run_or_skip("cond", is_last, run, _keep, inputs, *operands)
        inner_state, total, value = new
        micro_step = jnp.where(is_last, 0, micro_step + 1)
        return updates, AccumulationState(inner_state, micro_step, total, value)

    return optax.GradientTransformationExtraArgs(init, update)


def has_updated(state: Any) -> jax.Array:
    """Tells whether the last call of an optimizer changed the parameters.

    Use it for values that follow the parameters, such as their moving average or a
    count of updates. It works with a `LossScaleOptimizer`, with one around
    `optax.MultiSteps`, and with `accumulate_gradients`.

    For other results of a micro-batch, such as batch statistics, use `all_finite` of
    its gradients.

    Args:
      state: The state after a call of `update`, `apply_gradients` or `minimize`; a
        pytree that holds one `LossScaleOptimizerState`.

    Returns:
      bool[], False if the step was skipped or did not end a window of micro-batches.
      For a state of several members or devices, of the shape of `last_step_applied`.

    Raises:
      ValueError: If `state` holds none or several of these states.

    Examples:
      >>> import jax.numpy as jnp
      >>> import optax
      >>> from optax_lossscale import (
      ...     LossScaleOptimizer,
      ...     accumulate_gradients,
      ...     has_updated,
      ... )
      >>> optimizer = LossScaleOptimizer(optax.sgd(0.1))
      >>> optimizer = accumulate_gradients(optimizer, micro_steps=2)
      >>> params = jnp.ones(3)
      >>> state = optimizer.init(params)
      >>> for _ in range(4):
      ...     updates, state = optimizer.update(params, state, params)
      ...     print(has_updated(state))
      False
      True
      False
      True
    """
    found = find_state(state)
    updated = jnp.asarray(unbox(found.last_step_applied))
    outer = nodes_of(AccumulationState, state)
    while outer:
        for node in outer:
            updated &= unbox(node.micro_step) == 0
        outer = nodes_of(AccumulationState, [node.inner_state for node in outer])
    for inner in nodes_of(optax.MultiStepsState, found.inner_state):
        steps, updates = unbox(inner.mini_step), unbox(inner.gradient_step)
        updated &= (steps == 0) & (updates > 0)
    return updated


def _zeros(param):
    if not is_inexact(param):
        return None
    return jnp.zeros_like(param, at_least_float32(jnp.asarray(param).dtype))


def _keep(like, total, value, inner_state, _params):
    return jax.tree.map(zero_update, like[0]), inner_state, total, value
