"""The scale among the parameters, for trainers that compute the gradients."""

import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState
from helpers import INF, NAN, BackoffOnly, assert_close, assert_same_bits, relaxed
from rules import RULES

from optax_lossscale import (
    DynamicLossScale,
    FixedLossScale,
    LossScaleOptimizer,
    diagnostics,
    scale_as_parameter,
    with_loss_scale,
)

WEIGHTS = jax.device_put(
    {"a": np.float32([[0.5, -1.0], [2.0, 0.25]]), "b": np.float32([1.0, -0.0])}
)
X = jax.device_put(np.float32([[0.5, 1.0], [-1.0, 2.0]]))
RULE = DynamicLossScale(64.0, growth_interval=2)


def loss_fn(params, x, dtype=jnp.float32):
    a, b, x = (v.astype(dtype) for v in (params["a"], params["b"], x))
    return jnp.sum(jnp.sin(x @ a + b).astype(jnp.float32))


half_loss_fn = functools.partial(loss_fn, dtype=jnp.float16)


def with_leaf(tree, leaf=64.0):
    return tree | {"loss_scale": np.asarray(leaf, getattr(leaf, "dtype", np.float32))}


def without_leaf(tree):
    return {name: x for name, x in tree.items() if name != "loss_scale"}


def scaler(inner=None, rule=RULE, **options):
    inner = relaxed(inner or optax.sgd(0.5, momentum=0.9))
    return scale_as_parameter(LossScaleOptimizer(inner, rule, **options))


def one_step(optimizer, grads, params, state, **extra_args):
    updates, state = optimizer.update(grads, state, params, **extra_args)
    with jax.numpy_dtype_promotion("standard"):
        return optax.apply_updates(params, updates), state


def make_trainer(optimizer, loss_fn, params):
    """Makes a trainer that nobody edited: it logs the loss and the norm, and clips."""
    tx = optax.chain(optax.clip_by_global_norm(2.0), optimizer)

    @jax.jit
    def step(trainer, x):
        loss, grads = jax.value_and_grad(loss_fn)(trainer.params, x)
        return trainer.apply_gradients(grads=grads), (loss, optax.tree.norm(grads))

    return step, TrainState.create(apply_fn=None, params=params, tx=tx)


def is_matrix(tree):
    return jax.tree.map(lambda x: x.ndim == 2, tree)


DECAY = optax.adamw(0.1, weight_decay=0.5)
INNERS = {
    "masked": optax.adamw(0.1, weight_decay=0.5, mask=is_matrix),
    "partition": optax.partition({True: DECAY, False: optax.sgd(0.1)}, is_matrix),
    "accumulating": optax.MultiSteps(optax.lamb(0.1), 2),
}


@pytest.mark.parametrize("inner", INNERS.values(), ids=INNERS)
def test_trains_as_the_bare_optimizer(inner):
    inner, traces = relaxed(inner), []

    def counted(params, x):
        # A penalty on all parameters does not see the scale.
        traces.append(1)
        return loss_fn(params, x) + 0.01 * optax.tree.norm(params, squared=True)

    # At first the leaf is not the scale of the state.
    ours = scaler(inner), with_loss_scale(counted), with_leaf(WEIGHTS, 8.0)
    step, trainer = make_trainer(*ours)
    bare_step, bare = make_trainer(inner, counted, WEIGHTS)

    def kept():
        return without_leaf(trainer.params), trainer.opt_state[1].inner_state

    for bad in (0, 0, 0, 1, 0, 1, 0, 0):
        before = kept()
        trainer, logged = step(trainer, X * INF if bad else X)
        scale = LossScaleOptimizer(inner, RULE).current_loss_scale(trainer.opt_state)
        assert trainer.params["loss_scale"] == scale
        if bad:
            assert not jnp.isfinite(logged[0])
            assert_same_bits(kept(), before)
        else:
            bare, wanted = bare_step(bare, X)
            assert_close((kept()[0], logged), (bare.params, wanted))
    # It grew, backed off twice, and grew: one program for both.
    assert trainer.params["loss_scale"] == 64
    assert len(traces) == 2
    # One array more in the program, beside the optimizer's own: the scale and counters.
    arrays = jax.tree.leaves((trainer.params, kept()[1]))
    assert len(arrays) == len(jax.tree.leaves((bare.params, bare.opt_state))) + 1


