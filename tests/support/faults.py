"""The corpus of planted faults: programs, the line to name, and what mends them.

A program is a loss that is called with a cast, its parameters and its data. The line to
name ends in a comment with the name of the fault, and a line whose zeros or rounded
numbers break that one in `# before NAME`. The tables are in `faulty_*.py`. XLA joins
constants: `(x + 2000) - 2000` is `x`. Let a function round in between, such as `tanh`.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from arithmetic import by_hand, normal
from tracing import line_numbers

from optax_lossscale import autocast
from optax_lossscale.diagnostics import trace_numerics

FAULTS: dict[str, "Fault"] = {}
needs_devices = pytest.mark.skipif(jax.device_count() < 2, reason="needs 2 devices")


X, W = normal(8, 6), normal(6, 6, scale=0.4)


def cast_to(dtype, mended=None):
    """Returns `cast(tree)`; `cast(tree, True)` is where another dtype mends a fault."""

    def cast(tree, mends=False):
        chosen = mended if mends and mended else dtype
        return jax.tree.map(lambda x: x.astype(chosen), tree)

    return cast


# What mends it is advised.
ADVICE = {"hand": "([Cc]ompute|keep|and) this line( and .*)? in float32"}
ADVICE["autocast"] = "float32="
BROKEN, EXACT = cast_to(jnp.float16), cast_to(jnp.float32)
MENDED = cast_to(jnp.float16, jnp.float32)


@dataclasses.dataclass(frozen=True, repr=False)
class Fault:
    """A program with a planted fault, and what the trace has to say about it.

    Attributes:
      program: The loss with the fault.
      args: Its parameters and its data.
      file, mark: Where it breaks: a line of the file that ends in this comment.
      kind: The kind of the finding that names them.
      before: The kinds of the findings that come before.
      phase: The pass in which it breaks; "" if that depends on the version of JAX.
      says: A pattern of what the finding says.
      operation: What is known of the first operation that makes inf or nan, and of its
        result.
      scale: The loss scale at which it breaks.
      dtype: The dtype to judge.
      exact: The program in float32.
      mended: The program without the fault; None if a loss scale is all that helps, or
        if nothing else is to be learned from it.
      right: The mended program in float32.
      rounds: Whether JAX rounds a constant before the trace sees it.
      marks: The marks of its tests.
    """

    program: Callable[..., Any]
    args: tuple[Any, ...]
    file: str
    mark: str
    kind: str = "forward"
    before: tuple[str, ...] = ()
    phase: str = "forward"
    says: str = ""
    operation: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    scale: float = 1.0
    dtype: str = "float16"
    exact: Callable[..., Any] | None = None
    mended: Callable[..., Any] | None = None
    right: Callable[..., Any] | None = None
    rounds: bool = False
    marks: tuple[Any, ...] = ()

    @cached_property
    def lines(self):
        """The lines of which one breaks first."""
        return line_numbers(self.mark, self.file)

    @cached_property
    def sources(self):
        """The lines that lead there. All of them are to be named."""
        return line_numbers(f"before {self.mark}", self.file)

    @cached_property
    def trace(self):
        options = {"scale": self.scale, "dtype": self.dtype}
        return trace_numerics(self.program, *self.args, **options)

    def by_hand(self, program):
        return by_hand(program, *self.args)

    def __str__(self):
        places = [f"{Path(self.file).name}:{line}" for line in self.lines]
        return f"{self.kind} at {' or '.join(places)}, {self.phase or 'any'} pass"


def fault(*args, name="", by="hand", mended=None, default=False, marks=(), **about):
    """Registers a program with a fault.

    Args:
      *args: Its arguments, after the cast.
      name: The name of the fault: that of the program, followed by this.
      by: Who casts: the program, by "hand", or "autocast"; then there is no cast.
      mended: A program without the fault; True if the casts with True mend it, or if
        `autocast` does that keeps the lines in float32.
      default: Whether its tests run by default. The others are exhaustive.
      marks: More marks of its tests.
      **about: Attributes of `Fault`.
    """

    def register(program):
        file, mark = program.__code__.co_filename, program.__name__
        broken, exact = partial(program, BROKEN), partial(program, EXACT)
        repaired, right = partial(program, MENDED), exact
        if callable(mended):
            repaired, right = partial(mended, BROKEN), partial(mended, EXACT)
        if by == "autocast":
            lines = line_numbers(mark, file) + line_numbers(f"before {mark}", file)
            names = [f"{Path(file).name}:{line}" for line in lines]
            broken, exact, right = autocast(program), program, program
            repaired = autocast(program, float32=names)
        forms = {"exact": exact, "right": right, "mended": mended and repaired}
        says = {"says": ADVICE[by]} if mended is True else {}
        rare = () if default else (pytest.mark.exhaustive,)
        known = forms | says | about | {"marks": (*marks, *rare)}
        FAULTS[mark + name] = Fault(broken, args, file, mark, **known)
        return program

    return register


def cases(is_asked=lambda fault: True):
    """Returns the parameters of a test: the faults that are asked for, by name."""
    faults = ((name, x) for name, x in FAULTS.items() if is_asked(x))
    return [pytest.param(x, id=name, marks=x.marks) for name, x in faults]


def assert_named(fault):
    """Asserts that the trace names a fault: where it is, what mends it, what it is."""
    assert fault.lines, f"no line of {fault.file} ends in # {fault.mark}"
    found = fault.trace.findings
    got = "; ".join(f"{x.kind}: {x.message}" for x in found)
    got = f"expected {fault}, got {got}"
    rank = len(fault.before)
    assert [x.kind for x in found[: rank + 1]] == [*fault.before, fault.kind], got
    assert_is_at_its_line(fault, found[rank], got)
    assert_is_advised(fault, found[rank], got)
    assert_is_described(fault, found[rank].operation, got)


def assert_is_at_its_line(fault, finding, got):
    places = re.findall(rf"{Path(fault.file).name}:(\d+)", finding.message)
    places = list(map(int, places))
    # A decision also names what it chooses among.
    first = places if fault.kind == "decision" else places[:1]
    assert set(first) & set(fault.lines), got
    assert set(fault.sources) <= set(places), got


def assert_is_advised(fault, finding, got):
    assert re.search(fault.says, finding.message), f"{got}, without {fault.says!r}"
    # What `autocast` is to keep in float32, if so.
    advised = {int(x) for x in re.findall(r':(\d+)"', finding.message)}
    assert advised in (set(), {*fault.lines, *fault.sources}), got


def assert_is_described(fault, operation, got):
    trace = fault.trace
    assert operation.phase == fault.phase or not fault.phase, got
    is_finite = fault.kind not in ("forward", "backward", "scale_too_high")
    if fault.kind != "nonfinite_argument":
        assert operation.output.is_finite == is_finite, got
    expected = {"in_rule": False, "opaque": False} | fault.operation
    known = operation.output._asdict() | operation._asdict()
    assert {k: known[k] for k in expected} == expected, got
    text = " ".join(str(trace).split())
    assert ("in its backward rule" in text) == expected["in_rule"]
    assert ("Not followed in float32" in text) == expected["opaque"]
    assert trace.computes_in_dtype == (known["dtype"] not in ("complex64", "float64"))
    if fault.operation:
        first = trace.first_nonfinite
        assert first.line in fault.lines, f"expected {fault}, got {first}"
        assert first.phase == fault.phase
        assert not first.output.is_finite
