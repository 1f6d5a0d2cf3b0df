"""The training step: scale the loss, unscale the gradients, run or keep."""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer

from optax_lossscale import _state
from optax_lossscale._rules.fixed import FixedLossScale
from optax_lossscale._scaling import all_finite
from optax_lossscale._step import (
    inner as _inner,
    leaf_statistics as _leaves,
    skip as _skip,
)
from optax_lossscale._step.options import Options
from optax_lossscale._step.outcome import Parameters, Updates
from optax_lossscale._step.scaler import Scaler
from optax_lossscale._tree import cast_like, select, strongly_typed


class Step:
    """Does the work of a `LossScaleOptimizer`, whose methods are documented there."""

    def __init__(self, options: Options):
        inner = _inner.check_optimizer("inner_optimizer", options.inner_optimizer)
        self.options = options
        self.scaler = Scaler(options.loss_scale, options.num_losses)
        self.mask = options.mask
        self.inner = self.mask.wrap(_inner.in_float32(inner))
        self.all_finite = functools.partial(all_finite, axis_name=options.axis_name)

    def init(self, params: Any) -> _state.LossScaleOptimizerState:
        """Returns the state before the first step."""
        params = _inner.without_constants(params)
        if jax.tree.leaves(params):
            # optax.tree_map_params passes a tree without leaves, which fits no mask.
            self.mask.expand(params)
        inner_state = strongly_typed(self.inner.init(params))
        _inner.check_no_loss_scale(inner_state)
        if _state.nodes_of(_state.LossScaleOptimizerState, inner_state):
            raise TypeError(
                "inner_optimizer holds a LossScaleOptimizer, and scaling twice is a "
                "bug. Keep only the outer one."
            )
        leaves = _leaves.initial_leaves(params) if self.options.track_leaves else None
        state = _state.initial_state(inner_state, self.scaler.init())
        return state._replace(leaf_statistics=leaves)

    # Reading the scale.

    @functools.cached_property
    def _expected_state(self) -> _state.LossScaleOptimizerState:
        """The shapes of a state, without those of the inner optimizer."""
        return jax.eval_shape(lambda: _state.initial_state(None, self.scaler.init()))

    def _rule_state(self, state):
        found = _state.find_state(state).loss_scale_state
        _state.check_rule_state(found, self._expected_state.loss_scale_state)
        return found

    def current_scales(self, state: Any) -> jax.Array:
        """Returns the scale, or those of several losses (or members, or devices)."""
        return self.scaler.rule.loss_scale(self._rule_state(state))

    def _held_scales(self, state):
        """Returns the scales in the state, if there is one for each loss."""
        scales = _state.unbox(self._rule_state(state).loss_scale)
        return self.scaler.check_scales(scales)

    def _scales(self, state: Any) -> jax.Array:
        """Returns the scales to compute with."""
        is_fixed = isinstance(self.scaler.rule, FixedLossScale)
        is_traced = isinstance(self._held_scales(state), Tracer)
        if not is_fixed and not is_traced and _skip.is_recording():
            # Warn from this line: Python shows a warning once for each line.
            warnings.warn(
                "The loss scale is a constant in a function that JAX traces. If that "
                "function is compiled once and called in every step, the scale never "
                "changes there. Make the state an argument of the function, and "
                "call value_and_grad and get_scaled_loss inside the training step, "
                "not once before the loop.",
                UserWarning,
                stacklevel=1,
            )
        # The scale cancels out, so it has no derivative.
        return lax.stop_gradient(self.current_scales(state))

    def scale(self, loss: Any, state: Any) -> Any:
        """Scales a loss, or a function that returns one."""
        if callable(loss):
            return lambda *args, **kwargs: self.scale(loss(*args, **kwargs), state)
        return self.scaler.scale(loss, self._scales(state))

    def unscale(self, grads: Any, state: Any) -> Any:
        """Unscales gradients."""
        _state.warn_if_in_multi_steps(state)
        return self._unscale(grads, self._scales(state))

    def _unscale(self, grads, scales):
        grads = _skip.barrier_on_cpu(self.options.effective_skip, grads)
        return self.mask.combine(self.scaler.unscale(grads, scales), grads)

    def value_and_grad(
        self, fun: Callable[..., Any], state: Any, has_aux: bool, transform: Any
    ) -> Callable[..., tuple[Any, Any]]:
        """Makes a function that returns the value and unscaled gradients of `fun`."""
        if not callable(fun):
            raise TypeError(
                "The loss function, the first argument of value_and_grad and minimize, "
                f"must be callable, got {type(fun).__name__}."
            )
        self._held_scales(state)  # Raises early.

        def value_and_grad(*args, **kwargs):
            # Read once: scaling and unscaling must agree, and a state may change in
            # place.
            scales = self._scales(state)
            _state.warn_if_in_multi_steps(state)
            scaled = self.scaler.value_and_grad(fun, scales, has_aux, transform)
            value, grads = scaled(*args, **kwargs)
            return value, self._unscale(grads, scales)

        return value_and_grad

    # Changing the state.

    def minimize(
        self,
        value_and_grad: Callable[..., Any],
        apply_gradients: Callable[..., Any],
        loss_fn: Callable[..., Any],
        params: Any,
        state: Any,
        has_aux: bool,
        transform: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[Any, _state.LossScaleOptimizerState, Any]:
        """Takes a whole step: loss, gradients, update."""
        # Unscale once, for both check and step: XLA fuses it with the end of the
        # gradient. Unscaling again in the step was slower (CPU).
        value, grads = value_and_grad(
            loss_fn, state, has_aux=has_aux, transform=transform
        )(params, *args, **kwargs)
        grad = self.scaler.sum_gradients(grads)

        def value_fn(proposed):
            proposed = self.mask.complete(proposed, params)
            proposed = _inner.put_back_none(grad, proposed, params)
            value = loss_fn(_inner.as_parameters(proposed, params), *args, **kwargs)
            return self.scaler.sum_losses(value[0] if has_aux else value)

        loss = self.scaler.sum_losses(value[0] if has_aux else value)
        extra = {"value": loss, "grad": grad, "value_fn": value_fn}
        taken = {k: v for k, v in extra.items() if _inner.accepts(self.inner.update, k)}
        if self.options.check_loss:
            taken["value"] = loss
        return *apply_gradients(grads, params, state, **taken), value

    def update(
        self, grads: Any, state: Any, params: Any, extra: dict[str, Any]
    ) -> tuple[Any, _state.LossScaleOptimizerState]:
        """Returns the updates of a step, and the new state."""
        self.mask.check_params(params)
        return self._run(grads, state, params, extra, Updates(self.mask))

    def apply(
        self, grads: Any, params: Any, state: Any, extra: dict[str, Any]
    ) -> tuple[Any, _state.LossScaleOptimizerState]:
        """Returns the parameters after a step, and the new state."""
        return self._run(grads, state, params, extra, Parameters(self.mask))

    def _run(self, grads, state, params, extra, outcome):
        """Advances the scales; runs the inner optimizer, or keeps everything.

        Args:
          grads: Unscaled gradients.
          state: The state.
          params: The parameters.
          extra: Extra arguments of the inner optimizer.
          outcome: What to return.
        """
        self._check(grads, state)
        own_grads, grads = self.mask.partition(grads), self.scaler.sum_gradients(grads)
        loss_is_finite, extra = self._check_value(extra)
        # A restored or hand-set state may hold Python numbers.
        inner_state = strongly_typed(state.inner_state)
        inputs, inner_params = self._leave_out_none(grads, extra, inner_state, params)
        all_have_gradients = inner_params is params
        inner_params = strongly_typed(inner_params)

        def make_updates(inputs, inner_state, params):
            grads, extra = inputs
            updates, new = self.inner.update(grads, inner_state, params, **extra)
            return outcome.narrow(updates, grads), new

        updates_are_finite, made = None, None
        if self.options.check_updates:
            # The decision needs the updates, so they are always computed.
            usable = self.all_finite(own_grads)
            if loss_is_finite is not None:
                usable &= loss_is_finite
            made = make_updates(
                _skip.small_unless(usable, inputs), inner_state, inner_params
            )
            updates = made[0]
            if not all_have_gradients:
                updates = _inner.put_back_none(grads, updates, None)
            updates_are_finite = self.all_finite(self.mask.partition(updates))

        def run(inputs, inner_state, params):
            updates, new = made or make_updates(inputs, inner_state, params)
            return outcome.finish(updates, params), new

        state, should_apply = self._decide(
            own_grads, grads, state, loss_is_finite, updates_are_finite
        )
        skip, keep = self.options.effective_skip, outcome.keep
        result, inner_state = _skip.run_or_skip(
            skip, should_apply, run, keep, inputs, inner_state, inner_params
        )
        if not all_have_gradients:
            result = outcome.put_back(grads, result, params)
            grads = _inner.expand_none(grads, params)
        statistics = state.leaf_statistics
        if self.options.track_leaves:
            statistics = _leaves.count_leaves(
                statistics, self.mask.partition(grads), self.options.axis_name
            )
        return result, state._replace(
            inner_state=inner_state, leaf_statistics=statistics
        )

    def _decide(self, own_grads, grads, state, loss_is_finite, updates_are_finite):
        """Returns the state with new scales and counters, and whether to apply."""
        before, axis_name = state.loss_scale_state, self.options.axis_name
        after, decisions = self.scaler.update(
            own_grads, updates_are_finite, before, axis_name
        )
        should_apply = self.scaler.should_apply(decisions, grads, axis_name)
        if updates_are_finite is not None:
            should_apply &= updates_are_finite
        if loss_is_finite is not None:
            kept = cast_like(strongly_typed(before), after)
            after = select(loss_is_finite, after, kept)
            should_apply &= loss_is_finite
        if self.options.effective_skip is None:
            state = _state.count_applied(state)
        else:
            rule = self.scaler.rule
            stuck = ~decisions & rule._is_at_minimum(rule(before), rule(after))
            stuck = jnp.any(stuck)
            state = _state.count_step(state, should_apply, loss_is_finite, stuck)
        return state._replace(loss_scale_state=after), should_apply

    def _check(self, grads, state):
        if not isinstance(state, _state.LossScaleOptimizerState):
            raise ValueError(
                "state must be the LossScaleOptimizerState that this optimizer's init "
                f"returned, got {type(state).__name__}. The order of arguments is "
                "update(grads, state, params), but apply_gradients(grads, params, "
                "state) and minimize(loss_fn, params, state). If the optimizer is part "
                "of another one, such as a chain, call the update of that."
            )
        _state.check_state(state, self._expected_state)
        _leaves.check_leaves(state.leaf_statistics, self.options.track_leaves)
        _inner.check_gradients(grads)

    def _check_value(self, extra):
        """Returns whether the loss is finite (None: not checked), and the arguments."""
        if not self.options.check_loss:
            return None, extra
        value = extra.get("value")
        _inner.check_loss_value(value)
        if not _inner.accepts(self.inner.update, "value"):
            extra = {k: v for k, v in extra.items() if k != "value"}
        return self.all_finite(value), extra

    def _leave_out_none(self, grads, extra, inner_state, params):
        """Returns inputs and parameters, without parameters that have no gradient."""
        fit = functools.partial(_inner.leave_out_none, self.inner)
        given, inner_params = fit(grads, inner_state, params)
        if inner_params is not params and "grad" in extra:
            extra = extra | {"grad": fit(extra["grad"], inner_state, params)[0]}
        return (given, extra), inner_params
