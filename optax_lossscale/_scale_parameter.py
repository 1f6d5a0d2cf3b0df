"""The scale among the parameters: for trainers that compute the gradients."""

import contextlib
import functools
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero

from optax_lossscale import _check as check, _state, _step
from optax_lossscale._gradients import (
    loss_of,
    types_of,
    unscale_by,
    varying_axes,
    warn_of_float16,
)
from optax_lossscale._scaling import all_finite, on_all_devices, scale_up
from optax_lossscale._step import Options
from optax_lossscale._tree import cast_like, has_gradient, is_inexact, split_arrays
from optax_lossscale._warn import warn

_HINTS = {
    "params": "Add it to the parameters before init, jnp.float32("
    "optimizer.initial_scale), of a type that the trainer differentiates (Flax nnx). "
    "Leave it float32 where the trainer casts parameters. update needs params.",
    "grads": "The gradient of the scale tells of overflows: differentiate the result "
    "of with_loss_scale with respect to all parameters.",
}


def scale_gradient(tree: Any, scale: jax.Array | float) -> Any:
    """Returns its argument, whose gradients are multiplied by a scale.

    The value stays as it is. Multiply the gradients at one point, and divide them at
    another: in between they are larger, and do not underflow in float16.

    Args:
      tree: Any pytree. Only floating-point and complex arrays have gradients; other
        leaves pass through.
      scale: f32[], or a Python number. It has no derivative. Scaled float16 gradients
        must stay below 65520: above they are inf.

    Returns:
      The same tree. In the backward pass the gradients of its arrays are multiplied by
      `scale` in at least float32, and keep their dtypes. In forward mode the
      tangents are multiplied.

    Raises:
      TypeError: If `scale` is of another dtype or shape.

    Examples:
      Below 2**-25 a float16 gradient is zero, unless it is scaled on its way:

      >>> import jax
      >>> import jax.numpy as jnp
      >>> from optax_lossscale import scale_gradient
      >>> half = jnp.float16(1e-4)
      >>> def loss_fn(x, scale):
      ...     x = scale_gradient(x, 1 / scale)
      ...     y = x.astype(jnp.float16) * half * half
      ...     return scale_gradient(y.astype(jnp.float32), scale)
      >>> for scale in (1.0, 1024.0):
      ...     print(f"{jax.grad(loss_fn)(1.0, scale):.2g}")
      0
      1e-08

    References:
      `optax.scale_gradient`, which multiplies in the dtype of the gradients and has no
      forward mode.
    """
    if isinstance(scale, int | float) and not isinstance(scale, bool):
        scale = jnp.float32(scale)
    if np.shape(scale) != () or getattr(scale, "dtype", None) != jnp.float32:
        raise TypeError(
            "scale must be a number or a float32 scalar (float16 ends at 65504), got "
            f"{types_of(scale)}."
        )
    factor = lax.stop_gradient(scale)

    def leaf(x):
        if not has_gradient(x):
            return x
        if varying_axes(factor):  # Lends them to x; the names of such casts change.
            x = jnp.where(factor == factor, x, x)
        return _scale_tangent(x, factor)

    return jax.tree.map(leaf, tree)


@jax.custom_jvp
def _scale_tangent(x, scale):
    return x


@_scale_tangent.defjvp
def _(primals, tangents):
    x, scale = primals
    return x, scale_up(tangents[0], scale).astype(jnp.result_type(x))


