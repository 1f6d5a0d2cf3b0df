"""Measures what options of a step cost."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import optax

from benchmarks.compiled import CPU, TPU, describe
from benchmarks.growth.compiling import SIZE, compile_for
from benchmarks.systems import OPTIMIZERS, System, minimize, plain
from benchmarks.workloads import given_gradients, optimizer_step
from optax_lossscale import LossScaleOptimizer, accumulate_gradients


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


def measure(name: str) -> Iterator[dict[str, Any]]:
    """Yields the bytes of a step on a TPU and its compile time on a CPU."""

    def case(parameters, leaves):
        option = make_options(leaves)[name]
        workload = optimizer_step(parameters, leaves)

        def batches():
            return [workload.batches()[0] * option.losses]

        return option, workload._replace(batches=batches)

    row: dict[str, Any] = {"option": name, "bytes": [], "seconds": []}
    option, workload = case(2 * 10**7, 20)
    for system in (option.baseline, option.system):
        _, compiled = compile_for(TPU, workload, system)
        row["bytes"].append(describe(compiled)["bytes"])
    option, workload = case(200 * SIZE, 200)
    for system in (option.baseline, option.system):
        row["seconds"].append(compile_for(CPU, workload, system, repeats=3)[0])
    yield row
