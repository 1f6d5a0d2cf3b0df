"""After an overflow the pass runs again at a lower scale, so that no batch is lost."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr, Var, jaxpr_as_fun

from optax_lossscale import _gradients, _state, _tree
from optax_lossscale._commit import is_recording
from optax_lossscale._jaxprs import parts, primitives
from optax_lossscale._jaxprs.primitives import Trait
from optax_lossscale._modules import Modules
from optax_lossscale._scaling import all_finite
from optax_lossscale._step import Look, Options, look

HALF = jnp.dtype(jnp.float16), jnp.dtype(jnp.bfloat16)


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

    The first pass is the ordinary one. The loop after it ends at once, unless gradients
    overflow: it repeats the whole pass.

    Args:
      options: The arguments of the optimizer.
      loss_fn: The loss function.
      has_aux: Whether it returns a loss and auxiliary data.
      transform: `jax.value_and_grad`, or a function like it.
      state: The state before the step.
      *args: The arguments of `loss_fn`, first the parameters.
      **kwargs: More of them.

    Returns:
      The value of the first pass, the unscaled gradients, the state with the number of
      retries, and the look at the gradients. If no retry saved the step, it is the
      first look: the rule then goes on as without retries.
    """
    rule, axis_name = options.loss_scale, options.axis_name
    _state.check_state(state, rule, options.retries)
    scaled = _gradients.scaled_grad(rule, loss_fn, has_aux, transform)
    scale = _gradients.scale_of_step(rule, state)
    joins = []

    def is_traced(x):  # Other results are constants, and stay as they are.
        return isinstance(x, Tracer)

    def one_pass(scale):
        (args, kwargs), changes = modules.join(modules.tree)
        value, grads = scaled(scale, *args, **kwargs)
        value, join_value = _tree.split_arrays((value, changes()), is_traced)
        grads, join_grads = _tree.split_arrays(grads)
        joins[:] = join_value, join_grads
        return value, grads

    def run(scale, constants):
        results = jaxpr_as_fun(ClosedJaxpr(jaxpr, constants))(scale)
        # The check and the step read the same arrays, whatever XLA fuses.
        grads = map(lax.optimization_barrier, _tree.strongly_typed(results[n:]))
        return list(map(jnp.asarray, results[:n])), list(grads)  # No literals.

    def unscaled(grads, scale):
        return _gradients.unscale_by(join_grads(grads), scale)

    def judge(grads, old, scale, retries):
        looked = look(rule, unscaled(grads, scale), old, axis_name)
        # In jax.shard_map it varies over the devices if the scale does.
        finite = looked.finite | lax.full_like(scale, False, bool)
        looked = looked._replace(
            finite=finite, after=_tree.cast_like(looked.after, old)
        )
        again = ~finite & loss_is_finite & (rule(looked.after) < scale)
        return looked, again & (retries < options.retries)

    def attempt(last):
        retries, looked, _, _ = last
        scale = lax.stop_gradient(rule(looked.after))
        _, grads = run(scale, [_pin(x, scale) for x in program.consts])
        retries += 1
        looked, again = judge(grads, looked.after, scale, retries)
        return retries, looked, grads, again

    with Modules((args, kwargs)) as modules:
        # The loss is traced once: the same program runs before the loop and in it.
        program, (value, _) = jax.make_jaxpr(one_pass, return_shape=True)(scale)
        jaxpr, n, (join_value, join_grads) = program.jaxpr, len(value), joins
        _check_effects(jaxpr, options)
        born = _born(jaxpr, jaxpr.outvars[n:])
        jaxpr = jaxpr.replace(outvars=jaxpr.outvars[:n] + born)
        value, grads = run(scale, program.consts)
        value, changes = join_value(value)
        modules.write(changes)
    loss = _gradients.loss_of(value, has_aux)
    loss_is_finite = all_finite(loss, axis_name=axis_name)
    like = _state.healed(rule, rule.init())
    old = _tree.cast_like(_state.healed(rule, state.loss_scale_state), like)
    none_yet = lax.full_like(scale, 0, jnp.int32)
    first, again = judge(grads, old, scale, none_yet)
    varying = map(_gradients.varying_axes, (first.finite, scale))
    _check_axes(frozenset.difference(*varying), options)
    with jax.named_scope("retries"):  # The loop's name in a profile.
        last = none_yet, first, grads, again
        retries, looked, grads, _ = _repeat(attempt, last)
    grads = unscaled(grads, lax.stop_gradient(rule(looked.before)))
    retries += jnp.asarray(state.retries, jnp.int32)
    retries = jnp.where(retries < 0, 2**31 - 1, retries)
    looks = looked.before, looked.after
    before, after = _tree.select(looked.finite, looks, (old, first.after))
    looked = Look(before, after, looked.finite)
    return value, grads, state._replace(retries=retries), looked


