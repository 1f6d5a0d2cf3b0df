"""Experiments that justify choices of the package, and their results."""
