"""The state of the optimizer, and finding it in the states of others."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_lossscale._tree import cast_like, select, strongly_typed


class LossScaleOptimizerState(NamedTuple):
    """The state of a `LossScaleOptimizer`.

    Attributes:
      inner_state: The state of the inner optimizer.
      loss_scale_state: The state of the loss scale.
      last_step_applied: bool[], False if the last step was skipped.
      skipped_steps: i32[], steps skipped so far. Stays at its maximum.
      consecutive_skipped_steps: i32[], steps skipped since one was applied. Stays
        at its maximum.
    """

    inner_state: Any
    loss_scale_state: Any
    last_step_applied: jax.Array
    skipped_steps: jax.Array
    consecutive_skipped_steps: jax.Array


def initial_state(inner_state: Any, loss_scale_state: Any) -> LossScaleOptimizerState:
    """Returns the state before the first step."""
    return LossScaleOptimizerState(
        inner_state=inner_state,
        loss_scale_state=loss_scale_state,
        last_step_applied=jnp.ones((), bool),
        skipped_steps=jnp.zeros((), jnp.int32),
        consecutive_skipped_steps=jnp.zeros((), jnp.int32),
    )


def count_step(
    state: LossScaleOptimizerState, should_apply: jax.Array
) -> LossScaleOptimizerState:
    """Records in the state whether a step was applied or skipped."""
    skipped = jnp.asarray(state.skipped_steps, jnp.int32)
    consecutive = jnp.asarray(state.consecutive_skipped_steps, jnp.int32)
    more, one_more = map(optax.safe_increment, (skipped, consecutive))
    return state._replace(
        last_step_applied=should_apply,
        skipped_steps=jnp.where(should_apply, skipped, more),
        consecutive_skipped_steps=jnp.where(should_apply, 0, one_more),
    )


def find_states(state: Any) -> list[LossScaleOptimizerState]:
    """Returns all the states of loss-scaled optimizers in a tree."""

    def found(node):
        return isinstance(node, LossScaleOptimizerState)

    return [node for node in jax.tree.leaves(state, is_leaf=found) if found(node)]


def find_state(state: Any) -> LossScaleOptimizerState:
    """Returns the one state of a loss-scaled optimizer in a tree."""
    found = find_states(state)
    if len(found) == 1:
        return found[0]
    raise ValueError(
        "state must hold exactly one LossScaleOptimizerState, got "
        f"{len(found)} in a {type(state).__name__}. "
        + ("Pass the one you mean." if found else "Pass what init returned.")
    )


def unbox(value: Any) -> jax.Array:
    """Returns the array in a box, such as a variable of Flax nnx."""
    (array,) = jax.tree.leaves(value)
    return array


def select_applied(state: Any, new: Any, old: Any) -> Any:
    """Keeps what a skipped step must not change.

    For whatever the step computes besides the parameters: batch statistics,
    moving averages of the parameters, random keys, step counts.

    Args:
      state: The state after the step; a pytree that holds one
        `LossScaleOptimizerState`.
      new: Any pytree, as the step computed it.
      old: The same before the step.

    Returns:
      `new` where the last step was applied, `old` where it was skipped, in the
      dtypes of `old`. Leaves that are no numbers are constants, as in `old`.

    Raises:
      ValueError: If `state` holds none or several of these states, or one of many
        members (`jax.vmap`) or devices; if `new` and `old` differ in structure.

    Examples:
      >>> import jax.numpy as jnp
      >>> import optax
      >>> from optax_lossscale import LossScaleOptimizer, select_applied
      >>> optimizer = LossScaleOptimizer(optax.sgd(0.1))
      >>> params = jnp.ones(3)
      >>> state = optimizer.init(params)
      >>> nans = jnp.full(3, jnp.nan)
      >>> _, state = optimizer.update(nans, state, params)
      >>> print(select_applied(state, new=nans, old=jnp.zeros(3)))
      [0. 0. 0.]
    """
    applied = unbox(find_state(state).last_step_applied)
    if jnp.ndim(applied):
        raise ValueError(
            "state is that of several members or devices, and new and old cannot be "
            "told apart by member. Call inside the vmap or pmap that made the state."
        )
    old = strongly_typed(old)
    return select(applied, cast_like(new, old), old)
