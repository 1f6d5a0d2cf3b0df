"""Flax nnx modules among arguments: their arrays, and what changes in place."""

import functools
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def flax_nnx() -> Any:
    """Returns `flax.nnx`, if somebody has imported it: else nothing is a module."""
    return sys.modules.get("flax.nnx")


def is_module(x: Any) -> bool:
    """Whether `x` is a module, or another object of nnx that holds variables."""
    nnx = flax_nnx()
    return nnx is not None and isinstance(x, nnx.Pytree)


def _variables(modules: Any) -> dict[Any, Any]:
    """Returns the variables of modules, by path: those of the modules, no copies."""
    return dict(flax_nnx().to_flat_state(flax_nnx().state(modules)))


def _state_of(variables: dict[Any, Any]) -> Any:
    return flax_nnx().from_flat_state(list(variables.items()))


def trained(tree: Any, grads: Any) -> Any:
    """Returns the parameters of a tree: of a module, the variables with a gradient.

    Args:
      tree: A pytree, perhaps with modules in it.
      grads: Gradients: a `State` in place of each module.
    """

    def of_module(module, grads):
        if not is_module(module):
            return module
        if not isinstance(grads, flax_nnx().State):
            raise TypeError(
                f"{type(module).__name__} is a Flax nnx model, whose gradients must be "
                f"an nnx.State, got {type(grads).__name__}: pass "
                "transform=nnx.value_and_grad."
            )
        variables = _variables(module)
        return _state_of({x: variables[x] for x, _ in flax_nnx().to_flat_state(grads)})

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
        module = module if in_place else flax_nnx().clone(module)
        flax_nnx().update(module, params)
        return module

    return jax.tree.map(of_module, tree, params, is_leaf=is_module)


def snapshot(args: Any) -> Callable[[Any], None] | None:
    """Remembers the variables of the modules among arguments; None without modules.

    Args:
      args: Arguments of a pass that may change variables, such as batch statistics.

    Returns:
      A function of a flag, bool[], to call after the pass. Where the flag is False, it
      gives the variables their old values. Random counts and keys go on.
    """
    modules = [x for x in jax.tree.leaves(args, is_leaf=is_module) if is_module(x)]
    if not modules:
        return None
    # The pass changes the module's own variables: these are copies.
    before = {
        path: jax.tree.map(lambda x: x, v) for path, v in _variables(modules).items()
    }

    def select(flag, new, old):
        is_alike = (new.shape, new.dtype) == (old.shape, old.dtype)
        return jnp.where(flag, new, old) if new is not old and is_alike else new

    def keep_if(flag):
        after = _variables(modules)
        kept = {
            path: jax.tree.map(functools.partial(select, flag), after[path], old)
            for path, old in before.items()
            if jax.tree.structure(after.get(path)) == jax.tree.structure(old)
            and not isinstance(old, flax_nnx().RngState)
        }
        flax_nnx().update(modules, _state_of(kept))

    return keep_if


class Modules:
    """The modules among arguments.

    Attributes:
      tree: The arguments, with the arrays of the modules in place of the modules.
    """

    def __init__(self, args: Any):
        """Takes modules apart; without Flax there are none."""
        leaves, self._treedef = jax.tree.flatten(args, is_leaf=is_module)
        self._modules = [x for x in leaves if is_module(x)]
        self._are_modules = list(map(is_module, leaves))
        self._graph, state = None, None
        if self._modules:
            self._graph, state = flax_nnx().split(self._modules)
        self.tree = [x for x in leaves if not is_module(x)], state

    def join(self, tree: Any) -> tuple[Any, Callable[[], Any]]:
        """Returns arguments for arrays in `tree`, and a function of their changes."""
        leaves, state = jax.tree.map(lambda x: x, tree)  # Variables of this trace.
        given = {id(x): x for x in jax.tree.leaves(state)}  # Before merge takes them.
        nodes = flax_nnx().merge(self._graph, state) if self._modules else []
        rests = iter(leaves), iter(nodes)
        found = [next(rests[of_module]) for of_module in self._are_modules]

        def changes():
            def is_changed(variable):
                return any(id(x) not in given for x in jax.tree.leaves(variable))

            variables = _variables(nodes) if nodes else {}
            changed = {path: v for path, v in variables.items() if is_changed(v)}
            return _state_of(changed) if changed else None

        return self._treedef.unflatten(found), changes

    def write(self, changes: Any) -> None:
        """Writes changed variables into the modules."""
        if changes is not None:
            flax_nnx().update(self._modules, changes)
