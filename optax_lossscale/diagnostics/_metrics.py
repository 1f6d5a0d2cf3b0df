"""The state as scalars with flat names, for logs."""

from typing import Any

import jax
import jax.numpy as jnp

from optax_lossscale._state import find_state
from optax_lossscale._tree import unbox
from optax_lossscale.diagnostics import _bits


def metrics(state: Any, prefix: str = "") -> dict[str, jax.Array]:
    """Returns the scalars to log about loss scaling, by flat names.

    The result is a record: add your own numbers to it, and pass it to TensorBoard,
    Weights & Biases or a CSV file. `plot_history` draws a list of records. You may call
    this inside the compiled step, where it does not wait for the device.

    The scale is the one that the state holds. A step stores it within the bounds of the
    rule. After you restore a state or set its scale by hand, the first step clips the
    scale, and until then only `optimizer.current_loss_scale(state)` knows the bounds.

    Args:
      state: A pytree that holds one `LossScaleOptimizerState`.
      prefix: Put before each name, "loss_scaling/" for example.

    Returns:
      A dictionary of scalars, or of arrays [n] if the state belongs to n members:
      `loss_scale` and `log2_loss_scale`, f32[]; the other fields of the rule's state,
      `good_steps` (i32[]) for example; `last_step_applied`, bool[]; `skipped_steps`,
      `consecutive_skipped_steps`, `stuck_steps` and `skip_reasons`, i32[]; with
      `check_loss=True` also `nonfinite_loss_steps`, i32[], and with `retries` also
      `retries`, i32[]. `LossScaleOptimizerState` describes them. The logarithm of a
      damaged scale is -inf (for 0), inf, or nan (for a negative number too). If a field
      of the rule's state has the name of another of these scalars, the other one is
      returned, and the field is not.

    Raises:
      ValueError: If `state` holds no such state, or several.
      TypeError: If `prefix` is not a string.

    Examples:
      >>> import jax.numpy as jnp
      >>> import optax
      >>> from optax_lossscale import LossScaleOptimizer, diagnostics
      >>> state = LossScaleOptimizer(optax.sgd(0.1)).init(jnp.ones(3))
      >>> record = {"step": 0} | diagnostics.metrics(state, prefix="scaling/")
      >>> print(record["scaling/loss_scale"], record["scaling/skipped_steps"])
      32768.0 0
      >>> print(record["scaling/good_steps"], record["scaling/last_step_applied"])
      0 True
    """
    state = find_state(state)
    scale = jnp.asarray(unbox(state.loss_scale_state.loss_scale), jnp.float32)
    scales = {"loss_scale": scale, "log2_loss_scale": _log2(scale)}
    counts = numbers_of(state._replace(inner_state=None, loss_scale_state=None))
    # The scales come first, and a rule's field of the same name replaces neither.
    named = scales | numbers_of(state.loss_scale_state) | counts | scales
    return {prefix + name: value for name, value in named.items()}


# Compiled: otherwise its constants would be implicit transfers to the device.
@jax.jit
def _log2(scale: jax.Array) -> jax.Array:
    """Returns the logarithm, exact for powers of two, including subnormal ones."""
    (bits,) = _bits.magnitudes(scale)
    log2 = _bits.exponents(bits).astype(jnp.float32) + _bits.log2_mantissas(bits)
    log2 = jnp.where(bits == 0, -jnp.inf, log2)
    log2 = jnp.where(bits < _bits.INFINITY, log2, scale)
    return jnp.where(jnp.signbit(scale) & (bits > 0), jnp.nan, log2)


def numbers_of(state: Any) -> dict[str, jax.Array]:
    """Returns the fields of a state that are one array, except the scale."""
    fields = getattr(state, "_asdict", lambda: vars(state))()
    leaves = ((name, jax.tree.leaves(field)) for name, field in fields.items())
    single = ((name, arrays) for name, arrays in leaves if len(arrays) == 1)
    return {name: jnp.asarray(x) for name, (x,) in single if name != "loss_scale"}
