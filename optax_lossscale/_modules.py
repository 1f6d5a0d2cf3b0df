"""Models of libraries among arguments: their parameters, and changes in place."""

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from optax_lossscale import _tree


class _Nnx:
    """Stands for `flax.nnx`, which whoever has a module has imported."""

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.modules.get("flax.nnx"), name)


nnx: Any = _Nnx()


def _classes(library: str, *names: str) -> tuple[type, ...]:
    """Returns classes of a library; none if nobody has imported it."""
    module = sys.modules.get(library)
    # Another thread may be importing it.
    return tuple(getattr(module, x) for x in names if hasattr(module, x))


def is_module(x: Any) -> bool:
    """Whether `x` is a module, or another object of nnx that holds variables."""
    return isinstance(x, _classes("flax.nnx", "Pytree"))


def is_model(x: Any) -> bool:
    """Whether `x` is a module that may hold parameters, unlike `nnx.Rngs`."""
    return isinstance(x, _classes("flax.nnx", "Module"))


def is_stateful(x: Any) -> bool:
    """Whether `x` is a module or a variable, which a pass may change in place."""
    return isinstance(x, _classes("flax.nnx", "Pytree", "Variable"))


def has_modules(tree: Any) -> bool:
    """Whether a tree holds modules."""
    return bool(_tree.nodes_of(_classes("flax.nnx", "Pytree"), tree))


def trainable(tree: Any) -> Any:
    """Returns a tree with a `State` of its parameters in place of each module.

    Modules may share parameters. As in gradients, the first module alone has them.
    """
    held = set()

    def of_module(module):
        if not is_module(module):
            return module
        state = nnx.to_flat_state(nnx.state(module, nnx.Param))
        own = {path: x for path, x in state if id(x) not in held}
        held.update(map(id, own.values()))
        return _state_of(own)

    return jax.tree.map(of_module, tree, is_leaf=is_module)


def partition(tree: Any) -> tuple[Any, Any]:
    """Splits a tree into what has a gradient and the rest, as `eqx.partition` does.

    Floating-point numbers have one, and nnx modules, of which Flax differentiates the
    parameters. Python numbers in an Equinox module are settings.

    Returns:
      Two such trees, each with None in the place of what the other one holds.
    """
    leaves, treedef = jax.tree.flatten(tree, is_leaf=is_module)
    flags = _have_gradients(tree)

    def only(chosen):
        pairs = zip(flags, leaves, strict=True)
        return treedef.unflatten([x if flag == chosen else None for flag, x in pairs])

    return only(True), only(False)


def combine(trained: Any, rest: Any) -> Any:
    """Joins two trees that `partition` has split."""

    def is_leaf(x):
        return x is None or is_module(x)

    return jax.tree.map(
        lambda x, y: y if x is None else x, trained, rest, is_leaf=is_leaf
    )


def _have_gradients(tree: Any) -> list[bool]:
    """Returns of each leaf of a tree whether it has a gradient; modules are leaves."""
    modules, equinox = _classes("flax.nnx", "Pytree"), _classes("equinox", "Module")

    def leaves(tree, kinds):
        return jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kinds))

    def has_gradient(x, node):
        is_setting = isinstance(node, equinox) and not _tree.is_array(x)
        return isinstance(x, modules) or (_tree.is_inexact(x) and not is_setting)

    nodes = leaves(tree, modules + equinox)
    return [has_gradient(x, node) for node in nodes for x in leaves(node, modules)]


def trained(tree: Any) -> list[bool]:
    """Returns of each array in a tree whether a step trains it."""
    kind, params = _classes("flax.nnx", "Variable"), _classes("flax.nnx", "Param")

    def flags(x, has_gradient):
        if not is_module(x):
            return has_gradient
        variables = jax.tree.leaves(x, is_leaf=lambda x: isinstance(x, kind))
        return [[isinstance(x, params)] * len(jax.tree.leaves(x)) for x in variables]

    leaves = jax.tree.leaves(tree, is_leaf=is_module)
    return jax.tree.leaves([*map(flags, leaves, _have_gradients(tree))])


def value_and_grad_of_nnx(
    fun: Callable[..., Any], **options: Any
) -> Callable[..., Any]:
    """Calls `nnx.value_and_grad`, for gradients that are a `State` in each mode."""
    takes = inspect.signature(nnx.value_and_grad).parameters
    # Older versions have no other mode.
    graph = {x: True for x in ("graph", "graph_updates") if x in takes}
    return nnx.value_and_grad(fun, **options, **graph)


def _variables(modules: Any) -> dict[Any, Any]:
    """Returns the variables of modules, by path: the variables themselves."""
    return dict(nnx.to_flat_state(nnx.state(modules)))


def _state_of(variables: dict[Any, Any]) -> Any:
    return nnx.from_flat_state(list(variables.items()))


def parameters_of(tree: Any, grads: Any) -> Any:
    """Returns the parameters of a tree: of a module, the variables with a gradient.

    Args:
      tree: A pytree, perhaps with modules in it.
      grads: Gradients: a `State` in place of each module.
    """
    if not has_modules(tree):  # Then the structures may differ.
        return tree

    def of_module(module, grads):
        if not is_module(module):
            return module
        if not isinstance(grads, nnx.State):
            raise TypeError(
                f"{type(module).__name__} is a Flax nnx model, whose gradients must be "
                f"an nnx.State, got {type(grads).__name__}. Use the gradients of "
                "optimizer.value_and_grad, without transform=."
            )
        variables = _variables(module)
        return _state_of({x: variables[x] for x, _ in nnx.to_flat_state(grads)})

    return jax.tree.map(of_module, tree, grads, is_leaf=is_module)


