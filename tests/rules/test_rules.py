"""Every rule keeps the promises of a loss scale."""

import dataclasses
import functools
import inspect
import re
import subprocess
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import ROOT, assert_same_bits, exhaustive_but, scan_updates, signature
from meshes import PARTS, WHOLE, mesh_of, over_devices
from peers import LogMax
from rules import RULES

from benchmarks import hlo
from optax_lossscale import DynamicLossScale, HeadroomLossScale, LossScale

every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
GRADS = np.array([1.0, 3.0, np.inf, np.nan, 0.0, 1e-30, 1e30, 0.01], np.float32)


# A file that adds a rule, and runs tests over it.
WITH_A_RULE = """
import dataclasses, sys, pytest, optax_lossscale
@dataclasses.dataclass(frozen=True)
class Mine(optax_lossscale.DynamicLossScale):
    growth_factor: float = 4.0
optax_lossscale.Mine = Mine
sys.exit(pytest.main(["-q", "-n0", "-k", "Mine", *sys.argv[1:]]))
"""


@pytest.mark.exhaustive
def test_tests_find_a_new_rule():
    tests = ["tests/rules", "tests/promises/test_contract.py"]
    command = [sys.executable, "-c", WITH_A_RULE, *tests]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout
    (passed,) = re.findall(r"(\d+) passed", found.stdout)
    assert int(passed) > 15


@pytest.mark.parametrize("damaged", [np.inf, -np.inf, np.nan])
@every_rule
def test_a_scale_that_is_not_finite_begins_anew(rule, damaged):
    damaged = rule.init()._replace(loss_scale=jnp.float16(damaged))
    assert rule(damaged) == 2.0**15
    for grad in (1.0, np.inf):
        new, old = (rule.update(grad, x)[0] for x in (damaged, rule.init()))
        assert new.loss_scale == old.loss_scale


def test_a_rule_without_initial_scale_begins_with_that_of_init():
    @dataclasses.dataclass(frozen=True)
    class Wrapper(LossScale):
        inner: LossScale

        def init(self):
            return self.inner.init()

        def update(self, grads, state, *, axis_name=None):
            return self.inner.update(grads, state, axis_name=axis_name)

    rule = Wrapper(DynamicLossScale(64.0))
    damaged = rule.init()._replace(loss_scale=jnp.float32(np.inf))
    assert [f(damaged) for f in (rule, jax.jit(rule))] == [64, 64]


def test_growth_beyond_float32_ends_at_the_maximum():
    rule = DynamicLossScale(2.0**100, growth_factor=2.0**100, growth_interval=1)
    assert rule.update(1.0, rule.init())[0].loss_scale == 2.0**126


def test_every_rule_is_public():
    def concrete(rule):
        if rule.__module__.startswith("optax_lossscale."):
            if not inspect.isabstract(rule):
                yield rule
            for subclass in rule.__subclasses__():
                yield from concrete(subclass)

    assert {type(rule) for rule in RULES.values()} == set(concrete(LossScale))


@every_rule
def test_a_state_keeps_its_types(rule):
    traces = []

    @functools.partial(jax.jit, donate_argnums=1)
    def step(grad, state):
        traces.append(1)
        return rule.update({"w": grad, "n": None}, state)

    state = rule.init()
    expected = signature(state)
    assert not any(x.weak_type for x in jax.tree.leaves(state))
    assert signature(rule(state)) == signature(jnp.float32(1))
    assert signature(jax.eval_shape(rule.init)) == expected
    assert signature(jax.eval_shape(rule.update, GRADS[0], state)[0]) == expected
    for update in (rule.update, step):
        for grad in GRADS:
            state, should_apply = update(grad, state)
            assert signature(state) == expected
            assert signature(should_apply) == signature(jnp.ones((), bool))
            assert bool(should_apply) == np.isfinite(grad)
            assert all(np.isfinite(x).all() for x in jax.tree.leaves(state))
    assert len(traces) == 1


class Box(NamedTuple):
    """A box around an array, such as a variable of Flax nnx."""

    value: jax.Array


