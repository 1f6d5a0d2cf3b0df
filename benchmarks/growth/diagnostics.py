"""Measures how long the diagnostics take before their first result."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import trace
from benchmarks.growth.compiling import SIZE
from benchmarks.measure import cpu_seconds
from benchmarks.workloads import transformer
from optax_lossscale.diagnostics import (
    exponent_histogram,
    suggest_loss_scale,
    underflow_stats,
)

LAYERS = (1, 2, 4, 8)
FUNCTIONS = {
    "underflow_stats": functools.partial(underflow_stats, state=1.0),
    "exponent_histogram": exponent_histogram,
    "suggest_loss_scale": suggest_loss_scale,
}
CALLS = FUNCTIONS | {f"{name} in jax.jit": jax.jit(f) for name, f in FUNCTIONS.items()}


def by_leaves(leaves: int) -> Iterator[dict[str, Any]]:
    """Yields the time of a first call, which compiles."""
    grads = [jnp.full(SIZE, 1e-3 * (i + 1)) for i in range(leaves)]
    for name, function in CALLS.items():
        seconds, _ = cpu_seconds(lambda f=function: jax.block_until_ready(f(grads)))
        yield {"call": name, "leaves": leaves, "seconds": seconds}


def by_layers(layers: int) -> Iterator[dict[str, Any]]:
    """Yields what a trace costs next to a training step."""
    yield {"layers": layers, **trace.measure(transformer(layers), rounds=15)}
