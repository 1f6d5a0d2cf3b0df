"""The state of the optimizer, and functions that find, check and read it."""

import functools
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax import lax

from optax_lossscale import _tree
from optax_lossscale._models import is_mutable
from optax_lossscale._rules.base import LossScale, types_of_state
from optax_lossscale._tree import Tree
from optax_lossscale._warn import warn

# Parts of error messages: the order of arguments, and where a state comes from.
ORDER = (
    "The order is minimize(loss_fn, params, state, *batch), value_and_grad(loss_fn, "
    "state)(params, *batch), update(grads, state, params), apply_gradients(grads, "
    "params, state)."
)
TRAIN_STATE = (
    "Pass the parameters alone, as train_state.params, and as the state "
    "train_state.opt_state."
)
FUNCTIONAL = (
    "Of a model of Flax linen or Haiku, pass the parameters, params = model.init(key, "
    "x), and call model.apply(params, x) in loss_fn."
)
SOURCES = (
    "Pass the state that optimizer.init(params) or the last step returned; restore a "
    f"checkpoint into the state of init. {ORDER}"
)
OUTERMOST = (
    "Pass the LossScaleOptimizerState alone, as train_state.opt_state. Of a chain, put "
    "the rest inside, and make a new state: "
    "LossScaleOptimizer(optax.chain(optax.clip(1.0), inner))."
)
# A pytree that holds one `LossScaleOptimizerState`, as that of a chain or of a trainer.
StateTree: TypeAlias = Any
# The bits of skip_reasons.
GRADIENTS, LOSS, VETO = 1, 2, 4
# The counters that every state has.
COUNTERS = "skipped_steps", "consecutive_skipped_steps", "stuck_steps"


class LossScaleOptimizerState(NamedTuple):
    """The state of a `LossScaleOptimizer`. Its counters stay at their maximum.

    Attributes:
      inner_state: The state of the inner optimizer.
      loss_scale_state: The state of the loss scale.
      last_step_applied: bool[], False if the last step was skipped.
      skipped_steps: i32[], steps skipped so far.
      consecutive_skipped_steps: i32[], steps skipped since one was applied.
      stuck_steps: i32[], steps skipped since one was applied although the scale was at
        its minimum (for a rule without `min_scale`: although the scale did not fall).
        Steps skipped because of the loss do not count. See `diagnostics.check_health`.
      nonfinite_loss_steps: i32[], steps skipped so far because the loss itself was
        not finite; None without `check_loss`.
      retries: i32[], how often `minimize` has repeated a forward and backward pass so
        far; None without `retries`.
      skip_reasons: i32[], why steps were skipped since one was applied, a sum: 1 if
        the rule did not let the gradients pass (the rules of this package let finite
        ones pass), 2 if a loss was not finite, and 4 if `skip_if` alone skipped the
        last step. If both gradients and loss were not finite, the loss is the reason.
        None in a state that was saved before this field existed: it then stays None.
    """

    inner_state: Any
    loss_scale_state: Any
    last_step_applied: jax.Array
    skipped_steps: jax.Array
    consecutive_skipped_steps: jax.Array
    stuck_steps: jax.Array
    nonfinite_loss_steps: jax.Array | None = None
    retries: jax.Array | None = None
    skip_reasons: jax.Array | None = None


