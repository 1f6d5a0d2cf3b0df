"""The side that reads a `Run`, and says what is wrong. It sees no program."""
