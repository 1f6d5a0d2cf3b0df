"""Examples: `python -m examples.digits`, `examples.language_model`, `examples.grpo`."""
