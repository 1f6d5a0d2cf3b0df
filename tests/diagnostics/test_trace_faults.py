"""`trace_numerics` names the line of each planted fault; mended, nothing breaks."""

import faulty_linen
import faulty_transformer
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from faulty_transformer import FAULTS
from jax.flatten_util import ravel_pytree

from optax_lossscale.diagnostics import trace_numerics

KINDS = {
    "forward": "forward",
    "backward": "scale_too_high",
    "data": "nonfinite_argument",
}
FAULT_OF = {fault.name: fault for fault in FAULTS}
# `other_tools.py` follows every fault of both models. To save time, here are some, and
# one of them by default. `test_trace_models.py` has faults of the forward pass.
BY_DEFAULT = "sum"
NAMED = ("logits", "variance", "gelu", "residual", "sum", "logarithm", "data")
# NumPy makes -inf of -1e9.
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered in cast"),
    pytest.mark.usefixtures("quick_compilation"),
]


def cases(plain, linen):
    """Returns the faults of the two models to test."""
    chosen = [(faulty_transformer, x) for x in plain] + [
        (faulty_linen, x) for x in linen
    ]
    return [
        pytest.param(
            model,
            name,
            id=f"{model.__name__}-{name}",
            marks=() if name == BY_DEFAULT else pytest.mark.exhaustive,
        )
        for model, name in chosen
    ]


def follow(faulty):
    scale = faulty.scale
    return trace_numerics(faulty.loss_fn, faulty.params, *faulty.args, scale=scale)


@pytest.mark.parametrize(("model", "name"), cases(NAMED, ["variance"]))
def test_names_the_faulty_line(model, name):
    faulty, phase = model.plant(name), FAULT_OF[name].phase
    trace = follow(faulty)
    finding = trace.findings[0]
    assert finding.kind == KINDS[phase]
    found = finding.operation
    assert (found.file, found.line) in faulty.lines, str(trace)
    if phase == "data":
        assert trace.first_nonfinite is None
    else:
        assert found == trace.first_nonfinite
        assert found.phase == phase
        assert not found.output.is_finite


@pytest.mark.parametrize(("model", "name"), cases([None], []))
def test_finds_nothing_in_the_sound_model(model, name):
    trace = follow(model.plant(name))
    assert [finding.kind for finding in trace.findings] == ["fine"]
    assert trace.first_nonfinite is None


@pytest.mark.exhaustive
@pytest.mark.parametrize(("model", "name"), cases([*FAULT_OF][::3], ["variance"]))
def test_mended_model_agrees_with_float32(model, name):
    def gradients(dtype):
        mended = model.plant(name, mended=True, dtype=dtype)

        def scaled_loss(params, *args):
            return mended.loss_fn(params, *args) * mended.scale

        found = jax.jit(jax.value_and_grad(scaled_loss))(mended.params, *mended.args)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found))
        return ravel_pytree(found[1])[0]

    expected = gradients(jnp.float32)
    difference = gradients(jnp.float16) - expected
    assert jnp.linalg.norm(difference) < 0.02 * jnp.linalg.norm(expected)
