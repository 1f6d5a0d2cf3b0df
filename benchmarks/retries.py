"""What it costs to repeat the backward pass of an overflow, and what it makes possible.

`python -m benchmarks.retries` measures time on the CPU, compiles for a TPU v5e and an
H100 as `benchmarks.compiled` does, and trains a network at several growth intervals. It
adds to `results/retries.json`. Arguments name some of these parts: `CPU training`.
"""

import argparse
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import compiled, report
from benchmarks.measure import Running, compare
from benchmarks.rules import find_oracle, underflowed
from benchmarks.systems import OPTIMIZERS, System, minimize
from benchmarks.tasks import Task, perceptron
from benchmarks.workloads import Workload, mlp, transformer
from examples.language_model.config import Config
from examples.language_model.model import make_functions
from optax_lossscale import DynamicLossScale, LossScaleOptimizer

RESULTS = report.RESULTS / "retries.json"
FIGURE = report.RESULTS / "retries.png"
RETRIES = 24
SECONDS = 30.0  # that each comparison runs
# Of the trainings; the curves are means over steps between these points.
STEPS, EVERY, POINTS, INTERVALS = 5000, 20, 50, (50, 2000)
# The scale doubles in every step, and falls in the next: one retry in a step.
ALWAYS = DynamicLossScale(2.0**24, growth_interval=1)

# What runs on the CPU: what computes most of the time, and least.
RUNNING = {
    "transformer": transformer,
    "MLP, batch 512": functools.partial(mlp, layers=6, width=512, batch=512),
    "MLP, batch 16": mlp,
}


def language_model(**settings: Any) -> Workload:
    """The language model of the examples, of a size that is worth compiling."""
    config = Config(layers=4, width=256, context=256, **settings)
    init, loss_fn = make_functions(config)

    def batches():
        return [(jnp.zeros((32, config.context + 1), jnp.int32),)]

    return Workload(
        str(settings), "adam", lambda: init(jax.random.key(0)), loss_fn, batches, 0
    )


COMPILED = {
    "MLP": functools.partial(mlp, layers=12, width=2048, batch=2048),
    "transformer, rematerialized": functools.partial(language_model, remat=True),
    "transformer, scanned": functools.partial(language_model, scan_layers=True),
}


def repeating(workload: Workload, retries: int = RETRIES, **options: Any) -> System:
    """Returns the step of `minimize` with retries."""
    inner = OPTIMIZERS[workload.optimizer]()
    return minimize(inner, workload.loss_fn, retries=retries, **options)


def on_cpu() -> list[dict[str, Any]]:
    """Measures the time without overflow, and with about one retry in each step."""
    rows = []
    for name, make in RUNNING.items():
        workload = make()
        params, batches = jax.device_get(workload.init()), workload.batches()
        systems = [
            repeating(workload, retries=0),
            repeating(workload),
            repeating(workload, loss_scale=ALWAYS),
        ]
        plain, ours, often = (Running(x, params, batches, SECONDS) for x in systems)
        retry = compare(ours, often, SECONDS)["ratio"] - 1
        rows.append({"program": name, "retry": retry} | compare(plain, ours, SECONDS))
    return rows


def by_compiler(target: str) -> list[dict[str, Any]] | None:
    """Compiles all programs without and with retries; None without a compiler."""
    device = compiled.device(target)
    rows = []
    for name, make in COMPILED.items() if device else ():
        workload, pair = make(), []
        for retries in (0, RETRIES):
            system = repeating(workload, retries)
            program = compiled.compile_step(workload, system, device)
            memory: Any = program.memory_analysis()
            more = {"code": memory.generated_code_size_in_bytes}
            more["flops"] = (program.cost_analysis() or {}).get("flops")
            pair.append(compiled.describe(program) | more)
        rows.append({"program": name, "without": pair[0], "with": pair[1]})
    return rows if device else None


