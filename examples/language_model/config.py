"""The settings of a run, and the presets."""

import dataclasses
from typing import Final

from examples.common.precision import DTYPES
from examples.common.settings import (
    SettingError,
    check_ranges,
    may_change,
    setting,
)

LOSS_SCALES = ("none", "fixed", "dynamic", "tolerant", "headroom")


@dataclasses.dataclass(frozen=True)
class Config:
    """All settings of a run. Each is also an option of the command line.

    Raises:
      SettingError: If a value is out of its range, or does not fit another one.
    """

    # The text and the model.
    corpus: str = setting(
        "*.py",
        "Train on the files of the standard library that match this glob pattern",
        metavar="PATTERN",
    )
    vocabulary: int = setting(
        8192, "Use N tokens: 256 bytes, and words", least=257, most=65536
    )
    context: int = setting(64, "Train on sequences of N tokens", least=1)
    layers: int = setting(2, "Use N transformer blocks", least=1)
    width: int = setting(64, "Use N channels", least=1)
    heads: int = setting(4, "Use N attention heads; N must divide the width", least=1)

    # The precision.
    dtype: str = setting("float16", "Compute in this dtype", choices=DTYPES)
    loss_scale: str = setting(
        "dynamic", "Change the loss scale by this rule", choices=LOSS_SCALES
    )
    retries: int = setting(
        0,
        "Repeat the pass of an overflow up to N times, at lower scales",
        least=0,
    )

    # The training.
    seed: int = setting(
        0, "Draw the parameters and the batches with this seed", least=0, most=2**32 - 1
    )
    steps: int = setting(60, "Train for N optimizer steps", least=1)
    batch_size: int = setting(
        256, "Use N sequences in each step, on all devices together", least=1
    )
    accumulate: int = setting(1, "Split each step into N micro-batches", least=1)
    learning_rate: float = setting(3e-3, "Let the learning rate rise to X", least=0)
    warmup_steps: int = setting(10, "Let the learning rate rise for N steps", least=0)
    weight_decay: float = setting(0.1, "Decay kernels and embeddings by X", least=0)
    clip_norm: float = setting(1.0, "Clip the norm of the gradients to X", least=0)
    average_decay: float = setting(
        0.99, "Average the parameters with decay X", least=0, most=1
    )

    # How it runs.
    eval_every: int = setting(20, "Evaluate every N steps", least=1)
    eval_batches: int = setting(4, "Evaluate on N batches", least=1)
    log_every: int = setting(1, "Log every N steps", least=1)
    save_every: int = may_change(20, "Save a checkpoint every N steps", least=1)
    mesh: str = may_change(
        "data",
        "Arrange the devices, as data=8 or data=2,fsdp=4; an axis without a number "
        "gets all that are left",
        metavar="AXES",
    )
    remat: bool = may_change(
        False, "Recompute each block in the backward pass, to save memory"
    )
    scan_layers: bool = may_change(False, "Compile one block instead of all")

    def __post_init__(self):
        check_ranges(self)
        if self.width % self.heads:
            raise SettingError("heads", f"divide the width, {self.width}", self.heads)
        if self.batch_size % self.accumulate:
            rule = f"divide the batch size, {self.batch_size}"
            raise SettingError("accumulate", rule, self.accumulate)
        if self.retries and (self.loss_scale == "none" or self.accumulate > 1):
            rule = "be 0 without a loss scale, and with several micro-batches in a step"
            raise SettingError("retries", rule, self.retries)


_GPT2_SMALL = Config(
    corpus="**/*.py",
    vocabulary=32768,
    context=1024,
    layers=12,
    width=768,
    heads=12,
    steps=20_000,
    batch_size=512,
    accumulate=32,
    learning_rate=6e-4,
    warmup_steps=700,
    average_decay=0.999,
    eval_every=1000,
    eval_batches=2,
    log_every=10,
    save_every=1000,
    remat=True,
    scan_layers=True,
)

PRESETS: Final = {
    "tiny": Config(),
    "gpt2-small": _GPT2_SMALL,
    "gpt2-small-tpu": dataclasses.replace(_GPT2_SMALL, accumulate=8, mesh="fsdp"),
}
