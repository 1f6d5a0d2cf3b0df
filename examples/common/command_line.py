"""The shared part of the command lines of the examples."""

import argparse
import importlib
import os
import shutil
import signal
import sys
import textwrap
from pathlib import Path
from typing import Any, NoReturn


class OneLineParser(argparse.ArgumentParser):
    """An argument parser that prints errors on one line, and a usage of one line.

    Args:
      prog: The command.
      required: The arguments that it must have.
      **options: Those of `argparse.ArgumentParser`.
    """

    def __init__(self, prog: str, required: str = "", **options: Any):
        usage = " ".join(filter(None, (prog, required, "[options]")))
        super().__init__(prog, usage, add_help=False, **options)
        self.add_argument("-h", "--help", action="help", help="Show this help.")

    def error(self, message: str) -> NoReturn:
        """Prints the message and exits with status 2."""
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\n")


def make_parser(program: str, description: str) -> OneLineParser:
    """Returns the parser of a command that keeps its run in the folder `--out`."""
    parser = OneLineParser(
        program, "--out FOLDER", description=description, allow_abbrev=False
    )
    text = "Keep the run in this folder."
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help=text)
    return parser


def wrap(text: str) -> str:
    """Breaks a text between words, for the width of the terminal."""
    columns = shutil.get_terminal_size().columns
    return textwrap.fill(text, columns, break_long_words=False, break_on_hyphens=False)


def load(module: str, program: str) -> Any:
    """Imports a module of an example.

    Raises:
      SystemExit: With status 2, after one line on stderr, if a package is missing.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        install = "install it with: pip install -e '.[demo]'"
        print(f"{program}: error: needs {error.name}; {install}", file=sys.stderr)
        sys.exit(2)


def exit_when_interrupted(program: str) -> None:
    """Makes Ctrl-C end this process at once.

    Raising KeyboardInterrupt instead could interrupt an import or a compilation, and
    unwinding these may crash the interpreter.
    """

    def handle(*_: object) -> None:
        show_cursor = "\x1b[?25h\n" if sys.stderr.isatty() else ""
        os.write(2, f"{show_cursor}{program}: interrupted\n".encode())
        os._exit(130)

    signal.signal(signal.SIGINT, handle)
