"""The state as scalars with flat names, for logs."""

from typing import Any

import jax
import jax.numpy as jnp

from optax_lossscale._state import COUNTERS, find_state, unbox
from optax_lossscale.diagnostics import _bits
from optax_lossscale.diagnostics._common import check_text


def metrics(state: Any, prefix: str = "") -> dict[str, jax.Array]:
    """Returns the scalars to log about loss scaling, by flat names.

    You can pass them to TensorBoard, Weights & Biases, a CSV file or a `History`. You
    may call this inside the compiled step, where it does not wait for the device.

    Args:
      state: A pytree that holds one `LossScaleOptimizerState`.
      prefix: Put before each name, "loss_scaling/" for example.

    Returns:
      A dictionary of scalars, or of arrays [n] if the state belongs to n members:
      `loss_scale` and `log2_loss_scale`, f32[]; the other fields of the rule's state,
      `good_steps` for example, i32[]; `last_step_applied`, bool[]; `skipped_steps`,
      `consecutive_skipped_steps`, `nonfinite_loss_steps` and `stuck_steps`, i32[].
      `LossScaleOptimizerState` describes them. With several losses, each has its own
      scale: `loss_scale_0`, `loss_scale_1`. The logarithm of a damaged scale is -inf
      (for 0), inf, or nan (for a negative number too).

    Raises:
      ValueError: If `state` holds no such state, or several.
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
        # Several losses: each has its own scale.
        named = {
            f"{name}_{i}": column
            for name, value in named.items()
            for i, column in enumerate(_columns(value))
        }
    named["last_step_applied"] = applied
    named |= {name: jnp.asarray(unbox(getattr(found, name))) for name in COUNTERS}
    return {prefix + name: value for name, value in named.items()}


# Compiled: otherwise its constants would be implicit transfers to the device.
@jax.jit
def _log2(scale: jax.Array) -> jax.Array:
    """Returns the logarithm, exact for powers of two, including subnormal ones."""
    (bits,) = _bits.magnitudes(scale)
    log2 = _bits.exponents(bits).astype(jnp.float32) + _bits.log2_mantissas(bits)
    log2 = jnp.where(bits == 0, -jnp.inf, log2)
    log2 = jnp.where(bits < _bits.infinity(bits), log2, scale)
    return jnp.where(jnp.signbit(scale) & (bits > 0), jnp.nan, log2)


@jax.jit
def _columns(value: jax.Array) -> list[jax.Array]:
    return [value[..., i] for i in range(value.shape[-1])]


def _numbers_of(loss_scale_state: Any) -> dict[str, jax.Array]:
    """Returns the fields of any rule's state, except the scale."""
    fields = getattr(loss_scale_state, "_asdict", lambda: vars(loss_scale_state))()
    leaves = {name: jax.tree.leaves(field) for name, field in fields.items()}
    return {
        name: jnp.asarray(found[0])
        for name, found in leaves.items()
        if len(found) == 1 and name != "loss_scale"
    }