def with_loss_scale(
    loss_fn: Callable[..., Any],
    scale_parameter: str = "loss_scale",
    has_aux: bool = False,
) -> Callable[..., Any]:
    """Makes a loss function with true gradients, for a trainer that computes them.

    Pass the result to the trainer in place of `loss_fn`, and
    `LossScaleOptimizer(inner, scale_parameter="loss_scale")` in place of `inner`. The
    parameters carry the scale from one to the other: add
    `jnp.float32(optimizer.initial_scale)` to them, named "loss_scale".

    Loss and gradients are the true ones of `loss_fn`; only the backward pass computes
    with scaled numbers. So the trainer may log, clip, accumulate and average
    gradients. If one of them is not finite, **all gradients of the parameters are zero,
    and the gradient of the scale is 1**: the trainer sees no inf or nan, and the
    optimizer skips the step and lowers the scale.

    Args:
      loss_fn: A function that takes the parameters first: a pytree, or a Flax nnx
        module. It gets zero in the place of the scale. It returns a loss, or a loss and
        auxiliary data if `has_aux`.
      scale_parameter: The name of the scale: the last key of one leaf, f32[].
      has_aux: Whether `loss_fn` returns auxiliary data as well.

    Returns:
      A function with the arguments and results of `loss_fn`. Differentiate it in
      reverse mode, with respect to all parameters. Gradients have the dtypes of the
      parameters: keep these in float32, and cast them in `loss_fn`. Gradients with
      respect to other arguments are true, too, but may hold inf or nan. Gradients with
      respect to arrays that `loss_fn` closes over, or to single variables of Flax nnx,
      stay scaled.

    Raises:
      TypeError: If an argument is of the wrong type, or, when called, if the loss is
        no floating-point number.
      ValueError: When called, unless the parameters hold one leaf of this name, a
        float32 scalar.

    Warns:
      UserWarning: If the loss is float16, or if gradients of float16 parameters are
        computed.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import optax
      >>> from optax_lossscale import LossScaleOptimizer, with_loss_scale
      >>> optimizer = LossScaleOptimizer(
      ...     optax.sgd(0.25), initial_scale=2.0**10, scale_parameter="loss_scale"
      ... )
      >>> def loss_fn(params, x):
      ...     y = params["w"].astype(jnp.float16) * x
      ...     return y.astype(jnp.float32) ** 2
      >>> params = {"w": jnp.float32(2), "loss_scale": jnp.float32(2**10)}
      >>> state = optimizer.init(params)

      The trainer does this:

      >>> grad_fn = jax.value_and_grad(with_loss_scale(loss_fn))
      >>> loss, grads = grad_fn(params, jnp.float16(0.5))
      >>> updates, state = optimizer.update(grads, state, params)
      >>> params = optax.apply_updates(params, updates)
      >>> print(loss, grads["w"], params["w"], params["loss_scale"])
      1.0 1.0 1.75 1024.0

      After an overflow, the scale among the parameters is lower:

      >>> loss, grads = grad_fn(params, jnp.float16(100))
      >>> updates, state = optimizer.update(grads, state, params)
      >>> params = optax.apply_updates(params, updates)
      >>> print(loss, grads["w"], params["w"], params["loss_scale"])
      30625.0 0.0 1.75 512.0
    """
    check.function("loss_fn", loss_fn)
    check.key("scale_parameter", scale_parameter)
    check.boolean("has_aux", has_aux)

    @functools.wraps(loss_fn)
    def scaled_loss(params, /, *args, **kwargs):
        nnx = sys.modules["flax.nnx"] if _is_of_nnx(params) else None
        tree = nnx.state(params) if nnx else params
        place, leaf, rest = _take_out(scale_parameter, tree, "params")
        scale = jnp.clip(leaf, check.SMALLEST_SCALE, check.LARGEST_SCALE)
        # Zero, as another with_loss_scale around this one leaves it: no scale.
        scale = lax.stop_gradient(jnp.where(leaf <= 0, 1, scale))
        arrays, join = split_arrays(rest, has_gradient)
        arrays = [*map(_as_wanted, _enter(arrays, scale, leaf), arrays)]
        # A penalty on all parameters must not see the scale.
        inside = place(join(arrays), jnp.zeros_like(leaf))
        args, kwargs = jax.tree.map(
            lambda x: _unscaled(x, scale), (args, kwargs), is_leaf=_is_of_nnx
        )
        if nnx is None:
            out = loss_fn(inside, *args, **kwargs)
        else:
            nnx.update(params, inside)
            try:
                out = loss_fn(params, *args, **kwargs)
            finally:
                nnx.update(params, place(nnx.state(params), leaf))
        loss = loss_of(out, has_aux)
        warn_of_float16(loss)
        loss = scale_gradient(loss, scale)
        return (loss, out[1]) if has_aux else loss

    vars(scaled_loss)["without_scale"] = loss_fn  # For diagnostics.
    return scaled_loss


