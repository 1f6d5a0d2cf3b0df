"""NumPyro's `SVI` trains in float16, by the lines of the guide."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_same_bits
from pages import page_fragments

from optax_lossscale import (
    LossScaleOptimizer,
    autocast,
    scale_as_parameter,
    with_loss_scale,
)

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.usefixtures("standard_dtype_promotion"),
]
WEIGHT = 1e-12  # of the ELBO: all gradients are below 2**-25, zero in float16
ADAM = optax.adam(1e-2, eps=1e-20)
READER = LossScaleOptimizer(ADAM, initial_scale=2.0**40)


def layer(name, x, size):
    def init(key):
        return jax.random.normal(key, (x.shape[-1], size)) / x.shape[-1] ** 0.5

    return x @ pytest.importorskip("numpyro").param(name, init)


@pytest.fixture(scope="module")
def program():
    """Returns a variational autoencoder of the digits, and the classes of NumPyro."""
    numpyro = pytest.importorskip("numpyro")
    dist, infer = numpyro.distributions, numpyro.infer

    @numpyro.handlers.scale(scale=WEIGHT)
    def model(x):
        with numpyro.plate("images", len(x)):
            z = numpyro.sample("z", dist.Normal(jnp.zeros(8)).to_event(1))
            logits = layer("pixels", jnp.tanh(layer("decoder", z, 64)), 64)
            numpyro.sample("x", dist.Bernoulli(logits=logits).to_event(1), obs=x)

    @numpyro.handlers.scale(scale=WEIGHT)
    def guide(x):
        numpyro.param("loss_scale", jnp.float32(READER.initial_scale))
        hidden = jnp.tanh(layer("encoder", x, 64))
        mean, log_scale = jnp.split(layer("posterior", hidden, 16), 2, axis=-1)
        posterior = dist.Normal(mean, jnp.exp(log_scale))
        with numpyro.plate("images", len(x)):
            numpyro.sample("z", posterior.to_event(1))

    scope = vars(infer) | {"autocast": autocast, "with_loss_scale": with_loss_scale}
    scope |= {"model": model, "guide": guide, "reader": READER}
    scope["scale_as_parameter"] = scale_as_parameter
    fragments = page_fragments("docs/guide/in-a-trainer.md")
    (code,) = [x for x in fragments if "ELBO" in x]
    exec(code, scope)
    return scope


@pytest.fixture(scope="module")
def images():
    digits = pytest.importorskip("sklearn.datasets").load_digits()
    return jnp.float32(digits.data[:256] > 7)


@pytest.fixture(scope="module")
def result(program, images):
    with jax.numpy_dtype_promotion("standard"):
        return program["svi"].run(jax.random.key(0), 60, images, progress_bar=False)


def test_it_trains_as_in_float32(program, images, result):
    names = "SVI", "model", "guide", "Trace_ELBO"
    make, model, guide, elbo = (program[name] for name in names)
    svi = make(model, guide, ADAM, elbo())
    wanted = svi.run(jax.random.key(0), 60, images, progress_bar=False).losses
    np.testing.assert_allclose(result.losses, wanted, rtol=2e-3)
    assert wanted[-1] < wanted[0] / 2


@pytest.mark.parametrize("way", ["update", "stable_update"])
def test_after_an_overflow_the_parameters_are_preserved(program, images, result, way):
    # Adam's state has None in place of the scale, which the filter keeps.
    too_high = optax.tree.set(
        result.state, lambda path, x: x is not None, loss_scale=jnp.float32(2.0**60)
    )
    svi = program["svi"]
    state, _ = jax.jit(getattr(svi, way))(too_high, images)
    kept = svi.get_params(state)["pixels"] == result.params["pixels"]
    assert kept.all()
    assert READER.current_loss_scale(state) == 2.0**59


def test_a_loss_that_is_not_finite_skips_the_step(program, images, result):
    svi, poisoned = program["svi"], images.at[5, 20].set(jnp.inf)
    state, loss = jax.jit(svi.update)(result.state, poisoned)
    assert not np.isfinite(loss)
    params = svi.get_params(state)
    assert params.pop("loss_scale") == 2.0**39
    assert_same_bits(params, {name: result.params[name] for name in params})
    # Which keeps the whole state, also the scale.
    state, _ = jax.jit(svi.stable_update)(result.state, poisoned)
    assert svi.get_params(state)["loss_scale"] == 2.0**40


def test_without_the_scale_all_gradients_are_zero(program, images, result, monkeypatch):
    monkeypatch.setitem(program, "with_loss_scale", lambda loss_fn, has_aux: loss_fn)
    elbo = program["Float16ELBO"]().loss_with_mutable_state

    @jax.jit
    @jax.grad
    def gradients(params):
        args = program["model"], program["guide"], images
        return elbo(jax.random.key(1), params, *args)["loss"]

    assert not any(np.any(x) for x in jax.tree.leaves(gradients(result.params)))
