"""An overflow repeats the pass at a lower scale; no batch is lost."""

import functools
import pickle

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from arithmetic import half, normal
from helpers import (
    INF,
    NAN,
    WRAPS,
    BackoffOnly,
    assert_close,
    assert_same_bits,
    every_wrap,
    exhaustive_but,
    relaxed,
    signature,
    to_numpy,
)
from jax import lax

from optax_lossscale import (
    DynamicLossScale,
    FixedLossScale,
    HeadroomLossScale,
    LossScaleOptimizer,
    TolerantLossScale,
)
from optax_lossscale._jaxprs.parts import all_equations

RULE = DynamicLossScale(2.0**24)
ONE = jax.device_put(np.float32(1))
# One operation after the other takes long to compile.
SLOW = exhaustive_but(WRAPS.values(), [WRAPS["jit"]])
compiled = pytest.mark.parametrize("wrap", SLOW, ids=WRAPS)


def with_gradient(param, x, identity=lambda x: x):
    """Has the gradient `x`, which is inf if `x` times the scale is 2**16 or more."""
    return identity(half(param)).astype(jnp.float32) * x


SGD = optax.sgd(0.5)


def begin(loss_fn, params=ONE, inner=SGD, rule=RULE, retries=24, **options):
    """Returns a step, which is `minimize` with these options, and its first state."""
    optimizer = LossScaleOptimizer(relaxed(inner), rule, retries=retries)
    step = functools.partial(optimizer.minimize, loss_fn, **options)
    return step, optimizer.init(params)


def counting():
    """Returns the identity, and a list to which each of its passes adds its name."""
    passes, identity = [], jax.custom_vjp(lambda x: x)

    def count(name, result):
        jax.debug.callback(lambda: passes.append(name))
        return result

    identity.defvjp(
        lambda x: count("forward", (x, None)), lambda _, x: count("backward", (x,))
    )
    return identity, passes


def counts_of(passes):
    """Returns how many forward and backward passes there were, and begins anew."""
    jax.effects_barrier()
    counts = passes.count("forward"), passes.count("backward")
    passes.clear()
    return counts


def check_step(step, params, state, *args):
    """Asserts that a step is as from a scale that is low enough; returns it.

    The pass that runs again is compiled apart, and may round otherwise.

    Args:
      step: Returns the parameters, the state of `RULE`, and whatever it likes.
      params: The parameters.
      state: The state.
      *args: The other arguments of the step.
    """
    new, after, *rest = step(params, state, *args)
    retries = int(after.retries - state.retries)
    assert retries > 0
    assert after.last_step_applied
    scale_state = state.loss_scale_state
    for _ in range(retries):
        scale_state, _ = RULE.update(jnp.float32(INF), scale_state)
    low = state._replace(loss_scale_state=scale_state)
    same, expected, *others = step(params, low, *args)
    assert expected.retries == state.retries
    expected = expected._replace(retries=after.retries)
    assert_rounded((new, after, rest), (same, expected, others))
    return new, after


def assert_rounded(actual, desired):
    """Asserts that trees differ by at most two roundings of their largest numbers."""
    assert jax.tree.structure(actual) == jax.tree.structure(desired)
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(desired), strict=True):
        if not isinstance(x, jax.Array):
            assert x == y
            continue
        x, y = map(to_numpy, (x, y))
        assert x.dtype == y.dtype
        if np.issubdtype(y.dtype, np.inexact):
            epsilon = np.finfo(y.dtype).eps
            np.testing.assert_allclose(x, y, rtol=0, atol=2 * epsilon * np.abs(y).max())
        else:
            np.testing.assert_array_equal(x, y)


def loss_of_a_model(params, stats, key, x, identity=lambda x: x):
    """Of a float16 model with dropout, batch statistics and other data."""
    hidden = identity(half(x) @ half(params["w1"]))
    wide = hidden.astype(jnp.float32)
    mean, var = jnp.mean(wide, 0), jnp.var(wide, 0)
    kept = jax.random.bernoulli(key, 0.5, hidden.shape)
    hidden = jnp.tanh(half((wide - mean) / jnp.sqrt(var + 0.01))) * half(kept)
    out = (hidden @ half(params["w2"])).astype(jnp.float32)
    stats = 0.9 * stats + 0.1 * jnp.stack([mean, var])
    return jnp.sum((out - x[:, :4]) ** 2), (stats, kept, key)