@functools.partial(jax.jit, inline=True)
def count_step(
    state: LossScaleOptimizerState,
    should_apply: jax.Array | None,
    passes: jax.Array,
    at_minimum: jax.Array,
    loss_is_finite: jax.Array | None,
    is_vetoed: jax.Array | None,
) -> LossScaleOptimizerState:
    """Records in the state whether a step was applied or skipped, and why.

    Args:
      state: The state before the step, without `inner_state` and `loss_scale_state`.
      should_apply: bool[], or None where every step is applied.
      passes: bool[], whether the rule let the gradients pass.
      at_minimum: bool[], whether the scale could not have been lower.
      loss_is_finite: bool[], or None where the loss is not checked.
      is_vetoed: bool[], whether `skip_if` alone skips the step; None where it is not
        given.
    """

    def count(steps, condition):
        steps = jnp.asarray(steps, jnp.int32)
        return jnp.where(condition, optax.safe_increment(steps), steps)

    # Made of old values, so that they vary over the same axes of jax.shard_map.
    no = lax.full_like(state.last_step_applied, False, bool)
    zero = lax.full_like(state.skipped_steps, 0, jnp.int32)
    # None stays None: a scan takes no other structure.
    reasons = None if state.skip_reasons is None else zero
    if should_apply is None:
        return state._replace(
            last_step_applied=~no,
            skipped_steps=jnp.asarray(state.skipped_steps, jnp.int32),
            consecutive_skipped_steps=zero,
            stuck_steps=zero,
            skip_reasons=reasons,
        )
    is_stuck = ~passes & at_minimum
    nonfinite_loss_steps = state.nonfinite_loss_steps
    if loss_is_finite is not None:
        # None in a state from before check_loss was switched on.
        before = zero if nonfinite_loss_steps is None else nonfinite_loss_steps
        nonfinite_loss_steps = count(before, ~loss_is_finite)
        is_stuck &= loss_is_finite
    skipped = ~should_apply
    failed = skipped if is_vetoed is None else skipped & ~is_vetoed
    in_a_row = count(state.consecutive_skipped_steps, failed)
    stuck_steps = count(state.stuck_steps, is_stuck)
    if reasons is not None:
        before = jnp.asarray(state.skip_reasons, jnp.int32)
        reason = GRADIENTS
        if loss_is_finite is not None:
            reason = jnp.where(loss_is_finite, GRADIENTS, LOSS)
        reasons = before & (GRADIENTS | LOSS) | reason
        if is_vetoed is not None:
            reasons = jnp.where(is_vetoed, before | VETO, reasons)
        reasons = jnp.where(should_apply, 0, reasons)
    return state._replace(
        last_step_applied=should_apply | no,
        skipped_steps=count(state.skipped_steps, skipped),
        consecutive_skipped_steps=jnp.where(should_apply, 0, in_a_row),
        stuck_steps=jnp.where(should_apply, 0, stuck_steps),
        nonfinite_loss_steps=nonfinite_loss_steps,
        skip_reasons=reasons,
    )


def find_state(state: StateTree) -> LossScaleOptimizerState:
    """Returns the one state of a loss-scaled optimizer in a tree."""
    states = _tree.nodes_of(LossScaleOptimizerState, state)
    if len(states) != 1:
        raise ValueError(
            f"state must hold exactly one LossScaleOptimizerState, got {len(states)} "
            f"in an object of type {type(state).__name__}. {SOURCES}"
        )
    return states[0]


def check_state(state: Any, rule: LossScale) -> None:
    """Raises if `state` is no state, or one of another rule or of other shapes."""
    inside = _tree.nodes_of(LossScaleOptimizerState, state)
    leaves = jax.tree.leaves([x.loss_scale_state for x in inside], is_leaf=is_mutable)
    if any(map(is_mutable, leaves)):
        raise ValueError(
            "state must be what optimizer.init(model) returns, got the opt_state of an "
            "nnx.Optimizer, which only its own update takes, after "
            "value_and_grad(loss_fn, trainer.opt_state)."
        )
    if not isinstance(state, LossScaleOptimizerState):
        raise ValueError(
            "state must be the LossScaleOptimizerState of this optimizer, got "
            f"{type(state).__name__}. {OUTERMOST if inside else SOURCES}"
        )
    scale_state = state.loss_scale_state
    if jax.tree.structure(scale_state) != jax.tree.structure(types_of_state(rule)):
        raise ValueError(_other_rule(scale_state, rule))
    check_scalar("loss_scale_state.loss_scale", _tree.unbox(scale_state.loss_scale))
    for name in ("last_step_applied", *COUNTERS):
        check_scalar(name, getattr(state, name))


