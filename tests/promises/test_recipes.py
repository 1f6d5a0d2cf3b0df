"""The pages under docs/recipes are scripts: each runs, and a skip changes nothing."""

import functools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from casting import products
from helpers import (
    INF,
    RECIPES,
    arrays,
    assert_same_bits,
    exhaustive_but,
    plain_step,
    scaled_step,
)
from pages import page_blocks, page_fragments, run_page

from optax_lossscale import LossScaleOptimizer, select_applied

pytestmark = pytest.mark.usefixtures("standard_dtype_promotion")
# The README lists the pages.
PAGES = sorted({path.stem for path in RECIPES.glob("*.md")} - {"README"})
BOXES = ["with_partitioning", "with_logical_partitioning"]


def check_training(page, losses, step, *state, read=lambda *state: state):
    """Asserts that a page has trained, and that a poisoned step is skipped.

    Args:
      page: The variables of the page.
      losses: The losses that it saw, or their name.
      step: Takes the state, images and labels; returns a tuple that begins with the new
        state. Or its name.
      *state: What the last step of the page left, or the names.
      read: Takes the state; returns what a skip leaves alone, and the state of ours.
    """
    optimizer, images, labels = (page[x] for x in ("optimizer", "images", "labels"))
    images, labels = images[:128], labels[:128]
    losses, step, *state = (
        page[x] if isinstance(x, str) else x for x in (losses, step, *state)
    )
    assert len(losses) == 60
    assert losses[-1] < losses[0] / 3

    def now(state):
        # In NumPy: what a page changes in place stays here as it was.
        tree = read(*state)
        scale = float(optimizer.current_loss_scale(tree))
        return arrays(tree), scale, int(optax.tree.get(tree, "skipped_steps")[...])

    before, scale, skips = now(state)
    state = step(*state, images.at[5, 20].set(INF), labels)[: len(state)]
    after, new_scale, new_skips = now(state)
    assert_same_bits(after, before)
    assert (new_scale, new_skips) == (scale / 2, skips + 1)
    assert optimizer.dynamic_counter(read(*state)) == 0
    assert select_applied(read(*state), 1.0, 2.0) == 2
    state = step(*state, images, labels)[: len(state)]
    after, _, new_skips = now(state)
    assert new_skips == skips + 1
    for old, new in zip(before, after, strict=True):
        assert np.all(np.isfinite(new))
        # Flax's float8 scales, f32[1], go by the largest number of many steps.
        assert np.any(old != new) or new.shape == (1,)
    return state


def assert_near(actual, desired, **options):
    for x, y in zip(*map(jax.tree.leaves, (actual, desired)), strict=True):
        if isinstance(x, jax.Array | np.ndarray):
            np.testing.assert_allclose(x, y, **options)


def check_plain_jax(page):
    assert page["results"].keys() == page["models"].keys()
    for name, (params, opt_state, losses) in page["results"].items():
        _, apply = page["models"][name]

        def step(*args, apply=apply):
            return page["train_step"](*args, apply)

        check_training(page, losses, step, params, opt_state)
    args = *page["results"]["Haiku"][:2], page["images"], page["labels"], apply
    *_, loss = page["train_step"](*args)
    *_, jmp_loss = page["jmp_step"](*args)
    np.testing.assert_allclose(jmp_loss, loss, rtol=1e-3)


def check_flax_linen(page):
    def read(state):
        return state.params, state.batch_stats, state.step, state.opt_state

    (state,) = check_training(page, "losses", "train_step", "state", read=read)
    assert state.step == state.opt_state.inner_state[0].count == 61
    assert page["train_step"]._cache_size() == 1


def of_nnx(train_step, *kinds):
    """Returns the step and the reading of a model with a trainer."""
    from flax import nnx

    def step(model, trainer, *batch):
        train_step(model, trainer, *batch)
        return model, trainer

    def read(model, trainer):
        params = nnx.to_pure_dict(nnx.state(model, nnx.Any(*kinds)))
        return params, trainer.opt_state

    return step, read


