"""What the user keeps in float32, by `float32=`: which steps of a program that is."""

import functools
import inspect
import re
import reprlib
from collections.abc import Callable, Iterator
from typing import Any

from optax_lossscale._autocast.program import Step
from optax_lossscale._jaxprs.lines import Function

ONE_LAYER = (
    'For one layer of several, write with jax.named_scope("name"): around its call, '
    'and float32="name".'
)


class Choice:
    """One line, function, class or scope.

    Attributes:
      name: How it is called in a warning.
    """

    def __init__(self, chosen: Any):
        """Takes what the user passed; TypeError if it is of another kind."""
        self.name, self._line, self._scope = "", "", ()
        self._inherits_call = False
        self._functions: set[Function] = set()
        if hasattr(chosen, "file") and hasattr(chosen, "line"):
            chosen = f"{chosen.file}:{chosen.line}"
        if isinstance(chosen, str) and chosen.strip("/"):
            self.name = chosen.replace("\\", "/")
            if re.fullmatch(r".+:\d+", chosen):
                self._line = f"/{self.name}"
            else:
                # Haiku names parameters "mlp/~/linear", and the scope "mlp/linear".
                names = chosen.strip("/").split("/")
                self._scope = tuple(x for x in names if x != "~")
            return
        self._functions = set(_functions(chosen))
        if not self._functions:
            raise TypeError(
                'float32 must hold lines ("file.py:123"), functions, methods, classes '
                'with methods of their own, or names of scopes ("encoder/attention"), '
                f"got {reprlib.repr(chosen)}. {ONE_LAYER}"
            )
        self.name = getattr(chosen, "__qualname__", repr(chosen))
        self._inherits_call = inspect.isclass(chosen) and "__call__" not in vars(chosen)

    def matches(self, step: Step) -> bool:
        """Whether a step is in it."""
        if self._functions:
            return not self._functions.isdisjoint(step.functions())
        if self._line:
            return any(x.endswith(self._line) for x in _places(step))
        names, n = step.scope().split("/"), len(self._scope)
        pieces = (tuple(names[i : i + n]) for i in range(len(names)))
        return self._scope in pieces

    @property
    def advice(self) -> str:
        """What to do if it matches nothing."""
        advice = "If it casts by itself, remove its casts."
        if self._inherits_call:
            return (
                "It inherits __call__, whose lines are those of the base class. Define "
                f"__call__ in it, which may call that of super(). {ONE_LAYER}"
            )
        if self._line:
            return (
                "The innermost line of your code counts, and its number may have "
                "changed: ask diagnostics.float32_lines again. " + advice
            )
        if self._scope:
            return (
                "A string is the name of a scope, which Flax nnx and Equinox do not "
                f"have: pass the class or the function itself. {ONE_LAYER}"
            )
        return advice


def choices_of(float32: Any) -> list[Choice]:
    """Returns what `float32=` holds: one, several, or lines of the diagnostics."""
    chosen: Any = getattr(float32, "lines", float32)
    is_one = isinstance(chosen, str), callable(chosen), hasattr(chosen, "line")
    is_several = isinstance(chosen, tuple | list | set | frozenset)
    several = list(chosen) if is_several and not any(is_one) else [chosen]
    # The gradient of the loss has no line: it is float32 already.
    several = [x for x in several if getattr(x, "line", None) != 0]
    return [x if isinstance(x, Choice) else Choice(x) for x in several]


def chooser(choices: list[Choice]) -> tuple[Callable[[Step], bool], set[Choice]]:
    """Returns whether a step is chosen, and a set of the choices that matched none."""
    missing = set(choices)

    @functools.cache
    def is_chosen(step):
        matching = [x for x in choices if x.matches(step)]
        missing.difference_update(matching)
        return bool(matching)

    return is_chosen, missing


def _places(step: Step) -> list[str]:
    source = step.source()
    pairs = source.own[:2], (source.file, source.line)
    return [f"/{file}:{line}".replace("\\", "/") for file, line in pairs]


def _functions(chosen: Any) -> Iterator[Function]:
    """Yields the functions of what the user passed."""
    if isinstance(chosen, functools.partial):
        chosen = chosen.func
    if inspect.isclass(chosen):
        # Not what it inherits: every module runs methods of its framework's base.
        for name in vars(chosen):
            member = getattr(chosen, name, None)
            member = getattr(member, "fget", member)  # of a property
            if not inspect.isclass(member):
                yield from _functions(member)
    elif callable(chosen):
        code = getattr(inspect.unwrap(chosen), "__code__", None)
        if code is not None:
            yield code.co_filename, code.co_qualname, code.co_firstlineno
