"""Flax nnx, whose modules change in place. No other file knows its classes.

Nothing here imports Flax: a user who passes a module has imported it.
"""

import contextlib
import inspect
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from optax_lossscale import _hints, _tree


class _Library:
    """`flax.nnx`, looked up when it is used."""

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.modules.get("flax.nnx"), name)


nnx: Any = _Library()

MODULES = (
    "A Flax nnx module from outside is changed or differentiated. Pass it as an "
    "argument: to the function, and to nnx.scan or nnx.jit around it, which replace "
    "those of JAX. If the first argument of a loss is no module, but a later one "
    "changes, minimize and value_and_grad need transform=nnx.value_and_grad."
)
SHARED = (
    "A Flax nnx module, or a part of one, is in two arguments, with gradients in only "
    "one of them. Pass it once. For a copy without gradients, pass nnx.clone(model)."
)


def _classes(*names: str) -> tuple[type, ...]:
    """Returns classes of nnx; none if it is not imported."""
    return _tree.classes_of("flax.nnx", *names)


def is_module(x: Any) -> bool:
    """Whether `x` is a module, or another object of nnx that holds variables."""
    return isinstance(x, _classes("Pytree"))


def is_model(x: Any) -> bool:
    """Whether `x` is a module that may hold parameters, unlike `nnx.Rngs`."""
    return isinstance(x, _classes("Module"))


def is_mutable(x: Any) -> bool:
    """Whether `x` is a module or a variable, which a function may change in place."""
    return isinstance(x, _classes("Pytree", "Variable"))


def has_modules(tree: Any) -> bool:
    """Whether a tree holds modules."""
    return bool(_tree.nodes_of(_classes("Pytree"), tree))


def are_parameters(module: Any) -> list[bool]:
    """Returns for each array in a module whether it is a parameter."""
    variable, param = _classes("Variable"), _classes("Param")
    found = jax.tree.leaves(module, is_leaf=lambda x: isinstance(x, variable))
    flags = [[isinstance(x, param)] * len(jax.tree.leaves(x)) for x in found]
    return jax.tree.leaves(flags)


def parameters(module: Any) -> dict[Any, Any]:
    """Returns the parameters of a module by path, as variables."""
    return dict(nnx.to_flat_state(nnx.state(module, nnx.Param)))


def variables(modules: Any) -> dict[Any, Any]:
    """Returns the variables of modules by path."""
    return dict(nnx.to_flat_state(nnx.state(modules)))


def state_of(variables: dict[Any, Any]) -> Any:
    """Returns an `nnx.State` of variables by path."""
    return nnx.from_flat_state(list(variables.items()))


def variables_like(module: Any, grads: Any) -> Any:
    """Returns the variables of a module that have a gradient, as an `nnx.State`."""
    if not isinstance(grads, nnx.State):
        raise TypeError(
            f"{type(module).__name__} is a Flax nnx model, whose gradients must be "
            f"an nnx.State, got {type(grads).__name__}. Use the gradients of "
            "optimizer.value_and_grad, without transform=."
        )
    of_module = variables(module)
    return state_of({x: of_module[x] for x, _ in nnx.to_flat_state(grads)})


def state(module: Any) -> Any:
    """Returns the `nnx.State` of all variables of a module."""
    return nnx.state(module)


def write(module: Any, state: Any) -> Any:
    """Writes values into the variables of a module, and returns the module."""
    nnx.update(module, state)
    return module


def with_state(module: Any, state: Any) -> Any:
    """Returns a copy of a module, with other values of its variables."""
    return write(nnx.clone(module), state)


@contextlib.contextmanager
def unless_of_outer_trace():
    """Context manager: skips the rest for a module of an outer trace.

    Such a module cannot be changed.
    """
    with contextlib.suppress(*_tree.classes_of("flax.errors", "TraceContextError")):
        yield


def hint_of_trace() -> contextlib.AbstractContextManager[None]:
    """Adds to an error about a module of another trace how to pass the module."""
    return _hints.hint(MODULES, _is_of_other_trace)


def hint_of_sharing() -> contextlib.AbstractContextManager[None]:
    """Adds to an error about a module in two arguments how to pass it."""
    return _hints.hint(
        SHARED, lambda error: _begins(error, "Inconsistent aliasing detected")
    )


