"""Several losses: a scale each, one update, skipped if any is not finite."""

import functools
import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import (
    INF,
    NAN,
    WRAPS,
    assert_close,
    assert_same_bits,
    every_skip,
    signature,
)

from optax_lossscale import (
    DynamicLossScale,
    FixedLossScale,
    HeadroomLossScale,
    LogMaxLossScale,
    LossScaleOptimizer,
    TolerantLossScale,
    check_health,
    select_applied,
)
from optax_lossscale.diagnostics import metrics, nonfinite_leaves, report

PARAMS = {"w": jnp.array([1, 2], jnp.float32), "b": jnp.float32(0.5)}
ONES = jax.tree.map(jnp.ones_like, PARAMS)


def loss_fn(params, x=1.0, y=1.0):
    return x * jnp.sum(params["w"] ** 2), y * jnp.square(params["b"] * params["w"][0])


def plain_grads(i, *args):
    return jax.grad(lambda params: loss_fn(params, *args)[i])(PARAMS)


def two(loss_scale=None, **options):
    return LossScaleOptimizer(optax.sgd(0.5), loss_scale, num_losses=2, **options)


def scales(optimizer, state):
    return optimizer.current_loss_scale(state).tolist()


@every_skip
@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
class TestOneStep:
    def check(self, optimizer, step, wrap):
        step = wrap(step)
        start = optimizer.init(PARAMS)
        grads = jax.tree.map(jnp.add, plain_grads(0), plain_grads(1))
        expected = jax.tree.map(lambda p, g: p - 0.5 * g, PARAMS, grads)
        params, state = step(PARAMS, start, 1.0, 1.0)
        assert_close(params, expected)
        assert scales(optimizer, state) == [2**15, 2**15]
        assert signature(state) == signature(start)
        # Each scale on its own evidence, and no step if either fails.
        for x, y, after in [
            (INF, 1.0, [2**14, 2**15]),
            (1.0, NAN, [2**15, 2**14]),
            (NAN, INF, [2**14, 2**14]),
        ]:
            params, state = step(PARAMS, start, x, y)
            assert_same_bits(params, PARAMS)
            assert scales(optimizer, state) == after
            assert not state.last_step_applied
            assert state.skipped_steps == 1

    def test_minimize(self, wrap, skip):
        optimizer = two(skip=skip)

        def step(params, state, x, y):
            return optimizer.minimize(loss_fn, params, state, x, y=y)[:2]

        self.check(optimizer, step, wrap)

    def test_in_two_halves(self, wrap, skip):
        optimizer = two(skip=skip)

        def step(params, state, x, y):
            values, grads = optimizer.value_and_grad(loss_fn, state)(params, x, y)
            assert len(values) == len(grads) == 2
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        self.check(optimizer, step, wrap)

    def test_by_hand(self, wrap, skip):
        optimizer = two(skip=skip)

        def step(params, state, x, y):
            scaled = optimizer.get_scaled_loss(loss_fn, state)
            grads = [
                jax.grad(lambda p, i=i: scaled(p, x, y)[i])(params) for i in (0, 1)
            ]
            grads = optimizer.get_unscaled_gradients(grads, state)
            return optimizer.apply_gradients(grads, params, state)

        self.check(optimizer, step, wrap)


def test_each_gradient_is_scaled_by_its_own():
    optimizer = two()
    state = optimizer.init(PARAMS)
    rule = state.loss_scale_state._replace(loss_scale=jnp.float32([8, 2]))
    state = state._replace(loss_scale_state=rule)
    assert [float(x) for x in optimizer.get_scaled_loss((3.0, 5.0), state)] == [24, 10]
    first, second = optimizer.get_unscaled_gradients([ONES, ONES], state)
    assert first["b"] == 1 / 8
    assert second["b"] == 1 / 2


