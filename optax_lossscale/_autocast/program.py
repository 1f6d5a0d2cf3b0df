"""A jaxpr as one list of steps: calls are opened, and numbers computed."""

import dataclasses
import enum
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from optax_lossscale._jaxprs import flow, parts
from optax_lossscale._jaxprs.lines import Source, source_of


class Kind(enum.Enum):
    """What the policy does with an equation: see `policy`."""

    PRODUCT = enum.auto()
    BOUNDED = enum.auto()
    ARITHMETIC = enum.auto()
    MOVE = enum.auto()
    SPREAD = enum.auto()
    FLOAT32 = enum.auto()
    NESTED = enum.auto()


class Known(NamedTuple):
    """A number that is known while tracing."""

    value: Any

    @property
    def key(self) -> tuple[str, bytes]:
        """What tells it from other numbers, for tables."""
        return self.value.dtype.name, self.value.tobytes()


# An operand: the name of an array, or a number.
Atom = int | Known
NAMES = itertools.count()
# How to compute with numbers while tracing.
FOLDS: dict[str, Callable[..., Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide,
    "neg": np.negative, "abs": np.abs, "sqrt": np.sqrt, "exp": np.exp, "log": np.log,
    "rsqrt": lambda x: 1 / np.sqrt(x), "square": np.square, "pow": np.power,
    "max": np.maximum, "min": np.minimum, "convert_element_type": lambda x: x,
    "integer_pow": lambda x, y: x**y, "stop_gradient": lambda x: x,
}  # fmt: skip
# They keep a number that fills an array. That it varies over devices must be kept, too.
FILLS = ("broadcast_in_dim", "reshape", "pvary", "pcast", "pbroadcast", "squeeze")
# Primitives with programs in them, and the parameters that hold these.
BODIES = {
    "cond": ("branches",), "scan": ("jaxpr",), "while": ("cond_jaxpr", "body_jaxpr"),
    "shard_map": ("jaxpr",), "remat2": ("jaxpr",), "custom_jvp_call": ("call_jaxpr",),
    "custom_vjp_call": ("call_jaxpr",),
}  # fmt: skip


@dataclasses.dataclass(eq=False)
class Step:
    """An equation of a program.

    Attributes:
      equation: The equation.
      inputs: Its operands.
      outputs: The names of its results.
      kind: What the policy does with it.
      caller: The call that holds it.
      bodies: The programs in it, each with the indices of the operands that it reads.
      carry: The indices of the operands that are the state of a loop.
    """

    equation: Any
    inputs: list[Atom]
    outputs: list[int]
    kind: Kind
    caller: "Step | None"
    bodies: Sequence[tuple["Program", Sequence[int]]] = ()
    carry: Sequence[int] = ()

    @property
    def name(self) -> str:
        """The name of the primitive."""
        return self.equation.primitive.name

    @property
    def scope(self) -> Any:
        """The named scopes around it, in its program."""
        names, caller = self.equation.source_info.name_stack, self.caller
        # Those of a loop are around all its steps already.
        return names if caller is None or caller.bodies else caller.scope + names

    @functools.cached_property
    def source(self) -> Source:
        """Where it stands in the user's code."""
        outer = Source() if self.caller is None else self.caller.source
        return source_of(self.equation, outer, is_backward=False)


@dataclasses.dataclass(eq=False)
class Program:
    """A jaxpr as one list of steps.

    Attributes:
      inputs: The names of its arguments; a number for an argument that is known.
      consts: By name, the arrays that it closes over.
      steps: The steps.
      outputs: Its results.
      filled: By name, the number that fills an array.
    """

    inputs: list[Atom] = dataclasses.field(default_factory=list)
    consts: dict[int, Any] = dataclasses.field(default_factory=dict)
    steps: list[Step] = dataclasses.field(default_factory=list)
    outputs: list[Atom] = dataclasses.field(default_factory=list)
    filled: dict[int, Known] = dataclasses.field(default_factory=dict)

    def number(self, atom: Atom) -> Any:
        """Returns the number that an operand is or is filled with; None otherwise."""
        known = atom if isinstance(atom, Known) else self.filled.get(atom)
        return known and known.value


class Reader:
    """Makes programs of jaxprs, each once."""

    def __init__(self, kind_of: Callable[..., Kind]):
        """Takes what finds the kind of an equation."""
        self._kind_of = kind_of
        self._found: dict[Any, tuple[Any, Program]] = {}

    def read(
        self, closed: Any, known: Sequence[Known | None] = (), outer: Step | None = None
    ) -> Program:
        """Returns the program of a jaxpr.

        Args:
          closed: The jaxpr.
          known: For each of its arguments, the number if it is known.
          outer: The step that holds it.
        """
        key = id(closed), tuple(x and x.key for x in known), id(outer)
        if key not in self._found:
            jaxpr, consts = parts.opened(closed)
            program = Program()
            known = known or [None] * len(jaxpr.invars)
            program.inputs = [next(NAMES) if x is None else x for x in known]
            constants = [next(NAMES) for _ in consts]
            program.consts = dict(zip(constants, consts, strict=True))
            atoms = [*constants, *program.inputs]
            program.outputs = self._open(program, jaxpr, atoms, outer)
            self._found[key] = closed, program  # It keeps the jaxpr, for its identity.
        return self._found[key][1]

    def _open(self, program, jaxpr, atoms, caller):
        """Adds the steps of a jaxpr to a program, and returns its results."""
        found = dict(zip((*jaxpr.constvars, *jaxpr.invars), atoms, strict=True))

        def read(x):
            if not hasattr(x, "val"):
                return found[x]
            return Known(np.asarray(x.val, x.aval.dtype)[()])

        for equation in jaxpr.eqns:
            inputs = list(map(read, equation.invars))
            names = [next(NAMES) for _ in equation.outvars]
            step = Step(equation, inputs, names, Kind.NESTED, caller)
            outputs: list[Atom] = [*names]
            if _is_plain_call(equation):
                inner, consts = parts.opened(parts.called_jaxpr(equation))
                constants = [next(NAMES) for _ in consts]
                program.consts |= zip(constants, consts, strict=True)
                outputs = self._open(program, inner, [*constants, *inputs], step)
            elif (number := _folded(equation, inputs)) is not None:
                outputs = [number]
            else:
                self._add(program, step)
            found |= zip(equation.outvars, outputs, strict=True)
        return list(map(read, jaxpr.outvars))

    def _add(self, program, step):
        program.steps.append(step)
        numbers = list(map(program.number, step.inputs))
        if step.name in BODIES or step.name in parts.CALLS:
            self._enter(step)
            return
        is_square = step.name == "mul" and len(set(step.inputs)) == 1
        step.kind = self._kind_of(step.equation, numbers, is_square)
        if step.name in FILLS and numbers[0] is not None:
            program.filled[step.outputs[0]] = Known(numbers[0])

    def _enter(self, step):
        """Adds the programs in a step."""
        equation, operands = step.equation, range(len(step.inputs))
        names = BODIES.get(step.name, parts.CALLED)
        found = [equation.params[x] for x in names if x in equation.params]
        reads, known = [operands], []
        if step.name == "scan":
            _, step.carry, _ = flow.scan_parts(equation, operands)
        elif step.name == "while":
            asked, consts, step.carry = flow.while_parts(equation, operands)
            reads = [[*asked, *step.carry], [*consts, *step.carry]]
        elif step.name == "cond":
            (found,) = found
            reads = [operands[1:]] * len(found)
        elif step.name != "shard_map":
            known = [x if isinstance(x, Known) else None for x in step.inputs]
        programs = [self.read(x, known, step) for x in found]
        step.bodies = list(zip(programs, reads, strict=True))


def _is_plain_call(equation: Any) -> bool:
    """Whether it calls a jaxpr, and that is all."""
    name, params = equation.primitive.name, equation.params
    if name not in parts.CALLS or name in BODIES:
        return False
    shardings = (*params.get("in_shardings", ()), *params.get("out_shardings", ()))
    return all(type(x).__name__ == "UnspecifiedValue" for x in shardings)


def _folded(equation: Any, inputs: Sequence[Atom]) -> Known | None:
    """Returns the result of an equation of numbers, if it can be computed."""
    name = equation.primitive.name
    values = [x.value for x in inputs if isinstance(x, Known)]
    if name not in FOLDS or not values or len(values) < len(inputs):
        return None
    aval = equation.outvars[0].aval
    if aval.shape or not isinstance(aval.dtype, np.dtype):
        return None
    options = (equation.params["y"],) if name == "integer_pow" else ()
    with np.errstate(all="ignore"):
        return Known(np.asarray(FOLDS[name](*values, *options)).astype(aval.dtype)[()])
