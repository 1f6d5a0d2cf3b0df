"""What the arguments of other loss scalers are in ours.

A function takes a peer's arguments, by the peer's names and with the peer's defaults,
and returns our loss scale. The guide says the same for users; the tests compare.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from examples.log_max import LogMax
from optax_lossscale import (
    DynamicLossScale,
    FixedLossScale,
    LossScale,
    TolerantLossScale,
)


class Peer(NamedTuple):
    """Another loss scaler: how its class is recorded, and its arguments in ours."""

    recorded: str
    ours: Callable[..., LossScale]


# By the names that the guide has for them.
PEERS: dict[str, Peer] = {}


def peer(name, recorded):
    """Adds a function to the table of peers."""

    def add(ours):
        PEERS[name] = Peer(recorded, ours)
        return ours

    return add


# The smallest scale there is, for peers that have no minimum.
NO_MINIMUM = 2.0**-126


def dynamic(scale, interval, factor=2.0, min_scale=1.0, **further):
    """Makes a rule of peers that back off by the factor by which they grow."""
    if min_scale is None:
        min_scale = NO_MINIMUM
    return DynamicLossScale(scale, interval, factor, 1 / factor, min_scale, **further)


@peer("TensorFlow, dynamic", "tensorflow.compat.v1.mixed_precision.DynamicLossScale")
def tensorflow_dynamic(initial_loss_scale=2**15, increment_period=2000, multiplier=2.0):
    return dynamic(initial_loss_scale, increment_period, multiplier)


@peer("TensorFlow, fixed", "tensorflow.compat.v1.mixed_precision.FixedLossScale")
def tensorflow_fixed(loss_scale_value):
    return FixedLossScale(loss_scale_value)


@peer("tf_keras", "tf_keras.mixed_precision.LossScaleOptimizer")
def tf_keras(dynamic=True, initial_scale=2**15, dynamic_growth_steps=2000):
    if not dynamic:
        return FixedLossScale(initial_scale)
    return DynamicLossScale(initial_scale, dynamic_growth_steps)


@peer("Keras 3", "keras.optimizers.LossScaleOptimizer")
def keras(initial_scale=2.0**15, dynamic_growth_steps=2000):
    return dynamic(initial_scale, dynamic_growth_steps, min_scale=None)


@peer("PyTorch", "torch.amp.GradScaler")
def torch(
    init_scale=2.0**16, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000
):
    factors = growth_factor, backoff_factor
    return DynamicLossScale(init_scale, growth_interval, *factors, NO_MINIMUM)


@peer("Flax, up to 0.12.12", "flax.training.dynamic_scale.DynamicScale")
def flax(
    growth_factor=2.0,
    backoff_factor=0.5,
    growth_interval=2000,
    scale=2.0**16,
    minimum_scale=NO_MINIMUM,
):
    factors, minimum = (growth_factor, backoff_factor), minimum_scale or NO_MINIMUM
    return DynamicLossScale(scale, growth_interval + 1, *factors, minimum)


@peer("jmp", "jmp.DynamicLossScale")
def jmp(loss_scale=2.0**15, period=2000, factor=2, min_loss_scale=1.0, dtype="float32"):
    scale = np.dtype(dtype).type(loss_scale)
    return dynamic(scale, period, factor, max(min_loss_scale, NO_MINIMUM))


@peer("mpx", "mpx.DynamicLossScaling")
def mpx(loss_scaling=2.0**15, min_loss_scaling=1.0, factor=2, period=2000):
    return dynamic(loss_scaling, period, factor, min_loss_scaling, max_scale=65504.0)


@peer("fairseq", "fairseq.optim.dynamic_loss_scaler.DynamicLossScaler")
def fairseq(
    init_scale=2.0**15,
    scale_factor=2.0,
    scale_window=2000,
    tolerance=0.0,
    threshold=None,
    min_loss_scale=1e-4,
):
    factors, minimum = (scale_factor, 1 / scale_factor), threshold or min_loss_scale
    return TolerantLossScale(tolerance, init_scale, scale_window, *factors, minimum)


@peer("DeepSpeed, ZeRO", "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler")
def deepspeed(
    init_scale=2**16,
    scale_window=1000,
    min_scale=1,
    delayed_shift=2,
    consecutive_hysteresis=False,
    raise_error_at_min_scale=True,
    scale_factor=2.0,
):
    del raise_error_at_min_scale  # Ours stays at the minimum.
    further = {"hysteresis": delayed_shift}
    further["consecutive_hysteresis"] = consecutive_hysteresis
    return dynamic(init_scale, scale_window, scale_factor, min_scale, **further)


DYNAMIC_LOSS_ARGS = {"init_scale": 2**16, "scale_window": 1000, "min_scale": 1}


@peer("DeepSpeed, no ZeRO", "deepspeed.runtime.fp16.fused_optimizer.FP16_Optimizer")
def deepspeed_fp16_optimizer(dynamic_loss_args=DYNAMIC_LOSS_ARGS):
    # It ignores a hysteresis, and does not count the first finite step, as ours does.
    return deepspeed(**dynamic_loss_args, delayed_shift=1)


@peer("Megatron", "megatron.core.optimizer.grad_scaler.DynamicGradScaler")
def megatron(
    initial_scale=2**32,
    min_scale=1.0,
    growth_factor=2.0,
    backoff_factor=0.5,
    growth_interval=1000,
    hysteresis=2,
):
    numbers = initial_scale, growth_interval, growth_factor, backoff_factor, min_scale
    return DynamicLossScale(*numbers, hysteresis=hysteresis)


@peer("apex, amp", "apex.amp.scaler.LossScaler")
def apex_amp(
    init_scale=2.0**16,
    scale_factor=2.0,
    scale_window=2000,
    min_loss_scale=None,
    max_loss_scale=2.0**24,
):
    del scale_factor  # Apex ignores it too: the factor is 2.
    scale, maximum = min(init_scale, max_loss_scale), max_loss_scale
    return dynamic(scale, scale_window, 2.0, min_loss_scale, max_scale=maximum)


@peer("apex, fp16_utils", "apex.fp16_utils.loss_scaler.DynamicLossScaler")
def apex_fp16_utils(init_scale=2**32, scale_factor=2.0, scale_window=1000):
    return dynamic(init_scale, scale_window, scale_factor)


@peer("apex, contrib", "apex.contrib.optimizers.fp16_optimizer.FP16_Optimizer")
def apex_contrib(cur_scale=2**16, scale_factor=2, scale_window=1000):
    return dynamic(cur_scale, scale_window, scale_factor)


@peer("OpenSeq2Seq, Backoff", "open_seq2seq BackoffScaler")
def openseq2seq_backoff(
    scale_min=1.0, scale_max=2.0**24, step_factor=2.0, step_window=2000
):
    maximum = {"max_scale": scale_max}
    return dynamic(scale_max, step_window, step_factor, scale_min, **maximum)


@peer("OpenSeq2Seq, LogMax", "open_seq2seq LogMaxScaler")
def openseq2seq_logmax(
    scale_min=1.0,
    scale_max=2.0**24,
    log_max=16.0,
    beta1=0.99,
    beta2=0.999,
    overflow_std_dev=3.09,
):
    del log_max  # What an overflow is taken for: 2 to the power of 2**log_max.
    bounds = {"min_scale": scale_min, "max_scale": scale_max}
    return LogMax(scale_min, beta1, beta2, overflow_std_dev, **bounds)


@peer("Optax", "optax.apply_if_finite")
def optax_apply_if_finite(max_consecutive_errors):
    del max_consecutive_errors  # Ours applies no non-finite step, however many come.
    return FixedLossScale(1.0, skip_nonfinite=True)
