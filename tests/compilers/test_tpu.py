"""What the TPU compiler makes of a step on one chip and on four; it needs no TPU."""

import jax
import pytest

from benchmarks.compiled import TPU, describe, devices
from benchmarks.growth import MINIMIZE, channels, compile_sharded
from benchmarks.systems import PLAIN
from benchmarks.workloads import mlp
from examples.language_model.sharding import make_mesh

LAYOUTS = {
    "1 chip": (1, "data"),
    "4 chips, replicated": (4, "data"),
    "4 chips, sharded": (4, "fsdp"),
}


@jax.numpy_dtype_promotion("standard")
@pytest.mark.parametrize(("chips", "axis"), LAYOUTS.values(), ids=LAYOUTS)
def test_step_selects_and_adds_no_collective(chips, axis):
    found = devices(TPU)
    if found is None:
        pytest.skip("install the extra `tpu`")
    workload = mlp(layers=2, width=1024, batch=512)
    mesh = make_mesh(axis, found[:chips])
    compiled = [compile_sharded(workload, name, mesh) for name in (PLAIN, MINIMIZE)]
    theirs, ours = map(describe, compiled)
    assert ours["conditionals"] == 0
    assert ours["bytes"] <= 1.15 * theirs["bytes"]
    assert ours["temp_bytes"] <= 1.05 * theirs["temp_bytes"] + 4096
    # The scalar that checks shards joins the reduction of the loss.
    theirs, ours = map(channels, compiled)
    assert ours == theirs
    assert bool(ours) == (chips > 1)
