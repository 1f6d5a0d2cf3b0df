"""Measures how the cost grows with leaves, parameters, chips and options.

`python -m benchmarks.growth` takes about ten minutes and needs `jax[tpu]`, for its
compiler; no TPU. It writes `results/growth.json`, and the tables and the figure
of `docs/guide/growth.md`.
"""

import argparse
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from rich.console import Console
from rich.progress import Progress

from benchmarks import chips, growth_page, report
from benchmarks.compile_time import cpu_seconds
from benchmarks.compiled import TPU, compile_on, describe, device
from benchmarks.systems import OPTIMIZERS, PLAIN, System, lower, minimize, plain
from benchmarks.workloads import Workload, given_gradients, optimizer_step
from optax_lossscale import LossScaleOptimizer, accumulate_gradients

LEAVES = (1, 20, 200, 2000)
SIZE = 8  # numbers in a leaf, where compile time is measured
PARAMETERS = tuple(10**i for i in range(4, 10))
OTHER_SIZES = ((2 * 10**7, 20), (2 * 10**7, 200))
CALLS = ("apply_gradients of unscaled, auto", "update of unscaled, auto")
# The peers, and the most leaves that compile within a minute or so.
PEERS = {
    "flax DynamicScale": 200,
    "jmp": 200,
    "mpx": 20,  # as long as jmp
    "optax.apply_if_finite": 200,
    "Keras 3, no scaling": 200,
    "Keras 3": 200,
}


def bare(inner: optax.GradientTransformation, loss_fn: Callable) -> System:
    """Returns the least that checks the gradients and branches, without a scale."""

    def step(params, state, *batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, *batch)
        finite = [jnp.isfinite(x).all() for x in jax.tree.leaves(grads)]

        def run(grads, params, state):
            updates, state = inner.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        def keep(_grads, params, state):
            return params, state

        every = jnp.stack(finite).all()
        return *jax.lax.cond(every, run, keep, grads, params, state), loss

    return System(inner.init, step)


class Option(NamedTuple):
    """A step with an option, and the same without loss scaling."""

    system: System
    baseline: System
    losses: int = 1


def make_options(leaves: int) -> dict[str, Option]:
    """Returns steps of Adam with options, by name."""
    adam = OPTIMIZERS["adam"]()

    def losses(params, *grads):
        return tuple(given_gradients(params, x) for x in grads)

    def total(params, *grads):
        return sum(losses(params, *grads))

    def option(inner=adam, **options):
        baseline = plain(inner, given_gradients)
        return Option(minimize(adam, given_gradients, **options), baseline)

    scaler = LossScaleOptimizer(adam)
    accumulated = accumulate_gradients(scaler, micro_steps=4)

    def accumulate(params, state, *batch):
        value_and_grad = scaler.value_and_grad(given_gradients, state)
        loss, grads = value_and_grad(params, *batch)
        updates, state = accumulated.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    mask = [True] * (leaves - 1) + [False]
    return {
        "no option": option(),
        "track_leaves": option(track_leaves=True),
        "check_loss": option(check_loss=True),
        "headroom": option(loss_scale="headroom"),
        "logmax": option(loss_scale="logmax"),
        "mask": option(optax.masked(adam, mask), mask=mask),
        "num_losses=4": Option(
            minimize(adam, losses, num_losses=4), plain(adam, total), losses=4
        ),
        "accumulate_gradients": Option(
            System(accumulated.init, accumulate),
            plain(optax.MultiSteps(adam, 4), given_gradients),
        ),
    }


def compile_times(optimizer: str, leaves: int) -> Iterator[dict[str, Any]]:
    """Yields the time to compile for a CPU, by system."""
    workload = optimizer_step(SIZE * leaves, leaves, optimizer)
    systems, inner = workload.systems(), OPTIMIZERS[optimizer]()
    peers = [name for name, most in PEERS.items() if leaves <= most]
    chosen = {name: systems[name] for name in (PLAIN, *CALLS, *peers)}
    chosen["bare check and branch"] = functools.partial(bare, inner, workload.loss_fn)
    seconds = {}
    for name, make in chosen.items():
        system = make()
        repeats = 1 if name in peers and leaves >= 200 else 2
        seconds[name] = on_cpu(workload, system, repeats)
        yield {
            "optimizer": optimizer,
            "leaves": leaves,
            "system": name,
            "seconds": seconds[name],
            "ratio": seconds[name] / seconds[system.baseline],
        }


def on_cpu(workload: Workload, system: System, repeats: int) -> float:
    """Returns the least processor time to trace and compile, in seconds."""
    params = workload.init()
    arguments = (params, system.init(params), *workload.batches()[0])

    def compile_it():
        return lower(system, *arguments).compile()

    return min(cpu_seconds(compile_it)[0] for _ in range(repeats))


def on_tpu(workload: Workload, system: System) -> dict[str, Any]:
    """Compiles for a TPU, and returns the bytes and the processor time."""
    arguments, target = chips.shapes(workload, system), device(TPU)
    assert target is not None
    seconds, compiled = cpu_seconds(lambda: compile_on(system, arguments, target))
    return {"seconds": seconds, **describe(compiled)}


def sizes(parameters: int, leaves: int) -> Iterator[dict[str, Any]]:
    """Yields what the TPU's compiler makes of Adam's step, by system."""
    workload = optimizer_step(parameters, leaves)
    for name in (PLAIN, *CALLS):
        found = on_tpu(workload, workload.systems()[name]())
        yield {"parameters": parameters, "leaves": leaves, "system": name, **found}


def options(name: str) -> Iterator[dict[str, Any]]:
    """Yields the bytes of a step on a TPU and its compile time on a CPU."""

    def case(parameters, leaves):
        option = make_options(leaves)[name]
        workload = optimizer_step(parameters, leaves)

        def batches():
            return [workload.batches()[0] * option.losses]

        return option, workload._replace(batches=batches)

    option, workload = case(2 * 10**7, 20)
    theirs, ours = (on_tpu(workload, option.baseline), on_tpu(workload, option.system))
    option, workload = case(200 * SIZE, 200)
    before, after = (on_cpu(workload, x, 3) for x in (option.baseline, option.system))
    yield {
        "option": name,
        "bytes": [theirs["bytes"], ours["bytes"]],
        "seconds": [before, after],
    }


def parts() -> dict[str, list[Callable[[], Iterator[dict[str, Any]]]]]:
    """Returns what is measured, by the name of the part."""
    make = functools.partial
    counts = [*((n, 20) for n in PARAMETERS), *OTHER_SIZES]
    return {
        "compile": [make(compile_times, o, n) for o in ("adam", "sgd") for n in LEAVES],
        "sizes": [make(sizes, *count) for count in counts],
        "chips": [make(chips.measure, *topology) for topology in chips.TOPOLOGIES],
        "options": [make(options, name) for name in make_options(1)],
    }


def main() -> None:
    """Measures, and writes the results and the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.growth")
    parser.add_argument("--part", choices=list(parts()), help="measure only this part")
    chosen = parser.parse_args().part
    found = report.load(growth_page.RESULTS)
    found |= {"machine": report.machine(), "versions": report.versions()}
    with Progress(console=Console(stderr=True)) as progress:
        for name, measures in parts().items():
            if chosen in (None, name):
                tracked = progress.track(measures, description=name)
                found[name] = [row for measure in tracked for row in measure()]
                report.save(growth_page.RESULTS, found)
    growth_page.write(found)


if __name__ == "__main__":
    main()
