"""Checks, on the host, whether training still makes progress."""

from typing import Any, NamedTuple

import jax
import numpy as np

from optax_lossscale import _check as check
from optax_lossscale._state import find_state, unbox
from optax_lossscale.diagnostics._common import check_host

# Up to this many skips in a row are normal at the start: halving 2**24 down to 1.
START_UP = 24

CALL_INSIDE = (
    "make sure that value_and_grad and get_scaled_loss are called inside the step, "
    "with the current state: a function made once before the loop keeps the first "
    "scale. Then "
)


class Health(NamedTuple):
    """What `check_health` found, in plain Python values.

    For a state of many members or devices, the numbers are those of the worst one.
    For several losses, `loss_scale` is the lowest scale.

    Attributes:
      healthy: Whether training makes progress.
      message: What is wrong and how to fix it, or that nothing is wrong.
      loss_scale: The current loss scale.
      stuck_steps: Steps skipped in a row although the scale was at its minimum.
      consecutive_skipped_steps: Steps skipped since one was applied.
      skipped_steps: Steps skipped so far.
      nonfinite_loss_steps: Steps skipped so far because of the loss.

    Examples:
      >>> import jax.numpy as jnp
      >>> import optax
      >>> from optax_lossscale import LossScaleOptimizer, check_health
      >>> state = LossScaleOptimizer(optax.sgd(0.1)).init(jnp.ones(3))
      >>> health = check_health(state)
      >>> health.healthy, health.loss_scale, health.skipped_steps
      (True, 32768.0, 0)
    """

    healthy: bool
    message: str
    loss_scale: float
    stuck_steps: int
    consecutive_skipped_steps: int
    skipped_steps: int
    nonfinite_loss_steps: int


def check_health(
    state: Any,
    *,
    patience: int = 100,
    max_consecutive_skipped_steps: int = 1000,
    raise_error: bool = True,
) -> Health:
    """Tells whether training still makes progress, and what to do if not.

    A compiled step cannot raise an error, so training may skip every step unnoticed.
    Call this from time to time, for example when you log losses. It waits for the
    state and copies a few numbers to the host.

    Args:
      state: The state after a step; a pytree that holds one
        `LossScaleOptimizerState`. For many members (`jax.vmap`), devices (`jax.pmap`)
        or losses (`num_losses`), the worst one counts. A loss scale that is nan or
        not between 2**-126 and 2**126 is never healthy.
      patience: The number of `stuck_steps` that makes training unhealthy: steps
        skipped in a row although the scale was at its minimum. (For a rule without
        `min_scale`, such as `FixedLossScale`: although the scale did not fall.)
      max_consecutive_skipped_steps: The number of steps skipped in a row, for any
        reason, that makes training unhealthy.
      raise_error: Whether to raise an error if training is not healthy.

    Returns:
      A `Health`. If steps are never skipped (a `FixedLossScale` without
      `skip_nonfinite` and `check_loss`), it always looks healthy. If more than 24
      steps in a row were skipped while the scale fell, and the loss does not explain
      them, the message also warns of functions that keep the first scale.

    Raises:
      FloatingPointError: If training is not healthy, unless `raise_error=False`.
      TypeError: Under a transformation of JAX, such as `jax.jit`; if an argument is
        of the wrong type.
      ValueError: If `state` holds none or several of these states, or has no members;
        if an argument is out of its range.

    Examples:
      >>> import jax.numpy as jnp
      >>> import optax
      >>> from optax_lossscale import LossScaleOptimizer, check_health
      >>> optimizer = LossScaleOptimizer(optax.sgd(0.1), initial_scale=2.0)
      >>> params = jnp.ones(3)
      >>> state = optimizer.init(params)
      >>> for _ in range(5):
      ...     _, state = optimizer.update(params * jnp.nan, state)
      >>> check_health(state).stuck_steps
      4
      >>> health = check_health(state, patience=4, raise_error=False)
      >>> print(health.message.split(":")[0])
      The loss scale, 1.0, could not go lower, and 4 steps in a row were still skipped
    """
    patience = check.count("patience", patience)
    limit = check.count("max_consecutive_skipped_steps", max_consecutive_skipped_steps)
    check.boolean("raise_error", raise_error)
    health, where = _read(find_state(state), patience, limit)
    first = CALL_INSIDE if may_be_frozen(health) else ""
    if is_damaged(health.loss_scale):
        message = (
            f"The loss scale is {health.loss_scale}{where}, and must be at least "
            "2**-126 and at most 2**126: the state is damaged, and gradients are "
            "wrong. Restore an earlier checkpoint, or begin the scale anew: "
            "state._replace(loss_scale_state=optimizer.init(params).loss_scale_state)."
        )
    elif health.stuck_steps >= patience:
        message = (
            f"The loss scale, {health.loss_scale}, could not go lower, and "
            f"{health.stuck_steps} steps in a row were still skipped{where}: look at "
            "the loss. If it is not finite, the data or the parameters hold nan or "
            "inf, or the forward pass overflows (check_loss=True counts such steps "
            f"separately and keeps the scale). If it is finite, {first}lower the scale "
            "if it is high (min_scale, or the fixed scale), compute what overflows in "
            "float32, clip gradients or lower the learning rate. (With "
            "check_updates=True the updates may be non-finite.) "
            "Parameters have not changed since the last applied step."
        )
    elif health.consecutive_skipped_steps >= limit:
        message = (
            f"{health.consecutive_skipped_steps} steps in a row were skipped{where}, "
            f"the loss scale is {health.loss_scale}, and {health.nonfinite_loss_steps} "
            "steps had a non-finite loss so far: look at the loss. If it is not "
            "finite, the data or the parameters hold nan or inf, or the forward pass "
            f"overflows. If it is finite, {first}start from a lower "
            "initial_scale or use a smaller backoff_factor. "
            "Parameters have not changed since the last applied step."
        )
    else:
        return health
    if raise_error:
        raise FloatingPointError(message)
    return health._replace(healthy=False, message=message)


