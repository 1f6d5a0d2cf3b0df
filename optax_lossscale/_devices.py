"""Devices with gradients and decisions of their own: `jax.pmap` and `jax.shard_map`.

Under `jax.jit` alone, all devices run one program, which needs nothing from here.
"""

import functools
import sys
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from optax_lossscale._jaxprs.parts import has_name, varying_axes
from optax_lossscale._libraries import TRANSFORMS
from optax_lossscale._tree import inexact_leaves
from optax_lossscale._warn import warn


def axes_of(axis_name: Hashable | None) -> tuple[Hashable, ...]:
    """Returns the names in the argument `axis_name` of an optimizer."""
    if axis_name is None:
        return ()
    return axis_name if isinstance(axis_name, tuple) else (axis_name,)


def on_all_devices(flag: jax.Array, axis_name: Hashable | None) -> jax.Array:
    """Returns bool[], whether a flag is true on all devices of the axis."""
    if axis_name is None:
        return flag
    return over_devices(lax.pmin, flag.astype(jnp.int32), axis_name).astype(bool)


def over_devices(
    reduce: Callable[..., jax.Array], x: jax.Array, axis_name: Hashable
) -> jax.Array:
    """Reduces an array over the devices of an axis, by `lax.pmin` for example."""
    index = lax.axis_index(axis_name)
    # Add a zero that varies along the axes: jax.shard_map refuses to reduce over axes
    # if devices are known to agree along some of them (as after a sum of gradients).
    return reduce(x + 0 * index.astype(x.dtype), axis_name)


def may_average(transform: Callable[..., Any] | None) -> bool:
    """Whether a `transform` may average gradients over devices.

    A function of the user may. Those of JAX, Flax, Equinox and Haiku do not, nor does
    the default, None.
    """
    while isinstance(transform, functools.partial):
        transform = transform.func
    known = [getattr(sys.modules.get(x), name, None) for x, name in TRANSFORMS]
    return not any(transform is x for x in (None, *known))


def _unreduced_axes(transform: Callable[..., Any] | None) -> tuple[Any, ...]:
    """Returns the mapped axes over which neither JAX nor `transform` sums gradients.

    `jax.shard_map` adds up the gradients of replicated parameters by itself, but not
    with `check_vma=False`, and `jax.pmap` never does.
    """

    def is_unreduced(axis):
        # An axis without a name cannot be reduced over.
        index = jax.eval_shape(lambda: lax.axis_index(axis))
        is_alone = lax.axis_size(axis) == 1
        return has_name(axis) and not is_alone and not varying_axes(index)

    axes = jax.sharding.get_abstract_mesh().manual_axes
    unreduced = filter(is_unreduced, sorted(axes, key=str))
    return () if may_average(transform) else tuple(unreduced)


def check_averaging(
    axes: tuple[Hashable, ...], transform: Callable[..., Any] | None
) -> None:
    """Raises or warns if each device keeps its own gradients in `minimize`."""
    names = _unreduced_axes(transform)
    for axis in filter(axes.__contains__, names):
        raise ValueError(
            "minimize cannot average gradients in jax.pmap or shard_map(check_vma="
            f"False). Call value_and_grad, jax.lax.pmean(grads, {axis!r}), "
            "apply_gradients; or use jax.shard_map(check_vma=True)."
        )
    if names:
        warn(
            "In jax.pmap and shard_map(check_vma=False) minimize leaves each device of "
            f"{names} its own gradients. To average them, call value_and_grad, "
            f"jax.lax.pmean(grads, {names}), apply_gradients. If they need no average, "
            "as those of shards or of members, leave pmean out."
        )


def warn_of_local_decision(
    axes: tuple[Hashable, ...], transform: Callable[..., Any] | None
) -> None:
    """Warns if each device decides alone whether a model keeps its changes."""
    if names := tuple(x for x in _unreduced_axes(transform) if x not in axes):
        warn(
            f"Each device of {names} decides by its own gradients whether variables of "
            "the model, such as batch statistics, take back their old values. If you "
            f"average gradients, write LossScaleOptimizer(..., axis_name={names})."
        )


def warn_of_local_loss(
    loss: Any, grads: Any, transform: Callable[..., Any] | None
) -> None:
    """Warns if each device has a loss of its own, but all update the same parameters.

    `jax.shard_map` adds up such gradients. There is no warning for an axis along which
    gradients vary, as the parameters do: there, each device may train its own part of
    the model.
    """
    axes = varying_axes(loss).difference(*map(varying_axes, inexact_leaves(grads)))
    if axes and not may_average(transform):
        names = tuple(sorted(axes, key=str))
        warn(
            f"The loss differs along {names}, and JAX adds up its gradients there. In "
            f"loss_fn write jax.lax.pmean(loss, {names}), or psum for parts of a sum."
        )
