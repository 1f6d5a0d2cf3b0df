"""Runs the reinforcement learning on few and short problems."""

from examples.grpo import cli

ARGUMENTS = [
    *("--digits=2", "--layers=1", "--width=32", "--heads=2", "--problems=16"),
    *("--supervised-steps=20", "--supervised-batch=64", "--supervised-rate=1e-2"),
    *("--steps=6", "--minibatches=2", "--group=4", "--save-every=4"),
]


def main(*arguments):
    cli.main([*ARGUMENTS, *arguments])
