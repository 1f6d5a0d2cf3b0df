"""Models of any library: the parameters that a step trains, and changes in place.

A model is a pytree. Flax nnx modules, which change in place, are leaves here: `_nnx`
handles them.
"""

from collections.abc import Callable
from typing import Any

import jax

from optax_lossscale import _nnx, _tree
from optax_lossscale._libraries import SETTINGS

# All that other files ask of modules that change in place. Flax nnx is the one library
# that has them; another one would be asked here as well.
has_modules = _nnx.has_modules
is_module = _nnx.is_module
is_model = _nnx.is_model
is_mutable = _nnx.is_mutable
variables_of = _nnx.state
write_variables = _nnx.write
position_of = _nnx.position_of
chooses_variables = _nnx.chooses_variables
unless_of_outer_trace = _nnx.unless_of_outer_trace
hint_of_trace = _nnx.hint_of_trace
hint_of_sharing = _nnx.hint_of_sharing


def partition(tree: Any) -> tuple[Any, Any]:
    """Splits a tree into the leaves with a gradient and the rest, as `eqx.partition`.

    Floating-point arrays and Python numbers have one, and nnx modules, of which Flax
    differentiates the parameters. Python numbers in an Equinox module are settings, and
    have none.

    Returns:
      Two trees of the same structure, each with None in place of the other's leaves.
    """
    leaves, treedef = jax.tree.flatten(tree, is_leaf=_nnx.is_module)
    flags = _have_gradients(tree)

    def only(chosen):
        pairs = zip(flags, leaves, strict=True)
        return treedef.unflatten([x if flag == chosen else None for flag, x in pairs])

    return only(True), only(False)


def combine(trained: Any, rest: Any) -> Any:
    """Joins two trees that `partition` has split."""

    def is_leaf(x):
        return x is None or _nnx.is_module(x)

    return jax.tree.map(
        lambda x, y: y if x is None else x, trained, rest, is_leaf=is_leaf
    )


def _have_gradients(tree: Any) -> list[bool]:
    """Returns for each leaf whether it has a gradient; nnx modules are leaves."""
    classes = tuple(x for names in SETTINGS for x in _tree.classes_of(*names))

    def has_settings(x):
        return isinstance(x, classes)

    def has_gradient(x, node):
        is_setting = has_settings(node) and not _tree.is_array(x)
        return _nnx.is_module(x) or (_tree.is_inexact(x) and not is_setting)

    nodes = jax.tree.leaves(
        tree, is_leaf=lambda x: has_settings(x) or _nnx.is_module(x)
    )
    return [
        has_gradient(x, node)
        for node in nodes
        for x in jax.tree.leaves(node, is_leaf=_nnx.is_module)
    ]


def are_trained(tree: Any) -> list[bool]:
    """Returns for each array in a tree whether a step trains it."""
    leaves = jax.tree.leaves(tree, is_leaf=_nnx.is_module)
    pairs = zip(leaves, _have_gradients(tree), strict=True)
    flags = [_nnx.are_parameters(x) if _nnx.is_module(x) else y for x, y in pairs]
    return jax.tree.leaves(flags)


def trainable(tree: Any) -> Any:
    """Returns a tree with an `nnx.State` of its parameters in place of each module.

    Modules may share parameters. As in gradients, only the first module has them.
    """
    held = set()

    def of_module(module):
        if not _nnx.is_module(module):
            return module
        found = _nnx.parameters(module)
        own = {path: x for path, x in found.items() if id(x) not in held}
        held.update(map(id, own.values()))
        return _nnx.state_of(own)

    return jax.tree.map(of_module, tree, is_leaf=_nnx.is_module)


def value_and_grad_for(trees: Any) -> Callable[..., Any]:
    """Returns the `value_and_grad` of JAX, or that of Flax if trees hold modules."""
    return _nnx.value_and_grad if _nnx.has_modules(trees) else jax.value_and_grad


