"""`trace_numerics` names the user's line in models: of each framework, and faulty."""

import re

import equinox as eqx
import faulty_transformer
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from arithmetic import mean, normal
from faults import Fault, assert_named
from flax import linen, nnx
from helpers import exhaustive_but

from optax_lossscale import LossScaleOptimizer
from optax_lossscale.diagnostics import trace_numerics
from optax_lossscale.diagnostics._trace.measure.call import gradients_of, make_call

X = np.full((2, 3), 10.0, np.float32)
# In the model: 10 * 3 * 0.1 = 3 before the gain; then 3 * gain * 2 * weight.
SMALL, LARGE = 0.1, 3e4
OVERFLOWS = {
    "planted": ({"gain": 3e4, "weight": SMALL}, "mul"),
    "layer": ({"gain": 10.0, "weight": LARGE}, "dot_general"),
}


class Linen(linen.Module):
    gain: float
    weight: float

    @linen.compact
    def __call__(self, x):
        x = linen.Dense(2, kernel_init=linen.initializers.constant(SMALL))(x)
        x = x.astype(jnp.float16) * self.gain  # planted: linen
        init = linen.initializers.constant(self.weight)
        last = linen.Dense(2, dtype=jnp.float16, kernel_init=init, name="last")
        return last(x)  # layer: linen


class Nnx(nnx.Module):
    def __init__(self, gain, weight):
        rngs, constant = nnx.Rngs(0), nnx.initializers.constant
        self.gain = gain
        self.first = nnx.Linear(3, 2, kernel_init=constant(SMALL), rngs=rngs)
        self.last = nnx.Linear(
            2, 2, dtype=jnp.float16, kernel_init=constant(weight), rngs=rngs
        )

    def __call__(self, x):
        x = self.first(x).astype(jnp.float16) * self.gain  # planted: nnx
        return self.last(x)  # layer: nnx


class Equinox(eqx.Module):
    first: eqx.nn.Linear
    last: eqx.nn.Linear
    gain: float

    def __init__(self, gain, weight):
        def dense(size, weight):
            layer = eqx.nn.Linear(size, 2, use_bias=False, key=jax.random.key(0))
            weight = jnp.full((2, size), *weight)
            return eqx.tree_at(lambda x: x.weight, layer, weight)

        self.gain = gain
        self.first = dense(3, (SMALL,))
        self.last = dense(2, (weight, jnp.float16))

    def __call__(self, x):
        x = jax.nn.relu(self.first(x))
        x = x.astype(jnp.float16) * self.gain  # planted: equinox
        return self.last(x)  # layer: equinox


def haiku_model(x, gain, weight):
    import haiku as hk

    init = hk.initializers.Constant(SMALL)
    x = hk.Linear(2, w_init=init)(x).astype(jnp.float16)
    x = x * gain  # planted: haiku
    # Haiku makes the parameters in the dtype of the input.
    last = hk.Linear(2, w_init=hk.initializers.Constant(weight), name="last")
    return last(x)  # layer: haiku


def loss_of(model):
    params = model.init(jax.random.key(0), X)
    return lambda params, x: mean(model.apply(params, x)), params


def linen_loss(**options):
    return loss_of(Linen(**options))


def nnx_loss(**options):
    return lambda model, x: mean(model(x)), Nnx(**options)


def equinox_loss(**options):
    return lambda model, x: mean(jax.vmap(model)(x)), Equinox(**options)


def haiku_loss(**options):
    import haiku as hk

    model = hk.transform(lambda x: haiku_model(x, **options))
    return loss_of(hk.without_apply_rng(model))


# The loss of each, and the scopes of the line with the gain and of the last layer.
MODELS = {
    "linen": (linen_loss, "Linen", "Linen/last"),
    "nnx": (nnx_loss, "", ""),
    "equinox": (equinox_loss, "", "eqx.nn.Linear"),
    "haiku": (haiku_loss, "", "last"),
}
CASES = [(name, kind) for kind in OVERFLOWS for name in MODELS]


