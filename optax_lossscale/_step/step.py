"""The training step: scale the loss, unscale the gradients, run or keep."""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.core import Tracer

from optax_lossscale._numerics import all_finite
from optax_lossscale._rules.fixed import FixedLossScale
from optax_lossscale._step.inner import (
    accepts,
    as_parameters,
    check_gradients,
    check_loss_value,
    check_no_loss_scale,
    expand_none,
    leave_out_none,
    put_back_none,
    without_constants,
)
from optax_lossscale._step.leaf_statistics import (
    check_leaves,
    count_leaves,
    initial_leaves,
)
from optax_lossscale._step.mask import Mask
from optax_lossscale._step.outcome import Outcome, Parameters
from optax_lossscale._step.scaler import Scaler
from optax_lossscale._step.skip import (
    Skip,
    barrier_on_cpu,
    choose_skip,
    is_recording,
    run_or_skip,
    small_unless,
)
from optax_lossscale._step.state import (
    LossScaleOptimizerState,
    check_rule_state,
    check_state,
    count_applied,
    count_step,
    find_state,
    find_states,
    initial_state,
    unbox,
    warn_if_in_multi_steps,
)
from optax_lossscale._tree import (
    cast_like,
    select,
    strongly_typed,
)


@dataclasses.dataclass(frozen=True)
class Step:
    """What a `LossScaleOptimizer` does; the public methods say what each is for.

    Attributes:
      inner: The inner optimizer, in float32 and behind the mask.
      scaler: The rule, for one loss or several.
      mask: Which leaves are gradients.
      axis_name: The axes over which devices agree.
      skip: How a step is skipped.
      check_loss: Whether a step is skipped if the loss is not finite.
      check_updates: Whether a step is skipped if the updates are not finite.
      track_leaves: Whether non-finite gradients are counted by leaf.
    """

    inner: optax.GradientTransformationExtraArgs
    scaler: Scaler
    mask: Mask
    axis_name: Hashable | None
    skip: Skip
    check_loss: bool
    check_updates: bool
    track_leaves: bool

    def init(self, params: Any) -> LossScaleOptimizerState:
        """Returns the state before the first step."""
        params = without_constants(params)
        if jax.tree.leaves(params):
            # optax.tree_map_params passes a tree without leaves, which fits no mask.
            self.mask.expand(params)
        inner_state = strongly_typed(self.inner.init(params))
        check_no_loss_scale(inner_state)
        if find_states(inner_state):
            raise TypeError(
                "inner_optimizer holds a LossScaleOptimizer, and scaling twice is a "
                "bug. Keep the outermost one."
            )
        leaves = initial_leaves(params) if self.track_leaves else None
        state = initial_state(inner_state, self.scaler.init())
        return state._replace(leaf_statistics=leaves)

    # Reading the scale.

    @functools.cached_property
    def _expected_state(self) -> LossScaleOptimizerState:
        """The shapes of a state, without those of the inner optimizer."""
        return jax.eval_shape(lambda: initial_state(None, self.scaler.init()))

    def _rule_state(self, state):
        found = find_state(state).loss_scale_state
        check_rule_state(found, self._expected_state.loss_scale_state)
        return found

    def current_scales(self, state: Any) -> jax.Array:
        """Returns the scale, or those of several losses (or members, or devices)."""
        return self.scaler.rule.loss_scale(self._rule_state(state))

    def _held_scales(self, state):
        """Returns the scales as the state holds them, if there is one for each loss."""
        scales, wanted = unbox(self._rule_state(state).loss_scale), self.scaler.shape
        if jnp.shape(scales) != wanted:
            raise ValueError(
                "There must be one loss scale for each loss: that in the state must be "
                f"of shape {wanted}, got {jnp.shape(scales)}. Where the state is that "
                "of many members or devices, call inside the vmap or pmap that made it."
            )
        return scales

    def _scales(self, state: Any) -> jax.Array:
        """Returns the scales to compute with."""
        is_fixed = isinstance(self.scaler.rule, FixedLossScale)
        is_traced = isinstance(self._held_scales(state), Tracer)
        if not is_fixed and not is_traced and is_recording():
            # Python shows a warning once for each place, which is here.
            warnings.warn(
                "The loss scale is a constant in a function that JAX traces. If that "
                "function is compiled once and called in every step, the scale will "
                "never change there. Make the state an argument of the function, and "
                "call value_and_grad and get_scaled_loss inside the training step, "
                "not once, before the loop.",
                UserWarning,
                stacklevel=1,
            )
        # The scale cancels: it has no derivative.
        return lax.stop_gradient(self.current_scales(state))

    def scale(self, loss: Any, state: Any) -> Any:
        """Scales a loss, or what a function returns."""
        if callable(loss):
            return lambda *args, **kwargs: self.scale(loss(*args, **kwargs), state)
        return self.scaler.scale(loss, self._scales(state))

    def unscale(self, grads: Any, state: Any) -> Any:
        """Unscales gradients."""
        warn_if_in_multi_steps(state)
        return self._unscale(grads, self._scales(state))

    def _unscale(self, grads, scales):
        grads = barrier_on_cpu(self._effective_skip, grads)
        return self.mask.combine(self.scaler.unscale(grads, scales), grads)

    def value_and_grad(
        self, fun: Callable[..., Any], state: Any, has_aux: bool, transform: Any
    ) -> Callable[..., tuple[Any, Any]]:
        """Returns a function of the value and the unscaled gradients of `fun`."""
        self._held_scales(state)  # Raises early.

        def value_and_grad(*args, **kwargs):
            # Read once: scaling and unscaling must agree, and a state may change in
            # place.
            scales = self._scales(state)
            warn_if_in_multi_steps(state)
            scaled = self.scaler.value_and_grad(fun, scales, has_aux, transform)
            value, grads = scaled(*args, **kwargs)
            return value, self._unscale(grads, scales)

        return value_and_grad

    # Changing the state.

    @property
    def _effective_skip(self) -> Skip | None:
        if self.check_updates:
            # The updates decide, so they have to be there first.
            return "where"
        if not self.scaler.rule.skip_nonfinite and not self.check_loss:
            return None
        return choose_skip(self.skip, self.axis_name)

    def minimize(
        self,
        loss_fn: Callable[..., Any],
        params: Any,
        state: Any,
        has_aux: bool,
        transform: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[Any, LossScaleOptimizerState, Any]:
        """Takes a whole step: loss, gradients, update."""
        # Unscaled once, for check and step: the unscaling is fused with the end of the
        # gradient. Unscaling again in the step was slower (CPU).
        value_and_grad = self.value_and_grad(loss_fn, state, has_aux, transform)
        value, grads = value_and_grad(params, *args, **kwargs)
        grad = self.scaler.sum_gradients(grads)

        def value_fn(proposed):
            proposed = self.mask.complete(proposed, params)
            proposed = put_back_none(grad, proposed, params)
            value = loss_fn(as_parameters(proposed, params), *args, **kwargs)
            return self.scaler.sum_losses(value[0] if has_aux else value)

        loss = self.scaler.sum_losses(value[0] if has_aux else value)
        extra = {"value": loss, "grad": grad, "value_fn": value_fn}
        taken = {k: v for k, v in extra.items() if accepts(self.inner.update, k)}
        if self.check_loss:
            taken["value"] = loss
        return *self(grads, state, params, taken, Parameters(self.mask)), value

    def __call__(
        self,
        grads: Any,
        state: Any,
        params: Any,
        extra: dict[str, Any],
        outcome: Outcome,
    ) -> tuple[Any, LossScaleOptimizerState]:
        """Advances the scales; runs the inner optimizer, or keeps everything.

        Args:
          grads: Unscaled gradients.
          state: The state.
          params: The parameters.
          extra: Extra arguments of the inner optimizer.
          outcome: What to return.
        """
        self._check(grads, state)
        loss_is_finite, extra = self._check_value(extra)
        evidence, grads = self.mask.partition(grads), self.scaler.sum_gradients(grads)
        # A restored or hand-set state may hold Python numbers.
        inner_state = strongly_typed(state.inner_state)
        inputs, seen = self._leave_out_none(grads, extra, inner_state, params)
        is_whole = seen is params
        seen = strongly_typed(seen)

        def make_updates(inputs, inner_state, params):
            grads, extra = inputs
            updates, new = self.inner.update(grads, inner_state, params, **extra)
            return outcome.narrow(updates, grads), new

        updates_are_finite, made = None, None
        if self.check_updates:
            # The decision needs the updates, so they are computed in any case.
            usable = all_finite(evidence, axis_name=self.axis_name)
            if loss_is_finite is not None:
                usable &= loss_is_finite
            made = make_updates(small_unless(usable, inputs), inner_state, seen)
            updates = made[0] if is_whole else put_back_none(grads, made[0], None)
            updates_are_finite = all_finite(
                self.mask.partition(updates), axis_name=self.axis_name
            )

        def run(inputs, inner_state, params):
            updates, new = made or make_updates(inputs, inner_state, params)
            return outcome.finish(updates, params), new

        before = state.loss_scale_state
        after, decisions = self.scaler.update(
            evidence, updates_are_finite, before, self.axis_name
        )
        should_apply = self.scaler.should_apply(decisions, grads, self.axis_name)
        if updates_are_finite is not None:
            should_apply &= updates_are_finite
        if loss_is_finite is not None:
            kept = cast_like(strongly_typed(before), after)
            after = select(loss_is_finite, after, kept)
            should_apply &= loss_is_finite

        skip = self._effective_skip
        result, inner_state = run_or_skip(
            skip, should_apply, run, outcome.keep, inputs, inner_state, seen
        )
        if not is_whole:
            result = outcome.put_back(grads, result, params)
        if skip is None:
            state = count_applied(state)
        else:
            rule = self.scaler.rule
            is_stuck = ~decisions & rule._is_at_minimum(rule(before), rule(after))
            is_stuck = jnp.any(is_stuck)
            state = count_step(state, should_apply, loss_is_finite, is_stuck)
        if self.track_leaves:
            gradients = grads if is_whole else expand_none(grads, params)
            gradients = self.mask.partition(gradients)
            leaves = count_leaves(state.leaf_statistics, gradients, self.axis_name)
            state = state._replace(leaf_statistics=leaves)
        return result, state._replace(inner_state=inner_state, loss_scale_state=after)

    def _check(self, grads, state):
        if not isinstance(state, LossScaleOptimizerState):
            raise ValueError(
                "state must be the LossScaleOptimizerState that this optimizer's init "
                f"returned, got {type(state).__name__}. Where the optimizer is part "
                "of a chain, call the update of the chain."
            )
        check_state(state, self._expected_state)
        check_leaves(state.leaf_statistics, self.track_leaves)
        check_gradients(grads)

    def _check_value(self, extra):
        """Returns whether the loss is finite (None: not checked), and the arguments."""
        if not self.check_loss:
            return None, extra
        value = extra.get("value")
        check_loss_value(value)
        if not accepts(self.inner.update, "value"):
            extra = {k: v for k, v in extra.items() if k != "value"}
        return all_finite(value, axis_name=self.axis_name), extra

    def _leave_out_none(self, grads, extra, inner_state, params):
        """Returns the inputs and the parameters without those that have no gradient."""
        given, seen = leave_out_none(self.inner, grads, inner_state, params)
        if seen is not params and "grad" in extra:
            grad, _ = leave_out_none(self.inner, extra["grad"], inner_state, params)
            extra = extra | {"grad": grad}
        return (given, extra), seen
