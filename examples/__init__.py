"""Examples: `python -m examples.digits` and `python -m examples.language_model`."""