def _is_of_other_trace(error: Exception) -> bool:
    is_of_trace = isinstance(
        error, _tree.classes_of("flax.errors", "TraceContextError")
    )
    return is_of_trace or _begins(
        error, "Cannot extract graph node from different trace"
    )


def _begins(error: Exception, words: str) -> bool:
    return type(error) is ValueError and str(error).startswith(words)


def value_and_grad(fun: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Calls `nnx.value_and_grad` in graph mode, where gradients are an `nnx.State`."""
    takes = inspect.signature(nnx.value_and_grad).parameters
    # Older versions have graph mode alone, and no arguments for it.
    graph = {x: True for x in ("graph", "graph_updates") if x in takes}
    return nnx.value_and_grad(fun, **options, **graph)


def chooses_variables(argnum: Any) -> bool:
    """Whether an argnum is an `nnx.DiffState`, which chooses variables by a filter."""
    return isinstance(argnum, _classes("DiffState"))


def position_of(argnum: Any) -> Any:
    """Returns the position in an argnum: an integer or an `nnx.DiffState`."""
    return argnum.argnum if chooses_variables(argnum) else argnum


def copies_of(modules: Any) -> dict[Any, Any]:
    """Returns copies of the variables of modules, by path."""
    return {p: jax.tree.map(lambda x: x, v) for p, v in variables(modules).items()}


def changed_since(modules: Any, before: dict[Any, Any]) -> dict[Any, Any]:
    """Returns by path the variables that hold other arrays than before.

    Arrays are compared by identity. Only these variables may be written: one that did
    not change may belong to an outer trace.
    """

    def ids(variable):
        return [id(x) for x in jax.tree.leaves(variable)]

    return {p: v for p, v in variables(modules).items() if ids(v) != ids(before.get(p))}


def restore(
    modules: Any, before: dict[Any, Any], paths: list[Any], is_new: jax.Array
) -> None:
    """Gives variables of these paths their old values back where `is_new` is False."""
    after = variables(modules)

    def choose(new, old):
        return _select(is_new, new, old)

    kept = {x: jax.tree.map(choose, after[x], before[x]) for x in paths}
    nnx.update(modules, state_of(kept))


def _select(flag: jax.Array, new: Any, old: Any) -> Any:
    """Returns `new` or `old`.

    In a trace this takes two arrays of one shape. Of other values it returns `new`.
    """
    if not isinstance(new, jax.Array) and not isinstance(flag, Tracer):
        return new if flag else old
    x, y = _tree.strongly_typed((new, old))
    if not (_tree.is_array(x) and _tree.is_array(y) and x.shape == y.shape):
        return new
    return jnp.where(flag, x, _tree.cast_like(y, x))


def is_random(variable: Any) -> bool:
    """Whether a variable is a random key or count."""
    return isinstance(variable, nnx.RngState)


class Copies:
    """Context manager: copies of modules for a function that JAX traces.

    It makes them as `nnx.jit` does.

    Attributes:
      arrays: The arrays of the modules, inside.
    """

    def __init__(self, modules: list[Any]):
        """Takes modules and variables."""
        self._modules = modules
        self._context = (
            nnx.update_context(self) if modules else contextlib.nullcontext()
        )

    def __enter__(self):
        """Splits the modules into arrays and structure."""
        self._context.__enter__()
        self._graph, self.arrays = None, None
        if self._modules:
            with nnx.split_context(self) as context:
                self._graph, self.arrays = context.split(self._modules)
        return self

    def __exit__(self, *error: Any):
        self._context.__exit__(*error)

    def make(self, arrays: Any) -> tuple[list[Any], Callable[[], Any]]:
        """Returns modules with these arrays, and a function of their changes."""
        if not self._modules:
            return [], lambda: None
        with nnx.merge_context(self, inner=True) as context:
            # Variables of this trace.
            made = context.merge(self._graph, jax.tree.map(lambda x: x, arrays))
        before, graph = copies_of(made), nnx.graphdef(made)

        def changes():
            if not changed_since(made, before) and nnx.graphdef(made) == graph:
                return None
            with nnx.split_context(self) as context:
                return context.split(made)

        return list(made), changes

    def write(self, changes: Any) -> None:
        """Writes the changes of the copies into the modules."""
        if changes is not None:
            with nnx.merge_context(self, inner=False) as context:
                context.merge(*changes)