class Model:
    """The arguments of a loss function; the first is the model.

    A loss function may change nnx modules and variables among them in place. There are
    two ways to call it:

    - On the arguments: call `remember` before the loss function, and `write` or
      `restore` after it. If the step is skipped, variables get their old values back.
    - On copies, inside `with model`: `copies` makes arguments for the loss function,
      and `write_changes` writes their changes into the model.

    Attributes:
      args: The arguments by position, first the model.
      kwargs: Those by name.
      arrays: The arguments, inside `with model`, with the arrays of modules and
        variables in place of these.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None):
        """Finds modules and variables among the arguments."""
        self.args, self.kwargs = args, kwargs or {}
        self._leaves, self._treedef = jax.tree.flatten(
            (args, self.kwargs), is_leaf=_nnx.is_mutable
        )
        places = enumerate(self._leaves)
        self._mutable = {i: x for i, x in places if _nnx.is_mutable(x)}
        self._before: dict[Any, Any] = {}

    @property
    def _modules(self) -> list[Any]:
        return list(self._mutable.values())

    def parameters(self, grads: Any) -> Any:
        """Returns the parameters; of a module, the variables that have a gradient.

        Args:
          grads: Gradients: an `nnx.State` in place of each module.
        """
        params, *_ = self.args
        if not self._has_modules():  # Then the structures may differ.
            return params

        def of_module(module, grads):
            is_module = _nnx.is_module(module)
            return _nnx.variables_like(module, grads) if is_module else module

        return jax.tree.map(of_module, params, grads, is_leaf=_nnx.is_module)

    def with_parameters(self, params: Any, *, in_place: bool = False) -> Any:
        """Returns the model with other parameters.

        Args:
          params: As `parameters` returns them.
          in_place: Whether modules change, or else copies of them.
        """
        model, *_ = self.args
        if not self._has_modules():
            return params

        def of_module(module, params):
            if not _nnx.is_module(module):
                return params
            return (_nnx.write if in_place else _nnx.with_state)(module, params)

        return jax.tree.map(of_module, model, params, is_leaf=_nnx.is_module)

    def _has_modules(self) -> bool:
        return bool(self._mutable) and _nnx.has_modules(self.args[0])

    def remember(self) -> None:
        """Keeps the values of variables, before a loss function changes them."""
        if self._mutable:
            self._before = _nnx.copies_of(self._modules)

    def changed(self) -> list[Any]:
        """Returns the paths of the variables that have changed since `remember`.

        Random counts and keys are left out: they advance in a skipped step as well.
        """
        if not self._mutable:
            return []
        before = self._before
        return [
            path
            for path, new in _nnx.changed_since(self._modules, before).items()
            if jax.tree.structure(new) == jax.tree.structure(before.get(path))
            and not _nnx.is_random(new)
        ]

    def restore(self, changed: list[Any], is_applied: jax.Array) -> None:
        """Gives variables their old values where a step is skipped."""
        if changed:
            _nnx.restore(self._modules, self._before, changed, is_applied)

    def write(self, params: Any, is_applied: jax.Array | None = None) -> Any:
        """Writes new parameters into the model, and returns it.

        Args:
          params: As `parameters` returns them.
          is_applied: bool[], whether the step is applied: otherwise the changes of the
            loss function are undone. None keeps them in any case.
        """
        if is_applied is None:
            return self.with_parameters(params, in_place=True)
        # Before the new parameters are written: they are changes as well.
        changed = self.changed()
        model = self.with_parameters(params, in_place=True)
        self.restore(changed, is_applied)
        return model

    def __enter__(self):
        """Splits the modules into arrays and structure."""
        self._copies = _nnx.Copies(self._modules).__enter__()
        others = [None if i in self._mutable else x for i, x in enumerate(self._leaves)]
        self.arrays = others, self._copies.arrays
        return self

    def __exit__(self, *error: Any):
        self._copies.__exit__(*error)

    def copies(self, arrays: Any) -> tuple[Any, Callable[[], Any]]:
        """Returns copies of the arguments, and a function that returns their changes.

        The changes are a pytree, so that a function that JAX traces may return them.

        Args:
          arrays: Arrays for the copies, in the structure of `self.arrays`.
        """
        leaves, of_modules = arrays
        made, changes = self._copies.make(of_modules)
        leaves = list(leaves)
        for i, module in zip(self._mutable, made, strict=True):
            leaves[i] = module
        return self._treedef.unflatten(leaves), changes

    def write_changes(self, changes: Any) -> None:
        """Writes the changes of copies into the modules."""
        self._copies.write(changes)
