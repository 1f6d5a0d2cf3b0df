"""The pages under docs/recipes are scripts: each runs, and a skip changes nothing."""

import importlib.util
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from helpers import (
    INF,
    RECIPES,
    ROOT,
    SUPPORT,
    assert_same_bits,
    plain_step,
    recipe,
    scaled_step,
    to_numpy,
)

from optax_lossscale import LossScaleOptimizer

# test_multi_steps.py and test_optax_table.py are about two of these, and a test below
# about the third, which does not train. README.md lists the pages.
ELSEWHERE = {"README", "accumulation", "optax", "troubleshooting"}
PAGES = sorted({path.stem for path in RECIPES.glob("*.md")} - ELSEWHERE)
# Keras reads its backend once, where it is imported: it gets a process of its own.
ALONE = {"keras"}
# What the page about several losses calls the parts of a batch.
BATCH = ["upper", "lower", "labels"]
# What a page imports and not every environment has.
MODULES = {"keras": ["keras"], "plain_jax": ["jmp", "haiku"]}


@pytest.fixture(autouse=True)
def standard_dtype_promotion():
    """These libraries promote dtypes as JAX does by default."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def run_page(name):
    """Runs a page in a fresh namespace, and returns its variables."""
    page = {"__name__": name}
    exec(compile(recipe(name), f"{name}.md", "exec"), page)
    return page


def check_training(page, losses, read, step):
    """Asserts that the page has trained, and that a poisoned step is skipped.

    Args:
      page: The variables of the page.
      losses: The losses that it saw.
      read: Returns the state of the optimizer, and all else that a step changes.
      step: Takes a step with these images.
    """
    optimizer, images = page["optimizer"], page["images"][:128]

    def now():
        # In NumPy: what a page changes in place stays here as it was.
        state, rest = read()
        return state, jax.tree.map(to_numpy, (state.inner_state, rest))

    assert len(losses) == 60
    assert losses[-1] < losses[0] / 3

    state, before = now()
    scale, skips = optimizer.current_loss_scale(state), to_numpy(state.skipped_steps)
    step(images.at[5, 20].set(INF))
    state, after = now()
    assert_same_bits(after, before)
    assert optimizer.current_loss_scale(state) == scale / 2
    assert not state.last_step_applied
    assert state.skipped_steps == skips + 1

    step(images)
    state, after = now()
    assert state.last_step_applied
    assert state.skipped_steps == skips + 1
    leaves = [jax.tree.leaves(tree) for tree in (before, after)]
    for old, new in zip(*leaves, strict=True):
        assert np.all(np.isfinite(new))
        # Flax's float8 scales, f32[1], go by the largest number of many steps.
        assert np.any(old != new) or new.shape == (1,)


def check_flax_linen(page):
    labels = page["labels"][:128]

    def read():
        state = page["state"]
        return state.opt_state, (state.params, state.batch_stats, state.step)

    def step(images):
        page["state"], _ = page["train_step"](page["state"], images, labels)

    check_training(page, page["losses"], read, step)
    state = page["state"]
    assert state.step == state.opt_state.inner_state[0].count == 61
    # With one optimizer and with the other.
    assert page["train_step"]._cache_size() == 2

    # The part about DynamicScale: the same losses and scales, step by step.
    flax_loss, our_loss, flax_scale, our_scale = np.array(page["records"]).T
    np.testing.assert_allclose(our_loss, flax_loss, rtol=1e-3)
    assert np.flatnonzero(np.isnan(our_loss)).tolist() == [15]
    assert our_scale.tolist() == flax_scale.tolist()
    assert set(np.diff(np.log2(our_scale))) == {-1, 0, 1}
    both = page["our_state"], page["flax_state"]
    ours, theirs = ((x.step, x.batch_stats) for x in both)
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-2, atol=1e-3)
    assert ours[0] == 29


def check_flax_nnx(page):
    from flax import nnx

    labels = page["labels"][:128]

    def is_variable(x):
        return isinstance(x, nnx.Variable)

    def arrays(tree):
        return jax.tree.map(lambda x: x[...], tree, is_leaf=is_variable)

    def check(train_step, model, trainer, losses, sizes):
        def read():
            changing = [nnx.state(model, kind) for kind in kinds]
            assert [len(jax.tree.leaves(state)) for state in changing] == sizes
            return arrays(trainer.opt_state), arrays(changing)

        def step(images):
            train_step(model, trainer, images, labels)

        check_training(page, losses, read, step)
        # As the page says: the one counts all steps, the other those that were applied.
        assert trainer.step[...] == 62
        assert trainer.opt_state.inner_state[0].count[...] == 61

    kinds = nnx.Param, *page["SIDE_EFFECTS"]
    names = ["train_step", "model", "trainer", "losses"]
    check(*(page[name] for name in names), [4, 0, 0])
    names = ["norm_step", "norm_model", "norm_trainer", "norm_losses"]
    check(*(page[name] for name in names), [6, 2, 1])


def check_equinox(page):
    import equinox as eqx

    labels = page["labels"][:128]

    def arrays(tree):
        return jax.tree.leaves(eqx.filter(tree, eqx.is_array))

    def read():
        return page["opt_state"], arrays(page["model"])

    def step(images):
        state = page["model"], page["opt_state"]
        page["model"], page["opt_state"], _ = page["train_step"](*state, images, labels)

    check_training(page, page["losses"], read, step)
    state = page["model"], page["opt_state"], page["images"][:128], labels
    halves = arrays(page["step_in_halves"](*state))
    for x, y in zip(arrays(page["train_step"](*state)), halves, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)

    names = ["norm_model", "model_state", "norm_opt_state"]

    def read_norm():
        return page["norm_opt_state"], arrays([page["norm_model"], page["model_state"]])

    def step_norm(images):
        state = [page[name] for name in names]
        *state, _ = page["norm_step"](*state, images, labels)
        page.update(zip(names, state, strict=True))

    check_training(page, page["norm_losses"], read_norm, step_norm)
    check_batch_norm(page)


def check_batch_norm(page):
    """Asserts that the layer fails in float16 as the page says, and not on the page."""
    import equinox as eqx

    optimizer, to_float16 = page["optimizer"], page["to_float16"]
    images, labels = page["images"][:128], page["labels"][:128]

    class Naive(page["Model"]):
        def __call__(self, x, model_state):
            x, model_state = self.norm(self.first(x), model_state)
            return self.last(jax.nn.relu(x)), model_state

    class Default(Naive):
        def __init__(self, key):
            super().__init__(key)
            self.norm = eqx.nn.BatchNorm(64, axis_name="batch", mode="ema")

    def gradients(make, keep):
        model, model_state = eqx.nn.make_with_state(make)(jax.random.key(0))
        # A unit that is the same for the whole batch.
        weight = model.first.weight.at[3].set(0)
        model = eqx.tree_at(lambda model: model.first.weight, model, weight)

        def loss_fn(model):
            axes = {"in_axes": (0, None), "out_axes": (0, None)}
            apply = jax.vmap(to_float16(model, keep), axis_name="batch", **axes)
            logits = apply(to_float16(images), model_state)[0].astype(jnp.float32)
            return optax.softmax_cross_entropy_with_integer_labels(
                logits, labels
            ).mean()

        state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
        state = optax.tree.set(state, loss_scale=jnp.float32(2))
        transform = eqx.filter_value_and_grad
        return optimizer.value_and_grad(loss_fn, state, transform=transform)(model)[1]

    assert np.all(np.isnan(gradients(Naive, ()).first.weight[3]))
    with pytest.raises(TypeError, match="float32, float16"):
        gradients(Default, ())
    mixed = gradients(page["Model"], eqx.nn.BatchNorm)
    wide = gradients(Naive, object)  # casts nothing
    for x, y in zip(*map(jax.tree.leaves, (mixed, wide)), strict=True):
        np.testing.assert_allclose(x, y, rtol=0.05, atol=1e-3)


def check_plain_jax(page):
    assert page["results"].keys() == page["models"].keys()
    for name, (params, opt_state, losses) in page["results"].items():
        state, (_, apply) = [params, opt_state], page["models"][name]

        def read(state=state):
            return state[1], state[0]

        def step(images, state=state, apply=apply):
            labels = page["labels"][:128]
            state[:] = page["train_step"](*state, images, labels, apply)[:2]

        check_training(page, losses, read, step)


def check_checkpoints(page):
    labels = page["labels"][:128]
    assert_same_bits(page["restored"], page["state"])

    def read():
        return page["state"]["opt_state"], page["state"]["params"]

    def step(images):
        page["state"], _ = page["train_step"](page["state"], images, labels)

    check_training(page, page["losses"], read, step)
    # As the page says: it counts the batches.
    assert page["state"]["step"] == 62


def check_keras(page):
    labels = page["labels"][:128]

    def read():
        return page["opt_state"], (page["params"], page["rest"])

    def step(images):
        state = page["params"], page["rest"], page["opt_state"]
        *state, _ = page["train_step"](*state, images, labels)
        page.update(zip(("params", "rest", "opt_state"), state, strict=True))

    for variable, value in zip(
        page["model"].trainable_variables, page["params"], strict=True
    ):
        assert_same_bits(variable.value, value)
    assert {str(p.dtype) for p in page["params"]} == {"float32"}
    check_training(page, page["losses"], read, step)


def check_several_losses(page):
    optimizer, batch = page["optimizer"], [page[k][:128] for k in BATCH]
    (params, state, right), (_, shared, wrong) = page["results"].values()
    assert right > 0.6
    assert wrong < 0.3
    # What the page's tables say, at either scale.
    low, high = optimizer.current_loss_scale(state).tolist()
    assert shared.loss_scale_state.loss_scale <= 2 * low < high / 2**10
    counts = page["counts"]
    assert counts[low, "drawing"].zero < counts[low, "naming"].zero - 0.5
    assert counts[high, "drawing"].nonfinite > 0.5
    assert counts[high, "naming"].zero < 0.4
    assert counts[high, "naming"].nonfinite == 0

    # Room for the step that is to be applied.
    scales = jnp.array([low / 8, high / 8])
    start = params, optax.tree.set(state, loss_scale=scales)

    def replicate(tree):
        return jax.tree.map(lambda x: jnp.stack([x] * jax.device_count()), tree)

    def one_step(*batch):
        return page["train_step"](*start, *batch)

    def parallel_step(*batch):
        split = [x.reshape(8, -1, *x.shape[1:]) for x in batch]
        found = page["parallel_step"](*replicate(start), *split)
        for x in jax.tree.leaves(found):
            assert_same_bits(x[1:], x[:-1])
        return jax.tree.map(lambda x: x[0], found)

    for step in (one_step, parallel_step):
        new, after, losses = step(*batch)
        assert after.last_step_applied
        assert len(losses) == 2
        for old, leaf in zip(*map(jax.tree.leaves, (params, new)), strict=True):
            assert np.all(np.isfinite(leaf))
            assert np.any(old != leaf)
        # A bad pixel to draw is seen by one loss, a bad one to see by both.
        upper, lower, labels = batch
        bad = upper, lower.at[5, 20].set(INF), labels
        worse = upper.at[5, 20].set(INF), lower, labels
        for poisoned, lowered in ((bad, [2, 1]), (worse, [2, 2])):
            new, after, _ = step(*poisoned)
            assert_same_bits((new, after.inner_state), (params, state.inner_state))
            assert after.skipped_steps == state.skipped_steps + 1
            found = optimizer.current_loss_scale(after)
            assert_same_bits(found, scales / jnp.float32(lowered))


def check_float8(page):
    from flax import nnx
    from jax.experimental import sparse

    labels = page["labels"][:128]

    def read():
        return page["opt_state"], page["variables"]

    def step(images):
        state = page["variables"], page["opt_state"]
        page["variables"], page["opt_state"], _ = page["train_step"](
            *state, images, labels
        )

    check_training(page, page["losses"], read, step)
    name = page["OVERWRITE_WITH_GRADIENT"]
    assert [x.size for x in jax.tree.leaves(page["variables"][name])] == [1024, 1] * 3

    def read_train_state():
        return page["state"].opt_state, page["state"].params

    def step_train_state(images):
        page["state"], _ = page["state_step"](page["state"], images, labels)

    check_training(page, page["state_losses"], read_train_state, step_train_state)

    def read_nnx():
        params = nnx.state(page["nnx_model"], page["Trained"])
        return page["nnx_state"], nnx.to_pure_dict(params)

    def step_nnx(images):
        state = page["nnx_model"], page["nnx_state"]
        page["nnx_state"], _ = page["nnx_step"](*state, images, labels)

    check_training(page, page["nnx_losses"], read_nnx, step_nnx)

    optimizer, state = page["sparse_optimizer"], page["sparse_state"]
    old, new = page["matrix"], page["new_matrix"]
    assert_same_bits(new.indices, old.indices)
    np.testing.assert_allclose(new.data, old.data - 0.1 * (old.data != 0), rtol=1e-5)
    after, state, _ = optimizer.minimize(
        lambda matrix: INF * matrix.data[3],
        new,
        state,
        transform=sparse.value_and_grad,
    )
    assert not state.last_step_applied
    assert_same_bits(after, new)


def check_half_precision_parameters(page):
    wide, half, brain, bare = page["results"].values()
    # What the page says of its table, for every seed.
    assert np.all((wide[0] < half[0]) & (half[0] < brain[0]) & (brain[0] < 1))
    assert np.all((wide[1] + 0.1 < half[1]) & (half[1] + 0.1 < brain[1]))
    assert np.all(np.isnan(bare[0]))
    np.testing.assert_allclose(half[0], wide[0], rtol=0.02)
    images, labels = page["images"][:128], page["labels"][:128]
    bad = images.at[5, 20].set(INF), labels
    every = jax.jit(jax.vmap(page["scaled"], in_axes=(0, 0, None, None)))
    for (*_, params, state), (*_, dtype) in zip(
        (wide, half, brain), page["kinds"].values(), strict=False
    ):
        assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype(dtype)}
        assert state.inner_state[0].mu["last"].dtype == jnp.float32
        updates, after = every(params, state, *bad)
        assert_same_bits(after.inner_state, state.inner_state)
        assert_same_bits(optax.apply_updates(params, updates), params)
        assert not after.last_step_applied.any()
    assert bare[-1][0].mu["last"].dtype == jnp.float16

    def read():
        return page["opt_state"], page["params"]

    def step(images):
        state = page["params"], page["opt_state"]
        page["params"], page["opt_state"], _ = page["train_step"](
            *state, images, labels
        )

    check_training(page, page["losses"], read, step)
    assert page["params"]["first"].dtype == jnp.float16

    # Optax alone, as the page says.
    params = jnp.ones(2, jnp.float16)
    grads = jnp.array([1e-4, 0], jnp.float16)
    updates, _ = page["adam"].update(grads, page["adam"].init(params))
    assert np.isinf(updates[0])
    assert np.isnan(updates[1])


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", PAGES)
def test_page(name, tmp_path, monkeypatch):
    check = globals()[f"check_{name}"]
    for module in MODULES.get(name, []):
        if not importlib.util.find_spec(module):
            pytest.skip(f"{module} is not installed")
    monkeypatch.chdir(tmp_path)
    if name not in ALONE:
        check(run_page(name))
        return
    path = [str(ROOT), str(SUPPORT), os.environ.get("PYTHONPATH", "")]
    command = [sys.executable, "-W", "error", __file__, name]
    result = subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stdout


@pytest.mark.exhaustive
def test_troubleshooting(capsys):
    """It prints what it shows, and says what is the case."""
    run_page("troubleshooting")
    text = (RECIPES / "troubleshooting.md").read_text()
    shown = re.findall(r"```python\n.*?```\n\n```\n(.*?)```", text, re.DOTALL)
    assert capsys.readouterr().out == "".join(shown)
    assert len(shown) == text.count("\n```python\n") - 1 == 6


@pytest.mark.parametrize("box", ["with_partitioning", "with_logical_partitioning"])
def test_parameters_in_the_boxes_of_flax(box):
    """What the page about linen says of `nn.Partitioned` and its like."""
    from flax import linen as nn

    make = getattr(nn, box)(nn.initializers.lecun_normal(), (None, "model"))
    model = nn.Dense(2, dtype=jnp.float16, kernel_init=make)
    x = jnp.arange(12.0).reshape(4, 3) / 12

    def loss_fn(params, x):
        return jnp.mean((model.apply(params, x) - 1).astype(jnp.float32) ** 2)

    params, inner = model.init(jax.random.key(0), x), optax.adamw(0.1)
    assert isinstance(params["params"]["kernel"], nn.meta.AxisMetadata)
    optimizer = LossScaleOptimizer(inner, initial_scale=2.0**8)
    state, wanted, wanted_state = optimizer.init(params), params, inner.init(params)
    step = jax.jit(scaled_step(loss_fn, optimizer))
    for _ in range(2):
        params, state, _ = step(params, state, x)
        wanted, wanted_state, _ = plain_step(loss_fn, inner)(wanted, wanted_state, x)
    assert jax.tree.structure(params) == jax.tree.structure(wanted)
    for actual, desired in zip(*map(jax.tree.leaves, (params, wanted)), strict=True):
        np.testing.assert_allclose(actual, desired, rtol=1e-2)
    kept, after, _ = step(params, state, x * INF)
    assert not after.last_step_applied
    assert_same_bits((kept, after.inner_state), (params, state.inner_state))
    moments = nn.get_partition_spec(after.inner_state[0].mu)
    assert moments == nn.get_partition_spec(params)


if __name__ == "__main__":
    globals()[f"check_{sys.argv[1]}"](run_page(sys.argv[1]))
