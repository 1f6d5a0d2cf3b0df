"""What is refused, in words that say what to do; and what was refused without need."""

import functools
import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx, serialization
from flax.training.train_state import TrainState
from helpers import every_wrap, relaxed

from optax_lossscale import (
    DynamicLossScale,
    FixedLossScale,
    LossScaleOptimizer,
    TolerantLossScale,
    all_finite,
    scale_as_parameter,
    select_applied,
)

PARAMS = {"w": np.float32([1, 1])}
GRADS = {"w": np.float32([1, 1])}
optimizer = LossScaleOptimizer(optax.sgd(0.5))
state: Any = None


@pytest.fixture(autouse=True, scope="module")
def initialize():
    global state
    state = optimizer.init(PARAMS)


def loss_fn(params):
    return jnp.sum(params["w"] ** 2)


@pytest.mark.parametrize(
    "transform",
    [
        jax.grad,
        eqx.filter_grad,
        nnx.grad,
        # As jax.grad of two arguments: a pair of pairs.
        lambda f, has_aux: lambda p: ((p, p), f(p)),
    ],
)
def test_a_transform_that_returns_no_value(transform):
    for call in (
        lambda: optimizer.value_and_grad(loss_fn, state, transform=transform)(PARAMS),
        lambda: optimizer.minimize(loss_fn, PARAMS, state, transform=transform),
    ):
        with pytest.raises(TypeError, match="transform must return the value with"):
            call()


@pytest.mark.parametrize("argnums", [(0, 1), [0], 1, nnx.DiffState(1, nnx.Param)])
@pytest.mark.parametrize("retries", [0, 3])
def test_a_transform_of_other_arguments(argnums, retries):
    optimizer = LossScaleOptimizer(optax.sgd(0.5), retries=retries)
    transform = functools.partial(jax.value_and_grad, argnums=argnums)
    with pytest.raises(ValueError, match=r"first argument of loss_fn.*as one tree"):
        optimizer.minimize(
            lambda p, q: loss_fn(p) + loss_fn(q),
            PARAMS,
            optimizer.init(PARAMS),
            PARAMS,
            transform=transform,
        )


class Linear(nnx.Module):
    def __init__(self):
        self.kernel = nnx.Param(jnp.ones(2))

    def __call__(self, x):
        return x @ self.kernel[...]


def test_a_model_of_nnx_with_the_transform_of_jax():
    def model_loss_fn(model):
        return jnp.sum(model(jnp.ones(2)))

    with pytest.raises(TypeError, match=r"an nnx.State, got Linear.*without transform"):
        optimizer.minimize(model_loss_fn, Linear(), state, transform=jax.value_and_grad)


def test_arguments_without_a_floating_point_array():
    params = {"order": np.arange(3), "f": jnp.tanh}
    with pytest.raises(TypeError, match=r"^Argument 0 of loss_fn .* got {'f': 'Pjit"):
        optimizer.minimize(lambda params: jnp.ones(()), params, state)


def test_arguments_in_another_order():
    for call in (
        lambda: optimizer.minimize(PARAMS, loss_fn, state),
        lambda: optimizer.value_and_grad(state, loss_fn),
    ):
        with pytest.raises(TypeError, match="loss_fn must be a function, got"):
            call()
    order = (
        r"minimize\(loss_fn, params, state, \*batch\), value_and_grad\(loss_fn, state\)"
    )
    for call in (
        lambda: optimizer.minimize(loss_fn, state, PARAMS),
        lambda: optimizer.value_and_grad(loss_fn, PARAMS),
        lambda: optimizer.update(GRADS, PARAMS, state),
        lambda: optimizer.apply_gradients(GRADS, state, PARAMS),
    ):
        with pytest.raises((TypeError, ValueError), match=order):
            call()


