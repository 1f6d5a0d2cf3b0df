"""`minimize` takes Flax nnx models: they change in place, as by `nnx.Optimizer`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_same_bits, relaxed, to_numpy

from optax_lossscale import LossScaleOptimizer, autocast

nnx = pytest.importorskip("flax.nnx")

X = np.sin(np.arange(64.0, dtype=np.float32)).reshape(8, 8)
# Each operation of a pass compiles a program of its own without `jit`.
EAGER = pytest.param(lambda f: f, id="eager", marks=pytest.mark.exhaustive)


class Model(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.hidden = nnx.Linear(8, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.output = nnx.Linear(16, 1, rngs=rngs)

    def __call__(self, x):
        return self.output(self.drop(nnx.relu(self.norm(self.hidden(x)))))


def loss_fn(model, x):
    return jnp.mean((model(x) - x[:, :1]) ** 2)


def make(inner=None, *, model=None, wrt=nnx.Param, **options):
    model = model or Model()
    optimizer = LossScaleOptimizer(inner or optax.sgd(0.1, 0.9), **options)
    return optimizer, model, optimizer.init(nnx.state(model, wrt))


def values(model):
    """Copies the arrays of all variables, also keys and random counts, to NumPy."""
    return [to_numpy(x) for x in jax.tree.leaves(nnx.state(model))]


def train(optimizer, model, state, wrap=nnx.jit, steps=3, loss_fn=loss_fn, **options):
    options = {"transform": nnx.value_and_grad} | options

    @wrap
    def step(model, state, x):
        return optimizer.minimize(loss_fn, model, state, x, **options)

    for _ in range(steps):
        new, state, loss = step(model, state, X)
        # jax.jit returns another module.
        assert wrap is jax.jit or new is model
        model = new
    return model, state, loss


@functools.cache
def reference(steps=3):
    model = Model()
    optimizer = nnx.Optimizer(model, optax.sgd(0.1, 0.9), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        loss, grads = nnx.value_and_grad(loss_fn)(model, x)
        optimizer.update(model, grads)
        return loss

    for _ in range(steps):
        loss = step(model, optimizer, X)
    return [*values(model), loss]


@pytest.mark.parametrize("retries", [0, 24])
@pytest.mark.parametrize("wrap", [nnx.jit, jax.jit, EAGER])
def test_the_model_changes_as_by_the_optimizer_of_nnx(wrap, retries):
    model, _, loss = train(*make(initial_scale=2.0**8, retries=retries), wrap)
    for x, y in zip([*values(model), loss], reference(), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-3, atol=1e-5)


def test_passes_that_run_again_change_it_once():
    half = autocast(loss_fn)
    low = train(*make(initial_scale=2.0**8, retries=24), loss_fn=half)
    high = train(*make(initial_scale=2.0**24, retries=24), loss_fn=half)
    assert (low[1].retries, high[1].skipped_steps) == (0, 0)
    assert high[1].retries > 5
    # Statistics and random counts are those of the first passes.
    for x, y in zip(values(high[0]), values(low[0]), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-5)


def test_in_a_tree_beside_arrays_and_with_auxiliary_data():
    def loss_with_bias(params, x):
        model, bias = params["model"], params["bias"]
        return jnp.mean((model(x) + bias - 1) ** 2), model.norm.mean[...]

    model = Model()
    optimizer = LossScaleOptimizer(optax.sgd(0.1), initial_scale=4.0, retries=2)
    params = {"model": model, "bias": jnp.zeros(())}
    state = optimizer.init(
        {"model": nnx.state(model, nnx.Param), "bias": jnp.zeros(())}
    )
    before = values(model)
    new, state, (_, mean) = optimizer.minimize(
        loss_with_bias, params, state, X, has_aux=True, transform=nnx.value_and_grad
    )
    assert new["model"] is model
    assert new["bias"] != 0
    np.testing.assert_array_equal(mean, model.norm.mean[...])
    assert any((x != y).any() for x, y in zip(values(model), before, strict=True))


@pytest.mark.parametrize("retries", [0, 24])
def test_only_the_variables_that_are_differentiated_change(retries):
    wrt = nnx.All(nnx.Param, nnx.PathContains("output"))
    transform = functools.partial(nnx.value_and_grad, argnums=nnx.DiffState(0, wrt))
    optimizer, model, state = make(wrt=wrt, retries=retries)
    kernels = model.hidden.kernel[...], model.output.kernel[...]
    train(optimizer, model, state, transform=transform)
    assert_same_bits(model.hidden.kernel[...], kernels[0])
    assert (model.output.kernel[...] != kernels[1]).any()


def test_a_line_search_evaluates_copies():
    inner = optax.lbfgs(linesearch=optax.scale_by_backtracking_linesearch(5))
    model, _, _ = train(*make(relaxed(inner), retries=2), steps=2)
    # A trial of the search draws no random number of the model.
    assert model.drop.rngs.count[...] == 2


def test_many_steps_in_a_scan():
    optimizer, model, state = make(initial_scale=2.0**24, retries=24)
    half = autocast(loss_fn)

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
    def steps(carry, x):
        model, state = carry
        model, state, loss = optimizer.minimize(
            half, model, state, x, transform=nnx.value_and_grad
        )
        return (model, state), loss

    (model, state), losses = nnx.jit(steps)((model, state), jnp.stack([X] * 3))
    assert (state.skipped_steps, losses.shape) == (0, (3,))
    assert jnp.isfinite(losses).all()
    assert model.drop.rngs.count[...] == 3
