"""Measures the time to compile a step, and the bytes that it moves."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.compiled import CPU, TPU, compile_on, describe, device
from benchmarks.measure import cpu_seconds
from benchmarks.systems import OPTIMIZERS, PLAIN, PLAIN_KERAS, System
from benchmarks.workloads import Workload, optimizer_step, transformer

LEAVES = (1, 20, 200, 2000)
ACCELERATOR_LEAVES = (20, 200, 2000)
SIZE = 8  # numbers in a leaf, where compile time is measured
PARAMETERS = tuple(10**i for i in range(4, 10))
OTHER_SIZES = ((2 * 10**7, 20), (2 * 10**7, 200))
LAYERS = 12  # of the scanned transformer
CALLS = ("apply_gradients of unscaled, auto", "update of unscaled, auto")
BARE = "bare check and branch"
SELECTING = ("flax DynamicScale", "jmp", "mpx")
PEERS = (*SELECTING, "optax.apply_if_finite", PLAIN_KERAS, "Keras 3")


def bare(workload: Workload) -> System:
    """Returns the least that checks the gradients and branches, without a scale."""
    inner = OPTIMIZERS[workload.optimizer]()

    def step(params, state, *batch):
        loss, grads = jax.value_and_grad(workload.loss_fn)(params, *batch)
        finite = [jnp.isfinite(x).all() for x in jax.tree.leaves(grads)]

        def run(grads, params, state):
            updates, state = inner.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        def keep(_grads, params, state):
            return params, state

        every = jnp.stack(finite).all()
        return *jax.lax.cond(every, run, keep, grads, params, state), loss

    return System(inner.init, step)


def shapes(workload: Workload, system: System) -> tuple:
    """Returns the arguments of a step as shapes; no array is made."""
    params = jax.eval_shape(workload.init)
    batch = jax.eval_shape(lambda: tuple(workload.batches()[0]))
    return params, jax.eval_shape(system.init, params), *batch


def compile_for(
    target: str, workload: Workload, system: System, repeats: int = 1
) -> tuple[float, jax.stages.Compiled]:
    """Traces and compiles; returns the least processor time, and the program."""
    arguments, found = shapes(workload, system), device(target)
    assert found is not None

    def compile_it():
        return compile_on(system, arguments, found)

    return min((cpu_seconds(compile_it) for _ in range(repeats)), key=lambda x: x[0])


@functools.cache
def _warm_up(target: str) -> None:
    """Starts a compiler: its first program takes longer."""
    workload = optimizer_step(1, 1)
    for name in (PLAIN, *CALLS):
        compile_for(target, workload, workload.systems()[name]())


def _times(
    target: str, workload: Workload, systems: dict[str, Callable], repeats: int
) -> Iterator[dict[str, Any]]:
    _warm_up(target)
    seconds = {}
    for name, make in systems.items():
        system = make()
        slow = name in SELECTING and target == CPU
        found, _ = compile_for(target, workload, system, 1 if slow else repeats)
        seconds[name] = found
        yield {
            "target": target,
            "system": name,
            "seconds": found,
            "ratio": found / seconds[system.baseline],
        }


def by_leaves(target: str, optimizer: str, leaves: int) -> Iterator[dict[str, Any]]:
    """Yields the time to compile the step of an optimizer, by system.

    Peers are compiled with up to 200 leaves. mpx takes as long as jmp, so for a CPU it
    is compiled with up to 20.
    """
    workload = optimizer_step(SIZE * leaves, leaves, optimizer)
    systems = workload.systems()
    peers = [name for name in PEERS if leaves <= 200]
    if target == CPU and leaves > 20:
        peers = [name for name in peers if name != "mpx"]
    chosen = {name: systems[name] for name in (PLAIN, *CALLS, *peers)}
    chosen[BARE] = functools.partial(bare, workload)
    repeats = 2 if target == CPU or leaves <= 200 else 1
    for row in _times(target, workload, chosen, repeats):
        yield {"optimizer": optimizer, "leaves": leaves, **row}


def scanned(target: str) -> Iterator[dict[str, Any]]:
    """Yields the time to compile a training step of a scanned transformer."""
    workload = transformer(LAYERS, scanned=True)
    calls = [name.replace(" of unscaled", "") for name in CALLS]
    names = (PLAIN, "minimize, auto", *calls, *PEERS)
    systems = workload.systems()
    yield from _times(target, workload, {name: systems[name] for name in names}, 2)


def by_parameters(parameters: int, leaves: int) -> Iterator[dict[str, Any]]:
    """Yields what the TPU's compiler makes of Adam's step, by system."""
    workload = optimizer_step(parameters, leaves)
    for name in (PLAIN, *CALLS):
        seconds, compiled = compile_for(TPU, workload, workload.systems()[name]())
        yield {
            "parameters": parameters,
            "leaves": leaves,
            "system": name,
            "seconds": seconds,
            **describe(compiled),
        }