@pytest.mark.optimized
@compiled
def test_a_model_takes_the_step_of_a_lower_scale(wrap):
    (identity, passes), traces = counting(), []

    def loss_fn(*args):
        traces.append(1)
        return loss_of_a_model(*args, identity)

    weights = {"w1": normal(8, 16) / 3, "w2": normal(16, 4) / 4}
    args = jnp.zeros((2, 16)), jax.random.key(4), normal(16, 8)
    inner = optax.adamw(optax.linear_schedule(0.1, 0.0, 50))
    step, start = begin(loss_fn, weights, inner, has_aux=True)
    step = wrap(step)
    params, state = step(weights, start, *args)[:2]
    assert state.retries >= 9
    assert counts_of(passes) == (1 + state.retries, 1 + state.retries)
    assert len(traces) == 1
    check_step(step, weights, start, *args)
    # And once more, with moments that are not zero.
    state = state._replace(loss_scale_state=start.loss_scale_state)
    check_step(step, params, state, *args)


# Of each step of a training, the gradient. The loss is not finite if it is not.
GRADS = [1.0, 1.0, 2.0**6, NAN, 1.0, 2.0**-12, INF, 2.0**8, 2.0**8, 2.0**8, 1.0]
# Rules, and how often the backward pass is repeated (at most five times in a step) and
# steps are skipped in all.
RULES = [
    (RULE, 35, 7),
    (DynamicLossScale(2.0**24, 2, 4.0, 0.25, min_scale=2.0**12), 7, 6),
    (DynamicLossScale(2.0**18, 3, hysteresis=2), 13, 4),
    (DynamicLossScale(2.0**18, 3, hysteresis=2, consecutive_hysteresis=True), 18, 6),
    (TolerantLossScale(0.0, 2.0**24), 35, 7),
    (TolerantLossScale(0.5, 2.0**16, 3), 16, 5),
    (HeadroomLossScale(2.0**24, min_margin=4), 24, 5),
    (FixedLossScale(2.0**12, True), 0, 6),
    (FixedLossScale(2.0**12), 0, 0),
    (BackoffOnly(2.0**24), 35, 7),
]


def step_by_hand(rule, state, x, retries):
    """Returns the rule's state and its decision, the retries, and the gradient."""
    count, first = 0, None
    while True:
        scale = np.float32(rule(state))
        with np.errstate(over="ignore", invalid="ignore"):
            grad = np.float16(np.float32(x) * scale).astype(np.float32) / scale
        new, finite = rule.update(grad, state)
        is_mended = np.isfinite(x) and rule(new) < scale
        first = new if first is None else first
        if finite:
            return new, finite, count, grad
        if not is_mended or count == retries:  # As without retries.
            return first, finite, count, grad
        state, count = new, count + 1


@pytest.mark.parametrize("case", exhaustive_but(RULES, RULES[1::2]))
def test_the_rule_sees_the_overflows_and_then_the_gradients(case):
    rule, retries, skipped = case
    identity, passes = counting()
    loss_fn = functools.partial(with_gradient, identity=identity)
    step, state = begin(loss_fn, inner=optax.sgd(2.0**-10), rule=rule, retries=5)
    step, param = jax.jit(step), ONE
    for x in GRADS:
        before, expected = state, param
        param, state, _ = step(param, state, jnp.float32(x))
        scale_state, taken, count, grad = step_by_hand(
            rule, before.loss_scale_state, x, 5
        )
        assert_same_bits(state.loss_scale_state, scale_state)
        assert state.last_step_applied == taken
        assert counts_of(passes) == (1 + count, 1 + count)
        assert state.retries == before.retries + count
        expected = expected - grad / 1024 if taken else expected
        np.testing.assert_array_equal(param, expected)
    assert (state.retries, state.skipped_steps) == (retries, skipped)


