"""The step itself: advance the loss scale, then run the inner optimizer or keep."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_lossscale._numerics import all_finite
from optax_lossscale._step.inner import (
    accepts,
    check_gradients,
    combine,
    expand_none,
    narrow_like,
    partition,
)
from optax_lossscale._step.leaf_statistics import check_leaves, count_leaves
from optax_lossscale._step.mask import choose, gradients_of
from optax_lossscale._step.scaler import (
    add_evidence,
    check_one_each,
    check_state,
    total,
    update_scales,
)
from optax_lossscale._step.scaling import LossScaling
from optax_lossscale._step.skip import run_or_skip, small_unless
from optax_lossscale._step.state import (
    LossScaleOptimizerState,
    count_applied,
    count_step,
)
from optax_lossscale._tree import (
    cast_like,
    is_float0,
    is_real,
    select,
    strongly_typed,
    zero_update,
)


class Stepping(LossScaling):
    """What the methods that change the state have in common."""

    _inner: optax.GradientTransformationExtraArgs

    def _return_updates(self, updates, grads, _params):
        return narrow_like(updates, grads)

    def _zero_updates(self, like, inner_state, params):
        zeros = jax.tree.map(zero_update, like[0])
        return choose(self._mask, zeros, params), inner_state

    def _apply_updates(self, updates, _grads, params):
        zeros = jax.tree.map(lambda _: 0, updates)
        changes = choose(self._mask, updates, zeros)
        changes = jax.tree.map(lambda u: 0 if is_float0(u) else u, changes)
        # Narrow parameters and float32 updates are meant to meet here.
        with jax.numpy_dtype_promotion("standard"):
            applied = optax.apply_updates(params, changes)
        return choose(self._mask, applied, updates)

    def _keep_params(self, _like, inner_state, params):
        return params, inner_state

    def _check_step(self, grads, state):
        if not isinstance(state, LossScaleOptimizerState):
            raise ValueError(
                "state must be the LossScaleOptimizerState that this optimizer's init "
                f"returned, got {type(state).__name__}. Where the optimizer is part "
                "of a chain, call the update of the chain."
            )
        check_state(state, self._expected_state)
        check_leaves(state.leaf_statistics, self._track_leaves)
        check_gradients(grads)
        if self._num_losses is not None:
            check_one_each("grads", self._num_losses, grads)

    def _step(
        self, grads: Any, state: Any, params: Any, extra: dict[str, Any], applies: bool
    ) -> tuple[Any, LossScaleOptimizerState]:
        """Advances the loss scale; runs the inner optimizer, or keeps everything.

        Args:
          grads: Unscaled gradients.
          state: The state.
          params: The parameters.
          extra: Extra arguments of the inner optimizer.
          applies: Whether to return the new parameters, or the updates.
        """
        self._check_step(grads, state)
        loss_is_finite = None
        if self._check_loss:
            value = extra.get("value")
            check_loss_value(value)
            loss_is_finite = all_finite(value, axis_name=self._axis_name)
            if not accepts(self._inner.update, "value"):
                extra = {k: v for k, v in extra.items() if k != "value"}

        evidence = gradients_of(self._mask, grads)
        grads = total(self._num_losses, grads)
        # A restored or hand-set state may hold Python numbers.
        inner_state = strongly_typed(state.inner_state)
        inputs, seen = partition(self._inner, grads, inner_state, params)
        is_whole = seen is params
        if not is_whole and "grad" in extra:
            grad, _ = partition(self._inner, extra["grad"], inner_state, params)
            extra = extra | {"grad": grad}
        finish = self._apply_updates if applies else self._return_updates
        keep = self._keep_params if applies else self._zero_updates
        seen = strongly_typed(seen) if applies else seen

        def step(inputs, inner_state, params):
            grads, extra = inputs
            updates, inner_state = self._inner.update(
                grads, inner_state, params, **extra
            )
            return finish(updates, grads, params), inner_state

        run: Callable[..., Any] = step
        skip = self._effective_skip
        updates_are_finite = None
        if self._check_updates:
            # The decision needs the updates, so they are computed in any case.
            usable = all_finite(evidence, axis_name=self._axis_name)
            if loss_is_finite is not None:
                usable &= loss_is_finite
            given, options = small_unless(usable, (inputs, extra))
            updates, new = self._inner.update(given, inner_state, seen, **options)
            finished = finish(updates, given, seen)
            checked = updates if applies else finished
            checked = checked if is_whole else combine(grads, checked, None)
            checked = gradients_of(self._mask, checked)
            updates_are_finite = all_finite(checked, axis_name=self._axis_name)
            evidence = add_evidence(self._num_losses, evidence, updates_are_finite)

            def run_before(*_):
                return finished, new

            run = run_before

        loss_scale_state, decisions = update_scales(
            self._loss_scale,
            self._num_losses,
            evidence,
            state.loss_scale_state,
            self._axis_name,
        )
        should_apply = jnp.all(decisions)
        if updates_are_finite is not None:
            should_apply &= updates_are_finite
        if loss_is_finite is not None:
            kept = cast_like(strongly_typed(state.loss_scale_state), loss_scale_state)
            loss_scale_state = select(loss_is_finite, loss_scale_state, kept)
            should_apply &= loss_is_finite
        if self._num_losses is not None and self._loss_scale.skip_nonfinite:
            # The sum of what is finite may overflow, at whatever scales.
            should_apply &= all_finite(grads, axis_name=self._axis_name)

        result, inner_state = run_or_skip(
            skip, should_apply, run, keep, (inputs, extra), inner_state, seen
        )
        if not is_whole:
            result = combine(grads, result, params if applies else None)
        if skip is None:
            state = count_applied(state)
        else:
            scales = map(self._loss_scale, (state.loss_scale_state, loss_scale_state))
            stuck = ~decisions & self._loss_scale._is_at_minimum(*scales)
            state = count_step(state, should_apply, loss_is_finite, jnp.any(stuck))
        if self._track_leaves:
            gradients = grads if is_whole else expand_none(grads, params)
            gradients = gradients_of(self._mask, gradients)
            leaves = count_leaves(state.leaf_statistics, gradients, self._axis_name)
            state = state._replace(leaf_statistics=leaves)
        return result, state._replace(
            inner_state=inner_state, loss_scale_state=loss_scale_state
        )


def check_loss_value(value: Any) -> None:
    """Checks that `value` can be the loss of a step."""
    if value is None:
        raise TypeError(
            "With check_loss=True a step needs the loss, and value= is missing. Pass "
            "the unscaled loss, as value_and_grad returns it: update(grads, state, "
            "params, value=loss) or apply_gradients(grads, params, state, value=loss). "
            "minimize passes it by itself, Flax's TrainState.apply_gradients does not."
        )
    if not is_real(value) or np.shape(value) != ():
        raise TypeError(
            f"value must be the loss, a real scalar, got {value!r}. Reduce the loss to "
            "a scalar first, and pass it without auxiliary data."
        )
