"""One step: check the gradients, decide, update or skip, count."""

import numbers
import reprlib
from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optax_lossscale import _hints, _inner, _models, _state, _tree
from optax_lossscale._devices import axes_of, on_all_devices
from optax_lossscale._rules.base import LossScale
from optax_lossscale._scaling import all_finite
from optax_lossscale._update import conditional_update
from optax_lossscale._warn import warn


class Options(NamedTuple):
    """The arguments of a `LossScaleOptimizer`, which documents them."""

    inner_optimizer: Any
    loss_scale: LossScale
    axis_name: Hashable | None
    check_loss: bool
    retries: int

    def warn_of_retries(self, caller: str) -> None:
        """Warns that a call other than `minimize` repeats nothing."""
        if self.retries:
            warn(
                f"{caller} repeats nothing, although retries={self.retries}. Write "
                "params, state, loss = optimizer.minimize(loss_fn, params, state, x)."
            )

    @property
    def axes(self) -> tuple[Hashable, ...]:
        """The names in `axis_name`."""
        return axes_of(self.axis_name)

    @property
    def skips(self) -> bool:
        """Whether a step may be skipped because of its gradients or its loss."""
        return self.loss_scale.skip_nonfinite or self.check_loss


def init(options: Options, params: Any) -> _state.LossScaleOptimizerState:
    """Returns the state before the first step."""
    _check_params(params)
    leaves = jax.tree.leaves(params, is_leaf=_models.is_module)
    if leaves and not any(map(_is_parameter, leaves)):
        raise TypeError(
            f"params must hold arrays, got {reprlib.repr(_tree.types_of(params))}. "
            + _state.FUNCTIONAL
        )
    params = _models.trainable(params)
    inner_state = _tree.strongly_typed(_inner.init(options.inner_optimizer, params))
    if _tree.nodes_of(_state.LossScaleOptimizerState, inner_state):
        raise TypeError(
            "inner_optimizer must not contain a LossScaleOptimizer: scaling twice is a "
            "bug."
        )

    def zero():
        return jnp.zeros((), jnp.int32)

    rule = options.loss_scale
    return _state.LossScaleOptimizerState(
        inner_state=inner_state,
        loss_scale_state=_state.within_bounds(rule, rule.init()),
        last_step_applied=jnp.ones((), bool),
        **{name: zero() for name in _state.COUNTERS},
        nonfinite_loss_steps=zero() if options.check_loss else None,
        retries=zero() if options.retries else None,
        skip_reasons=zero(),
    )


def _is_parameter(leaf: Any) -> bool:
    """Whether a leaf may be a parameter: an array, a number or an nnx module."""
    is_number = hasattr(leaf, "dtype") or isinstance(leaf, numbers.Number)
    return is_number or _models.is_module(leaf)


def take_step(
    options: Options,
    grads: Any,
    params: Any,
    state: Any,
    extra: dict[str, Any],
    skip_if: Any = None,
    rule_update: "RuleUpdate | None" = None,
    *,
    returns_params: bool,
) -> tuple[Any, _state.LossScaleOptimizerState]:
    """Takes a step, or skips it.

    Args:
      options: The arguments of the optimizer.
      grads: Unscaled gradients.
      params: The parameters; None if the inner optimizer needs none.
      state: The state.
      extra: Extra arguments of the inner optimizer.
      skip_if: Whether to skip the step, or None; see `LossScaleOptimizer.update`.
      rule_update: The rule's verdict on the gradients; None computes it.
      returns_params: Whether to return the new parameters instead of the updates.
        Updates of a skipped step are -0.0.

    Returns:
      The parameters or the updates, and the new state.
    """
    rule, inner = options.loss_scale, options.inner_optimizer
    _check_step(options, grads, params, state)
    params = _inner.parameters_as_arrays(params, grads)
    may_skip = options.skips or skip_if is not None or rule_update is not None
    if rule_update is None:
        old = state.loss_scale_state
        rule_update = update_rule(rule, grads, old, options.axis_name)
    decision, rule_state = decide(options, rule_update, extra, skip_if)
    if not may_skip:
        decision = decision._replace(should_apply=None)

    def keep(like, inner_state, params):
        result = params if returns_params else jax.tree.map(_tree.zero_update, like[0])
        return result, inner_state

    def run(inputs, inner_state, params):
        grads, extra = inputs
        if "value_fn" in extra:  # For a line search, which also wants the gradients.
            extra = {"grad": grads} | extra
        updates, inner_state = _inner.update(inner, grads, inner_state, params, extra)
        if returns_params:
            # This keeps Python integers among the parameters.
            return _inner.apply_updates(params, updates), inner_state
        return _inner.narrow_like(updates, grads), inner_state

    inner_state = _tree.strongly_typed(state.inner_state)
    result, inner_state = conditional_update(
        decision.should_apply, run, keep, (grads, extra), inner_state, params
    )
    state = state._replace(inner_state=None, loss_scale_state=None)
    state = _state.count_step(state, *decision)
    return result, state._replace(inner_state=inner_state, loss_scale_state=rule_state)


