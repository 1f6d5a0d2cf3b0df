"""The scale among the parameters: for trainers that compute the gradients."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.custom_derivatives import SymbolicZero

from optax_lossscale import (
    _check as check,
    _gradients,
    _models,
    _state,
    _step,
    _tree,
    _uses,
)
from optax_lossscale._devices import on_all_devices
from optax_lossscale._jaxprs.parts import varying_axes
from optax_lossscale._optimizer import LossScaleOptimizer
from optax_lossscale._scaling import all_finite, scale_up
from optax_lossscale._step import Options
from optax_lossscale._tree import Args, Out, Tree
from optax_lossscale._uses import Use
from optax_lossscale._warn import warn


def scale_gradient(tree: Tree, scale: jax.typing.ArrayLike) -> Tree:
    """Returns its argument unchanged, and multiplies its gradients by a scale.

    Multiply the gradients at one point, and divide them at another: in between they are
    larger, and do not underflow in float16.

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
    if not _tree.is_float32_scalar(scale):
        raise TypeError(
            f"scale must be a number or a float32 scalar, got {_tree.types_of(scale)}."
        )
    factor = lax.stop_gradient(scale)

    def leaf(x):
        if not _tree.has_gradient(x):
            return x
        # x has to vary over the axes of the factor. JAX renames its casts between
        # versions; this `where` is a cast in all of them.
        if varying_axes(factor):
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
    loss_fn: Callable[Args, Out], name: str = "loss_scale", has_aux: bool = False
) -> Callable[Args, Out]:
    """Makes a loss function with true gradients, for a trainer that computes them.

    Pass the result to the trainer in place of `loss_fn`, and `scale_as_parameter(
    LossScaleOptimizer(inner))` in place of `inner`. The parameters carry the scale from
    one to the other: add the `initial_scale` of the `LossScaleOptimizer` to them, as
    float32, named "loss_scale".

    Loss and gradients are the true ones of `loss_fn`; only the backward pass computes
    with scaled gradients. So the trainer may log, clip, accumulate and average
    gradients. If one of them is not finite, **all gradients of the parameters are zero,
    and the gradient of the scale is 1**: the trainer sees no inf or nan, and the
    optimizer skips the step and lowers the scale.

    Args:
      loss_fn: A function that takes the parameters first: a pytree, or a Flax nnx
        module. It gets zero in place of the scale. It returns a loss, or a loss and
        auxiliary data if `has_aux`.
      name: The name of the scale: the last key of one leaf, f32[].
      has_aux: Whether `loss_fn` returns auxiliary data as well.

    Returns:
      A function with the arguments and results of `loss_fn`. Differentiate it in
      reverse mode, with respect to all parameters. Gradients have the dtypes of the
      parameters: keep these in float32, and cast them in `loss_fn`.

      Gradients with respect to other arguments are true as well, but may hold inf or
      nan. Gradients with respect to arrays that `loss_fn` closes over, or to single
      variables of Flax nnx, stay scaled. JAX refuses forward mode, because the backward
      pass checks the gradients. For second derivatives in float16 use `jax.hessian`
      (forward over reverse mode), which is scaled. Reverse over reverse mode is not:
      small values become zero.

    Raises:
      TypeError: If `loss_fn` is no function, or, when called, if the loss is no
        floating-point number.
      ValueError: When called, unless the parameters hold one leaf of this name, a
        float32 scalar.

    Warns:
      UserWarning: If the loss is float16, or if gradients of float16 parameters are
        computed.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import optax
      >>> from optax_lossscale import (
      ...     LossScaleOptimizer,
      ...     autocast,
      ...     scale_as_parameter,
      ...     with_loss_scale,
      ... )
      >>> optimizer = scale_as_parameter(
      ...     LossScaleOptimizer(optax.sgd(0.25), initial_scale=2.0**10)
      ... )
      >>> @autocast
      ... def loss_fn(params, x):
      ...     return jnp.sum((params["w"] @ x) ** 2)
      >>> params = {"w": jnp.float32([[2, 0]]), "loss_scale": jnp.float32(2**10)}
      >>> state = optimizer.init(params)

      The trainer does this:

      >>> grad_fn = jax.value_and_grad(with_loss_scale(loss_fn))
      >>> loss, grads = grad_fn(params, jnp.float32([0.5, 0]))
      >>> updates, state = optimizer.update(grads, state, params)
      >>> params = optax.apply_updates(params, updates)
      >>> print(loss, grads["w"], params["w"], params["loss_scale"])
      1.0 [[1. 0.]] [[1.75 0.  ]] 1024.0

      After an overflow, the scale among the parameters is lower:

      >>> loss, grads = grad_fn(params, jnp.float32([100, 0]))
      >>> updates, state = optimizer.update(grads, state, params)
      >>> params = optax.apply_updates(params, updates)
      >>> print(loss, grads["w"], params["w"], params["loss_scale"])
      30625.0 [[0. 0.]] [[1.75 0.  ]] 512.0
    """
    check.function("loss_fn", loss_fn)
    # A partial, not a closure: cloudpickle would copy the derivative rules with that.
    scaled_loss = functools.partial(_scaled_loss, loss_fn, name, has_aux)
    functools.update_wrapper(scaled_loss, loss_fn)
    vars(scaled_loss)["without_scale"] = loss_fn  # For diagnostics.
    return scaled_loss


