"""`trace_numerics` calls a healthy model healthy, at first and after some training."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from helpers import exhaustive_but
from tracing import Findings

from optax_lossscale import LossScaleOptimizer, autocast
from optax_lossscale.diagnostics._common import scale_of
from optax_lossscale.diagnostics._trace.judge.verdict import find_all

rng = np.random.default_rng(0)
X = rng.standard_normal((16, 8, 8, 3), np.float32)
Y = np.arange(16) % 4
TOKENS = rng.integers(0, 32, (4, 13), np.int32)


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def classify(apply):
    return lambda params: cross_entropy(apply(params, X), Y)


def of_linen(module, *inputs, loss):
    params = module.init(jax.random.key(2), *inputs)
    return lambda p: loss(module.apply(p, *inputs)), params


class Convolutions(linen.Module):
    @linen.compact
    def __call__(self, x):
        for width in (8, 16):
            x = linen.max_pool(linen.relu(linen.Conv(width, (3, 3))(x)), (2, 2), (2, 2))
        return linen.Dense(4)(x.reshape(len(x), -1))


def linen_convolutions():
    return of_linen(Convolutions(), X, loss=lambda out: cross_entropy(out, Y))


class Transformer(linen.Module):
    @linen.compact
    def __call__(self, tokens):
        x = linen.Embed(32, 16)(tokens[:, :-1])
        x += self.param("positions", linen.initializers.normal(0.1), x.shape[1:])
        mask = linen.make_causal_mask(tokens[:, :-1])
        y = linen.LayerNorm()(x)
        x += linen.MultiHeadDotProductAttention(2)(y, mask=mask)
        x += linen.Dense(16)(linen.gelu(linen.Dense(32)(linen.LayerNorm()(x))))
        return linen.Dense(32)(linen.LayerNorm()(x))


def linen_transformer():
    return of_linen(
        Transformer(), TOKENS, loss=lambda out: cross_entropy(out, TOKENS[:, 1:])
    )


def linen_recurrent():
    rows = X.reshape(16, 8, 24)
    module = linen.RNN(linen.OptimizedLSTMCell(12))
    return of_linen(module, rows, loss=lambda out: jnp.mean((out[..., 0] - 0.5) ** 2))


class Residual(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Conv(3, 8, (3, 3), rngs=rngs)
        self.convs = nnx.List([nnx.Conv(8, 8, (3, 3), rngs=rngs) for _ in range(4)])
        self.norms = nnx.List([nnx.BatchNorm(8, rngs=rngs) for _ in range(4)])
        self.last = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x):
        x = self.first(x)
        for i in (0, 2):
            h = nnx.relu(self.norms[i](self.convs[i](x)))
            x = nnx.relu(x + self.norms[i + 1](self.convs[i + 1](h)))
        return self.last(x.mean((1, 2)))


def of_nnx(model, run):
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    return lambda p: run(nnx.merge(graph, p, rest, copy=True)), params


def nnx_residual():
    return of_nnx(Residual(nnx.Rngs(0)), lambda model: cross_entropy(model(X), Y))


def nnx_perceptron():
    rngs = nnx.Rngs(0)
    layers = [nnx.Linear(192, 32, rngs=rngs), nnx.relu, nnx.Linear(32, 4, rngs=rngs)]
    model = nnx.Sequential(*layers)
    return of_nnx(model, lambda m: cross_entropy(m(X.reshape(16, -1)), Y))


def nnx_autoencoder():
    rngs, x = nnx.Rngs(0), X.reshape(16, -1)
    sizes = [(192, 32), (32, 4), (4, 32), (32, 192)]
    layers = [y for s in sizes for y in (nnx.Linear(*s, rngs=rngs), nnx.silu)]
    model = nnx.Sequential(*layers[:-1])
    return of_nnx(model, lambda m: jnp.mean((m(x) - x) ** 2))


def of_equinox(model, run):
    params, static = eqx.partition(model, eqx.is_inexact_array)
    return lambda p: run(eqx.combine(p, static)), params


def equinox_perceptron():
    model = eqx.nn.MLP(192, 4, 32, 3, jax.nn.tanh, key=jax.random.key(0))
    x = X.reshape(16, -1)
    return of_equinox(model, lambda m: cross_entropy(jax.vmap(m)(x), Y))


def equinox_convolutions():
    keys = jax.random.split(jax.random.key(0))
    layers = [
        eqx.nn.Conv2d(3, 8, 3, key=keys[0]),
        eqx.nn.Lambda(jax.nn.gelu),
        eqx.nn.AvgPool2d(2, 2),
        eqx.nn.Lambda(jnp.ravel),
        eqx.nn.Linear(72, 4, key=keys[1]),
    ]
    x, model = X.transpose(0, 3, 1, 2), eqx.nn.Sequential(layers)
    return of_equinox(model, lambda m: cross_entropy(jax.vmap(m)(x), Y))


def of_haiku(run):
    import haiku as hk

    model = hk.without_apply_rng(hk.transform(run))
    return model.apply, model.init(jax.random.key(0))


def haiku_perceptron():
    import haiku as hk

    return of_haiku(lambda: cross_entropy(hk.nets.MLP([32, 32, 4])(hk.Flatten()(X)), Y))


def haiku_recurrent():
    import haiku as hk

    def run():
        core = hk.GRU(12)
        rows = X.reshape(16, 8, 24).swapaxes(0, 1)
        out, _ = hk.dynamic_unroll(core, rows, core.initial_state(16))
        return cross_entropy(hk.Linear(4)(out[-1]), Y)

    return of_haiku(run)


MODELS = [
    linen_convolutions, linen_transformer, linen_recurrent, nnx_residual,
    nnx_perceptron, nnx_autoencoder, equinox_perceptron, equinox_convolutions,
    haiku_perceptron, haiku_recurrent,
]  # fmt: skip


@pytest.mark.usefixtures("standard_dtype_promotion")
@pytest.mark.parametrize("make", exhaustive_but(MODELS, []))
def test_models_are_healthy(make):
    loss_fn, params = make()
    loss_fn = autocast(loss_fn)
    optimizer = LossScaleOptimizer(optax.adam(3e-3))
    state = optimizer.init(params)
    step = jax.jit(lambda p, s: optimizer.minimize(loss_fn, p, s))
    traced = Findings(loss_fn, params)
    for steps in (0, 50):
        for _ in range(steps):
            params, state, _ = step(params, state)
        search = traced.search(params, scale=scale_of(state).item())
        # A choice among equal numbers is no fault.
        (found,) = find_all(search)
        assert found.kind in ("fine", "decision"), found.message
        assert search.best.scale >= 1
