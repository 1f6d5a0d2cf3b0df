"""Docstrings as the site's API reference needs them."""

import copy
import inspect
import re
import textwrap

import griffe

LINK = re.compile(r"`([^`<]+?)\s+<(https?://[^>]+)>`_")
# A line that ends in a double colon, and the lines below that are further indented.
LITERAL = re.compile(r"^( *)(\S.*)::\n((?: *\n|\1 +\S.*(?:\n|\Z))+)", re.MULTILINE)
# A power; the two stars of another one would make bold what is between. Not in code.
POWER = re.compile(
    r"(```.*?```|`[^`]*`|^ *(?:>>>|\.\.\.).*?$)|(?<=\d)\*\*(-?\w+|\(\S+?\))",
    re.MULTILINE | re.DOTALL,
)
# griffe knows no such section, and would draw a box around it.
REFERENCES = re.compile(r"^References:\n((?: .*(?:\n|\Z)|\n)+)", re.MULTILINE)


def to_markdown(text: str) -> str:
    """Makes Markdown of links, literal blocks and powers."""

    def fence(match):
        indent, line, block = match.groups()
        code = textwrap.indent(textwrap.dedent(block).strip("\n"), indent)
        return f"{indent}{line}:\n\n{indent}```text\n{code}\n{indent}```\n\n"

    def section(match):
        return f"**References:**\n\n{textwrap.dedent(match[1])}"

    def power(match):
        return match[1] or f"<sup>{match[2].strip('()')}</sup>"

    text = LITERAL.sub(fence, LINK.sub(r"[\1](\2)", inspect.cleandoc(text)))
    text = POWER.sub(power, text)
    return REFERENCES.sub(section, text)


class Docstrings(griffe.Extension):
    """Converts docstrings, and shows the arguments of a class that has `__new__`."""

    def on_instance(self, *, obj: griffe.Object, **_) -> None:
        """Converts the docstring of everything that has one."""
        if obj.docstring:
            obj.docstring.value = to_markdown(obj.docstring.value)

    def on_class_members(self, *, cls: griffe.Class, **_) -> None:
        """Names `__new__` as the constructor: griffe knows `__init__` alone."""
        if "__new__" in cls.members and "__init__" not in cls.members:
            constructor = copy.copy(cls.members["__new__"])
            constructor.name = "__init__"
            cls.members["__init__"] = constructor
