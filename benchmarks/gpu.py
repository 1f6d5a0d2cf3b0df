"""Measures training steps on the GPU of this machine, in each way of training.

`python -m benchmarks.gpu` runs three models and writes `results/gpu.json`. All ways run
in turns. `python -m benchmarks.gpu FILE` measures a model of yours, and writes nothing:
the file defines `loss_fn`, its parameters `params`, and its other arguments, the tuple
`batch`, in float32.
"""

import functools
import itertools
import runpy
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.progress import track

from benchmarks import by_hand, report
from benchmarks.by_hand import SCALE
from benchmarks.measure import Running
from benchmarks.systems import System, flax_scale, in_two, minimize, plain, static
from optax_lossscale import autocast

RESULTS = report.RESULTS / "gpu.json"
TURNS, SECONDS = 5, 0.3
OPTIMIZER = optax.adamw(1e-4)
FLOAT32, TF32 = "float32", "float32, products in TF32 (JAX's default)"
STATIC = "float16 by hand, static scale"
OURS = "autocast, value_and_grad, update"
SCALED = "float16 by hand, minimize"
RETRIES = "float16 by hand, minimize, retries=24"
MODELS: dict[str, Callable[[], by_hand.Model]] = {
    "GPT-2 small, 16 x 512 tokens": functools.partial(
        by_hand.gpt, blocks=12, heads=12, batch=16
    ),
    "convnet, 12 layers of 256, 64 images": functools.partial(
        by_hand.convnet, layers=12, n=256, images=64
    ),
    "MLP, 24 layers of 2048, batch 64": functools.partial(by_hand.mlp, layers=24),
}


def ways(
    float32: Callable[..., jax.Array], float16: Callable[..., jax.Array] | None
) -> dict[str, System]:
    """Returns the ways to train: a loss as it is, and one with casts by hand."""
    cast, brain = autocast(float32), autocast(float32, dtype=jnp.bfloat16)
    step, ours = functools.partial(minimize, OPTIMIZER), {"initial_scale": SCALE}
    found = {FLOAT32: plain(OPTIMIZER, float32), TF32: plain(OPTIMIZER, float32)}
    found["autocast to bfloat16"] = plain(OPTIMIZER, brain)
    found[OURS] = in_two(OPTIMIZER, cast, **ours)
    found["autocast, minimize"] = step(cast, **ours)
    found["autocast, minimize, retries=24"] = step(cast, retries=24, **ours)
    if float16 is not None:
        found[STATIC] = static(OPTIMIZER, float16, SCALE)
        finite = optax.apply_if_finite(OPTIMIZER, 5)
        others = {
            "apply_if_finite": static(finite, float16, SCALE),
            "flax DynamicScale": flax_scale(OPTIMIZER, float16),
            "minimize, fixed scale": step(float16, loss_scale=SCALE),
            "minimize": step(float16, **ours),
            "value_and_grad, update": in_two(OPTIMIZER, float16, **ours),
            "minimize, retries=24": step(float16, retries=24, **ours),
        }
        found |= {f"float16 by hand, {name}": way for name, way in others.items()}
    return found


def arrays(shapes: Any) -> Any:
    """Returns arrays of these shapes: tokens, and initial values of layers."""
    rng = np.random.default_rng(0)

    def make(path, x):
        if jnp.issubdtype(x.dtype, jnp.integer):
            return rng.integers(0, 1000, x.shape, dtype=x.dtype)
        if len(x.shape) < 2:
            return np.full(x.shape, float("gain" in jax.tree_util.keystr(path)), "f4")
        size = (2 / np.prod(x.shape[:-1])) ** 0.5
        return size * rng.standard_normal(x.shape, dtype=np.float32)

    return jax.tree_util.tree_map_with_path(make, shapes)


def measure(
    systems: dict[str, System], params: Any, batch: tuple, seconds: float = SECONDS
) -> list[dict[str, Any]]:
    """Runs all ways in turns, each for about `seconds` in a turn; returns a row each.

    A row has the median of the turns in ms a step, the lowest and the highest, and the
    temporary memory in bytes.
    """
    params = jax.device_get(params)  # Each way donates its own copy.
    programs, rows = {}, []
    for name, system in track(systems.items(), "compiling"):
        precision = "highest" if name == FLOAT32 else "default"
        with jax.default_matmul_precision(precision):
            running = Running(system, params, [jax.device_put(batch)])
        for _ in range(5):  # The first steps may overflow.
            running.round()
        once = min(running.round() for _ in range(3))
        running.batches *= max(1, round(seconds / once))
        programs[name] = running
    times = {name: [] for name in programs}
    for _, name in track(list(itertools.product(range(TURNS), programs)), "running"):
        running = programs[name]
        times[name].append(1e3 * running.round() / len(running.batches))
    for name, running in programs.items():
        memory: Any = running.compiled.memory_analysis()
        row = {"way": name, "ms": statistics.median(times[name])}
        row |= {"low": min(times[name]), "high": max(times[name])}
        rows.append(row | {"temp_bytes": memory.temp_size_in_bytes})
    return rows


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
    """Returns the table of the README: what float16 gives."""
    name = next(iter(MODELS))
    rows, device = _by_way(found)[name], found[name]["machine"]["device"]
    cells = [[way, *_numbers(rows[way])] for way in (FLOAT32, TF32, STATIC, OURS)]
    return report.table([name, f"ms a step, {device}", "temporary GB"], cells)


def ratios(found: dict[str, Any], way: str, base: str = STATIC) -> list[float]:
    """Returns for each model the time of a way relative to another."""
    rows = _by_way(found).values()
    return [x[way]["ms"] / x[base]["ms"] for x in rows]


def of_file(path: str) -> str:
    """Measures the model of a file, and returns a table."""
    found = runpy.run_path(path)
    if missing := {"loss_fn", "params", "batch"} - found.keys():
        raise SystemExit(f"{path} must define {', '.join(sorted(missing))}")
    rows = measure(ways(found["loss_fn"], None), found["params"], found["batch"])
    return table({path: {"rows": rows}})


def main() -> None:
    """Measures the model of a file, or all models, and writes the results."""
    parser = report.parser("benchmarks.gpu", __doc__)
    text = "Measure the model of this file."
    parser.add_argument("file", nargs="?", metavar="FILE", help=text)
    if file := parser.parse_args().file:
        print(of_file(file))
        return
    found = {}
    for name, make_model in MODELS.items():
        params, batch, make = make_model()
        systems = ways(make(jnp.float32), make(jnp.float16))
        rows = measure(systems, arrays(params), arrays(batch))
        found[name] = {**report.about(), "rows": rows}
        report.save(RESULTS, found)
        print(table({name: found[name]}), flush=True)


if __name__ == "__main__":
    main()
