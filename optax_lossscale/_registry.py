"""The loss scales by name."""

import numbers

from optax_lossscale._headroom import HeadroomLossScale
from optax_lossscale._logmax import LogMaxLossScale
from optax_lossscale._loss_scale import DynamicLossScale, FixedLossScale, LossScale

BY_NAME = {
    "dynamic": DynamicLossScale,
    "headroom": HeadroomLossScale,
    "logmax": LogMaxLossScale,
}


def get_loss_scale(identifier: LossScale | float | str) -> LossScale:
    """Makes a loss scale of what users write for one.

    Args:
      identifier: A `LossScale`, a number (`FixedLossScale`), "dynamic"
        (`DynamicLossScale()`), "headroom" (`HeadroomLossScale()`) or "logmax"
        (`LogMaxLossScale()`).

    Returns:
      A `LossScale`.

    Raises:
      ValueError: If `identifier` is anything else, or a number below 1.

    Examples:
      >>> from optax_lossscale import get_loss_scale
      >>> get_loss_scale(128)
      FixedLossScale(loss_scale_value=128.0, skip_nonfinite=False)
      >>> get_loss_scale("dynamic").initial_scale
      32768.0
    """
    if isinstance(identifier, LossScale):
        return identifier
    if isinstance(identifier, numbers.Real) and not isinstance(identifier, bool):
        return FixedLossScale(identifier)  # pyright: ignore[reportArgumentType]
    if isinstance(identifier, str) and identifier in BY_NAME:
        return BY_NAME[identifier]()
    names = ", ".join(f'"{name}"' for name in BY_NAME)
    raise ValueError(
        f"A loss scale must be a LossScale instance, a number, or one of {names}, got "
        f"{identifier!r}. (Inside optax.inject_hyperparams, name it in static_args.)"
    )
