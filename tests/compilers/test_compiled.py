"""What the compilers of accelerators make of the optimizer's step; none is needed."""

import jax
import pytest
from jax.sharding import SingleDeviceSharding

from benchmarks.compiled import H100, TPU, device, measure
from benchmarks.systems import PLAIN
from benchmarks.workloads import optimizer_step

PARAMETERS = 20_000_000
GRADIENTS = 4 * PARAMETERS
# Adam reads or writes seven numbers for each parameter; the check reads one more.
LIMITS = {TPU: 1.13, H100: 1.144}


@pytest.fixture(scope="module", params=[TPU, H100])
def rows(request):
    """Returns what this package compiles to, by system."""
    if device(request.param) is None:
        pytest.skip(f"the compiler for {request.param} is not installed")
    workload = optimizer_step(PARAMETERS, 20)
    with jax.numpy_dtype_promotion("standard"):
        ours = ("minimize", "apply_gradients", "update")
        names = [name for name in workload.systems() if name.startswith(ours)]
        found = measure(request.param, workload, names)
    limit = LIMITS[request.param]
    return {row["system"]: {**row, "limit": limit} for row in found}


@pytest.mark.parametrize(
    "call", ["minimize", "apply_gradients of unscaled", "update of unscaled"]
)
def test_reads_the_gradients_once_more_and_nothing_else(rows, call):
    plain, ours = rows[PLAIN], rows[call]
    assert ours["ratio"] <= ours["limit"]
    assert ours["conditionals"] == 0
    # Scalars are copied, and partial sums stored; on TPU in its fast memory.
    assert ours["copied_bytes"] <= plain["copied_bytes"] + 64
    assert ours["temp_bytes"] <= plain["temp_bytes"] + GRADIENTS / 10


def test_fixed_scale_costs_nothing(rows):
    assert rows["minimize, fixed scale"]["ratio"] <= 1.001


def test_a_gpu_drops_a_cast_to_float16_unless_forbidden():
    h100 = device(H100)
    if h100 is None:
        pytest.skip(f"the compiler for {H100} is not installed")
    x = jax.ShapeDtypeStruct((8,), "float32", sharding=SingleDeviceSharding(h100))
    lowered = jax.jit(lambda x: x.astype("float16").astype("float32")).lower(x)
    assert "f16" not in lowered.compile().as_text()
    options = {"xla_allow_excess_precision": False}
    assert "f16" in lowered.compile(options).as_text()
