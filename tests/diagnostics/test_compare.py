"""The command that measures a step in each precision."""

import sys

import jax
import jax.numpy as jnp
import pytest
from pages import page_blocks

from optax_lossscale import LossScaleOptimizer
from optax_lossscale.diagnostics import compare

MODEL = """
import jax
import jax.numpy as jnp
import optax
from widths import WIDTH

from optax_lossscale import LossScaleOptimizer, autocast

params, batch = {"w": jnp.ones((8, WIDTH))}, (jnp.ones((2, 8)),)
optimizer = LossScaleOptimizer(optax.sgd(0.1))


@autocast
def loss_fn(params, x):
    return jnp.mean(jnp.square(x @ params["w"]))


if __name__ == "__main__":
    raise SystemExit("It trains.")
"""


class Device:
    def __init__(self, platform, capability=None):
        self.platform = platform
        if capability:
            self.compute_capability = capability


@pytest.fixture
def file(tmp_path, monkeypatch):
    (tmp_path / "widths.py").write_text("WIDTH = 4")
    monkeypatch.setattr(sys, "path", [*sys.path])
    path = tmp_path / "my_step.py"
    path.write_text(MODEL)
    return path


def call(monkeypatch, path):
    monkeypatch.setattr(sys, "argv", ["compare", str(path)])
    with jax.numpy_dtype_promotion("standard"):
        compare.main()


def test_a_file_is_measured_in_each_precision(file, monkeypatch, capsys):
    monkeypatch.setattr(compare, "TURNS", 1)
    monkeypatch.setattr(compare, "SECONDS", 1e-3)
    call(monkeypatch, file)
    out, progress = capsys.readouterr()
    title, _, header, *rows = out.splitlines()
    assert title.startswith(f"{file} on ")
    assert "temporary MB" in header
    ways = [row[:44].rstrip() for row in rows[:5]]
    names = compare.BFLOAT16, compare.MINIMIZE, compare.RETRIES, compare.ALONE
    assert ways == [compare.name_of_float32(jax.devices()[0]), *names]
    assert float(rows[0][44:].split()[1]) == 1.0
    # The forward pass and the gradient; x needs none.
    assert "2 of 2 matrix products compute in float16" in out
    if jax.default_backend() == "cpu":
        assert "on a CPU" in title
        assert "TF32" not in out
    assert progress.count("compiling: ") == 5
    assert "turn 1 of 1" in progress


def test_float32_is_named_as_jax_multiplies_it():
    names = {
        Device("cpu"): "float32",
        Device("gpu", "7.5"): "float32",
        Device("gpu", "8.0"): compare.TF32,
        Device("gpu", "12.0"): compare.TF32,
        Device("gpu", "gfx90a"): "float32",
        Device("tpu"): "float32, products in bfloat16 (JAX's default)",
    }
    for device, name in names.items():
        assert compare.name_of_float32(device) == name


def test_the_ways_are_of_one_loss_and_one_optimizer(file):
    loss_fn, params, batch, optimizer = compare.load(str(file))
    assert not isinstance(optimizer, LossScaleOptimizer)
    plain = compare.name_of_float32(jax.devices()[0])
    halves = {plain: "0 of 2", compare.ALONE: "0 of 0", compare.RETRIES: "4 of 4"}
    for name, way in compare.ways(loss_fn, optimizer).items():
        state = way.init(params)
        program = jax.make_jaxpr(way.step)(params, state, *batch)
        assert compare.products_of(program.jaxpr) == halves.get(name, "2 of 2"), name


def test_the_page_shows_a_file_that_works(file):
    ((code, _),) = page_blocks("docs/guide/why-not-faster.md")
    file.write_text(code)
    loss_fn, params, batch, optimizer = compare.load(str(file))
    way = compare.ways(loss_fn, optimizer)[compare.MINIMIZE]
    with jax.numpy_dtype_promotion("standard"):
        *_, loss = jax.jit(way.step)(params, way.init(params), *batch)
    assert jnp.isfinite(loss)


def test_what_limits_a_step_is_said_with_numbers():
    rows = [
        {"way": way, "ms": ms, "call_ms": 0.25, "products": "6 of 8", "applied": True}
        for way, ms in {
            compare.TF32: 4,
            compare.MINIMIZE: 2,
            compare.ALONE: 1.5,
        }.items()
    ]
    text = compare.limits(rows, "gpu")
    for part in ("6 of 8", "1.5 of 2 ms", "0.25 ms to start", "TF32"):
        assert part in text
    assert "CPU" not in text
    assert "skipped" not in text
    skipped = [row | {"applied": False} for row in rows]
    assert "float16 was skipped" in compare.limits(skipped, "gpu")
    assert "CPU" in compare.limits(rows[1:], "cpu")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no file"),
        ("params = 1", "must define loss_fn, batch"),
        ("loss_fn, params, batch = abs, 1, [2]", "must be a tuple"),
    ],
)
def test_mistakes_in_the_file_are_named(text, message, file, monkeypatch):
    file.unlink()
    if text is not None:
        file.write_text(text)
    with pytest.raises(SystemExit, match=message):
        call(monkeypatch, file)