def check_flax_nnx(page):
    from flax import nnx

    images, labels = page["images"], page["labels"]

    step, read = of_nnx(page["train_step"], nnx.Param, nnx.BatchStat)
    for prefix, count in (("", 4), ("norm_", 8)):
        state = page[f"{prefix}model"], page[f"{prefix}trainer"]
        assert len(jax.tree.leaves(read(*state)[0])) == count
        steps = int(state[1].step[...])
        _, trainer = check_training(page, f"{prefix}losses", step, *state, read=read)
        # As the page says: the one counts all steps, the other those that were applied.
        assert trainer.step[...] == steps + 2
        assert trainer.opt_state.inner_state[0].count[...] == steps + 1

    # The average takes part in a step that is applied, and in no other.
    state = [page[name] for name in ("model", "trainer", "average")]
    model, _, average = state
    old = arrays(nnx.state(average))
    page["average_step"](*state, images[:128] * INF, labels[:128])
    assert_same_bits(arrays(nnx.state(average)), old)
    page["average_step"](*state, images[:128], labels[:128])
    params = arrays(nnx.state(model, nnx.Param))
    new = [0.9 * x + 0.1 * y for x, y in zip(old, params, strict=True)]
    assert_near(arrays(nnx.state(average)), new, rtol=1e-6)

    # The trainer that nobody edits: what it logs is true.
    logs = {x: page[x].log for x in ("in_float32", "in_float16", "scaled")}
    logs = {name: [list(x.values()) for x in log] for name, log in logs.items()}
    np.testing.assert_allclose(logs["scaled"], logs["in_float32"], rtol=0.02)
    # As the page says: without a scale, the last bias alone has a gradient.
    models = page["in_float16"].model, page["Model"](nnx.Rngs(0))
    trained, begun = (dict(nnx.to_flat_state(nnx.state(x, nnx.Param))) for x in models)
    moved = [x for x in begun if np.any(trained[x][...] != begun[x][...])]
    assert moved == [("last", "bias")]


def check_equinox(page):
    check_training(page, "losses", "train_step", "model", "opt_state")
    state = "norm_model", "model_state", "norm_opt_state"
    check_training(page, "norm_losses", "norm_step", *state)
    args = (*(page[x] for x in ("model", "opt_state", "images", "labels")),)
    halves, whole = page["step_in_halves"](*args)[0], page["train_step"](*args)[0]
    assert_near(halves, whole, rtol=1e-4, atol=1e-6)


def check_keras(page):
    for variable, value in zip(
        page["model"].trainable_variables, page["params"], strict=True
    ):
        assert_same_bits(variable.value, value)
    assert {str(p.dtype) for p in page["params"]} == {"float32"}
    check_training(page, "losses", "train_step", "params", "rest", "opt_state")


def check_checkpoints(page):
    assert_same_bits(page["restored"], page["state"])

    def read(state):
        return state["params"], state["opt_state"]

    (state,) = check_training(page, "losses", "train_step", "state", read=read)
    # As the page says: it counts the batches.
    assert state["step"] == 62

    # Run again, both trainings go on from their checkpoints: here on eight devices.
    for saved in range(35, 57, 7):
        shutil.rmtree(f"checkpoints/{saved}")
    again, path = {"__name__": "again"}, "docs/recipes/checkpoints.md"
    (many_devices,) = page_fragments(path)
    for code, _ in page_blocks(path):
        exec(code, again)
        if code.startswith("like ="):
            exec(many_devices, again)
        if "restored" in again:
            break
    assert again["last"] == 28
    wanted = page["state"]
    for state in (again["state"], again["restored"]):
        scaling = state["opt_state"]._replace(inner_state=None)
        assert_same_bits(scaling, wanted["opt_state"]._replace(inner_state=None))
        for name, param in state["params"].items():
            assert param.sharding.num_devices == 8
            # Gradients are float16, and their sums are rounded in another order.
            np.testing.assert_allclose(param, wanted["params"][name], atol=0.01)

    # Second moments are zero in float16, and not in bfloat16.
    moments = page["moments"]
    assert jnp.mean((moments > 0) & (moments.astype(jnp.float16) == 0)) > 0.1
    assert page["lost"] == 0

    # A bfloat16 checkpoint: no number changes in float32.
    found = page["state"]["params"]
    for name, x in page["params"].items():
        assert x.dtype == jnp.float32
        np.testing.assert_array_equal(x, found[name].astype(jnp.bfloat16))


