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
Trains an 8-layer network on scikit-learn's handwritten digits in four ways: in float32,
and in float16 without loss scaling, with a fixed loss scale and with a dynamic one. The
loss is multiplied by a small weight, as auxiliary losses often are. Nearly all
gradients are therefore below 2^-25, and become zero in float16 without loss scaling.
With --loss-weight 1 so small a network trains as well without it.
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
    print(f"Training on handwritten digits: {settings}", flush=True)
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
    # Far outside the last bounds, Adam's squared gradients leave the range of float32.
    for name, kind, least, most, default, text in (
        ("steps", int, 1, 10_000, 500, "training steps per run"),
        ("seed", int, 0, 100_000, 0, "the first of three seeds"),
        ("loss-weight", float, 1e-12, 1e12, "1e-5", "weight of the loss"),
    ):
        parser.add_argument(
            f"--{name}",
            type=number(kind, least, most),
            default=default,
            help=f"{text}, {least:g} to {most:g}",
        )
    parser.add_argument(
        "--optimizer",
        choices=["sgd", "momentum", "adam"],
        default="momentum",
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


def number(kind: type, least: float, most: float) -> Callable[[str], float]:
    """Returns a function that parses a number and checks its bounds."""

    def read(text: str) -> float:
        with contextlib.suppress(ValueError):
            value = kind(text)
            if least <= value <= most:
                return value
        noun = "a whole number" if kind is int else "a number"
        raise argparse.ArgumentTypeError(
            f"must be {noun} from {least:g} to {most:g}, got {text!r}"
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
