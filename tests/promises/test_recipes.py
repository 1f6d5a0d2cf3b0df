"""The pages under docs/recipes are scripts: each runs, and a skip changes nothing."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import INF, RECIPES, arrays, assert_same_bits, exhaustive_but
from pages import has_check, run_page
from recipes import assert_near

from optax_lossscale import LossScaleOptimizer, autocast

pytestmark = pytest.mark.usefixtures("standard_dtype_promotion")
# The README lists the pages.
PAGES = sorted({path.stem for path in RECIPES.glob("*.md")} - {"README"})
BOXES = ["with_partitioning", "with_logical_partitioning"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", PAGES)
def test_page(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # Keras reads it once, where it is imported.
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    run_page(f"docs/recipes/{name}.md", f"{name}.md")


@pytest.mark.parametrize("name", PAGES)
def test_a_page_asserts_something(name):
    assert has_check(f"docs/recipes/{name}.md"), "It needs a comment: <!-- check"


@pytest.mark.parametrize("box", exhaustive_but(BOXES, BOXES[:1]))
def test_parameters_in_the_boxes_of_flax(box):
    """What the page about linen says of `nn.Partitioned` and its like."""
    from flax import linen as nn

    make = getattr(nn, box)(nn.initializers.lecun_normal(), (None, "model"))
    model = nn.Dense(2, dtype=jnp.float16, kernel_init=make)
    x = jnp.arange(12.0).reshape(4, 3) / 12

    def loss_fn(params, x):
        return jnp.mean((model.apply(params, x) - 1).astype(jnp.float32) ** 2)

    params = model.init(jax.random.key(0), x)
    assert isinstance(params["params"]["kernel"], nn.meta.AxisMetadata)
    optimizer = LossScaleOptimizer(optax.adamw(0.1), initial_scale=2.0**8)
    step = jax.jit(functools.partial(optimizer.minimize, loss_fn))
    state = optimizer.init(params)
    moved, state, _ = step(params, state, x)
    assert jax.tree.structure(moved) == jax.tree.structure(params)
    kept, after, _ = step(moved, state, x * INF)
    assert (state.last_step_applied, after.last_step_applied) == (True, False)
    assert_same_bits((kept, after.inner_state), (moved, state.inner_state))
    moments = nn.get_partition_spec(after.inner_state[0].mu)
    assert moments == nn.get_partition_spec(params)


@pytest.mark.exhaustive
def test_a_contrastive_loss_encodes_in_chunks_as_at_once():
    """What the page about accumulation says: a gradient cache, in one expression."""
    layers = list(jax.random.normal(jax.random.key(1), (4, 16, 16)) / 4)
    pairs = jax.random.normal(jax.random.key(2), (2, 64, 16))
    optimizer = LossScaleOptimizer(optax.sgd(0.1))

    def encode(layers, x):  # one example
        for matrix in layers:
            x = jnp.tanh(x @ matrix)
        return x / jnp.linalg.norm(x)

    def loss_fn(layers, pairs, chunk):
        again = jax.checkpoint(lambda x: encode(layers, x))
        first, second = (jax.lax.map(again, x, batch_size=chunk) for x in pairs)
        logits, labels = 10 * first @ second.T, jnp.arange(len(first))
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean()

    @functools.partial(jax.jit, static_argnums=1)
    def step(pairs, chunk):
        fun = autocast(lambda layers: loss_fn(layers, pairs, chunk))
        return optimizer.minimize(fun, layers, optimizer.init(layers))[:2]

    whole, few = (step(pairs, chunk)[0] for chunk in (64, 8))
    assert np.any(whole[0] != layers[0])
    assert_near(few, whole, rtol=1e-3, atol=1e-5)
    bad, state = step(pairs.at[0, 5].set(INF), 8)
    assert not state.last_step_applied
    assert_same_bits(arrays(bad), arrays(layers))
