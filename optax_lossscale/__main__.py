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

PROGRAM = "python -m optax_lossscale"
DESCRIPTION = """
Trains a network of 8 layers on the handwritten digits of scikit-learn in four ways:
in float32, and in float16 without loss scaling, with a fixed and with a dynamic loss
scale. The loss has a small weight, as an auxiliary loss has, so that its gradients
are too small for float16.
"""


class OneLineParser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        """Prints the message and exits with status 2."""
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\n")


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the demonstration.

    Args:
      arguments: Those of the command line, without the program's name.

    Raises:
      SystemExit: With status 2, after one line on stderr, if an argument is bad or
        a package is missing.
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


def make_parser() -> OneLineParser:
    """Makes the parser of the command line."""
    parser = OneLineParser(
        prog=PROGRAM,
        description=DESCRIPTION,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    # Far outside its bounds, Adam's squared gradients would not fit into float32.
    weight = number(float, 1e-12, 1e12)
    for name, kind, default, text in (
        ("steps", number(int, 1, 10_000), 500, "training steps of every run"),
        ("seed", number(int, 0, 100_000), 0, "the first of three seeds"),
        ("loss-weight", weight, "1e-5", "the factor of the loss; 1 needs no scaling"),
    ):
        parser.add_argument(f"--{name}", type=kind, default=default, help=text)
    parser.add_argument(
        "--optimizer",
        dest="inner_optimizer",
        choices=["sgd", "momentum", "adam"],
        default="momentum",
        help="the inner optimizer",
    )
    parser.add_argument(
        "--plot",
        type=png_path,
        metavar="FILE.png",
        default=argparse.SUPPRESS,
        help="also draw loss curves, loss scales and gradients' exponents",
    )
    return parser


def number(kind: type, least: float, most: float) -> Callable[[str], float]:
    """Returns a function that reads a number within bounds."""

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
    """Reads the path of the figure."""
    path = Path(text)
    if path.suffix == ".png" and path.parent.is_dir() and not path.is_dir():
        return path
    raise argparse.ArgumentTypeError(
        f"must be a .png file in a directory that exists, got {text!r}"
    )


def exit_when_interrupted(*_: object) -> None:
    """Ends the process; serves as the handler of Ctrl-C.

    An exception in its place may strike inside an import or a compilation, and the
    interpreter may crash when these are unwound.
    """
    show_cursor = "\x1b[?25h\n" if sys.stderr.isatty() else ""
    os.write(2, f"{show_cursor}{PROGRAM}: interrupted\n".encode())
    os._exit(130)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, exit_when_interrupted)
    main()
