"""Makes rules from the names and numbers that users pass."""

import numbers

from optax_lossscale import _check as check
from optax_lossscale._rules.base import LossScale
from optax_lossscale._rules.dynamic import DynamicLossScale
from optax_lossscale._rules.fixed import FixedLossScale
from optax_lossscale._rules.headroom import HeadroomLossScale

BY_NAME = {"dynamic": DynamicLossScale, "headroom": HeadroomLossScale}


def get_loss_scale(identifier: LossScale | float | str) -> LossScale:
    """Converts a name or number to a `LossScale`.

    Args:
      identifier: A `LossScale`, a number (`FixedLossScale`), "dynamic"
        (`DynamicLossScale()`) or "headroom" (`HeadroomLossScale()`).

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
        return FixedLossScale(check.fixed_scale("A fixed loss scale", identifier))
    if isinstance(identifier, str) and identifier in BY_NAME:
        return BY_NAME[identifier]()
    names = ", ".join(f'"{name}"' for name in BY_NAME)
    hint = "(Inside optax.inject_hyperparams, add it to static_args.)"
    if isinstance(identifier, bool):
        hint = f"Keras's second argument is a keyword here: dynamic={identifier}."
    elif isinstance(identifier, type) and issubclass(identifier, LossScale):
        hint = f"Call the class to make an instance: {identifier.__name__}()."
    raise ValueError(
        f"A loss scale must be a LossScale instance, a number, or one of {names}, got "
        f"{identifier!r}. {hint}"
    )


def keras_loss_scale(
    dynamic: bool, initial_scale: float | None, dynamic_growth_steps: int | None
) -> LossScale:
    """Makes a rule from Keras's arguments."""
    if not check.boolean("dynamic", dynamic):
        if initial_scale is None or dynamic_growth_steps is not None:
            raise ValueError(
                "dynamic=False needs initial_scale and takes no dynamic_growth_steps, "
                f"got {initial_scale!r} and {dynamic_growth_steps!r}."
            )
        return FixedLossScale(check.fixed_scale("initial_scale", initial_scale))
    initial, steps = initial_scale, dynamic_growth_steps
    initial = DynamicLossScale.initial_scale if initial is None else initial
    steps = DynamicLossScale.growth_interval if steps is None else steps
    # Checked here: otherwise the error would name growth_interval.
    return DynamicLossScale(initial, check.count("dynamic_growth_steps", steps))
