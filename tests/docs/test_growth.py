"""The page that tells how the cost grows shows the committed results."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import report
from benchmarks.compiled import H100, TPU
from benchmarks.growth import chips, compiling, diagnostics, options, page, timing
from benchmarks.systems import lower
from benchmarks.workloads import optimizer_step

FOUND = report.load(page.RESULTS)
PAGE = page.PAGE.read_text()


@pytest.fixture(autouse=True)
def standard_dtype_promotion(strict_dtype_promotion):
    """Lets the benchmarks promote dtypes."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.parametrize("table", page.tables(FOUND), ids=range(11))
def test_the_page_shows_the_committed_results(table):
    assert table in PAGE


def test_tables_are_written_anew():
    assert page.refresh(PAGE, FOUND) == PAGE
    changed = re.sub(r"\| 1 \|", "| 2 |", PAGE)
    assert changed != PAGE
    assert page.refresh(changed, FOUND) == PAGE


def test_the_page_tells_the_machine_and_the_versions():
    assert page.versions(FOUND) in " ".join(PAGE.split())


def test_every_part_was_measured():
    def seen(part, *keys):
        return {tuple(row[key] for key in keys) for row in FOUND[part]}

    sizes = {*((n, 20) for n in compiling.PARAMETERS), *compiling.OTHER_SIZES}
    every = {(x, n) for x in ("adam", "sgd") for n in compiling.LEAVES}
    accelerators = {(x, n) for x in (TPU, H100) for n in compiling.ACCELERATOR_LEAVES}
    assert seen("compile", "optimizer", "leaves") == every
    assert seen("accelerators", "target", "leaves") == accelerators
    assert seen("scanned", "target") == {("CPU",), (TPU,), (H100,)}
    assert seen("sizes", "parameters", "leaves") == sizes
    assert seen("times", "parameters", "leaves") == {*timing.SIZES}
    assert len(FOUND["chips"]) == len(chips.SYSTEMS) * len(chips.TOPOLOGIES)
    assert seen("simulated", "devices") == {(n,) for n in chips.SIMULATED}
    assert [row["option"] for row in FOUND["options"]] == [*options.make_options(1)]
    assert seen("diagnostics", "leaves") == {(n,) for n in compiling.LEAVES}
    assert seen("trace", "layers") == {(n,) for n in diagnostics.LAYERS}


# On a TPU the check reduces one scalar, on a CPU one for each of four arrays.
@pytest.mark.parametrize(("part", "most"), [("chips", 4), ("simulated", 16)])
def test_loss_scaling_adds_no_collective(part, most):
    rows = {
        name: [x for x in FOUND[part] if x["system"] == name] for name in chips.SYSTEMS
    }
    for before, after in zip(*rows.values(), strict=True):
        assert after["arrays"] == before["arrays"]
        assert after["array_bytes"] == before["array_bytes"]
        assert after["small"] == before["small"]
        is_alone = after.get("devices") == 1
        added = after["small_bytes"] - before["small_bytes"]
        assert (added == 0) if is_alone else (0 < added <= most)


def test_one_collective_may_be_several_instructions():
    text = """
  %a = f16[64,64]{1,0} all-gather(%x), channel_id=1, dimensions={0}
  %b = f16[64,64]{1,0} all-gather(%x), channel_id=1, dimensions={0}
  %c = (f32[], f32[]) all-reduce(%y, %z), channel_id=2, to_apply=%add
"""
    assert chips.collectives(text) == {
        "arrays": {"all-gather": 1},
        "array_bytes": 8192,
        "small": {"all-reduce": 1},
        "small_bytes": 8,
    }


def test_the_floor_skips_an_overflow():
    workload = optimizer_step(16, 2, overflow=True)
    system = compiling.bare(workload)
    params = workload.init()
    for (grads,), changes in zip(workload.batches()[-2:], (True, False), strict=True):
        new, _, _ = jax.jit(system.step)(params, system.init(params), grads)
        assert bool(jnp.any(new[0] != params[0])) == changes


@pytest.mark.parametrize("name", options.make_options(1))
def test_options_train_as_their_baselines(name):
    option, workload = options.make_options(2)[name], optimizer_step(16, 2)
    batch = workload.batches()[0] * option.losses
    found = []
    for system in (option.system, option.baseline):
        params = workload.init()
        state = system.init(params)
        compiled = lower(system, params, state, *batch).compile()
        new, _, _ = compiled(params, jax.tree.leaves(state), *batch)
        found.append(new[0])
    np.testing.assert_allclose(*found, rtol=1e-2, atol=2e-3)


def test_the_figure_has_the_measured_points():
    above, below = page.plot(FOUND).axes
    assert [len(line.get_xdata()) for line in above.lines] == [4, 4, 4, 3, 3]
    assert len(below.lines[0].get_xdata()) == len(compiling.PARAMETERS) + 1
