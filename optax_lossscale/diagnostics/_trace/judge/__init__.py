"""The side that reads a `Run`, and finds the faults. It sees no program."""
