"""Which gradients were not finite: every leaf, every kind, everywhere."""

import copy
import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import (
    INF,
    NAN,
    WRAPS,
    assert_same_bits,
    every_skip,
    exhaustive_but,
    relaxed,
    signature,
)
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from optax_lossscale import DynamicLossScale, LossScaleOptimizer
from optax_lossscale.diagnostics import nonfinite_leaves

PARAMS = {"a": jnp.ones(4), "b": [jnp.ones((2, 2)), jnp.ones(())]}
GOOD = jax.tree.map(jnp.ones_like, PARAMS)


def tracker(**options):
    return LossScaleOptimizer(optax.sgd(0.5), track_leaves=True, **options)


def plant(grads, value, leaf, index=-1):
    """Puts a value into the leaf of that number."""
    leaves, treedef = jax.tree.flatten(grads)
    flat = leaves[leaf].ravel().at[index].set(value)
    leaves[leaf] = flat.reshape(leaves[leaf].shape)
    return treedef.unflatten(leaves)


def found(state, params=PARAMS):
    return [tuple(leaf) for leaf in nonfinite_leaves(state, params)]


@pytest.mark.parametrize("value", exhaustive_but([INF, -INF, NAN], [INF]))
def test_each_of_60_leaves_is_named(value):
    params = {
        f"block_{i}": {
            "attn": {"kernel": jnp.ones((3, 3)), "bias": jnp.ones(3)},
            "ln": (jnp.ones(3), jnp.ones(())),
            "half": jnp.ones(3, jnp.float16),
        }
        for i in range(12)
    }
    names = [
        f"params['block_{i}']{leaf}"
        for i in sorted(range(12), key=str)
        for leaf in (
            "['attn']['bias']",
            "['attn']['kernel']",
            "['half']",
            "['ln'][0]",
            "['ln'][1]",
        )
    ]
    optimizer = tracker()
    start = optimizer.init(params)
    update = jax.jit(lambda grads, state: optimizer.update(grads, state)[1])
    kind = "nan" if np.isnan(value) else "inf"
    for i, name in enumerate(names):
        state = update(plant(params, value, i), start)
        counts = (0, 1) if kind == "nan" else (1, 0)
        assert found(state, params) == [(name, kind, *counts)]


@every_skip
@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
@pytest.mark.parametrize("call", ["update", "apply_gradients", "minimize"])
def test_counts_and_remembers(call, wrap, skip):
    optimizer = tracker(skip=skip)

    @wrap
    def step(grads, state):
        if call == "update":
            return optimizer.update(grads, state, PARAMS)[1]
        if call == "apply_gradients":
            return optimizer.apply_gradients(grads, PARAMS, state)[1]

        def loss_fn(params):
            products = jax.tree.map(lambda g, p: jnp.sum(g * p), grads, params)
            return jax.tree.reduce(jnp.add, products)

        return optimizer.minimize(loss_fn, PARAMS, state)[1]

    state = optimizer.init(PARAMS)
    both = plant(plant(GOOD, INF, 0, 1), NAN, 0, 2)
    runs = [
        (GOOD, []),
        (plant(GOOD, INF, 1), [("params['b'][0]", "inf", 1, 0)]),
        (GOOD, [("params['b'][0]", "inf", 1, 0)]),
        (both, [("params['a']", "nan", 0, 1), ("params['b'][0]", "finite", 1, 0)]),
        (
            plant(both, -INF, 1),
            [("params['a']", "nan", 0, 2), ("params['b'][0]", "inf", 2, 0)],
        ),
        (
            plant(plant(GOOD, INF, 0, 0), -INF, 0, 1),
            [("params['a']", "inf", 1, 2), ("params['b'][0]", "finite", 2, 0)],
        ),
    ]
    for grads, expected in runs:
        state = step(grads, state)
        assert found(state) == expected
        if len(expected) == 1 and grads is not GOOD:
            assert not state.last_step_applied


