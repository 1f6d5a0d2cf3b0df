"""Measures a training step in float32, bfloat16 and float16, side by side.

`python -m optax_lossscale.diagnostics.compare FILE` says what half precision gives your
step on this device, and what limits it. The file defines `loss_fn`, its parameters
`params` and the tuple `batch` of its other arguments, in float32. It may define an
`optimizer` of Optax: otherwise it is AdamW.
"""

import argparse
import runpy
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_lossscale._autocast.cast import autocast, function_of
from optax_lossscale._jaxprs.parts import all_equations
from optax_lossscale._jaxprs.primitives import Kind, kind_of
from optax_lossscale._optimizer import LossScaleOptimizer

FLOAT32, TF32 = "float32", "float32, products in TF32 (JAX's default)"
BFLOAT16, MINIMIZE = "autocast to bfloat16", "autocast to float16, minimize"
RETRIES, ALONE = "autocast to float16, minimize, retries=24", "the optimizer alone"
TURNS, SECONDS, WARM_UP = 5, 0.3, 3  # The first steps may overflow.


class Way(NamedTuple):
    """One way to train.

    Attributes:
      init: Maps parameters to the initial state.
      step: Maps `params, state, *batch` to new `params, state` and the loss.
      precision: That of float32 products, as in `jax.default_matmul_precision`.
    """

    init: Callable[..., Any]
    step: Callable[..., Any]
    precision: str = "default"


def name_of_float32(device: Any) -> str:
    """Says in what JAX multiplies float32 arrays on a device."""
    major, _, minor = str(getattr(device, "compute_capability", "")).partition(".")
    if minor.isdigit() and int(major) >= 8:
        return TF32
    return TF32.replace("TF32", "bfloat16") if device.platform == "tpu" else FLOAT32


def plain(loss_fn: Callable[..., Any], optimizer: Any) -> Way:
    """Returns the step of an optimizer without loss scaling."""

    def step(params, state, *batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, *batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    return Way(optimizer.init, step)


def minimize(loss_fn: Callable[..., Any], optimizer: Any, **options: Any) -> Way:
    """Returns the step of `minimize`, given options of `LossScaleOptimizer`."""
    scaling = LossScaleOptimizer(optimizer, **options)

    def step(params, state, *batch):
        return scaling.minimize(loss_fn, params, state, *batch)

    return Way(scaling.init, step)


def alone(optimizer: Any) -> Way:
    """Returns the step of an optimizer on gradients that are given."""

    def init(params):
        return optimizer.init(params), jax.tree.map(jnp.copy, params)

    def step(params, state, *batch):
        state, grads = state
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), (state, grads), 0.0

    return Way(init, step)


def ways(loss_fn: Callable[..., Any], optimizer: Any, **options: Any) -> dict[str, Way]:
    """Returns the ways to train: with the loss as it is, and with `autocast`."""
    half = autocast(loss_fn)
    return {
        name_of_float32(jax.devices()[0]): plain(function_of(half), optimizer),
        BFLOAT16: plain(autocast(loss_fn, jnp.bfloat16), optimizer),
        MINIMIZE: minimize(half, optimizer, **options),
        RETRIES: minimize(half, optimizer, retries=24, **options),
        ALONE: alone(optimizer),
    }


def products_of(jaxpr: Any) -> str:
    """Counts the matrix products in half precision, and all; those of loops once."""
    sizes = [
        equation.invars[0].aval.dtype.itemsize
        for equation in all_equations(jaxpr)
        if kind_of(equation.primitive.name) is Kind.PRODUCT
    ]
    return f"{sizes.count(2)} of {len(sizes)}"


def run(
    way: Way, program: Callable[..., Any], params: Any, batch: tuple, seconds: float
) -> tuple[float, float, bool]:
    """Runs a way from its start.

    Returns:
      The ms of a step; the ms until a call returns; and whether the last step was
      applied.
    """
    carry = jax.device_put(params), jax.jit(way.init)(params)

    def steps(count):
        nonlocal carry
        start = time.perf_counter()
        for _ in range(count):
            *carry, _ = program(*carry, *batch)
        called = time.perf_counter() - start
        jax.block_until_ready(carry)
        return 1e3 * (time.perf_counter() - start), 1e3 * called

    steps(WARM_UP)
    once, called = steps(1)
    count = max(1, round(1e3 * seconds / once))
    each = steps(count)[0] / count
    return each, called, bool(getattr(carry[1], "last_step_applied", True))