@functools.partial(jax.jit, static_argnums=(0, 1))
@functools.partial(jax.vmap, in_axes=(None, None, 0))
def train(task: Task, optimizer: LossScaleOptimizer, key: jax.Array) -> Any:
    """Trains once per key, and looks at each step whose number divides by `EVERY`.

    Returns:
      For each of these steps the number of batches lost so far, the bits between its
      scale and the next that overflows, and the share of gradients that are zero.
    """
    first, rest = jax.random.split(key)

    def step(carry, key):
        batch = task.batch(key)
        loss_fn = functools.partial(task.loss_fn, dtype=jnp.float16)
        return optimizer.minimize(loss_fn, *carry, batch)[:2], None

    def chunk(carry, keys):
        params, state = carry
        carry, _ = step(carry, keys[0])
        # The scale of the step: retries lower it before, a growth raises it after.
        scales = map(optimizer.current_loss_scale, (state, carry[1]))
        scale, batch = jnp.minimum(*scales), task.batch(keys[0])
        bits = find_oracle(task, params, batch) + 1 - jnp.log2(scale)
        flushed = underflowed(task, params, batch, scale)
        carry, _ = jax.lax.scan(step, carry, keys[1:])
        return carry, (carry[1].skipped_steps, bits, flushed)

    params = task.init(first)
    keys = jax.random.split(rest, (task.steps // EVERY, EVERY))
    _, found = jax.lax.scan(chunk, (params, optimizer.init(params)), keys)
    return found


def trainings() -> list[dict[str, Any]]:
    """Trains without and with retries at several growth intervals."""
    task, rows = perceptron(STEPS), []
    for interval, retries in itertools.product(INTERVALS, (0, RETRIES)):
        rule = DynamicLossScale(2.0**24, growth_interval=interval)
        optimizer = LossScaleOptimizer(task.optimizer, rule, retries=retries)
        found = train(task, optimizer, jax.random.split(jax.random.key(0), 5))
        # Means over the seeds, and over some of the steps.
        means = np.asarray(found).mean(1).reshape(3, POINTS, -1).mean(2)
        curves = dict(zip(("lost", "bits", "flushed"), means.tolist(), strict=True))
        row = {"interval": interval, "retries": retries, "curves": curves}
        rows.append(row | {"lost": float(np.mean(found[0][:, -1]))})
    return rows


PARTS: dict[str, Callable[[], list[dict[str, Any]] | None]] = {
    "CPU": on_cpu,
    compiled.TPU: functools.partial(by_compiler, compiled.TPU),
    compiled.H100: functools.partial(by_compiler, compiled.H100),
    "training": trainings,
}


def tables(found: dict[str, Any]) -> list[str]:
    """Returns Markdown tables: time on the CPU, what compilers say, and trainings."""
    times, costs, trained = [], [], []
    for row in found["CPU"]["rows"]:
        spread = "{:.2f} to {:.2f}".format(*row["spread"])
        ratio, retry = f"{row['ratio']:.2f}", f"{row['retry']:.2f}"
        times.append([row["program"], ratio, spread, retry])
    for target in (compiled.TPU, compiled.H100):
        for row in found[target]["rows"]:
            pair = row["without"], row["with"]
            memory = " to ".join(f"{x['temp_bytes'] / 1e6:,.0f}" for x in pair)
            ratios = [_ratio(*pair, key) for key in ("bytes", "flops", "code")]
            costs.append([f"{target}: {row['program']}", memory, *ratios])
    for row in found["training"]["rows"]:
        means = {name: np.mean(curve) for name, curve in row["curves"].items()}
        bits, flushed = f"{means['bits']:.1f}", f"{means['flushed']:.2%}"
        trained.append([_label(row), f"{row['lost']:g}", bits, flushed])
    header = ["time on a CPU", "with retries / without", "10 % to 90 %"]
    interval = ["`growth_interval`", "lost batches", "bits to overflow", "flushed"]
    return [
        report.table([*header, "a retry / a step"], times),
        report.table(["compiled for", "temporary MB", "bytes", "flops", "code"], costs),
        report.table(interval, trained),
    ]


def _ratio(old: dict[str, Any], new: dict[str, Any], key: str) -> str:
    return f"{new[key] / old[key]:.2f}" if old[key] else ""


def _label(row: dict[str, Any]) -> str:
    return f"{row['interval']}, {'with' if row['retries'] else 'without'} retries"


def plot(found: dict[str, Any]) -> None:
    """Draws the lost batches and the flushed gradients of the trainings."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 5.5), layout="constrained")
    panels: Any = figure.subplots(2, 1, sharex=True)
    colors = dict(zip(INTERVALS, ["#0072B2", "#D55E00"], strict=True))
    steps = (np.arange(POINTS) + 0.5) * STEPS / POINTS
    for row in found["training"]["rows"]:
        style = {"color": colors[row["interval"]], "label": _label(row)}
        line, curves = "-" if row["retries"] else ":", row["curves"]
        panels[0].plot(steps, curves["lost"], line, **style)
        panels[1].plot(steps, 100 * np.array(curves["flushed"]), line, **style)
    panels[0].set_title("Batches lost so far", fontsize="medium")
    panels[1].set_title("Gradients that become zero (%)", fontsize="medium")
    panels[1].set_xlabel("step")
    panels[1].set_xlim(0, STEPS)
    panels[0].legend(title="growth_interval", fontsize="small")
    for axes in panels:
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(FIGURE, dpi=150)


def main() -> None:
    """Measures all parts, or those that are named, and writes the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.retries")
    parser.add_argument("parts", nargs="*", choices=PARTS)
    for part in parser.parse_args().parts or PARTS:
        rows = PARTS[part]()
        if rows is None:
            print(f"{part}: skipped, as its compiler is not installed")
            continue
        found = {part: {**report.about(), "rows": rows}}
        report.save(RESULTS, report.load(RESULTS) | found)
    print("\n".join(tables(report.load(RESULTS))))


if __name__ == "__main__":
    main()
