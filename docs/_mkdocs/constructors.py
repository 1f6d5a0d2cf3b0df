"""Constructors as the site's API reference shows them."""

import griffe


class Constructors(griffe.Extension):
    """Shows the arguments of `__new__` as those of its class."""

    def on_class_members(self, *, cls: griffe.Class, **_) -> None:
        """Names `__new__` as the constructor: griffe only knows `__init__`."""
        if "__new__" in cls.members:
            cls.members.setdefault("__init__", cls.members["__new__"])