def _repeat(attempt: Callable[[Any], Any], last: Any) -> Any:
    """Calls `attempt` as long as the last part of its result is True."""

    def again(last):
        return last[-1]

    def body(last):
        # Always taken. On TPU, XLA copies what a loop reads to the chip before it runs,
        # even if it ends at once; of what a branch reads it copies nothing before.
        return lax.cond(again(last), attempt, lambda last: last, last)

    if is_recording() or any(isinstance(x, Tracer) for x in jax.tree.leaves(last)):
        # JAX shows the next line in its error of a reverse-mode derivative.
        return lax.while_loop(again, body, last)  # retries: only jax.jvp, no grad
    while again(last):  # Nothing is compiled: each step would compile a loop anew.
        last = attempt(last)
    return last


def _born(jaxpr: Jaxpr, grads: Sequence[Any]) -> list[Any]:
    """Returns gradients before a last cast to float32: the loop carries half as much.

    The unscaling casts them.
    """
    born: dict[Any, Any] = {}
    equations: list[Any] = jaxpr.eqns
    for equation in equations:
        if equation.primitive.name == "convert_element_type":
            (old,), (new,) = equation.invars, equation.outvars
            if old.aval.dtype in HALF and new.aval.dtype == jnp.float32:
                born[new] = old
    return [born.get(x, x) if isinstance(x, Var) else x for x in grads]


def _check_effects(jaxpr: Jaxpr, options: Options) -> None:
    """Raises if a pass does what it must not do twice, or not on one device alone."""
    if any(type(x).__name__ in ("WriteEffect", "AccumEffect") for x in jaxpr.effects):
        raise TypeError(
            f"With retries={options.retries}, loss_fn must not write a jax.Ref of "
            "outside: each pass would write it again. Return the value as auxiliary "
            "data, make the jax.Ref inside, or use an optimizer without retries."
        )
    # The index of a device has the same effect, and needs no other device.
    exchanged: set[Any] = {
        effect
        for equation in parts.all_equations(jaxpr)
        if primitives.has(equation.primitive.name, Trait.COLLECTIVE)
        for effect in equation.effects
    }
    _check_axes({x.name for x in exchanged.intersection(jaxpr.effects)}, options)


def _check_axes(axes: Iterable[Any], options: Options) -> None:
    """Raises if devices of these axes would not retry together."""
    for axis in set(axes).difference(options.axes):
        raise ValueError(
            f"With retries={options.retries}, axis_name must contain {axis!r}, got "
            f"{options.axis_name!r}: its devices retry together. (In jax.shard_map "
            "leave check_vma=True.)"
        )


def _pin(x: Any, scale: jax.Array) -> Any:
    """Returns `x`; keeps XLA from computing what follows from it before the loop."""
    if isinstance(x, jax.Ref):
        return x
    # For jax_debug_key_reuse, a pass or a barrier uses a key up; a clone is a new one.
    clone = jax.random.clone if _tree.is_key(x) else lambda x: x
    pinned, _ = lax.optimization_barrier((clone(x), scale))
    # In jax.shard_map it might vary over more devices then.
    return clone(pinned) if jax.typeof(pinned) == jax.typeof(x) else x
