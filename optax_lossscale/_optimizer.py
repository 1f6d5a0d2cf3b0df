"""The public optimizer: documents its methods, which call the other files."""

import abc
import contextlib
import functools
import inspect
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, Concatenate, overload

import jax
import optax

from optax_lossscale import (
    _check,
    _devices,
    _gradients,
    _retries,
    _step,
    _uses,
)
from optax_lossscale._inner import as_parameters, check_optimizer
from optax_lossscale._models import Model
from optax_lossscale._rules import identifiers
from optax_lossscale._rules.base import LossScale
from optax_lossscale._rules.fixed import FixedLossScale
from optax_lossscale._scaling import all_finite
from optax_lossscale._state import (
    LossScaleOptimizerState,
    StateTree,
    find_rule_state,
    find_state,
)
from optax_lossscale._step import Options
from optax_lossscale._tree import Args, Out, Tree, unbox
from optax_lossscale._uses import Use

# A subclass must not override these: `minimize` does not call the others.
STEP = ("init", "update", "value_and_grad", "apply_gradients", "minimize")


class _Meta(abc.ABCMeta):
    """Makes an optimizer, and then freezes it, as Equinox does with its modules."""

    if not TYPE_CHECKING:  # The types of the arguments are those of `__new__`.

        def __call__(cls, *args, **kwargs):
            taken = cls.__signature__.parameters
            if not any(x.kind == x.VAR_KEYWORD for x in taken.values()):
                unknown = {k: x for k, x in kwargs.items() if k not in taken}
                identifiers.check_keywords(unknown)
            self = super().__call__(*args, **kwargs)
            vars(self)["_is_frozen"] = True
            return self

    @property
    def __signature__(cls) -> inspect.Signature:
        made = inspect.signature(cls.__new__)
        return made.replace(parameters=[*made.parameters.values()][1:])


