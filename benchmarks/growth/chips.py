"""Counts what the devices of a sharded training step send to each other."""

import functools
import re
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from benchmarks import hlo
from benchmarks.compiled import TPU, describe, devices
from benchmarks.growth.compiling import BARE, bare, shapes
from benchmarks.measure import Running, compare, cpu_seconds
from benchmarks.systems import PLAIN, System, lower
from benchmarks.workloads import Workload, mlp
from examples.language_model.sharding import make_mesh, shard_batch, shard_state

SYSTEMS = (PLAIN, "minimize, auto")
# The topology of a slice, and the number of slices.
TOPOLOGIES = (
    ("v5e:2x2", 1),
    ("v5e:4x4", 1),
    ("v5e:8x8", 1),
    ("v5e:16x16", 1),
    ("v5e:4x4", 2),
)
WIDTH, BATCH = 4096, 256  # of the perceptron; the batch is that of a chip
SIMULATED = (1, 2, 4, 8)
# A collective of fewer bytes reduces scalars.
SMALL = 4096
_KINDS = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter|send"
_COLLECTIVE = re.compile(rf"= (.*?) ({_KINDS})(?:-start)?\(.*?channel_id=(\d+)")


def collectives(text: str) -> dict[str, Any]:
    """Counts the collectives of a compiled program, and the bytes of their results.

    Several instructions may stand for one collective, which runs while others do. They
    have the same channel.
    """
    found = {channel: (t, kind) for t, kind, channel in _COLLECTIVE.findall(text)}
    sizes = [(hlo.type_bytes(t), kind) for t, kind in found.values()]
    arrays = [kind for size, kind in sizes if size >= SMALL]
    small = [kind for size, kind in sizes if size < SMALL]
    return {
        "arrays": {kind: arrays.count(kind) for kind in sorted({*arrays})},
        "array_bytes": sum(size for size, _ in sizes if size >= SMALL),
        "small": {kind: small.count(kind) for kind in sorted({*small})},
        "small_bytes": sum(size for size, _ in sizes if size < SMALL),
    }


def shard(system: System, mesh: Mesh) -> System:
    """Returns a system whose state is sharded, and the parameters after each step."""

    def init(params):
        state = system.init(params)
        return jax.device_put(state, shard_state(state, mesh))

    def step(params, state, *batch):
        new = system.step(params, state, *batch)
        shardings = (*shard_state((params, state), mesh), NamedSharding(mesh, P()))
        return jax.lax.with_sharding_constraint(new, shardings)

    return System(init, step)


def lower_sharded(workload: Workload, name: str, mesh: Mesh) -> jax.stages.Lowered:
    """Lowers a sharded step for devices that need not be present."""
    system = workload.systems()[name]()
    params, state, *batch = shapes(workload, system)
    shardings = (*shard_state((params, state), mesh), shard_batch(mesh, ndim=2))

    def place(x, sharding):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    placed = jax.tree.map(place, (params, state), shardings[:2])
    batch = [place(x, shardings[2]) for x in batch]
    return lower(shard(system, mesh), *placed, *batch)


def on_chips(topology: str, slices: int) -> Iterator[dict[str, Any]]:
    """Yields what a chip of a TPU v5e moves and sends in a step, by system.

    Args:
      topology: The name of the topology of a slice.
      slices: The number of slices.
    """
    options = {"num_slices": slices} if slices > 1 else {}
    chips = devices(TPU, topology_name=topology, **options) or []
    mesh = make_mesh(f"data={slices},fsdp", chips)
    workload = mlp(layers=2, width=WIDTH, batch=BATCH * len(chips))
    for name in SYSTEMS:
        seconds, compiled = cpu_seconds(lower_sharded(workload, name, mesh).compile)
        yield {
            "chips": len(chips),
            "slices": slices,
            "system": name,
            "seconds": seconds,
            **describe(compiled),
            **collectives(compiled.as_text()),
        }


def simulated(count: int) -> Iterator[dict[str, Any]]:
    """Yields what devices simulated by a CPU send in a step, and its time, by system.

    Args:
      count: The number of devices. The process has at least as many.
    """
    mesh = make_mesh("fsdp", jax.devices("cpu")[:count])
    workload = mlp(layers=4, width=512, batch=16 * count)
    split = shard_batch(mesh, ndim=2)
    batches = [[jax.device_put(x, split) for x in b] for b in workload.batches()]
    systems = {**workload.systems(), BARE: functools.partial(bare, workload)}

    def running(name):
        params = workload.init()
        params = jax.device_put(params, shard_state(params, mesh))
        return Running(shard(systems[name](), mesh), params, batches, seconds=1)

    plain = running(PLAIN)
    for name in (*SYSTEMS, BARE):
        scaled = running(name)
        yield {
            "devices": count,
            "system": name,
            **compare(plain, scaled, seconds=5),
            **collectives(scaled.compiled.as_text()),
        }
