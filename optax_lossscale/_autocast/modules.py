"""Flax nnx modules among arguments: their arrays, and what changes in place."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax


class Modules:
    """The modules among arguments.

    Attributes:
      tree: The arguments, with the arrays of the modules in place of the modules.
    """

    def __init__(self, args: Any):
        """Takes modules apart; without Flax there are none."""
        self._nnx: Any = sys.modules.get("flax.nnx")
        leaves, treedef = jax.tree.flatten(args, is_leaf=self._is_module)
        found = {id(x): x for x in leaves if self._is_module(x)}
        self._modules = list(found.values())
        numbers = {name: i for i, name in enumerate(found)}
        self._places = [numbers.get(id(x)) for x in leaves]
        self._treedef, self._graph, state = treedef, None, None
        if self._nnx and found:
            self._graph, state = self._nnx.split(self._modules)
        self.tree = [x for x in leaves if not self._is_module(x)], state

    def _is_module(self, x):
        return self._nnx is not None and isinstance(x, self._nnx.Pytree)

    def join(self, tree: Any) -> tuple[Any, Callable[[], tuple[Any, Any]]]:
        """Returns arguments, and what tells their changes, for arrays in `tree`."""
        leaves, state = tree
        given = {id(x): x for x in jax.tree.leaves(state)}  # Before merge takes them.
        nodes = self._nnx.merge(self._graph, state) if self._graph is not None else []
        rest = iter(leaves)
        found = [next(rest) if i is None else nodes[i] for i in self._places]

        def changes():
            if self._graph is None:
                return [], []
            pairs = self._nnx.to_flat_state(self._nnx.state(nodes))
            changed = [
                (path, variable)
                for path, variable in pairs
                if any(id(x) not in given for x in jax.tree.leaves(variable))
            ]
            return [x for x, _ in changed], [x for _, x in changed]

        return self._treedef.unflatten(found), changes

    def write(self, paths: Sequence[Any], variables: Sequence[Any]) -> None:
        """Writes changed variables into the modules."""
        if paths:
            pairs = list(zip(paths, variables, strict=True))
            self._nnx.update(self._modules, self._nnx.from_flat_state(pairs))