def check_float8(page):
    from flax import nnx
    from jax.experimental import sparse

    overwritten = page["variables"][page["OVERWRITE_WITH_GRADIENT"]]
    assert [x.size for x in jax.tree.leaves(overwritten)] == [1024, 1] * 3
    check_training(page, "losses", "train_step", "variables", "opt_state")

    def state_step(state, *batch):
        return (page["state_step"](state, *batch),)

    def read(state):
        return state.params, state.opt_state

    check_training(page, "state_losses", state_step, "state", read=read)

    def nnx_step(model, opt_state, *batch):
        return model, page["nnx_step"](model, opt_state, *batch)

    def read_nnx(model, opt_state):
        params = nnx.state(model, nnx.Any(nnx.Param, page["Overwrite"]))
        return nnx.to_pure_dict(params), opt_state

    state = "nnx_model", "nnx_state"
    check_training(page, "nnx_losses", nnx_step, *state, read=read_nnx)

    optimizer, state = page["sparse_optimizer"], page["sparse_state"]
    old, new = page["matrix"], page["new_matrix"]
    assert_same_bits(new.indices, old.indices)
    np.testing.assert_allclose(new.data, old.data - 0.1 * (old.data != 0), rtol=1e-5)
    bad = functools.partial(optimizer.minimize, lambda matrix: INF * matrix.data[3])
    bad = jax.jit(functools.partial(bad, transform=sparse.value_and_grad))
    after, state, _ = bad(new, state)
    assert not state.last_step_applied
    assert_same_bits(after, new)


def check_several_losses(page):
    batch = [page[name][:128] for name in ("upper", "lower", "labels")]
    (_, _, wrong), (params, (state, *scales), right) = page["results"].values()
    assert right > 0.6
    assert wrong < 0.3
    # Room for a step that is applied.
    scales = [scale._replace(loss_scale=scale.loss_scale / 8) for scale in scales]
    new, (after, *_) = page["train_step"](params, (state, *scales), *batch)
    assert after.last_step_applied

    def total(params):
        losses = page["drawing"], page["naming"]
        return sum(loss_fn.__wrapped__(params, *batch) for loss_fn in losses)

    step = jax.jit(plain_step(total, page["inner"]))
    wanted, *_ = step(params, state.inner_state)
    assert_near(new, wanted, atol=3e-4)
    # A bad pixel to draw is seen by one loss, a bad one to see by both.
    for i, lowered in ((1, [2, 1]), (0, [2, 2])):
        poisoned = list(batch)
        poisoned[i] = poisoned[i].at[5, 20].set(INF)
        kept, (after, *new) = page["train_step"](params, (state, *scales), *poisoned)
        assert_same_bits((kept, after.inner_state), (params, state.inner_state))
        assert after.skipped_steps == state.skipped_steps + 1
        both = zip(scales, new, strict=True)
        assert [float(x.loss_scale / y.loss_scale) for x, y in both] == lowered


def check_gradient_in_the_loss(page):
    # In value as in float32, where the page says so.
    np.testing.assert_allclose(page["distance"], page["wanted"], rtol=0.01)
    right = {"float32", "forward twice", "forward over reverse", "reverse twice"}
    for name, error in page["errors"].items():
        assert error < 1e-3 if name in right else error > 0.1
    # Only the critic sees the poisoned images.
    state, images = page["state"], page["images"] * INF
    args = images, jax.random.key(0), page["autocast"], 1e-9, 2.0**30
    critic, critic_state, generator, *_ = page["train_step"](*state, *args)
    assert_same_bits((critic, critic_state.inner_state), (state[0], state[1][0]))
    assert critic_state.skipped_steps == state[1].skipped_steps + 1
    assert np.any(generator[0] != state[2][0])


def check_per_example_clipping(page):
    assert_near(page["params"], page["bare"], atol=2e-3)
    before, after = page["high"], page["new_state"]
    assert_same_bits(after.inner_state, before.inner_state)
    assert after.skipped_steps == before.skipped_steps + 1