class Watching(BackoffOnly):
    """A rule that does not want to see the scale among the gradients."""

    def update(self, grads, state, *, axis_name=None):
        assert jax.tree.structure(without_leaf(grads)) == jax.tree.structure(WEIGHTS)
        return super().update(grads, state, axis_name=axis_name)


EVERY_RULE = RULES | {"fixed": FixedLossScale(64.0), "custom": Watching(64.0)}


@pytest.mark.parametrize("rule", EVERY_RULE.values(), ids=EVERY_RULE)
def test_every_rule_learns_of_an_overflow(rule):
    optimizer = scaler(rule=rule)
    params, good = with_leaf(WEIGHTS), jax.tree.map(jnp.ones_like, WEIGHTS)
    state, rule_state = optimizer.init(params), rule.init()
    # The gradient of the leaf: averaged, cast, or poisoned by what a trainer does.
    for flag in (0.0, 1.0, jnp.bfloat16(1 / 64), 0.0, -1e-30, NAN):
        before, grads = (params, state), with_leaf(good, flag)
        params, state = one_step(optimizer, grads, *before)
        # As if the gradients themselves were not finite.
        shown = good if flag == 0 else optax.tree.scale(INF, good)
        rule_state, _ = rule.update(shown, rule_state)
        assert_same_bits(state.loss_scale_state, rule_state)
        assert params["loss_scale"] == rule(rule_state)
        assert state.last_step_applied == (flag == 0)
        if flag != 0:
            assert_same_bits(without_leaf(params), without_leaf(before[0]))
            assert_same_bits(state.inner_state, before[1].inner_state)
    assert params["b"][0] == 1 - 0.5 - 0.5 * 1.9


HABITS = {
    "bfloat16": lambda grads: optax.tree.cast(grads, jnp.bfloat16),
    "clip": lambda grads: optax.clip_by_global_norm(1e-3).update(grads, None)[0],
    "nan_to_num": lambda grads: jax.tree.map(jnp.nan_to_num, grads),
}


@pytest.mark.parametrize("habit", HABITS.values(), ids=HABITS)
def test_an_overflow_in_one_micro_batch(habit):
    optimizer, params = scaler(), with_leaf(WEIGHTS)
    # Twice, as in a trainer that wraps what was wrapped.
    twice = with_loss_scale(with_loss_scale(half_loss_fn))
    gradients = jax.jit(lambda params, x: habit(jax.grad(twice)(params, x)))
    state = optimizer.init(params)
    for batch in (np.float32([[0.5, 1e5], [-1.0, 2.0]]), X):
        grads = [gradients(params, x) for x in (X, batch, X)]
        total = jax.jit(lambda *grads: functools.reduce(optax.tree.add, grads))(*grads)
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(total))
        before = params
        params, state = one_step(optimizer, total, params, state)
        assert params["loss_scale"] == 32
        assert (params["a"] == before["a"]).all() == (batch is not X)


# The exponents of the leaf, of the scale of the state, and of the leaf after each step.
@pytest.mark.parametrize(
    "exponents", [(10, 15, 15), (0, 23, 23), (23, 0, 0), (-90, 30, 30), (40, 1, 17, 1)]
)
def test_a_leaf_and_a_state_that_disagree(exponents):
    leaf, scale, *steps = [2.0**x for x in exponents]
    optimizer, params = scaler(rule=DynamicLossScale(scale)), with_leaf(WEIGHTS, leaf)
    state = optimizer.init(params)
    for expected in steps:
        grads = jax.grad(with_loss_scale(loss_fn))(params, X)
        wanted = jax.grad(loss_fn)(without_leaf(params), X)
        assert_same_bits(grads, with_leaf(wanted, 0.0))
        params, state = one_step(optimizer, grads, params, state)
        assert params["loss_scale"] == expected


