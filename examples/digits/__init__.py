"""Real float16 training, with and without loss scaling: `python -m examples.digits`."""
