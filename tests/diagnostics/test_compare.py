"""A step that is measured in each precision."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import to_numpy

from optax_lossscale import LossScaleOptimizer, autocast, diagnostics
from optax_lossscale.diagnostics import _common, _compare

X = np.ones((4, 8), np.float32)
PARAMS = {"w": np.ones((8, 4), np.float32)}


def loss_fn(params, x):
    return jnp.mean(jnp.square(x @ params["w"]))


def loss_and_aux(params, x):
    """Reads Python numbers among the parameters, too."""
    return loss_fn(params, x) * params["scale"] / params["heads"], {"x": x}


class Net(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.layer = nnx.Linear(8, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)


def nnx_loss(model, x, name):
    assert name == "train"
    return jnp.mean(model.drop(model.norm(model.layer(x))) ** 2)


def equinox_loss(model, x):
    return jnp.mean(jax.vmap(model)(x) ** 2)


class Device:
    def __init__(self, platform, capability=None):
        self.platform = platform
        if capability:
            self.compute_capability = capability


@pytest.fixture(autouse=True)
def is_short(monkeypatch):
    monkeypatch.setattr(_compare, "TURNS", 1)
    monkeypatch.setattr(_compare, "SECONDS", 1e-3)


def compare(*args, **options):
    with jax.numpy_dtype_promotion("standard"):
        return diagnostics.compare(*args, **options)


def test_the_table_is_printed_and_returned(capsys):
    found = compare(loss_fn, PARAMS, X)
    out, progress = capsys.readouterr()
    title, _, header, *rows = out.splitlines()
    assert title.startswith("On ")
    assert "temporary MB" in header
    names = _compare.BFLOAT16, _compare.MINIMIZE, _compare.RETRIES, _compare.ALONE
    ways = [_compare.name_of_float32(jax.devices()[0]), *names]
    assert [row[:44].rstrip() for row in rows[:5]] == ways == list(found)
    assert float(rows[0][44:].split()[1]) == 1.0
    # The forward pass and the gradient; x needs none.
    assert "2 of 2 matrix products compute in float16" in out
    assert [row["products"] for row in found.values()] == [
        "0 of 2",
        "2 of 2",
        "2 of 2",
        "4 of 4",
        "0 of 0",
    ]
    assert found[_compare.MINIMIZE]["applied"]
    if jax.default_backend() == "cpu":
        assert "CPU" in title
        assert "TF32" not in out
    assert progress == ""  # A log is no terminal.


def test_somebody_who_watches_sees_the_progress(monkeypatch, capsys):
    monkeypatch.setattr(_compare, "is_watched", lambda: True)
    compare(loss_fn, PARAMS, X)
    _, progress = capsys.readouterr()
    assert progress.count("compiling: ") == 5
    assert "turn 1 of 1" in progress
    assert not _common.is_watched()


@pytest.mark.parametrize(
    ("loss_fn", "make", "batch", "options"),
    [
        (nnx_loss, Net, (X, "train"), {}),
        pytest.param(
            equinox_loss,
            lambda: eqx.nn.MLP(8, 4, 8, 1, dtype="float32", key=jax.random.key(0)),
            (X,),
            {"optimizer": LossScaleOptimizer(optax.sgd(0.1))},
            marks=pytest.mark.exhaustive,
        ),
        (
            autocast(loss_and_aux),
            lambda: PARAMS | {"scale": 2.0, "heads": 4},
            (X,),
            {"has_aux": True},
        ),
    ],
    ids=["nnx", "equinox", "numbers and auxiliary data"],
)
def test_any_model_is_measured_and_preserved(loss_fn, make, batch, options):
    def contents(model):
        return [to_numpy(x) for x in jax.tree.leaves(model) if eqx.is_array(x)]

    model = make()
    rows = compare(loss_fn, model, *batch, **options)
    assert rows[_compare.MINIMIZE]["products"][0] != "0"
    assert rows[_compare.MINIMIZE]["applied"]
    for x, y in zip(contents(model), contents(make()), strict=True):
        np.testing.assert_array_equal(x, y)


def test_a_number_beside_a_module_is_measured_as_an_array():
    seen = []

    def init(params):
        seen.append(params)
        return ()

    def step(params, state, x):
        return params, state, 0.0

    params = {"model": eqx.nn.Dropout(0.5), "temperature": 0.5}
    _compare.measure({"way": _compare.Way(init, step)}, params, (X,))
    assert isinstance(seen[0]["temperature"], jax.Array)
    assert seen[0]["model"].p == 0.5
    assert isinstance(seen[0]["model"].p, float)


def test_float32_is_named_as_jax_multiplies_it():
    names = {
        Device("cpu"): "float32",
        Device("gpu", "7.5"): "float32",
        Device("gpu", "8.0"): _compare.TF32,
        Device("gpu", "12.0"): _compare.TF32,
        Device("gpu", "gfx90a"): "float32",
        Device("tpu"): "float32, products in bfloat16 (JAX's default)",
    }
    for device, name in names.items():
        assert _compare.name_of_float32(device) == name


def test_what_limits_a_step_is_said_with_numbers():
    ms = {_compare.TF32: 4, _compare.MINIMIZE: 2, _compare.ALONE: 1.5}
    row = {"call_ms": 0.25, "products": "6 of 8", "applied": True}
    rows = {way: row | {"ms": ms[way]} for way in ms}
    text = _compare.limits(rows, "gpu")
    for part in ("6 of 8", "1.5 of 2 ms", "0.25 ms to start", "TF32"):
        assert part in text
    assert "CPU" not in text
    assert "skipped" not in text
    skipped = {way: row | {"applied": False} for way, row in rows.items()}
    assert "float16 was skipped" in _compare.limits(skipped, "gpu")
    rows.pop(_compare.TF32)
    assert "CPU" in _compare.limits(rows, "cpu")
