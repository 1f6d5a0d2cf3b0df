"""An overflow repeats the backward pass at a lower scale, so that no batch is lost."""

from collections.abc import Callable, Iterable
from typing import Any

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
from optax_lossscale._step import Look, Options, look
from optax_lossscale._tree import cast_like, is_inexact, split_arrays, strongly_typed

# Operations on single elements, which XLA fuses with what reads them.
CHEAP = {
    *("add", "and", "broadcast_in_dim", "convert_element_type", "copy", "div", "eq"),
    *("exp", "expand_dims", "ge", "gt", "integer_pow", "le", "logistic", "lt", "max"),
    *("min", "mul", "ne", "neg", "not", "or", "reshape", "rsqrt", "select_n", "sqrt"),
    *("square", "squeeze", "sub", "tanh", "transpose"),
}

# A part of the program: maps the scale to scaled gradients.
Backward = Callable[[jax.Array], list[jax.Array]]


def check_transform(transform: Callable[..., Any], is_own: bool) -> None:
    """Raises if the backward pass of a transform cannot be told from the rest.

    Args:
      transform: The argument of `minimize`.
      is_own: Whether no subclass has a `value_and_grad` of its own.
    """
    if is_own and _gradients.library_of(transform) != "flax":
        return
    raise TypeError(
        "minimize with retries repeats the backward pass alone. It can use neither the "
        "value_and_grad of a subclass (pass such a function as transform=), nor "
        "nnx.value_and_grad, which changes the model in place: make graphdef, params, "
        "rest = nnx.split(model, nnx.Param, ...), merge them in loss_fn, and return "
        "what changes as auxiliary data."
    )


def value_and_grad(
    options: Options,
    scaled: Callable[[jax.Array], tuple[Any, Any]],
    has_aux: bool,
    state: _state.LossScaleOptimizerState,
) -> tuple[Any, Any, _state.LossScaleOptimizerState]:
    """Computes gradients at the scale of the state, or at the next that is low enough.

    Args:
      options: The arguments of the optimizer.
      scaled: Maps a scale to the value of the loss function and the scaled gradients.
      has_aux: Whether the value is a loss and auxiliary data.
      state: The state before the step.

    Returns:
      The value, the unscaled gradients, and the state with a `Look` in the place of the
      rule's state.
    """
    rule, axis_name = options.loss_scale, options.axis_name
    _state.check_state(state, rule, options.retries)
    scale = _gradients.scale_of_step(rule, state)
    value, backward, unscaled = _run_forward(scaled, scale, options)
    loss = _gradients.loss_of(value, has_aux)
    loss_is_finite = all_finite(loss, axis_name=axis_name)

    def attempt(last):
        retries, old = last[0], last[1].after
        scale = lax.stop_gradient(rule.loss_scale(old))
        grads = backward(scale)
        looked = look(rule, unscaled(grads, scale), old, axis_name)
        # In jax.shard_map it varies over the devices if the scale does.
        finite = looked.finite | lax.full_like(scale, False, bool)
        looked = looked._replace(finite=finite, after=cast_like(looked.after, old))
        again = ~finite & loss_is_finite & (rule.loss_scale(looked.after) < scale)
        again &= retries < options.retries
        return retries + again.astype(jnp.int32), looked, grads, again

    # The first pass is inside the loop, too: one program, and the same bits.
    old = strongly_typed(_state.healed(rule, state.loss_scale_state))
    old = cast_like(old, strongly_typed(_state.healed(rule, rule.init())))
    no = lax.full_like(scale, False, bool)
    none_yet = lax.full_like(scale, 0, jnp.int32)
    # Not all alike: XLA would make one of them, and copies.
    shapes = jax.eval_shape(backward, scale)
    zeros = [lax.full_like(x, i) for i, x in enumerate(shapes)]
    first = none_yet, Look(scale, old, old, finite=no), zeros, ~no
    retries, looked, grads, _ = _repeat(attempt, first)

    grads = unscaled([_forward_only.bind(x) for x in grads], looked.loss_scale)
    retries += jnp.asarray(state.retries, jnp.int32)
    retries = jnp.where(retries < 0, 2**31 - 1, retries)
    return value, grads, state._replace(loss_scale_state=looked, retries=retries)


def _run_forward(
    scaled: Callable[[jax.Array], tuple[Any, Any]], scale: jax.Array, options: Options
) -> tuple[Any, Backward, Callable[[list[jax.Array], jax.Array], Any]]:
    """Runs the forward pass, which is all that does not depend on the scale.

    Returns:
      The value; the backward pass, which leaves out the end of the gradients; and a
      function of its result and of the scale, which returns the tree of unscaled
      gradients.
    """
    joins = []

    def function(scale):
        (value, join_value), (grads, join_grads) = map(split_arrays, scaled(scale))
        joins[:] = join_value, join_grads
        return value, grads

    program, (value, _) = jax.make_jaxpr(function, return_shape=True)(scale)
    jaxpr, join_value, join_grads = program.jaxpr, *joins
    value, grads = jaxpr.outvars[: len(value)], jaxpr.outvars[len(value) :]

    forward, backward, depend = _split(jaxpr)
    if not depend.isdisjoint(_variables(value)):
        raise TypeError(
            f"retries={options.retries} repeats the backward pass alone, and finds "
            "none in this transform: its loss depends on the loss scale, as if both "
            "passes were inside one jax.jit or jax.lax.scan. Pass jax.value_and_grad, "
            "for example, and compile the training step around minimize."
        )
    _check_collectives(backward, options)
    end, born = _end_of(backward, grads)
    born, constant = (
        [x for x in born if x in depend],
        [x for x in born if x not in depend],
    )
    residuals = [x for x in _read_by(backward) if x not in depend]
    cheap, sources = _cheap_part(forward, residuals)

    run_end = _function(jaxpr, [*born, *constant], end, grads)
    run_backward = _function(jaxpr, [*jaxpr.invars, *residuals], backward, born)
    recompute = _function(jaxpr, sources, cheap, residuals)
    parts = value, constant, residuals, sources
    outputs = [x for part in parts for x in part]
    found = iter(_function(jaxpr, jaxpr.constvars, forward, outputs)(*program.consts))
    value, constants, stored, kept = ([next(found) for _ in part] for part in parts)

    def backward_pass(scale):
        inputs = stored
        if is_recording():
            inputs = lax.platform_dependent(
                cpu=lambda: stored,
                default=lambda: recompute(*[_pin(x, scale) for x in kept]),
            )
        return strongly_typed(run_backward(scale, *inputs))

    def unscaled(grads, scale):
        grads = run_end(*grads, *constants)
        return join_grads([scale_down(x, scale) if is_inexact(x) else x for x in grads])

    return join_value(value), backward_pass, unscaled


