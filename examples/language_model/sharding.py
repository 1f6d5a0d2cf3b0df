"""Devices in a mesh of two axes, and where arrays belong on them.

Batches are split over both axes. Parameters and the state of the optimizer are split
over the axis `fsdp` alone (fully sharded data parallelism), and copied over `data`.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

from examples.common.settings import SettingError

AXES = ("data", "fsdp")


def make_mesh(text: str, devices: Sequence[Any]) -> Mesh:
    """Returns a mesh of all devices.

    Args:
      text: The size of each axis, `data=2,fsdp=4` for example. An axis without a number
        gets all devices that are left, and an axis that is not named gets one.
      devices: The devices.

    Raises:
      SettingError: If `text` is something else, or does not fit the devices.
    """
    sizes: dict[str, int] = dict.fromkeys(AXES, 1)
    rest, named = None, set()
    for part in text.split(","):
        axis, equals, size = part.partition("=")
        is_axis = axis in AXES and axis not in named
        if not is_axis or not (size.isdecimal() if equals else rest is None):
            raise SettingError(
                "mesh", "be like 'data', 'data=8' or 'data=2,fsdp=4'", text
            )
        named.add(axis)
        sizes[axis] = int(size) if equals else 1
        rest = rest if equals else axis
    if rest:
        sizes[rest] = len(devices) // max(math.prod(sizes.values()), 1)
    if math.prod(sizes.values()) != len(devices):
        raise SettingError("mesh", f"have all {len(devices)} devices", text)
    grid = np.array(devices).reshape(*sizes.values())
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def shard_state(state: Any, mesh: Mesh) -> Any:
    """Returns the sharding of each array of a state, given their shapes.

    Matrices are split along the largest dimension that the axis `fsdp` divides. Moments
    and averages have the shapes of their parameters, and so lie where these do.
    """
    size = mesh.shape["fsdp"]

    def shard(x):
        spec = [None] * x.ndim
        divisible = [i for i, length in enumerate(x.shape) if length % size == 0]
        if x.ndim > 1 and divisible:
            spec[max(divisible, key=lambda i: x.shape[i])] = "fsdp"
        return NamedSharding(mesh, P(*spec))

    return jax.tree.map(shard, state)


def shard_batch(mesh: Mesh, ndim: int, axis: int = 0) -> NamedSharding:
    """Returns the sharding of an array of sequences, which are along an axis."""
    spec: list[Any] = [None] * ndim
    spec[axis] = AXES
    return NamedSharding(mesh, P(*spec))


def put_batch(batch: np.ndarray, mesh: Mesh) -> jax.Array:
    """Puts tokens, [..., sequence, time], on all devices.

    Each process passes the same tokens, and puts the rows of its own devices.
    """
    sharding = shard_batch(mesh, batch.ndim, axis=-2)
    return jax.make_array_from_callback(batch.shape, sharding, batch.__getitem__)