@every_rule
@pytest.mark.parametrize("convert", [lambda x: x.item(), np.float64, jnp.int32, Box])
def test_a_state_of_other_types_becomes_one_of_arrays(rule, convert):
    converted = jax.tree.map(convert, rule.init())
    assert signature(rule(converted)) == signature(jnp.float32(1))
    for gradient in (1.0, jnp.nan):
        after, _ = rule.update(gradient, converted)
        assert_same_bits(after, rule.update(gradient, rule.init())[0])


@every_rule
@pytest.mark.parametrize(
    "tree",
    [None, (), np.zeros((0, 3), np.float32), {"a": None, "b": np.arange(3)}],
    ids=repr,
)
def test_a_tree_without_numbers_is_finite_and_tells_nothing(rule, tree):
    state, should_apply = rule.update(tree, rule.init())
    assert bool(should_apply)
    assert state.loss_scale == 2.0**15


@pytest.mark.parametrize("rule", [*RULES.values(), HeadroomLossScale(release_steps=1)])
def test_extreme_gradients_stay_within_bounds(rule):
    largest = np.finfo(np.float32).max
    for grads in ([1e-38], [1e-45], [largest], [1e-38, largest, np.inf] * 5):
        grads = np.resize(np.float32(grads), 15)  # of one length: one program
        states, _ = scan_updates(rule, grads)
        assert np.all((states.loss_scale >= 1) & (states.loss_scale <= 2.0**126))
        assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(states))


def states_of_devices(rule, way):
    """Runs a rule on eight devices that see different gradients; returns all states."""

    def update(grad):
        def step(state, x):
            return rule.update(x, state, axis_name="batch")

        return jax.lax.scan(step, rule.init(), grad)

    # Each step another device has the largest gradient, or one that is not finite.
    grads = np.float32(0.001) + np.diag(GRADS)
    if way == "vmap":
        states = jax.jit(jax.vmap(update, axis_name="batch"))(grads)
    else:
        # That it may be called replicated is checked: by check_vma.
        states = over_devices(PARTS, WHOLE)(lambda g: update(g[0]))(grads)
        states = jax.tree.map(lambda x: np.stack([x] * 8), states)
    return grads, states


@pytest.mark.parametrize("rule", [*RULES.values(), LogMax(2.0**15)])
@pytest.mark.parametrize("way", ["vmap", "shard_map"])
def test_devices_decide_as_one_that_sees_all_gradients(rule, way):
    grads, (states, applied) = states_of_devices(rule, way)
    alone, expected = scan_updates(rule, grads.T)
    for device in range(8):
        assert applied[device].tolist() == expected.tolist()
        assert states.loss_scale[device] == alone.loss_scale[-1]


@every_rule
def test_states_that_differ_between_devices_may_be_scanned_over(rule):

    @over_devices(PARTS, PARTS, mesh_of(batch=2))
    def scales_of(states, grads):
        def step(state, grad):
            return rule.update(grad, state)[0], rule(state)

        state = jax.tree.map(lambda x: x[0], states)
        return jax.lax.scan(step, state, grads)[1]

    states = jax.tree.map(lambda x: np.stack([x, x]), rule.init())
    grads = np.float32([1, np.nan, 1, 2, np.inf, np.inf])
    scales = np.split(np.asarray(scales_of(states, grads)), 2)
    for got, own in zip(scales, np.split(grads, 2), strict=True):
        expected = scan_updates(rule, own)[0].loss_scale[:-1]
        assert got.tolist() == [2.0**15, *expected.tolist()]


@every_rule
def test_no_kernel_grows_with_the_number_of_leaves(rule):
    """A kernel that held a chain of all leaves would be repeated, and take long."""

    def largest(leaves):
        grads = [jnp.ones(8, jnp.float32)] * leaves
        text = jax.jit(rule.update).lower(grads, rule.init()).compile().as_text()
        module = hlo.parse(text)
        kernels = {k: v for k, v in module.computations.items() if k != module.entry}
        return max(map(len, kernels.values())), len(module.computations[module.entry])

    (kernel, program), (kernel_of_more, program_of_more) = map(largest, (10, 40))
    assert kernel_of_more == kernel
    assert program_of_more <= 4 * program


