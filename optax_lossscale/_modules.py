"""Flax nnx modules among arguments: their arrays, and what changes in place."""

import operator
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from optax_lossscale._tree import is_array, is_key, strongly_typed


GONE = object()  # In place of the value of an attribute that a pass deletes.


def flax_nnx() -> Any:
    """Returns `flax.nnx`, if somebody has imported it: else nothing is a module."""
    return sys.modules.get("flax.nnx")


def is_module(x: Any) -> bool:
    """Whether `x` is a module, or another object of nnx that holds variables."""
    nnx = flax_nnx()
    return nnx is not None and isinstance(x, nnx.Pytree)


def is_stateful(x: Any) -> bool:
    """Whether `x` is a module or a variable, which a pass may change in place."""
    nnx = flax_nnx()
    return nnx is not None and isinstance(x, nnx.Pytree | nnx.Variable)


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
                "transform=nnx.value_and_grad, in the tree mode of Flax "
                "functools.partial(nnx.value_and_grad, graph=True, graph_updates=True)."
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


def snapshot(args: Any) -> Callable[[Any], bool] | None:
    """Remembers the variables among arguments; None without modules and variables.

    Args:
      args: Arguments of a pass that may change variables, such as batch statistics.

    Returns:
      A function of a flag, bool[], to call after the pass. Where the flag is False, it
      gives the variables their old values. Random counts and keys go on. It returns
      whether the pass changed variables.
    """
    leaves = jax.tree.leaves(args, is_leaf=is_stateful)
    modules = [x for x in leaves if is_stateful(x)]
    if not modules:
        return None
    # The pass changes the module's own variables: these are copies.
    before = {
        path: jax.tree.map(lambda x: x, v) for path, v in _variables(modules).items()
    }

    def keep_if(flag):
        after = _variables(modules)
        kept = {
            path: jax.tree.map(lambda x, y: _select(flag, x, y), after[path], old)
            for path, old in before.items()
            if jax.tree.structure(after.get(path)) == jax.tree.structure(old)
            and not isinstance(old, flax_nnx().RngState)
            and _is_changed(after[path], jax.tree.leaves(old))
        }
        if kept:  # What did not change may belong to an outer trace.
            flax_nnx().update(modules, _state_of(kept))
        return bool(kept)

    return keep_if


def _is_changed(variable: Any, before: Any) -> bool:
    """Tells whether a variable holds other leaves than before."""
    leaves = jax.tree.leaves(variable)
    return len(leaves) != len(before) or any(map(operator.is_not, leaves, before))


def _select(flag: jax.Array, new: Any, old: Any) -> Any:
    """Returns `new` or `old`, as an array; of what cannot be selected, `new`."""
    if new is old:
        return new
    if not isinstance(new, jax.Array) and not isinstance(flag, Tracer):
        return new if flag else old
    x, y = strongly_typed((new, old))
    if not (is_array(x) and is_array(y)) or np.shape(x) != np.shape(y):
        return new
    if is_key(x) or is_key(y):
        return jnp.where(flag, x, y) if x.dtype == y.dtype else new
    return jnp.where(flag, x, y.astype(x.dtype))


class Modules:
    """The modules and variables among arguments.

    Attributes:
      tree: The arguments, with the arrays of the modules in place of the modules.
    """

    def __init__(self, args: Any):
        """Takes modules apart; without Flax there are none."""
        leaves, self._treedef = jax.tree.flatten(args, is_leaf=is_stateful)
        self._modules = [x for x in leaves if is_stateful(x)]
        self._are_modules = list(map(is_stateful, leaves))
        self._graph, state, self._attributes = None, None, {}
        if self._modules:
            self._graph, state = flax_nnx().split(self._modules)
        self.tree = [x for x in leaves if not is_stateful(x)], state

    def join(self, tree: Any) -> tuple[Any, Callable[[], Any]]:
        """Returns arguments for arrays in `tree`, and a function of their changes."""
        leaves, state = jax.tree.map(lambda x: x, tree)  # Variables of this trace.
        nodes = flax_nnx().merge(self._graph, state) if self._modules else []
        rests = iter(leaves), iter(nodes)
        found = [next(rests[of_module]) for of_module in self._are_modules]
        variables = _variables(nodes) if nodes else {}
        before = {path: jax.tree.leaves(v) for path, v in variables.items()}
        attributes = _attributes(nodes) if nodes else {}

        def changes():
            if not nodes:
                return None
            variables, after = _variables(nodes), _attributes(nodes)
            self._attributes = _changed_attributes(attributes, after, variables)
            changed = {
                path: v
                for path, v in variables.items()
                if path not in before or _is_changed(v, before[path])
            }
            return _state_of(changed) if changed else None

        return self._treedef.unflatten(found), changes

    def write(self, changes: Any) -> None:
        """Writes changed variables, and plain attributes, into the modules."""
        nnx = flax_nnx()
        if changes is not None:
            nnx.update(self._modules, changes)
        if self._attributes:
            owners = dict(nnx.iter_graph(self._modules))
            for (*path, name), value in self._attributes.items():
                owner = owners[tuple(path)]
                if value is GONE:
                    delattr(owner, str(name))
                else:
                    setattr(owner, str(name), value)


def _attributes(modules: Any) -> dict[Any, Any]:
    """Returns the attributes of modules, by path: plain ones, modules and variables."""
    nnx = flax_nnx()
    return {
        (*path, int(name) if name.isdigit() else name): value  # Of an nnx.List.
        for path, owner in nnx.iter_graph(modules)
        if isinstance(owner, nnx.Pytree)
        for name, value in vars(owner).items()
        if not name.startswith("_pytree__")
    }


def _changed_attributes(before: Any, after: Any, variables: Any) -> dict[Any, Any]:
    """Returns the plain attributes that a pass changed, by path; GONE if deleted."""
    known = {id(x) for x in before.values() if is_stateful(x)}
    changed = dict.fromkeys(before.keys() - after.keys(), GONE)
    for path, value in sorted(after.items(), key=lambda item: len(item[0])):
        if value is before.get(path, GONE):
            continue
        leaves = jax.tree.leaves(value, is_leaf=is_stateful)
        if not any(is_array(x) or is_stateful(x) for x in leaves):
            changed[path] = value
            continue
        comes_back = any(x[: len(path)] == path for x in variables)
        if is_module(value) or id(value) in known or not comes_back:
            raise TypeError(
                f"loss_fn makes or moves {path[-1]!r} in the model. autocast, and "
                "minimize with retries, run it on a copy, whose variables come back, "
                "but no modules: call the model once before you train."
            )
    return changed
