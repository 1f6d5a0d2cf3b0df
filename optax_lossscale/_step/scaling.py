"""The half of the optimizer that only reads its state: scaling and unscaling."""

import functools
import warnings
from collections.abc import Callable, Hashable
from typing import Any

import jax
from jax import lax
from jax.core import Tracer

from optax_lossscale._numerics import scale_down, scale_up
from optax_lossscale._rules.base import LossScale
from optax_lossscale._rules.fixed import FixedLossScale
from optax_lossscale._step.mask import Mask, choose, hashable
from optax_lossscale._step.scaler import (
    check_one_each,
    check_rule_state,
    check_scales,
    initial_scales,
)
from optax_lossscale._step.skip import Skip, barrier_on_cpu, choose_skip, is_recording
from optax_lossscale._step.state import (
    find_state,
    initial_state,
    unbox,
    warn_if_in_multi_steps,
)
from optax_lossscale._tree import is_inexact


class LossScaling:
    """Scales losses and unscales gradients by the scale in an optimizer's state."""

    _inner_optimizer: Any
    _loss_scale: LossScale
    _axis_name: Hashable | None
    _skip: Skip
    _check_loss: bool
    _check_updates: bool
    _track_leaves: bool
    _num_losses: int | None
    _mask: Mask

    @property
    def _options(self) -> dict[str, Any]:
        names = (
            "axis_name",
            "skip",
            "check_loss",
            "check_updates",
            "track_leaves",
            "num_losses",
            "mask",
        )
        return {name: getattr(self, f"_{name}") for name in names}

    def _key(self):
        options = {**self._options, "mask": hashable(self._mask)}
        return self._inner_optimizer, self._loss_scale, *options.values()

    def __eq__(self, other):
        return isinstance(other, LossScaling) and self._key() == other._key()

    def __ne__(self, other):
        return not self == other

    def __hash__(self):
        return hash(self._key())

    def __reduce__(self):
        # Copies of the tuple's functions would still call the original.
        make = functools.partial(type(self), **self._options)
        return make, (self._inner_optimizer, self._loss_scale)

    def __repr__(self):
        shown = {
            "inner_optimizer": self._inner_optimizer,
            "loss_scale": self._loss_scale,
            **self._options,
        }
        options = ", ".join(f"{name}={value!r}" for name, value in shown.items())
        return f"{type(self).__name__}({options})"

    @property
    def inner_optimizer(self) -> Any:
        """The optimizer that this one wraps."""
        return self._inner_optimizer

    @property
    def _effective_skip(self) -> Skip | None:
        checks = (self._loss_scale.skip_nonfinite, self._check_loss)
        if self._check_updates:
            # The updates decide, so they have to be there first.
            return "where"
        if not any(checks):
            return None
        return choose_skip(self._skip, self._axis_name)

    @property
    def loss_scale(self) -> LossScale:
        """The loss scale: hyperparameters and rule, not the current number."""
        return self._loss_scale

    @property
    def dynamic(self) -> bool:
        """Whether the scale adapts by itself."""
        return not isinstance(self._loss_scale, FixedLossScale)

    @property
    def initial_scale(self) -> float | None:
        """The first scale, or the only one; None if a custom rule names none."""
        if isinstance(self._loss_scale, FixedLossScale):
            return self._loss_scale.loss_scale_value
        return getattr(self._loss_scale, "initial_scale", None)

    @property
    def dynamic_growth_steps(self) -> int | None:
        """Finite steps before the scale grows; None where it does not."""
        return getattr(self._loss_scale, "growth_interval", None)

    def dynamic_counter(self, state: Any) -> jax.Array | None:
        """Returns the finite steps since the scale changed or a step was skipped.

        Args:
          state: A pytree that holds one `LossScaleOptimizerState`.

        Returns:
          i32[], or None where the scale is fixed, or the rule counts no steps.

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

    def current_loss_scale(self, state: Any) -> jax.Array:
        """Returns the current loss scale.

        Args:
          state: A pytree that holds one `LossScaleOptimizerState`.

        Returns:
          f32[].

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
        return self._loss_scale.loss_scale(self._rule_state(state))

    @functools.cached_property
    def _expected_state(self):
        """The shapes of a state, without those of the inner optimizer."""

        def make():
            scales = initial_scales(self._loss_scale, self._num_losses)
            return initial_state(None, scales)

        return jax.eval_shape(make)

    def _rule_state(self, state):
        found = find_state(state).loss_scale_state
        check_rule_state(found, self._expected_state.loss_scale_state)
        return found

    def _numbers(self, state: Any) -> jax.Array:
        """Returns the scale, or those of several losses, as the state holds them."""
        return check_scales(self._num_losses, unbox(self._rule_state(state).loss_scale))

    def _scales(self, state: Any) -> jax.Array:
        """Returns the scale, or those of several losses, to compute with."""
        number = self._numbers(state)
        if self.dynamic and not isinstance(number, Tracer) and is_recording():
            # Python shows a warning once for each place, which is here.
            warnings.warn(
                "The loss scale is a constant in a function that JAX traces. If that "
                "function is compiled once and called in every step, the scale will "
                "never change there. Make the state an argument of the function, and "
                "call value_and_grad and get_scaled_loss inside the training step, "
                "not once, before the loop.",
                UserWarning,
                stacklevel=1,
            )
        # The scale cancels: it has no derivative.
        return lax.stop_gradient(self.current_loss_scale(state))

    def value_and_grad(
        self,
        fun: Callable[..., Any],
        state: Any,
        argnums: int | tuple[int, ...] = 0,
        has_aux: bool = False,
        *,
        transform: Callable[..., Any] = jax.value_and_grad,
    ) -> Callable[..., Any]:
        """Makes a function of the value and the unscaled gradients of `fun`.

        Call this inside the training step, with the current state: a function made
        once before the loop keeps the scale of the state it was given, and a lower
        scale never reaches the gradients. (A state that changes in place, as that of
        `nnx.Optimizer` does, is read at each call.)

        Args:
          fun: Returns a real scalar loss, or the loss and auxiliary data where
            `has_aux`. With `num_losses` it is called once for each loss, and must
            change nothing (as a model of Flax nnx would its batch statistics).
          state: A pytree that holds one `LossScaleOptimizerState`.
          argnums: Which positional arguments to differentiate with respect to.
          has_aux: Whether `fun` returns auxiliary data as well.
          transform: What differentiates: `jax.value_and_grad`,
            `eqx.filter_value_and_grad` or `nnx.value_and_grad`. It must return the
            value with the gradients, so `jax.grad` does not serve.

        Returns:
          A function that is called as `fun` is, and returns what
          `jax.value_and_grad(fun)` would: the value is what `fun` returned, exact
          even when the scaled loss overflows; float16 and bfloat16 gradients
          come back as float32.

        Raises:
          ValueError: If `state` holds none or several of these states, or that of
            another rule.
          TypeError: When called, if the loss is not a real scalar, or if `transform`
            returns no value.

        Warns:
          UserWarning: If the scale of `state` is a constant in a function that JAX
            traces (`jax.jit`, `jax.lax.scan`).

        Examples:
          >>> import jax
          >>> import jax.numpy as jnp
          >>> import optax
          >>> from optax_lossscale import LossScaleOptimizer
          >>> optimizer = LossScaleOptimizer(optax.sgd(0.1))
          >>> state = optimizer.init(jnp.float16(0.0))
          >>> tiny = lambda x: x * jnp.float16(1e-4) * jnp.float16(1e-4)
          >>> print(jax.grad(tiny)(jnp.float16(1.0)))
          0.0
          >>> value, grad = optimizer.value_and_grad(tiny, state)(jnp.float16(1.0))
          >>> print(f"{grad:.2g}")
          1e-08
        """
        self._numbers(state)  # Raises early.
        n = self._num_losses

        def value_and_grad_of(index, scales):
            def scaled(*args, **kwargs):
                out = fun(*args, **kwargs)
                loss = _loss_of(out, has_aux, n)
                # The loss itself is passed along: the scaled one may be inf.
                if n is None:
                    return scale_up(loss, scales), _Out(out)
                return scale_up(loss[index], scales[index]), _Out(out)

            # eqx.filter_value_and_grad has no argnums, and is about the first alone.
            options = {} if argnums == 0 else {"argnums": argnums}
            return transform(scaled, has_aux=True, **options)

        def value_and_grad(*args, **kwargs):
            # Read once: scaling and unscaling must agree, and a state may change in
            # place.
            scales = self._scales(state)
            warn_if_in_multi_steps(state)
            # A forward pass for each loss, which are the same: jit runs one for all.
            indices = [None] if n is None else range(n)
            found = [value_and_grad_of(i, scales)(*args, **kwargs) for i in indices]
            values, grads = zip(*map(_check_transformed, found), strict=True)
            grads = grads[0] if n is None else list(grads)
            return values[0], self._unscale(grads, scales)

        return value_and_grad

    def get_scaled_loss(self, loss: Any, state: Any) -> Any:
        """Multiplies a loss by the current scale.

        You need it only where you compute gradients by hand, together with
        `get_unscaled_gradients`. Call both inside the training step, with the same,
        current state: a function made once before the loop keeps the first scale.

        Args:
          loss: An array or Python number, or a function that returns one alone.
          state: A pytree that holds one `LossScaleOptimizerState`.

        Returns:
          The scaled loss, or a function that returns it. float16 and bfloat16
          losses come back as float32, so that the scaled value itself cannot
          overflow; float64 stays float64. (Reduce the loss in float32: the
          gradient with respect to a float16 loss is the scale in float16, which is
          inf from 2**16 on.)

        Raises:
          ValueError: If `state` holds none or several of these states, or that of
            another rule.
          TypeError: If the loss is no array or number.

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
        if callable(loss):
            return lambda *args, **kwargs: self.get_scaled_loss(
                loss(*args, **kwargs), state
            )
        scales = self._scales(state)
        if self._num_losses is None:
            return _scaled(loss, scales)
        losses = check_one_each("the loss", self._num_losses, loss)
        return [_scaled(loss, scales[i]) for i, loss in enumerate(losses)]

    def get_unscaled_gradients(self, grads: Any, state: Any) -> Any:
        """Divides gradients by the current scale.

        Args:
          grads: Gradients of a scaled loss, any pytree.
          state: A pytree that holds one `LossScaleOptimizerState`.

        Returns:
          The unscaled gradients. float16 and bfloat16 leaves come back as float32,
          as in half precision they would underflow again; float32, float64 and
          complex leaves keep their dtype; None, integer and float0 leaves are
          untouched. Division is by the reciprocal, exact for powers of two.

        Raises:
          ValueError: If `state` holds none or several of these states, or that of
            another rule.

        Warns:
          UserWarning: If the scale of `state` is a constant in a function that JAX
            traces (`jax.jit`, `jax.lax.scan`).

        Examples:
          >>> import jax.numpy as jnp
          >>> import optax
          >>> from optax_lossscale import LossScaleOptimizer
          >>> optimizer = LossScaleOptimizer(optax.sgd(0.1), loss_scale=2)
          >>> state = optimizer.init(jnp.ones(3))
          >>> grads = [jnp.float16(4), None, jnp.float16(-8)]
          >>> optimizer.get_unscaled_gradients(grads, state)
          [Array(2., dtype=float32), None, Array(-4., dtype=float32)]
        """
        warn_if_in_multi_steps(state)
        return self._unscale(grads, self._scales(state))

    def _unscale(self, grads, scales):
        grads = barrier_on_cpu(self._effective_skip, grads)
        if self._num_losses is None:
            return self._unscale_one(grads, scales)
        trees = check_one_each("grads", self._num_losses, grads)
        return [self._unscale_one(tree, scales[i]) for i, tree in enumerate(trees)]

    def _unscale_one(self, grads, scale):
        def unscaled(x):
            return scale_down(x, scale) if is_inexact(x) else x

        return choose(self._mask, jax.tree.map(unscaled, grads), grads)


@jax.tree_util.register_pytree_node_class
class _Out:
    """What the user's function returned, among what a transform returns."""

    def __init__(self, value):
        self.value = value

    def tree_flatten(self):
        return (self.value,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def _check_transformed(result: Any) -> tuple[Any, Any]:
    """Returns the value and the gradients, if a transform returned both."""
    try:
        (_, out), grads = result
        if isinstance(out, _Out):
            return out.value, grads
    except (TypeError, ValueError):
        pass
    raise TypeError(
        "transform must return the value with the gradients, as jax.value_and_grad, "
        "eqx.filter_value_and_grad and nnx.value_and_grad do; jax.grad and the like "
        "return gradients alone."
    )


def _loss_of(out: Any, has_aux: bool, num_losses: int | None) -> Any:
    """Returns the loss, or the losses, among what a function returned."""
    is_pair = isinstance(out, tuple | list) and len(out) == 2
    loss = out[0] if has_aux and is_pair else out
    losses = [loss]
    if num_losses is not None:
        losses = check_one_each("the loss", num_losses, loss)
    if (has_aux and not is_pair) or not all(map(is_inexact, losses)):
        wanted = "a loss and auxiliary data" if has_aux else "a loss alone"
        raise TypeError(
            f"With has_aux={has_aux} the function must return {wanted}, the "
            f"loss a floating-point scalar, got {_types(out)}."
        )
    return loss


def _scaled(loss: Any, scale: jax.Array) -> jax.Array:
    if isinstance(loss, tuple | list | dict) or loss is None:
        raise TypeError(
            f"The loss must be an array or a number, got {_types(loss)}. For auxiliary "
            "data use value_and_grad."
        )
    return scale_up(loss, scale)


def _types(tree: Any) -> Any:
    """Returns a tree with the types of its leaves, for messages."""

    def describe(leaf):
        return jax.typeof(leaf) if hasattr(leaf, "dtype") else type(leaf).__name__

    return jax.tree.map(describe, tree)