def test_the_most_frequent_come_first():
    optimizer = tracker()
    state = optimizer.init(PARAMS)
    for leaf in (0, 2, 1, 2, 2, 1):
        _, state = optimizer.update(plant(GOOD, INF, leaf), state)
    assert [leaf.inf_steps for leaf in nonfinite_leaves(state, PARAMS)] == [3, 2, 1]


def test_off_costs_nothing():
    def lowered(**options):
        optimizer = LossScaleOptimizer(relaxed(optax.adam(0.1)), **options)
        state = optimizer.init(PARAMS)
        step = jax.jit(optimizer.apply_gradients, donate_argnums=(1, 2))
        traced = step.trace(GOOD, PARAMS, state)
        platforms = ("cpu", "cuda", "tpu")
        text = traced.lower(lowering_platforms=platforms).as_text()
        return jax.tree.structure(state), text

    assert lowered() == lowered(track_leaves=False)
    assert lowered() != lowered(track_leaves=True)
    off = LossScaleOptimizer(optax.sgd(0.5)).init(PARAMS)
    assert off.leaf_statistics is None
    assert off._replace(leaf_statistics=None) == off


def test_decides_as_without():
    inner = relaxed(optax.adam(0.1))
    optimizers = [LossScaleOptimizer(inner, track_leaves=t) for t in (False, True)]
    ends = []
    for optimizer in optimizers:
        params, state = PARAMS, optimizer.init(PARAMS)
        step = jax.jit(optimizer.apply_gradients)
        for leaf in (None, 0, 2, None):
            grads = GOOD if leaf is None else plant(GOOD, NAN, leaf)
            params, state = step(grads, params, state)
        ends.append((params, state._replace(leaf_statistics=None)))
    assert_same_bits(*ends)


@functools.partial(jax.jit, static_argnums=0)
def scan(optimizer, state, grads):
    def step(state, grads):
        return optimizer.update(grads, state)[1], None

    return jax.lax.scan(step, state, grads)[0]


def stacked(*trees):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def test_in_a_scan():
    optimizer = tracker()
    grads = stacked(GOOD, plant(GOOD, NAN, 2), plant(GOOD, INF, 0), GOOD)
    state = scan(optimizer, optimizer.init(PARAMS), grads)
    assert found(state) == [
        ("params['a']", "inf", 1, 0),
        ("params['b'][1]", "finite", 0, 1),
    ]


def test_state_keeps_its_signature_and_is_traced_once():
    optimizer, traces = tracker(), []

    @functools.partial(jax.jit, donate_argnums=1)
    def step(grads, state):
        traces.append(1)
        return optimizer.update(grads, state)[1]

    state = optimizer.init(PARAMS)
    before = signature(state)
    assert signature(jax.eval_shape(optimizer.init, PARAMS)) == before
    for grads in (GOOD, plant(GOOD, INF, 0), GOOD):
        state = step(grads, state)
        assert signature(state) == before
    assert len(traces) == 1


def test_leaves_that_are_no_gradients():
    params = {
        "complex": jnp.ones(2, jnp.complex64),
        "float8": jnp.ones(2, jnp.float8_e5m2),
        "integer": jnp.arange(3),
        "nothing": None,
        "number": 1.0,
    }
    grads = {
        "complex": jnp.array([1, complex(0, INF)], jnp.complex64),
        "float8": jnp.array([1, NAN], jnp.float8_e5m2),
        "integer": np.zeros(3, jax.dtypes.float0),
        "nothing": None,
        "number": None,
    }
    inner = optax.stateless(lambda updates, _: updates)
    optimizer = LossScaleOptimizer(inner, track_leaves=True)
    _, state = optimizer.update(grads, optimizer.init(params))
    assert found(state, params) == [
        ("params['complex']", "inf", 1, 0),
        ("params['float8']", "nan", 0, 1),
    ]
    grads = {**GOOD, "a": None, "b": [jnp.array([[INF]]), None]}
    _, state = optimizer.update(grads, optimizer.init(PARAMS))
    assert found(state) == [("params['b'][0]", "inf", 1, 0)]


