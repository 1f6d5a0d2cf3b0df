"""The command line: `python -m examples.digits`; `--help` lists the options."""

import argparse
import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

import optax_lossscale
from examples.common import command_line

PROGRAM = "python -m examples.digits"
DESCRIPTION = """
Trains a network to find digits in patches of photographs, in five ways: in float32; in
float16 by autocast without loss scaling, with a fixed loss scale and with a dynamic
one; and in float16 that is cast by hand, with the dynamic scale. One patch in 200 has a
digit. The loss is the mean over a large batch, so each patch has a small gradient. In
the hidden layers, the gradients of the patches without a digit are below 2^-25, and
become zero in float16 without loss scaling. In batches of 1024 float16 trains as well
without it: try --batch-size 1024 --steps 300.
"""
# On two CPU cores: the seconds to start and to compile, and those for each patch.
START, PATCH = 20, 3e-6


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains in all ways, and reports.

    Args:
      arguments: The command-line arguments, without the program's name. If None,
        they are taken from `sys.argv`.

    Raises:
      SystemExit: With status 2, after one line on stderr, if an argument is invalid
        or a package is missing.
    """
    options = vars(make_parser().parse_args(arguments))
    figure = options.pop("plot", None)
    train = command_line.load("examples.digits.train", PROGRAM)
    report = command_line.load("examples.digits.report", PROGRAM)
    settings = ", ".join(f"{name}={value}" for name, value in options.items())
    takes = duration(options["steps"], options["batch_size"])
    start = (
        f"Finding digits in photographs: {settings}. This takes "
        f"{takes} on two CPU cores."
    )
    print(command_line.wrap(start), flush=True)
    runs = train.train_all_ways(**options)
    report.print_report(runs)
    if figure:
        report.draw_figure(runs, figure)
        print(f"\nThe figure is in {figure}.")


def duration(steps: int, batch_size: int) -> str:
    """Tells roughly how long all trainings take."""
    seconds = START + PATCH * steps * batch_size
    if seconds < 45:
        return f"about {10 * round(seconds / 10)} seconds"
    minutes = round(seconds / 60)
    return "about a minute" if minutes == 1 else f"about {minutes} minutes"


def make_parser() -> command_line.OneLineParser:
    """Returns the command-line parser."""
    parser = command_line.OneLineParser(PROGRAM, description=DESCRIPTION)
    version = f"optax_lossscale {optax_lossscale.__version__}"
    parser.add_argument(
        "--version", action="version", version=version, help="Show the version."
    )
    for name, least, most, default, text in (
        ("steps", 1, 10_000, 80, "Train for N steps in each way"),
        ("seed", 0, 100_000, 0, "Draw the parameters and the batches with this seed"),
        ("batch-size", 256, 2**20, 2**17, "Use N patches in each batch"),
        (
            "retries",
            0,
            100,
            0,
            "Repeat the pass of an overflow up to N times (24 is enough)",
        ),
    ):
        parser.add_argument(
            f"--{name}",
            type=whole_number(least, most),
            default=default,
            metavar="N",
            help=f"{text}; {least} to {most} (default: {default}).",
        )
    parser.add_argument(
        "--optimizer",
        choices=["sgd", "momentum", "adam"],
        default="adam",
        metavar="NAME",
        help="Wrap this optimizer: sgd, momentum, adam (default: adam).",
    )
    parser.add_argument(
        "--plot",
        type=png_path,
        metavar="FILE.png",
        default=argparse.SUPPRESS,
        help="Write a figure of the losses and gradients to FILE.png.",
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


if __name__ == "__main__":
    command_line.exit_when_interrupted(PROGRAM)
    main()
