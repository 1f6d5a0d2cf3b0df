"""Networks that are written once, and run in JAX and in PyTorch.

Each is a function `loss(nn, params, *batch)`, where `nn` is `in_jax` or `in_torch`: the
layers as people write them there. A size stresses it.
"""

from benchmarks.networks import (
    images as images,
    losses as losses,
    perceptrons as perceptrons,
    sequences as sequences,
)
from benchmarks.networks.draws import NETWORKS as NETWORKS