@pytest.mark.parametrize("case", exhaustive_but(CASES, CASES[:1]), ids="-".join)
def test_models_of_each_framework(case):
    name, kind = case
    make, *scopes = MODELS[name]
    options, primitive = OVERFLOWS[kind]
    operation = {"primitive": primitive, "scope": scopes[kind == "layer"]}
    loss_fn, params = make(**options)
    mark = f"{kind}: {name}"
    assert_named(Fault(loss_fn, (params, X), __file__, mark, operation=operation))


class Normed(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.gain, self.table = 2.0, nnx.Variable(jnp.ones(2))
        self.layer, self.norm = nnx.Linear(3, 2, rngs=rngs), nnx.BatchNorm(2, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.layer(x)) * self.gain * self.table


class Averaged(nnx.Module):
    def __init__(self):
        w = jnp.asarray(W)  # At the start, both hold this array.
        self.w, self.mean = nnx.Param(w), nnx.BatchStat(w)

    def __call__(self, x):
        return x @ (self.w + self.mean)


class Scaled(eqx.Module):
    w: jax.Array
    rate: float

    def __call__(self, x):
        return x @ self.w * (2 if self.rate > 0.25 else 1)  # a setting


def normed(params, x, statistics):
    y = x @ params["w"] * params["gain"] - statistics["mean"]
    return mean(y), {"mean": y.mean(0)}


W = np.float32([[0.5, -1], [2, 0.1], [-0.3, 1]])
AVERAGES = {"mean": np.zeros(2, np.float32)}
TRAINED = {
    "a number in a dict": (normed, lambda: {"w": W, "gain": 2.0}, AVERAGES),
    "None": (normed, lambda: {"w": W, "gain": np.float32(2), "none": None}, AVERAGES),
    "nnx": (lambda model, x: mean(model(x) ** 2), Normed),
    "nnx, with an average": (lambda model, x: mean(model(x)), Averaged),
    "nnx in a dict": (
        lambda params, x: mean((params["model"](x) * params["scale"]) ** 2),
        lambda: {"model": Normed(), "scale": 2.0},
    ),
    "equinox": (lambda model, x: mean(model(x)), lambda: Scaled(jnp.asarray(W), 0.5)),
    "equinox beside a number": (
        lambda params, x: mean(params["model"](x) * params["scale"]),
        lambda: {"model": Scaled(jnp.asarray(W), 0.5), "scale": 2.0},
    ),
}


@pytest.mark.parametrize("name", TRAINED)
def test_it_differentiates_what_a_step_differentiates(name):
    loss_fn, make, *more = TRAINED[name]
    params = make()
    args, has_aux = (params, normal(4, 3), *more), bool(more)
    optimizer = LossScaleOptimizer(optax.sgd(0.1))
    step = optimizer.value_and_grad(loss_fn, optimizer.init(params), has_aux=has_aux)
    _, wanted = step(*args)
    call = make_call("trace_numerics", loss_fn, params, args[1:], {}, has_aux)
    _, grads = gradients_of(call)(1.0, call.arrays)
    for x, y in zip(grads, jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-7)
    assert not re.search(
        "mean|var|table|rate", " ".join(call.names[: call.differentiated])
    )
    trace = trace_numerics(loss_fn, *args, has_aux=has_aux)
    assert trace.findings[0].kind == "fine"


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")  # Of -1e9, in NumPy.
@pytest.mark.parametrize("name", exhaustive_but(faulty_transformer.FAULTS, []))
def test_a_transformer(name):
    fault = faulty_transformer.plant(name, layers=4 if name == "residual" else 1)
    assert_named(fault)
    first = fault.trace.first_nonfinite  # It may be in another layer.
    assert (first is None) == (name == "data")
    assert first is None or first.line in fault.lines


@pytest.mark.exhaustive
def test_finds_nothing_in_the_sound_model():
    trace = faulty_transformer.plant(None, layers=1).trace
    assert [finding.kind for finding in trace.findings] == ["fine"]
    assert trace.first_nonfinite is None
