"""What the examples share: the command line, settings, logs, checkpoints, signals."""
