"""What a step returns: the updates, or the parameters with the updates applied."""

import dataclasses
from typing import Any

import jax
import optax

from optax_lossscale._step.inner import narrow_like, put_back_none
from optax_lossscale._step.mask import Mask
from optax_lossscale._tree import is_float0, zero_update


@dataclasses.dataclass(frozen=True)
class Updates:
    """For `LossScaleOptimizer.update`: updates, or -0.0 if the step is skipped."""

    mask: Mask

    def narrow(self, updates: Any, grads: Any) -> Any:
        """Casts the updates to the dtypes in which the step returns them."""
        return narrow_like(updates, grads)

    def finish(self, updates: Any, params: Any) -> Any:
        """Returns what an applied step returns."""
        return updates

    def keep(self, like: Any, inner_state: Any, params: Any) -> tuple[Any, Any]:
        """Returns what a skipped step returns, and the state of the inner optimizer.

        Args:
          like: The result of an applied step, or its shapes and dtypes.
          inner_state: The state before the step.
          params: The parameters that go into the step.
        """
        zeros = jax.tree.map(zero_update, like[0])
        return self.mask.combine(zeros, params), inner_state

    def put_back(self, grads: Any, result: Any, params: Any) -> Any:
        """Puts back the parameters that were left out because they have no gradient."""
        return put_back_none(grads, result, None)


@dataclasses.dataclass(frozen=True)
class Parameters:
    """For `apply_gradients` and `minimize`: new parameters, or old ones on a skip."""

    mask: Mask

    def narrow(self, updates: Any, grads: Any) -> Any:
        """See `Updates`. Only the new parameters are rounded, not the updates."""
        return updates

    def finish(self, updates: Any, params: Any) -> Any:
        """See `Updates`."""
        zeros = jax.tree.map(lambda _: 0, updates)
        changes = self.mask.combine(updates, zeros)
        changes = jax.tree.map(lambda u: 0 if is_float0(u) else u, changes)
        # Float16 parameters and float32 updates are added on purpose.
        with jax.numpy_dtype_promotion("standard"):
            applied = optax.apply_updates(params, changes)
        return self.mask.combine(applied, updates)

    def keep(self, like: Any, inner_state: Any, params: Any) -> tuple[Any, Any]:
        """See `Updates`."""
        return params, inner_state

    def put_back(self, grads: Any, result: Any, params: Any) -> Any:
        """See `Updates`."""
        return put_back_none(grads, result, params)
