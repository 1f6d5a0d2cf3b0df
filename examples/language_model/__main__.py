"""Runs the command line; `--help` lists its options."""

from examples.common import command_line
from examples.language_model import PROGRAM

if __name__ == "__main__":
    command_line.exit_when_interrupted(PROGRAM)
    command_line.load("examples.language_model.cli", PROGRAM).main()
