"""The side that runs a program, and its twin in float32. It makes a `Run`."""
