"""The side that runs a program, and a shadow of it in float32. It returns a `Run`."""
