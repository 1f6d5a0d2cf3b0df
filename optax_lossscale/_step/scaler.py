"""Several losses, one update: a scale for each loss, by the same rule."""

import functools
import operator
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from optax_lossscale._check import check_count
from optax_lossscale._numerics import scale_up
from optax_lossscale._rules.base import LossScale
from optax_lossscale._tree import is_float0, is_inexact, strongly_typed


def check_num_losses(num_losses: Any, mask: Any) -> int | None:
    """Returns the number of losses, or None where there is one loss, not a tuple."""
    if num_losses is None:
        return None
    if mask is not None:
        raise ValueError(
            "num_losses and mask cannot be combined: each loss would deliver its own "
            "new value of a parameter that has no gradient."
        )
    return check_count("num_losses", num_losses)


def initial_scales(rule: LossScale, num_losses: int | None) -> Any:
    """Returns the state of a rule; each of its arrays [n] where there are n losses."""
    state = strongly_typed(rule.init())
    if num_losses is None:
        return state
    return jax.tree.map(lambda x: jnp.stack([x] * num_losses), state)


def check_state(state: Any, expected: Any) -> None:
    """Raises if a state, restored perhaps, is of another rule or of other shapes.

    Args:
      state: A `LossScaleOptimizerState`.
      expected: The shapes of one.
    """
    rule, wanted = state.loss_scale_state, expected.loss_scale_state
    check_rule_state(rule, wanted)
    if jax.tree.structure(rule) != jax.tree.structure(wanted):
        raise ValueError(_other_rule(rule, wanted))
    # What belongs to the inner optimizer and to the leaves is for them to check.
    state = state._replace(inner_state=None, leaf_statistics=None)
    for (path, got), (_, shape) in zip(*map(_shapes, (state, expected)), strict=True):
        if got != shape:
            raise ValueError(
                f"state{jax.tree_util.keystr(path)} must be of shape {shape}, got "
                f"{got}. Where the state is that of many members or devices, call "
                "inside the vmap or pmap that made it."
            )


def check_rule_state(state: Any, expected: Any) -> None:
    """Raises if no scale can be read from the state of a rule."""
    if len(jax.tree.leaves(getattr(state, "loss_scale", None))) != 1:
        raise ValueError(_other_rule(state, expected))


def _other_rule(state: Any, expected: Any) -> str:
    return (
        f"state.loss_scale_state must be a {_describe(expected)}, as the loss "
        f"scale has it, got a {_describe(state)}. Restore a state with the loss "
        "scale that it was saved with, or begin a new one: state._replace("
        "loss_scale_state=optimizer.init(params).loss_scale_state)."
    )


def _shapes(tree: Any) -> list[tuple[Any, Any]]:
    leaves = jax.tree.leaves_with_path(tree, is_leaf=lambda x: x is None)
    return [(path, None if x is None else jnp.shape(x)) for path, x in leaves]


def _describe(state: Any) -> str:
    fields = ", ".join(getattr(state, "_fields", ()))
    return f"{type(state).__name__}({fields})" if fields else type(state).__name__


def update_scales(
    rule: LossScale,
    num_losses: int | None,
    grads: Any,
    state: Any,
    axis_name: Hashable | None,
) -> tuple[Any, jax.Array]:
    """Advances the scale of each loss on the evidence of its own gradients.

    Returns:
      The new state; and whether the step is to be applied, bool[], or as far as each
      loss is concerned, bool[n].
    """
    if num_losses is None:
        state, decision = rule.update(_constant(grads), state, axis_name=axis_name)
        return strongly_typed(state), jnp.asarray(decision, bool)

    def update_one(index):
        own = jax.tree.map(lambda x: x[index], state)
        return update_scales(rule, None, grads[index], own, axis_name)

    pairs = map(update_one, range(num_losses))
    return jax.tree.map(lambda *x: jnp.stack(x), *pairs)


def _constant(grads: Any) -> Any:
    """Returns gradients without derivatives: a scale and a decision have none."""

    def stop(x):
        return lax.stop_gradient(x) if is_inexact(x) else x

    return jax.tree.map(stop, grads)


def add_evidence(num_losses: int | None, grads: Any, finite: jax.Array) -> Any:
    """Adds a leaf to the gradients of each loss, which is nan unless `finite`."""
    leaf = _nan_unless(finite)
    if num_losses is None:
        return grads, leaf
    return [(tree, leaf) for tree in grads]


@functools.partial(jax.jit, inline=True)
def _nan_unless(finite):
    return jnp.where(finite, jnp.float32(0), jnp.float32(jnp.nan))


def total_loss(num_losses: int | None, losses: Any) -> Any:
    """Adds up the losses, at least in float32, so that the sum does not overflow."""
    if num_losses is None:
        return losses
    one = jnp.ones((), jnp.float32)
    return total(num_losses, [scale_up(loss, one) for loss in losses])


def total(num_losses: int | None, terms: Any) -> Any:
    """Adds up the gradients of each loss."""
    if num_losses is None:
        return terms

    def add(*leaves):
        return (
            leaves[0]
            if is_float0(leaves[0])
            else functools.reduce(operator.add, leaves)
        )

    return jax.tree.map(add, *terms)


def check_scales(num_losses: int | None, scales: jax.Array) -> jax.Array:
    """Returns the scales, if there is one for each loss."""
    wanted = () if num_losses is None else (num_losses,)
    if jnp.shape(scales) != wanted:
        raise ValueError(
            f"With num_losses={num_losses} the loss scale in the state must be of "
            f"shape {wanted}, got {jnp.shape(scales)}. Where the state is that of many "
            "members or devices, call inside the vmap or pmap that made it."
        )
    return scales


def check_one_each(name: str, num_losses: int, value: Any) -> Sequence[Any]:
    """Returns `value`, if it is a sequence with one element for each loss."""
    if isinstance(value, tuple | list) and len(value) == num_losses:
        return value
    got = f"{len(value)} in a " if isinstance(value, tuple | list) else ""
    raise TypeError(
        f"With num_losses={num_losses} {name} must be a tuple or list of "
        f"{num_losses}, one for each loss, got {got}{type(value).__name__}."
    )