@pytest.mark.parametrize("leaf", [0.0, -1.0, 1e-30])
def test_a_leaf_that_is_no_scale_heals_at_the_first_step(leaf):
    optimizer, params = scaler(), with_leaf(WEIGHTS, leaf)
    grads = jax.grad(with_loss_scale(loss_fn))(params, X)
    new, state = one_step(optimizer, grads, params, optimizer.init(params))
    assert (new["loss_scale"], state.last_step_applied) == (64, True)


@pytest.mark.parametrize(
    ("rule", "value"), [(RULE, INF), (RULE, NAN), (FixedLossScale(64.0), -INF)]
)
def test_a_leaf_restored_as_inf_or_nan_is_named_and_mended(rule, value):
    """A float16 checkpoint does so: no sum leads back from there."""
    optimizer, reader = scaler(rule=rule), LossScaleOptimizer(optax.sgd(1), rule)
    step, trainer = make_trainer(
        optimizer, with_loss_scale(loss_fn), with_leaf(WEIGHTS)
    )
    for _ in range(3):
        trainer, _ = step(trainer, X)
    params, scale = trainer.params, reader.current_loss_scale(trainer.opt_state)
    trainer = trainer.replace(params=with_leaf(params, value))
    for _ in range(40):
        trainer, _ = step(trainer, X)
    assert_same_bits(trainer.params, with_leaf(params, value))
    state = trainer.opt_state
    assert optax.tree.get(state, "consecutive_skipped_steps") == 40
    if rule is RULE:  # The scale would have fallen; a fixed one does not.
        advice = " ".join(diagnostics.report(state).advice)
        assert "see whether the scale among the parameters is finite" in advice
    with pytest.raises(FloatingPointError) as error:
        diagnostics.check_health(state, trainer.params)
    assert "Not finite: params['loss_scale'], float32[]" in str(error.value)
    line = "params['loss_scale'] = optimizer.current_loss_scale(state)"
    assert f"Write {line}," in " ".join(str(error.value).split())
    variables = {"params": dict(trainer.params), "optimizer": reader, "state": state}
    exec(line, variables)
    assert variables["params"]["loss_scale"] == scale
    trainer, _ = step(trainer.replace(params=variables["params"]), X)
    assert optax.tree.get(trainer.opt_state, "last_step_applied")
    assert optax.tree.get(trainer.opt_state, "skipped_steps") == 40


SECOND = {
    "grad of grad": lambda f: jax.grad(
        lambda params: optax.tree.vdot(without_leaf(jax.grad(f)(params)), WEIGHTS)
    ),
    "jvp of grad": lambda f: lambda params: jax.jvp(jax.grad(f), [params], [params])[1],
    "Hessian": lambda f: lambda params: jax.hessian(f)(params)["a"],
}


@pytest.mark.parametrize("second", SECOND.values(), ids=SECOND)
def test_second_derivatives(second):
    wanted = jax.jit(second(lambda params: loss_fn(params, X)))(WEIGHTS)
    ours = second(lambda params: with_loss_scale(loss_fn)(params, X))
    found = jax.jit(ours)(with_leaf(WEIGHTS))
    assert_close(without_leaf(found), wanted)
    assert not np.any(found["loss_scale"])


