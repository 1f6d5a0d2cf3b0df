"""Where the backward pass computes again what it would have to save in float32.

Between products, a program has runs of cheap operations, an activation function for
example. They compute in float32, so their derivatives read float32 numbers. If less is
to be saved, such a run is an island: the forward pass saves only what it reads, mostly
HALF, and the backward pass runs it again, as with `jax.checkpoint`.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

from optax_lossscale._autocast.policy import State
from optax_lossscale._autocast.program import Step
from optax_lossscale._autocast.states import Plan

# Cheap operations that work number by number; the second kind has no derivative that
# reads numbers, or a mask of one byte.
CURVED = (
    "tanh", "logistic", "erf", "sin", "cos", "exp", "exp2", "expm1", "log", "log1p",
    "sqrt", "rsqrt", "square", "integer_pow", "pow", "cbrt", "atan2", "erfc", "tan",
)  # fmt: skip
PRODUCTS = ("mul", "div")
STRAIGHT = (
    "add", "sub", "neg", "abs", "max", "min", "clamp", "select_n", "stop_gradient",
    "convert_element_type", "broadcast_in_dim", "reshape", "squeeze", "expand_dims",
    "copy", "sign", "gt", "ge", "lt", "le", "eq", "ne", "and", "or", "not", "is_finite",
    "floor", "ceil", "round", "reduce_sum", "reduce_max", "reduce_min",
)  # fmt: skip
CHEAP = {*CURVED, *PRODUCTS, *STRAIGHT}


@dataclasses.dataclass(eq=False)
class Island:
    """Steps that the backward pass runs again.

    Attributes:
      steps: The steps.
      inputs: The names of what they read.
      outputs: The names of what others read of their results.
    """

    steps: list[Step]
    inputs: list[int]
    outputs: list[int]


def schedule(plan: Plan) -> list[Step | Island]:
    """Returns the steps of a program in an order of execution, some in islands."""
    program, found = plan.program, []
    reads = [(x, step) for step in program.steps for x in step.inputs]
    readers: dict[Any, set[Step | None]] = {x: {None} for x in program.outputs}
    for name, step in reads:
        readers.setdefault(name, set()).add(step)
    for steps in _runs(program.steps):
        is_cheap = _is_cheap(steps[0])
        for part in _connected(steps) if is_cheap else [steps]:
            pays = is_cheap and _pays(part, plan)
            found.append(_island(part, readers) if pays else part)
    return [x for part in found for x in (part if isinstance(part, list) else [part])]


def _is_cheap(step: Step) -> bool:
    if step.name == "custom_jvp_call":
        return all(map(_is_cheap, step.bodies[0][0].steps))
    return step.name in CHEAP and not step.equation.effects


def _runs(steps: Iterable[Step]) -> list[list[Step]]:
    """Splits steps into runs of cheap ones and of others, as few as possible."""
    levels: dict[Any, int] = {}
    runs: dict[int, list[Step]] = {}
    latest = 0
    for step in steps:
        # Others have even levels, cheap ones odd levels: each above what it reads.
        level = max((levels.get(x, 0) for x in step.inputs), default=0)
        level += level % 2 != _is_cheap(step)
        if step.equation.effects:
            level = latest = max(level, latest)
        levels.update((x, level) for x in step.outputs)
        runs.setdefault(level, []).append(step)
    return [runs[level] for level in sorted(runs)]


def _connected(steps: Sequence[Step]) -> list[list[Step]]:
    """Splits steps into parts that read nothing of each other."""
    parts: list[tuple[set[int], list[Step]]] = []
    for step in steps:
        names, own, rest = set(step.outputs), [], []
        for part in parts:
            (own if not part[0].isdisjoint(step.inputs) else rest).append(part)
        names.update(*(x for x, _ in own))
        parts = [*rest, (names, [*(y for _, x in own for y in x), step])]
    return [x for _, x in parts]


def _island(steps: list[Step], readers: dict[Any, set[Step | None]]) -> Island:
    made = [x for step in steps for x in step.outputs]
    read = dict.fromkeys(x for step in steps for x in step.inputs if isinstance(x, int))
    outputs = [x for x in made if not readers.get(x, set()) <= set(steps)]
    return Island(steps, [x for x in read if x not in made], outputs)


def _pays(steps: list[Step], plan: Plan) -> bool:
    """Whether an island saves fewer bytes than its steps would."""
    made = {x for step in steps for x in step.outputs}
    sizes: dict[int, int] = {}
    saved: set[int] = set()
    for step in steps:
        names = [*step.inputs, *step.outputs]
        variables = [*step.equation.invars, *step.equation.outvars]
        for name, x in zip(names, variables, strict=True):
            if isinstance(name, int):
                is_half = plan.states.get(name) == State.HALF
                width = 2 if is_half else x.aval.dtype.itemsize
                sizes[name] = width * math.prod(x.aval.shape)
        inputs = [x for x in step.inputs if isinstance(x, int)]
        if step.name in PRODUCTS and len(inputs) == 2:
            saved.update(inputs)
        elif step.name in CURVED or step.name == "custom_jvp_call":
            saved.update(step.outputs)
    read = {x for step in steps for x in step.inputs if isinstance(x, int)} - made
    return sum(sizes[x] for x in saved) > sum(sizes[x] for x in read)
