"""How far the loss and the gradients of a function are from float32."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

SCALE = 2.0**12
# A loss, and the gradients of its parameters.
Gradients = tuple[float, list[np.ndarray]]


def gradients(loss_fn: Callable[..., Any], params: Any, x: Any) -> Gradients:
    """Returns a loss and its gradients, both times `SCALE`."""
    scaled = jax.value_and_grad(lambda p, x: SCALE * loss_fn(p, x).astype(jnp.float32))
    exact = {"xla_allow_excess_precision": False}
    loss, grads = jax.jit(scaled).lower(params, x).compile(exact)(params, x)
    return loss, [np.float64(g) for g in jax.tree.leaves(grads)]


def differences(found: Gradients, right: Gradients) -> tuple[float, float] | None:
    """Returns the errors of a loss and of its worst gradient; None if not finite."""
    (loss, grads), (right_loss, rights) = found, right
    # Some gradients are zero but for roundings, of biases before a norm for example.
    least = 0.01 * np.sqrt(sum(np.sum(g**2) for g in rights))
    norms = [max(np.linalg.norm(g), least) for g in rights]
    pairs = zip(grads, rights, norms, strict=True)
    worst = np.max([np.linalg.norm(a - b) / norm for a, b, norm in pairs])
    both = abs(float(loss / right_loss) - 1), float(worst)
    return both if np.all(np.isfinite(both)) else None