def measure(
    chosen: dict[str, Way], params: Any, batch: tuple, seconds: float = SECONDS
) -> list[dict[str, Any]]:
    """Runs all ways in turns, each for about `seconds` in a turn; returns a row each.

    A row has the median of the turns in ms a step, the lowest and the highest, the ms
    until a call returns, the temporary memory in bytes, the matrix products, and
    whether the last step was applied. Only one way at a time is on the device.
    """
    params, batch = jax.device_get(params), jax.device_put(batch)
    rows, programs, times = [], {}, {name: [] for name in chosen}
    for name, way in chosen.items():
        print(f"compiling: {name}", file=sys.stderr, flush=True)
        step = jax.jit(way.step, donate_argnums=(0, 1))
        with jax.default_matmul_precision(way.precision):
            traced = step.trace(params, jax.eval_shape(way.init, params), *batch)
            programs[name] = traced.lower().compile()
        size = programs[name].memory_analysis().temp_size_in_bytes
        products = products_of(traced.jaxpr.jaxpr)
        rows.append({"way": name, "temp_bytes": size, "products": products})
    for turn in range(TURNS):
        print(f"running: turn {turn + 1} of {TURNS}", file=sys.stderr, flush=True)
        for name, way in chosen.items():
            times[name].append(run(way, programs[name], params, batch, seconds))
    for row in rows:
        ms, call_ms, applied = zip(*times[row["way"]], strict=True)
        row |= {"ms": statistics.median(ms), "low": min(ms), "high": max(ms)}
        row |= {"call_ms": statistics.median(call_ms), "applied": applied[-1]}
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Returns the rows side by side, relative to the first."""
    lines = [f"{'':44}{'ms a step':>11}{'/ float32':>11}{'temporary MB':>14}"]
    for row in rows:
        ratio, size = row["ms"] / rows[0]["ms"], row["temp_bytes"] / 1e6
        lines.append(f"{row['way']:44}{row['ms']:11.3g}{ratio:11.2f}{size:14,.1f}")
    return "\n".join(lines)


def limits(rows: list[dict[str, Any]], platform: str) -> str:
    """Says what may limit the step, each with its number."""
    by_way = {row["way"]: row for row in rows}
    half, optimizer = by_way[MINIMIZE], by_way[ALONE]
    lines = [
        f"{half['products']} matrix products compute in float16. They alone are faster "
        "there: it takes many large ones, and a large batch.",
        f"The optimizer takes {optimizer['ms']:.3g} of {half['ms']:.3g} ms, and stays "
        "float32. In a larger batch it is a smaller part.",
        f"The host takes {half['call_ms']:.3g} ms to start a step. If your loop takes "
        "longer than this table, the host is the limit: data, logs, small steps.",
    ]
    if not half["applied"]:
        lines.append(
            "The last step in float16 was skipped: its gradients are not finite. Ask "
            "trace_numerics why."
        )
    if TF32 in by_way:
        lines.append(
            "JAX multiplies float32 arrays in TF32 here: they are fast already."
        )
    if platform == "cpu":
        lines.append("A CPU says nothing of a GPU. Measure where you train.")
    return "\n".join(f"- {line}" for line in lines)


def load(path: str) -> tuple[Callable[..., Any], Any, tuple, Any]:
    """Returns what a file defines: the loss, parameters, a batch and the optimizer."""
    if not Path(path).is_file():
        raise SystemExit(f"There is no file {path}.")
    sys.path.insert(0, str(Path(path).resolve().parent))  # What it imports.
    defined = runpy.run_path(path)
    names = "loss_fn", "params", "batch"
    if missing := [name for name in names if name not in defined]:
        raise SystemExit(f"{path} must define {', '.join(missing)}.")
    loss_fn, params, batch = (defined[name] for name in names)
    if not isinstance(batch, tuple):
        raise SystemExit(
            f"batch must be a tuple, as (x, y) or (x,), got {type(batch)}."
        )
    optimizer = defined.get("optimizer", optax.adamw(1e-4))
    return loss_fn, params, batch, getattr(optimizer, "inner_optimizer", optimizer)


def main() -> None:
    """Measures the step of a file; prints a table, and what limits the step."""
    name = "python -m optax_lossscale.diagnostics.compare"
    parser = argparse.ArgumentParser(name, description=__doc__)
    parser.add_argument("file", metavar="FILE")
    path = parser.parse_args().file
    loss_fn, params, batch, optimizer = load(path)
    rows = measure(ways(loss_fn, optimizer), params, batch)
    device = jax.devices()[0]
    kind = "a CPU" if device.platform == "cpu" else device.device_kind
    print(f"{path} on {kind}, jax {jax.__version__}:\n\n{table(rows)}\n")
    print(limits(rows, device.platform))


if __name__ == "__main__":
    main()
