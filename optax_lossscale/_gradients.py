"""From the loss to unscaled gradients: scale, differentiate, unscale."""

import contextlib
import functools
import math
import numbers
import reprlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer

from optax_lossscale import _check as check, _devices, _models, _uses
from optax_lossscale._hints import hint
from optax_lossscale._rules.base import LossScale
from optax_lossscale._rules.fixed import FixedLossScale
from optax_lossscale._scaling import scale_all_down, scale_up
from optax_lossscale._state import (
    FUNCTIONAL,
    ORDER,
    TRAIN_STATE,
    LossScaleOptimizerState,
    check_scalar,
    find_rule_state,
    warn_if_in_multi_steps,
)
from optax_lossscale._tree import (
    in_one_program,
    is_inexact,
    nodes_of,
    split_arrays,
    types_of,
    unbox,
)
from optax_lossscale._update import barrier_on_cpu, is_recording
from optax_lossscale._uses import Use
from optax_lossscale._warn import warn


def scale_of_step(rule: LossScale, state: Any) -> jax.Array:
    """Returns the scale to compute with, a scalar without a derivative."""
    warn_if_in_multi_steps(state)
    rule_state = find_rule_state(state, rule)
    scale = rule(rule_state)
    check_scalar("loss_scale_state.loss_scale", scale)
    is_constant = not isinstance(unbox(rule_state.loss_scale), Tracer)
    # Also in jax.lax.scan, whose program JAX reuses in the next call of this function.
    if is_constant and is_recording() and not isinstance(rule, FixedLossScale):
        warn(
            "The loss scale is a constant in a function that JAX compiles. Make the "
            "state an argument, and call value_and_grad inside the training step."
        )
    return lax.stop_gradient(scale)


def scale_loss(rule: LossScale, loss: Any, state: Any) -> Any:
    """Multiplies a loss, or the result of a function, by the scale."""
    if callable(loss):
        return lambda *args, **kwargs: scale_loss(rule, loss(*args, **kwargs), state)
    if isinstance(loss, tuple | list | dict) or loss is None:
        raise TypeError(
            f"The loss must be an array or a number, got {types_of(loss)}. "
            "value_and_grad takes auxiliary data."
        )
    warn_of_float16(loss, rule._bounds[1])
    _uses.note(rule, Use.LOSS)
    return scale_up(loss, scale_of_step(rule, state))


def unscale(grads: Any, scale: jax.Array, skips: bool = False) -> Any:
    """Divides gradients by a scale.

    Args:
      grads: The gradients.
      scale: The scale.
      skips: Whether a step with these gradients may be skipped.
    """
    arrays, join = split_arrays(barrier_on_cpu(skips, grads), is_inexact)
    return join(in_one_program(scale_all_down, scale, arrays))


def value_and_grad(
    fun: Callable[..., Any], argnums: Any = 0, has_aux: bool = False
) -> Callable[..., Any]:
    """`jax.value_and_grad` for models of any library.

    The arguments decide: Flax differentiates its nnx modules, and JAX everything else.
    Leaves without a gradient, such as functions and integers, have the gradient None.
    """

    def of_arguments(*args, **kwargs):
        positions = _argnums_by_position(argnums, args)
        parts = {i: _models.partition(args[i]) for i in positions}
        for i, (trained, _) in parts.items():
            if not jax.tree.leaves(trained) and jax.tree.leaves(args[i]):
                raise TypeError(
                    f"Argument {i} of loss_fn must hold a floating-point array, "
                    f"got {reprlib.repr(types_of(args[i]))}. {FUNCTIONAL} {ORDER}"
                )

        def of_parts(*given):
            *given, kwargs = given
            for i, (_, rest) in parts.items():
                given[i] = _models.combine(given[i], rest)
            return fun(*given, **kwargs)

        # kwargs are one more argument, because Flax needs the position of each keyword.
        given = [parts[i][0] if i in parts else x for i, x in enumerate(args)]
        library = _models.value_and_grad_for([given[i] for i in parts])
        of_library = library(
            of_parts, argnums=tuple(positions.values()), has_aux=has_aux
        )
        value, grads = of_library(*given, kwargs)
        return value, grads if isinstance(argnums, tuple | list) else grads[0]

    return of_arguments


def _argnums_by_position(argnums: Any, args: tuple[Any, ...]) -> dict[int, Any]:
    """Returns the argnum of each argument to differentiate, by its position.

    An argnum is that position, or the `nnx.DiffState` that chooses variables.
    """
    several = argnums if isinstance(argnums, tuple | list) else [argnums]
    if not args:
        raise TypeError(
            "Pass the parameters by position, got no argument by position: "
            "value_and_grad(loss_fn, state)(params, *batch)."
        )
    found = {}
    for x in several:
        i = _models.position_of(x)
        if -len(args) <= i < len(args):
            found[i % len(args)] = x if _models.chooses_variables(x) else i % len(args)
    if len(found) != len(several):
        raise ValueError(
            "argnums must name each of some positional arguments once, got "
            f"{argnums!r} of {len(args)}."
        )
    return found


