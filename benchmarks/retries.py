"""Measures what it costs that an overflow repeats the pass, and its benefit.

`python -m benchmarks.retries` measures time on the CPU, compiles for a TPU v5e and an
H100 as `benchmarks.compiled` does, and trains a network at several growth intervals. It
adds to `results/retries.json`. Arguments name some of these parts: `CPU training`.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from rich.progress import track

from benchmarks import compiled, hlo, report
from benchmarks.measure import Running, compare, cpu_seconds
from benchmarks.rules import train
from benchmarks.systems import OPTIMIZERS, System, minimize
from benchmarks.tasks import perceptron
from benchmarks.workloads import Workload, convnet, mlp, transformer
from optax_lossscale import DynamicLossScale

RESULTS = report.RESULTS / "retries.json"
RETRIES = 24
SECONDS = 30.0  # that each comparison runs
STEPS, EVERY, INTERVALS = 5000, 20, (50, 2000)  # of the trainings
# The scale doubles in every step, and falls in the next: one retry in a step.
ALWAYS = DynamicLossScale(2.0**24, growth_interval=1)

# What runs on the CPU: what computes most of the time, and least.
RUNNING = {
    "transformer": transformer,
    "MLP, batch 512": functools.partial(mlp, layers=6, width=512, batch=512),
    "MLP, batch 16": mlp,
}


# The language model of the examples, of a size that is worth compiling.
model = functools.partial(transformer, 4, 256, 256, 32, 8192)
COMPILED = {
    "MLP": functools.partial(mlp, layers=12, width=2048, batch=2048),
    "convnet": convnet,
    "transformer": model,
    "transformer, rematerialized": functools.partial(model, remat=True),
    "transformer, scanned": functools.partial(model, scan_layers=True),
}


def repeating(workload: Workload, retries: int = RETRIES, **options: Any) -> System:
    """Returns the step of `minimize` with retries."""
    inner = OPTIMIZERS[workload.optimizer]
    return minimize(inner, workload.loss_fn, retries=retries, **options)


def on_cpu() -> list[dict[str, Any]]:
    """Measures the time without overflow, and with about one retry in each step."""
    rows = []
    for name, make in RUNNING.items():
        workload = make()
        params, batches = jax.device_get(workload.init()), workload.batches()
        options = {"retries": 0}, {}, {"loss_scale": ALWAYS}
        systems = [repeating(workload, **changed) for changed in options]
        plain, ours, often = (Running(x, params, batches) for x in systems)
        retry = compare(ours, often, SECONDS)["ratio"] - 1
        rows.append({"program": name, "retry": retry} | compare(plain, ours, SECONDS))
    return rows


def by_compiler(target: str) -> list[dict[str, Any]] | None:
    """Compiles all programs without and with retries; None without a compiler.

    What only an overflow runs, the loop, counts for the temporary memory alone.
    """
    device = compiled.device(target)
    rows = []
    for name, make in track(COMPILED.items(), target) if device else ():
        workload, pair = make(), []
        for retries in (0, RETRIES):
            compile_step = functools.partial(
                compiled.compile_step, workload, repeating(workload, retries), device
            )
            seconds, program = cpu_seconds(compile_step)
            module = hlo.parse(program.as_text()).without_loop("retries")
            numbers = compiled.describe(program)
            numbers |= {"bytes": module.bytes_moved(), "kernels": module.kernels()}
            pair.append(numbers | {"compile_seconds": seconds})
        rows.append({"program": name, "without": pair[0], "with": pair[1]})
    return rows if device else None


def trainings() -> list[dict[str, Any]]:
    """Trains without and with retries at several growth intervals."""
    task, rows = perceptron(STEPS), []
    for interval, retries in itertools.product(INTERVALS, (0, RETRIES)):
        rule = DynamicLossScale(2.0**24, growth_interval=interval)
        keys = jax.random.split(jax.random.key(0), 5)
        run = train(task, rule, keys, EVERY, retries)
        row = {
            "lost": run["skipped"].sum(1),
            # Between the scale of a step and the next that overflows.
            "bits": run["oracle"] + 1 - run["scale"][:, ::EVERY],
            "flushed": run["underflow"],
        }
        means = {name: float(np.mean(values)) for name, values in row.items()}
        means["loss"] = run["loss"][:, -STEPS // 10 :].mean(1).tolist()
        rows.append({"interval": interval, "retries": retries, **means})
    return rows


PARTS: dict[str, Callable[[], list[dict[str, Any]] | None]] = {
    "CPU": on_cpu,
    compiled.TPU: functools.partial(by_compiler, compiled.TPU),
    compiled.H100: functools.partial(by_compiler, compiled.H100),
    "training": trainings,
}


def tables(results: dict[str, Any]) -> list[str]:
    """Returns Markdown tables: time on the CPU, what compilers say, and trainings."""
    times, costs, trained = [], [], []
    for row in results["CPU"]["rows"]:
        spread = "{:.2f} to {:.2f}".format(*row["spread"])
        ratio, retry = f"{row['ratio']:.2f}", f"{row['retry']:.2f}"
        times.append([row["program"], ratio, spread, retry])
    for target in (compiled.TPU, compiled.H100):
        for row in results[target]["rows"]:
            pair = row["without"], row["with"]
            memory = " to ".join(f"{x['temp_bytes'] / 1e6:,.0f}" for x in pair)
            kernels = " to ".join(f"{x['kernels']}" for x in pair)
            ratios = [
                f"{pair[1][x] / pair[0][x]:.2f}" for x in ("bytes", "compile_seconds")
            ]
            costs.append([f"{target}: {row['program']}", memory, kernels, *ratios])
    for row in results["training"]["rows"]:
        label = f"{row['interval']}, {'with' if row['retries'] else 'without'} retries"
        bits, flushed = f"{row['bits']:.1f}", f"{row['flushed']:.2%}"
        loss = f"{min(row['loss']):.1e} to {max(row['loss']):.1e}"
        trained.append([label, f"{row['lost']:g}", bits, flushed, loss])
    header = ["time on a CPU", "with retries / without", "10% to 90%"]
    interval = ["`growth_interval`", "lost batches", "bits to overflow", "flushed"]
    return [
        report.table([*header, "a retry / a step"], times),
        report.table(
            ["compiled for", "temporary MB", "kernels", "bytes", "time to compile"],
            costs,
        ),
        report.table([*interval, "loss"], trained),
    ]


def main() -> None:
    """Measures all parts, or those that are named, and writes the results."""
    results = report.measure_parts("benchmarks.retries", __doc__, PARTS, RESULTS)
    print("\n".join(tables(results)))


if __name__ == "__main__":
    main()
