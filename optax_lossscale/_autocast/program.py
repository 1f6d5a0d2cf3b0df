"""A program: a jaxpr, and all that is known before it runs.

Known values, such as constants; the kinds of its steps; the programs in them.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optax_lossscale._autocast import policy
from optax_lossscale._jaxprs import ends, flow, parts, primitives
from optax_lossscale._jaxprs.lines import (
    Function,
    Source,
    functions_of,
    scope_of,
    source_of,
)
from optax_lossscale._jaxprs.parts import variable_of
from optax_lossscale._jaxprs.primitives import Kind, Trait

# How to compute with known values while tracing.
FOLDS: dict[str, Callable[..., Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide,
    "neg": np.negative, "abs": np.abs, "sqrt": np.sqrt, "exp": np.exp, "log": np.log,
    "rsqrt": lambda x: 1 / np.sqrt(x), "square": np.square, "pow": np.power,
    "max": np.maximum, "min": np.minimum, "gt": np.greater,
    "select_n": lambda which, *cases: cases[int(which)],
    "convert_element_type": lambda x: x,
    "integer_pow": lambda x, y: x**y,
}  # fmt: skip


# NumPy rounds to integers otherwise than XLA, where inf is the largest integer.
ROUNDED_BY_XLA: dict[str, Callable[..., Any]] = {
    "div": lambda dtype, x, y: lax.div(x, y),
    "convert_element_type": lambda dtype, x: lax.convert_element_type(x, dtype),
}


@dataclasses.dataclass(eq=False)
class Step:
    """An equation of a program.

    Attributes:
      equation: The equation.
      kind: How the policy treats it.
      callers: The equations that hold it, the outermost first.
      bodies: The programs in it, each with the indices of its operands.
      carry: The indices of the operands that are the state of a loop.
    """

    equation: Any
    kind: Kind
    callers: tuple[Any, ...]
    bodies: Sequence[tuple["Program", Sequence[int]]] = ()
    carry: Sequence[int] = ()

    @functools.cached_property
    def name(self) -> str:
        """The name of the primitive; "mul" for a product that adds up nothing."""
        return policy.operation_of(self.equation)

    def has(self, trait: Trait) -> bool:
        """Whether its primitive has a trait, or one of several."""
        return primitives.has(self.name, trait)

    @property
    def is_parallel(self) -> bool:
        """Whether each result is of one operand, as in sorting several arrays alike."""
        counts = len(self.equation.invars), len(self.equation.outvars)
        return self.has(Trait.PARALLEL) and counts[0] == counts[1]

    @property
    def path(self) -> tuple[Any, ...]:
        """The equations that hold it, and its own."""
        return *self.callers, self.equation

    def source(self) -> Source:
        """Returns where it stands in the user's code."""
        source = Source()
        for x in self.path:
            source = source_of(x, source, is_backward=False)
        return source

    def functions(self) -> set[Function]:
        """Returns the functions that were running when JAX made it."""
        return set().union(*map(functions_of, self.path))

    def scope(self) -> str:
        """Returns the named scopes that it is in."""
        scope = ""
        for x in self.path:
            scope = scope_of(x, scope)
        return scope

    @functools.cached_property
    def inputs(self) -> list[Any]:
        """The variables among its operands; None for a literal."""
        return [variable_of(x) for x in self.equation.invars]


@dataclasses.dataclass(eq=False)
class Program:
    """A jaxpr, and all that is known before it runs.

    Attributes:
      jaxpr: The jaxpr.
      consts: The arrays that it closes over.
      values: By variable, its value if that is known, or the value that fills it.
      steps: Its equations, without those whose results are known values.
      is_shared: Whether it is called more than once.
      masks: By array whose elements take one of two known values, the two.
    """

    jaxpr: Any
    consts: Sequence[Any]
    values: dict[Any, Any]
    steps: list[Step] = dataclasses.field(default_factory=list)
    is_shared: bool = False
    masks: dict[Any, Any] = dataclasses.field(default_factory=dict)

    def known(self, atom: Any) -> Any:
        """Returns the value of an operand, or of all its elements; None if unknown."""
        if variable_of(atom) is None:
            is_empty = atom.aval.dtype == jax.dtypes.float0  # An integer's gradient.
            is_scalar = not is_empty and not atom.aval.shape
            return np.asarray(atom.val, atom.aval.dtype)[()] if is_scalar else None
        return self.values.get(atom)

    def scalar(self, atom: Any) -> Any:
        """Returns the known value of an operand without dimensions, on all devices."""
        value, aval = self.known(atom), atom.aval
        if value is None or aval.shape:
            return None
        like = parts.type_like(jax.typeof(value), weak_type=aval.weak_type)
        return value if like == aval or variable_of(atom) is None else None

    @functools.cached_property
    def outputs(self) -> list[Any]:
        """The variables among its results; None for a literal."""
        return [variable_of(x) for x in self.jaxpr.outvars]

    @functools.cached_property
    def repeats(self) -> bool:
        """Whether its backward pass may run parts of it again.

        Not so if it has effects, or loops, which do so for each iteration, or
        `jax.checkpoint`, where the user says what is saved, or complex numbers, which
        JAX's policies cannot save.
        """
        types = [x.aval.dtype for step in self.steps for x in step.equation.outvars]
        is_complex = any(getattr(x, "kind", "") == "c" for x in types)
        if is_complex or not parts.only_exchanges(self.jaxpr):
            return False
        bodies = [body for step in self.steps for body, _ in step.bodies]
        is_flat = all(x.name not in ("scan", "remat2") for x in self.steps)
        return is_flat and all(x.repeats for x in bodies)