def _variables(atoms: Iterable[Any]) -> list[Var]:
    return [x for x in atoms if isinstance(x, Var)]


def _read_by(equations: list[JaxprEqn]) -> dict[Var, None]:
    """Returns the variables that equations read, each once."""
    return dict.fromkeys(_variables(x for e in equations for x in e.invars))


def _function(
    jaxpr: Jaxpr, inputs: list[Var], equations: list[JaxprEqn], outputs: list[Any]
) -> Callable[..., list[jax.Array]]:
    """Returns a part of a program as a function."""
    part = jaxpr.replace(constvars=[], invars=inputs, outvars=outputs, eqns=equations)
    return jaxpr_as_fun(ClosedJaxpr(part, ()))


def _split(jaxpr: Jaxpr) -> tuple[list[JaxprEqn], list[JaxprEqn], set[Var]]:
    """Returns the forward and the backward pass, and what depends on the scale."""
    forward, backward, depend = [], [], set(jaxpr.invars)
    for equation in jaxpr.eqns:
        # A callback without operands runs in the pass in which it is written.
        is_callback = bool(backward) and not equation.outvars
        if depend.isdisjoint(_variables(equation.invars)) and not is_callback:
            forward.append(equation)
        else:
            backward.append(equation)
            depend.update(equation.outvars)
    return forward, backward, depend


def _end_of(
    backward: list[JaxprEqn], grads: list[Any]
) -> tuple[list[JaxprEqn], dict[Var, None]]:
    """Returns casts to wider dtypes at the end of gradients, and what they cast.

    They are left to those who read the gradients: XLA fuses them there.
    """
    end, born = [], dict.fromkeys(_variables(grads))
    for equation in reversed(backward):
        if equation.primitive.name == "convert_element_type":
            (old,), (new,) = equation.invars, equation.outvars
            if new in born and old.aval.dtype.itemsize < new.aval.dtype.itemsize:
                end.insert(0, equation)
                born[old] = born.pop(new)
    return end, born


def _cheap_part(
    forward: list[JaxprEqn], residuals: list[Var]
) -> tuple[list[JaxprEqn], list[Var]]:
    """Returns what computes the residuals again cheaply, and from which variables.

    Without a loop, XLA would do so by itself, and store less.
    """
    cheap, sources = [], dict.fromkeys(residuals)
    for equation in reversed(forward):
        if _is_cheap(equation) and not sources.keys().isdisjoint(equation.outvars):
            cheap.insert(0, equation)
            sources |= _read_by([equation])
    made = {x for equation in cheap for x in equation.outvars}
    return cheap, [x for x in sources if x not in made]


def _is_cheap(equation: JaxprEqn) -> bool:
    if equation.primitive.name in ("jit", "pjit", "custom_jvp_call"):
        part = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
        return all(map(_is_cheap, part.eqns))
    return equation.primitive.name in CHEAP


def _pin(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns `x`; keeps XLA from computing what follows from it before the loop."""
    pinned, _ = lax.optimization_barrier((x, scale))
    # In jax.shard_map it might vary over more devices then.
    return pinned if jax.typeof(pinned) == jax.typeof(x) else x


def _check_collectives(backward: list[JaxprEqn], options: Options) -> None:
    names = options.axis_name
    names = names if isinstance(names, tuple) else (names,)
    for effect in {x for equation in backward for x in equation.effects}:
        axis = getattr(effect, "name", None)
        if type(effect).__name__ == "NamedAxisEffect" and axis not in names:
            raise ValueError(
                f"With retries={options.retries}, axis_name must contain "
                f"{axis!r}, got axis_name={options.axis_name!r}: the backward "
                "pass communicates along that axis, and a device that repeats it alone "
                "would wait for the others forever."
            )


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
        "A step with retries has no reverse-mode derivative: it repeats the backward "
        "pass as often as it must. Use forward mode (jax.jvp, jax.jacfwd), or an "
        "optimizer without retries."
    )


# The identity, with derivatives in forward mode only.
_forward_only = Primitive("forward_only")
_forward_only.def_impl(lambda x: x)
_forward_only.def_abstract_eval(lambda x: x)
batching.defvectorized(_forward_only)
mlir.register_lowering(_forward_only, lambda _, x: [x])
ad.deflinear2(_forward_only, _refuse)