def _unscaled(x: Any, scale: jax.Array) -> Any:
    """Unscales gradients with respect to an argument that is not the parameters."""
    if not _is_of_nnx(x):
        return scale_gradient(x, 1 / scale)
    nnx = sys.modules["flax.nnx"]
    # A module of an outer trace cannot be changed, and gets no gradient here.
    with contextlib.suppress(sys.modules["flax.errors"].TraceContextError):
        if isinstance(x, nnx.Pytree):
            nnx.update(x, scale_gradient(nnx.state(x), 1 / scale))
    return x


@jax.custom_vjp
def _enter(arrays, scale, leaf):
    """Returns parameters whose gradients are unscaled, or all zero if one overflows."""
    return arrays


def _enter_forward(arrays, scale, leaf):
    return [x.value for x in arrays], (scale.value, leaf.value)


def _enter_backward(residuals, grads):
    scale, leaf = residuals
    grads = [None if isinstance(x, SymbolicZero) else x for x in grads]
    if any(x.dtype == jnp.float16 for x in jax.tree.leaves(grads)):
        warn(
            "Parameters are float16, and so are their gradients, which are zero below "
            "2**-25 once they are unscaled. Keep parameters in float32, and cast them "
            "in loss_fn."
        )
    grads = cast_like(unscale_by(grads, scale), grads)
    # Without a scale, whoever has one has to see what is not finite.
    finite = all_finite(grads) | (leaf <= 0)
    # Devices of jax.shard_map decide together, if all of them have this scale.
    axes = varying_axes(finite) - varying_axes(scale)
    finite = on_all_devices(finite, tuple(axes) or None)
    grads = jax.tree.map(lambda x: jnp.where(finite, x, 0), grads)
    return grads, None, (~finite).astype(jnp.float32)


_enter.defvjp(_enter_forward, _enter_backward, symbolic_zeros=True)


@jax.custom_jvp
def _as_wanted(entered, x):
    """Returns `entered`, without derivative where the trainer wants none of `x`."""
    return entered


@functools.partial(_as_wanted.defjvp, symbolic_zeros=True)
def _(primals, tangents):
    entered, x = tangents
    return primals[0], x if isinstance(x, SymbolicZero) else entered


def _is_of_nnx(x: Any) -> bool:
    """Tells whether `x` is a module, or a variable, which may be changed in place."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(x, nnx.Pytree | nnx.Variable)


def warn_if_forgotten(params: Any) -> None:
    """Warns of a scale among the parameters, and no `scale_parameter`."""

    def look(path, box):
        if _is_scalar(jax.tree.leaves(box), jnp.float32):
            warn(
                f"params{jax.tree_util.keystr(path)} is a float32 scalar, and the "
                "optimizer has no scale_parameter, so it takes it for any parameter. "
                "If with_loss_scale reads the scale there, pass "
                'scale_parameter="loss_scale" to LossScaleOptimizer.'
            )
        return box

    _map_named(look, "loss_scale", params)


def init(options: Options, params: Any) -> _state.LossScaleOptimizerState:
    """Returns the state before the first step."""
    if jax.tree.leaves(params):  # optax.tree.map_params has a placeholder.
        _, _, params = _take_out(options.scale_parameter, params, "params")
    return _step.init(options, params)


def update(
    options: Options, grads: Any, state: Any, params: Any, extra: dict[str, Any]
) -> tuple[Any, _state.LossScaleOptimizerState]:
    """Returns the updates of a step, including the scale's, and the new state."""
    place, old, grads, params, look = _take_apart(options, grads, state, params)
    updates, state = _step.update(options, grads, state, params, extra, look)
    new = options.loss_scale.loss_scale(state.loss_scale_state)
    # Not all the way down where the difference rounds to minus the old scale.
    return place(updates, jnp.maximum(new, old * 2.0**-23) - old), state