@pytest.mark.parametrize("params", [(), None, {"a": jnp.zeros(0)}, jnp.float32(1)])
def test_nothing_to_find(params):
    optimizer = tracker()
    state = optimizer.init(params)
    _, state = jax.jit(optimizer.update)(params, state)
    assert found(state, params) == []


def test_a_bare_array_is_params():
    optimizer = tracker()
    _, state = optimizer.update(jnp.float32(INF), optimizer.init(jnp.float32(1)))
    assert found(state, jnp.float32(1)) == [("params", "inf", 1, 0)]


def test_fixed_scale_that_skips_nothing_still_tells():
    optimizer = LossScaleOptimizer(optax.sgd(0.5), 8.0, track_leaves=True)
    _, state = jax.jit(optimizer.update)(plant(GOOD, INF, 2), optimizer.init(PARAMS))
    assert state.last_step_applied
    assert found(state) == [("params['b'][1]", "inf", 1, 0)]


def test_a_step_skipped_for_its_loss_blames_no_leaf():
    optimizer = tracker(check_loss=True)
    state = optimizer.init(PARAMS)
    _, state = optimizer.update(plant(GOOD, INF, 0), state, value=jnp.float32(1))
    _, state = optimizer.update(GOOD, state, value=jnp.float32(NAN))
    assert not state.last_step_applied
    assert found(state) == [("params['a']", "inf", 1, 0)]


def test_counters_saturate():
    optimizer = tracker()
    state = optimizer.init(PARAMS)
    top = jnp.full(3, 2**31 - 1, jnp.int32)
    statistics = state.leaf_statistics._replace(inf_steps=top, nan_steps=top)
    state = state._replace(leaf_statistics=statistics)
    for value in (INF, NAN):
        _, state = optimizer.update(plant(GOOD, value, 0), state)
    assert state.leaf_statistics.inf_steps.tolist() == top.tolist()
    assert state.leaf_statistics.nan_steps.tolist() == top.tolist()


def test_is_a_checked_part_of_the_configuration():
    inner = optax.sgd(0.5)
    off, on = (LossScaleOptimizer(inner, track_leaves=t) for t in (False, True))
    assert off == LossScaleOptimizer(inner) != on
    assert hash(off) != hash(on)
    assert copy.deepcopy(on) == on
    static = optax.GradientTransformation(optax.init_empty_state, max)
    on = LossScaleOptimizer(static, track_leaves=True)
    assert pickle.loads(pickle.dumps(on)) == on
    assert "track_leaves=True" in repr(on)
    with pytest.raises(TypeError, match="track_leaves must be True or False, got 1"):
        LossScaleOptimizer(inner, track_leaves=1)


def test_errors_say_what_to_do():
    optimizer = tracker()
    state = optimizer.init(PARAMS)
    with pytest.raises(ValueError, match=r"the 3 leaves of the parameters .* got 2"):
        optimizer.update({"a": GOOD["a"], "b": GOOD["b"][:1]}, state)
    old = LossScaleOptimizer(optax.sgd(0.5)).init(PARAMS)
    with pytest.raises(ValueError, match=r"with track_leaves=True.* got None"):
        optimizer.update(GOOD, old)
    with pytest.raises(ValueError, match="track_leaves=True"):
        nonfinite_leaves(old, PARAMS)
    with pytest.raises(ValueError, match=r"must have the 3 leaves .* but has 1"):
        nonfinite_leaves(state, PARAMS["a"])
    with pytest.raises(ValueError, match="exactly one LossScaleOptimizerState"):
        nonfinite_leaves(PARAMS, PARAMS)
    with pytest.raises(TypeError, match="nonfinite_leaves is for the host"):
        jax.jit(lambda state: nonfinite_leaves(state, PARAMS))(state)


def test_a_state_without_statistics_can_get_them():
    old = LossScaleOptimizer(optax.sgd(0.5)).init(PARAMS)
    optimizer = tracker()
    empty = optimizer.init(PARAMS).leaf_statistics
    _, state = optimizer.update(
        plant(GOOD, INF, 1), old._replace(leaf_statistics=empty)
    )
    assert found(state) == [("params['b'][0]", "inf", 1, 0)]