def test_what_else_may_be_among_parameters_and_arguments():
    more = {"none": None, "key": jax.random.key(0), "frozen": [jnp.float32(2)]}
    more |= {"call": jnp.tanh, "name": "x", "sizes": np.arange(2.0)}

    def loss(model, x, params):
        sizes = [int(size) for size in (*model["sizes"], *params["sizes"])]
        noise = jnp.sum(jax.random.normal(model["key"], sizes))
        loss = loss_fn(model, params["call"](x)) + noise
        return 1e-6 * loss, params["frozen"]

    def grad(loss, params):
        def of_arrays(params, x):
            return loss(params | more, x, params=more)

        return jax.jit(jax.grad(of_arrays, argnums=(0, 1), has_aux=True))(params, X)

    ours = with_loss_scale(with_loss_scale(loss, has_aux=True), has_aux=True)
    (params, x), aux = grad(ours, with_leaf(WEIGHTS))
    assert_close(((without_leaf(params), x), aux), grad(loss, WEIGHTS))


TREES = {
    r"none in a dict": {"a": np.float32(1)},
    r"\['loss_scale'\].*float16\[\]": with_leaf({}, np.float16(1)),
    r"\['loss_scale'\].*float32\[2\]": with_leaf({}, np.float32([1, 1])),
    r"\['x'\].*float32\[\].*\['y'\].*": {"x": with_leaf({}), "y": with_leaf({})},
    r"Partitioned\(.*float16": {"loss_scale": linen.Partitioned(np.float16(1), ())},
    r"Param\([^$]*float16": nnx.State({"loss_scale": nnx.Param(np.float16(1))}),
}


@pytest.mark.parametrize(("found", "tree"), TREES.items())
def test_a_scale_that_is_missing_or_of_another_kind(found, tree):
    message = rf"^params must hold one float32 scalar named 'loss_scale', got .*{found}"
    for call in (scaler().init, with_loss_scale(optax.tree.sum)):
        with pytest.raises(ValueError, match=message):
            call(tree)


def test_what_is_refused():
    optimizer, params = scaler(), with_leaf(WEIGHTS)
    state = optimizer.init(params)
    with pytest.raises(ValueError, match=r"^params must hold .* NoneType"):
        optimizer.update(params, state)
    with pytest.raises(ValueError, match=r"^grads must .* differentiate all"):
        optimizer.update(WEIGHTS, state, params)


def test_a_scale_that_is_trained_as_any_parameter_warns():
    params, inner = with_leaf(WEIGHTS), relaxed(optax.sgd(0.1))
    plain = LossScaleOptimizer(inner, RULE)
    with pytest.warns(UserWarning, match=r"params\['loss_scale'\] .* scale_as_par"):
        state = plain.init(params)
    with pytest.warns(UserWarning, match="and its init"):
        plain.update(params, state, params)
    plain.init({"loss_scale": WEIGHTS["b"]})


def test_a_line_search_of_all_parameters():
    loss, params = functools.partial(loss_fn, x=X), with_leaf(WEIGHTS)
    optimizer, bare = scaler(optax.lbfgs(1.0)), relaxed(optax.lbfgs(1.0))
    state, bare_state = optimizer.init(params), bare.init(WEIGHTS)

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def step(optimizer, function, params, state):
        value, grad = jax.value_and_grad(function)(params)
        extra = {"value": value, "grad": grad, "value_fn": function}
        return one_step(optimizer, grad, params, state, **extra)[0]

    new = step(optimizer, with_loss_scale(loss), params, state)
    assert_close(without_leaf(new), step(bare, loss, WEIGHTS, bare_state))


@pytest.mark.parametrize("bad", [False, True])
def test_gradients_of_each_example(bad):
    private = optax.chain(
        optax.contrib.differentially_private_aggregate(1.0, 0.0, jax.random.key(0)),
        optax.sgd(0.5),
    )
    optimizer, params = scaler(private), with_leaf(WEIGHTS)
    batch = np.stack([X, 2 * np.array(X), X])
    batch[1, 0, 0] = INF if bad else 1

    def grads(loss_fn, params):
        return jax.jit(jax.vmap(jax.grad(loss_fn), (None, 0)))(params, batch)

    found = grads(with_loss_scale(loss_fn), params)
    assert found["loss_scale"].tolist() == [0, int(bad), 0]
    step = jax.jit(functools.partial(one_step, optimizer))
    new, state = step(found, params, optimizer.init(params))
    assert int(state.skipped_steps) == bad
    assert new["loss_scale"] == (32 if bad else 64)
    wanted = grads(loss_fn, WEIGHTS)
    step = jax.jit(functools.partial(one_step, relaxed(private)))
    wanted = WEIGHTS if bad else step(wanted, WEIGHTS, private.init(WEIGHTS))[0]
    assert_close(without_leaf(new), wanted)


