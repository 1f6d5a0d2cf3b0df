"""The command line: reads the settings, keeps them with the run, and trains."""

import csv
import statistics
from collections.abc import Sequence
from pathlib import Path

from examples.common import command_line, settings
from examples.common.settings import SettingError
from examples.grpo import PROGRAM
from examples.grpo.config import Config
from examples.grpo.train import Result, train

# The steps whose means are printed in the end.
LAST = 5
DESCRIPTION = """
Teaches a small transformer to sort digits: first by right answers, then by
reinforcement learning (GRPO) in float16, bfloat16 or float32, in which it samples
answers and is rewarded for right ones. Run it again with the same folder, and it goes
on where it stopped. It takes one to two minutes on two CPU cores.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains as the command line says.

    Args:
      arguments: Its arguments. If None, they are taken from `sys.argv`.

    Raises:
      SystemExit: With status 2, after one line on stderr, if an argument is wrong; with
        1 if the loss scale makes no progress any more; with 128 and the number of a
        signal, if that ended the training early.
    """
    parser = command_line.make_parser(PROGRAM, DESCRIPTION)
    settings.add_options(parser, Config)
    options = vars(parser.parse_args(arguments))
    out = options.pop("out")
    try:
        config = Config(**settings.parse(Config, options))
        settings.keep(out, config)
    except SettingError as error:
        parser.error(error.text)
    try:
        result = train(config, out)
    except FloatingPointError as error:
        parser.exit(1, f"{PROGRAM}: {error}\n")
    settings.say(describe(result, config, out))
    if result.stopped_by:
        raise SystemExit(128 + result.stopped_by)


def describe(result: Result, config: Config, out: Path) -> str:
    """Returns a line that says how the training ended."""
    if result.step < config.all_steps:
        return f"stopped after step {result.step}; the same command goes on from there"
    with (out / "metrics.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["reward"]][-LAST:]
    reward, difference = (
        statistics.fmean(float(row[name]) for row in rows)
        for name in ("reward", "mean_difference")
    )
    return (
        f"reward {reward:.3f}, sampler and trainer {difference:.1e} apart: means of "
        f"the last {len(rows)} of {result.step} steps"
    )
