"""The settings of a run."""

import dataclasses

from examples.common.precision import DTYPES
from examples.common.settings import (
    SettingError,
    check_ranges,
    may_change,
    setting,
)
from examples.grpo import task
from examples.language_model.config import Config as ModelConfig


@dataclasses.dataclass(frozen=True)
class Config:
    """All settings of a run. Each is also an option of the command line.

    Raises:
      SettingError: If a value is out of its range, or does not fit another one.
    """

    # The task and the model.
    digits: int = setting(10, "Sort N digits", least=2)
    layers: int = setting(2, "Use N transformer blocks", least=1)
    width: int = setting(64, "Use N channels", least=1)
    heads: int = setting(4, "Use N attention heads; N must divide the width", least=1)

    # The precision.
    dtype: str = setting(
        "float16",
        "Compute in this dtype, in the sampler and in the trainer",
        choices=DTYPES,
    )
    retries: int = setting(
        24, "Repeat the pass of an overflow up to N times, in float16", least=0
    )

    # The training.
    seed: int = setting(
        0,
        "Draw the parameters, the problems and the samples with this seed",
        least=0,
        most=2**32 - 1,
    )
    supervised_steps: int = setting(
        150, "First train for N steps on right answers, in float32", least=0
    )
    supervised_batch: int = setting(
        256, "Pose N problems in each of these steps", least=1
    )
    supervised_rate: float = setting(
        2e-3, "Let the learning rate of these steps rise to X", least=0
    )
    steps: int = setting(
        100, "Then train for N steps by reinforcement learning", least=1
    )
    problems: int = setting(
        64, "Pose N problems in each step of reinforcement learning", least=1
    )
    group: int = setting(8, "Sample N answers to each problem", least=2)
    minibatches: int = setting(
        4, "Make N updates in each step; N must divide the problems", least=1
    )
    learning_rate: float = setting(
        3e-4, "Use the learning rate X in these updates", least=0
    )
    clip: float = setting(
        0.2, "Clip ratios of probabilities that differ from 1 by more than X", least=0
    )

    # How it runs.
    save_every: int = may_change(50, "Save a checkpoint every N steps", least=1)

    def __post_init__(self):
        check_ranges(self)
        self.model()  # checks the heads
        if self.problems % self.minibatches:
            rule = f"divide the number of problems, {self.problems}"
            raise SettingError("minibatches", rule, self.minibatches)

    @property
    def all_steps(self) -> int:
        """The number of steps of both kinds."""
        return self.supervised_steps + self.steps

    def model(self) -> ModelConfig:
        """Returns the settings of the transformer."""
        return ModelConfig(
            vocabulary=task.VOCABULARY,
            context=2 * self.digits,
            layers=self.layers,
            width=self.width,
            heads=self.heads,
        )