@compiled
def test_members_repeat_as_often_as_each_must(wrap):
    optimizer = LossScaleOptimizer(optax.sgd(0.5, 0.9), RULE, retries=12)
    x = jnp.array([1.0, NAN, 2.0**-8, 2.0**-9, 2.0**6], jnp.float32)
    params = jnp.ones_like(x)
    step = wrap(jax.vmap(functools.partial(optimizer.minimize, with_gradient)))
    params, state, _ = step(params, jax.vmap(optimizer.init)(params), x)
    assert state.retries.tolist() == [9, 0, 1, 0, 12]
    assert state.skipped_steps.tolist() == [0, 1, 0, 0, 1]
    scales = np.log2(optimizer.current_loss_scale(state))
    assert scales.tolist() == [15, 23, 23, 24, 23]
    assert params.tolist() == [0.5, 1.0, 1 - 2.0**-9, 1 - 2.0**-10, 1.0]
    assert state.inner_state[0].trace.tolist() == [1, 0, 2.0**-8, 2.0**-9, 0]


@pytest.mark.optimized
@every_wrap
def test_what_is_checked_is_what_is_applied(wrap):
    """XLA makes one product of the last multiplication and the unscaling."""
    params, rule = jnp.ones(4, jnp.float32), DynamicLossScale(2.0**126)
    step, state = begin(lambda w: jnp.sum((2 * w) ** 2), params, optax.sgd(0.125), rule)
    params, state, _ = wrap(step)(params, state)
    # The gradient is 8. Scaled, it is inf at 2**126 and at 2**125.
    assert (state.retries, state.skipped_steps) == (2, 0)
    np.testing.assert_array_equal(params, 0)


def test_members_of_one_axis_repeat_together():
    optimizer = LossScaleOptimizer(optax.sgd(0.5), RULE, axis_name="i", retries=24)
    step = functools.partial(optimizer.minimize, with_gradient)
    step = jax.jit(jax.vmap(step, (0, None, 0), axis_name="i"))
    for x, retries, skipped in (([1.0, 2.0**6], 15, 0), ([1.0, NAN], 0, 1)):
        state = step(np.ones(2, np.float32), optimizer.init(ONE), np.float32(x))[1]
        assert state.retries.tolist() == [retries] * 2
        assert state.skipped_steps.tolist() == [skipped] * 2


def test_is_compiled_once_and_takes_donated_and_restored_states():
    traces = []

    def loss_fn(*args):
        traces.append(1)
        return with_gradient(*args)

    step, state = begin(loss_fn, inner=optax.sgd(0.5, 0.9))
    step, param = jax.jit(step, donate_argnums=(0, 1)), jnp.copy(ONE)
    types, retries = signature(state), []
    for x in (1.0, 1.0, 2.0**3, NAN, 2.0**-5):
        param, state, _ = step(param, state, jnp.float32(x))
        retries.append(int(state.retries))
        assert signature(state) == types
        state = pickle.loads(pickle.dumps(state))
    assert retries == [9, 9, 12, 12, 12]
    assert state.skipped_steps == 1
    assert (len(traces), step._cache_size()) == (1, 1)
    # The count saturates.
    full = state._replace(retries=jnp.int32(2**31 - 2), loss_scale_state=RULE.init())
    assert step(param, full, ONE)[1].retries == 2**31 - 1


@compiled
def test_a_state_from_before_retries_counts_from_zero(wrap):
    step, state = begin(with_gradient)
    _, expected, _ = wrap(step)(ONE, state, ONE)
    _, after, _ = wrap(step)(ONE, state._replace(retries=None), ONE)
    assert_same_bits(after, expected)
    assert after.retries == 9


def square(params, x):
    return jnp.sum((half(x @ params) - 1).astype(jnp.float32) ** 2)


def rematerialized(params, x):
    layer = jax.checkpoint(lambda y, w: (jnp.tanh(y @ half(w)), None))
    out, _ = lax.scan(layer, half(x), params)
    return jnp.sum(out.astype(jnp.float32) ** 2)


def mixed(params, x):
    with jax.numpy_dtype_promotion("standard"):
        numbers = [half(jnp.abs(params[name] * (1 + 2j))) for name in DTYPES]
    numbers = jnp.stack(numbers) * half(params["integer"])
    return jnp.sum(numbers.astype(jnp.float32) ** 2)