def _scaled_loss(loss_fn, name, has_aux, params, /, *args, **kwargs) -> Any:
    _uses.note(name, Use.IN_PARAMETERS)
    is_module = _models.is_mutable(params)
    if not is_module and _models.has_modules(params):
        raise TypeError(
            "params must be an nnx module itself, not a tree with modules in it. Write "
            f"model.{name} = nnx.Param(jnp.float32(initial_scale)), and pass the model."
        )
    tree = _models.variables_of(params) if is_module else params
    leaf, rest, place = _partition(name, tree, "params")
    scale = jnp.clip(leaf, check.SMALLEST_SCALE, check.LARGEST_SCALE)
    # Zero means that an outer with_loss_scale scales the loss already.
    scale = lax.stop_gradient(jnp.where(leaf <= 0, 1, scale))
    arrays, join = _tree.split_arrays(rest, _tree.has_gradient)
    unscaled = _with_unscaled_gradients(arrays, scale, leaf)
    arrays = [*map(_differentiable_like, unscaled, arrays)]
    # Zero in place of the scale: a penalty on all parameters would add it to the loss.
    inside = place(join(arrays), jnp.zeros_like(leaf))
    args, kwargs = jax.tree.map(
        lambda x: _unscaled(x, scale), (args, kwargs), is_leaf=_models.is_mutable
    )
    if not is_module:
        out = loss_fn(inside, *args, **kwargs)
    else:
        _models.write_variables(params, inside)
        try:
            out = loss_fn(params, *args, **kwargs)
        finally:
            _models.write_variables(params, place(_models.variables_of(params), leaf))
    loss = _gradients.loss_of(out, has_aux)
    _gradients.warn_of_float16(loss)
    loss = scale_gradient(loss, scale)
    return (loss, out[1]) if has_aux else loss


def _unscaled(x: Any, scale: jax.Array) -> Any:
    """Unscales gradients with respect to an argument that is not the parameters."""
    if not _models.is_mutable(x):
        return scale_gradient(x, 1 / scale)
    # A module of an outer trace gets no gradient here.
    with _models.unless_of_outer_trace():
        if _models.is_module(x):
            _models.write_variables(
                x, scale_gradient(_models.variables_of(x), 1 / scale)
            )
    return x


@jax.custom_vjp
def _with_unscaled_gradients(arrays, scale, leaf):
    """Returns parameters whose gradients are unscaled, or all zero if one overflows."""
    return arrays


def _forward(arrays, scale, leaf):
    return [x.value for x in arrays], (scale.value, leaf.value)


