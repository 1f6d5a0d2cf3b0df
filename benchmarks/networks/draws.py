"""How the arrays of a network are drawn, and what a network is."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

# Draws an array, from a generator of random numbers and the size of the stress.
Draw = Callable[[np.random.Generator, float], Any]


class Network(NamedTuple):
    """A network, and what stresses it.

    Attributes:
      loss: Maps a module of layers, the parameters and the batch to the loss.
      params: The parameters, a tree of `Draw`.
      batch: The batch, each array a `Draw`.
      stress: What the sizes are sizes of.
      sizes: The sizes.
    """

    loss: Callable[..., Any]
    params: dict[str, Any]
    batch: tuple[Draw, ...]
    stress: str
    sizes: tuple[float, ...]


NETWORKS: dict[str, Network] = {}


def network(
    name: str, params: dict, batch: tuple[Draw, ...], stress: str, *sizes: float
) -> Callable:
    """Adds a loss function to the networks."""

    def add(loss):
        NETWORKS[name] = Network(loss, params, batch, stress, sizes)
        return loss

    return add


def normal(*shape: int, mean: float = 0.0, std: float = 1.0) -> Draw:
    """Draws numbers of a normal distribution."""
    return lambda random, size: random.normal(mean, std, shape)


def integers(end: int, *shape: int) -> Draw:
    """Draws integers from 0 to `end` - 1."""
    return lambda random, size: random.integers(0, end, shape)


def full(value: float, *shape: int) -> Draw:
    """Returns equal numbers."""
    return lambda random, size: np.full(shape, float(value))


def sized(draw: Draw, power: int = 1) -> Draw:
    """Multiplies by the size, or by a power of it."""
    return lambda random, size: draw(random, size) * size**power


def shifted(layer: dict[str, Draw]) -> dict[str, Draw]:
    """Adds the size to the bias of a layer."""
    return layer | {"b": lambda random, size: layer["b"](random, size) + size}


def matrix(*shape: int) -> Draw:
    """Draws matrices (in, out), whose products are of the size of their inputs."""
    return normal(*shape, std=shape[-2] ** -0.5)


def linear(m: int, n: int) -> dict[str, Draw]:
    """Returns the parameters of a linear layer."""
    return {"w": matrix(m, n), "b": normal(n, std=0.1)}


def conv(m: int, n: int, side: int = 3) -> dict[str, Draw]:
    """Returns the parameters of a convolution."""
    std = (m * side**2) ** -0.5
    return {"w": normal(n, m, side, side, std=std), "b": normal(n, std=0.1)}


def norm(n: int) -> dict[str, Draw]:
    """Returns the parameters of a norm."""
    return {"gain": normal(n, mean=1.0, std=0.1), "b": normal(n, std=0.1)}


def between(layer, norm):
    """Makes a network of a norm between two layers, by their names."""

    def loss(nn, p, x, y):
        apply = getattr(nn, layer)
        x = getattr(nn, norm)(p["norm"], apply(p["in"], x))
        return nn.squared_error(apply(p["out"], nn.relu(x)), y)

    return loss
