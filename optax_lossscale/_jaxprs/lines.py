"""Where an equation of a jaxpr stands: the user's lines, and the named scopes."""

import dataclasses
import functools
import itertools
import os
import re
import sys
import sysconfig
from collections.abc import Sequence
from typing import Any

import jax

from optax_lossscale._jaxprs import parts
from optax_lossscale._libraries import FRAMEWORKS

CUSTOM_VJP = jax.custom_vjp.__call__.__qualname__
# The names of input at consoles. Other names in angle brackets are of generated code.
CONSOLES = re.compile(
    r"<([a-z]+-input|input|stdin|console|command|doctest|string|exec)\b"
)
# A file, a line, and the qualified name of the function with that line.
Frame = tuple[str, int, str]
# A file, the qualified name of a function, and its first line.
Function = tuple[str, str, int]


@dataclasses.dataclass(frozen=True)
class Source:
    """Where an equation stands in the user's code; line 0 if that is not known.

    Attributes:
      file: The file.
      line: The line.
      function: The qualified name of the function with that line.
      in_rule: Whether the equation is in the backward rule of a `jax.custom_vjp`
        function, which that line calls.
      callers: The user's lines that led there, the innermost first: of each the file,
        the line and the function. Sources are equal whoever calls them.
    """

    file: str = ""
    line: int = 0
    function: str = ""
    in_rule: bool = False
    callers: tuple[Frame, ...] = dataclasses.field(default=(), compare=False)

    @property
    def own(self) -> Frame:
        """The innermost line that the user can change."""
        return own_of([(self.file, self.line, self.function), *self.callers])


def source_of(equation: Any, caller: Source, *, is_backward: bool) -> Source:
    """Returns the innermost line of the user, and those that called it.

    Args:
      equation: An equation.
      caller: Where the jaxpr that holds it is called. JAX keeps the jaxpr of a jitted
        function, with the lines of the first call, so only lines inside count.
      is_backward: Whether it is in the backward pass. There JAX gives equations of a
        custom rule the line of the call of the `jax.custom_vjp` function.
    """
    in_rule = False
    lines: list[Frame] = []
    for frame in parts.frames_of(equation):
        in_rule |= is_backward and not lines and frame.function_name == CUSTOM_VJP
        if parts.is_border(frame):
            break
        if is_users(frame.file_name):
            lines.append((frame.file_name, frame.line_num, frame.function_name))
    if not lines:
        return dataclasses.replace(caller, in_rule=in_rule or caller.in_rule)
    if caller.line:
        lines += [(caller.file, caller.line, caller.function), *caller.callers]
    # A lambda and its caller are often on one line.
    callers = (y for x, y in itertools.pairwise(lines) if x[:2] != y[:2])
    return Source(*lines[0], in_rule, tuple(callers))


def functions_of(equation: Any) -> set[Function]:
    """Returns the functions that were running when JAX made an equation.

    Those that run the jaxpr which holds it are not among them: see `source_of`.
    """
    frames = parts.frames_of(equation)
    inside = itertools.takewhile(lambda x: not parts.is_border(x), frames)
    return {(x.file_name, x.function_name, x.function_start_line) for x in inside}


@functools.cache
def is_users(file: str) -> bool:
    """Whether a file of a traceback is the user's own."""
    if file.startswith("<") or not file:
        return CONSOLES.match(file) is not None
    library = sysconfig.get_path("stdlib") + os.sep
    if file.startswith(library) and not is_installed(file):
        return False
    modules = (sys.modules.get(name) for name in FRAMEWORKS)
    files = (getattr(module, "__file__", None) for module in modules)
    folders = (os.path.dirname(x) + os.sep for x in files if x)
    return not file.startswith(tuple(folders))


def is_installed(file: str) -> bool:
    """Whether a file is that of an installed library."""
    return "-packages" + os.sep in file


def own_of(lines: Sequence[Frame]) -> Frame:
    """Returns the first line that is not in a library; the first one if all are."""
    return next((x for x in lines if not is_installed(x[0])), lines[0])


def scope_of(equation: Any, outer: str) -> str:
    """Returns the named scopes, `Model/Block_0` for example, without transforms."""
    text = parts.scopes_of(equation)
    text = re.sub(r"\b(?:jvp|transpose|vmap|jit|pjit|remat|checkpoint)\(", "(", text)
    text = text.replace("(", "").replace(")", "").replace("rematted_computation", "")
    names = [name for name in text.split("/") if name]
    middle = len(names) // 2
    if equation.primitive.name == "remat2" and names[:middle] == names[middle:]:
        names = names[:middle]  # In the backward pass JAX gives it its scopes twice.
    return "/".join([outer, *names] if outer else names)
