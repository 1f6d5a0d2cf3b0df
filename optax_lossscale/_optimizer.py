"""The public optimizer: options, init, update, apply_gradients, minimize."""

from collections.abc import Callable, Hashable
from typing import Any, get_args

import jax
import optax

from optax_lossscale._check import check_bool
from optax_lossscale._rules.base import LossScale
from optax_lossscale._rules.identifiers import get_loss_scale, keras_loss_scale
from optax_lossscale._step.inner import (
    accepts,
    as_parameters,
    check_no_loss_scale,
    check_optimizer,
    combine,
    in_float32,
    without_constants,
)
from optax_lossscale._step.leaf_statistics import initial_leaves
from optax_lossscale._step.mask import (
    Mask,
    check_mask,
    check_params,
    complete,
    expand,
    masked,
)
from optax_lossscale._step.scaler import (
    check_num_losses,
    initial_scales,
    total,
    total_loss,
)
from optax_lossscale._step.skip import Skip
from optax_lossscale._step.state import (
    LossScaleOptimizerState,
    find_states,
    initial_state,
)
from optax_lossscale._step.step import Stepping
from optax_lossscale._tree import strongly_typed


class LossScaleOptimizer(Stepping, optax.GradientTransformationExtraArgs):
    """Wraps an optimizer with loss scaling.

    The loss is multiplied by a scale, so that float16 gradients neither underflow
    nor overflow; the gradients are divided by it in float32. A step whose
    gradients are not finite is skipped: parameters and inner state stay exactly
    as they were.

    It is an `optax.GradientTransformationExtraArgs`, and goes wherever Optax, Flax
    or Equinox take one. In a chain put it outermost: `optax.clip` before the check
    turns an inf into a finite number, and the step is applied.

    Args:
      inner_optimizer: A `GradientTransformation`, or an object with methods `init`
        and `update` (`optax.MultiSteps`).
      loss_scale: A `LossScale`, a number (fixed), or a name that `get_loss_scale`
        knows. The default is made of the next three.
      dynamic: Whether the scale adapts by itself.
      initial_scale: The first scale, 2**15 by default; without `dynamic`, the scale.
      dynamic_growth_steps: Finite steps before the scale doubles, 2000 by default.
      axis_name: A name, or tuple of names, of mapped axes (`jax.pmap`,
        `jax.shard_map`). All devices of these axes skip together. Gradients are
        not reduced: reduce them before the update, as without loss scaling.
      skip: How a step is skipped. "where" computes it and selects the old values;
        "cond" branches; "auto" is "cond" where the program is compiled for CPU and
        "where" on GPU and TPU. Where nothing is traced all three select.
      check_loss: Whether a step is also skipped because its loss is not finite. The
        scale does not act on the loss, so it then stays as it is, whatever the
        gradients are, and `nonfinite_loss_steps` counts the step. `update` and
        `apply_gradients` need the loss as `value=`; `minimize` has it.
      check_updates: Whether a step is also skipped because the updates of the inner
        optimizer are not finite though the gradients are, as where it takes gradients
        of its own (`optax.contrib.sam` in opaque mode). The scale then backs off. Each
        step is computed and then selected, whatever `skip` is, which moves several
        times the memory.
      track_leaves: Whether the state records which gradients were inf or nan, in
        `leaf_statistics`. `diagnostics.nonfinite_leaves` names them. With
        several losses it describes the sum of their gradients.
      num_losses: Where there are several losses, how many. Each gets a scale of its
        own, by the same rule, and is checked by itself: functions return a tuple of
        losses, and gradients are a list of trees, one for each loss, which the step
        adds up. It is skipped if those of any loss are not finite.
      mask: Which leaves are gradients, as in `optax.masked`: a tree of bools, a
        prefix of the parameters, or a function that makes one of parameters or
        gradients. Where it is False the "gradient" is the new value of the
        parameter, as Flax's float8 layers deliver. It is not unscaled, not
        checked and not seen by the inner optimizer. `minimize` and
        `apply_gradients` put it in place, and keep the old value on a skip;
        `update` returns one or the other in place of an update.

    Raises:
      ValueError: If `loss_scale` comes with `dynamic`, `initial_scale` or
        `dynamic_growth_steps`, or `dynamic=False` without `initial_scale` or with
        `dynamic_growth_steps`; if an argument is out of its range.
      TypeError: If an argument is of the wrong type, or `inner_optimizer` is a
        `LossScaleOptimizer`.

    Examples:
      The whole step, which is also the fastest form:

      >>> import jax.numpy as jnp
      >>> import optax
      >>> from optax_lossscale import LossScaleOptimizer
      >>> optimizer = LossScaleOptimizer(optax.sgd(0.25))
      >>> params = jnp.array(1.0)
      >>> opt_state = optimizer.init(params)
      >>> loss_fn = lambda params: params**2
      >>> params, opt_state, loss = optimizer.minimize(loss_fn, params, opt_state)
      >>> print(params, loss)
      0.5 1.0

      In two halves, as with any optimizer:

      >>> loss, grads = optimizer.value_and_grad(loss_fn, opt_state)(params)
      >>> updates, opt_state = optimizer.update(grads, opt_state, params)
      >>> params = optax.apply_updates(params, updates)
      >>> print(params, loss)
      0.25 0.25

      A non-finite gradient: nothing moves, and the scale backs off.

      >>> nan = jnp.array(jnp.nan)
      >>> params, opt_state = optimizer.apply_gradients(nan, params, opt_state)
      >>> print(params, optimizer.current_loss_scale(opt_state))
      0.25 16384.0

    References:
      `tf.keras.mixed_precision.LossScaleOptimizer`, TensorFlow 2.4.
    """

    def __new__(
        cls,
        inner_optimizer: optax.GradientTransformation | Any,
        loss_scale: LossScale | float | str | None = None,
        *,
        dynamic: bool = True,
        initial_scale: float | None = None,
        dynamic_growth_steps: int | None = None,
        axis_name: Hashable | None = None,
        skip: Skip = "auto",
        check_loss: bool = False,
        check_updates: bool = False,
        track_leaves: bool = False,
        num_losses: int | None = None,
        mask: Mask = None,
    ):
        keras = (dynamic, initial_scale, dynamic_growth_steps)
        if loss_scale is None:
            chosen = keras_loss_scale(*keras)
        elif keras == (True, None, None):
            chosen = get_loss_scale(loss_scale)
        else:
            raise ValueError(
                "Give either loss_scale or dynamic, initial_scale and "
                f"dynamic_growth_steps, not both: got {loss_scale!r}, and {keras!r}."
            )
        if isinstance(inner_optimizer, LossScaleOptimizer):
            raise TypeError(
                "inner_optimizer is a LossScaleOptimizer already, and scaling twice is "
                "a bug. Pass its inner_optimizer."
            )
        if skip not in get_args(Skip):
            raise ValueError(f'skip must be "auto", "where" or "cond", got {skip!r}.')
        if not isinstance(axis_name, Hashable):
            raise TypeError(
                f"axis_name must be a name or a tuple of names, got {axis_name!r}."
            )
        inner = in_float32(check_optimizer("inner_optimizer", inner_optimizer))
        # The tuple that Optax unpacks holds plain functions: methods cannot be
        # bound before there is an object to bind them to.
        self = super().__new__(
            cls,
            lambda params: self.init(params),
            lambda *args, **kwargs: self.update(*args, **kwargs),
        )
        self._inner_optimizer = inner_optimizer
        self._inner = masked(inner, mask)
        self._loss_scale = chosen
        self._axis_name = axis_name
        self._skip = skip
        self._check_loss = check_bool("check_loss", check_loss)
        self._check_updates = check_bool("check_updates", check_updates)
        self._track_leaves = check_bool("track_leaves", track_leaves)
        self._num_losses = check_num_losses(num_losses, mask)
        self._mask = check_mask(mask)
        return self

    def init(  # pyright: ignore[reportIncompatibleVariableOverride]
        self, params: Any
    ) -> LossScaleOptimizerState:
        """Initializes the inner optimizer and the loss scale.

        Args:
          params: The parameters, any pytree. Leaves that are no numbers, as the
            functions in a model of Equinox, are left out.

        Returns:
          The state. Its arrays are strongly typed; those that the inner optimizer makes
          like float16 and bfloat16 parameters are float32.

        Raises:
          TypeError: If the inner optimizer scales losses itself; if a function that is
            the mask returns anything but True and False.
          ValueError: If the mask is no prefix of `params`; if a hyperparameter of the
            inner optimizer (`optax.inject_hyperparams`) is named `loss_scale`.
        """
        params = without_constants(params)
        if jax.tree.leaves(params):
            # optax.tree_map_params passes what has none, and fits no mask.
            expand(self._mask, params)
        inner_state = strongly_typed(self._inner.init(params))
        check_no_loss_scale(inner_state)
        if find_states(inner_state):
            raise TypeError(
                "inner_optimizer holds a LossScaleOptimizer, and scaling twice is a "
                "bug. Keep the outermost one."
            )
        loss_scale_state = initial_scales(self._loss_scale, self._num_losses)
        state = initial_state(inner_state, loss_scale_state)
        if not self._track_leaves:
            return state
        return state._replace(leaf_statistics=initial_leaves(params))

    def update(  # pyright: ignore[reportIncompatibleVariableOverride]
        self,
        updates: Any,
        state: LossScaleOptimizerState,
        params: Any = None,
        **extra_args: Any,
    ) -> tuple[Any, LossScaleOptimizerState]:
        """Transforms gradients and advances the loss scale, or skips the step.

        The inner optimizer computes in at least float32, also where parameters or
        gradients are narrower.

        Args:
          updates: Unscaled gradients, as `value_and_grad` and
            `get_unscaled_gradients` return them. None stands for parameters that have
            none; pass `params` then.
          state: The state.
          params: The parameters, where the inner optimizer wants them.
          **extra_args: For the inner optimizer. `check_loss` needs `value`, the loss.

        Returns:
          The updates: float32 for float16 and bfloat16 parameters, None where a
          gradient is None, and on a skip -0.0, which added to a parameter leaves it as
          it is. (On CPU, XLA makes subnormal numbers zero in any addition.
          `apply_gradients` and `minimize` keep them.) And the new state, in which a
          skip leaves `inner_state` bitwise unchanged.

        Raises:
          ValueError: If `state` is not a `LossScaleOptimizerState`.
          TypeError: If `value`, with `check_loss`, is missing or no real scalar.
        """
        check_params(self._mask, params)
        return self._step(updates, state, params, extra_args, applies=False)

    def apply_gradients(
        self,
        grads: Any,
        params: Any,
        state: LossScaleOptimizerState,
        **extra_args: Any,
    ) -> tuple[Any, LossScaleOptimizerState]:
        """Updates parameters with unscaled gradients, or skips the step.

        As `update` and `optax.apply_updates`, without zero updates on a skip.

        Args:
          grads: Unscaled gradients, as `value_and_grad` and
            `get_unscaled_gradients` return them. None stands for parameters that have
            none, which stay as they are.
          params: The parameters.
          state: The state.
          **extra_args: For the inner optimizer. `check_loss` needs `value`, the loss.

        Returns:
          The new parameters, of unchanged dtypes, and the new state.

        Raises:
          ValueError: If `state` is not a `LossScaleOptimizerState`.
          TypeError: If `value`, with `check_loss`, is missing or no real scalar.
        """
        return self._step(grads, state, params, extra_args, applies=True)

    def minimize(
        self,
        loss_fn: Callable[..., Any],
        params: Any,
        state: LossScaleOptimizerState,
        /,
        *args: Any,
        has_aux: bool = False,
        transform: Callable[..., Any] = jax.value_and_grad,
        **kwargs: Any,
    ) -> tuple[Any, LossScaleOptimizerState, Any]:
        """Takes one whole training step: loss, gradients, update.

        Gradients cannot be reduced over devices in between: under `jax.pmap` take
        `value_and_grad` and `apply_gradients`.

        The inner optimizer gets those of the extra arguments `value`, `grad` and
        `value_fn` that it takes, as line searches and `optax.polyak_sgd` do.

        Args:
          loss_fn: Called with `params`, `*args` and `**kwargs`; returns a real
            scalar loss, or the loss and auxiliary data where `has_aux`.
          params: The parameters. Leaves that `transform` does not differentiate, as the
            functions in a model of Equinox, stay as they are.
          state: The state.
          *args: Passed to `loss_fn`.
          has_aux: Whether `loss_fn` returns auxiliary data as well.
          transform: What differentiates, as in `value_and_grad`:
            `eqx.filter_value_and_grad` for a model of Equinox.
          **kwargs: Passed to `loss_fn`.

        Returns:
          The new parameters, the new state, and what `loss_fn` returned.

        Raises:
          ValueError: If `state` is not a `LossScaleOptimizerState`.
          TypeError: If the loss is not a real scalar, or if `transform` returns no
            value.

        Warns:
          UserWarning: If the scale of `state` is a constant in a function that JAX
            traces (`jax.jit`, `jax.lax.scan`).

        Examples:
          >>> import jax
          >>> import jax.numpy as jnp
          >>> import optax
          >>> from optax_lossscale import LossScaleOptimizer
          >>> optimizer = LossScaleOptimizer(optax.sgd(0.25))
          >>> @jax.jit
          ... def train_step(params, state, x):
          ...     loss_fn = lambda params, x: jnp.sum((params * x) ** 2)
          ...     return optimizer.minimize(loss_fn, params, state, x)
          >>> params, x = jnp.array([1.0, 1.0]), jnp.array([1.0, 0.5])
          >>> params, state, loss = train_step(params, optimizer.init(params), x)
          >>> print(params, loss)
          [0.5   0.875] 1.25
        """
        # Unscaled once, for check and step: the unscaling is fused with the end of the
        # gradient. Unscaling again in the step was slower (CPU).
        value, grads = self.value_and_grad(
            loss_fn, state, has_aux=has_aux, transform=transform
        )(params, *args, **kwargs)
        grad = total(self._num_losses, grads)

        def value_fn(proposed):
            proposed = complete(self._mask, proposed, params)
            proposed = combine(grad, proposed, params)
            value = loss_fn(as_parameters(proposed, params), *args, **kwargs)
            return total_loss(self._num_losses, value[0] if has_aux else value)

        loss = total_loss(self._num_losses, value[0] if has_aux else value)
        extra = {"value": loss, "grad": grad, "value_fn": value_fn}
        taken = {k: v for k, v in extra.items() if accepts(self._inner.update, k)}
        if self._check_loss:
            taken["value"] = loss
        return *self.apply_gradients(grads, params, state, **taken), value


# Without leaves, so that jit, eqx.filter_jit and tree functions take an optimizer
# among their arguments as the constant that it is.
jax.tree_util.register_static(LossScaleOptimizer)
