"""The state as flat numbers, for logs."""

from typing import Any

import jax
import jax.numpy as jnp

from optax_lossscale._step.state import COUNTERS, find_state, unbox
from optax_lossscale.diagnostics._bits import (
    exponents,
    infinity,
    log2_mantissas,
    magnitudes,
)
from optax_lossscale.diagnostics._common import check_text


def metrics(state: Any, prefix: str = "") -> dict[str, jax.Array]:
    """Returns what there is to log about loss scaling, by flat names.

    A few scalars, ready for TensorBoard, Weights & Biases, a CSV file or a `History`.
    It may be called inside the compiled step, and then waits for nothing.

    Args:
      state: A pytree that holds one `LossScaleOptimizerState`.
      prefix: Comes before each name, "loss_scaling/" for example.

    Returns:
      A dictionary of scalars (of arrays [n] where the state is that of n members):
      `loss_scale` and `log2_loss_scale`, f32[]; what else the state of the rule
      holds, `good_steps` for example, i32[]; `last_step_applied`, bool[];
      `skipped_steps`, `consecutive_skipped_steps`, `nonfinite_loss_steps` and
      `stuck_steps`, i32[]. See `LossScaleOptimizerState` for what they are. Of
      several losses each has its scale: `loss_scale_0`, `loss_scale_1`. Where a
      scale is damaged, its logarithm is -inf (of 0), inf or nan (also below 0).

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
    applied = jnp.asarray(unbox(found.last_step_applied))
    named = {"loss_scale": scale, "log2_loss_scale": _log2(scale)}
    named |= _numbers_of(found.loss_scale_state)
    if scale.ndim > applied.ndim:
        # Several losses, of which each has its own.
        named = {
            f"{name}_{i}": column
            for name, value in named.items()
            for i, column in enumerate(_columns(value))
        }
    named["last_step_applied"] = applied
    named |= {name: jnp.asarray(unbox(getattr(found, name))) for name in COUNTERS}
    return {prefix + name: value for name, value in named.items()}


# Compiled, as constants outside of it would be implicit transfers to the device.
@jax.jit
def _log2(scale: jax.Array) -> jax.Array:
    """Returns the logarithm, exact for powers of two, subnormal ones among them."""
    (bits,) = magnitudes(scale)
    log2 = exponents(bits).astype(jnp.float32) + log2_mantissas(bits)
    log2 = jnp.where(bits == 0, -jnp.inf, log2)
    log2 = jnp.where(bits < infinity(bits), log2, scale)
    return jnp.where(jnp.signbit(scale) & (bits > 0), jnp.nan, log2)


@jax.jit
def _columns(value: jax.Array) -> list[jax.Array]:
    return [value[..., i] for i in range(value.shape[-1])]


def _numbers_of(loss_scale_state: Any) -> dict[str, jax.Array]:
    """Returns the fields, besides the scale, of the state of any rule."""
    fields = getattr(loss_scale_state, "_asdict", lambda: vars(loss_scale_state))()
    leaves = {name: jax.tree.leaves(field) for name, field in fields.items()}
    return {
        name: jnp.asarray(found[0])
        for name, found in leaves.items()
        if len(found) == 1 and name != "loss_scale"
    }
