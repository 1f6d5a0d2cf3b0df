"""Measures how the cost grows: `python -m benchmarks.growth`.

With leaves and parameters for Adam's step, with chips for a training step, with layers
for `trace_numerics`, and with leaves for `autocast`. It needs `jax[tpu]` for its
compiler, but no TPU, and `jax[cuda12]` for that of an H100. It takes half an hour, and
writes `results/growth.json`. A word chooses the rows with it: `python -m
benchmarks.growth trace`.
"""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jax.stages import Compiled
from rich.progress import track

from benchmarks import by_hand, compiled, report
from benchmarks.measure import cpu_seconds
from benchmarks.systems import PLAIN, System, lower
from benchmarks.workloads import Workload, mlp, optimizer_step, written
from examples.language_model.sharding import make_mesh, shard_batch, shard_state
from optax_lossscale import autocast
from optax_lossscale.diagnostics import trace_numerics

RESULTS = report.RESULTS / "growth.json"
UPDATE, MINIMIZE = "update of unscaled", "minimize"
SIZE = 8  # numbers in a leaf, or in its row, where times are measured
WIDTH, BATCH = 4096, 256  # of the perceptron on chips; the batch is that of a chip


def compile_both(workload: Workload, target: str) -> list[tuple[float, Compiled]]:
    """Returns the processor time and the program, without and with loss scaling."""
    pairs, on = [], compiled.device(target)
    for name in (PLAIN, UPDATE):
        system = workload.systems()[name]()
        make = functools.partial(compiled.compile_step, workload, system, on)
        # The first program of a compiler takes longer.
        pairs.append(min((cpu_seconds(make) for _ in range(2)), key=lambda x: x[0]))
    return pairs


def seconds_to_compile(target: str, leaves: int) -> list[float]:
    """Returns the processor time to compile the step of Adam."""
    workload = optimizer_step(SIZE * leaves, leaves)
    return [seconds for seconds, _ in compile_both(workload, target)]


def bytes_of_a_step(parameters: float) -> list[float]:
    """Returns the bytes that the step of Adam moves on a TPU."""
    pairs = compile_both(optimizer_step(int(parameters), 20), compiled.TPU)
    return [compiled.describe(program)["bytes"] for _, program in pairs]


def compile_sharded(workload: Workload, name: str, mesh: Mesh) -> Compiled:
    """Compiles a training step whose parameters and state are sharded over a mesh."""
    system = workload.systems()[name]()
    args = compiled.shapes(workload, system)
    state = shard_state(args[:2], mesh)
    batch = [shard_batch(mesh, ndim=2) for _ in args[2:]]

    def step(*args):
        everywhere = NamedSharding(mesh, P())
        new = system.step(*args)
        return jax.lax.with_sharding_constraint(new, (*state, everywhere))

    args = jax.tree.map(compiled.place, args, (*state, *batch))
    return lower(System(system.init, step), *args).compile()


@functools.cache
def on_chips(chips: int) -> list[Compiled]:
    """Compiles for a slice of TPU v5e, without and with loss scaling."""
    side = int(chips**0.5)
    name = f"v5e:{side}x{side}"
    mesh = make_mesh("fsdp", compiled.devices(compiled.TPU, topology_name=name) or [])
    workload = mlp(layers=2, width=WIDTH, batch=BATCH * chips)
    return [compile_sharded(workload, name, mesh) for name in (PLAIN, MINIMIZE)]


def bytes_of_a_chip(chips: int) -> list[float]:
    """Returns the bytes that a chip moves in a training step."""
    return [compiled.describe(program)["bytes"] for program in on_chips(chips)]


def channels(program: Compiled) -> int:
    """Returns the number of collectives in a program.

    Several instructions may stand for one collective, which runs while others do. They
    have the same channel.
    """
    return len(set(re.findall(r"channel_id=(\d+)", program.as_text())))


def collectives(chips: int) -> list[int]:
    """Returns the number of collectives in a training step."""
    return list(map(channels, on_chips(chips)))


