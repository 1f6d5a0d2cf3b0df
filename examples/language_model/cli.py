"""The command line: reads the settings, keeps them with the run, and trains."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from examples.common import command_line, settings
from examples.common.settings import SettingError
from examples.language_model import PROGRAM
from examples.language_model.config import PRESETS, Config
from examples.language_model.data import make_corpus
from examples.language_model.sharding import make_mesh
from examples.language_model.train import Result, train

DESCRIPTION = """
Trains a language model on the sources of Python's standard library, in float16 with
loss scaling. Run it again with the same folder, and it goes on where it stopped. The
preset tiny takes one to two minutes on two CPU cores.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains as the command line says.

    Args:
      arguments: Its arguments. If None, they are taken from `sys.argv`.

    Raises:
      SystemExit: With status 2, after one line on stderr, if an argument is wrong; with
        1 if the loss scale makes no progress any more, or the perplexity is not
        finite; with 128 and the number of a signal, if that ended the training early.
    """
    parser = make_parser()
    options = vars(parser.parse_args(arguments))
    out, preset = options.pop("out"), options.pop("preset")
    try:
        connect(
            *(options.pop(name) for name in ("coordinator", "processes", "process"))
        )
        config = make_config(preset, options)
        mesh = make_mesh(config.mesh, jax.devices())
        check_batch(config, mesh.size)
        corpus = make_corpus(config)
        settings.keep(out, config, corpus_digest=corpus.digest)
    except SettingError as error:
        parser.error(error.text)
    try:
        result = train(config, corpus, mesh, out)
    except FloatingPointError as error:
        parser.exit(1, f"{PROGRAM}: {error}\n")
    settings.say(describe(result))
    if result.stopped_by:
        raise SystemExit(128 + result.stopped_by)


def make_parser() -> command_line.OneLineParser:
    """Returns the command-line parser: an option for each setting, and a few more."""
    parser = command_line.make_parser(PROGRAM, DESCRIPTION)
    text = f"Begin with these settings: {', '.join(PRESETS)} (default: tiny)."
    parser.add_argument(
        "--preset", choices=PRESETS, default="tiny", metavar="NAME", help=text
    )
    group = parser.add_argument_group("settings, with the defaults of tiny")
    settings.add_options(group, Config)
    several = parser.add_argument_group("several processes")
    several.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        help="Meet at this address of the first process, or auto: ask the cluster.",
    )
    text = "Train with N processes."
    several.add_argument("--processes", type=int, metavar="N", help=text)
    text = "Be process N, counted from 0."
    several.add_argument("--process", type=int, metavar="N", help=text)
    return parser


def connect(
    coordinator: str | None, processes: int | None, process: int | None
) -> None:
    """Connects to the other processes, if there are any."""
    if coordinator == "auto":
        for name, value in (("processes", processes), ("process", process)):
            if value is not None:
                raise SettingError(name, "be left out with --coordinator auto", value)
        try:
            jax.distributed.initialize()
        except ValueError:
            rule = "be HOST:PORT where JAX recognizes no cluster"
            raise SettingError("coordinator", rule, coordinator) from None
    elif coordinator:
        if not coordinator.rpartition(":")[2].isdecimal():
            raise SettingError("coordinator", "be HOST:PORT or auto", coordinator)
        if processes is None or processes < 1:
            raise SettingError("processes", "be the number of processes", processes)
        if process is None or not 0 <= process < processes:
            raise SettingError("process", f"be from 0 to {processes - 1}", process)
        jax.distributed.initialize(coordinator, processes, process)
    elif processes is not None or process is not None:
        rule = "be given with --processes and --process"
        raise SettingError("coordinator", rule, coordinator)


def make_config(preset: str, options: dict[str, Any]) -> Config:
    """Returns a preset with some settings replaced.

    Only float16 needs loss scaling: with another dtype there is none, unless the
    options say so.

    Args:
      preset: Its name.
      options: Settings by name, as strings; flags are bool.
    """
    values = settings.parse(Config, options)
    if values.get("dtype", "float16") != "float16":
        values = {"loss_scale": "none"} | values
    return dataclasses.replace(PRESETS[preset], **values)


def check_batch(config: Config, devices: int) -> None:
    """Raises SettingError if a micro-batch cannot be split evenly over the devices."""
    if config.batch_size // config.accumulate % devices:
        rule = f"be a multiple of accumulate x devices, {config.accumulate} x {devices}"
        raise SettingError("batch_size", rule, config.batch_size)


def describe(result: Result) -> str:
    """Returns a line that says how the training ended."""
    if result.perplexity is None:
        return f"stopped after step {result.step}; the same command goes on from there"
    return f"perplexity {result.perplexity:.2f} after step {result.step}"
