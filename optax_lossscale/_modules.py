"""Flax nnx modules among arguments: their arrays, and what changes in place."""

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from optax_lossscale._tree import is_inexact


def _nnx() -> Any:
    """Returns `flax.nnx`, if somebody has imported it: else nothing is a module."""
    return sys.modules.get("flax.nnx")


def is_module(x: Any) -> bool:
    """Whether `x` is a module, or another object of nnx that holds variables."""
    nnx = _nnx()
    return nnx is not None and isinstance(x, nnx.Pytree)


def trained(tree: Any, grads: Any) -> Any:
    """Returns the parameters of a tree: of a module, the variables with a gradient.

    Args:
      tree: A pytree, perhaps with modules in it.
      grads: Gradients: a `State` in place of each module.
    """

    def of_module(module, grads):
        if not is_module(module):
            return module
        nnx = _nnx()
        variables = dict(nnx.to_flat_state(nnx.state(module)))
        chosen = [(path, variables[path]) for path, _ in nnx.to_flat_state(grads)]
        return nnx.from_flat_state(chosen)

    return jax.tree.map(of_module, tree, grads, is_leaf=is_module)


def with_parameters(tree: Any, params: Any, *, in_place: bool) -> Any:
    """Gives the modules of a tree other parameters.

    Args:
      tree: A pytree, perhaps with modules in it.
      params: As `trained` returns them.
      in_place: Whether the modules change, or else copies of them.

    Returns:
      The modules, and `params` elsewhere.
    """

    def of_module(module, params):
        if not is_module(module):
            return params
        module = module if in_place else _nnx().clone(module)
        _nnx().update(module, params)
        return module

    return jax.tree.map(of_module, tree, params, is_leaf=is_module)


def snapshot(args: Any) -> Callable[[Any], None] | None:
    """Remembers the variables of the modules among arguments; None without modules.

    Args:
      args: Arguments of a pass that may change variables, such as batch statistics.

    Returns:
      A function of a flag, bool[], to call after the pass. Where the flag is False, it
      gives floating-point variables their old values. Random counts go on.
    """
    modules = [x for x in jax.tree.leaves(args, is_leaf=is_module) if is_module(x)]

    if not modules:
        return None

    def variables():
        return _nnx().to_flat_state(_nnx().state(modules))

    # Copies of the variables, since the pass changes the module's own.
    before = {path: jax.tree.map(lambda x: x, x) for path, x in variables()}

    def select(flag, new, old):
        is_alike = (new.shape, new.dtype) == (old.shape, old.dtype)
        is_changed = new is not old and is_alike and is_inexact(new)
        return jnp.where(flag, new, old) if is_changed else new

    def keep_if(flag):
        kept = [
            (path, jax.tree.map(functools.partial(select, flag), new, before[path]))
            for path, new in variables()
            if path in before
            and jax.tree.structure(new) == jax.tree.structure(before[path])
        ]
        _nnx().update(modules, _nnx().from_flat_state(kept))

    return keep_if


class Modules:
    """The modules among arguments.

    Attributes:
      tree: The arguments, with the arrays of the modules in place of the modules.
    """

    def __init__(self, args: Any):
        """Takes modules apart; without Flax there are none."""
        leaves, treedef = jax.tree.flatten(args, is_leaf=is_module)
        self._modules = [x for x in leaves if is_module(x)]
        self._are_modules = list(map(is_module, leaves))
        self._treedef, self._graph, state = treedef, None, None
        if self._modules:
            self._graph, state = _nnx().split(self._modules)
        self.tree = [x for x in leaves if not is_module(x)], state
        self._changed: list[Any] = []  # The paths of variables that a join changed.

    def join(self, tree: Any) -> tuple[Any, Callable[[], list[Any]]]:
        """Returns arguments for arrays in `tree`, and a function of their changes."""
        leaves, state = jax.tree.map(lambda x: x, tree)  # Variables of this trace.
        given = {id(x): x for x in jax.tree.leaves(state)}  # Before merge takes them.
        nodes = _nnx().merge(self._graph, state) if self._modules else []
        rests = iter(leaves), iter(nodes)
        found = [next(rests[is_module]) for is_module in self._are_modules]

        def changes():
            if not self._modules:
                return []
            pairs = _nnx().to_flat_state(_nnx().state(nodes))
            changed = [
                (path, variable)
                for path, variable in pairs
                if any(id(x) not in given for x in jax.tree.leaves(variable))
            ]
            self._changed = [path for path, _ in changed]
            return [variable for _, variable in changed]

        return self._treedef.unflatten(found), changes

    def write(self, variables: Sequence[Any]) -> None:
        """Writes changed variables into the modules."""
        if variables:
            pairs = list(zip(self._changed, variables, strict=True))
            _nnx().update(self._modules, _nnx().from_flat_state(pairs))
