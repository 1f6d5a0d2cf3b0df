"""A language model in float16: `python -m examples.language_model --help`."""

PROGRAM = "python -m examples.language_model"