def check_accumulation(page):
    """Each way takes the step of the bare optimizer with the whole batch."""
    params, state = page["start"], optax.sgd(0.1).init(page["start"])
    x, y, poisoned = (page[name] for name in ("x", "y", "poisoned"))

    def loss_fn(params, x, y):
        return jnp.mean((x @ params - y) ** 2)

    @jax.jit
    def plain(x, y):
        x, y = x.reshape(32, 3), y.reshape(32)
        return plain_step(loss_fn, optax.sgd(0.1))(params, state, x, y)[0]

    wanted = plain(x, y)
    states = page["train"]([0, 1, 2, 3]), page["whole_state"], page["window_state"]
    for after, *_ in states:
        np.testing.assert_allclose(after, wanted, rtol=5e-3)
    # The page has left out the poisoned micro-batch, and taken the first one twice.
    kept = np.array([0, 2, 3, 0])
    np.testing.assert_allclose(page["params"], plain(x[kept], y[kept]), rtol=5e-3)
    # The other two keep everything.
    _, whole, window = states
    after = page["whole_step"](*whole, poisoned.reshape(32, 3), y.reshape(32))
    assert_same_bits(arrays(after[:2]), arrays(whole))
    assert_same_bits(arrays(page["window"](*window, poisoned, y)), arrays(window))
    # As the page says: an average follows `moved`, statistics the finite micro-batches.
    state = page["start"], page["optimizer"].init(page["start"])
    found = []
    for i in (0, 1, 2, 3, 0):
        *state, _, moved = page["train_step"](*state, poisoned[i], y[i])
        found.append((bool(moved), bool(select_applied(state[1], 1.0, 0.0))))
    # A gradient cache: what is computed in chunks is what is computed at once.
    layers, pairs = page["layers"], page["pairs"]
    fresh = page["whole_optimizer"].init(layers)
    whole, few = (page["contrastive_step"](layers, fresh, pairs, x) for x in (512, 32))
    assert_near(few[0], whole[0], rtol=1e-3, atol=1e-5)
    bad = page["contrastive_step"](layers, fresh, pairs.at[0, 5].set(INF), 32)
    assert_same_bits(arrays(bad[0]), arrays(layers))

    counted = False, True
    assert found == [counted, (False, False), counted, counted, (True, True)]


def check_half_precision_parameters(page):
    wide, half, brain, bare, chance = page["results"].values()
    # What the page says of its table, for every seed.
    assert np.all((wide[0] < half[0]) & (half[0] < brain[0]) & (brain[0] < 1))
    assert np.all((wide[1] + 0.1 < half[1]) & (half[1] + 0.1 < brain[1]))
    assert np.all(np.isnan(bare[0]))
    np.testing.assert_allclose(half[0], wide[0], rtol=0.02)
    for (*_, params, state), dtype in zip(
        (wide, half, brain), (jnp.float32, jnp.float16, jnp.bfloat16), strict=True
    ):
        assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype(dtype)}
        assert state.inner_state[0].mu["last"].dtype == jnp.float32
    assert bare[-1][0].mu["last"].dtype == jnp.float16

    params, _ = check_training(page, "losses", "train_step", "params", "opt_state")
    assert params["first"].dtype == jnp.float16
    # By chance, bfloat16 learns as float32 does: the mean of many roundings is right.
    np.testing.assert_allclose(chance[0], wide[0], rtol=0.01)
    numbers = jnp.array([1 + 2**-10, -3.001, 0.0, INF, 2**-130])
    keys = jax.random.split(jax.random.key(0), 4096)
    rounded = jax.vmap(page["round_by_chance"], (None, 0))(numbers, keys)
    assert rounded.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.float64(rounded).mean(0), numbers, rtol=1e-3)
    # What a skipped step adds changes no bit.
    params = optax.tree.cast(chance[2], jnp.bfloat16)
    nothing = jax.tree.map(lambda x: jnp.full(x.shape, -0.0), params)
    same = page["apply_by_chance"](params, nothing, jax.random.key(0))
    assert_same_bits(same, params)


def check_optax(page):
    params, x = jnp.ones(3), page["x"]

    def bare(inner, steps):
        step = jax.jit(plain_step(page["loss_fn"].__wrapped__, inner))
        state = inner.init(params)
        after = params
        for _ in range(steps):
            after, state, _ = step(after, state, x)
        return after

    # The steps that were applied are those of the bare optimizers, in float32.
    wanted = bare(optax.adam(page["schedule"]), 3)
    np.testing.assert_allclose(page["scheduled"][0], wanted, rtol=1e-3)
    clipped = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.1))
    np.testing.assert_allclose(page["chained"][0], bare(clipped, 2), rtol=1e-3)
    chain_state = page["chained"][1]
    assert chain_state[1].skipped_steps == 1
    assert select_applied(chain_state, 1.0, 2.0) == 1
    # SAM by hand is SAM.
    grad_fn = jax.jit(lambda params, _=None: jax.grad(page["loss_fn"])(params, x))
    ascent = optax.chain(optax.contrib.normalize(), optax.sgd(0.05))
    sam = optax.contrib.sam(optax.sgd(0.1), ascent, opaque_mode=True)
    updates, _ = sam.update(grad_fn(params), sam.init(params), params, grad_fn=grad_fn)
    np.testing.assert_allclose(page["params"], params + updates, rtol=1e-4)
    # The ascent matters more than the rounding of float16.
    assert np.abs(0.1 * grad_fn(params) + updates).max() > 3e-4