def scaled_grad(
    rule: LossScale,
    fun: Any,
    has_aux: bool,
    transform: Callable[..., Any] | None,
    argnums: int | tuple[int, ...] = 0,
) -> Callable[..., tuple[Any, Any]]:
    """Makes a function of a scale that returns the value and scaled gradients of `fun`.

    Args:
      rule: The rule.
      fun: The loss function.
      has_aux: Whether `fun` returns auxiliary data as well.
      transform: A function like `jax.value_and_grad`; None is `value_and_grad` above.
      argnums: Which positional arguments to differentiate with respect to.
    """
    check.function("loss_fn", fun, ORDER)
    _check_argnums("argnums", argnums, ORDER)
    # eqx.filter_value_and_grad has no argnums: it uses the first argument.
    options = {"argnums": argnums} if argnums != 0 else {}
    transform_fun = functools.partial(transform or value_and_grad, **options)

    def of_scale(scale, /, *args, **kwargs):
        _uses.note(rule, Use.GRADIENTS)

        def loss_times_scale(*args, **kwargs):
            out = fun(*args, **kwargs)
            loss = loss_of(out, has_aux)
            warn_of_float16(loss, rule._bounds[1])
            scaled = scale_up(loss, scale)
            if not _devices.may_average(transform):
                check_scalar_loss(loss)
                _warn_of_independent(scaled, args, transform_fun)
            # The result holds the loss itself as well: the scaled one may be inf.
            return scaled, _Out(out)

        def has_state(args):
            return bool(nodes_of(LossScaleOptimizerState, args[:1]))

        if kwargs:  # Flax nnx reads their positions from the signature of `fun`.
            vars(loss_times_scale)["__wrapped__"] = fun
        with (
            _models.hint_of_trace(),
            _models.hint_of_sharing(),
            hint(TRAIN_STATE, lambda _: has_state(args)),
        ):
            result = transform_fun(loss_times_scale, has_aux=True)(*args, **kwargs)
        value, grads = _unpack(result)
        _devices.warn_of_local_loss(loss_of(value, has_aux), grads, transform)
        return value, grads

    return of_scale


def _are_argnums(value: Any) -> bool:
    places = value if isinstance(value, tuple | list) else [value]
    return all(isinstance(_models.position_of(x), numbers.Integral) for x in places)


_check_argnums = check.kind(_are_argnums, "an integer or a tuple of integers")


def check_argnums(transform: Callable[..., Any] | None) -> None:
    """Raises if a transform differentiates anything but the first argument."""
    argnums = getattr(transform, "keywords", {}).get("argnums", 0)
    if _models.position_of(argnums) != 0:
        raise ValueError(
            "minimize trains the first argument of loss_fn, got a transform with "
            f"argnums={argnums!r}. Pass all parameters as one tree, and no argnums."
        )


def check_scalar_loss(loss: Any) -> None:
    """Raises if a loss is an array with axes."""
    if jnp.shape(loss):
        raise TypeError(
            f"loss_fn must return a scalar loss, got {types_of(loss)}. Write return "
            "jnp.mean(losses)."
        )


def _warn_of_independent(loss: Any, args: Any, transform: Callable[..., Any]) -> None:
    """Warns, inside a function that JAX differentiates, if the loss has no gradient.

    There, the parameters and all values that depend on them are tracers of one type.
    """
    argnums = getattr(transform, "keywords", {}).get("argnums", 0)
    places = argnums if isinstance(argnums, tuple | list) else (argnums,)
    if any(map(_models.chooses_variables, places)):
        return  # Not all parameters are differentiated.
    trained = [_models.trainable(_models.partition(args[i])[0]) for i in places]
    types = {type(x) for x in jax.tree.leaves(trained) if isinstance(x, Tracer)}
    if types and type(loss) not in types:
        which = f"argument {places[0]}" if len(places) == 1 else f"arguments {places}"
        warn(
            f"The loss has no gradient with respect to {which} of loss_fn, so nothing "
            "is trained. Compute the loss from what loss_fn gets, not from parameters "
            "outside of it. (stop_gradient, argmax and rounding have no gradient.)"
        )


def warn_of_float16(loss: Any, largest: float = math.inf) -> None:
    """Warns of a float16 loss if the largest scale is inf in float16."""
    if getattr(loss, "dtype", None) == jnp.float16 and largest >= 2.0**16:
        warn(
            "The loss is float16, and its gradient, the loss scale, is inf from 2**16 "
            "on. Reduce it in float32: jnp.mean(losses.astype(jnp.float32))."
        )


def loss_of(out: Any, has_aux: bool) -> Any:
    """Returns the loss in the result of a loss function."""
    is_pair = isinstance(out, tuple | list) and len(out) == 2
    loss = out[0] if has_aux and is_pair else out
    is_real = is_inexact(loss) and not jnp.iscomplexobj(loss)
    if (has_aux and not is_pair) or not is_real:
        wanted = "a floating-point scalar" + ", and auxiliary data" * has_aux
        advice = " Write has_aux=True." if is_pair and not has_aux else ""
        raise TypeError(
            f"With has_aux={has_aux} loss_fn must return {wanted}, got {types_of(out)}."
            + advice
        )
    return loss


class _Out(NamedTuple):
    """Marks the output of the user's function in the result of a transform."""

    value: Any


def _unpack(result: Any) -> tuple[Any, Any]:
    """Returns the value and the gradients, if a transform returned both."""
    with contextlib.suppress(TypeError, ValueError):
        (_, out), grads = result
        if isinstance(out, _Out):
            return out.value, grads
    raise TypeError(
        "transform must return the value with the gradients: pass jax.value_and_grad."
    )
