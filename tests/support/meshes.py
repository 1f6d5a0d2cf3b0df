"""Functions that run on several devices."""

import jax
from jax.sharding import AxisType, PartitionSpec as P

WHOLE, PARTS = P(), P("batch")


def mesh_of(kind=AxisType.Auto, **sizes):
    """Returns a mesh of devices, with axes of these names and sizes."""
    kinds = (kind,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds)


def over_devices(in_specs, out_specs, mesh=None, **options):
    """Compiles a function that each device runs on its parts of the arguments."""
    specs = {"in_specs": in_specs, "out_specs": out_specs, **options}
    mesh = mesh or mesh_of(batch=8)
    return lambda f: jax.jit(jax.shard_map(f, mesh=mesh, **specs))


def varying(x, axis="batch"):
    """Returns an array that may differ along an axis, whatever JAX calls the cast."""
    if hasattr(jax.lax, "pcast"):
        return jax.lax.pcast(x, axis, to="varying")
    return jax.lax.pvary(x, axis)  # Before JAX 0.8.2.
