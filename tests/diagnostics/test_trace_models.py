"""`trace_numerics` names the user's line in the models of each framework."""

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import pytest
from flax import linen, nnx
from helpers import exhaustive_but
from tracing import line_of

from optax_lossscale.diagnostics import trace_numerics

pytestmark = pytest.mark.usefixtures("quick_compilation")
X = jnp.full((2, 3), 10.0)
# In the model: 10 * 3 * 0.1 = 3 before the gain; then 3 * gain * 2 * weight.
SMALL, LARGE = 0.1, 3e4
PLANTED, LAYER = {"gain": 3e4, "weight": SMALL}, {"gain": 10.0, "weight": LARGE}


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
    activation: object = jax.nn.relu

    def __init__(self, gain, weight):
        self.gain = gain
        self.first = eqx.tree_at(
            lambda x: x.weight,
            eqx.nn.Linear(3, 2, use_bias=False, key=jax.random.key(0)),
            jnp.full((2, 3), SMALL),
        )
        self.last = eqx.tree_at(
            lambda x: x.weight,
            eqx.nn.Linear(2, 2, use_bias=False, key=jax.random.key(0)),
            jnp.full((2, 2), weight, jnp.float16),
        )

    def __call__(self, x):
        x = self.activation(self.first(x))
        x = x.astype(jnp.float16) * self.gain  # planted: equinox
        return self.last(x)  # layer: equinox


def haiku_model(x, gain, weight):
    init = hk.initializers.Constant(SMALL)
    x = hk.Linear(2, w_init=init)(x).astype(jnp.float16)
    x = x * gain  # planted: haiku
    # Haiku makes the parameters in the dtype of the input.
    last = hk.Linear(2, w_init=hk.initializers.Constant(weight), name="last")
    return last(x)  # layer: haiku


def mean(x):
    return jnp.mean(x.astype(jnp.float32))


def run_linen(**options):
    model = Linen(**options)
    params = model.init(jax.random.key(0), X)
    return trace_numerics(lambda p, x: mean(model.apply(p, x)), params, X)


def run_nnx(**options):
    return trace_numerics(lambda model, x: mean(model(x)), Nnx(**options), X)


def run_nnx_split(**options):
    graph, params, rest = nnx.split(Nnx(**options), nnx.Param, ...)

    def loss_fn(params, rest, x):
        return mean(nnx.merge(graph, params, rest)(x))

    return trace_numerics(loss_fn, params, rest, X)


def run_equinox(**options):
    def loss_fn(model, x):
        return mean(jax.vmap(model)(x))

    return trace_numerics(loss_fn, Equinox(**options), X)


def run_haiku(**options):
    model = hk.without_apply_rng(hk.transform(lambda x: haiku_model(x, **options)))
    params = model.init(jax.random.key(0), X)
    return trace_numerics(lambda p, x: mean(model.apply(p, x)), params, X)


MODELS = {
    "linen": (run_linen, "Linen", "Linen/last"),
    "nnx": (run_nnx, "", ""),
    "nnx_split": (run_nnx_split, "", ""),
    "equinox": (run_equinox, "", "eqx.nn.Linear"),
    "haiku": (run_haiku, "", "last"),
}


@pytest.mark.parametrize("name", MODELS)
def test_overflow_in_the_users_line(name):
    run, scope, _ = MODELS[name]
    found = run(**PLANTED).first_nonfinite
    assert (found.phase, found.primitive) == ("forward", "mul")
    assert found.line == line_of(f"planted: {name.split('_')[0]}", __file__)
    assert found.file == __file__
    assert found.scope == scope


@pytest.mark.parametrize("name", exhaustive_but(MODELS, ["linen"]))
def test_overflow_in_a_layer(name):
    run, _, scope = MODELS[name]
    found = run(**LAYER).first_nonfinite
    assert (found.phase, found.primitive) == ("forward", "dot_general")
    assert found.line == line_of(f"layer: {name.split('_')[0]}", __file__)
    assert found.file == __file__
    assert found.scope == scope