class TestArgumentsByName:
    def test_of_minimize(self):
        for call in (
            lambda: optimizer.minimize(loss_fn, params=PARAMS, state=state),
            lambda: optimizer.minimize(loss_fn, PARAMS, state=state),
            lambda: optimizer.minimize(loss_fn, PARAMS),
            lambda: optimizer.minimize(),
        ):
            with pytest.raises(
                TypeError,
                match=r"^minimize takes loss_fn, params, state by position, got \d .* "
                r"Write minimize\(loss_fn, params, state, \*batch\)",
            ):
                call()

    def test_of_value_and_grad(self):
        with pytest.raises(TypeError, match=r"Pass the parameters by position"):
            optimizer.value_and_grad(loss_fn, state)(params=PARAMS)

    def test_the_loss_may_have_such_a_keyword(self):
        def with_state(params, *, state, params_ema=None):
            return loss_fn(params) * state

        *_, loss = optimizer.minimize(with_state, PARAMS, state, state=2.0)
        assert loss == 2 * loss_fn(PARAMS)


class TestArgumentsOfARule:
    @pytest.mark.parametrize(
        ("kwargs", "written"),
        [
            ({"growth_interval": 100}, "DynamicLossScale(growth_interval=100)"),
            ({"init_scale": 2.0**16}, "initial_scale=65536.0"),
            (
                {"init_scale": 8.0, "backoff_factor": 0.25},
                "DynamicLossScale(initial_scale=8.0, backoff_factor=0.25)",
            ),
            ({"skip_nonfinite": True}, "FixedLossScale(skip_nonfinite=True)"),
            ({"release_steps": 9}, "HeadroomLossScale(release_steps=9)"),
        ],
    )
    def test_belong_to_the_rule(self, kwargs, written):
        with pytest.raises(TypeError, match=re.escape(f"(inner, {written})")):
            LossScaleOptimizer(optax.sgd(0.5), **kwargs)

    def test_or_to_nobody(self):
        with pytest.raises(TypeError, match="unexpected keyword argument 'frequency'"):
            LossScaleOptimizer(optax.sgd(0.5), frequency=3)

    def test_a_subclass_may_have_them(self):
        class Mine(LossScaleOptimizer):
            def __new__(cls, growth_interval):
                rule = DynamicLossScale(growth_interval=growth_interval)
                return super().__new__(cls, optax.sgd(0.5), rule)

        assert Mine(growth_interval=7).dynamic_growth_steps == 7


class TestALossThatIsNoScalar:
    @pytest.mark.parametrize("retries", [0, 3])
    @pytest.mark.parametrize("transform", [None, jax.value_and_grad])
    def test_says_what_to_write(self, transform, retries):
        optimizer = LossScaleOptimizer(optax.sgd(0.5), retries=retries)
        start = optimizer.init(PARAMS)

        def vector(params):
            return params["w"] ** 2

        with pytest.raises(
            TypeError, match=r"got float32\[2\]\. Write return jnp.mean"
        ):
            optimizer.minimize(vector, PARAMS, start, transform=transform)

    def test_is_the_business_of_a_transform_of_the_user(self):
        def per_example(fun, has_aux):
            def value_and_grad(params):
                value, pullback, out = jax.vjp(fun, params, has_aux=True)
                return (value, out), pullback(jnp.ones_like(value))[0]

            return value_and_grad

        new, *_ = optimizer.minimize(
            lambda params: params["w"] ** 2, PARAMS, state, transform=per_example
        )
        assert new["w"].tolist() == [0, 0]


