"""The demonstration: real float16 training, with and without loss scaling.

Run it as `python -m optax_lossscale`; `--help` lists the options.
"""

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import optax_lossscale

PROGRAM = "python -m optax_lossscale"
DESCRIPTION = """
Trains a network to find digits in patches of photographs, in four ways: in float32, and
in float16 without loss scaling, with a fixed loss scale and with a dynamic one. One
patch in 200 has a digit. The loss is the mean over a large batch, so each patch has a
small gradient. In the hidden layers, the gradients of the patches without a digit are
below 2^-25, and become zero in float16 without loss scaling. In batches of 1024 float16
trains as well without it: try --batch-size 1024 --steps 300.
"""


class OneLineParser(argparse.ArgumentParser):
    """An argument parser that prints errors on one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        """Prints the message and exits with status 2."""
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\n")


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the demonstration.

    Args:
      arguments: The command-line arguments, without the program's name. If None,
        they are taken from `sys.argv`.

    Raises:
      SystemExit: With status 2, after one line on stderr, if an argument is invalid
        or a package is missing.
    """
    parser = make_parser()
    options = vars(parser.parse_args(arguments))
    figure = options.pop("plot", None)
    try:
        from optax_lossscale import _demo
    except ModuleNotFoundError as error:
        install = "pip install 'optax-lossscale[demo]'"
        parser.error(f"needs {error.name}; install it with: {install}")
    settings = ", ".join(f"{name}={value}" for name, value in options.items())
    print(f"Finding digits in photographs: {settings}", flush=True)
    runs = _demo.train_all_ways(**options)
    _demo.print_report(runs)
    if figure:
        _demo.draw_figure(runs, figure)
        print(f"\nThe figure is in {figure}.")


def make_parser() -> OneLineParser:
    """Returns the command-line parser."""
    parser = OneLineParser(
        prog=PROGRAM,
        description=DESCRIPTION,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    version = f"optax_lossscale {optax_lossscale.__version__}"
    parser.add_argument("--version", action="version", version=version)
    for name, least, most, default, text in (
        ("steps", 1, 10_000, 80, "training steps per run"),
        ("seed", 0, 100_000, 0, "seed of the parameters and of the batches"),
        ("batch-size", 256, 2**20, 2**17, "patches in a batch"),
    ):
        parser.add_argument(
            f"--{name}",
            type=whole_number(least, most),
            default=default,
            help=f"{text}, {least} to {most}",
        )
    parser.add_argument(
        "--optimizer",
        choices=["sgd", "momentum", "adam"],
        default="adam",
        help="the inner optimizer",
    )
    parser.add_argument(
        "--plot",
        type=png_path,
        metavar="FILE.png",
        default=argparse.SUPPRESS,
        help="also draw loss curves, the loss scale and gradient exponents",
    )
    return parser


def whole_number(least: int, most: int) -> Callable[[str], int]:
    """Returns a function that parses a whole number and checks its bounds."""

    def read(text: str) -> int:
        with contextlib.suppress(ValueError):
            value = int(text)
            if least <= value <= most:
                return value
        raise argparse.ArgumentTypeError(
            f"must be a whole number from {least} to {most}, got {text!r}"
        )

    return read


def png_path(text: str) -> Path:
    """Parses the path of the figure."""
    path = Path(text)
    if path.suffix == ".png" and path.parent.is_dir() and not path.is_dir():
        return path
    raise argparse.ArgumentTypeError(
        f"must be a .png file in a directory that exists, got {text!r}"
    )


def exit_when_interrupted(*_: object) -> None:
    """Handles Ctrl-C by exiting at once.

    Raising KeyboardInterrupt instead could interrupt an import or a compilation, and
    unwinding these may crash the interpreter.
    """
    show_cursor = "\x1b[?25h\n" if sys.stderr.isatty() else ""
    os.write(2, f"{show_cursor}{PROGRAM}: interrupted\n".encode())
    os._exit(130)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, exit_when_interrupted)
    main()
