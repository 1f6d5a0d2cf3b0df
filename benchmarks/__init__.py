"""What loss scaling costs, in this package and its peers: `python -m benchmarks`."""
