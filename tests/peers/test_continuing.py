"""Runs of others go on with ours, by the lines that the guide has for each library."""

import os
import re
from types import SimpleNamespace as Fields

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.dynamic_scale import DynamicScale
from helpers import ROOT, replay, signature
from peers import PEERS
from test_conformance import comparable_steps, every_run, ours, runs_of

from optax_lossscale import DynamicLossScale, LossScaleOptimizer

GUIDE = (ROOT / "tests/peers/README.md").read_text()
ROW = re.compile(r"^\| ([^|]+) \| [^|]+ \| `(saved.*?)` \| `(.*?)` \|(.*)\|$", re.M)


def lines(scale, steps, more):
    """Returns the lines of the guide, with a row of its table."""
    arguments = f"loss_scale=jnp.float32({scale})", f"good_steps=jnp.int32({steps})"
    arguments = ",\n".join([*arguments, *re.findall("`(.*?)`", more)])
    return f"opt_state = optax.tree.set(opt_state,\n{arguments}\n)"


LINES = {name: lines(*row) for name, *row in ROW.findall(GUIDE)}


def carry_over(name, saved, loss_scale):
    """Returns an optimizer and its state, after the lines of the guide."""
    optimizer = LossScaleOptimizer(optax.identity(), loss_scale)
    fresh = optimizer.init(jnp.float32(0))
    scope = {"optax": optax, "jnp": jnp, "saved": saved, "opt_state": fresh}
    code = LINES[name]
    if loss_scale.get_config().get("hysteresis") == 1:
        # As the guide has it.
        code = re.sub(r".*hysteresis_left.*\n", "", code)
    exec(code, scope)
    assert signature(scope["opt_state"]) == signature(fresh)
    return optimizer, scope["opt_state"]


def saved_as(make, **names):
    """Makes a function that saves what a peer holds by the names of its library."""
    return lambda now: make(**{name: now[key] for name, key in names.items()})


def jmp_scale(**fields):
    return pytest.importorskip("jmp").DynamicLossScale(**fields)


ITERATIONS = {"cur_scale": "scale", "cur_iter": "iter", "scale_window": "window"}
ITERATIONS |= {"last_overflow_iter": "last_overflow", "cur_hysteresis": "hysteresis"}
# By peer, how the library saves its state.
SAVED = {
    "PyTorch": saved_as(dict, scale="scale", _growth_tracker="counter"),
    "Flax, up to 0.12.12": saved_as(DynamicScale, scale="scale", fin_steps="counter"),
    "jmp": saved_as(jmp_scale, loss_scale="scale", counter="counter"),
    "Keras 3": saved_as(Fields, dynamic_scale="variable", step_counter="steps"),
    "tf_keras": saved_as(Fields, loss_scale="variable", dynamic_counter="steps"),
    "apex, amp": saved_as(dict, loss_scale="scale", unskipped="counter"),
    "apex, fp16_utils": saved_as(dict, **ITERATIONS),
    "apex, contrib": saved_as(dict, **ITERATIONS),
    "DeepSpeed, ZeRO": saved_as(Fields, **ITERATIONS),
    "Megatron": saved_as(
        dict, scale="array", growth_tracker="counter", hysteresis_tracker="hysteresis"
    ),
    "fairseq": saved_as(
        Fields,
        loss_scale="scale",
        scale_window="window",
        _iter="iter",
        _last_overflow_iter="last_overflow",
        _last_rescale_iter="last_rescale",
        _overflows_since_rescale="overflows_since_rescale",
    ),
}
# Where the guide has another name for it.
TITLES = {"Flax, up to 0.12.12": "Flax"}
TITLES |= dict.fromkeys(["apex, fp16_utils", "apex, contrib"], "apex, FP16_Optimizer")


def test_the_guide_has_every_library():
    assert list(LINES) == list(dict.fromkeys(TITLES.get(name, name) for name in SAVED))


