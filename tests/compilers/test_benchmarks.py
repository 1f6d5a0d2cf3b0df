"""The benchmarks compare equal steps, and the pages show their results."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import exhaustive_but

from benchmarks import hlo, pages, report
from benchmarks.measure import measure
from benchmarks.systems import PLAIN, SKIPS, lower
from benchmarks.workloads import mlp, optimizer_step, transformer

PROGRAM = """\
HloModule jit_step, is_scheduled=true

%fused (p.0: f32[4,2]) -> f32[4,2] {
  %p.0 = f32[4,2]{1,0} parameter(0)
  ROOT %negate = f32[4,2]{1,0} negate(%p.0)
}

%keep (k: (f32[4,2])) -> (f32[4,2]) {
  ROOT %k = (f32[4,2]{1,0}) parameter(0)
}

%run (r: (f32[4,2])) -> (f32[4,2]) {
  %r = (f32[4,2]{1,0}) parameter(0)
  %g = f32[4,2]{1,0} get-tuple-element(%r), index=0
  %f = f32[4,2]{1,0} fusion(%g), kind=kLoop, calls=%fused
  ROOT %t = (f32[4,2]{1,0}) tuple(%f)
}

ENTRY %main.9 (a: f32[4,2], /*index=1*/b: pred[]) -> (f32[4,2]) {
  %a = f32[4,2]{1,0:T(8,128)} parameter(0), metadata={op_name="a{b}"}
  %b = pred[] parameter(1)
  %copy.1 = f32[4,2]{1,0} copy(%a)
  %ab = (f32[4,2]{1,0}) tuple(%copy.1)
  ROOT %c = (f32[4,2]{1,0}) conditional(%b, %ab, %ab), branch_computations={%keep, %run}
}
"""


class TestHlo:
    def test_reads_a_program(self):
        module = hlo.parse(PROGRAM)
        assert module.entry == "main.9"
        assert module.kernels() == 2  # the copy, and the fusion in the longer branch
        assert module.count("conditional") == 1
        assert module.bytes_of("copy") == 32
        assert module.bytes_moved() == 4 * 32

    def test_size_of_a_type(self):
        assert hlo.type_bytes("(f16[3], /*index=1*/pred[5])") == 11
        assert hlo.type_bytes("c64[2]") == 16
        assert hlo.type_bytes("u32[0,7]") == hlo.type_bytes("token[]") == 0

    def test_reads_what_this_jax_compiles(self):
        x = jnp.ones((64, 64))
        compiled = jax.jit(lambda x: x * 2, donate_argnums=0).lower(x).compile()
        module = hlo.parse(compiled.as_text())
        assert module.kernels() == 1
        assert module.bytes_moved() == 2 * x.nbytes


@functools.cache
def steps(workload, name, count=3):
    """Runs a system for some steps, and returns the parameters."""
    make = workload._replace(skips=SKIPS).systems()[name]
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
    "given": optimizer_step(1000, 2),
    "mlp": mlp(layers=2, width=32, batch=4),
    "transformer": transformer(1, 32, context=8, batch=2),
}
CASES = [
    (workload, name)
    for workload in ("given", "mlp")
    for name in list(WORKLOADS[workload]._replace(skips=SKIPS).systems())[1:]
] + [("transformer", "minimize, auto")]
BY_DEFAULT = [("mlp", name) for name in ("minimize, auto", "jmp", "mpx", "Keras 3")]


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
@pytest.mark.parametrize("case", exhaustive_but(CASES, BY_DEFAULT), ids="-".join)
def test_every_system_trains_as_the_plain_one(case):
    workload, name = case
    pytest.importorskip(MODULES.get(name, "jax"))
    chosen = WORKLOADS[workload]
    if (workload, name) == ("given", "Keras 3"):
        pytest.skip("its epsilon is large relative to gradients divided by the scale")
    if workload == "given":
        # These gradients do not depend on the scale, so systems that unscale them use
        # smaller gradients. The step of Adam is nearly the same for both.
        tolerance = {"rtol": 1e-2, "atol": 2e-3}
    else:
        tolerance = {"rtol": 2e-2, "atol": 5e-3}
    for got, wanted in zip(steps(chosen, name), steps(chosen, PLAIN), strict=True):
        np.testing.assert_allclose(got, wanted, **tolerance)


def test_overflows_are_skipped():
    workload = optimizer_step(1000, 2, overflow=True)
    assert len(workload.batches()) == 10
    params = steps(workload, "minimize, auto", 20)
    assert all(np.isfinite(p).all() for p in params)
    assert not all(np.isfinite(p).all() for p in steps(workload, PLAIN, 20))


def test_measures_every_requested_system():
    workload = optimizer_step(1000, 2)._replace(column="1e3")
    with jax.numpy_dtype_promotion("standard"):
        rows = list(measure(workload, 0.01, "apply_gradients"))
    assert [row["system"] for row in rows] == [
        PLAIN,
        "apply_gradients of unscaled, auto",
    ]
    results = {**report.about(), "rows": rows}
    (text,) = report.timing_tables(results)
    assert "| optimizer step / plain | 1e3 |" in text
    assert f"| apply_gradients of unscaled | {rows[1]['ratio']:.2f} |" in text
    assert workload.name in report.full_report(results)


def test_every_table_is_on_a_page():
    text = "".join(path.read_text() for path in pages.PAGES)
    assert all(table in text for table in pages.tables())
