"""Hints: remedies, as notes on errors of JAX, Optax and Flax that do not name one."""

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


@contextlib.contextmanager
def hint(text: str, applies: Callable[[Exception], bool]) -> Iterator[None]:
    """Adds a note to an error if the hint applies; the error itself stays the same."""
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
    """Whether it is the error of JAX about the name of an axis that is not bound."""
    return isinstance(error, NameError) and "axis name" in str(error)
