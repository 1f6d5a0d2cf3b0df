"""What the user keeps in float32, by `float32=`: which steps of a program that is."""

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

from optax_lossscale._autocast.program import Step
from optax_lossscale._jaxprs.lines import Function

KINDS = (
    'lines ("file.py:123", or what diagnostics.float32_lines returns), functions, '
    'classes, methods, or names of scopes ("encoder/attention")'
)


class Choice:
    """One line, function, class or scope.

    Attributes:
      name: How it is called in a warning.
    """

    def __init__(self, chosen: Any):
        """Takes what the user passed; TypeError if it is of another kind."""
        self.name, self._line, self._scope = "", "", ()
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
            raise TypeError(f"float32 must hold {KINDS}, got {_described(chosen)}")
        self.name = getattr(chosen, "__qualname__", repr(chosen))

    def matches(self, step: Step) -> bool:
        """Whether a step is in it."""
        if self._functions:
            return not self._functions.isdisjoint(step.functions())
        if self._line:
            return any(x.endswith(self._line) for x in _places(step))
        names, n = step.scope().split("/"), len(self._scope)
        pieces = (tuple(names[i : i + n]) for i in range(len(names)))
        return self._scope in pieces

    def advice(self, steps: list[Step]) -> str:
        """Says what of steps is nearest to it, and what to do."""
        functions = {name for step in steps for _, name, _ in step.functions()}
        code = functions | {name.rpartition(".")[0] for name in functions}
        scopes, advice = set[str](), "If it casts by itself, remove its casts."
        if self._line:
            code = {place[1:] for step in steps for place in _places(step)}
            advice = (
                "The innermost line of your code counts, and its number may have "
                "changed: ask diagnostics.float32_lines again. " + advice
            )
        elif self._scope:
            names = (step.scope().split("/") for step in steps)
            scopes = {"/".join(x[:i]) for x in names for i in range(1, len(x) + 1)}
            # What is below the first scope is the same in every model of that class.
            scopes |= {x.partition("/")[2] for x in scopes}
        seen = {x.casefold(): x for x in sorted(code | scopes)}
        near = difflib.get_close_matches(self.name.casefold(), seen, 1)
        if near and self._scope and seen[near[0]] not in scopes:
            advice = "It names no scope: pass the class or function, not its name."
        return (
            f"The nearest in this program: {seen[near[0]]}. {advice}"
            if near
            else advice
        )


def choices_of(float32: Any) -> list[Choice]:
    """Returns what `float32=` holds: one, several, or lines of the diagnostics."""
    chosen: Any = getattr(float32, "lines", float32)
    is_one = isinstance(chosen, str), callable(chosen), hasattr(chosen, "line")
    try:
        several = [chosen] if any(is_one) else list(chosen)
    except TypeError as error:
        raise TypeError(f"float32 must hold {KINDS}, got {float32!r}.") from error
    # The gradient of the loss has no line: it is float32 already.
    several = [x for x in several if getattr(x, "line", None) != 0]
    return [x if isinstance(x, Choice) else Choice(x) for x in several]


def chooser(choices: list[Choice]) -> tuple[Callable[[Step], bool], set[Choice]]:
    """Returns whether a step is chosen, and a set of the choices that matched none."""
    missing = set(choices)

    @functools.cache
    def is_chosen(step):
        found = [x for x in choices if x.matches(step)]
        missing.difference_update(found)
        return bool(found)

    return is_chosen, missing


def _places(step: Step) -> list[str]:
    source = step.source()
    pairs = source.own[:2], (source.file, source.line)
    return [f"/{file}:{line}".replace("\\", "/") for file, line in pairs]


def _described(chosen: Any) -> str:
    """Describes what has no functions of its own, and says what to pass instead."""
    is_class = inspect.isclass(chosen)
    kinds = inspect.getmro(chosen if is_class else type(chosen))
    owner = next((x.__name__ for x in kinds if set(_functions(x))), "")
    if is_class:
        inherits = f" It inherits its methods from {owner}: pass that." if owner else ""
        return f"{chosen!r}.{inherits}"
    if not callable(chosen):
        return f"{chosen!r}."
    fix = 'Put jax.named_scope("name") around its call, and pass the name.'
    called = chosen.func if isinstance(chosen, functools.partial) else chosen
    if hasattr(called, "__name__"):
        return f"{called.__name__}, which has no Python code. {fix}"
    fix += f" Or pass {owner}, which means all instances." if owner else ""
    return f"an instance of {type(chosen).__name__}. {fix}"


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
