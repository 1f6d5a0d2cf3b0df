"""Measures the time of the step of Adam on this machine."""

from collections.abc import Iterator
from typing import Any

from benchmarks import measure
from benchmarks.growth.compiling import LEAVES, PARAMETERS
from benchmarks.workloads import optimizer_step

# Without 1e9 parameters: those, the state of two systems and the gradients need 28 GB.
SIZES = (
    *((n, 20) for n in PARAMETERS[:-1]),
    *((2 * 10**7, leaves) for leaves in LEAVES),
)


def by_size(parameters: int, leaves: int) -> Iterator[dict[str, Any]]:
    """Yields the time of a step relative to plain Optax, by system."""
    workload = optimizer_step(parameters, leaves)
    for row in measure.measure(workload, 3.0, only=" of unscaled, auto"):
        yield {"leaves": leaves, **row}