def test_small_and_large_losses_both_keep_their_gradients():
    # In float16 no single scale carries both: one is lost, or the other overflows.
    def losses(params):
        half = params.astype(jnp.float16)
        small = half * jnp.float16(1e-6) * jnp.float16(1e-4)
        large = half * jnp.float16(1000)
        return small.astype(jnp.float32), large.astype(jnp.float32)

    optimizer = two(DynamicLossScale(2.0**15))
    params = jnp.float32(1)
    state = optimizer.init(params)
    step = jax.jit(lambda p, s: optimizer.minimize(losses, p, s)[:2])
    for _ in range(20):
        params, state = step(params, state)
    assert scales(optimizer, state) == [2**15, 2**6]
    _, (small, large) = optimizer.value_and_grad(losses, state)(params)
    np.testing.assert_allclose(small, 1e-10, rtol=0.1)
    np.testing.assert_allclose(large, 1e3, rtol=1e-3)
    single = LossScaleOptimizer(optax.sgd(0.5), 2.0**6)
    small_alone = single.value_and_grad(lambda p: losses(p)[0], single.init(params))
    assert small_alone(params)[1] == 0


@pytest.mark.parametrize(
    "rule",
    [
        FixedLossScale(8.0),
        FixedLossScale(8.0, skip_nonfinite=True),
        DynamicLossScale(8.0, growth_interval=2),
        TolerantLossScale(0.3, initial_scale=8.0, growth_interval=2),
        HeadroomLossScale(),
        LogMaxLossScale(),
    ],
    ids=lambda rule: type(rule).__name__,
)
def test_every_rule_is_each_loss_alone(rule):
    optimizer = two(rule)
    state = optimizer.init(PARAMS)
    alone = [rule.init(), rule.init()]
    update = jax.jit(lambda grads, state: optimizer.update(grads, state)[1])
    for values in [(1, 1), (1, INF), (2, 3), (NAN, 1), (0, 1), (1, 1), (INF, INF)]:
        grads = [jax.tree.map(lambda x, v=v: x * v, ONES) for v in values]
        applied = []
        for i in range(2):
            alone[i], decision = rule.update(grads[i], alone[i])
            applied.append(bool(decision))
        state = update(grads, state)
        expected = jax.tree.map(lambda *x: jnp.stack(x), *alone)
        assert_close(state.loss_scale_state, expected)
        assert bool(state.last_step_applied) == all(applied)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
@every_skip
def test_a_sum_that_overflows_is_skipped_at_the_same_scales(skip, dtype):
    optimizer = two(DynamicLossScale(growth_interval=5), skip=skip, track_leaves=True)
    params = {"a": jnp.ones(2, dtype), "b": jnp.ones(2, dtype)}
    state = optimizer.init(params)
    large = jnp.array([1, jnp.finfo(dtype).max * 0.75], dtype)
    grads = [{"a": params["a"], "b": large}] * 2
    new, state = jax.jit(optimizer.apply_gradients)(grads, params, state)
    assert_same_bits(new, params)
    assert state.skipped_steps == 1
    assert scales(optimizer, state) == [2**15, 2**15]
    assert state.loss_scale_state.good_steps.tolist() == [1, 1]
    assert [str(leaf) for leaf in nonfinite_leaves(state, params)] == [
        "params['b']: inf in 1 steps, nan in 0, most recently inf"
    ]
    # As with one loss, a fixed scale that checks nothing applies it.
    fixed = two(FixedLossScale(2.0), skip=skip)
    new, _ = fixed.apply_gradients(grads, params, fixed.init(params))
    assert jnp.isinf(new["b"][1])


def test_one_loss_in_a_tuple_is_one_loss():
    one = LossScaleOptimizer(optax.adam(0.1), num_losses=1)
    plain = LossScaleOptimizer(optax.adam(0.1))

    def loss(params):
        return jnp.sum(params["w"] ** 2)

    with jax.numpy_dtype_promotion("standard"):
        params, state, value = one.minimize(
            lambda p: (loss(p),), PARAMS, one.init(PARAMS)
        )
        wanted, _, wanted_value = plain.minimize(loss, PARAMS, plain.init(PARAMS))
    assert_same_bits(params, wanted)
    assert value == (wanted_value,)
    assert scales(one, state) == [2**15]


