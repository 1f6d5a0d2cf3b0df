"""Imports the saved state of another library's loss scaler."""

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from optax_lossscale import _check as check
from optax_lossscale._rules.dynamic import DynamicLossScale
from optax_lossscale._rules.other_libraries import (
    APEX_ATTRIBUTES,
    KERAS_POSITIONS,
    PEERS,
    Peer,
)
from optax_lossscale._rules.tolerant import TolerantLossScale


def import_state(
    saved: Any, **hyperparameters: Any
) -> tuple[DynamicLossScale | TolerantLossScale, Any]:
    """Makes a rule and its state from what another library saved.

    Training continues with the same scales and skips as in that library, as long as
    the scale stays between 2**-126 and 2**126.

    Args:
      saved: One of

        - PyTorch: `GradScaler.state_dict()`;
        - Flax: a `DynamicScale`, or its `flax.serialization.to_state_dict`;
        - jmp: a `DynamicLossScale`;
        - Keras 3: a `LossScaleOptimizer`, its `variables`, what its
          `save_own_variables` stored, or a dictionary with `step_counter` and
          `dynamic_scale`;
        - tf_keras: a `LossScaleOptimizer`, or a dictionary with `loss_scale` and
          `dynamic_counter` (`loss_scale/current_loss_scale` and
          `loss_scale/good_steps` in a checkpoint);
        - apex: `amp.state_dict()`; an `FP16_Optimizer` or `DynamicLossScaler`;
        - DeepSpeed: a `DynamicLossScaler`, which the ZeRO optimizers save under
          `loss_scaler`; an `FP16_Optimizer`;
        - Megatron: `DynamicGradScaler.state_dict()`, which its optimizers save under
          `grad_scaler`;
        - fairseq: a `DynamicLossScaler`, or the state of the optimizer in a
          checkpoint, which holds only the scale: fairseq then resets its counters too.

        For any of them you can pass the object, its `state_dict()`, or a dictionary
        with the same names. Other names in it are ignored.
      **hyperparameters: Values that were not saved or that you want to replace, by
        the library's own names. An error lists those that are missing, for example
        `dynamic_growth_steps` for the variables of Keras, or `growth_interval` and
        others for Megatron. (Under `jax.jit` jmp replaces `min_loss_scale` by 1.)
        One name is our own: `late_growth`, whether the scale grows one step later
        than its interval says. Flax up to 0.12.12 always does so: True is the default.
        DeepSpeed does so in the first interval after the start or an overflow, in
        `FP16_Optimizer` and, from 0.17.1 on, in `DynamicLossScaler`. With True, steps
        that DeepSpeed did not count are not counted here; after the next overflow
        this scale grows one step earlier.

    Returns:
      A rule, whose initial scale is the current one, and its state. The rule is a
      `TolerantLossScale` for fairseq, a `DynamicLossScale` for the others. To continue
      with them:

          optimizer = LossScaleOptimizer(inner_optimizer, loss_scale)
          opt_state = optimizer.init(params)
          opt_state = opt_state._replace(loss_scale_state=loss_scale_state)

    Raises:
      ValueError: If `saved` comes from none of these libraries, or holds several loss
        scalers; if a value in it or in the hyperparameters is missing, unknown, of
        the wrong type or out of its range. The message names it.

    Examples:
      >>> from optax_lossscale import import_state
      >>> saved = {
      ...     "scale": 1024.0,
      ...     "growth_factor": 2.0,
      ...     "backoff_factor": 0.5,
      ...     "growth_interval": 2000,
      ...     "_growth_tracker": 1999,
      ... }
      >>> loss_scale, state = import_state(saved)
      >>> state, _ = loss_scale.update(1.0, state)
      >>> float(state.loss_scale)
      2048.0

    References:
      `torch.amp.GradScaler`; `flax.training.dynamic_scale.DynamicScale`;
      `jmp.DynamicLossScale`; `keras.optimizers.LossScaleOptimizer`;
      `tf.keras.mixed_precision.LossScaleOptimizer`; `apex.amp`; `DynamicLossScaler`
      and `FP16_Optimizer`, DeepSpeed; `DynamicGradScaler`, Megatron-LM;
      `DynamicLossScaler`, fairseq.
    """
    fields = {**_fields(saved), **hyperparameters}
    peer = _recognize(saved, fields)
    known = [peer.scale, *peer.parameters]
    if unknown := [key for key in hyperparameters if key not in known]:
        raise ValueError(
            f"The state of {peer.name} has no {_listed(unknown)}, only "
            f"{_listed(known)}."
        )
    if missing := [key for key in peer.needed if key not in fields]:
        defaults = [f"{k}={v!r}" for k, v in peer.defaults.items()]
        raise ValueError(
            f"The saved state of {peer.name} lacks {_listed(missing)}. Pass missing "
            "values by keyword (the defaults of that library are "
            f"{', '.join(defaults)})."
        )
    numbers = {key: _check(peer, key, fields[key]) for key in known if key in fields}
    scale = numbers.pop(peer.scale)
    try:
        rule, counters = peer.convert(**numbers)
    except ValueError as error:
        raise ValueError(f"Damaged state of {peer.name}: {error}") from error
    lowest, highest = rule["min_scale"], rule.get("max_scale", check.LARGEST_SCALE)
    if not lowest <= scale <= highest:
        raise ValueError(
            f"Damaged state of {peer.name}: {peer.scale} must lie between the minimum, "
            f"{lowest!r}, and the maximum, {highest!r}, got {scale!r}."
        )
    make = TolerantLossScale if "tolerance" in rule else DynamicLossScale
    loss_scale = make(initial_scale=scale, **rule)
    interval, steps = loss_scale.growth_interval, counters["good_steps"]
    if steps >= interval:
        raise ValueError(
            f"Damaged state of {peer.name}: {known[1]} must be below {interval}, where "
            f"the scale grows, got {steps!r}. (A fixed scale is "
            f"FixedLossScale({scale!r}).)"
        )
    arrays = {name: jnp.asarray(count, jnp.int32) for name, count in counters.items()}
    return loss_scale, loss_scale.init()._replace(**arrays)