def peer_states(run):
    """Yields what a peer holds after each step, by the rules of the peer."""
    now = {"last_overflow": -1, "last_rescale": -1}
    now["window"] = run["config"].get("scale_window", 1)
    for i, finite in enumerate(run["finite"]):
        for name in ("counter", "hysteresis", "overflows_since_rescale"):
            now[name] = run[name][i] if run.get(name) else None
        if not finite:
            now["last_overflow"] = i
            rescaled = now["overflows_since_rescale"] == 0
        else:
            rescaled = (i - now["last_overflow"]) % now["window"] == 0
        if rescaled:
            now["last_rescale"] = i
        now |= {"iter": i + 1, "scale": run["scale"][i + 1]}
        now["array"] = np.array([now["scale"]])
        for name, key in (("variable", "scale"), ("steps", "counter")):
            if now[key] is not None:
                value = np.array(now[key])
                now[name] = Fields(value=value, numpy=value.copy)
        yield now.copy()


def scales_of(optimizer, state, finite):
    """Returns the scales and decisions of the rest of a run."""
    states, applied = replay(optimizer.loss_scale, finite, state.loss_scale_state)
    return np.asarray(states.loss_scale), np.asarray(applied)


@every_run
@pytest.mark.parametrize("name", SAVED)
def test_recorded_runs_are_resumed_in_the_middle(name, every_run):
    """Resumes runs after many of their steps, and compares them with their own ends."""
    grown = fallen = 0
    title, save = TITLES.get(name, name), SAVED[name]
    for run in runs_of(name, every_run=every_run):
        if not run["config"].get("dynamic", True):
            continue
        loss_scale, end = ours(run), comparable_steps(run)
        scale, states = np.array(run["scale"]), list(peer_states(run))
        expected = run["applied"] or run["finite"]
        for step in range(1, end, 1 + end // 20):
            resumed = carry_over(title, save(states[step - 1]), loss_scale)
            # Of one length: one program for all the steps of a run.
            finite = np.ones(max(800, end), bool)
            finite[: end - step] = run["finite"][step:end]
            mine, applied = (x[: end - step] for x in scales_of(*resumed, finite))
            rest = scale[step + 1 : end + 1]
            # The scale is rounded to float32 once, and whenever it changes.
            changes = 1 + np.cumsum(np.diff(rest, prepend=scale[step]) != 0)
            error = abs(np.float64(mine) - rest)
            assert np.all(error <= changes * 2.0**-22 * rest), (run["id"], step)
            assert applied.tolist() == expected[step:end], (run["id"], step)
            grown += np.any(np.diff(rest) > 0)
            fallen += np.any(np.diff(rest) < 0)
    # Of the states, those from which the scale still grew and fell.
    assert min(grown, fallen) >= (15 if every_run else 1)


def test_late_growth_of_deepspeed(monkeypatch):
    """With `- 2`, as the guide has it: the first finite step is not counted."""
    late = LINES["DeepSpeed, ZeRO"].replace("_iter - 1", "_iter - 2")
    monkeypatch.setitem(LINES, "late", late)
    loss_scale = DynamicLossScale(64.0, growth_interval=4)
    # From step 3 on, after an overflow in step 2: the scale grows in steps 7, 11, ...
    scales = [32.0 * 2 ** (step // 4) for step in range(40)]
    for steps in range(1, 20):
        saved = Fields(cur_iter=3 + steps, last_overflow_iter=2, scale_window=4)
        saved.cur_scale = scales[steps - 1]
        resumed = carry_over("late", saved, loss_scale)
        found, _ = scales_of(*resumed, [1] * 14)
        assert found.tolist() == scales[steps:][:14]


@pytest.mark.exhaustive
def test_keras_itself(monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", os.environ.get("KERAS_BACKEND", "jax"))
    keras = pytest.importorskip("keras")
    sgd = keras.optimizers.SGD(0.5)
    saved = keras.optimizers.LossScaleOptimizer(sgd, initial_scale=8.0)
    saved.build([keras.Variable(np.ones(2, "float32"))])
    saved.step_counter.assign(3)
    _, state = carry_over("Keras 3", saved, PEERS["Keras 3"].ours())
    assert state.loss_scale_state[:2] == (8, 3)
