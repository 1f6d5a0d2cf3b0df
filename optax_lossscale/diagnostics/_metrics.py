"""The state as flat numbers, for logs."""

from typing import Any

import jax
import jax.numpy as jnp

from optax_lossscale._state import COUNTERS, find_state, unbox
from optax_lossscale.diagnostics._common import check_text


def metrics(state: Any, prefix: str = "") -> dict[str, jax.Array]:
    """Returns what there is to log about loss scaling, by flat names.

    A few scalars, ready for TensorBoard, Weights & Biases, a CSV file or a `History`.
    It may be called inside the compiled step, and then waits for nothing.

    Args:
      state: A pytree that holds one `LossScaleOptimizerState`.
      prefix: Comes before each name, "loss_scaling/" for example.

    Returns:
      A dictionary of scalars (of arrays [n] where the state is that of n members, or
      what each of n losses has is meant):
      `loss_scale` and `log2_loss_scale`, f32[]; what else the state of the rule
      holds, `good_steps` for example, i32[]; `last_step_applied`, bool[];
      `skipped_steps`, `consecutive_skipped_steps`, `nonfinite_loss_steps` and
      `stuck_steps`, i32[]. See `LossScaleOptimizerState` for what they are.

    Raises:
      ValueError: If `state` holds none or several of these states.
      TypeError: If `prefix` is not a string.

    Examples:
      >>> import jax.numpy as jnp
      >>> import optax
      >>> from optax_lossscale import LossScaleOptimizer, diagnostics
      >>> state = LossScaleOptimizer(optax.sgd(0.1)).init(jnp.ones(3))
      >>> for name, value in diagnostics.metrics(state, prefix="scaling/").items():
      ...     print(name, value)
      scaling/loss_scale 32768.0
      scaling/log2_loss_scale 15.0
      scaling/good_steps 0
      scaling/hysteresis_left 1
      scaling/last_step_applied True
      scaling/skipped_steps 0
      scaling/consecutive_skipped_steps 0
      scaling/nonfinite_loss_steps 0
      scaling/stuck_steps 0
    """
    check_text("prefix", prefix)
    found = find_state(state)
    scale = jnp.asarray(unbox(found.loss_scale_state.loss_scale), jnp.float32)
    # Of a power of two the mantissa is 1/2: twice that has the logarithm 0, exactly.
    mantissa, exponent = jnp.frexp(scale)
    log2_scale = jnp.log2(2 * mantissa) + (exponent - 1).astype(jnp.float32)
    named = {
        "loss_scale": scale,
        "log2_loss_scale": log2_scale,
        **_numbers_of(found.loss_scale_state),
        "last_step_applied": jnp.asarray(unbox(found.last_step_applied)),
    }
    named |= {name: jnp.asarray(unbox(getattr(found, name))) for name in COUNTERS}
    return {prefix + name: value for name, value in named.items()}


def _numbers_of(loss_scale_state: Any) -> dict[str, jax.Array]:
    """Returns the fields, besides the scale, of the state of any rule."""
    fields = getattr(loss_scale_state, "_asdict", lambda: vars(loss_scale_state))()
    leaves = {name: jax.tree.leaves(field) for name, field in fields.items()}
    return {
        name: jnp.asarray(found[0])
        for name, found in leaves.items()
        if len(found) == 1 and name != "loss_scale"
    }