def apply_gradients(
    options: Options, grads: Any, params: Any, state: Any, extra: dict[str, Any]
) -> tuple[Any, _state.LossScaleOptimizerState]:
    """Returns the parameters after a step, the scale among them, and the new state."""
    place, _, grads, params, look = _take_apart(options, grads, state, params)
    params, state = _step.apply_gradients(options, grads, params, state, extra, look)
    return place(params, options.loss_scale.loss_scale(state.loss_scale_state)), state


def _take_apart(
    options: Options, grads: Any, state: Any, params: Any
) -> tuple[Callable[[Any, Any], Any], jax.Array, Any, Any, _step.Look]:
    """Takes the scale out of the arguments of a step.

    Returns:
      A function that puts a scale in its place among the parameters; the scale there;
      the other gradients and parameters; and the look at the gradients.
    """
    rule, name = options.loss_scale, options.scale_parameter
    place, old, params = _take_out(name, params, "params")
    _state.check_state(state, rule, options.retries)
    _, overflows, grads = _take_out(name, grads, "grads")
    # Show an overflow, of which the gradient of the scale tells, to the rule.
    overflow = overflows != 0
    seen = jax.tree.map(
        lambda x: jnp.where(overflow, jnp.nan, x) if is_inexact(x) else x, grads
    )
    look = _step.look(rule, seen, state.loss_scale_state, options.axis_name)
    if not rule.skip_nonfinite:  # It would apply the zeros.
        finite = on_all_devices(~overflow, options.axis_name)
        look = look._replace(finite=finite)
    return place, old, grads, params, look


def _take_out(
    name: str | None, tree: Any, what: str
) -> tuple[Callable[[Any, Any], Any], jax.Array, Any]:
    """Takes the scale, or its gradient, out of a tree.

    Args:
      name: The argument `scale_parameter`.
      tree: The parameters, or their gradients.
      what: "params" or "grads".

    Returns:
      A function that puts an array in the place of the scale in such a tree; the scale;
      and the tree with None in its place.
    """
    found = []

    def cut(path, box):
        found.append((jax.tree_util.keystr(path), box))

    rest = _map_named(cut, name, tree)
    arrays = jax.tree.leaves([box for _, box in found])
    dtype = jnp.float32 if what == "params" else jnp.floating
    if len(found) != 1 or not _is_scalar(arrays, dtype):
        got = ", ".join(f"{path}: {types_of(box)}" for path, box in found)
        raise ValueError(
            f"{what} must hold one float32 scalar named {name!r}, got "
            f"{got or f'none in a {type(tree).__name__}'}. {_HINTS[what]}"
        )

    def place(tree, leaf):
        box = jax.tree.map(lambda _: leaf, found[0][1])
        return _map_named(lambda *_: box, name, tree)

    return place, arrays[0], rest


def _is_scalar(leaves: list[Any], dtype: Any) -> bool:
    """Tells whether there is one leaf, a scalar array of this dtype or kind."""
    if len(leaves) != 1 or not hasattr(leaves[0], "dtype"):
        return False
    return leaves[0].shape == () and jnp.issubdtype(leaves[0].dtype, dtype)


def _map_named(function: Callable[[Any, Any], Any], name: str | None, tree: Any) -> Any:
    """Maps what has this name in a tree, given its path; the rest stays."""

    def is_named(path, _):
        return bool(path) and jax.tree_util.keystr(path[-1:], simple=True) == name

    return jax.tree.map_with_path(
        lambda path, x: function(path, x) if is_named(path, x) else x,
        tree,
        is_leaf=is_named,
        is_leaf_takes_path=True,
    )
