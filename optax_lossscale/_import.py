"""Resuming from the saved state of another library's loss scaler."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from optax_lossscale._check import (
    SMALLEST_SCALE,
    check_backoff_factor,
    check_count,
    check_growth_factor,
    check_number,
    check_scale,
)
from optax_lossscale._loss_scale import DynamicLossScale, LossScaleState

# Each function takes a peer's hyperparameters, by the peer's names and with the peer's
# defaults, and returns those of DynamicLossScale.


def _torch(growth_factor=2.0, backoff_factor=0.5, growth_interval=2000):
    return growth_interval, growth_factor, backoff_factor, SMALLEST_SCALE


def _flax(
    growth_factor=2.0,
    backoff_factor=0.5,
    growth_interval=2000,
    minimum_scale=SMALLEST_SCALE,
):
    # Flax grows one step later than it says.
    return growth_interval + 1, growth_factor, backoff_factor, minimum_scale


def _jmp(period=2000, factor=2, min_loss_scale=1.0):
    return period, factor, 1 / factor, min_loss_scale


def _keras(dynamic_growth_steps=2000):
    return dynamic_growth_steps, 2.0, 0.5, SMALLEST_SCALE


class _Peer(NamedTuple):
    """Another loss scaler: the names of its scale, counter and hyperparameters."""

    name: str
    scale: str
    counter: str
    convert: Callable[..., tuple[int, float, float, float]]

    @property
    def defaults(self) -> dict[str, Any]:
        parameters = inspect.signature(self.convert).parameters
        return {name: parameter.default for name, parameter in parameters.items()}


_PEERS = (
    _Peer("PyTorch's GradScaler", "scale", "_growth_tracker", _torch),
    _Peer("Flax's DynamicScale", "scale", "fin_steps", _flax),
    _Peer("jmp's DynamicLossScale", "loss_scale", "counter", _jmp),
    _Peer("Keras's LossScaleOptimizer", "dynamic_scale", "step_counter", _keras),
)
# Where Keras's save_own_variables puts the two, after an iteration and a learning rate.
_KERAS_POSITIONS = {"2": "step_counter", "3": "dynamic_scale"}


def _check_minimum(key: str, value: Any) -> float:
    # Zero means that there is none.
    number = check_number(key, value)
    if number < 0:
        raise ValueError(f"{key} must not be negative, got {value!r}.")
    return check_scale(key, max(number, SMALLEST_SCALE))


_check_counter = functools.partial(check_count, at_least=0)
_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    **{peer.scale: check_scale for peer in _PEERS},
    **{peer.counter: _check_counter for peer in _PEERS},
    "growth_factor": check_growth_factor,
    "backoff_factor": check_backoff_factor,
    # Flax may have zero, where ours is one; for PyTorch ours refuses it.
    "growth_interval": _check_counter,
    "minimum_scale": _check_minimum,
    "period": check_count,
    "factor": check_growth_factor,
    "min_loss_scale": _check_minimum,
    "dynamic_growth_steps": check_count,
}


def import_state(
    saved: Any, **hyperparameters: Any
) -> tuple[DynamicLossScale, LossScaleState]:
    """Makes a loss scale and its state of what another library has saved.

    Training continues with the scales and the skips that it would have had there, as
    long as the scale stays between 2**-126 and 2**126.

    Args:
      saved: One of

        - PyTorch: `GradScaler.state_dict()`;
        - Flax: a `DynamicScale`, or its `flax.serialization.to_state_dict`;
        - jmp: a `DynamicLossScale`;
        - Keras 3: a `LossScaleOptimizer`, its `variables`, what its
          `save_own_variables` stored, or a dictionary with `step_counter` and
          `dynamic_scale`.

        Of any of them a dictionary by the names of the fields will do.
      **hyperparameters: By the library's own names, what was not saved
        (`growth_interval` and the others of Flax's dictionary, Keras's
        `dynamic_growth_steps`), or what is to be replaced. (jmp loses a
        `min_loss_scale` under `jax.jit`, where it is 1 from then on.)

    Returns:
      A `DynamicLossScale`, whose initial scale is the current one, and its state.
      To go on with them::

        optimizer = LossScaleOptimizer(inner_optimizer, loss_scale)
        opt_state = optimizer.init(params)
        opt_state = opt_state._replace(loss_scale_state=loss_scale_state)

    Raises:
      ValueError: If `saved` is of none of these libraries; if something in it or in
        the hyperparameters is missing, unknown, of the wrong type or out of its
        range. The message names it.

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
      `jmp.DynamicLossScale`; `keras.optimizers.LossScaleOptimizer`.
    """
    peer, fields = _recognize(saved)
    fields = {**fields, **hyperparameters}
    needed = [peer.scale, peer.counter, *peer.defaults]
    if unknown := [key for key in fields if key not in needed]:
        raise ValueError(
            f"The state of {peer.name} has no {_listed(unknown)}, only "
            f"{_listed(needed)}."
        )
    if missing := [key for key in needed if key not in fields]:
        defaults = ", ".join(f"{k}={v!r}" for k, v in peer.defaults.items())
        raise ValueError(
            f"The saved state of {peer.name} lacks {_listed(missing)}. Pass what was "
            f"not saved as keyword arguments (its own defaults are {defaults})."
        )
    numbers = {key: _check(peer, key, fields[key]) for key in needed}
    scale, steps = numbers.pop(peer.scale), numbers.pop(peer.counter)
    interval, growth_factor, backoff_factor, min_scale = peer.convert(**numbers)
    if scale < min_scale:
        raise ValueError(
            f"Damaged state of {peer.name}: {peer.scale} must not lie below the "
            f"minimum, {min_scale!r}, got {scale!r}."
        )
    loss_scale = DynamicLossScale(
        initial_scale=scale,
        growth_interval=interval,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        min_scale=min_scale,
    )
    if steps >= interval:
        raise ValueError(
            f"Damaged state of {peer.name}: {peer.counter} must be below {interval}, "
            f"at which the scale would have grown, got {steps!r}."
        )
    state = loss_scale.init()
    return loss_scale, state._replace(good_steps=jnp.asarray(steps, jnp.int32))


def _recognize(saved: Any) -> tuple[_Peer, dict[str, Any]]:
    """Tells, by the name of the counter, whose state it is; returns its fields."""
    if callable(getattr(saved, "state_dict", None)):
        saved = saved.state_dict()
    if isinstance(saved, Mapping):
        if not saved:
            raise ValueError(
                "saved is empty, as is the state of a PyTorch GradScaler with "
                "enabled=False: there is no scale to go on with. Without loss scaling "
                "it was FixedLossScale(1.0)."
            )
        fields = dict(saved)
        if all(isinstance(key, str) and key.isdecimal() for key in fields):
            names = _KERAS_POSITIONS.items()
            fields = {name: fields[k] for k, name in names if k in fields}
    elif isinstance(saved, list | tuple) and not hasattr(saved, "_fields"):
        names = _KERAS_POSITIONS.values()
        fields = {v.name: v for v in saved if getattr(v, "name", None) in names}
    else:
        fields = {key: getattr(saved, key) for key in _CHECKS if hasattr(saved, key)}
        # jmp's scale, of the same name as Flax's number, is a method.
        fields = {key: value for key, value in fields.items() if not callable(value)}
    found = [peer for peer in _PEERS if peer.counter in fields]
    if len(found) == 1:
        return found[0], fields
    counters = "; ".join(f"{peer.counter!r}: {peer.name}" for peer in _PEERS)
    raise ValueError(
        "saved is recognized by its counter and must hold exactly one of "
        f"{{{counters}}}, got a {type(saved).__name__} with {_listed(fields)}."
    )


def _check(peer: _Peer, key: str, value: Any) -> Any:
    """Returns the value of a key as a Python number, if it is a valid one."""
    if value is None and key == "minimum_scale":
        return SMALLEST_SCALE
    try:
        # Arrays, tensors and variables of any library.
        array = np.asarray(value)
        if array.shape != ():
            raise ValueError(
                f"{key} must be one number, got shape {array.shape}. Of a state that "
                "is replicated over devices pass that of one."
            )
        if array.dtype.kind not in "fiu":
            raise ValueError(f"{key} must be a real number, got {value!r}.")
        # The check of a scale tells half precision by its dtype.
        is_half = array.dtype == np.float16
        return _CHECKS[key](key, array[()] if is_half else array.item())
    except (TypeError, ValueError, RuntimeError) as error:
        reason = str(error) if key in str(error) else f"{key}: {error}"
        raise ValueError(f"Damaged state of {peer.name}: {reason}") from error


def _listed(names: Any) -> str:
    return ", ".join(map(repr, names)) or "nothing"