def test_values_auxiliary_data_argnums_and_keywords():
    optimizer = two()
    state = optimizer.init(PARAMS)

    def fun(x, params, *, y):
        return loss_fn(params, x, y), {"x": x}

    (values, aux), grads = optimizer.value_and_grad(
        fun, state, argnums=1, has_aux=True
    )(2.0, PARAMS, y=3.0)
    assert values == loss_fn(PARAMS, 2.0, 3.0)
    assert aux == {"x": 2.0}
    assert_close(grads, [plain_grads(0, 2.0, 3.0), plain_grads(1, 2.0, 3.0)])
    *_, (values, aux) = optimizer.minimize(
        lambda params, y: fun(2.0, params, y=y), PARAMS, state, y=3.0, has_aux=True
    )
    assert values == loss_fn(PARAMS, 2.0, 3.0)


def test_equinox_and_the_forward_pass_is_computed_once():
    optimizer = two()
    state = optimizer.init(PARAMS)
    call = optimizer.value_and_grad(loss_fn, state, transform=eqx.filter_value_and_grad)
    assert_close(call(PARAMS)[1], [plain_grads(0), plain_grads(1)])

    def with_tanh(params):
        hidden = jnp.tanh(params)
        return jnp.sum(hidden), jnp.sum(hidden**2)

    params = jnp.ones(4)

    @jax.jit
    def step(params, state):
        return optimizer.value_and_grad(with_tanh, state)(params)

    compiled = step.lower(params, optimizer.init(params)).compile()
    assert compiled.as_text().count(" tanh(") == 1


class TestFlaxNnx:
    """The loss function is called for each loss: a model must not change in it."""

    class Model(nnx.Module):
        def __init__(self):
            self.norm = nnx.BatchNorm(3, momentum=0.5, rngs=nnx.Rngs(0))
            self.calls = nnx.Variable(jnp.int32(0))

        def __call__(self, x):
            self.calls[...] += 1
            return self.norm(x)

    x = jnp.arange(12, dtype=jnp.float32).reshape(4, 3)
    optimizer = two()

    def losses(self, model, x):
        out = model(x)
        return jnp.mean(out**2), jnp.mean(out)

    @pytest.fixture(autouse=True)
    def standard_dtype_promotion(self):
        with jax.numpy_dtype_promotion("standard"):
            yield

    def test_its_value_and_grad_changes_the_model_for_each_loss(self):
        model = self.Model()
        state = self.optimizer.init(nnx.state(model, nnx.Param))
        transform = {"transform": nnx.value_and_grad}
        call = self.optimizer.value_and_grad(self.losses, state, **transform)
        _, grads = call(model, self.x)
        assert len(grads) == 2
        assert model.calls[...] == 2
        once = self.x.mean(0) / 2
        np.testing.assert_allclose(model.norm.mean[...], once + once / 2)

    def test_a_function_that_changes_nothing(self):
        @nnx.jit
        def step(model, state, x):
            graphdef, params, rest = nnx.split(model, nnx.Param, ...)

            def loss_fn(params):
                merged = nnx.merge(graphdef, params, rest, copy=True)
                return self.losses(merged, x), nnx.state(merged, nnx.Not(nnx.Param))

            params, state, (_, new) = self.optimizer.minimize(
                loss_fn, params, state, has_aux=True
            )
            nnx.update(model, params, select_applied(state, new, rest))
            return state

        model = self.Model()
        start = nnx.state(model, nnx.Param)["norm"]["bias"][...]
        state = step(model, self.optimizer.init(nnx.state(model, nnx.Param)), self.x)
        assert state.last_step_applied
        assert model.calls[...] == 1
        np.testing.assert_allclose(model.norm.mean[...], self.x.mean(0) / 2)
        assert not np.array_equal(model.norm.bias[...], start)
        before = jax.tree.map(jnp.copy, nnx.state(model))
        state = step(model, state, self.x * INF)
        assert not state.last_step_applied
        assert_same_bits(nnx.to_pure_dict(nnx.state(model)), nnx.to_pure_dict(before))

    def test_its_optimizer_is_refused(self):
        model = self.Model()
        trainer = nnx.Optimizer(model, self.optimizer, wrt=nnx.Param)
        grads = [nnx.state(model, nnx.Param)] * 2
        with pytest.raises(TypeError, match="one for each loss, got State"):
            trainer.update(model, grads)