def with_parameters(tree: Any, params: Any, *, in_place: bool) -> Any:
    """Gives the modules of a tree other parameters.

    Args:
      tree: A pytree, perhaps with modules in it.
      params: As `parameters_of` returns them.
      in_place: Whether the modules change, or else copies of them.

    Returns:
      The modules, and `params` elsewhere.
    """
    if not has_modules(tree):
        return params

    def of_module(module, params):
        if not is_module(module):
            return params
        module = module if in_place else nnx.clone(module)
        nnx.update(module, params)
        return module

    return jax.tree.map(of_module, tree, params, is_leaf=is_module)


class Changes:
    """Changes of a pass in the variables among its arguments, to take back.

    A pass changes batch statistics, for example. Random counts and keys go on, whatever
    the step does.
    """

    def __init__(self, args: Any):
        """Takes the arguments, before the pass."""
        leaves = jax.tree.leaves(args, is_leaf=is_stateful)
        self._modules = list(filter(is_stateful, leaves))
        self._before = _copies(self._modules) if self._modules else {}

    def found(self) -> list[Any]:
        """Returns the paths of the variables that have changed, after the pass."""
        changed = _changed(self._modules, self._before) if self._modules else {}
        # A variable that did not change may belong to an outer trace.
        return [
            path
            for path, new in changed.items()
            if jax.tree.structure(new) == jax.tree.structure(self._before.get(path))
            and not isinstance(new, nnx.RngState)
        ]

    def keep_if(self, flag: jax.Array, paths: list[Any]) -> None:
        """Gives variables their old values where the flag is False."""
        if paths:
            after, select = _variables(self._modules), functools.partial(_select, flag)
            before = self._before
            kept = {x: jax.tree.map(select, after[x], before[x]) for x in paths}
            nnx.update(self._modules, _state_of(kept))


def _copies(modules: Any) -> dict[Any, Any]:
    """Returns copies of the variables, which a pass changes in place, by path."""
    return {p: jax.tree.map(lambda x: x, v) for p, v in _variables(modules).items()}


def _changed(modules: Any, before: dict[Any, Any]) -> dict[Any, Any]:
    """Returns the variables that do not hold the same objects as before, by path."""

    def ids(variable):
        return [id(x) for x in jax.tree.leaves(variable)]

    after = _variables(modules)
    return {p: v for p, v in after.items() if ids(v) != ids(before.get(p))}


def _select(flag: jax.Array, new: Any, old: Any) -> Any:
    """Returns `new` or `old`; in a trace `new`, if these are no arrays alike."""
    if not isinstance(new, jax.Array) and not isinstance(flag, Tracer):
        return new if flag else old
    x, y = _tree.strongly_typed((new, old))
    if not (_tree.is_array(x) and _tree.is_array(y) and x.shape == y.shape):
        return new
    return jnp.where(flag, x, _tree.cast_like(y, x))


class Modules:
    """The modules and variables among arguments, open for a pass on copies.

    A context manager. `write`, called inside, brings the changes of the pass back.

    Attributes:
      tree: The arguments, with the arrays of the modules in place of the modules.
    """

    def __init__(self, args: Any):
        """Looks for modules; without Flax there are none."""
        leaves, self._treedef = jax.tree.flatten(args, is_leaf=is_stateful)
        self._places = [i for i, x in enumerate(leaves) if is_stateful(x)]
        self._modules = [leaves[i] for i in self._places]
        self._leaves = [None if is_stateful(x) else x for x in leaves]
        self._context = contextlib.nullcontext()
        if self._modules:
            self._context = nnx.update_context(self)

    def __enter__(self):
        """Takes the modules apart."""
        self._context.__enter__()
        self._graph, state = None, None
        if self._modules:
            with nnx.split_context(self) as context:
                self._graph, state = context.split(self._modules)
        self.tree = self._leaves, state
        return self

    def __exit__(self, *error: Any):
        self._context.__exit__(*error)

    def join(self, tree: Any) -> tuple[Any, Callable[[], Any]]:
        """Returns arguments for arrays in `tree`, and a function of their changes."""
        leaves, state = jax.tree.map(lambda x: x, tree)  # Variables of this trace.
        if not self._modules:
            return self._treedef.unflatten(leaves), lambda: None
        with nnx.merge_context(self, inner=True) as context:
            nodes = context.merge(self._graph, state)
        for i, node in zip(self._places, nodes, strict=True):
            leaves[i] = node
        before, graph = _copies(nodes), nnx.graphdef(nodes)

        def changes():
            # A variable that did not change may belong to an outer trace.
            if not _changed(nodes, before) and nnx.graphdef(nodes) == graph:
                return None
            with nnx.split_context(self) as context:
                return context.split(nodes)

        return self._treedef.unflatten(leaves), changes

    def write(self, changes: Any) -> None:
        """Brings the changes back into the modules."""
        if changes is not None:
            with nnx.merge_context(self, inner=False) as context:
                context.merge(*changes)