def test_the_loss_function_travels():
    for pickler in (pickle, pytest.importorskip("cloudpickle")):
        loss = with_loss_scale(loss_fn)
        again = pickle.loads(pickler.dumps(loss))
        params = with_leaf(WEIGHTS)
        assert_same_bits(jax.grad(again)(params, X), jax.grad(loss)(params, X))
        assert again.without_scale(WEIGHTS, X) == loss(params, X)
    assert loss.__name__ == "loss_fn"


def test_with_a_veto_and_a_checked_loss():
    params, zeros = with_leaf(WEIGHTS), optax.tree.zeros_like(WEIGHTS)
    # The gradient of the leaf, and the arguments; the scale and all counters.
    for rule, flag, options, scale, *counts in [
        (FixedLossScale(64.0), 0.0, {"value": 1.0, "skip_if": True}, 64, 1, 0, 0, 0),
        # An overflow is one, although this rule checks nothing.
        (FixedLossScale(64.0), 1.0, {"value": 1.0}, 64, 1, 1, 1, 0),
        (RULE, 1.0, {"value": 1.0, "skip_if": True}, 32, 1, 1, 0, 0),
        (RULE, 1.0, {"value": NAN}, 64, 1, 1, 0, 1),
    ]:
        optimizer, grads = scaler(rule=rule, check_loss=True), with_leaf(zeros, flag)
        state = optimizer.init(params)
        new, state = one_step(optimizer, grads, params, state, **options)
        assert new["loss_scale"] == scale
        assert list(state[3:7]) == counts


def test_what_the_trainer_freezes_needs_no_derivative():
    def student(params):
        teach = functools.partial(jnp.multiply, params["b"])
        return loss_fn(params, jax.lax.while_loop(lambda x: x[0, 0] > 1, teach, X))

    def of_the_student(function):
        return jax.grad(lambda trained: function({**WEIGHTS, **trained}))

    expected = of_the_student(student)({"a": WEIGHTS["a"]})
    grads = of_the_student(with_loss_scale(student))(with_leaf({"a": WEIGHTS["a"]}))
    assert_close(grads, with_leaf(expected, 0.0))


def test_another_module_of_nnx():
    """Its gradients are unscaled, too, and what the loss writes into it stays."""

    class Model(nnx.Module):
        def __init__(self, **scale):
            self.weight = nnx.Param(jnp.float32(3))
            self.calls = nnx.Variable(jnp.int32(0))
            vars(self).update({name: nnx.Param(x) for name, x in scale.items()})

    def product(model, other):
        other.calls[...] += 1
        return model.weight[...] * other.weight[...]

    model, other = Model(loss_scale=jnp.float32(64)), Model()
    grads = nnx.grad(with_loss_scale(product), argnums=(0, 1))(model, other)
    assert [jax.tree.leaves(x["weight"]) for x in grads] == [[3], [3]]
    assert jax.tree.leaves(other.calls) == [1]
    with_loss_scale(product)(model, other)
    assert jax.tree.leaves(model.loss_scale) == [64]


def test_the_trace_looks_into_the_loss():
    params, state = with_leaf(WEIGHTS), scaler().init(with_leaf(WEIGHTS))
    found, expected = (
        str(diagnostics.trace_numerics(f, params, 1e5 * X, state=state))
        for f in (with_loss_scale(half_loss_fn), half_loss_fn)
    )
    assert found == expected
    assert "begins here" in found