def test_inner_optimizers_see_the_sum():
    seen = {}

    def update(updates, state, params=None, *, value, grad, value_fn):
        seen.update(value=value, grad=grad, again=value_fn(params))
        return updates, state

    inner = optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), update)
    optimizer = LossScaleOptimizer(inner, num_losses=2)
    optimizer.minimize(loss_fn, PARAMS, optimizer.init(PARAMS))
    assert seen["value"] == seen["again"] == sum(loss_fn(PARAMS))
    assert_close(seen["grad"], jax.tree.map(jnp.add, plain_grads(0), plain_grads(1)))


def test_leaves_without_gradients():
    optimizer = LossScaleOptimizer(optax.identity(), num_losses=2)
    params = {"w": jnp.ones(2), "none": None, "i": jnp.arange(2)}
    float0 = np.zeros(2, jax.dtypes.float0)
    grads = {"w": jnp.ones(2), "none": None, "i": float0}
    new, _ = optimizer.apply_gradients([grads, grads], params, optimizer.init(params))
    assert_same_bits(new, params | {"w": jnp.full(2, 3.0)})


def test_check_loss_and_track_leaves():
    optimizer = two(check_loss=True, track_leaves=True)
    state = optimizer.init(PARAMS)
    params, state, _ = optimizer.minimize(loss_fn, PARAMS, state, INF)
    assert scales(optimizer, state) == [2**15, 2**15]
    assert state.nonfinite_loss_steps == 1
    bad = ONES | {"b": jnp.float32(INF)}
    _, state = optimizer.update([ONES, bad], state, value=sum(loss_fn(params)))
    assert scales(optimizer, state) == [2**15, 2**14]
    names = [leaf.name for leaf in nonfinite_leaves(state, params) if leaf.inf_steps]
    assert "params['b']" in names


def test_the_sum_of_narrow_losses_is_not_narrow():
    optimizer = two(check_loss=True)

    def large(params):
        # Each fits into float16, and their sum does not.
        x, y = loss_fn(params, 8000.0, 200_000.0)
        return x.astype(jnp.float16), y.astype(jnp.float16)

    assert all(loss > 32_768 for loss in large(PARAMS))
    _, state, _ = optimizer.minimize(large, PARAMS, optimizer.init(PARAMS))
    assert state.nonfinite_loss_steps == 0

    def mixed(params):
        x, y = loss_fn(params)
        return x.astype(jnp.float16), y

    _, state, _ = optimizer.minimize(mixed, PARAMS, state)
    assert state.nonfinite_loss_steps == 0


def test_stuck_is_who_overflows_at_its_minimum():
    optimizer = two(DynamicLossScale(1.0))
    state = optimizer.init(PARAMS)
    rule = state.loss_scale_state._replace(loss_scale=jnp.float32([4, 1]))
    state = state._replace(loss_scale_state=rule)
    bad = jax.tree.map(lambda x: x * NAN, ONES)
    _, after = optimizer.update([bad, ONES], state)
    assert after.stuck_steps == 0
    assert scales(optimizer, after) == [2, 1]
    _, after = optimizer.update([ONES, bad], state)
    assert after.stuck_steps == 1
    assert "1 (2^0), could not go lower" in report(after)
    health = check_health(after, patience=1, raise_error=False)
    assert not health.healthy
    assert health.loss_scale == 1


def test_states_are_read_as_of_any_other():
    optimizer = two()
    state = optimizer.init(PARAMS)
    assert metrics(state)["log2_loss_scale_1"] == 15
    assert optimizer.dynamic_counter(state).tolist() == [0, 0]
    assert optax.tree.get(state, "loss_scale").tolist() == [2**15, 2**15]


def test_in_a_scan_and_an_ensemble():
    optimizer = two()

    def member(x):
        def step(carry, y):
            params, state, _ = optimizer.minimize(loss_fn, *carry, x, y)
            return (params, state), optimizer.current_loss_scale(state)

        start = PARAMS, optimizer.init(PARAMS)
        return jax.lax.scan(step, start, jnp.float32([0.1, INF, 0.1]))[1]

    found = jax.jit(jax.vmap(member))(jnp.float32([0.1, INF]))
    assert found.tolist() == [
        [[2**15, 2**15], [2**15, 2**14], [2**15, 2**14]],
        [[2**14, 2**15], [2**13, 2**14], [2**12, 2**14]],
    ]


