"""What loss scaling costs, here and elsewhere: `python -m benchmarks`."""
