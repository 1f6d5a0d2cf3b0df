"""Retries: after an overflow, the gradients are computed again at a lower scale.

A *pass* is the forward and backward pass of a step.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr, Primitive, Var, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from optax_lossscale import _gradients, _state, _tree
from optax_lossscale._jaxprs import parts, primitives
from optax_lossscale._jaxprs.primitives import Trait
from optax_lossscale._models import Model
from optax_lossscale._scaling import all_finite
from optax_lossscale._step import Options, RuleUpdate, check_no_state, update_rule
from optax_lossscale._update import is_recording


def value_and_grad(
    options: Options,
    scaled: Callable[..., tuple[Any, Any]],
    has_aux: bool,
    state: _state.LossScaleOptimizerState,
    model: Model,
) -> tuple[Any, Any, _state.LossScaleOptimizerState, RuleUpdate | None]:
    """Computes gradients at the scale of the state, or lower ones until none overflows.

    The first pass is the ordinary one. A loop after it repeats the pass while gradients
    overflow. Without retries there is no loop.

    Args:
      options: The arguments of the optimizer.
      scaled: The function that `scaled_grad` made of the loss function.
      has_aux: Whether the loss function returns a loss and auxiliary data.
      state: The state before the step.
      model: The arguments of the loss function, first the parameters.

    Returns:
      The value of the first pass, the unscaled gradients, the state with the number of
      retries, and the rule's verdict on the gradients. Without retries the verdict is
      None. If no retry saved the step, it is the verdict on the first pass, so that the
      rule goes on as without retries.
    """
    rule, axis_name = options.loss_scale, options.axis_name
    scale = _gradients.scale_of_step(rule, state)
    check_no_state(model.args[0])
    if not options.retries:
        value, grads = scaled(scale, *model.args, **model.kwargs)
        return value, _gradients.unscale(grads, scale, options.skips), state, None
    _state.check_state(state, rule)
    with model:
        one_pass = _Pass(scaled, model, scale)
        _check_effects(one_pass.jaxpr, options)
        value, grads = one_pass(scale, one_pass.constants)
        value, changes = one_pass.value.fill(value)
        model.write_changes(changes)
    loss = _gradients.loss_of(value, has_aux)
    loss_is_finite = all_finite(loss, axis_name=axis_name)

    def judge(grads, old, scale, retries):
        verdict = update_rule(rule, one_pass.unscaled(grads, scale), old, axis_name)
        # In jax.shard_map it varies over the devices if the scale does.
        passes = verdict.passes | lax.full_like(scale, False, bool)
        verdict = verdict._replace(
            passes=passes, after=_tree.cast_like(verdict.after, old)
        )
        again = ~passes & loss_is_finite & (rule(verdict.after) < scale)
        return verdict, again & (retries < options.retries)

    def attempt(last):
        retries, verdict, _, _ = last
        scale = lax.stop_gradient(rule(verdict.after))
        _, grads = one_pass(scale, [_pin(x, scale) for x in one_pass.constants])
        retries += 1
        verdict, again = judge(grads, verdict.after, scale, retries)
        return retries, verdict, grads, again

    like = _state.within_bounds(rule, rule.init())
    old = _state.within_bounds(rule, state.loss_scale_state)
    old = _tree.cast_like(old, like)
    none_yet = lax.full_like(scale, 0, jnp.int32)
    first, again = judge(grads, old, scale, none_yet)
    varying = map(parts.varying_axes, (first.passes, scale))
    _check_axes(frozenset.difference(*varying), options)
    with jax.named_scope("retries"):  # The loop's name in a profile.
        last = none_yet, first, grads, again
        retries, verdict, grads, _ = _repeat(attempt, last)
    grads = list(map(_retried.bind, grads))
    grads = one_pass.unscaled(grads, lax.stop_gradient(rule(verdict.before)))
    if state.retries is not None:  # None in a state from before they were switched on.
        retries += jnp.asarray(state.retries, jnp.int32)
    retries = jnp.where(retries < 0, 2**31 - 1, retries)
    before, after = _tree.select(verdict.passes, verdict[:2], (old, first.after))
    verdict = RuleUpdate(before, after, verdict.passes)
    return value, grads, state._replace(retries=retries), verdict


class _Pass:
    """A pass as a program of the scale, which is traced once and may run often.

    Attributes:
      value: The template of the first results: the value, and the changes in modules.
      jaxpr: The program.
      constants: The arrays that it closes over.
    """

    def __init__(self, scaled: Callable[..., Any], model: Model, scale: Any):
        """Traces a function of a scale and of the arguments of the loss."""
        # Results that are no tracers are constants.
        self.value = _tree.Template(lambda x: isinstance(x, Tracer))
        self._grads = _tree.Template()

        def one_pass(scale):
            (args, kwargs), changes = model.copies(model.arrays)
            value, grads = scaled(scale, *args, **kwargs)
            return self.value.take((value, changes())), self._grads.take(grads)

        closed, (value, _) = jax.make_jaxpr(one_pass, return_shape=True)(scale)
        self.constants, results = closed.consts, closed.jaxpr.outvars
        self._n = len(value)
        before = _before_cast(closed.jaxpr, results[self._n :])
        self.jaxpr = closed.jaxpr.replace(outvars=results[: self._n] + before)

    def __call__(self, scale: jax.Array, constants: Sequence[Any]) -> tuple[Any, Any]:
        """Returns the arrays of the value, and those of the scaled gradients."""
        results = jaxpr_as_fun(ClosedJaxpr(self.jaxpr, constants))(scale)
        value, grads = results[: self._n], _tree.strongly_typed(results[self._n :])
        # The check and the step read the same arrays, whatever XLA fuses.
        grads = list(map(lax.optimization_barrier, grads))
        return list(map(jnp.asarray, value)), grads  # No literals.

    def unscaled(self, grads: Sequence[jax.Array], scale: jax.Array) -> Any:
        """Returns the gradients as a tree, unscaled."""
        return _gradients.unscale(self._grads.fill(grads), scale)


def _repeat(attempt: Callable[[Any], Any], last: Any) -> Any:
    """Calls `attempt` on its own result as long as the last part of that is True."""

    def again(last):
        return last[-1]

    def body(last):
        # In a jax.vmap in jax.shard_map, JAX makes all operands of such a branch vary
        # over the devices. If the branch itself does so with an array that the devices
        # share, JAX raises "pvary is a invariant->variant collective".
        if parts.varying_axes(again(last)):
            return attempt(last)
        # Always taken. On TPU, XLA copies the operands of a loop to the chip before the
        # loop runs, even if it ends at once, but not those of a branch.
        return lax.cond(again(last), attempt, lambda last: last, last)

    if is_recording() or any(isinstance(x, Tracer) for x in jax.tree.leaves(last)):
        return lax.while_loop(again, body, last)
    while again(last):  # Nothing is compiled: each step would compile a loop anew.
        last = attempt(last)
    return last


# The identity, also in forward mode. JAX's error of a reverse-mode derivative would be
# about a loop that the user has not written.
_retried = Primitive("retried")
_retried.def_impl(lambda x: x)
_retried.def_abstract_eval(lambda x: x)
mlir.register_lowering(_retried, lambda _, x: [x])
batching.defvectorized(_retried)


@functools.partial(ad.deflinear2, _retried)
def _(*_):
    raise ValueError(
        "With retries, minimize has no reverse-mode derivative, since nobody knows how "
        "often a pass is repeated. Take jax.jvp or jax.jacfwd, or retries=0."
    )


def _before_cast(jaxpr: Jaxpr, grads: Sequence[Any]) -> list[Any]:
    """Returns the gradients before a final cast to float32, with half of the bytes.

    The loop carries them, and the unscaling casts them.
    """
    narrow: dict[Any, Any] = {}
    equations: list[Any] = jaxpr.eqns
    for equation in equations:
        if equation.primitive.name == "convert_element_type":
            (old,), (new,) = equation.invars, equation.outvars
            if _tree.is_half(old.aval.dtype) and new.aval.dtype == jnp.float32:
                narrow[new] = old
    return [narrow.get(x, x) if isinstance(x, Var) else x for x in grads]


def _check_effects(jaxpr: Jaxpr, options: Options) -> None:
    """Raises if a pass must not run twice, or not on one device alone."""
    if parts.writes_refs(jaxpr):
        raise TypeError(
            f"With retries={options.retries}, loss_fn must not write a jax.Ref of "
            "outside: each pass would write it again. Return the value as auxiliary "
            "data, or make the jax.Ref inside."
        )
    # The index of a device has the same effect, and needs no other device.
    exchanged: set[Any] = {
        axis
        for equation in parts.all_equations(jaxpr)
        if primitives.has(equation.primitive.name, Trait.COLLECTIVE)
        for axis in parts.axes_used(equation)
    }
    _check_axes(exchanged & parts.axes_used(jaxpr), options)


def _check_axes(axes: Iterable[Any], options: Options) -> None:
    """Raises unless `axis_name` contains these axes: their devices retry together."""
    for axis in set(axes).difference(options.axes):
        raise ValueError(
            f"With retries={options.retries}, axis_name must contain {axis!r}, got "
            f"{options.axis_name!r}: its devices retry together. (In jax.shard_map "
            "leave check_vma=True.)"
        )


def _pin(x: Any, scale: jax.Array) -> Any:
    """Returns `x`, and keeps XLA from moving computations with it out of the loop."""
    if isinstance(x, jax.Ref):
        return x
    # jax_debug_key_reuse counts a key as used after a pass or a barrier: pass clones.
    clone = jax.random.clone if _tree.is_key(x) else lambda x: x
    pinned, _ = lax.optimization_barrier((clone(x), scale))
    # In jax.shard_map the pinned value may vary over more axes than x: then keep x.
    return clone(pinned) if jax.typeof(pinned) == jax.typeof(x) else x