def _backward(residuals, grads):
    scale, leaf = residuals
    grads = [None if isinstance(x, SymbolicZero) else x for x in grads]
    if any(x.dtype == jnp.float16 for x in jax.tree.leaves(grads)):
        warn(
            "Gradients of float16 parameters are zero below 2**-25 once they are "
            "unscaled. Keep parameters in float32, and cast them in loss_fn."
        )
    grads = _tree.cast_like(_gradients.unscale(grads, scale), grads)
    # Inside an outer with_loss_scale, zero nothing: it has to see the inf.
    finite = all_finite(grads) | (leaf <= 0)
    # Devices that share the scale share the decision: one lowers it for all of them.
    axes = varying_axes(finite) - varying_axes(scale)
    finite = on_all_devices(finite, tuple(axes) or None)
    grads = jax.tree.map(lambda x: jnp.where(finite, x, 0), grads)
    return grads, None, (~finite).astype(jnp.float32)


_with_unscaled_gradients.defvjp(_forward, _backward, symbolic_zeros=True)


@jax.custom_jvp
def _differentiable_like(unscaled, x):
    """Returns `unscaled`, without a derivative if `x` is not differentiated."""
    return unscaled


@functools.partial(_differentiable_like.defjvp, symbolic_zeros=True)
def _(primals, tangents):
    unscaled, x = tangents
    return primals[0], x if isinstance(x, SymbolicZero) else unscaled


def scale_as_parameter(
    optimizer: LossScaleOptimizer, name: str = "loss_scale"
) -> optax.GradientTransformationExtraArgs:
    """Makes an optimizer that finds and keeps its loss scale among the parameters.

    For trainers that compute the gradients themselves: pass them this optimizer, and
    the loss function `with_loss_scale(loss_fn)`.

    The inner optimizer sees None in place of the scale. A mask or a tree of labels,
    as in `optax.masked` and `optax.partition`, needs an entry there, of any value; a
    function of the parameters works as it is. `HeadroomLossScale` sees the gradients
    after the trainer has changed them: clipping makes them look smaller than they were
    in the backward pass. A line search (`optax.lbfgs`) needs `value`, `grad` and
    `value_fn`, which few trainers pass to `update`. Gradients of each example, as
    `optax.contrib.dpsgd` takes them, may have one flag each: put the optimizer of
    differential privacy inside. Then one example that overflows skips the step.

    Args:
      optimizer: The optimizer. Its inner optimizer and its rule do not see the scale.
        Keep it: it reads the state as always, by `current_loss_scale(state)`.
      name: The name of the scale: the last key of one leaf of the parameters, f32[].

    Returns:
      An optimizer whose `init` and `update` take all parameters, and whose state is a
      `LossScaleOptimizerState`. The update of the scale is the new scale minus the old
      one, so that a scale that was restored as inf or nan stays so, and all steps are
      skipped: `report(state, params)` names the remedy. `update` takes `skip_if`, and
      `value` if the loss is checked.

    Raises:
      ValueError: When called, unless the parameters, and their gradients, hold one
        leaf of this name, a float32 scalar.

    Warns:
      UserWarning: When `update` is called, if no loss function of `with_loss_scale`
        has run in this process with this name.

    Examples:
      >>> import jax.numpy as jnp
      >>> import optax
      >>> from optax_lossscale import LossScaleOptimizer, scale_as_parameter
      >>> optimizer = scale_as_parameter(LossScaleOptimizer(optax.sgd(0.25)))
      >>> params = {"w": jnp.float32(2), "loss_scale": jnp.float32(2**15)}
      >>> state = optimizer.init(params)

      The gradient of the scale is 1, as `with_loss_scale` makes it after an overflow:

      >>> grads = {"w": jnp.float32(0), "loss_scale": jnp.float32(1)}
      >>> updates, state = optimizer.update(grads, state, params)
      >>> params = optax.apply_updates(params, updates)
      >>> print(params["w"], params["loss_scale"])
      2.0 16384.0
    """
    options = optimizer._options
    options.warn_of_retries("scale_as_parameter")

    def init(params: Any) -> Any:
        params = _models.trainable(params)
        if jax.tree.leaves(params):  # optax.tree.map_params passes a placeholder.
            _, params, _ = _partition(name, params, "params")
        return optimizer.init(params)

    def update(
        updates, state, params=None, *, skip_if=None, **extra_args
    ) -> tuple[Any, Any]:
        _uses.warn_of_unscaled_parameters(options.loss_scale, name)
        params = _models.Model((params,)).parameters(updates)
        old, params, place = _partition(name, params, "params")
        flags, grads, _ = _partition(name, updates, "grads")
        # No update leads back from inf or nan: `report` names the remedy.
        is_lost = ~jnp.isfinite(old)
        # One flag, or one for each example.
        verdict = _update_rule(options, grads, state, jnp.any(flags != 0), is_lost)
        if "grad" in extra_args:
            _, extra_args["grad"], _ = _partition(name, extra_args["grad"], "grads")
        if (of_all := extra_args.get("value_fn")) is not None:
            of_rest = jax.tree_util.Partial(lambda params: of_all(place(params, old)))
            extra_args["value_fn"] = of_rest
        updates, state = _step.take_step(
            options,
            grads,
            params,
            state,
            extra_args,
            skip_if,
            verdict,
            returns_params=False,
        )
        new_scale = options.loss_scale(state.loss_scale_state)
        # optax.apply_updates adds the difference. If the scale falls by more than
        # 2**23, it rounds to minus the old scale, and the sum would be 0: fall less.
        change = jnp.maximum(new_scale, old * 2.0**-23) - old
        return place(updates, jnp.where(is_lost, 0, change)), state

    return optax.GradientTransformationExtraArgs(init, update)


