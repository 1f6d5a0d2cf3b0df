"""What loss scaling adds to the steps of a real model, for a GPU and for TPUs."""

import dataclasses
import re

import jax
import pytest

from benchmarks.compiled import H100, TPU, devices
from examples.language_model.config import PRESETS
from examples.language_model.sharding import make_mesh
from examples.language_model.step import Trainer

COLLECTIVES = r"all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"


def lower(preset, devices, loss_scale):
    config = dataclasses.replace(PRESETS[preset], loss_scale=loss_scale)
    trainer = Trainer(config, make_mesh(config.mesh, devices))
    with jax.numpy_dtype_promotion("standard"):
        return trainer.step.trace(trainer.state, trainer.batch).lower()


def collectives(compiled):
    """Returns the collectives, without those whose results are all scalars."""
    found = re.findall(rf"= (.*?) ({COLLECTIVES})(?:-start)?\(", compiled.as_text())
    shapes = [(kind, set(re.findall(r"\[([\d,]*)\]", shape))) for shape, kind in found]
    big = [kind for kind, dimensions in shapes if dimensions != {""}]
    return {kind: big.count(kind) for kind in big}, len(shapes) - len(big)


def held(compiled):
    memory = compiled.memory_analysis()
    return memory.temp_size_in_bytes + memory.argument_size_in_bytes


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("target", "preset"), [(H100, "gpt2-small"), (TPU, "gpt2-small-tpu")]
)
def test_loss_scaling_adds_next_to_nothing(target, preset):
    found = devices(target)
    if found is None:
        pytest.skip(f"the compiler for {target} is not installed")
    plain, scaled = (
        lower(preset, found, loss_scale).compile() for loss_scale in ("none", "dynamic")
    )
    # Scalars: the check of the gradients, and the largest of them, which is logged.
    (plain_big, plain_scalars), (big, scalars) = map(collectives, (plain, scaled))
    print(f"{target}: without {plain_big} and {plain_scalars} of scalars")
    print(f"{target}: with    {big} and {scalars} of scalars")
    assert sum(big.values()) <= sum(plain_big.values())
    assert scalars - plain_scalars <= 2
    print(f"{target}: {held(plain)} bytes held without, {held(scaled)} with")
    assert held(scaled) <= 1.01 * held(plain) + 4096
    costs = [(compiled.cost_analysis() or {}) for compiled in (plain, scaled)]
    if all("bytes accessed" in cost for cost in costs):
        before, after = (cost["bytes accessed"] for cost in costs)
        print(f"{target}: {before:.4g} bytes accessed without, {after:.4g} with")
        assert after <= 1.03 * before
