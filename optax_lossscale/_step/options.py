"""The options of a loss-scaled optimizer, checked."""

import dataclasses
from collections.abc import Hashable
from typing import Any, get_args

from optax_lossscale import _check as check
from optax_lossscale._rules.base import LossScale
from optax_lossscale._step.mask import Mask
from optax_lossscale._step.skip import Skip, choose_skip


@dataclasses.dataclass(frozen=True)
class Options:
    """The arguments of a `LossScaleOptimizer`, and what follows from them."""

    inner_optimizer: Any
    loss_scale: LossScale
    axis_name: Hashable | None
    skip: Skip
    check_loss: bool
    check_updates: bool
    track_leaves: bool
    num_losses: int | None
    mask: Mask

    def __post_init__(self):
        if self.skip not in get_args(Skip):
            raise ValueError(
                f'skip must be "auto", "where" or "cond", got {self.skip!r}.'
            )
        if not isinstance(self.axis_name, Hashable):
            raise TypeError(
                f"axis_name must be a name or a tuple of names, got {self.axis_name!r}."
            )
        for name in ("check_loss", "check_updates", "track_leaves"):
            check.boolean(name, getattr(self, name))
        if self.num_losses is not None:
            num_losses = check.count("num_losses", self.num_losses)
            object.__setattr__(self, "num_losses", num_losses)
            if self.mask.spec is not None:
                raise ValueError(
                    "num_losses and mask cannot be combined: each loss would return "
                    "its own new value of a parameter without a gradient."
                )

    @property
    def is_plain(self) -> bool:
        """Whether gradients are a single tree like the parameters."""
        return self.num_losses is None and self.mask.spec is None

    @property
    def effective_skip(self) -> Skip | None:
        """How the step that is being traced is skipped; None if it never is."""
        if self.check_updates:
            # The decision needs the updates, so they are always computed.
            return "where"
        if not self.loss_scale.skip_nonfinite and not self.check_loss:
            return None
        return choose_skip(self.skip, self.axis_name)
