"""Experiments behind the choices that the package makes, and their results."""
