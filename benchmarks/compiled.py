"""Compiles the same steps for accelerators that need not be present.

`python -m benchmarks.compiled` compiles for a TPU v5e if libtpu is installed
(`pip install 'jax[tpu]'`), and for an H100 if JAX's CUDA plugin is installed
(`pip install 'jax[cuda12]'`). It adds the results to `results/compiled.json`.
"""

import functools
import importlib.util
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import Sharding, SingleDeviceSharding
from jax.stages import Compiled

from benchmarks import hlo, report
from benchmarks.systems import PLAIN, System, lower
from benchmarks.workloads import Workload, optimizer_step

RESULTS = report.RESULTS / "compiled.json"
TPU, H100, CPU = "TPU v5e", "H100", "CPU"


def devices(target: str, **options: Any) -> list[jax.Device] | None:
    """Returns devices to compile for, or None if their compiler is not installed.

    Args:
      target: `TPU`, `H100` or `CPU`.
      **options: Changes what is asked of `topologies.get_topology_desc`.
    """
    if target == CPU:
        return jax.devices("cpu")
    if target == TPU and importlib.util.find_spec("libtpu"):
        # No TPU is used, so several processes may compile at once.
        os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
        os.environ["TPU_SKIP_MDS_QUERY"] = "1"
        options = {"platform": "tpu", "topology_name": "v5e:2x2", **options}
    elif target == H100 and importlib.util.find_spec("jax_cuda12_plugin"):
        os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
        config = Path(__file__).with_name("h100.txtpb").read_text()
        options = {"platform": "cuda", "topology_name": "h100", **options}
        options |= {"target_config": config, "topology": "1x1x1"}
    else:
        return None
    return topologies.get_topology_desc(**options).devices


def device(target: str) -> jax.Device | None:
    """Returns one of `devices`."""
    all_devices = devices(target)
    return all_devices and all_devices[0]


def shapes(workload: Workload, system: System) -> tuple:
    """Returns the arguments of a step as shapes; no array is made."""
    params = jax.eval_shape(workload.init)
    batch = jax.eval_shape(lambda: tuple(workload.batches()[0]))
    return params, jax.eval_shape(system.init, params), *batch


def place(x: jax.ShapeDtypeStruct, sharding: Sharding) -> jax.ShapeDtypeStruct:
    """Returns a shape with a sharding."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def compile_step(workload: Workload, system: System, device: jax.Device) -> Compiled:
    """Compiles a step for a device, with donated parameters and state."""
    on_device = functools.partial(place, sharding=SingleDeviceSharding(device))
    return lower(system, *jax.tree.map(on_device, shapes(workload, system))).compile()


def describe(compiled: Compiled) -> dict[str, Any]:
    """Returns bytes, flops, the code's size, and numbers of branches and kernels."""
    module = hlo.parse(compiled.as_text())
    # The CUDA compiler reports no costs: count the operands and results of all kernels.
    costs = compiled.cost_analysis() or {}
    memory: Any = compiled.memory_analysis()
    return {
        "bytes": costs.get("bytes accessed", module.bytes_moved()),
        "flops": costs.get("flops"),
        "code": memory.generated_code_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "copied_bytes": module.bytes_of("copy"),
        "conditionals": module.count("conditional"),
        "kernels": module.kernels(),
    }


def measure(
    target: str, workload: Workload, names: Iterable[str] | None = None
) -> list[dict[str, Any]] | None:
    """Returns a row per system, or per system in `names`; the plain one comes first."""
    if (on := device(target)) is None:
        return None
    rows = []
    for name, make in workload.systems().items():
        if names is None or name == PLAIN or name in names:
            row = describe(compile_step(workload, make(), on))
            rows.append({"workload": workload.name, "system": name, **row})
            rows[-1]["ratio"] = row["bytes"] / rows[0]["bytes"]
    return rows


STEP = optimizer_step(20_000_000, 20)
PARTS = {target: functools.partial(measure, target, STEP) for target in (TPU, H100)}


def main() -> None:
    """Compiles for all targets, or those that are named, and writes the results."""
    results = report.measure_parts("benchmarks.compiled", __doc__, PARTS, RESULTS)
    print("\n".join(report.compiled_tables(results)))


if __name__ == "__main__":
    main()
