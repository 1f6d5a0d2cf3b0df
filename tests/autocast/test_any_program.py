"""`autocast` takes what JAX takes: random programs of all dtypes, calls and rules."""

import jax
import numpy as np
import pytest
from casting import x64
from jax import export
from jax.sharding import AxisType
from meshes import types_on_one_device
from programs import BATCH, Program, arguments

from optax_lossscale import autocast

pytestmark = pytest.mark.filterwarnings("ignore:autocast computes nothing")


def seeds(n, often):
    """Returns seeds; all but the first are run by `pytest -m exhaustive`."""
    rest = (pytest.param(x, marks=pytest.mark.exhaustive) for x in range(often, n))
    return pytest.mark.parametrize("seed", [*range(often), *rest])


@jax.numpy_dtype_promotion("standard")
def assert_same_types(program, params, data):
    """Asserts that `autocast` keeps the types of results and of gradients."""
    types = [
        jax.eval_shape(jax.value_and_grad(f, has_aux=True), params, *data)
        for f in (autocast(program), program)
    ]
    assert types[0] == types[1]


@seeds(60, often=8)
def test_it_takes_any_program_and_keeps_its_types(seed):
    assert_same_types(Program(seed), *arguments(seed))


@seeds(20, often=2)
def test_it_takes_any_program_with_float64(seed):
    with x64():
        assert_same_types(Program(seed), *arguments(seed, x64=True))


@seeds(20, often=2)
def test_it_takes_any_program_with_a_symbolic_batch(seed):
    (batch,) = export.symbolic_shape("b")
    params, data = arguments(seed)
    data = [
        jax.ShapeDtypeStruct([batch if n == BATCH else n for n in x.shape], x.dtype)
        for x in data
    ]
    assert_same_types(Program(seed), params, data)


@pytest.mark.parametrize("kind", [AxisType.Manual, AxisType.Explicit])
@seeds(40, often=1)
@jax.numpy_dtype_promotion("standard")
def test_it_takes_any_program_on_a_mesh(seed, kind):
    (params, data), program = arguments(seed), Program(seed)

    def types(f):
        step = jax.value_and_grad(f, has_aux=True)
        return types_on_one_device(kind, step, params, *data)

    try:
        wanted = types(program)
    except Exception as error:  # A sort of parts of an array, for example.
        with pytest.raises(type(error)):
            types(autocast(program))
        return
    assert types(autocast(program)) == wanted


@seeds(40, often=4)
@jax.numpy_dtype_promotion("standard")
def test_any_program_computes_near_float32(seed):
    (params, data), program = arguments(seed), Program(seed)
    found = [
        jax.jit(jax.value_and_grad(f, has_aux=True))(params, *data)
        for f in (autocast(program), program)
    ]
    half, true = (
        np.concatenate([np.ravel(x).astype(complex) for x in jax.tree.leaves(x)])
        for x in found
    )
    assert np.linalg.norm(half - true) < 0.02 * np.linalg.norm(true)