class Linen(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(1)(x)


class TestWhatIsNoParameters:
    @pytest.mark.parametrize("retries", [0, 3])
    def test_a_train_state(self, retries):
        optimizer = LossScaleOptimizer(optax.sgd(0.5), retries=retries)
        whole = TrainState.create(apply_fn=None, params=PARAMS, tx=optimizer)
        words = "Pass the parameters alone, as train_state.params"
        with pytest.raises(TypeError, match=words):
            optimizer.minimize(loss_fn, whole, whole.opt_state)
        with pytest.raises(TypeError, match="not subscriptable") as caught:
            LossScaleOptimizer(optax.sgd(0.5)).value_and_grad(loss_fn, whole)(whole)
        assert any(words in note for note in caught.value.__notes__)

    def test_a_module_of_linen(self):
        for call in (
            lambda: optimizer.init(Linen()),
            lambda: optimizer.minimize(lambda model: model(1.0), Linen(), state),
        ):
            with pytest.raises(TypeError, match=r"params = model\.init\(key, x\), and"):
                call()


class TestALossWithoutGradient:
    """It does not depend on the parameters, so that nothing is trained."""

    @pytest.mark.parametrize("retries", [0, 3])
    @every_wrap
    def test_warns(self, wrap, retries):
        optimizer = LossScaleOptimizer(optax.sgd(0.5), retries=retries)

        def step(of_params, state):
            return optimizer.minimize(lambda _: of_params(PARAMS), PARAMS, state)

        for of_params in (loss_fn, lambda p: loss_fn(jax.lax.stop_gradient(p))):
            with pytest.warns(
                UserWarning, match="no gradient with respect to argument 0"
            ):
                wrap(functools.partial(step, of_params))(optimizer.init(PARAMS))

    @every_wrap
    def test_of_a_module_or_of_other_arguments(self, wrap):
        def of_second(model, x):
            return jnp.sum(x**2)

        with pytest.warns(UserWarning, match="respect to argument 0"):
            wrap(lambda s, x: optimizer.value_and_grad(of_second, s)(Linear(), x))(
                state, 2.0
            )

        def of_both(state, params, x):
            return optimizer.value_and_grad(of_second, state, argnums=(0, 1))(params, x)

        assert wrap(of_both)(state, PARAMS, 2.0)[1][1] == 4

    @pytest.mark.parametrize(
        "transform",
        [jax.value_and_grad, nnx.value_and_grad, eqx.filter_value_and_grad],
    )
    def test_by_the_transform_of_a_library(self, transform):
        with pytest.warns(UserWarning, match="respect to argument 0"):
            optimizer.minimize(
                lambda _: loss_fn(PARAMS), PARAMS, state, transform=transform
            )
        optimizer.minimize(loss_fn, PARAMS, state, transform=transform)

    def test_not_if_flax_differentiates_other_variables(self):
        model = nnx.BatchNorm(2, rngs=nnx.Rngs(0))

        @nnx.jit
        def grads(model, state):
            return optimizer.value_and_grad(
                lambda model: jnp.sum(model.mean[...] ** 2),
                state,
                argnums=nnx.DiffState(0, nnx.BatchStat),
            )(model)[1]

        assert jax.tree.leaves(grads(model, state))[0].tolist() == [0, 0]

    def test_not_if_one_parameter_reaches_it(self):
        params = PARAMS | {"unused": np.ones(2, np.float32)}
        optimizer.minimize(loss_fn, params, optimizer.init(params))

    def test_not_inside_of_other_derivatives(self):
        def outer(rate, params):
            new, *_ = optimizer.minimize(lambda p: rate * loss_fn(p), params, state)
            return loss_fn(new)

        jax.grad(outer)(0.1, PARAMS)
        jax.jvp(lambda x: outer(x, PARAMS), (0.1,), (1.0,))
        jax.vmap(lambda x: outer(x, PARAMS))(np.ones(2, np.float32))


class TestRetries:
    optimizer = LossScaleOptimizer(optax.sgd(0.5), retries=3)

    @pytest.mark.parametrize("bad", [True, "3", [3], 1.5, -1, 2**31, jax.device_put(3)])
    def test_a_number_that_is_no_count(self, bad):
        error = ValueError if type(bad) in (int, float) else TypeError
        with pytest.raises(error, match=r"^retries must"):
            LossScaleOptimizer(optax.sgd(0.5), retries=bad)

    @pytest.mark.parametrize(
        "call",
        [
            lambda optimizer, state: optimizer.value_and_grad(loss_fn, state),
            lambda optimizer, state: optimizer.update(GRADS, state, PARAMS),
            lambda optimizer, state: optimizer.apply_gradients(GRADS, PARAMS, state),
            lambda optimizer, _: scale_as_parameter(optimizer),
        ],
        ids=["value_and_grad", "update", "apply_gradients", "scale_as_parameter"],
    )
    def test_calls_that_repeat_nothing_warn(self, call, recwarn):
        state = self.optimizer.init(PARAMS)
        self.optimizer.minimize(loss_fn, PARAMS, state)
        call(optimizer, optimizer.init(PARAMS))  # Without retries.
        assert not recwarn.list
        with pytest.warns(UserWarning, match=r"repeats nothing.*retries=3.*minimize\("):
            call(self.optimizer, state)


@pytest.mark.parametrize(
    "flag", [1, 0.0, "yes", np.ones((1,), bool), np.int32(1), np.float32(1), max]
)
def test_a_veto_that_is_no_flag(flag):
    for call in (
        lambda: optimizer.update(GRADS, state, skip_if=flag),
        lambda: optimizer.apply_gradients(GRADS, PARAMS, state, skip_if=flag),
        lambda: optimizer.minimize(loss_fn, PARAMS, state, skip_if=lambda *_: flag),
    ):
        with pytest.raises(TypeError, match=r"^skip_if must be a bool"):
            call()


@every_wrap
class TestWhatDoesNotFit:
    def test_gradients_of_other_shapes(self, wrap):
        optimizer = LossScaleOptimizer(optax.sgd(0.5, momentum=0.9))
        state = optimizer.init(PARAMS)
        per_example = {"w": jnp.ones((3, 2), jnp.float32)}
        fix = r"grads of the structure and shapes of params.*\(3, 2\), not \(2,\)"
        for method, arguments in (
            (optimizer.update, (per_example, state, PARAMS)),
            (optimizer.apply_gradients, (per_example, PARAMS, state)),
        ):
            with pytest.raises(ValueError, match=fix):
                wrap(method)(*arguments)

    def test_the_state_of_another_optimizer(self, wrap):
        adam, amsgrad = (
            LossScaleOptimizer(relaxed(inner(0.5)))
            for inner in (optax.adam, optax.amsgrad)
        )
        with pytest.raises(ValueError, match=r"this optimizer (?s:.*)AmsgradState"):
            wrap(adam.update)(GRADS, amsgrad.init(PARAMS), PARAMS)


def test_a_forgotten_has_aux_with_a_string_in_it():
    def with_text(params):
        return loss_fn(params), "text"

    for call in (
        lambda: optimizer.value_and_grad(with_text, state)(PARAMS),
        lambda: optimizer.minimize(with_text, PARAMS, state),
        lambda: optimizer.get_scaled_loss(with_text, state)(PARAMS),
    ):
        with pytest.raises(TypeError, match=r"float32\[\].*'str'"):
            call()


# Every call that takes a state.
CALLS = {
    "value_and_grad": lambda s: optimizer.value_and_grad(loss_fn, s),
    "get_scaled_loss": lambda s: optimizer.get_scaled_loss(1.0, s),
    "get_unscaled_gradients": lambda s: optimizer.get_unscaled_gradients(GRADS, s),
    "current_loss_scale": optimizer.current_loss_scale,
    "dynamic_counter": optimizer.dynamic_counter,
    "minimize": lambda s: optimizer.minimize(loss_fn, PARAMS, s),
    "update": lambda s: optimizer.update(GRADS, s, PARAMS),
    "apply_gradients": lambda s: optimizer.apply_gradients(GRADS, PARAMS, s),
}
READERS = [*CALLS][:5]


def of_rule(rule):
    return lambda _: LossScaleOptimizer(optax.sgd(0.5), rule).init(PARAMS)


def with_rule_state(x):
    return lambda state: state._replace(loss_scale_state=x)


def of_dictionaries(state):
    return serialization.msgpack_restore(serialization.to_bytes(state))


KIND = "loss_scale_state must be DynamicLoss.*Use the loss_scale that the state was"
# How to make a state that is wrong, what is said, and the calls that take it.
WRONG = {
    "of another rule": (of_rule("headroom"), KIND, ["dynamic_counter"]),
    "of a fixed scale": (of_rule(8.0), KIND, ["dynamic_counter"]),
    **{
        f"with {x} in place of the scale": (
            with_rule_state(x),
            KIND,
            ["dynamic_counter"],
        )
        for x in (None, {}, {"loss_scale": np.float32(8)}, np.float32(8), ())
    },
    "restored as dictionaries": (
        of_dictionaries,
        "restore a checkpoint into the state of init",
        [],
    ),
    "none": (lambda state: (), "exactly one .* got 0|must be the LossScaleOpt", []),
    "two": (lambda state: {"a": state, "b": state}, "exactly one .* got 2|inside", []),
    "in a chain": (
        lambda state: (state, optax.EmptyState()),
        r"must be the LossScaleOptimizerState.* inside, .*Optimizer\(optax\.chain",
        READERS,
    ),
}


@pytest.mark.parametrize(("make", "message", "takers"), WRONG.values(), ids=WRONG)
def test_a_wrong_state_is_refused_by_every_call(make, message, takers):
    wrong = make(state)
    for name, call in CALLS.items():
        if name in takers:
            call(wrong)
        else:
            with pytest.raises(ValueError, match=message):
                call(wrong)


@every_wrap
def test_a_float16_loss_warns_when_it_is_traced(wrap):
    def loss_of(dtype):
        return lambda params: jnp.sum(params["w"]).astype(dtype)

    for call in (
        lambda loss, p, s: optimizer.value_and_grad(loss, s)(p),
        lambda loss, p, s: optimizer.minimize(loss, p, s),
    ):
        step = wrap(functools.partial(call, loss_of(jnp.float16)))
        with pytest.warns(UserWarning, match="The loss is float16") as caught:
            step(PARAMS, state)
        assert [warning.filename for warning in caught] == [__file__]
        if wrap is jax.jit:
            step(PARAMS, state)  # Traced already.
        for dtype in (jnp.float32, jnp.bfloat16):
            wrap(functools.partial(call, loss_of(dtype)))(PARAMS, state)


OPTIONS = {
    "dynamic": {},
    "check_loss": {"check_loss": True},
    "fixed": {"loss_scale": 8.0},
    "fixed, skips": {"loss_scale": FixedLossScale(8.0, True)},
    "headroom": {"loss_scale": "headroom"},
    "tolerant": {"loss_scale": TolerantLossScale(0.5)},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_nothing_is_transferred_unasked(options):
    ours = LossScaleOptimizer(optax.identity(), **options)
    x, value = jax.device_put((np.ones(3, np.float32), np.float32(1)))
    half = x.astype(jnp.float16)
    start = ours.init(x)
    with jax.transfer_guard("disallow"):
        ours.get_scaled_loss(value, start)
        grads = ours.get_unscaled_gradients(half, start)
        _, after = ours.update(grads, start, x, value=value)
        params, after = ours.apply_gradients(x, x, after, value=value)
        select_applied(after, params, x)
        ours.current_loss_scale(after)
        all_finite({"x": x, "half": half})
    assert after.last_step_applied


def test_pairs_of_gradients_and_variables():
    pairs = zip([GRADS["w"]], [PARAMS["w"]], strict=True)
    with pytest.raises(TypeError, match=r"apply_gradients\(grads, params, state\)"):
        optimizer.apply_gradients(pairs, [PARAMS["w"]], state)


@pytest.mark.parametrize("step", [optimizer.apply_gradients, optimizer.update])
def test_no_gradients_at_all(step):
    args = (PARAMS, state) if step == optimizer.apply_gradients else (state, PARAMS)
    with pytest.raises(TypeError, match=r"grads must be a pytree .*, got None"):
        step(None, *args)
