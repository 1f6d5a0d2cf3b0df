"""The settings of a run."""

import dataclasses

from examples.common.settings import (
    DTYPES,
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
    digits: int = setting(10, "digits to sort", least=2)
    layers: int = setting(2, "transformer blocks", least=1)
    width: int = setting(64, "channels", least=1)
    heads: int = setting(4, "attention heads, a divisor of the width", least=1)

    # The precision.
    dtype: str = setting("float16", "of sampler and trainer", choices=DTYPES)
    retries: int = setting(
        24, "how often an update in float16 may repeat its backward pass", least=0
    )

    # The training.
    seed: int = setting(
        0, "of the parameters, the problems and the samples", least=0, most=2**32 - 1
    )
    supervised_steps: int = setting(150, "steps on right answers, in float32", least=0)
    supervised_batch: int = setting(256, "problems in such a step", least=1)
    supervised_rate: float = setting(2e-3, "peak learning rate of these", least=0)
    steps: int = setting(100, "steps of reinforcement learning after these", least=1)
    problems: int = setting(64, "problems in a step", least=1)
    group: int = setting(8, "answers to each problem", least=2)
    minibatches: int = setting(4, "updates in a step, a divisor of problems", least=1)
    learning_rate: float = setting(3e-4, "of these updates", least=0)
    clip: float = setting(0.2, "how far from 1 a ratio counts", least=0)

    # How it runs.
    save_every: int = may_change(50, "steps between checkpoints", least=1)

    def __post_init__(self):
        check_ranges(self)
        self.model(self.dtype)  # checks the heads
        if self.problems % self.minibatches:
            rule = f"divide the number of problems, {self.problems}"
            raise SettingError("minibatches", rule, self.minibatches)

    @property
    def all_steps(self) -> int:
        """The number of steps of both kinds."""
        return self.supervised_steps + self.steps

    def model(self, dtype: str) -> ModelConfig:
        """Returns the settings of the transformer, computing in a dtype."""
        return ModelConfig(
            vocabulary=task.VOCABULARY,
            context=2 * self.digits,
            layers=self.layers,
            width=self.width,
            heads=self.heads,
            dtype=dtype,
        )
