"""Which calls have used a loss scale: warnings of losses that are never scaled."""

import enum
from typing import Any

from optax_lossscale._rules.base import LossScale, has_hash
from optax_lossscale._warn import warn

BY_HAND = (
    "(If you scale or unscale by other means, or compile this before the gradients, "
    "first call optimizer.current_loss_scale(opt_state).)"
)


class Use(enum.Enum):
    """A call that scales a loss, reads the scale, or unscales gradients."""

    GRADIENTS = enum.auto()  # value_and_grad and minimize: the gradients are unscaled.
    LOSS = enum.auto()  # get_scaled_loss
    READ = enum.auto()  # current_loss_scale: the user may scale by hand.
    UNSCALE = enum.auto()  # get_unscaled_gradients
    IN_PARAMETERS = enum.auto()  # with_loss_scale


# By rule, or by the name of a scale among the parameters, for the life of the process.
# JAX traces each compiled function at least once per process, so its uses are noted.
_uses: dict[Any, set[Use]] = {}


def note(rule: LossScale | str, use: Use) -> None:
    """Notes a use of the scale of a rule, or of this name."""
    _uses.setdefault(_key(rule), set()).add(use)


def _uses_of(rule: LossScale | str) -> set[Use]:
    return _uses.get(_key(rule), set())


def _key(rule: LossScale | str) -> Any:
    """Returns a key that equal rules share: their class, if they cannot be compared."""
    is_comparable = has_hash(rule) and type(rule).__eq__ is not object.__eq__
    return rule if is_comparable else type(rule)


def _is_off(rule: LossScale) -> bool:
    """Whether the scale is always 1."""
    return rule._bounds == (1, 1)


def warn_of_unscaled(rule: LossScale) -> None:
    """Warns before an update of gradients that were not scaled, or not unscaled."""
    uses = _uses_of(rule)
    if _is_off(rule):
        return
    if uses <= {Use.UNSCALE}:
        warn(
            "No loss has been scaled: nothing has read the loss scale of this "
            "optimizer. In place of jax.value_and_grad(loss_fn)(params, x) write "
            "optimizer.value_and_grad(loss_fn, opt_state)(params, x), or call "
            f"minimize. {BY_HAND} If you need no scale, pass loss_scale=1.0."
        )
    elif uses == {Use.LOSS}:
        warn(
            "No gradients have been unscaled, but get_scaled_loss has scaled a loss. "
            "Before the update write grads = optimizer.get_unscaled_gradients(grads, "
            f"opt_state). {BY_HAND}"
        )


def warn_of_unscaled_parameters(rule: LossScale, name: str) -> None:
    """Warns before an update if no loss was scaled by the scale of this name."""
    if not (_is_off(rule) or _uses_of(name)):
        call = "loss_fn" if name == "loss_scale" else f"loss_fn, {name!r}"
        warn(
            f"No loss has been scaled: nothing has read the scale {name!r} among the "
            f"parameters. Give your trainer with_loss_scale({call}) in place of "
            "loss_fn, wherever it computes gradients. (If it does so in another "
            "process, ignore this warning: warnings.filterwarnings('ignore', 'No loss "
            "has been scaled').)"
        )


def warn_of_unscaled_twice(rule: LossScale) -> None:
    """Warns before gradients are unscaled that are not scaled."""
    uses = _uses_of(rule)
    if uses <= {Use.GRADIENTS, Use.UNSCALE} and not _is_off(rule):
        advice = "Scale the loss by optimizer.get_scaled_loss(loss, opt_state)."
        if Use.GRADIENTS in uses:
            advice = "Leave it out: those of value_and_grad are unscaled already."
        warn(
            "No loss has been scaled by hand, whose gradients get_unscaled_gradients "
            f"could divide by the loss scale. {advice} {BY_HAND}"
        )