def check_scalar(name: str, value: Any) -> None:
    """Raises if an array of a state has an axis of members or devices."""
    shape = None if value is None else jnp.shape(value)
    if shape != ():
        raise ValueError(
            f"state.{name} must be of shape (), got {shape}. With many members or "
            "devices, call inside the vmap or pmap that made the state."
        )


def within_bounds(rule: LossScale, state: Any) -> Any:
    """Clips the scale of a rule's state, and makes its arrays strongly typed."""
    if hasattr(state, "_replace"):  # Otherwise the scale is clipped when it is read.
        state = state._replace(loss_scale=rule(state))
    return _tree.strongly_typed(state)


def find_rule_state(state: StateTree, rule: LossScale) -> Any:
    """Returns the state of a rule in a tree with one `LossScaleOptimizerState`."""
    rule_state = find_state(state).loss_scale_state
    # Only the class is compared: leaves may be boxes, such as variables of Flax nnx.
    if type(rule_state) is not type(types_of_state(rule)):
        raise ValueError(_other_rule(rule_state, rule))
    return rule_state


def _other_rule(state: Any, rule: LossScale) -> str:
    wanted, got = map(_tree.types_of, (types_of_state(rule), state))
    return (
        f"state.loss_scale_state must be {wanted}, got {got}. Use the loss_scale that "
        "the state was saved with, or the loss_scale_state of a new state."
    )


def warn_if_in_multi_steps(state: Any) -> None:
    """Warns of a loss-scaled optimizer inside `optax.MultiSteps`."""
    if _tree.nodes_of(
        LossScaleOptimizerState, _tree.nodes_of(optax.MultiStepsState, state)
    ):
        warn(
            "A LossScaleOptimizer is inside optax.MultiSteps, which keeps non-finite "
            "gradients forever. Use LossScaleOptimizer(optax.MultiSteps(inner, k))."
        )


def select_applied(state: StateTree, new: Tree, old: Tree) -> Tree:
    """Returns new values after an applied step, and old ones after a skipped step.

    Use it for values that the step computes besides the parameters: batch statistics,
    moving averages of the parameters, random keys, step counts.

    With `optax.MultiSteps` inside the optimizer, the last step is the last micro-batch.

    Args:
      state: The state after the step; a pytree that holds one
        `LossScaleOptimizerState`.
      new: The values that the step computed, any pytree.
      old: The values before the step.

    Returns:
      `new` if the last step was applied, `old` if it was skipped, in the dtypes of
      `old`. (If a leaf of `old` is a Python number, in the promoted dtype.) Leaves
      that are neither arrays nor numbers always come from `old`.

    Raises:
      TypeError: If a dtype of `old` cannot hold `new`, as an integer cannot hold a
        float.
      ValueError: If `state` holds none or several of these states, or one of many
        members (`jax.vmap`) or devices; if `new` and `old` differ in structure
        or shapes.

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
    applied = _tree.unbox(find_state(state).last_step_applied)
    check_scalar("last_step_applied", applied)
    if place := _tree.difference(new, old):
        raise ValueError(
            f"new and old must have the same structure and shapes. In new, {place}"
        )
    old = jax.tree.map(_promote, old, new)
    new = _tree.cast_like(new, old)
    return _tree.select(applied, new, old)


def _rank(dtype: Any) -> int:
    """Orders dtypes: bool, integer, floating-point, complex."""
    classes = (jnp.number, jnp.inexact, jnp.complexfloating)
    return sum(jnp.issubdtype(dtype, x) for x in classes)


def _promote(old: Any, new: Any) -> Any:
    """Returns a leaf of `select_applied` as an array, in the dtype of the result."""
    if isinstance(old, bool | int | float | complex):
        with jax.numpy_dtype_promotion("standard"):
            old = jnp.asarray(old, jnp.result_type(old, new))
    old = _tree.strongly_typed(old)
    if _tree.is_array(old) and _rank(dtype := jnp.result_type(new)) > _rank(old.dtype):
        raise TypeError(
            f"old must be of a dtype that can hold new, got {old.dtype} and {dtype}."
        )
    return old
