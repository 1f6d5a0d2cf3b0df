"""Converts the states of other loss scalers to ours."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from optax_lossscale import _check as check

# Each of these functions converts the state of one peer, without the scale. Arguments
# have the peer's names: counters, hyperparameters with the peer's defaults, and
# optional values, which are keyword-only. It returns the hyperparameters of our rule
# and the counters of our state.


def _rule(interval, growth_factor, backoff_factor, min_scale, **further):
    rule = {"growth_interval": interval, "growth_factor": growth_factor}
    return rule | {"backoff_factor": backoff_factor, "min_scale": min_scale} | further


def _torch(
    _growth_tracker, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000
):
    rule = _rule(growth_interval, growth_factor, backoff_factor, check.SMALLEST_SCALE)
    return rule, {"good_steps": _growth_tracker}


def _flax(
    fin_steps,
    growth_factor=2.0,
    backoff_factor=0.5,
    growth_interval=2000,
    minimum_scale=check.SMALLEST_SCALE,
    *,
    late_growth=True,
):
    interval = growth_interval + late_growth
    rule = _rule(interval, growth_factor, backoff_factor, minimum_scale)
    return rule, {"good_steps": fin_steps}


def _jmp(counter, period=2000, factor=2, min_loss_scale=1.0):
    return _rule(period, factor, 1 / factor, min_loss_scale), {"good_steps": counter}


def _keras(step_counter, dynamic_growth_steps=2000):
    rule = _rule(dynamic_growth_steps, 2.0, 0.5, check.SMALLEST_SCALE)
    return rule, {"good_steps": step_counter}


def _tf_keras(dynamic_counter, dynamic_growth_steps=2000):
    rule = _rule(dynamic_growth_steps, 2.0, 0.5, 1.0)
    return rule, {"good_steps": dynamic_counter}


def _apex_amp(
    unskipped, scale_window=2000, min_loss_scale=None, max_loss_scale=2.0**24
):
    rule = _rule(scale_window, 2.0, 0.5, min_loss_scale, max_scale=max_loss_scale)
    return rule, {"good_steps": unskipped}


def _fp16_optimizer(
    cur_iter,
    last_overflow_iter,
    scale_factor=2.0,
    scale_window=1000,
    min_loss_scale=1.0,
    late_growth=False,
):
    steps = _steps_since(cur_iter=cur_iter, last_overflow_iter=last_overflow_iter)
    if late_growth:
        # The first finite step after the start or after an overflow does not count.
        steps = max(steps - 1, 0)
    rule = _rule(scale_window, scale_factor, 1 / scale_factor, min_loss_scale)
    return rule, {"good_steps": steps % scale_window}


def _deepspeed(
    cur_iter,
    last_overflow_iter,
    cur_hysteresis,
    scale_factor=2.0,
    scale_window=1000,
    min_scale=1.0,
    delayed_shift=2,
    consecutive_hysteresis=False,
    late_growth=True,
):
    rule, counters = _fp16_optimizer(
        cur_iter, last_overflow_iter, scale_factor, scale_window, min_scale, late_growth
    )
    rule["hysteresis"] = delayed_shift
    rule["consecutive_hysteresis"] = consecutive_hysteresis
    return rule, counters | {"hysteresis_left": cur_hysteresis}


def _megatron(
    growth_tracker,
    hysteresis_tracker,
    min_scale=1.0,
    growth_factor=2.0,
    backoff_factor=0.5,
    growth_interval=1000,
    hysteresis=2,
):
    rule = _rule(growth_interval, growth_factor, backoff_factor, min_scale)
    # Megatron's tracker keeps falling below zero.
    left = max(hysteresis_tracker, 0)
    counters = {"good_steps": growth_tracker, "hysteresis_left": left}
    return rule | {"hysteresis": hysteresis}, counters


def _fairseq(
    scale_factor=2.0,
    scale_window=2000,
    tolerance=0.0,
    threshold: Any = None,
    min_loss_scale=1e-4,
    *,
    # A checkpoint holds only the scale, and fairseq resets these.
    _iter=0,
    _last_overflow_iter=-1,
    _last_rescale_iter=-1,
    _overflows_since_rescale=0,
):
    min_scale = max(threshold, min_loss_scale)
    rule = _rule(scale_window, scale_factor, 1 / scale_factor, min_scale)
    steps = _steps_since(_iter=_iter, _last_overflow_iter=_last_overflow_iter)
    return rule | {"tolerance": tolerance}, {
        "good_steps": steps % scale_window,
        "steps": _steps_since(_iter=_iter, _last_rescale_iter=_last_rescale_iter),
        "nonfinite_steps": _overflows_since_rescale,
    }


def _steps_since(**steps: int) -> int:
    """Returns the number of steps taken since the last event."""
    (name, now), (last_name, last) = steps.items()
    if last >= now:
        raise ValueError(f"{last_name} must be below {name}, {now!r}, got {last!r}.")
    return now - last - 1


_fused_optimizer = functools.partial(_fp16_optimizer, late_growth=True)


class Peer(NamedTuple):
    """Another loss scaler.

    Attributes:
      name: Its name in messages.
      scale: Its name for the scale.
      marks: The names by which its state is recognized, separated by spaces.
      convert: One of the functions above.
    """

    name: str
    scale: str
    marks: str
    convert: Callable[..., tuple[dict[str, Any], dict[str, int]]]

    @property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        """The parameters of `convert`."""
        return inspect.signature(self.convert).parameters

    @property
    def needed(self) -> list[str]:
        """The names of all required values."""
        names = [n for n, p in self.parameters.items() if p.kind != p.KEYWORD_ONLY]
        return [self.scale, *names]

    @property
    def defaults(self) -> dict[str, Any]:
        """The defaults of those counters and hyperparameters that have one."""
        defaults = {name: p.default for name, p in self.parameters.items()}
        return {k: v for k, v in defaults.items() if v is not inspect.Parameter.empty}


_UNFUSED = "apex's FP16_Optimizer or DeepSpeed's FP16_UnfusedOptimizer"
PEERS = (
    Peer("PyTorch's GradScaler", "scale", "_growth_tracker", _torch),
    Peer("Flax's DynamicScale", "scale", "fin_steps", _flax),
    Peer("jmp's DynamicLossScale", "loss_scale", "counter", _jmp),
    Peer("Keras's LossScaleOptimizer", "dynamic_scale", "step_counter", _keras),
    Peer("tf_keras's LossScaleOptimizer", "loss_scale", "dynamic_counter", _tf_keras),
    Peer("apex's amp", "loss_scale", "unskipped", _apex_amp),
    Peer(_UNFUSED, "cur_scale", "cur_iter", _fp16_optimizer),
    Peer(
        "DeepSpeed's FP16_Optimizer",
        "cur_scale",
        "cur_iter fp32_groups_flat",
        _fused_optimizer,
    ),
    Peer(
        "DeepSpeed's DynamicLossScaler",
        "cur_scale",
        "cur_iter cur_hysteresis",
        _deepspeed,
    ),
    Peer("Megatron's DynamicGradScaler", "scale", "hysteresis_tracker", _megatron),
    Peer("fairseq's DynamicLossScaler", "loss_scale", "loss_scale tolerance", _fairseq),
)
# Positions in Keras's save_own_variables, after the iteration and the learning rate.
KERAS_POSITIONS = {"2": "step_counter", "3": "dynamic_scale"}
# apex's fp16_utils pickles the LossScaler of amp, which has these attributes.
APEX_ATTRIBUTES = {
    "_loss_scale": "loss_scale",
    "_unskipped": "unskipped",
    "_scale_seq_len": "scale_window",
    "_min_loss_scale": "min_loss_scale",
    "_max_loss_scale": "max_loss_scale",
}