def check_numpyro(page):
    """NumPyro's `SVI`, with a scan and step by step, is as in float32."""
    svi, result, x = page["svi"], page["result"], page["images"]
    losses = page["in_float32"].losses
    np.testing.assert_allclose(result.losses, losses, rtol=2e-3)
    assert losses[-1] < losses[0] / 2
    # A loss that is not finite.
    state, loss = jax.jit(svi.update)(result.state, x.at[5, 20].set(INF))
    assert not np.isfinite(loss)
    params = svi.get_params(state)
    assert params.pop("loss_scale") == 2.0**39
    assert_same_bits(params, {name: result.params[name] for name in params})
    state, _ = jax.jit(svi.stable_update)(result.state, x.at[5, 20].set(INF))
    assert svi.get_params(state)["loss_scale"] == 2.0**40
    # Without the scale all gradients are zero.
    page["with_loss_scale"] = lambda loss_fn, has_aux: loss_fn
    elbo = page["Float16ELBO"]().loss_with_mutable_state

    @jax.jit
    @jax.grad
    def gradients(params):
        return elbo(jax.random.key(1), params, page["model"], page["guide"], x)["loss"]

    assert not any(np.any(x) for x in jax.tree.leaves(gradients(result.params)))


def check_lora(page):
    optimizer, images, labels = (page[x] for x in ("optimizer", "images", "labels"))
    adapters, opt_state, base = (page[x] for x in ("adapters", "opt_state", "base"))
    loss_fn, batch = page["loss_fn"], (images[:128], labels[:128])
    check_training(page, "losses", "train_step", "adapters", "opt_state")
    # All products are float16, and the gradients are those of float32.
    assert products(loss_fn, adapters, base, *batch) == [{"float16"}] * 14
    wanted = jax.jit(jax.grad(loss_fn.__wrapped__))(adapters, base, *batch)

    @jax.jit
    def gradients(opt_state, *args):
        return optimizer.value_and_grad(loss_fn, opt_state)(*args)[1]

    found = gradients(opt_state, adapters, base, *batch)
    assert_near(found, wanted, rtol=0.02, atol=1e-3)
    moments = opt_state.inner_state[0].mu
    assert jax.tree.structure(moments) == jax.tree.structure(adapters)

    from flax import nnx

    step, read = of_nnx(page["nnx_step"], nnx.LoRAParam)
    model, trainer = page["model"], page["trainer"]
    check_training(page, "nnx_losses", step, model, trainer, read=read)
    frozen, start = (
        nnx.state(x, nnx.Not(nnx.LoRAParam))
        for x in (model, page["Model"](nnx.Rngs(0)))
    )
    assert_same_bits(arrays(frozen), arrays(start))
    assert {x.dtype for x in arrays(frozen)} == {np.dtype("float16")}
    assert len(jax.tree.leaves(trainer.opt_state.inner_state[0].mu)) == 4


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", PAGES)
def test_page(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # Keras reads it once, where it is imported.
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    globals()[f"check_{name}"](run_page(f"docs/recipes/{name}.md", f"{name}.md"))


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
    step, state = jax.jit(scaled_step(loss_fn, optimizer)), optimizer.init(params)
    moved, state, _ = step(params, state, x)
    assert jax.tree.structure(moved) == jax.tree.structure(params)
    kept, after, _ = step(moved, state, x * INF)
    assert (state.last_step_applied, after.last_step_applied) == (True, False)
    assert_same_bits((kept, after.inner_state), (moved, state.inner_state))
    moments = nn.get_partition_spec(after.inner_state[0].mu)
    assert moments == nn.get_partition_spec(params)