def is_damaged(scale: Any) -> Any:
    """Whether a scale, or each of several, is out of bounds or nan."""
    low, high = check.SMALLEST_SCALE, check.LARGEST_SCALE
    return np.logical_not((scale >= low) & (scale <= high))


def may_be_frozen(health: Health) -> bool:
    """Whether the scale fell for many steps and gradients still overflowed.

    Skips that the loss explains do not count, and a scale that was always at its
    minimum did not fall.
    """
    skips = health.consecutive_skipped_steps
    unexplained = skips - health.nonfinite_loss_steps
    return unexplained > START_UP and skips > health.stuck_steps


def _read(state: Any, patience: int, limit: int) -> tuple[Health, str]:
    """Returns the numbers of the worst member, and which one that is."""
    names = Health._fields[3:]
    arrays = [state.loss_scale_state.loss_scale, *(getattr(state, n) for n in names)]
    arrays = [unbox(array) for array in arrays]
    check_host("check_health", arrays)
    scale, *counts = jax.device_get(arrays)
    if np.ndim(scale) > np.ndim(counts[0]):
        # Several losses share the counts. Take the lowest scale.
        first = np.argmin(np.where(is_damaged(scale), -np.inf, scale), -1)
        scale = np.take_along_axis(scale, first[..., None], -1)[..., 0]
    scale, *counts = np.broadcast_arrays(scale, *counts)
    if not scale.size:
        raise ValueError(
            f"state is that of no members: its arrays are of shape {scale.shape}. "
            "Make it with jax.vmap over at least one."
        )
    stuck_steps, consecutive, *_ = counts
    # Take the member that is nearest to a limit, or furthest beyond it.
    measure = np.maximum(stuck_steps / patience, consecutive / limit)
    measure = np.ravel(np.where(is_damaged(scale), np.inf, measure))
    worst = np.lexsort((np.ravel(scale), -measure))[0]
    where = f" (member {worst} of {scale.size})" if scale.ndim else ""
    numbers = [int(np.ravel(count)[worst]) for count in counts]
    health = Health(True, "No sign of trouble.", float(scale.flat[worst]), *numbers)
    return health, where
