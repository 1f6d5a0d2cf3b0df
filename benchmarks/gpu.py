"""Measures training steps on the GPU of this machine, in each way of training.

`python -m benchmarks.gpu` runs three models and writes `results/gpu.json`. All ways run
in turns. `optax_lossscale.diagnostics.compare` measures a step of yours.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks import by_hand, report
from benchmarks.by_hand import SCALE
from benchmarks.systems import flax_scale, in_two, minimize, plain, static
from optax_lossscale import autocast
from optax_lossscale.diagnostics import _compare
from optax_lossscale.diagnostics._compare import BFLOAT16, FLOAT32, TF32, Way

RESULTS = report.RESULTS / "gpu.json"
OPTIMIZER = optax.adamw(1e-4)
STATIC = "float16 by hand, static scale"
FLAX = "float16 by hand, flax DynamicScale"
OURS = "autocast, value_and_grad, update"
SCALED = "float16 by hand, minimize"
RETRIES = "float16 by hand, minimize, retries=24"
MLP = "MLP, 24 layers of 2048, batch 64"
MODELS: dict[str, Callable[[], by_hand.Model]] = {
    "GPT-2 small, 16 x 512 tokens": functools.partial(
        by_hand.gpt, blocks=12, heads=12, batch=16
    ),
    "convnet, 12 layers of 256, 64 images": functools.partial(
        by_hand.convnet, layers=12, n=256, images=64
    ),
    MLP: functools.partial(by_hand.mlp, layers=24),
}


def ways(
    float32: Callable[..., jax.Array], float16: Callable[..., jax.Array]
) -> dict[str, Way]:
    """Returns the ways to train: a loss as it is, and one with casts by hand."""
    step, ours = functools.partial(minimize, OPTIMIZER), {"initial_scale": SCALE}
    finite = optax.apply_if_finite(OPTIMIZER, 5)
    exact = plain(OPTIMIZER, float32)

    def exact_step(*args):
        with jax.default_matmul_precision("highest"):
            return exact.step(*args)

    systems = {
        OURS: in_two(OPTIMIZER, autocast(float32), **ours),
        STATIC: static(OPTIMIZER, float16, SCALE),
        "float16 by hand, apply_if_finite": static(finite, float16, SCALE),
        FLAX: flax_scale(OPTIMIZER, float16),
        "float16 by hand, minimize, fixed scale": step(float16, loss_scale=SCALE),
        SCALED: step(float16, **ours),
        "float16 by hand, value_and_grad, update": in_two(OPTIMIZER, float16, **ours),
        RETRIES: step(float16, retries=24, **ours),
    }
    return {
        FLOAT32: Way(exact.init, exact_step),
        **_compare.ways(float32, OPTIMIZER, **ours),
        **{name: Way(system.init, system.step) for name, system in systems.items()},
    }


def _by_way(found):
    """Returns the rows by model and way."""
    return {
        name: {row["way"]: row for row in entry["rows"]}
        for name, entry in found.items()
    }


def _numbers(row):
    size = row["temp_bytes"] / 1e9
    return f"{row['ms']:.3g}", f"{size:.1f}" if size > 1 else f"{size:.2g}"


def table(found: dict[str, Any]) -> str:
    """Returns a table: ms a step, and GB of temporary memory, of each way and model."""
    models, cells = _by_way(found), {}
    for rows in models.values():
        for way, row in rows.items():
            cells.setdefault(way, [way]).append("{} ms, {} GB".format(*_numbers(row)))
    return report.table(["a step on a GPU", *models], list(cells.values()))


def short_table(found: dict[str, Any]) -> str:
    """Returns the table of the README: what half precision gives."""
    name, *_ = MODELS
    rows, device = _by_way(found)[name], found[name]["machine"]["device"]
    titles = {
        FLOAT32: FLOAT32,
        TF32: "JAX's default (TF32)",
        OURS: "autocast to float16",
        BFLOAT16: BFLOAT16,
    }
    cells = []
    for way, title in titles.items():
        ms, size = _numbers(rows[way])
        speedup = rows[FLOAT32]["ms"] / rows[way]["ms"]
        cells.append([title, ms, f"{speedup:.1f}x", f"{size} GB"])
    title = f"{name.partition(',')[0]}, {device}"
    return report.table([title, "ms a step", "speedup", "temporary memory"], cells)


def speedups_table(found: dict[str, Any]) -> str:
    """Returns a table: how much faster than JAX's default each model is."""
    device = found[MLP]["machine"]["device"]
    ways = {BFLOAT16: "bfloat16", OURS: "float16"}
    columns = [[f"{1 / x:.1f}x" for x in ratios(found, way, TF32)] for way in ways]
    cells = [list(row) for row in zip(found, *columns, strict=True)]
    return report.table([f"speedup on an {device}", *ways.values()], cells)


def ratios(
    found: dict[str, Any], way: str, base: str = STATIC, number: str = "ms"
) -> list[float]:
    """Returns for each model the time, or another number, relative to another way."""
    rows = _by_way(found).values()
    return [x[way][number] / x[base][number] for x in rows]


def main() -> None:
    """Measures all models, and writes the results."""
    report.parser("benchmarks.gpu", __doc__).parse_args()
    found = {}
    for name, make_model in MODELS.items():
        params, batch, make = make_model()
        systems = ways(make(jnp.float32), make(jnp.float16))
        rows = _compare.measure(systems, by_hand.arrays(params), by_hand.arrays(batch))
        rows = [{"way": way} | row for way, row in rows.items()]
        found[name] = {**report.about(), "rows": rows}
        report.save(RESULTS, found)
        print(table({name: found[name]}), flush=True)


if __name__ == "__main__":
    main()
