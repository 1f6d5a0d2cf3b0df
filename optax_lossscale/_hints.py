"""Hints: what to write, where the words of JAX, Optax and Flax do not say it."""

import contextlib
from collections.abc import Callable, Iterator

PARAMETERS = (
    "Pass grads of the structure and shapes of params, and the state that init of this "
    "optimizer made for these params."
)
DEVICES = (
    "axis_name of LossScaleOptimizer must be an axis of jax.pmap, jax.shard_map or "
    "jax.vmap around this step. Under jax.jit alone, also with sharded arrays, leave "
    "it out."
)
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


@contextlib.contextmanager
def hint(text: str, applies: Callable[[Exception], bool]) -> Iterator[None]:
    """Adds a note to an error, which stays as it is otherwise, if the hint applies."""
    try:
        yield
    except Exception as error:
        if applies(error):
            add_once(error, text)
        raise


def add_once(error: Exception, text: str) -> None:
    """Adds a note to an error, unless it has that note."""
    if text and text not in getattr(error, "__notes__", ()):
        error.add_note(text)


def is_of_axis(error: Exception) -> bool:
    """Whether a name of devices is not bound."""
    return isinstance(error, NameError) and "axis name" in str(error)


def is_of_module(error: Exception) -> bool:
    """Whether a module of Flax nnx belongs to another trace."""
    # By its name, because nobody may have imported Flax.
    is_of_trace = type(error).__name__ == "TraceContextError"
    return is_of_trace or _begins(
        error, "Cannot extract graph node from different trace"
    )


def is_of_shared_module(error: Exception) -> bool:
    """Whether a module of Flax nnx is differentiated in one place, not in another."""
    return _begins(error, "Inconsistent aliasing detected")


def _begins(error: Exception, words: str) -> bool:
    return type(error) is ValueError and str(error).startswith(words)
