"""Runs the command line."""

from examples.language_model.cli import main

if __name__ == "__main__":
    main()
