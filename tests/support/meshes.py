"""Functions that run on several devices, or as if on several."""

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

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


def on_one_device(kind, f, params, *data, run=lambda f, *args: f(*args)):
    """Runs a function of parameters and data on a mesh of one device, "batch".

    Manual: in `jax.shard_map`, where all arguments vary along it. Explicit: matrices of
    the data are sharded over it. `run` calls the jitted function.
    """
    mesh = mesh_of(kind if kind == AxisType.Explicit else AxisType.Auto, batch=1)
    if kind == AxisType.Manual:

        def local(*args):
            return jax.tree.map(lambda x: x[None], f(*jax.tree.map(varying, args)))

        mapped = over_devices(WHOLE, PARTS, mesh)(local)
        return jax.tree.map(lambda x: x[0], run(mapped, params, *data))
    whole, parts = (NamedSharding(mesh, spec) for spec in (WHOLE, PARTS))
    with jax.set_mesh(mesh):
        data = [jax.device_put(x, parts if x.ndim > 1 else whole) for x in data]
        return run(jax.jit(f), jax.device_put(params, whole), *data)


def types_on_one_device(kind, f, *args):
    """Returns the types of what a function returns there, axes and shardings too."""
    found = []

    def noted(*args):
        out = f(*args)
        found.append(jax.tree.map(jax.typeof, out))
        return out

    on_one_device(kind, noted, *args, run=lambda f, *args: f.trace(*args) and [])
    return found[0]
