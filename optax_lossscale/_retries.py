"""An overflow repeats the backward pass at a lower scale, so that no batch is lost."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.extend.core import (
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Primitive,
    Var,
    jaxpr_as_fun,
)
from jax.interpreters import ad, batching, mlir

from optax_lossscale import _gradients, _state
from optax_lossscale._commit import is_recording
from optax_lossscale._scaling import all_finite, scale_down
from optax_lossscale._step import Look, Options, look, without_derivative
from optax_lossscale._tree import cast_like, is_inexact, split_arrays, strongly_typed


class Pass(NamedTuple):
    """What a backward pass leaves to the next one, or to the step.

    Attributes:
      looked: What the rule saw of the gradients.
      grads: The scaled gradients, in the dtypes in which they were computed.
      retries: i32[], the number of repeated passes so far.
      again: bool[], whether another pass follows.
    """

    looked: Look
    grads: list[jax.Array]
    retries: jax.Array
    again: jax.Array


def value_and_grad(
    options: Options,
    fun: Callable[..., Any],
    state: _state.LossScaleOptimizerState,
    has_aux: bool,
    transform: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Any, Any, _state.LossScaleOptimizerState]:
    """Computes gradients at the scale of the state, or at the next that is low enough.

    Args:
      options: The arguments of the optimizer.
      fun: The loss function.
      state: The state before the step.
      has_aux: Whether `fun` returns auxiliary data as well.
      transform: `jax.value_and_grad`, or a function like it.
      args: The arguments of `fun`, the parameters first.
      kwargs: Its keyword arguments.

    Returns:
      The value of `fun`, the unscaled gradients, and the state with a `Look` in the
      place of the rule's state.
    """
    rule, axis_name = options.loss_scale, options.axis_name
    _gradients.check_callable(fun)
    _state.check_state(state, rule, options.retries)
    if _gradients.library_of(transform) == "flax":
        raise TypeError(_explain("changes the model in place", options))
    scale = _gradients.scale_of_step(rule, state)

    def scaled_value_and_grad(scale):
        function = _gradients.scaled_value_and_grad(
            rule, fun, scale, has_aux, transform
        )
        return function(*args, **kwargs)

    value, backward = _run_forward(scaled_value_and_grad, scale, options)
    loss = _gradients.loss_of(value, has_aux)
    loss_is_finite = all_finite(loss, axis_name=axis_name)

    def attempt(last: Pass) -> Pass:
        old = last.looked.after
        scale = rule.loss_scale(old)
        grads = backward.run(scale)
        looked = look(rule, backward.unscaled(grads, scale), old, axis_name)
        looked = looked._replace(
            after=cast_like(looked.after, old),
            # In jax.shard_map it varies over the devices if the scale does.
            finite=looked.finite | lax.full_like(scale, False, bool),
        )
        again = ~looked.finite & loss_is_finite & (last.retries < options.retries)
        again &= rule.loss_scale(looked.after) < scale
        return Pass(looked, grads, last.retries + again, again)

    old = strongly_typed(_state.healed(rule, state.loss_scale_state))
    old = jax.tree.map(
        lambda x, kind: without_derivative(lax.convert_element_type(x, kind.dtype)),
        old,
        _state.expected_state(rule),
    )
    no = lax.full_like(scale, False, bool)
    # The first pass is inside the loop, too: one program, and the same bits.
    first = Pass(
        Look(scale, old, old, finite=no),
        [lax.full_like(x, 0) for x in jax.eval_shape(backward.run, scale)],
        retries=lax.full_like(scale, 0, jnp.int32),
        again=~no,
    )
    last = _repeat(attempt, first)
    grads = [_forward_only.bind(x) for x in last.grads]
    before = jnp.asarray(state.retries, jnp.int32)
    retries = jnp.maximum(before + last.retries, before)  # Stays at its maximum.
    state = state._replace(loss_scale_state=last.looked, retries=retries)
    return value, backward.unscaled(grads, last.looked.loss_scale), state


class _Backward(NamedTuple):
    """The backward pass, after the forward pass has run.

    Attributes:
      run: Maps a scale, f32[], to the scaled gradients, without the cast to a wider
        dtype with which many gradients end.
      dtypes: The dtypes after that cast.
      join: Makes a tree of gradients.
    """

    run: Callable[[jax.Array], list[jax.Array]]
    dtypes: list[Any]
    join: Callable[[list[jax.Array]], Any]

    def unscaled(self, grads: list[jax.Array], scale: jax.Array) -> Any:
        """Returns the tree of unscaled gradients, from the result of `run`."""
        pairs = zip(grads, self.dtypes, strict=True)
        wide = self.join([x.astype(dtype) for x, dtype in pairs])
        return jax.tree.map(
            lambda x: scale_down(x, scale) if is_inexact(x) else x, wide
        )


def _run_forward(
    scaled: Callable[[jax.Array], tuple[Any, Any]], scale: jax.Array, options: Options
) -> tuple[Any, _Backward]:
    """Runs the forward pass, which is all that does not depend on the scale.

    Args:
      scaled: Maps a scale to the value and the scaled gradients.
      scale: f32[].
      options: The arguments of the optimizer.
    """
    joins = []

    def function(scale):
        (value, join_value), (grads, join_grads) = map(split_arrays, scaled(scale))
        joins[:] = join_value, join_grads
        return value, grads

    program, (value, grads) = jax.make_jaxpr(function, return_shape=True)(scale)
    jaxpr, join_value, join_grads = program.jaxpr, *joins
    dtypes = [x.dtype for x in grads]
    value, grads = jaxpr.outvars[: len(value)], jaxpr.outvars[len(value) :]

    forward, backward, depend = [], [], set(jaxpr.invars)
    for equation in jaxpr.eqns:
        # A callback without operands runs in the pass in which it is written.
        is_callback = bool(backward) and not equation.outvars
        if depend.isdisjoint(_variables(equation.invars)) and not is_callback:
            forward.append(equation)
        else:
            backward.append(equation)
            depend.update(equation.outvars)
    if not depend.isdisjoint(_variables(value)):
        raise TypeError(
            _explain("is compiled by jax.jit, or mixes loss and scaled loss", options)
        )
    _check_collectives(backward, options)

    casts = {x.outvars[0]: x.invars[0] for x in backward if _widens(x)}
    grads = [casts.get(x, x) if isinstance(x, Var) else x for x in grads]
    read = [x for equation in backward for x in equation.invars] + grads
    residuals = [x for x in dict.fromkeys(_variables(read)) if x not in depend]
    found = jaxpr_as_fun(
        ClosedJaxpr(
            Jaxpr(jaxpr.constvars, (), [*value, *residuals], forward), program.consts
        )
    )()
    value, residual_values = found[: len(value)], found[len(value) :]
    run_backward = jaxpr_as_fun(
        ClosedJaxpr(Jaxpr((), [*jaxpr.invars, *residuals], grads, backward), ())
    )

    def run(scale):
        return strongly_typed(run_backward(scale, *residual_values))

    return join_value(value), _Backward(run, dtypes, join_grads)


def _variables(atoms: Iterable[Any]) -> list[Var]:
    return [x for x in atoms if isinstance(x, Var)]


def _widens(equation: JaxprEqn) -> bool:
    """Whether an equation casts floating-point numbers to a dtype that holds them."""
    if equation.primitive.name != "convert_element_type":
        return False
    (x,), (y,) = equation.invars, equation.outvars
    is_float = is_inexact(x.aval) and isinstance(x, Var)
    return is_float and x.aval.dtype.itemsize < y.aval.dtype.itemsize


def _repeat(attempt: Callable[[Pass], Pass], first: Pass) -> Pass:
    """Runs the backward pass until it need not run again."""
    if is_recording():
        return lax.while_loop(lambda last: last.again, attempt, first)
    # Operations run one by one: a loop would be compiled anew in each step.
    last = attempt(first)
    if isinstance(last.again, Tracer):  # Members of jax.vmap decide apart.
        return lax.while_loop(lambda last: last.again, attempt, last)
    while last.again:
        last = attempt(last)
    return last


def _explain(cause: str, options: Options) -> str:
    return (
        f"With retries={options.retries}, minimize repeats the backward pass without the "
        f"forward pass, and it cannot take apart a transform that {cause}. Pass "
        "jax.value_and_grad or eqx.filter_value_and_grad, and compile the training "
        "step around minimize. With Flax nnx, split the model into graphdef, params, "
        "rest = nnx.split(model, nnx.Param, ...), merge it in loss_fn, and return "
        "nnx.state(model, nnx.Not(nnx.Param)) as auxiliary data."
    )


def _check_collectives(backward: list[JaxprEqn], options: Options) -> None:
    """Raises if devices that repeat the backward pass would wait for the others."""
    names = options.axis_name
    names = set(names if isinstance(names, tuple) else (names,))
    for equation in backward:
        for effect in equation.effects:
            is_axis = type(effect).__name__ == "NamedAxisEffect"
            if is_axis and effect.name not in names:
                raise ValueError(
                    f"With retries={options.retries}, axis_name must name the axis "
                    f"{effect.name!r}, got axis_name={options.axis_name!r}: the "
                    f"backward pass communicates along it ({equation.primitive.name}). "
                    "If only some devices repeated it, they would wait for the others "
                    "forever. Pass axis_name to LossScaleOptimizer, and all decide "
                    "together."
                )


def _refuse(*_: Any) -> None:
    raise TypeError(
        "Reverse-mode derivatives do not pass through a step with retries: its loop "
        "runs as often as it must. Use forward mode (jax.jvp, jax.jacfwd), or an "
        "optimizer with retries=0."
    )


# The identity, without a derivative in reverse mode.
_forward_only = Primitive("forward_only")
_forward_only.def_impl(lambda x: x)
_forward_only.def_abstract_eval(lambda x: x)
batching.defvectorized(_forward_only)
mlir.register_lowering(_forward_only, lambda _, x: [x])
ad.deflinear2(_forward_only, _refuse)