def seconds_to_trace(name: str, size: int) -> list[float]:
    """Returns the processor time of a step, traced, compiled and run, and of its trace.

    Args:
      name: "MLP" with so many leaves, or "GPT", unrolled, with so many layers.
      size: That number.
    """
    model = by_hand.mlp(size, SIZE, SIZE)
    if name == "GPT":
        model = by_hand.gpt(size, 64, heads=4, batch=2, length=32, vocabulary=1000)
    *shapes, make = model
    params, batch = map(by_hand.arrays, shapes)
    loss_fn = autocast(make(jnp.float32))
    step = jax.jit(jax.value_and_grad(loss_fn))

    def first_step():
        return jax.block_until_ready(step(params, *batch))

    def trace():
        return trace_numerics(loss_fn, params, *batch, scale=2.0**10)

    jax.clear_caches()
    return [cpu_seconds(first_step)[0], cpu_seconds(trace)[0]]


def seconds_to_cast(leaves: int) -> list[float]:
    """Returns the processor time to trace a perceptron, without and with `autocast`."""
    layers, batch = leaves // 2, by_hand.of(SIZE, SIZE)

    def loss_fn(params, x):
        for p in params:
            x = jax.nn.relu(by_hand.dense(p, x, x.dtype))
        return jnp.mean(x)

    found, params = [], [by_hand.layer(SIZE, SIZE)] * layers
    for f in (loss_fn, autocast(loss_fn)):
        trace = functools.partial(jax.make_jaxpr(f), params, batch)
        found.append(min(cpu_seconds(trace)[0] for _ in range(3)))
    return found


LEAVES, CHIPS, LAYERS = (20, 200, 2000), (4, 64, 256), (1, 2, 6)
TIMES = {
    f"time to compile, {target}: {{}} leaves": (
        functools.partial(seconds_to_compile, target),
        LEAVES,
    )
    for target in (compiled.CPU, compiled.TPU, compiled.H100)
}
# What is measured without and with loss scaling, and the sizes at which it is.
ROWS: dict[str, tuple[Callable[[Any], list], tuple]] = {
    **TIMES,
    "bytes, TPU v5e: {} parameters": (bytes_of_a_step, (1e7, 1e8, 1e9)),
    "bytes that a chip moves, TPU v5e: {} chips": (bytes_of_a_chip, CHIPS),
    "collectives, TPU v5e: {} chips": (collectives, CHIPS),
    "`trace_numerics` / first step of a perceptron, CPU: {} leaves": (
        functools.partial(seconds_to_trace, "MLP"),
        (10, 100, 300),
    ),
    "`trace_numerics` / first step of a GPT, CPU: {} layers": (
        functools.partial(seconds_to_trace, "GPT"),
        LAYERS,
    ),
    "`autocast` / float32, time to trace, CPU: {} leaves": (
        seconds_to_cast,
        (300, 1500, 6000),
    ),
}


def table(found: dict[str, Any]) -> str:
    """Returns a Markdown table of the ratios."""
    cells = []
    for title, row in found["rows"].items():
        sizes = ", ".join(written(x) if x >= 1e4 else f"{x:g}" for x in row["sizes"])
        cells.append([title.format(sizes), *(f"{x:.2f}" for x in row["ratio"])])
    header = ["with loss scaling / without, as it grows", "small", "medium", "large"]
    return report.table(header, cells)


def main() -> None:
    """Measures, and writes the results."""
    parser = report.parser("benchmarks.growth", __doc__)
    parser.add_argument("word", nargs="?", default="", help="of the rows to measure")
    word = parser.parse_args().word
    found = report.load(RESULTS) | report.about()
    chosen = {title: row for title, row in ROWS.items() if word in title}
    for title, (function, sizes) in track(chosen.items(), "measuring"):
        pairs = [function(size) for size in sizes]
        found["rows"][title] = {
            "sizes": sizes,
            "plain": [plain for plain, _ in pairs],
            "ratio": [scaled / plain for plain, scaled in pairs],
        }
        report.save(RESULTS, found)
    print(table(found))


if __name__ == "__main__":
    main()
