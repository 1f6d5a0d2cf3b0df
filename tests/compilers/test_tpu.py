"""What the TPU compiler makes of a step on one chip and on four; it needs no TPU."""

import jax
import pytest

from benchmarks.compiled import TPU, describe, devices
from benchmarks.growth import MINIMIZE, channels, compile_sharded
from benchmarks.systems import PLAIN
from benchmarks.workloads import mlp
from examples.language_model.sharding import make_mesh

LAYERS = 2
# With libtpu 0.0.50 one kernel more in such a step takes so much temporary memory,
# whatever the width. With 0.0.42 it takes none.
KERNEL = 63 * 2**10
LAYOUTS = {
    "1 chip": (1, "data"),
    "4 chips, replicated": (4, "data"),
    "4 chips, sharded": (4, "fsdp"),
}


def compile_both(width, chips, axis):
    """Compiles the step without and with loss scaling, for so many chips."""
    found = devices(TPU)
    if found is None:
        pytest.skip("install the extra `tpu`")
    workload = mlp(layers=LAYERS, width=width, batch=512)
    mesh = make_mesh(axis, found[:chips])
    return [compile_sharded(workload, name, mesh) for name in (PLAIN, MINIMIZE)]


@jax.numpy_dtype_promotion("standard")
@pytest.mark.parametrize(("chips", "axis"), LAYOUTS.values(), ids=LAYOUTS)
def test_step_selects_and_adds_no_collective(chips, axis):
    compiled = compile_both(1024, chips, axis)
    theirs, ours = map(describe, compiled)
    assert ours["conditionals"] == 0
    assert ours["bytes"] <= 1.15 * theirs["bytes"]
    # The gradients stay in fast memory, but the plain step updates a layer in the
    # kernel of its gradient. A step that may be skipped has one kernel more for each.
    kernels = LAYERS * KERNEL if theirs["temp_bytes"] else 0
    assert ours["temp_bytes"] <= theirs["temp_bytes"] + kernels
    # The scalar that checks shards joins the reduction of the loss.
    theirs, ours = map(channels, compiled)
    assert ours == theirs
    assert bool(ours) == (chips > 1)


@pytest.mark.exhaustive
@jax.numpy_dtype_promotion("standard")
@pytest.mark.parametrize(("chips", "axis"), LAYOUTS.values(), ids=LAYOUTS)
def test_a_wide_step_keeps_at_most_its_gradients(chips, axis):
    """They do not fit into fast memory, and no update may start before all are checked.

    They are float16, as the backward pass computes them.
    """
    width = 4096
    theirs, ours = map(describe, compile_both(width, chips, axis))
    gradients = 2 * LAYERS * width**2 // (chips if axis == "fsdp" else 1)
    assert ours["temp_bytes"] <= 1.05 * theirs["temp_bytes"] + gradients
