"""Shared by the examples: the command line, settings, logs, checkpoints, signals."""
