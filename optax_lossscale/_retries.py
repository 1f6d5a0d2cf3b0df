"""An overflow repeats the backward pass at a lower scale, so that no batch is lost."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from optax_lossscale import _gradients, _state
from optax_lossscale._commit import is_recording
from optax_lossscale._passes import run_forward
from optax_lossscale._scaling import all_finite
from optax_lossscale._step import Look, Options, look
from optax_lossscale._tree import cast_like, is_inexact, select, settled


def value_and_grad(
    options: Options,
    loss_fn: Callable[..., Any],
    has_aux: bool,
    transform: Callable[..., Any],
    state: _state.LossScaleOptimizerState,
    /,
    *args: Any,
    **kwargs: Any,
) -> tuple[Any, Any, _state.LossScaleOptimizerState, Look]:
    """Computes gradients at the scale of the state, or at the next that is low enough.

    Args:
      options: The arguments of the optimizer.
      loss_fn: The loss function.
      has_aux: Whether it returns a loss and auxiliary data.
      transform: `jax.value_and_grad`, or a function like it.
      state: The state before the step.
      *args: The arguments of `loss_fn`, first the parameters.
      **kwargs: More of them.

    Returns:
      The value, the unscaled gradients, the state with the number of retries, and the
      look at the gradients. If no retry saved the step, it is the first look: the rule
      then goes on as without retries.
    """
    if _gradients.library_of(transform) == "flax":
        raise TypeError(
            f"With retries, {transform!r} must not be the transform, as it changes the "
            "model in place. See 'With Flax nnx' in the guide, on the page of retries."
        )
    rule, axis_name = options.loss_scale, options.axis_name
    _state.check_state(state, rule, options.retries)
    scaled = _gradients.scaled_grad(rule, loss_fn, has_aux, transform)
    scale = _gradients.scale_of_step(rule, state)
    passes = run_forward(lambda scale: scaled(scale, *args, **kwargs), scale)
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    if missing := passes.axes.difference(names):
        raise ValueError(
            f"With retries={options.retries}, axis_name must contain "
            f"{missing.pop()!r}, got {axis_name!r}: its devices retry together."
        )
    loss = _gradients.loss_of(passes.value, has_aux)
    loss_is_finite = all_finite(loss, axis_name=axis_name)

    def attempt(last):
        retries, first, looked, _, _ = last
        old = looked.after
        scale = lax.stop_gradient(rule(old))
        grads = passes.backward(scale)
        seen = settled(passes.finish([_as_stored(x) for x in grads]))
        seen = jax.tree.map(_as_carried, seen)
        looked = look(rule, _gradients.unscale_by(seen, scale), old, axis_name)
        # In jax.shard_map it varies over the devices if the scale does.
        finite = looked.finite | lax.full_like(scale, False, bool)
        looked = looked._replace(finite=finite, after=cast_like(looked.after, old))
        first = select(retries == 0, looked.after, first)
        again = ~finite & loss_is_finite & (rule(looked.after) < scale)
        again &= retries < options.retries
        return retries + again.astype(jnp.int32), first, looked, grads, again

    # The first pass is inside the loop, too: one program, and the same bits.
    like = _state.healed(rule, rule.init())
    old = cast_like(_state.healed(rule, state.loss_scale_state), like)
    no = lax.full_like(scale, False, bool)
    none_yet = lax.full_like(scale, 0, jnp.int32)
    # XLA would merge equal constants into one array, and copy it for the loop: fill
    # each with another number.
    shapes = jax.eval_shape(passes.backward, scale)
    unused = [_filled(x, i) for i, x in enumerate(shapes)]
    start = none_yet, old, Look(old, old, no), unused, ~no
    retries, first, looked, grads, _ = _repeat(attempt, start)

    scale = rule(looked.before)
    grads = passes.finish([_forward_only.bind(x) for x in grads], logs=True)
    grads = _gradients.unscale_by(settled(grads), scale)
    retries += jnp.asarray(state.retries, jnp.int32)
    retries = jnp.where(retries < 0, 2**31 - 1, retries)
    looks = looked.before, looked.after
    before, after = select(looked.finite, looks, (old, first))
    looked = Look(before, after, looked.finite)
    return passes.value, grads, state._replace(retries=retries), looked


def _filled(like: jax.ShapeDtypeStruct, value: int) -> jax.Array:
    """As `lax.full_like`, which fails on shapes that vary over Manual axes alone."""
    axes = tuple(_gradients.varying_axes(like))
    if like.sharding is not None or not axes:
        return lax.full_like(like, value)
    zero = 0 * lax.axis_index(axes)
    return jnp.full(like.shape, value, like.dtype) + zero.astype(like.dtype)


def _as_stored(x: jax.Array) -> jax.Array:
    """Returns `x`; keeps XLA from checking it before its last rounding.

    On GPU, XLA removes casts to float16 and back, and an overflow there with them.
    """
    if not is_inexact(x) or x.dtype.itemsize != 2:
        return x
    kind = jnp.finfo(x.dtype)
    return lax.reduce_precision(x, kind.nexp, kind.nmant)


def _as_carried(x: jax.Array) -> jax.Array:
    """Returns `x`; keeps XLA from checking it before its last multiplication.

    XLA makes one product of `y * scale` and of the unscaling, `1 / scale`, and an
    overflow of the product that the loop carries disappears.
    """
    return jnp.where(jnp.isfinite(x), x, x * jnp.inf) if is_inexact(x) else x


def _repeat(attempt: Callable[[Any], Any], first: Any) -> Any:
    """Calls `attempt` until the last part of its result is False."""
    if is_recording():
        return lax.while_loop(lambda last: last[-1], attempt, first)
    # Operations run one by one: each step would compile a loop anew.
    last = attempt(first)
    if isinstance(last[-1], Tracer):  # As in jax.vmap.
        return lax.while_loop(lambda last: last[-1], attempt, last)
    while last[-1]:
        last = attempt(last)
    return last


def _refuse(*_: Any) -> None:
    raise TypeError(
        "A step with retries has no reverse-mode derivative. Use forward mode, "
        "jax.jvp or jax.jacfwd, or an optimizer without retries."
    )


# The identity, with derivatives in forward mode only.
_forward_only = Primitive("forward_only")
_forward_only.def_impl(lambda x: x)
_forward_only.def_abstract_eval(lambda x: x)
batching.defvectorized(_forward_only)
mlir.register_lowering(_forward_only, lambda _, x: [x])
ad.deflinear2(_forward_only, _refuse)