def steps_of(steps: Iterable[Step]) -> Iterator[Step]:
    """Yields steps, and those of the programs in them."""
    for step in steps:
        yield step
        for body, _ in step.bodies:
            yield from steps_of(body.steps)


def read(
    closed: Any,
    dtype: Any,
    known: Sequence[Any] = (),
    callers: tuple[Any, ...] = (),
    programs: dict[Any, "Program"] | None = None,
    walk: ends.Walk | None = None,
) -> Program:
    """Returns the program of a jaxpr.

    Args:
      closed: The jaxpr.
      dtype: The dtype to compute in.
      known: The values of its first arguments, or those that fill them; None if they
        are unknown.
      callers: The equations that hold it, the outermost first.
      programs: The programs that were read before, so that a function that is called
        often is read, planned and traced once. None if it matters where each call
        stands.
      walk: The walk that finds solvers, which remembers the loops in loops.
    """
    walk = walk or ends.Walk()
    key = id(closed), *map(repr, known)
    if programs is not None and key in programs:
        programs[key].is_shared = True
        return programs[key]
    jaxpr, consts = parts.opened(closed)
    pairs = zip(jaxpr.invars, known, strict=False)
    program = Program(jaxpr, consts, {k: x for k, x in pairs if x is not None})
    for equation in jaxpr.eqns:
        values, result = list(map(program.known, equation.invars)), None
        # A loop changes its state, and a branch is not worth it.
        is_call = primitives.kind_of(equation.primitive.name) == Kind.CALL
        passed, around = values if is_call else (), (*callers, equation)
        jaxprs, carry = _bodies(equation, walk)
        bodies = [
            (read(x, dtype, passed, around, programs, walk), i) for x, i in jaxprs
        ]
        if equation.outvars:
            result = equation.outvars[0]
            program.values[result] = _folded(equation, values)
            _note_mask(program, equation, values)
        if result is None or program.scalar(result) is None:
            kind = policy.kind_of(equation, dtype, values)
            program.steps.append(Step(equation, kind, callers, bodies, carry))
    if programs is not None:
        programs[key] = program
    return program


def _note_mask(program: Program, equation: Any, values: Sequence[Any]) -> None:
    """Notes the two values of a mask: those of a converted bool, for example."""
    unknown = [x for x, y in zip(equation.invars, values, strict=True) if y is None]
    if len(unknown) == 1:
        is_bool, variable = unknown[0].aval.dtype == bool, variable_of(unknown[0])
        known = (np.False_, np.True_) if is_bool else program.masks.get(variable, ())
        given = [[x if y is None else y for y in values] for x in known]
        found = [_folded(equation, x) for x in given]
        if found and None not in found:
            program.masks[equation.outvars[0]] = found


def _bodies(equation: Any, walk: ends.Walk) -> flow.Bodies:
    """Returns the jaxprs that follow the policy: none of a solver."""
    is_rule = equation.primitive.name in ("custom_jvp_call", "custom_vjp_call")
    # The rule of a function with a solver may take its steps again.
    is_solver = walk.holds_solver if is_rule else walk.ends_by_floats
    return flow.Bodies() if is_solver(equation) else flow.bodies_of(equation)


def _folded(equation: Any, values: Sequence[Any]) -> Any:
    """Returns the value of the result, or the one that fills it; None if unknown."""
    name, aval = policy.operation_of(equation), equation.outvars[0].aval
    if primitives.has(name, Trait.KEEPS) and len(values) == 1:
        return values[0]
    is_known = values and all(x is not None for x in values)
    if name not in FOLDS or not is_known or not isinstance(aval.dtype, np.dtype):
        return None
    if name in ROUNDED_BY_XLA and not jnp.issubdtype(aval.dtype, jnp.inexact):
        return _computed_by_xla(ROUNDED_BY_XLA[name], values, aval.dtype)
    options = (equation.params["y"],) if name == "integer_pow" else ()
    with np.errstate(all="ignore"):
        return np.asarray(FOLDS[name](*values, *options)).astype(aval.dtype)[()]


def _computed_by_xla(function: Any, values: Sequence[Any], dtype: Any) -> Any:
    # Arrays of a device: JAX converts those of NumPy, and scalars, by NumPy.
    with jax.ensure_compile_time_eval():
        arrays = [jax.device_put(np.full(1, x)) for x in values]
        return jax.device_get(function(dtype, *arrays))[0]
