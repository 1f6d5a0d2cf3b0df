"""Reinforcement learning in float16: `python -m examples.grpo --help`."""

PROGRAM = "python -m examples.grpo"