# Rules that change soon, within bounds that are soon reached.
QUICK = {"initial_scale": 2.0**9, "growth_interval": 3, "max_scale": 2.0**14}
QUICKER = QUICK | {"tolerance": 0.3, "loss_scale_value": 2.0**9}


def quick(rule):
    """Returns a rule that changes soon."""
    fields = {x.name for x in dataclasses.fields(rule)}
    numbers = {k: x for k, x in QUICKER.items() if k in fields}
    return dataclasses.replace(rule, **numbers)


QUICK_RULES = {name: quick(rule) for name, rule in RULES.items()} | {
    "patient": DynamicLossScale(**QUICK, hysteresis=3),
    "consecutive": DynamicLossScale(**QUICK, hysteresis=3, consecutive_hysteresis=True),
    "released": HeadroomLossScale(**QUICK, release_steps=2, hysteresis_bits=0.25),
}
FLOATS = [np.nan, np.inf, -np.inf, 0.0, -0.0, -3.5, 1e-45, 1e30, -1e30, 3e38, 300.0]
INTEGERS = [0, -1, -(2**31), 2**31 - 1, 2**31 - 2, 10**6, -(10**6)]


def tampered_states(rule, *, combinations=300):
    """Returns states with one bad field each, and with several, in one of arrays."""
    rng = np.random.default_rng(0)
    fresh = jax.device_get(rule.init())
    bad = {"float32": FLOATS, "int32": INTEGERS, "bool": [False, True]}
    fields = {k: x for k, x in fresh._asdict().items() if x is not None}
    values = {k: bad[x.dtype.name] for k, x in fields.items()}
    changes = [{}, *({k: value} for k in values for value in values[k])]
    for _ in range(combinations):
        chosen = [k for k in values if rng.random() < 0.6]
        changes.append({k: rng.choice(values[k]) for k in chosen})
    states = []
    for change in changes:
        arrays = {k: np.asarray(v, getattr(fresh, k).dtype) for k, v in change.items()}
        states.append(fresh._replace(**arrays))
    return jax.tree.map(lambda *x: np.stack(x), *states)


BY_DEFAULT = [QUICK_RULES[name] for name in (*RULES, "patient")]
MOST = exhaustive_but(QUICK_RULES.values(), BY_DEFAULT)


@pytest.mark.parametrize("rule", MOST, ids=QUICK_RULES)
def test_a_state_of_whatever_numbers_heals(rule):
    states = tampered_states(rule)
    low = getattr(rule, "min_scale", 2.0**9)
    high = getattr(rule, "max_scale", 2.0**9)

    @jax.jit
    def run(grads):
        def step(states, grad):
            states, should_apply = jax.vmap(rule.update, (None, 0))(grad, states)
            return states, (jax.vmap(rule)(states), states.loss_scale, should_apply)

        return jax.lax.scan(step, states, grads)[1]

    first = np.asarray(jax.jit(jax.vmap(rule))(states))
    assert np.all((low <= first) & (first <= high))
    # A step starts from the scale that is read.
    healed = states._replace(loss_scale=first)
    update = jax.jit(jax.vmap(rule.update, (None, 0)))
    for grad in np.float32([1, np.inf]):
        assert_same_bits(update(grad, states), update(grad, healed))
    # Of one length: one program.
    mixed = np.resize([0.7, np.inf, 0.7, 0.0, np.nan, 0.7, 0.0], 1000)
    for grads in (np.full(1000, np.nan), np.full(1000, 0.7), mixed):
        scales, raw, should_apply = map(np.asarray, run(np.float32(grads)))
        assert np.all((low <= scales) & (scales <= high))
        np.testing.assert_array_equal(raw, scales)
        np.testing.assert_array_equal(should_apply.T, len(first) * [np.isfinite(grads)])
        if np.isnan(grads).all():
            assert np.all((scales[4] < first) | (scales[4] == low))
            assert np.all(scales[-1] == low)
        elif np.isfinite(grads).all():
            # The first state is not tampered with.
            assert np.all(scales[-1] == scales[-1, 0])
