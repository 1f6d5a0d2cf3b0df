"""Runs the command line; `--help` lists its options."""

import sys

from examples.language_model import PROGRAM


def main() -> None:
    """Runs the command line, if all packages are there that it needs."""
    try:
        from examples.language_model import cli
    except ModuleNotFoundError as error:
        install = "pip install -e '.[examples]'"
        print(f"{PROGRAM}: error: needs {error.name}; {install}", file=sys.stderr)
        sys.exit(2)
    try:
        cli.main()
    except KeyboardInterrupt:  # before the training, which catches signals itself
        print(f"{PROGRAM}: interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
