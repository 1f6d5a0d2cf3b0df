"""The step itself: advance the loss scale, then run the inner optimizer or keep."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_lossscale._check import accepts, check_loss_value
from optax_lossscale._leaves import count_leaves
from optax_lossscale._loss_scale import at_minimum
from optax_lossscale._losses import (
    check_one_each,
    check_state,
    initial_scales,
    total,
    update_scales,
)
from optax_lossscale._mask import choose, gradients_of
from optax_lossscale._scaling import LossScaling
from optax_lossscale._skip import run_or_skip
from optax_lossscale._state import (
    LossScaleOptimizerState,
    count_step,
    initial_state,
)
from optax_lossscale._tree import (
    all_finite,
    cast_like,
    is_float0,
    select,
    strongly_typed,
    zero_update,
)


class Stepping(LossScaling):
    """What the methods that change the state have in common."""

    _inner: optax.GradientTransformationExtraArgs

    @functools.cached_property
    def _first_state(self):
        def make():
            scales = initial_scales(self._loss_scale, self._num_losses)
            return initial_state(None, scales)

        return jax.eval_shape(make)

    def _run_update(self, grads, inner_state, params, extra):
        return self._inner.update(grads, inner_state, params, **extra)

    def _zero_updates(self, like, _grads, inner_state, params, _extra):
        zeros = jax.tree.map(zero_update, like[0])
        return choose(self._mask, zeros, params), inner_state

    def _run_apply(self, grads, inner_state, params, extra):
        updates, inner_state = self._inner.update(grads, inner_state, params, **extra)
        zeros = jax.tree.map(lambda _: 0, updates)
        changes = choose(self._mask, updates, zeros)
        changes = jax.tree.map(lambda u: 0 if is_float0(u) else u, changes)
        # Narrow parameters and float32 updates are meant to meet here.
        with jax.numpy_dtype_promotion("standard"):
            applied = optax.apply_updates(params, changes)
        return choose(self._mask, applied, updates), inner_state

    def _keep_params(self, _like, _grads, inner_state, params, _extra):
        return params, inner_state

    def _step(
        self,
        run: Callable[..., Any],
        keep: Callable[..., Any],
        grads: Any,
        state: Any,
        params: Any,
        extra: dict[str, Any],
    ) -> tuple[Any, LossScaleOptimizerState]:
        """Advances the loss scale; runs or keeps."""
        if not isinstance(state, LossScaleOptimizerState):
            raise ValueError(
                "state must be the LossScaleOptimizerState that this optimizer's init "
                f"returned, got {type(state).__name__}. Where the optimizer is part "
                "of a chain, call the update of the chain."
            )
        check_state(state, self._first_state)
        if self._num_losses is not None:
            check_one_each("grads", self._num_losses, grads)
        loss_is_finite: Any = True
        if self._check_loss:
            value = extra.get("value")
            check_loss_value(value)
            loss_is_finite = all_finite(value, axis_name=self._axis_name)
            if not accepts(self._inner.update, "value"):
                extra = {k: v for k, v in extra.items() if k != "value"}
        loss_scale_state, decisions = update_scales(
            self._loss_scale,
            self._num_losses,
            gradients_of(self._mask, grads),
            state.loss_scale_state,
            self._axis_name,
        )
        should_apply = jnp.all(decisions)
        if self._check_loss:
            kept = cast_like(strongly_typed(state.loss_scale_state), loss_scale_state)
            loss_scale_state = select(loss_is_finite, loss_scale_state, kept)
            should_apply &= loss_is_finite
        grads = total(self._num_losses, grads)
        if self._num_losses is not None and self._loss_scale.skip_nonfinite:
            # The sum of what is finite may overflow, at whatever scales.
            should_apply &= all_finite(grads, axis_name=self._axis_name)
        # A restored or hand-set state may hold Python numbers.
        inner_state = strongly_typed(state.inner_state)
        skip = self._effective_skip
        result, inner_state = run_or_skip(
            skip, should_apply, run, keep, grads, inner_state, params, extra
        )
        if skip is not None:
            scales = map(self._loss_scale, (state.loss_scale_state, loss_scale_state))
            stuck = ~decisions & at_minimum(self._loss_scale, *scales)
            state = count_step(state, should_apply, loss_is_finite, jnp.any(stuck))
        if self._track_leaves:
            gradients = gradients_of(self._mask, grads)
            leaves = count_leaves(state.leaf_statistics, gradients, self._axis_name)
            state = state._replace(leaf_statistics=leaves)
        return result, state._replace(
            inner_state=inner_state, loss_scale_state=loss_scale_state
        )
