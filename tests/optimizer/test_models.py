"""A model of any library takes the place of a dictionary, in every call."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from helpers import assert_close, assert_same_bits, exhaustive_but, relaxed, to_numpy
from networks import Net, in_one_call, in_two_calls

from optax_lossscale import (
    LossScaleOptimizer,
    autocast,
    diagnostics,
    scale_as_parameter,
    select_applied,
    with_loss_scale,
)

X = np.sin(np.arange(32.0, dtype=np.float32)).reshape(8, 4)
Y = X[:, :1] * X[:, 1:2]
INNER = relaxed(optax.adamw(1e-2))


def nnx_loss(model, x, y):
    return jnp.mean((model(x) - y) ** 2)


class EquinoxNet(eqx.Module):
    """Holds functions, a number that is a setting, a key and a flag."""

    mlp: eqx.nn.MLP
    drop: eqx.nn.Dropout
    key: jax.Array
    temperature: float

    def __init__(self):
        self.mlp = eqx.nn.MLP(4, 1, 8, 1, dtype=jnp.float32, key=jax.random.key(0))
        self.drop = eqx.nn.Dropout(0.1)
        self.key, self.temperature = jax.random.key(1), 2.0

    def __call__(self, x):
        return self.mlp(self.drop(x, key=self.key)) / self.temperature


def equinox_loss(model, x, y):
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


class LinenNet(linen.Module):
    @linen.compact
    def __call__(self, x):
        hidden = linen.Dense(8)(x)
        hidden = linen.BatchNorm(use_running_average=False)(hidden)
        return linen.Dense(1)(linen.relu(hidden))


def linen_loss(params, x, y):
    stats = {"BatchNorm_0": {"mean": jnp.zeros(8), "var": jnp.ones(8)}}
    variables = {"params": params, "batch_stats": stats}
    out, _ = LinenNet().apply(variables, x, mutable=["batch_stats"])
    return jnp.mean((out - y) ** 2)


def haiku_net():
    hk = pytest.importorskip("haiku")
    return hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([8, 1])(x)))


def haiku_loss(params, x, y):
    return jnp.mean((haiku_net().apply(params, x) - y) ** 2)


class Kind(NamedTuple):
    """How people write a model of a library.

    Attributes:
      make: Makes the model.
      loss_fn: Its loss.
      transform: What differentiates it in that library.
      jit: What compiles its step there.
      trained: Its parameters.
    """

    make: Any
    loss_fn: Any
    transform: Any = jax.value_and_grad
    jit: Any = jax.jit
    trained: Any = staticmethod(lambda model: model)


KINDS = {
    "nnx": Kind(
        Net,
        nnx_loss,
        nnx.value_and_grad,
        nnx.jit,
        lambda model: nnx.state(model, nnx.Param),
    ),
    "equinox": Kind(
        EquinoxNet,
        equinox_loss,
        eqx.filter_value_and_grad,
        eqx.filter_jit,
        lambda model: eqx.filter(model, eqx.is_inexact_array),
    ),
    "linen": Kind(lambda: LinenNet().init(jax.random.key(0), X)["params"], linen_loss),
    "haiku": Kind(lambda: haiku_net().init(jax.random.key(0), X), haiku_loss),
}


def in_two_calls_of_optax(optimizer, loss_fn, **options):
    def step(model, state, *args):
        grad_fn = optimizer.value_and_grad(loss_fn, state, **options)
        loss, grads = grad_fn(model, *args)
        updates, state = optimizer.update(grads, state, model)
        if isinstance(model, nnx.Module):
            params = nnx.state(model, nnx.Param)
            nnx.update(model, optax.apply_updates(params, updates))
        else:
            model = eqx.apply_updates(model, updates)
        return model, state, loss

    return step


def contents(model):
    tree = nnx.state(model) if isinstance(model, nnx.Module) else model
    return [to_numpy(x) for x in jax.tree.leaves(eqx.filter(tree, eqx.is_array))]


EAGER = pytest.param(lambda step: step, id="eager", marks=pytest.mark.exhaustive)


@pytest.mark.parametrize(
    "kind", exhaustive_but(KINDS.values(), [KINDS["nnx"], KINDS["equinox"]]), ids=KINDS
)
class TestAModel:
    @pytest.mark.parametrize("wrap", [None, EAGER])
    @pytest.mark.parametrize(
        ("make_step", "retries"),
        [
            (in_one_call, 0),
            (in_one_call, 4),
            (in_two_calls, 0),
            (in_two_calls_of_optax, 0),
        ],
    )
    def test_trains_as_with_the_transform_of_its_library(
        self, kind, make_step, retries, wrap
    ):
        ends, loss_fn = [], autocast(kind.loss_fn)
        for options in ({}, {"transform": kind.transform}):
            optimizer, model = LossScaleOptimizer(INNER, retries=retries), kind.make()
            # Before, the parameters were named here, too.
            state = optimizer.init(kind.trained(model) if options else model)
            step, losses = make_step(optimizer, loss_fn, **options), []
            step = (wrap or kind.jit)(step)
            for _ in range(5):
                model, state, loss = step(model, state, X, Y)
                losses.append(loss)
            assert losses[-1] < losses[0]
            ends.append([*contents(model), *losses])
        assert_same_bits(*ends)

    def test_is_traced(self, kind):
        model = kind.make()
        before = contents(model)
        loss_fn = autocast(kind.loss_fn)
        trace = diagnostics.trace_numerics(loss_fn, model, X, Y, scale=8.0)
        assert "agree with float32" in str(trace)
        lines = diagnostics.float32_lines(loss_fn, model, X, Y, scale=8.0)
        assert (lines.verified, lines.lines) == (True, [])
        assert_same_bits(contents(model), before)

    def test_is_read_by_the_diagnostics_and_helpers(self, kind):
        optimizer, model = LossScaleOptimizer(INNER), kind.make()
        state = optimizer.init(model)
        _, grads = optimizer.value_and_grad(kind.loss_fn, state)(model, X, Y)
        assert diagnostics.describe_nonfinite(grads) == []
        assert diagnostics.describe_nonfinite(model) == []
        kept = select_applied(state, model, kind.make())
        assert type(kept) is type(model)
        bad = jax.tree.map(lambda x: x * jnp.nan, grads)
        assert "nan" in str(diagnostics.describe_nonfinite(bad)[0])


class TestAScaleAmongTheParameters:
    optimizer = LossScaleOptimizer(INNER, initial_scale=2.0**8)
    inside = scale_as_parameter(optimizer)

    def test_of_a_module(self):
        model = Net()
        model.loss_scale = nnx.Param(jnp.float32(2**8))
        state = self.inside.init(model)
        before = to_numpy(model.norm.mean[...])
        loss, grads = nnx.value_and_grad(with_loss_scale(nnx_loss))(model, X, Y)
        updates, state = self.inside.update(grads, state, model)
        assert np.isfinite(loss)
        assert (updates["loss_scale"][...], state.skipped_steps) == (0, 0)
        assert (updates["hidden"]["kernel"][...] != 0).all()
        assert (model.norm.mean[...] != before).any()

    def test_beside_a_module_is_refused(self):
        params = {"model": Net(), "loss_scale": jnp.float32(2**8)}
        loss_fn = with_loss_scale(lambda p, x, y: nnx_loss(p["model"], x, y))
        with pytest.raises(TypeError, match=r"model\.loss_scale = nnx\.Param\("):
            nnx.value_and_grad(loss_fn)(params, X, Y)


def test_batch_statistics_move_without_a_word_of_flax():
    model, optimizer = Net(), LossScaleOptimizer(INNER)
    trainer = nnx.Optimizer(model, optimizer, wrt=nnx.Param)
    before = to_numpy(model.norm.mean[...])
    _, grads = optimizer.value_and_grad(nnx_loss, trainer.opt_state)(model, X, Y)
    trainer.update(model, grads)
    assert (model.norm.mean[...] != before).any()


def two_layers():
    rngs = nnx.Rngs(0)
    return nnx.Linear(4, 4, rngs=rngs), nnx.Linear(4, 1, rngs=rngs)


@pytest.mark.parametrize("retries", [0, 2])
def test_modules_that_share_parameters_train_them_once(retries):
    def loss_fn(parts, x, y):
        return nnx_loss(lambda x: parts["end"](parts["again"](parts["begin"](x))), x, y)

    layer, last = two_layers()
    parts = {"begin": layer, "again": layer, "end": nnx.Sequential(layer, last)}
    optimizer = LossScaleOptimizer(INNER, retries=retries)
    state = optimizer.init(parts)
    for _ in range(3):
        parts, state, _ = optimizer.minimize(loss_fn, parts, state, X, Y)
    assert parts["begin"] is parts["again"] is layer
    # By hand, in one module.
    expected = two_layers()
    model = nnx.Sequential(*[expected[0]] * 3, expected[1])
    bare_state = INNER.init(nnx.state(model, nnx.Param))
    for _ in range(3):
        grads = nnx.grad(nnx_loss)(model, X, Y)
        params = nnx.state(model, nnx.Param)
        updates, bare_state = INNER.update(grads, bare_state, params)
        nnx.update(model, optax.apply_updates(params, updates))
    for found, wanted in zip((layer, last), expected, strict=True):
        assert_close(nnx.state(found), nnx.state(wanted))


def test_what_is_no_number_has_no_gradient():
    params = {"w": np.ones(3, np.float32), "order": np.arange(3), "f": jnp.tanh}
    params |= {"name": "x", "key": jax.random.key(0), "bias": 0.5}
    optimizer = LossScaleOptimizer(optax.sgd(0.5))
    state = optimizer.init(params)

    def loss_fn(params, x):
        return params["f"](jnp.sum(params["w"][params["order"]]) * x + params["bias"])

    _, grads = optimizer.value_and_grad(loss_fn, state)(params, 0.0)
    missing = {name for name, grad in grads.items() if grad is None}
    assert missing == {"order", "f", "name", "key"}
    _, (first, second) = optimizer.value_and_grad(loss_fn, state, (0, -1))(params, 0.0)
    assert first["bias"] == grads["bias"] != 0 != second
    new, *_ = optimizer.minimize(loss_fn, params, state, 0.0)
    assert {name: new[name] for name in ("f", "name")} == {"f": jnp.tanh, "name": "x"}
    assert new["order"].tolist() == [0, 1, 2]
    assert new["bias"] == 0.5 - 0.5 * grads["bias"]


@pytest.mark.parametrize("argnums", [3, (0, 0), (0, -1), -2])
def test_arguments_to_differentiate_that_are_none_or_come_twice(argnums):
    optimizer = LossScaleOptimizer(optax.sgd(0.5))
    grad_fn = optimizer.value_and_grad(jnp.sum, optimizer.init(X), argnums)
    with pytest.raises(
        ValueError, match=r"argnums must name each .* once, got .* of 1"
    ):
        grad_fn(X)


def only_by_keyword(model, x, *, y):
    return nnx_loss(model, x, y)


def of_any_keyword(model, x, **batch):
    return nnx_loss(model, x, **batch)


@pytest.mark.parametrize("loss_fn", [only_by_keyword, of_any_keyword])
@pytest.mark.parametrize("retries", [0, 4])
def test_keywords_without_a_position(loss_fn, retries):
    optimizer, model = LossScaleOptimizer(INNER, retries=retries), Net()
    state = optimizer.init(model)
    *_, loss = optimizer.minimize(autocast(loss_fn), model, state, X, y=Y)
    np.testing.assert_allclose(loss, nnx_loss(Net(), X, Y), rtol=1e-2)
