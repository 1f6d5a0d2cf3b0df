"""How the cost grows: `python -m benchmarks.growth`."""
