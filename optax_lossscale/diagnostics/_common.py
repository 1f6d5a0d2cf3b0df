"""Helpers that the diagnostics share: the scale of a state and the names of leaves."""

import math
import numbers
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import keystr

from optax_lossscale import _check as check
from optax_lossscale._jaxprs.parts import explicit_axes
from optax_lossscale._state import find_state
from optax_lossscale._tree import is_array, is_inexact, unbox


def scale_of(state: Any) -> jax.Array:
    """Returns the loss scale of a state, f32[]; a number is the scale itself."""
    if isinstance(state, numbers.Real) and not isinstance(state, bool):
        scale = jnp.asarray(check.scale("state", state), jnp.float32)
    elif is_array(state):
        scale = jnp.asarray(state)
    else:
        scale = unbox(find_state(state).loss_scale_state.loss_scale)
    if scale.shape:
        raise ValueError(
            f"state belongs to many members: pass one of its {scale.shape} scales."
        )
    return scale.astype(jnp.float32)


def named_leaves(tree: Any, name: str) -> dict[str, jax.Array]:
    """Returns the floating-point and complex leaves of a tree by their key paths.

    Args:
      tree: Any pytree.
      name: The name of the tree, written before each path: `params['w']`.
    """
    pairs = ((path, x) for path, x in jax.tree.leaves_with_path(tree) if is_inexact(x))
    return {name + keystr(path): jnp.asarray(x) for path, x in pairs}


def on_auto_axes(function: Callable[[jax.Array], Any], x: jax.Array) -> Any:
    """Calls a function with an array, and leaves it to XLA how the work is split.

    On explicit axes JAX refuses operations whose result may be sharded in several ways.

    Args:
      function: Returns arrays that are the same on all devices.
      x: The array.
    """
    if not (axes := explicit_axes(x)):
        return function(x)
    mesh = jax.typeof(x).sharding.mesh
    replicated = NamedSharding(mesh, PartitionSpec())
    with jax.sharding.use_abstract_mesh(mesh):  # JAX 0.8 finds it nowhere else.
        auto = jax.sharding.auto_axes(function, axes=axes, out_sharding=replicated)
        return auto(x)


def is_watched() -> bool:
    """Whether somebody sees lines of progress: at a terminal, or in a notebook."""
    return sys.stderr.isatty() or hasattr(sys, "ps1")


def power(number: float) -> str:
    """Writes a positive number as a power of two."""
    exponent = math.log2(number)
    return f"2^{exponent:.{0 if exponent.is_integer() else 2}f}"


def percent(x: float) -> str:
    """Writes a share, or a relative error."""
    if not math.isfinite(x):
        return str(x)
    return f"{100 * x:.0f}%" if x >= 1 else f"{100 * x:.2g}%"


def check_host(function: str, tree: Any) -> None:
    """Raises where numbers cannot be waited for."""
    leaves = jax.tree.leaves(tree)
    if any(isinstance(x, Tracer | jax.ShapeDtypeStruct) for x in leaves):
        raise TypeError(
            f"{function} is for the host, to wait for numbers: call it outside of jit, "
            "or by jax.debug.callback."
        )
    if any(isinstance(x, jax.Array) and x.is_deleted() for x in leaves):
        raise ValueError(
            f"{function} got an array that was deleted: the step donated it "
            "(donate_argnums). Pass what the step returned."
        )
