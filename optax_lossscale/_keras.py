"""Keras's way to say which loss scale is wanted."""

from optax_lossscale._check import check_bool, check_count, check_scale
from optax_lossscale._loss_scale import DynamicLossScale, FixedLossScale, LossScale


def keras_loss_scale(
    dynamic: bool, initial_scale: float | None, dynamic_growth_steps: int | None
) -> LossScale:
    """Makes a loss scale of the arguments that Keras has for one."""
    if not check_bool("dynamic", dynamic):
        if initial_scale is None or dynamic_growth_steps is not None:
            raise ValueError(
                "dynamic=False needs initial_scale, which is the scale then, and takes "
                f"no dynamic_growth_steps: got initial_scale={initial_scale!r} and "
                f"dynamic_growth_steps={dynamic_growth_steps!r}."
            )
        return FixedLossScale(check_scale("initial_scale", initial_scale, at_least=1.0))
    initial, steps = initial_scale, dynamic_growth_steps
    initial = DynamicLossScale.initial_scale if initial is None else initial
    steps = DynamicLossScale.growth_interval if steps is None else steps
    # Checked here, as the error would name growth_interval otherwise.
    return DynamicLossScale(initial, check_count("dynamic_growth_steps", steps))
