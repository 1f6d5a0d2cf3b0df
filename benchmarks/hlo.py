"""Parses the text of a compiled XLA program, and counts kernels and bytes."""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

_WIDTHS = {"pred": 8, "c64": 64, "c128": 128}
# A shape, and the memory of its array: `S(1)` in the layout is memory on the chip.
_SHAPE = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\](?:\{[^}]*?(S\(\d+\))?\})?")
_CALLED = re.compile(
    r"\b(?:body|condition|to_apply|true_computation|false_computation|"
    r"branch_computations)=(\{[^}]*\}|%[\w.\-]+)"
)
# The type may be a tuple, with parentheses and spaces; the opcode begins the operands.
_INSTRUCTION = re.compile(r" *(?:ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\((.*)")
_NO_KERNEL = {
    *("after-all", "bitcast", "call", "conditional", "constant", "get-tuple-element"),
    *("opt-barrier", "parameter", "partition-id", "replica-id", "tuple", "while"),
}


class Instruction(NamedTuple):
    """An instruction, its operands and called computations by name, and its scope."""

    name: str
    type: str
    opcode: str
    operands: list[str]
    calls: list[str]
    scope: str


def type_bytes(text: str, *, on_chip: bool = True) -> int:
    """Returns the size of a type or tuple in bytes: 24 for `f32[2,3]`.

    Args:
      text: The type, with its layout.
      on_chip: Whether arrays in memory on the chip count.
    """
    total = 0
    for dtype, dims, memory in _SHAPE.findall(text):
        if memory and not on_chip:
            continue
        digits = re.search(r"\d+", dtype)
        bits = _WIDTHS.get(dtype) or int(digits.group() if digits else 0)
        total += bits * math.prod(map(int, re.findall(r"\d+", dims)))
    return total // 8


def _instruction(name: str, kind: str, opcode: str, rest: str) -> Instruction:
    calls = re.findall(r"%([\w.\-]+)", " ".join(_CALLED.findall(rest)))
    operands = re.findall(r"%([\w.\-]+)", rest.split("), ")[0])
    scope = re.search(r'op_name="([^"]*)"', rest)
    return Instruction(name, kind, opcode, operands, calls, scope[1] if scope else "")


class Module(NamedTuple):
    """A compiled program.

    Attributes:
      computations: The instructions of every computation, by its name.
      entry: The name of the entry computation.
    """

    computations: dict[str, list[Instruction]]
    entry: str

    def running(self, computation: str = "") -> Iterator[Instruction]:
        """Yields the instructions that run; of a conditional, its longest branch."""
        for instruction in self.computations[computation or self.entry]:
            yield instruction
            if instruction.opcode == "conditional":
                branches = [list(self.running(c)) for c in instruction.calls]
                yield from max(branches, key=len)
            elif instruction.opcode in ("call", "while"):
                for called in instruction.calls:
                    yield from self.running(called)

    def kernels(self) -> int:
        """Returns the number of instructions that run as a kernel."""
        return sum(
            i.opcode not in _NO_KERNEL and not i.opcode.endswith("-done")
            for i in self.running()
        )

    def count(self, opcode: str) -> int:
        """Returns how often an opcode runs."""
        return sum(i.opcode == opcode for i in self.running())

    def bytes_of(self, opcode: str) -> int:
        """Returns the bytes of all results of an opcode."""
        return sum(type_bytes(i.type) for i in self.running() if i.opcode == opcode)

    def without_loop(self, scope: str) -> "Module":
        """Returns the program without the loops of a named scope."""
        computations = {
            name: [
                x
                for x in part
                if x.opcode != "while" or scope not in x.scope.split("/")
            ]
            for name, part in self.computations.items()
        }
        return self._replace(computations=computations)

    def bytes_moved(self) -> int:
        """Returns what all kernels read and write of the memory beside the chip."""
        total, types, sources = 0, {}, {}
        for instruction in self.running():
            types[instruction.name] = instruction.type
            if instruction.opcode in _NO_KERNEL:
                continue
            read = [types[name] for name in instruction.operands]
            if instruction.opcode.endswith("-start"):
                sources[instruction.name] = read[0] if read else ""
                continue
            written = type_bytes(instruction.type, on_chip=False)
            if instruction.opcode.endswith("-done"):
                # A copy or a slice that was started before reads what it writes.
                source = sources[instruction.operands[0]]
                size = type_bytes(instruction.type)
                total += written + size * bool(type_bytes(source, on_chip=False))
            else:
                total += written + sum(type_bytes(x, on_chip=False) for x in read)
        return total


def parse(text: str) -> Module:
    """Parses the text that `jax.stages.Compiled.as_text` returns."""
    computations, entry, current = {}, "", ""
    for line in text.splitlines():
        if line.endswith("{") and (
            head := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*->", line)
        ):
            current = head[2]
            computations[current] = []
            entry = current if head[1] else entry
        elif current and (matched := _INSTRUCTION.match(line)):
            computations[current].append(_instruction(*matched.groups()))
    return Module(computations, entry)