class LossScaleOptimizer(optax.GradientTransformationExtraArgs, metaclass=_Meta):
    """Wraps an optimizer with loss scaling, for training in float16.

    `minimize` takes a whole training step. `value_and_grad` and `update` are its two
    halves, for use wherever Optax, Flax or Equinox take an optimizer.

    The loss is multiplied by a scale, so that float16 gradients neither underflow
    nor overflow; the gradients are divided by it in float32. A step whose
    gradients are not finite is skipped: parameters and inner state stay exactly
    as they were.

    Put it outside of a chain, `LossScaleOptimizer(optax.chain(...))`: `optax.clip`
    before the check would turn an inf into a finite number, and the step would be
    applied.

    The attributes of an optimizer, or of a subclass, never change, because compiled
    functions hold their values. Make a new optimizer, and pass it the state.

    You can differentiate through a step, as in MAML: derivatives are those of the step
    without loss scaling. Through a skipped step they may be nan: wrap the outer
    optimizer as well, and it skips its step. With `retries` there are only forward-mode
    derivatives.

    Args:
      inner_optimizer: The optimizer to wrap: a `GradientTransformation`, or an object
        with methods `init` and `update` (`optax.MultiSteps`).
      loss_scale: A `LossScale`, a number (fixed), or a name that `get_loss_scale`
        knows. The default is made from the next three arguments.
      dynamic: Whether the scale adapts by itself.
      initial_scale: The first scale, 2**15 by default; the fixed scale if not
        `dynamic`.
      dynamic_growth_steps: Finite steps before the scale doubles, 2000 by default.
      axis_name: A name, or tuple of names, of mapped axes (`jax.pmap`,
        `jax.shard_map`). All devices of these axes skip together. Gradients are
        not reduced: reduce them before the update, as without loss scaling.
      check_loss: Whether to skip a step also if its loss is not finite. The scale then
        stays as it is, because a lower one does not help, and `nonfinite_loss_steps`
        counts the step. `update` and `apply_gradients` need the loss as `value=`.
      retries: How often `minimize` may repeat the forward and backward pass of a step
        after an overflow, at a lower scale, so that the batch is not lost: 24 retries
        bring a scale from 2**24 to 1. The step is still skipped if all retries are used
        up, if its loss is not finite, or if the rule keeps the scale. The other methods
        repeat nothing, and warn.

    Raises:
      ValueError: If `loss_scale` comes with `dynamic`, `initial_scale` or
        `dynamic_growth_steps`, or `dynamic=False` with `dynamic_growth_steps` or
        without `initial_scale`; if an argument is out of its range.
      TypeError: If an argument is of the wrong type.

    Examples:
      The whole step in one call, which is also the fastest way:

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

      In two calls, as with any optimizer:

      >>> loss, grads = optimizer.value_and_grad(loss_fn, opt_state)(params)
      >>> updates, opt_state = optimizer.update(grads, opt_state, params)
      >>> params = optax.apply_updates(params, updates)
      >>> print(params, loss)
      0.25 0.25

      After a non-finite gradient parameters do not change, and the scale backs off:

      >>> nan = jnp.array(jnp.nan)
      >>> params, opt_state = optimizer.apply_gradients(nan, params, opt_state)
      >>> print(params, optimizer.current_loss_scale(opt_state))
      0.25 16384.0

    References:
      `tf.keras.mixed_precision.LossScaleOptimizer`, TensorFlow 2.4.
    """

    _options: Options

    def __new__(
        cls,
        inner_optimizer: optax.GradientTransformation | Any,
        loss_scale: LossScale | float | identifiers.RuleName | None = None,
        *,
        dynamic: bool = True,
        initial_scale: float | None = None,
        dynamic_growth_steps: int | None = None,
        axis_name: Hashable | None = None,
        check_loss: bool = False,
        retries: int | None = None,  # optax.inject_hyperparams would make 0 an array.
    ):
        keras = (dynamic, initial_scale, dynamic_growth_steps)
        if loss_scale is None:
            rule = identifiers.keras_loss_scale(*keras)
        elif keras == (True, None, None):
            rule = identifiers.get_loss_scale(loss_scale)
        else:
            raise ValueError(
                "Pass either loss_scale or (dynamic, initial_scale, "
                f"dynamic_growth_steps), not both, got {loss_scale!r} and {keras!r}. A "
                "rule has a first scale of its own: HeadroomLossScale(2.0**15)."
            )
        self = _without_attributes(cls)
        self._options = Options(
            inner_optimizer=inner_optimizer,
            loss_scale=rule,
            axis_name=axis_name,
            check_loss=_check.boolean("check_loss", check_loss),
            retries=0 if retries is None else _check.count("retries", retries, least=0),
        )
        check_optimizer(inner_optimizer)
        return self

    # Subclasses may have attributes of their own. They never change, as compiled
    # functions hold their values. Optimizers are equal if all of their attributes are
    # equal, and jax.jit compiles a program for each that differs.

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        for name in STEP:
            if getattr(cls, name) is not getattr(LossScaleOptimizer, name):
                raise TypeError(
                    f"{cls.__name__} must not override {name}: a step is computed as a "
                    "whole, and would not call it. Wrap the inner optimizer, or "
                    "subclass LossScale. Other methods and attributes are yours."
                )

    def __setattr__(self, name, value):
        self._check_frozen(name)
        super().__setattr__(name, value)

    def __delattr__(self, name):
        self._check_frozen(name)
        super().__delattr__(name)

    def _check_frozen(self, name):
        if vars(self).get("_is_frozen"):
            raise AttributeError(
                f"{name} of a {type(self).__name__} cannot change: compiled functions "
                "would keep the old value. Make a new optimizer, and pass it the state."
            )

    def _replace(self, **kwargs):  # pyright: ignore[reportIncompatibleMethodOverride]
        raise TypeError(
            f"A {type(self).__name__} has no functions to replace: its methods belong "
            "together. Make a new one, or write optax.GradientTransformationExtraArgs("
            "optimizer.init, your_update)."
        )

    @classmethod
    def _make(cls, iterable):  # pyright: ignore[reportIncompatibleMethodOverride]
        name = cls.__name__
        raise TypeError(
            f"Write {name}(inner_optimizer): {name}._make has no loss scale."
        )

    def __eq__(self, other):
        try:
            return type(self) is type(other) and bool(vars(self) == vars(other))
        except ValueError:  # Arrays among the attributes.
            return False

    def __ne__(self, other):
        return not self == other

    def __hash__(self):
        return hash((type(self), self._options))

    def __repr__(self):
        return repr(self._options).replace("Options", type(self).__name__, 1)

    def __reduce__(self):
        # Copies of the tuple's functions would still call the original.
        return _without_attributes, (type(self),), vars(self)

    def init(  # pyright: ignore[reportIncompatibleVariableOverride]
        self, params: Any
    ) -> LossScaleOptimizerState:
        """Initializes the inner optimizer and the loss scale.

        Args:
          params: The parameters: any pytree, or a model of any library. Of a Flax nnx
            model, its `nnx.Param` count; for a part of them, pass
            `nnx.state(model, filter)`. Leaves without a gradient, such as functions in
            an Equinox model, are left out.

        Returns:
          The state. Its arrays are strongly typed. For float16 and bfloat16 parameters
          the inner optimizer's arrays are float32.

        Raises:
          TypeError: If the inner optimizer scales losses itself; if the parameters hold
            the state of an optimizer, as a `TrainState` does, or no array and no
            number, as a module of Flax linen.

        Warns:
          UserWarning: If the parameters hold a float32 scalar named "loss_scale", as
            for `scale_as_parameter`.
        """
        return _step.init(self._options, params)

    @_check.by_position("loss_fn", "params", "state")
    def minimize(
        self,
        loss_fn: Callable[Concatenate[Tree, ...], Out],
        params: Tree,
        state: LossScaleOptimizerState,
        /,
        *args: Any,
        has_aux: bool = False,
        transform: Callable[..., Any] | None = None,
        skip_if: Callable[[Out, Any], Any] | jax.Array | bool | None = None,
        **kwargs: Any,
    ) -> tuple[Tree, LossScaleOptimizerState, Out]:
        """Takes one whole training step: loss, gradients, update.

        Call it inside your compiled step. Under `jax.pmap` use `value_and_grad` and
        `apply_gradients` instead, and average the gradients in between.

        A line search works (`optax.lbfgs`): the inner optimizer gets the extra
        arguments `value` (the loss), `grad` and `value_fn`.

        Args:
          loss_fn: Called with `params`, `*args` and `**kwargs`; returns a real
            scalar loss, or the loss and auxiliary data if `has_aux`.
          params: The parameters: any pytree, or a model of any library. Leaves without
            a gradient, such as integers and functions, stay as they are. A Flax nnx
            model changes in place, with its batch statistics.
          state: The state, as `init(params)` returns it.
          *args: Passed to `loss_fn`.
          has_aux: Whether `loss_fn` returns auxiliary data as well.
          transform: As in `value_and_grad`.
          skip_if: A function that decides whether to skip the step, or a flag as in
            `update`. The function is called once, as `skip_if(out, grads)`, with the
            result of `loss_fn` and the unscaled gradients, and returns bool[].
          **kwargs: Passed to `loss_fn`. If it has a keyword `has_aux`, `transform` or
            `skip_if` itself, bind that with `functools.partial`.

        Returns:
          The new parameters, the new state, and the result of `loss_fn`.

        Raises:
          ValueError: If `state` is not a `LossScaleOptimizerState`; if `transform`
            differentiates with respect to other arguments; with `retries`, if devices
            communicate along an axis that `axis_name` does not name, and for a
            reverse-mode derivative.
          TypeError: If the loss is not a real scalar; if `params` hold no
            floating-point number, or the state of an optimizer; if `transform` returns
            no value; if `skip_if` does not return a bool; if the inner state came back
            in half precision; with `retries`, if `loss_fn` writes a `jax.Ref` from
            outside.

        Warns:
          UserWarning: If the scale of `state` is a constant in a function that JAX
            traces (`jax.jit`, `jax.lax.scan`); if devices of `jax.shard_map` have
            losses of their own, and the same parameters; if each device of `jax.pmap`
            or `shard_map(check_vma=False)` keeps its own gradients; if the loss does
            not depend on `params`.

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

          With `retries` an overflow costs no batch. The first scale is 2**24, and 2**13
          does not overflow:

          >>> optimizer = LossScaleOptimizer(
          ...     optax.sgd(0.25), initial_scale=2.0**24, retries=24
          ... )
          >>> params = jnp.float16(2.0)
          >>> state = optimizer.init(params)
          >>> loss_fn = lambda x: (x * x).astype(jnp.float32)
          >>> params, state, loss = optimizer.minimize(loss_fn, params, state)
          >>> print(params, state.retries, state.skipped_steps)
          1.0 11 0
        """
        options, rule = self._options, self.loss_scale
        _gradients.check_argnums(transform)
        _devices.check_averaging(options.axes, transform)
        scaled = _gradients.scaled_grad(rule, loss_fn, has_aux, transform)
        model = Model((params, *args), kwargs)
        model.remember()
        value, grads, state, verdict = _retries.value_and_grad(
            options, scaled, has_aux, state, model
        )
        # From here on nothing may change `grads`: with `retries`, `verdict` is what the
        # rule said of them.
        old = model.parameters(grads)

        def value_fn(proposed):
            copy = model.with_parameters(as_parameters(proposed, old))
            out: Any = loss_fn(copy, *args, **kwargs)
            return out[0] if has_aux else out

        loss = value[0] if has_aux else value
        # A pytree, as some inner optimizers pass it through jax.jit or jax.lax.cond.
        extra = {"value": loss, "value_fn": jax.tree_util.Partial(value_fn)}
        if callable(skip_if):
            skip_if = _step.as_veto(skip_if(value, grads))
        new, state = _step.take_step(
            options, grads, old, state, extra, skip_if, verdict, returns_params=True
        )
        may_skip = options.skips or skip_if is not None
        is_applied = state.last_step_applied if may_skip else None
        return model.write(new, is_applied), state, value

    def value_and_grad(
        self,
        fun: Callable[Args, Out],
        state: StateTree,
        argnums: int | tuple[int, ...] = 0,
        has_aux: bool = False,
        *,
        transform: Callable[..., Any] | None = None,
    ) -> Callable[Args, tuple[Out, Any]]:
        """Makes a function that returns the value and unscaled gradients of `fun`.

        Write `loss, grads = optimizer.value_and_grad(fun, state)(params, x)` inside the
        training step, with the current state. A function that you make before the loop
        keeps the first scale.

        Args:
          fun: Returns a real scalar loss, or the loss and auxiliary data if `has_aux`.
          state: A pytree that holds one `LossScaleOptimizerState`.
          argnums: Which positional arguments to differentiate with respect to.
          has_aux: Whether `fun` returns auxiliary data as well.
          transform: Your own function in place of `jax.value_and_grad`, for example one
            that averages gradients over devices. It must return the value with the
            gradients, which `jax.grad` does not. By default Flax differentiates nnx
            models, with respect to `nnx.Param`, and JAX everything else.

        Returns:
          A function with the arguments of `fun` and the results of
          `jax.value_and_grad(fun)`. The value is not scaled, and exact even if the
          scaled loss overflows. float16 and bfloat16 gradients become float32. The
          gradients of an nnx model are an `nnx.State`. Leaves that are not
          floating-point have the gradient None, and so do Python numbers in an Equinox
          model: `apply_gradients` and `eqx.apply_updates` take None, but
          `optax.apply_updates` does not. If gradients are not finite, variables that
          `fun` changes in Flax nnx modules, such as batch statistics, keep their old
          values; random counts advance.

        Raises:
          ValueError: If `state` holds no `LossScaleOptimizerState` or several, or the
            state of another rule.
          TypeError: If `fun` is no function, or `argnums` are no integers; when called,
            if the loss is not a real scalar, if an argument to differentiate holds no
            floating-point number, or if `transform` returns no value.

        Warns:
          UserWarning: If the scale of `state` is a constant in a function that JAX
            traces (`jax.jit`, `jax.lax.scan`); if devices of `jax.shard_map` have
            losses of their own, and the same parameters; if each device decides alone
            whether variables of a model keep their old values; if the loss does not
            depend on the arguments to differentiate; with `retries`.

        Examples:
          >>> import jax
          >>> import jax.numpy as jnp
          >>> import optax
          >>> from optax_lossscale import LossScaleOptimizer, autocast
          >>> optimizer = LossScaleOptimizer(optax.sgd(0.1))
          >>> x, w = jnp.ones(2), jnp.full((2, 2), 5e-5)
          >>> state = optimizer.init(x)
          >>> tiny = autocast(lambda x: jnp.sum(x @ w @ w))
          >>> print(jax.grad(tiny)(x)[0])
          0.0
          >>> value, grads = optimizer.value_and_grad(tiny, state)(x)
          >>> print(f"{grads[0]:.2g}")
          1e-08
        """
        self._options.warn_of_retries("value_and_grad")
        options, rule = self._options, self.loss_scale
        scaled = _gradients.scaled_grad(rule, fun, has_aux, transform, argnums)
        find_rule_state(state, rule)  # Raises early.

        def value_and_grad(*args, **kwargs):
            model = Model(args, kwargs)
            model.remember()
            # Read once: a state may change in place.
            scale = _gradients.scale_of_step(rule, state)
            value, grads = scaled(scale, *args, **kwargs)
            grads = _gradients.unscale(grads, scale, options.skips)
            changed = model.changed()
            if changed and rule.skip_nonfinite:
                finite = all_finite(grads, axis_name=options.axis_name)
                model.restore(changed, finite)
                _devices.warn_of_local_decision(options.axes, transform)
            return value, grads

        return value_and_grad

    def update(  # pyright: ignore[reportIncompatibleVariableOverride]
        self,
        updates: Any,
        state: LossScaleOptimizerState,
        params: Any = None,
        *,
        skip_if: jax.typing.ArrayLike | None = None,
        **extra_args: Any,
    ) -> tuple[Any, LossScaleOptimizerState]:
        """Transforms gradients and advances the loss scale, or skips the step.

        The inner optimizer computes in at least float32, even if parameters or
        gradients are narrower.

        Args:
          updates: Unscaled gradients, as `value_and_grad` and
            `get_unscaled_gradients` return them. None stands for a missing gradient;
            pass `params` then.
          state: The state.
          params: The parameters or the model, if the inner optimizer needs them.
          skip_if: bool[] or bool, whether to skip this step for a reason of your own: a
            loss that is an outlier, or a step that another optimizer skips. With
            `axis_name`, all devices skip if one does. The loss scale follows the
            gradients as always: it does not back off if they are finite.
          **extra_args: For the inner optimizer. `check_loss` needs `value`, the loss.

        Returns:
          The updates and the new state. Updates have the dtypes of the gradients
          (`value_and_grad` returns float32), and are None where a gradient is None. If
          the step is skipped, the updates are -0.0, because adding -0.0 changes no
          parameter, and `inner_state` is bitwise unchanged. (On CPU, XLA flushes
          subnormal numbers to zero in any addition; `apply_gradients` and `minimize`
          keep them.)

        Raises:
          ValueError: If `state` is not a `LossScaleOptimizerState`.
          TypeError: If `skip_if` is not a bool; with `check_loss`, if `value` is
            missing or not a real scalar; if the inner state came back in half
            precision, and `init` makes it in float32.

        Warns:
          UserWarning: If nothing in this process has read the scale of an equal rule:
            then the loss was not scaled; if the loss comes from `get_scaled_loss`, and
            nothing has unscaled gradients; with `retries`, because only `minimize`
            repeats a step.
        """
        self._options.warn_of_retries("update")
        _uses.warn_of_unscaled(self.loss_scale)
        params = Model((params,)).parameters(updates)
        return _step.take_step(
            self._options,
            updates,
            params,
            state,
            extra_args,
            skip_if,
            returns_params=False,
        )

    def apply_gradients(
        self,
        grads: Any,
        params: Tree,
        state: LossScaleOptimizerState,
        *,
        skip_if: jax.typing.ArrayLike | None = None,
        **extra_args: Any,
    ) -> tuple[Tree, LossScaleOptimizerState]:
        """Updates parameters with unscaled gradients, or skips the step.

        Like `update` with `optax.apply_updates`, but a skipped step adds nothing.

        Args:
          grads: Unscaled gradients, as `value_and_grad` and
            `get_unscaled_gradients` return them. Parameters whose gradient is None
            stay as they are.
          params: The parameters or the model. A Flax nnx model changes in place.
          state: The state.
          skip_if: As in `update`.
          **extra_args: For the inner optimizer. `check_loss` needs `value`, the loss.

        Returns:
          The new parameters, with unchanged dtypes, and the new state.

        Raises:
          ValueError: If `state` is not a `LossScaleOptimizerState`.
          TypeError: If `skip_if` is not a bool; with `check_loss`, if `value` is
            missing or not a real scalar; if the inner state came back in half
            precision, and `init` makes it in float32.

        Warns:
          UserWarning: If nothing in this process has read the scale of an equal rule:
            then the loss was not scaled; if the loss comes from `get_scaled_loss`, and
            nothing has unscaled gradients; with `retries`, because only `minimize`
            repeats a step.

        Examples:
          >>> import jax.numpy as jnp
          >>> import optax
          >>> from flax import nnx
          >>> from optax_lossscale import LossScaleOptimizer, autocast
          >>> optimizer = LossScaleOptimizer(optax.sgd(0.1))
          >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
          >>> state = optimizer.init(model)
          >>> loss_fn = autocast(lambda model, x: jnp.mean(model(x) ** 2))
          >>> loss, grads = optimizer.value_and_grad(loss_fn, state)(
          ...     model, jnp.ones((4, 2))
          ... )
          >>> model, state = optimizer.apply_gradients(grads, model, state)
          >>> print(state.skipped_steps)
          0
        """
        self._options.warn_of_retries("apply_gradients")
        _uses.warn_of_unscaled(self.loss_scale)
        model = Model((params,))
        old = model.parameters(grads)
        new, state = _step.take_step(
            self._options, grads, old, state, extra_args, skip_if, returns_params=True
        )
        return model.write(new), state

    def current_loss_scale(self, state: StateTree) -> jax.Array:
        """Returns the current loss scale.

        Args:
          state: A pytree that holds one `LossScaleOptimizerState`.

        Returns:
          f32[], or f32[n] for a state of n members.

        Raises:
          ValueError: If `state` holds none or several.

        Examples:
          >>> import jax.numpy as jnp
          >>> import optax
          >>> from optax_lossscale import LossScaleOptimizer
          >>> optimizer = LossScaleOptimizer(optax.sgd(0.1))
          >>> float(optimizer.current_loss_scale(optimizer.init(jnp.ones(3))))
          32768.0
        """
        _uses.note(self.loss_scale, Use.READ)
        return self.loss_scale(find_rule_state(state, self.loss_scale))

    @overload
    def get_scaled_loss(
        self, loss: Callable[Args, Any], state: StateTree
    ) -> Callable[Args, jax.Array]: ...
    @overload
    def get_scaled_loss(
        self, loss: jax.typing.ArrayLike, state: StateTree
    ) -> jax.Array: ...
    def get_scaled_loss(self, loss: Any, state: StateTree) -> Any:
        """Multiplies a loss by the current scale, to compute gradients by hand.

        Divide them by `get_unscaled_gradients` afterwards. Call both inside the
        training step, with the same, current state. A function that you make before
        the loop keeps the first scale.

        Args:
          loss: An array or Python number, or a function that returns one and nothing
            else.
          state: A pytree that holds one `LossScaleOptimizerState`.

        Returns:
          The scaled loss, or a function that returns it. float16 and bfloat16
          losses become float32, so that the scaled value itself cannot overflow;
          float64 stays float64. (Reduce the loss in float32: the gradient with
          respect to a float16 loss is the scale in float16, which is inf from 2**16
          on.)

        Raises:
          ValueError: If `state` holds no `LossScaleOptimizerState` or several, or the
            state of another rule.
          TypeError: If the loss is not an array or number.

        Warns:
          UserWarning: If the scale of `state` is a constant in a function that JAX
            traces (`jax.jit`, `jax.lax.scan`).

        Examples:
          >>> import jax
          >>> import jax.numpy as jnp
          >>> import optax
          >>> from optax_lossscale import LossScaleOptimizer
          >>> optimizer = LossScaleOptimizer(optax.sgd(0.25))
          >>> params = jnp.array(0.5)
          >>> state = optimizer.init(params)
          >>> loss_fn = lambda params: params**2
          >>> print(optimizer.get_scaled_loss(loss_fn(params), state))
          8192.0
          >>> scaled = jax.grad(optimizer.get_scaled_loss(loss_fn, state))(params)
          >>> print(scaled, optimizer.get_unscaled_gradients(scaled, state))
          32768.0 1.0
        """
        return _gradients.scale_loss(self.loss_scale, loss, state)

    def get_unscaled_gradients(self, grads: Tree, state: StateTree) -> Tree:
        """Divides gradients by the current scale.

        Args:
          grads: Gradients of a scaled loss, any pytree.
          state: A pytree that holds one `LossScaleOptimizerState`.

        Returns:
          The unscaled gradients. float16 and bfloat16 leaves become float32, because
          in half precision they would underflow again; float32, float64 and complex
          leaves keep their dtype; None, integer and float0 leaves are unchanged.
          Dividing multiplies by the reciprocal, which is exact for powers of two.

        Raises:
          ValueError: If `state` holds no `LossScaleOptimizerState` or several, or the
            state of another rule.

        Warns:
          UserWarning: If nothing in this process has scaled a loss by an equal rule, or
            only `value_and_grad`, whose gradients are unscaled already; if the scale of
            `state` is a constant in a function that JAX traces (`jax.jit`,
            `jax.lax.scan`).

        Examples:
          >>> import jax
          >>> import jax.numpy as jnp
          >>> import optax
          >>> from optax_lossscale import LossScaleOptimizer
          >>> optimizer = LossScaleOptimizer(optax.sgd(0.1), loss_scale=2)
          >>> params = {"w": jnp.float16(4)}
          >>> state = optimizer.init(params)
          >>> loss_fn = lambda params: jnp.float32(params["w"]) ** 2
          >>> grads = jax.grad(optimizer.get_scaled_loss(loss_fn, state))(params)
          >>> print(grads, optimizer.get_unscaled_gradients(grads, state))
          {'w': Array(16., dtype=float16)} {'w': Array(8., dtype=float32)}
        """
        _uses.warn_of_unscaled_twice(self.loss_scale)
        _uses.note(self.loss_scale, Use.UNSCALE)
        scale = _gradients.scale_of_step(self.loss_scale, state)
        return _gradients.unscale(grads, scale, self._options.skips)

    @property
    def inner_optimizer(self) -> Any:
        """The optimizer that this one wraps."""
        return self._options.inner_optimizer

    @property
    def loss_scale(self) -> LossScale:
        """The rule with its hyperparameters, not the current scale."""
        return self._options.loss_scale

    @property
    def dynamic(self) -> bool:
        """Whether the scale adapts by itself."""
        return not isinstance(self.loss_scale, FixedLossScale)

    @property
    def initial_scale(self) -> float | None:
        """The first (or fixed) scale; None if a custom rule does not name it."""
        fixed = getattr(self.loss_scale, "loss_scale_value", None)
        return getattr(self.loss_scale, "initial_scale", fixed)

    @property
    def dynamic_growth_steps(self) -> int | None:
        """Finite steps before the scale grows; None if it does not."""
        return getattr(self.loss_scale, "growth_interval", None)

    def dynamic_counter(self, state: StateTree) -> jax.Array | None:
        """Returns the finite steps since the scale changed or a step was skipped.

        Args:
          state: A pytree that holds one `LossScaleOptimizerState`.

        Returns:
          i32[], or None if the scale is fixed or the rule counts no steps.

        Raises:
          ValueError: If `state` holds none or several.

        Examples:
          >>> import jax.numpy as jnp
          >>> import optax
          >>> from optax_lossscale import LossScaleOptimizer
          >>> optimizer = LossScaleOptimizer(optax.sgd(0.1))
          >>> int(optimizer.dynamic_counter(optimizer.init(jnp.ones(3))))
          0
        """
        good_steps = getattr(find_state(state).loss_scale_state, "good_steps", None)
        return None if good_steps is None else unbox(good_steps)


def _without_attributes(cls: type[LossScaleOptimizer]) -> LossScaleOptimizer:
    """Returns an optimizer without attributes, whose functions call its methods."""
    # Optax unpacks this tuple. It holds plain functions, because methods cannot be
    # bound before the object exists.
    functions = (
        lambda params: self.init(params),
        lambda *args, **kwargs: self.update(*args, **kwargs),
    )
    self = tuple.__new__(cls, functions)
    _register(cls)
    return self


@functools.cache
def _register(cls: type[LossScaleOptimizer]) -> None:
    """Makes optimizers pytrees without leaves, unless the author of a class has.

    jit, eqx.filter_jit and tree functions then take one as a constant argument.
    """
    with contextlib.suppress(ValueError):  # It is registered.
        jax.tree_util.register_static(cls)
