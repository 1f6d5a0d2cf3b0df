"""The rules: how a loss scale changes."""