def _check_step(options: Options, grads: Any, params: Any, state: Any) -> None:
    """Raises if an argument of a step is of the wrong type or structure."""
    _state.check_state(state, options.loss_scale)
    _inner.check_dtypes(options.inner_optimizer, state.inner_state, params, grads)
    _check_params(params)
    is_missing = grads is None and params is not None
    if is_missing or isinstance(grads, Iterator):
        got = "None" if is_missing else "an iterator"
        raise TypeError(
            f"grads must be a pytree like the parameters, got {got}. Write "
            "apply_gradients(grads, params, state), also for Keras's zip of the two."
        )


class Decision(NamedTuple):
    """Whether a step is applied, and why not.

    Attributes:
      should_apply: bool[]; None if every step is applied.
      passes: bool[], whether the rule lets the gradients pass.
      at_minimum: bool[], whether the scale could not have been lower.
      loss_is_finite: bool[]; None if the loss is not checked.
      is_vetoed: bool[], whether `skip_if` alone skips the step; None without it.
    """

    should_apply: jax.Array | None
    passes: jax.Array
    at_minimum: jax.Array
    loss_is_finite: jax.Array | None
    is_vetoed: jax.Array | None


def decide(
    options: Options, rule_update: "RuleUpdate", extra: dict[str, Any], skip_if: Any
) -> tuple[Decision, Any]:
    """Decides by the gradients, the loss and `skip_if` whether a step is applied.

    Args:
      options: The arguments of the optimizer.
      rule_update: The rule's verdict on the gradients.
      extra: Extra arguments of the inner optimizer, among them the loss.
      skip_if: Whether to skip the step, or None.

    Returns:
      The decision, and the state of the rule after the step.
    """
    rule, axis_name = options.loss_scale, options.axis_name
    old, new, passes = rule_update
    should_apply = passes
    at_minimum = rule._is_at_minimum(rule(old), rule(new))
    loss_is_finite = is_vetoed = None
    if options.check_loss:
        loss_is_finite = all_finite(_loss_among(extra), axis_name=axis_name)
        should_apply &= loss_is_finite
        # A lower scale does not mend a loss that is not finite.
        kept = _tree.cast_like(_state.within_bounds(rule, old), new)
        new = _tree.select(loss_is_finite, new, kept)
    if skip_if is not None:
        veto = ~on_all_devices(~as_veto(skip_if), axis_name)
        is_vetoed, should_apply = should_apply & veto, should_apply & ~veto
    decision = Decision(should_apply, passes, at_minimum, loss_is_finite, is_vetoed)
    return decision, new


class RuleUpdate(NamedTuple):
    """The verdict of a rule on the gradients of a step.

    Attributes:
      before: The state of the rule before these gradients.
      after: Its state after them.
      passes: bool[], whether the rule lets them pass.
    """

    before: Any
    after: Any
    passes: jax.Array


def update_rule(
    rule: LossScale, grads: Any, old: Any, axis_name: Hashable | None
) -> RuleUpdate:
    """Updates the rule with the gradients."""
    with _hints.hint(_hints.DEVICES, _hints.is_of_axis):
        new, passes = rule.update(grads, old, axis_name=axis_name)
    passes = jnp.asarray(passes, bool)
    # The scale has no derivative.
    return RuleUpdate(old, lax.stop_gradient(_state.within_bounds(rule, new)), passes)


def check_no_state(params: Any) -> None:
    """Raises if parameters hold the state of an optimizer."""
    if _tree.nodes_of(_state.LossScaleOptimizerState, params):
        raise TypeError(
            "params must not hold the state of an optimizer, got one in a "
            f"{type(params).__name__}. {_state.TRAIN_STATE}"
        )


def _check_params(params: Any) -> None:
    """Raises if parameters hold a state; warns if they hold a loss scale."""
    check_no_state(params)

    def check(path, box):
        if [*map(_tree.is_float32_scalar, jax.tree.leaves(box))] == [True]:
            warn(
                f"params{jax.tree_util.keystr(path)} is trained as any parameter. For "
                "with_loss_scale use scale_as_parameter(optimizer), and its init."
            )
        return box

    _tree.map_named(check, "loss_scale", params)


def _loss_among(extra: dict[str, Any]) -> Any:
    """Returns the loss among the extra arguments of a step with `check_loss`."""
    value: Any = extra.get("value")
    is_number = _tree.is_array(value) or type(value) in (int, float)
    if not is_number or jnp.iscomplexobj(value) or np.shape(value) != ():
        raise TypeError(
            f"value must be the loss, a real scalar, got {value!r}. With check_loss "
            "write update(grads, state, params, value=loss), without auxiliary data."
        )
    return value


def as_veto(skip_if: Any) -> jax.Array:
    """Returns the argument `skip_if` of a step as bool[]; TypeError if it is none."""
    veto = jnp.asarray(skip_if) if isinstance(skip_if, bool) else skip_if
    if not _tree.is_array(veto) or (veto.shape, veto.dtype) != ((), jnp.bool_):
        raise TypeError(
            "skip_if must be a bool or an array bool[], True to skip this step, got "
            f"{veto!r}. In minimize it may also be a function that returns one."
        )
    return veto