DTYPES = ["float16", "bfloat16", "float32", "complex64"]
MIXED = {name: np.full(3, 0.75, name) for name in DTYPES}
MIXED |= {"integer": np.array(2, np.int8), "unused": np.float32([1, 1]), "none": None}
W = normal(3, 4, 4) / 2
BACKTRACKING = optax.scale_by_backtracking_linesearch(5, store_grad=True)
CASES = {
    "scanned": (rematerialized, W, optax.sgd(0.1)),
    "mixed": (mixed, MIXED, optax.identity()),
    "line search": (square, W[0], optax.lbfgs(linesearch=BACKTRACKING)),
    "MultiSteps": (square, W[0], optax.MultiSteps(optax.adam(0.1), 2)),
}


@pytest.mark.parametrize(("loss_fn", "params", "inner"), CASES.values(), ids=CASES)
def test_every_model_and_optimizer(loss_fn, params, inner):
    transform = functools.partial(jax.value_and_grad, allow_int=True)
    x = jax.random.normal(jax.random.key(1), (4, 4))

    make = functools.partial(begin, loss_fn, params, inner, transform=transform)
    step, state = make()
    new, after = check_step(jax.jit(step), params, state, x)
    step, state = make(float(after.loss_scale_state.loss_scale), retries=0)
    assert_close(new, jax.jit(step)(params, state, x)[0])


@every_wrap
def test_auxiliary_data_is_that_of_a_step_without_retries(wrap):
    given = {"int": np.int64(2**40), "float": np.float64(0.1), "array": np.arange(2)}

    def loss_fn(param, x):
        made = {"literal": jnp.float32(7), "constant": jnp.arange(2), "product": 2 * x}
        key = jax.random.key(0)
        return param**2, made | {"key": key, "weak": jnp.asarray(1.5)} | given

    def auxiliary_data(retries):
        step, state = begin(loss_fn, retries=retries, has_aux=True)
        if wrap is jax.jit:
            given.pop("int", None)  # No result of a compiled function.
        return wrap(step)(ONE, state, ONE)[2][1]

    plain, repeated = auxiliary_data(0), auxiliary_data(5)
    assert [(type(x), signature(x)) for x in jax.tree.leaves(repeated)] == [
        (type(x), signature(x)) for x in jax.tree.leaves(plain)
    ]
    assert repeated["literal"].at[...].add(1) == 8
    assert_same_bits(repeated, plain)


def test_equinox():
    model = eqx.nn.MLP(4, 2, 8, 1, dtype=jnp.float16, key=jax.random.key(0))

    def loss_fn(model, x):
        out = jax.vmap(model)(half(x)).astype(jnp.float32)
        return jnp.sum(out**2), {"name": "text", "out": out}

    step, state = begin(loss_fn, model, optax.adam(0.1), has_aux=True)
    x = jax.random.normal(jax.random.key(1), (3, 4))
    new, _ = check_step(eqx.filter_jit(step), model, state, x)
    assert new.activation is model.activation
    assert (new.layers[0].weight != model.layers[0].weight).any()


class TestDerivatives:
    """A step of `with_gradient` is `param - rate * x`."""

    def step(self, rate, x):
        step, state = begin(with_gradient, inner=optax.sgd(rate))
        return step(ONE, state, x)

    @compiled
    def test_in_forward_mode(self, wrap):
        step = functools.partial(self.step, 0.25)
        (param, state, _), slope = wrap(lambda x: jax.jvp(step, (x,), (ONE,)))(ONE * 2)
        assert (param, state.retries, slope[0]) == (0.5, 10, -0.25)
        assert wrap(jax.jacfwd(lambda x: step(x)[0]))(ONE * 2) == -0.25

    @compiled
    def test_reverse_mode_is_refused(self, wrap):
        with pytest.raises(ValueError, match=r"retries.*Take jax\.jvp or .*retries=0"):
            wrap(jax.grad(lambda x: self.step(0.25, x)[0]))(ONE)
        # The loss itself does not depend on the backward pass.
        assert wrap(jax.grad(lambda x: self.step(0.25, x)[2]))(ONE) == 1
        # Nor do the hyperparameters.
        slope = wrap(jax.grad(lambda rate: self.step(rate, ONE * 2)[0]))
        assert slope(jnp.float32(0.25)) == -2