def _fields(saved: Any) -> dict[str, Any]:
    """Returns the saved values, by the names of the library that saved them."""
    if callable(getattr(saved, "state_dict", None)):
        saved = saved.state_dict()
    if isinstance(saved, Mapping):
        if not saved:
            raise ValueError(
                "saved is empty, like the state of a PyTorch GradScaler with "
                "enabled=False or of Megatron's ConstantGradScaler, so there is no "
                "scale to import. For a constant scale use FixedLossScale(scale), for "
                "a disabled scaler FixedLossScale(1.0)."
            )
        scalers = [k for k in saved if re.fullmatch(r"(loss|grad)_scaler\d*", str(k))]
        if len(scalers) > 1:
            raise ValueError(
                f"saved holds several loss scalers, {_listed(scalers)}. Import one at "
                f"a time: saved[{scalers[0]!r}]."
            )
        if scalers:
            return _fields(saved[scalers[0]])
        if all(isinstance(key, str) and key.isdecimal() for key in saved):
            names = KERAS_POSITIONS.items()
            return {name: saved[key] for key, name in names if key in saved}
        return dict(saved)
    if isinstance(saved, list | tuple) and not hasattr(saved, "_fields"):
        named = {getattr(variable, "name", None): variable for variable in saved}
        return {name: named[name] for name in KERAS_POSITIONS.values() if name in named}
    names = {**APEX_ATTRIBUTES, **{name: name for name in _CHECKS}}
    found = [(names[key], getattr(saved, key)) for key in names if hasattr(saved, key)]
    # Leave out methods of these names, such as jmp's scale and apex's loss_scale.
    return {name: value for name, value in found if not callable(value)}


def _recognize(saved: Any, fields: dict[str, Any]) -> Peer:
    """Returns the peer that saved the state."""
    found = [peer for peer in PEERS if fields.keys() >= set(peer.marks.split())]
    # DeepSpeed's states have all names of apex's, and more.
    marks = [set(peer.marks.split()) for peer in found]
    found = [
        peer for peer in found if not any(set(peer.marks.split()) < m for m in marks)
    ]
    if len(found) == 1:
        return found[0]
    known = "; ".join(f"{_listed(peer.marks.split())}: {peer.name}" for peer in PEERS)
    raise ValueError(
        "saved is recognized by its names and the keyword arguments, which must fit "
        f"exactly one of {{{known}}}, got a {type(saved).__name__} "
        f"with {_listed(fields)}."
    )


def _check_minimum(key: str, value: Any) -> float:
    # Zero means no minimum.
    number = check.number(key, value)
    if number < 0:
        raise ValueError(f"{key} must not be negative, got {value!r}.")
    return check.scale(key, max(number, check.SMALLEST_SCALE))


def _check_step(at_least: int) -> Callable[[str, Any], int]:
    return functools.partial(check.count, at_least=at_least)


_NAMES = {
    check.scale: "scale loss_scale dynamic_scale cur_scale max_loss_scale",
    # Flax allows an interval of 0, which is 1 here; our rule refuses 0 from PyTorch.
    _check_step(0): "growth_interval _growth_tracker growth_tracker fin_steps counter "
    "step_counter dynamic_counter unskipped cur_iter _iter _overflows_since_rescale",
    _check_step(-1): "last_overflow_iter _last_overflow_iter _last_rescale_iter",
    _check_step(-(2**31)): "hysteresis_tracker",
    check.count: "period dynamic_growth_steps scale_window hysteresis delayed_shift "
    "cur_hysteresis",
    check.growth_factor: "growth_factor factor scale_factor",
    check.backoff_factor: "backoff_factor",
    _check_minimum: "minimum_scale min_loss_scale min_scale threshold",
    check.share: "tolerance",
    check.boolean: "consecutive_hysteresis late_growth",
}
_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    name: convert for convert, names in _NAMES.items() for name in names.split()
}


def _check(peer: Peer, key: str, value: Any) -> Any:
    """Returns the value of a key as a Python number or bool, if it is valid."""
    convert = _CHECKS[key]
    if value is None and convert is _check_minimum:
        return check.SMALLEST_SCALE
    try:
        # Arrays, tensors and variables of any library; Megatron's have one dimension.
        array = np.asarray(value)
        if array.size != 1:
            raise ValueError(
                f"{key} must be one number, got shape {array.shape}. If the state is "
                "replicated over devices, pass that of one device."
            )
        if array.dtype.kind not in "fiub":
            raise ValueError(f"{key} must be a real number, got {value!r}.")
        # check.scale recognizes half precision by the dtype.
        number = array.reshape(())[()]
        return convert(key, number if array.dtype == np.float16 else number.item())
    except (TypeError, ValueError, RuntimeError) as error:
        reason = str(error) if key in str(error) else f"{key}: {error}"
        raise ValueError(f"Damaged state of {peer.name}: {reason}") from error


def _listed(names: Any) -> str:
    return ", ".join(map(repr, names)) or "nothing"