@pytest.mark.parametrize("axis_name", [None, "batch"])
def test_pmap(axis_name):
    optimizer = tracker(axis_name=axis_name)
    grads = [GOOD] * 8
    grads[5] = plant(GOOD, INF, 0)
    grads[6] = plant(GOOD, NAN, 2)
    state = stacked(*[optimizer.init(PARAMS)] * 8)
    step = jax.pmap(lambda g, s: optimizer.update(g, s)[1], axis_name="batch")
    state = step(stacked(*grads), state)
    assert found(state) == [
        ("params['a']", "inf", 1, 0),
        ("params['b'][1]", "nan", 0, 1),
    ]
    told = np.any(state.leaf_statistics.last, axis=1)
    assert told.tolist() == [axis_name is not None or i in (5, 6) for i in range(8)]


def mesh_of_8():
    return jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))


@pytest.mark.parametrize("value", [INF, NAN])
@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(check_vma, value):
    optimizer = tracker(axis_name="x")
    params = {"replicated": jnp.ones(3), "sharded": jnp.ones(16)}
    specs = {"replicated": P(), "sharded": P("x")}
    state = optimizer.init(params)

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=mesh_of_8(),
        in_specs=(specs, P()),
        out_specs=P(),
        check_vma=check_vma,
    )
    def step(grads, state):
        return optimizer.update(grads, state)[1]

    for leaf, name in enumerate(specs):
        after = step(plant(params, value, leaf, 2), state)
        (only,) = nonfinite_leaves(after, params)
        assert only.name == f"params['{name}']"
        assert only.last == ("nan" if np.isnan(value) else "inf")


@pytest.mark.parametrize("value", [INF, NAN])
def test_sharded_jit(value):
    optimizer = tracker()
    mesh = mesh_of_8()
    params = {"replicated": jnp.ones(3), "sharded": jnp.ones((16, 8))}
    shardings = {
        "replicated": NamedSharding(mesh, P()),
        "sharded": NamedSharding(mesh, P("x")),
    }
    params = jax.device_put(params, shardings)
    state = jax.jit(optimizer.init)(params)
    step = jax.jit(lambda grads, state: optimizer.update(grads, state)[1])
    for leaf, name in enumerate(shardings):
        grads = jax.device_put(plant(params, value, leaf, 2), shardings)
        (only,) = nonfinite_leaves(step(grads, state), params)
        assert only.name == f"params['{name}']"
        assert only.last == ("nan" if np.isnan(value) else "inf")


def test_of_an_ensemble_the_worst_counts():
    optimizer = tracker()
    members = [GOOD, plant(GOOD, INF, 0), plant(GOOD, NAN, 0)]
    state = jax.vmap(lambda _: optimizer.init(PARAMS))(jnp.arange(3))
    update = jax.jit(jax.vmap(lambda g, s: optimizer.update(g, s)[1]))
    state = update(stacked(*members), state)
    assert found(state) == [("params['a']", "nan", 1, 1)]
    assert state.leaf_statistics.last[:, 0].tolist() == [0, 1, 2]


def test_inside_other_optimizers():
    tx = optax.chain(
        optax.identity(),
        optax.masked(
            tracker(loss_scale=DynamicLossScale(2.0)), {"a": True, "b": False}
        ),
    )
    _, state = tx.update(plant(GOOD, INF, 0), tx.init(PARAMS), PARAMS)
    masked = {"a": PARAMS["a"], "b": optax.MaskedNode()}
    assert found(state, masked) == [("params['a']", "inf", 1, 0)]


def test_nnx():
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, tracker(), wrt=nnx.Param)
    grads = jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param))
    grads["kernel"][...] = jnp.full((2, 3), INF)
    with jax.numpy_dtype_promotion("standard"):
        optimizer.update(model, grads)
    (leaf,) = nonfinite_leaves(optimizer.opt_state, nnx.state(model, nnx.Param))
    assert "kernel" in leaf.name
    assert leaf.last == "inf"