@every_wrap
def test_a_callback_runs_in_each_pass(wrap):
    logged = []

    def transform(fun, **options):
        def value_and_grad(*args):
            value, grad = jax.value_and_grad(fun, **options)(*args)
            jax.debug.callback(lambda x: logged.append(float(x)), grad)
            return value, grad

        return value_and_grad

    step, state = begin(with_gradient, transform=transform)
    state = wrap(step)(ONE, state, ONE)[1]
    jax.effects_barrier()
    assert state.retries == 9
    # The gradients are scaled still; those of the last pass are applied.
    assert logged == [INF] * 9 + [2.0**15]


@pytest.mark.parametrize("make_key", [jax.random.key, jax.random.PRNGKey])
@compiled
def test_each_pass_has_the_same_random_numbers(wrap, make_key):
    def loss_fn(param, key):
        return with_gradient(param, jax.random.uniform(key))

    step, state = begin(loss_fn, inner=optax.sgd(1.0))
    with jax.debug_key_reuse(True):
        param, state, loss = wrap(step)(ONE, state, make_key(0))
    assert state.retries > 0
    np.testing.assert_allclose(1 - param, loss, rtol=1e-3)


def test_dropout_in_a_checkpoint_reuses_no_key():
    @jax.checkpoint
    def layer(w, x, key):
        keys = jax.random.split(key)
        kept = [jax.random.bernoulli(k, 0.5, x.shape) for k in keys]
        return jnp.where(kept[0] & kept[1], jnp.tanh(x * w), 0)

    def loss_fn(w, x, key):
        for each in jax.random.split(key):
            x = layer(w, x, each)
        return with_gradient(jnp.sum(x), ONE)

    step, state = begin(loss_fn)
    with jax.debug_key_reuse(True):
        jax.jit(step)(ONE, state, jnp.ones(8), jax.random.key(0))


class TestRefs:
    @compiled
    def test_inside_and_one_that_is_only_read(self, wrap):
        outside = jax.new_ref(jnp.float32(2))

        def loss_fn(param):
            inside = jax.new_ref(jnp.float32(1))
            inside[...] *= 3
            return with_gradient(param, inside[...] * outside[...])

        step, state = begin(loss_fn)
        param, state, loss = wrap(step)(ONE, state)
        assert (param, loss, state.retries) == (-2, 6, 11)

    @every_wrap
    def test_one_of_outside_is_not_written(self, wrap):
        outside = jax.new_ref(jnp.float32(2))

        def loss_fn(param):
            outside[...] += 1
            return with_gradient(param, outside[...])

        step, state = begin(loss_fn)
        with pytest.raises(TypeError, match=r"must not write a jax\.Ref of outside"):
            wrap(step)(ONE, state)
        assert outside[...] == 2


def test_without_an_overflow_a_step_is_that_without_retries():
    """Also where the transform hides both passes in one scan."""

    def transform(fun, **options):
        return jax.jit(jax.value_and_grad(fun, **options))

    x = jax.random.normal(jax.random.key(1), (4, 4))
    for change in (jax.value_and_grad, transform):
        results = []
        for retries in (0, 24):
            options = {"retries": retries, "transform": change}
            step, state = begin(rematerialized, W, optax.adam(0.1), 2.0**4, **options)
            new, state, loss = jax.jit(step)(W, state, x)
            results.append((new, state._replace(retries=None), loss))
        assert_same_bits(*results)


def test_the_loop_carries_gradients_before_their_last_cast():
    params = {"w": np.ones((4, 4), np.float32)}

    def loss_fn(params):
        return jnp.sum((half(W[0]) @ half(params["w"])).astype(jnp.float32))

    step, state = begin(loss_fn, params)
    jaxpr = jax.make_jaxpr(step)(params, state).jaxpr
    (loop,) = (x for x in all_equations(jaxpr) if x.primitive.name == "while")
    carried = {str(x.aval.dtype) for x in loop.outvars if x.aval.shape == (4, 4)}
    assert carried == {"float16"}
