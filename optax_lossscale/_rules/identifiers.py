"""Makes rules from the names and numbers that users pass."""

import dataclasses
import numbers
from collections.abc import Mapping
from typing import Any, Literal

from optax_lossscale import _check as check
from optax_lossscale._rules.base import LossScale
from optax_lossscale._rules.dynamic import DynamicLossScale
from optax_lossscale._rules.fixed import FixedLossScale
from optax_lossscale._rules.headroom import HeadroomLossScale
from optax_lossscale._rules.tolerant import TolerantLossScale

RuleName = Literal["dynamic", "headroom"]
BY_NAME = {"dynamic": DynamicLossScale, "headroom": HeadroomLossScale}


def get_loss_scale(identifier: LossScale | float | RuleName) -> LossScale:
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
    raise ValueError(
        f"A loss scale must be a LossScale instance, a number, or one of {[*BY_NAME]}, "
        f"got {identifier!r}. (Keras's second argument is a keyword here, dynamic=. "
        "Inside optax.inject_hyperparams, add the loss scale to static_args.)"
    )


def check_keywords(kwargs: Mapping[str, Any]) -> None:
    """Raises if arguments of an optimizer are those of a rule, or of PyTorch's scaler.

    Args:
      kwargs: Arguments that the optimizer does not have.
    """
    renamed = {"init_scale": "initial_scale"}  # PyTorch, and Apex.
    given = {renamed.get(name, name): value for name, value in kwargs.items()}
    written = ", ".join(f"{name}={value!r}" for name, value in given.items())
    if given.keys() == {"initial_scale"}:  # The optimizer takes it as well.
        raise TypeError(
            f"{', '.join(kwargs)} is initial_scale here. Write LossScaleOptimizer("
            f"inner, {written})."
        )
    for rule in (
        DynamicLossScale,
        FixedLossScale,
        TolerantLossScale,
        HeadroomLossScale,
    ):
        if given and given.keys() <= {x.name for x in dataclasses.fields(rule)}:
            raise TypeError(
                f"{', '.join(kwargs)} must be passed to the loss scale. Write "
                f"LossScaleOptimizer(inner, {rule.__name__}({written}))."
            )


def keras_loss_scale(
    dynamic: bool, initial: float | None, steps: int | None
) -> LossScale:
    """Makes a rule from `dynamic`, `initial_scale`, `dynamic_growth_steps` of Keras."""
    if not check.boolean("dynamic", dynamic):
        if steps is not None:
            raise ValueError(f"dynamic_growth_steps needs dynamic=True, got {steps!r}.")
        if initial is None:
            raise ValueError("dynamic=False needs initial_scale, the fixed scale.")
        return FixedLossScale(check.fixed_scale("initial_scale", initial))
    initial = DynamicLossScale.initial_scale if initial is None else initial
    steps = DynamicLossScale.growth_interval if steps is None else steps
    # Checked here: otherwise the error would name growth_interval.
    return DynamicLossScale(initial, check.count("dynamic_growth_steps", steps))