def test_all_devices_agree():
    optimizer = two(axis_name="batch")

    @functools.partial(jax.pmap, axis_name="batch")
    def step(x):
        _, state, _ = optimizer.minimize(
            loss_fn, PARAMS, optimizer.init(PARAMS), 1.0, x
        )
        return optimizer.current_loss_scale(state), state.last_step_applied

    found, applied = step(jnp.ones(8, jnp.float32).at[3].set(INF))
    assert found.tolist() == [[2**15, 2**14]] * 8
    assert not applied.any()


def test_errors_say_what_is_wanted():
    for value, error in [(0, ValueError), (1.5, ValueError), (True, TypeError)]:
        with pytest.raises(error, match="num_losses"):
            LossScaleOptimizer(optax.sgd(0.5), num_losses=value)
    with pytest.raises(ValueError, match="num_losses and mask cannot be combined"):
        two(mask=True)
    optimizer = two()
    state = optimizer.init(PARAMS)
    with pytest.raises(
        TypeError, match=r"the loss must be a tuple or list of 2, .* got"
    ):
        optimizer.get_scaled_loss(jnp.float32(1), state)
    with pytest.raises(TypeError, match="got 3 in a tuple"):
        optimizer.value_and_grad(lambda p: (1.0, 1.0, 1.0), state)(PARAMS)
    with pytest.raises(TypeError, match="one for each loss, got dict"):
        optimizer.update(ONES, state)
    with pytest.raises(TypeError, match="one for each loss, got dict"):
        optimizer.get_unscaled_gradients(ONES, state)
    with pytest.raises(TypeError, match="a loss alone"):
        optimizer.value_and_grad(lambda p: (1.0, jnp.arange(2)), state)(PARAMS)


def test_a_state_of_another_number_of_losses_is_refused():
    numbers = (None, 2, 3)
    for n, other in itertools.permutations(numbers, 2):
        optimizer = LossScaleOptimizer(optax.sgd(0.5), num_losses=n)
        state = LossScaleOptimizer(optax.sgd(0.5), num_losses=other).init(PARAMS)
        terms = 1.0 if n is None else (1.0,) * n
        for call in (
            lambda o=optimizer, s=state, t=terms: o.value_and_grad(lambda p: t, s),
            lambda o=optimizer, s=state, t=terms: o.get_scaled_loss(t, s),
            lambda o=optimizer, s=state, t=terms: o.get_unscaled_gradients(t, s),
        ):
            with pytest.raises(ValueError, match=f"With num_losses={n} the loss scale"):
                call()


def test_is_part_of_the_configuration():
    inner = optax.sgd(0.5)
    assert LossScaleOptimizer(inner) != LossScaleOptimizer(inner, num_losses=1)
    assert "num_losses=2" in repr(two())


def test_two_networks_have_two_optimizers():
    # As in a GAN: losses, updates and parameters apart, and so are scales and skips.
    optimizers = {name: LossScaleOptimizer(optax.sgd(0.1)) for name in ("made", "seen")}
    params = {name: jnp.float32([1, 2]) for name in optimizers}
    states = {name: o.init(params[name]) for name, o in optimizers.items()}

    def losses(params, x):
        score = jnp.sum(params["made"] * params["seen"])
        return {"made": -score, "seen": score + x * jnp.sum(params["seen"])}

    @jax.jit
    def step(params, states, x):
        new_params, new_states = {}, {}
        for name, optimizer in optimizers.items():
            new_params[name], new_states[name], _ = optimizer.minimize(
                lambda own, name=name: losses({**params, name: own}, x)[name],
                params[name],
                states[name],
            )
        return new_params, new_states

    new_params, states = step(params, states, jnp.float32(INF))
    assert_same_bits(new_params["seen"], params["seen"])
    assert np.all(new_params["made"] != params["made"])
    assert scales(optimizers["seen"], states["seen"]) == 2**14
    assert scales(optimizers["made"], states["made"]) == 2**15
    new_params, states = step(params, states, jnp.float32(0.5))
    assert all(np.all(new_params[name] != params[name]) for name in params)