def _update_rule(
    options: Options, grads: Any, state: Any, overflow: jax.Array, is_lost: jax.Array
) -> _step.RuleUpdate:
    """Updates the rule with the gradients, as nan if there was an overflow.

    If the scale among the parameters is lost, the state of the rule stays the same, and
    the step is skipped.
    """
    rule = options.loss_scale
    _state.check_state(state, rule)
    true_grads = jax.tree.map(
        lambda x: jnp.where(overflow, jnp.nan, x) if _tree.is_inexact(x) else x, grads
    )
    before, after, passes = _step.update_rule(
        rule, true_grads, state.loss_scale_state, options.axis_name
    )
    if not rule.skip_nonfinite:  # The rule would apply the zeros.
        passes = on_all_devices(~overflow, options.axis_name)
    kept = _tree.cast_like(_state.within_bounds(rule, before), after)
    return _step.RuleUpdate(
        before, _tree.select(is_lost, kept, after), passes & ~is_lost
    )


def _partition(
    name: str, tree: Any, argument: str
) -> tuple[jax.Array, Any, Callable[[Any, Any], Any]]:
    """Splits a tree into the scale, or its gradient, and the rest.

    Args:
      name: The name of the scale.
      tree: The parameters, or their gradients.
      argument: "params" or "grads".

    Returns:
      The scale; the tree with None in its place; and a function that puts an array in
      the place of the scale in such a tree.
    """
    boxes: dict[str, Any] = {}

    def cut(path, box):
        boxes[jax.tree_util.keystr(path)] = box

    fits = _tree.is_float32_scalar if argument == "params" else _tree.is_inexact
    rest = _tree.map_named(cut, name, tree)
    arrays = jax.tree.leaves(boxes)
    if len(boxes) != 1 or len(arrays) != 1 or not fits(arrays[0]):
        raise ValueError(
            f"{argument} must hold one float32 scalar named {name!r}, got "
            f"{_tree.types_of(boxes) or f'none in a {type(tree).__name__}'}. Add "
            "jnp.float32(initial_scale) to params, and differentiate all."
        )

    def place(tree, leaf):
        (box,) = boxes.values()
        box = jax.tree.map(lambda _: leaf, box)
        return _tree.map_named(lambda *_: box, name, tree)

    return arrays[0], rest, place
