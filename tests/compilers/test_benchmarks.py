"""The benchmarks compare equal steps, and the pages show their results."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import exhaustive_but

from benchmarks import by_hand, gpu, hlo, pages
from benchmarks.systems import PLAIN, lower
from benchmarks.workloads import mlp, optimizer_step, transformer
from optax_lossscale.diagnostics import _compare


class TestHlo:
    def test_reads_what_this_jax_compiles(self):
        x = jnp.ones((64, 64))
        compiled = jax.jit(lambda x: x * 2, donate_argnums=0).lower(x).compile()
        module = hlo.parse(compiled.as_text())
        assert module.kernels() == 1
        assert module.bytes_moved() == 2 * x.nbytes


@functools.cache
def steps(workload, name, count=3):
    """Runs a system for some steps, and returns the parameters."""
    make = workload.systems()[name]
    with jax.numpy_dtype_promotion("standard"):
        system = make()
        params = workload.init()
        state = system.init(params)
        batches = workload.batches()
        compiled = lower(system, params, state, *batches[0]).compile()
        carry = (params, jax.tree.leaves(state))
        for batch in (batches * count)[:count]:
            *carry, loss = compiled(*carry, *batch)
        assert np.isfinite(loss)
    return jax.device_get(jax.tree.leaves(carry[0]))


MODULES = {
    "jmp": "jmp",
    "mpx": "mpx",
    "Keras 3": "keras",
    "Keras 3, no scaling": "keras",
}
WORKLOADS = {
    "mlp": mlp(layers=2, width=32, batch=4),
    "transformer": transformer(1, 32, context=8, batch=2),
}
SYSTEMS = list(WORKLOADS["mlp"].systems())[1:]
CASES = [("mlp", name) for name in SYSTEMS] + [("transformer", "minimize")]
BY_DEFAULT = [("mlp", name) for name in ("minimize", "jmp", "mpx", "Keras 3")]


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
@pytest.mark.parametrize("case", exhaustive_but(CASES, BY_DEFAULT), ids="-".join)
def test_every_system_trains_as_the_plain_one(case):
    workload, name = case
    pytest.importorskip(MODULES.get(name, "jax"))
    chosen = WORKLOADS[workload]
    for got, wanted in zip(steps(chosen, name), steps(chosen, PLAIN), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=2e-2, atol=5e-3)


def test_overflows_are_skipped():
    workload = optimizer_step(1000, 2, overflow=True)
    assert len(workload.batches()) == 10
    params = steps(workload, "minimize", 20)
    assert all(np.isfinite(p).all() for p in params)
    assert not all(np.isfinite(p).all() for p in steps(workload, PLAIN, 20))


def test_every_table_is_on_a_page():
    text = "".join(path.read_text() for path in pages.PAGES)
    assert all(table in text for table in pages.tables())


@pytest.mark.exhaustive
def test_steps_are_timed_on_any_device():
    params, batch, make = by_hand.mlp(layers=2, n=8, batch=4)
    systems = gpu.ways(make(jnp.float32), make(jnp.float16))
    chosen = {name: systems[name] for name in (gpu.FLOAT32, gpu.STATIC, gpu.FLAX)}
    with jax.numpy_dtype_promotion("standard"):
        rows = _compare.measure(
            chosen, by_hand.arrays(params), by_hand.arrays(batch), 1e-3
        )
    assert list(rows) == list(chosen)
    assert all(row["low"] <= row["ms"] <= row["high"] for row in rows.values())
