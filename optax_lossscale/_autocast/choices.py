"""Matches the `float32=` argument with the steps of a program."""

import dataclasses
import functools
import inspect
import re
import reprlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from optax_lossscale._autocast.policy import is_float32
from optax_lossscale._autocast.program import Program, Step, steps_of
from optax_lossscale._jaxprs import parts
from optax_lossscale._jaxprs.lines import Function
from optax_lossscale._tree import is_inexact
from optax_lossscale._warn import warn

ONE_LAYER = (
    'For one layer of several, write with jax.named_scope("name"): around its call, '
    'and float32="name".'
)
# What to do if a choice matches nothing: a function, a class, a line, a scope.
CASTS = "Either it does not run here, or it casts by itself: then remove its casts."
TRACED = (
    f"{CASTS} Or what it calls was traced before: then name the function that it calls."
)
NO_CALL = (
    "It inherits __call__, whose lines are those of the base class. Define __call__ in "
    f"it, which may call that of super(). {ONE_LAYER}"
)
NO_LINE = (
    "The innermost line of your code counts, and its number may have changed: ask "
    f"diagnostics.float32_lines again. {CASTS}"
)
NO_SCOPE = (
    "A string is the name of a scope, which Flax nnx and Equinox do not have: pass the "
    f"class or the function itself. {ONE_LAYER}"
)


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of a file, which `diagnostics.float32_lines` proposes."""

    file: str
    line: int


@dataclasses.dataclass(frozen=True)
class Lines:
    """The lines that `diagnostics.float32_lines` proposes."""

    lines: Sequence[Line]


# One entry of `float32=`, as users write it.
Float32 = str | Callable[..., Any] | type[Any] | Line


@dataclasses.dataclass(frozen=True)
class Choice:
    """One line, function, class or scope.

    Attributes:
      name: How it is called in a warning.
      matches: Whether a step is in it.
      advice: What to do if it matches nothing.
    """

    name: str
    matches: Callable[[Step], bool]
    advice: str


def _choice(chosen: Any) -> Choice:
    """Returns the choice that the user passed.

    Raises:
      TypeError: If it is nothing that can be chosen.
    """
    if isinstance(chosen, Line):
        chosen = f"{chosen.file}:{chosen.line}"
    if isinstance(chosen, str) and chosen.strip("/"):
        name = chosen.replace("\\", "/")
        if re.fullmatch(r".+:\d+", chosen):
            return Choice(name, functools.partial(_is_at, f"/{name}"), NO_LINE)
        # Haiku names parameters "mlp/~/linear", and the scope "mlp/linear".
        names = tuple(x for x in chosen.strip("/").split("/") if x != "~")
        if names:
            return Choice(name, functools.partial(_is_within, names), NO_SCOPE)
    functions = set(_functions(chosen))
    if not functions:
        raise TypeError(
            'float32 must hold lines ("file.py:123"), functions, methods, classes with '
            'methods of their own, or names of scopes ("encoder/attention"), got '
            f"{reprlib.repr(chosen)}. {ONE_LAYER}"
        )
    name = getattr(chosen, "__qualname__", repr(chosen))
    if parts.is_inlined(chosen):
        raise TypeError(
            f"float32 cannot hold {name}, which JAX inlines: its operations have the "
            'line that calls it. Name that line, "file.py:123", or the function with '
            f"that line. {ONE_LAYER}"
        )
    calls = ["__call__" in vars(x) for x in getattr(chosen, "__mro__", ())]
    advice = NO_CALL if any(calls) and not calls[0] else TRACED
    return Choice(name, lambda x: not functions.isdisjoint(x.functions()), advice)


def choices_of(float32: Any) -> list[Choice]:
    """Returns the choices of `float32=`: one, several, or lines of the diagnostics."""
    chosen: Any = float32.lines if isinstance(float32, Lines) else float32
    is_several = isinstance(chosen, tuple | list | set | frozenset)
    several = list(chosen) if is_several and not callable(chosen) else [chosen]
    # The gradient of the loss has no line: it is float32 already.
    several = [x for x in several if not (isinstance(x, Line) and x.line == 0)]
    return [x if isinstance(x, Choice) else _choice(x) for x in several]


class Chooser:
    """Whether a step is in one of several choices. It notes which choices matched."""

    def __init__(self, choices: Sequence[Choice]):
        """Takes the choices."""
        self._choices, self._unmatched = choices, set(choices)
        self._known: dict[Step, bool] = {}

    def __call__(self, step: Step) -> bool:
        """Whether the user keeps a step in float32."""
        if step not in self._known:
            # Other steps chose another dtype, or there is nothing to choose.
            equation = step.equation
            types = [x.aval for x in (*equation.invars, *equation.outvars)]
            floats = list(filter(is_inexact, types))
            is_ours = bool(floats) and all(map(is_float32, floats))
            matching = [x for x in self._choices if is_ours and x.matches(step)]
            self._unmatched.difference_update(matching)
            self._known[step] = bool(matching)
        return self._known[step]

    def warn_of_unmatched(self, program: Program) -> None:
        """Warns of each choice that no step of a program is in, once all are known."""
        # A solver is float32 as a whole, so a choice inside of it is no mistake.
        for step in steps_of(program.steps) if self._unmatched else ():
            for x in () if step.bodies else parts.equations_in(step.equation):
                self(Step(x, step.kind, step.path))
        for choice in sorted(self._unmatched, key=lambda x: x.name):
            warn(
                "float32 has something in which autocast casts nothing: "
                f"{choice.name}. {choice.advice}"
            )


def _is_at(line: str, step: Step) -> bool:
    source = step.source()
    pairs = source.own[:2], (source.file, source.line)
    places = [f"/{file}:{number}".replace("\\", "/") for file, number in pairs]
    return any(x.endswith(line) for x in places)


def _is_within(scope: tuple[str, ...], step: Step) -> bool:
    names, n = tuple(step.scope().split("/")), len(scope)
    return scope in [names[i : i + n] for i in range(len(names))]


def _functions(chosen: Any) -> Iterator[Function]:
    """Yields the functions of a class, a method or a function that the user passed."""
    if isinstance(chosen, functools.partial):
        chosen = chosen.func
    if inspect.isclass(chosen):
        # Not those that it inherits: every module runs methods of its framework's base.
        for name in vars(chosen):
            member = getattr(chosen, name, None)
            member = getattr(member, "fget", member)  # of a property
            if not inspect.isclass(member):
                yield from _functions(member)
    elif callable(chosen):
        code = getattr(inspect.unwrap(chosen), "__code__", None)
        if code is not None:
            yield code.co_filename, code.co_qualname, code.co_firstlineno
