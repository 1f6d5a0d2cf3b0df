"""Runs of others go on with ours, by the lines that the guide has for each library."""

import functools
import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.dynamic_scale import DynamicScale
from helpers import ROOT, signature
from peers import PEERS
from test_conformance import REFUSED_RUNS, RUNS, liveliest

from optax_lossscale import DynamicLossScale, LossScaleOptimizer

GUIDE = (ROOT / "docs/guide/coming-from-another-loss-scaler.md").read_text()
ROW = re.compile(r"^\| ([^|]+) \| [^|]+ \| `(saved.*?)` \| `(.*?)` \|(.*)\|$", re.M)


def lines(scale, steps, more):
    """Returns the lines of the guide, with a row of its table."""
    arguments = f"loss_scale=jnp.float32({scale})", f"good_steps=jnp.int32({steps})"
    arguments = ",\n".join([*arguments, *re.findall("`(.*?)`", more)])
    return f"opt_state = optax.tree.set(opt_state,\n{arguments}\n)"


LINES = {name: lines(*row) for name, *row in ROW.findall(GUIDE)}


class Fields:
    """An object with fields, as a library of its own has them."""

    def __init__(self, fields):
        vars(self).update(fields)


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


def counted(scale, steps):
    """Makes what a library saves that counts the finite steps."""
    return lambda now: {scale: now["scale"], steps: now["counter"]}


def with_fields(save):
    return lambda now: Fields(save(now))


def variables(scale, steps):
    """Makes what a library of Keras has: variables."""

    def make(now):
        arrays = {scale: np.float32(now["scale"]), steps: np.int64(now["counter"])}
        found = {k: Fields({"value": x, "numpy": x.copy}) for k, x in arrays.items()}
        return Fields(found)

    return make


def iterations(now):
    """Makes what a library saves that counts all steps."""
    names = {"cur_scale": "scale", "cur_iter": "iter", "scale_window": "window"}
    names |= {"last_overflow_iter": "last_overflow", "cur_hysteresis": "hysteresis"}
    return {name: now[key] for name, key in names.items()}


def megatron(now):
    saved = counted("scale", "growth_tracker")(now)
    saved["scale"] = np.float32([saved["scale"]])
    return saved | {"hysteresis_tracker": now["hysteresis"]}


def fairseq(now):
    names = {"loss_scale": "scale", "scale_window": "window", "_iter": "iter"}
    names |= {"_last_overflow_iter": "last_overflow"}
    names |= {"_last_rescale_iter": "last_rescale"}
    names |= {"_overflows_since_rescale": "overflows_since_rescale"}
    return Fields({name: now[key] for name, key in names.items()})


# By peer: the name in the guide, and how the library saves its state.
SAVED = {
    "PyTorch": ("PyTorch", counted("scale", "_growth_tracker")),
    "Flax, up to 0.12.12": ("Flax", with_fields(counted("scale", "fin_steps"))),
    "jmp": ("jmp", with_fields(counted("loss_scale", "counter"))),
    "Keras 3": ("Keras 3", variables("dynamic_scale", "step_counter")),
    "tf_keras": ("tf_keras", variables("loss_scale", "dynamic_counter")),
    "apex, amp": ("apex, amp", counted("loss_scale", "unskipped")),
    "apex, fp16_utils": ("apex, FP16_Optimizer", iterations),
    "apex, contrib": ("apex, FP16_Optimizer", iterations),
    "DeepSpeed, ZeRO": ("DeepSpeed, ZeRO", with_fields(iterations)),
    "Megatron": ("Megatron", megatron),
    "fairseq": ("fairseq", fairseq),
}


def test_the_guide_has_every_library():
    assert list(LINES) == list(dict.fromkeys(name for name, _ in SAVED.values()))


def recorded(name):
    for run in RUNS.values():
        is_its = run["peer"].startswith(PEERS[name].recorded)
        is_dynamic = run["config"].get("dynamic", True)
        if is_its and is_dynamic and run["id"] not in REFUSED_RUNS:
            yield run


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
        yield {**now, "iter": i + 1, "scale": run["scale"][i + 1]}


@functools.partial(jax.jit, static_argnums=0)
def resume(loss_scale, state, grads):
    def step(state, grad):
        state, should_apply = loss_scale.update(grad, state)
        return state, (state.loss_scale, should_apply)

    return jax.lax.scan(step, state, grads)[1]


def scales_of(optimizer, state, finite):
    """Returns the scales and decisions of the rest of a run."""
    grads = jnp.where(jnp.array(finite, bool), jnp.float32(1), jnp.float32(jnp.inf))
    results = resume(optimizer.loss_scale, state.loss_scale_state, grads)
    return map(np.asarray, results)


def resume_in_the_middle(name, runs):
    """Resumes each run after many of its steps, and compares it with its own end.

    Returns:
      How many times, and in how many of them the scale grew and fell later on.
    """
    count = grown = fallen = 0
    title, save = SAVED[name]
    for run in runs:
        config = dict(run["config"])
        if "min_loss_scale_after" in run:
            config["min_loss_scale"] = run["min_loss_scale_after"]
        loss_scale = PEERS[name].ours(**config)
        scale, states = np.array(run["scale"]), list(peer_states(run))
        normal = (scale >= 2.0**-126) & (scale <= 2.0**126)
        end = int(np.argmin([*normal, False])) - 1
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
            count += 1
    return count, grown, fallen


@pytest.mark.parametrize("name", SAVED)
def test_the_liveliest_run_is_resumed_in_the_middle(name):
    count, grown, fallen = resume_in_the_middle(name, [liveliest(recorded(name))])
    assert min(count, grown, fallen) >= 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", SAVED)
def test_recorded_runs_are_resumed_in_the_middle(name):
    count, grown, fallen = resume_in_the_middle(name, recorded(name))
    print(f"{name}: {count} states resumed")
    assert count >= 70
    assert grown >= 15 <= fallen


def late_growth(scale, window, finite, cur_iter=0, last_overflow_iter=-1):
    """The rule of DeepSpeed's FP16_Optimizer, in which the first growth comes late."""
    scales = []
    for step, is_finite in enumerate(finite, cur_iter):
        stable = step - last_overflow_iter - 1
        if not is_finite:
            scale, last_overflow_iter = max(scale / 2, 1.0), step
        elif stable > 0 and stable % window == 0:
            scale *= 2
        scales.append(scale)
    return scales, last_overflow_iter


def test_late_growth_of_deepspeed(monkeypatch):
    """With `- 2`, as the guide has it."""
    assert late_growth(256.0, 2, [1] * 5)[0] == [256, 256, 512, 512, 1024]
    late = LINES["DeepSpeed, ZeRO"].replace("_iter - 1", "_iter - 2")
    monkeypatch.setitem(LINES, "late", late)
    loss_scale = DynamicLossScale(64.0, growth_interval=4)
    for cur_iter in range(1, 20):
        scales, last = late_growth(64.0, 4, [*(1, 1, 0), *[1] * 20][:cur_iter])
        saved = {"cur_iter": cur_iter, "last_overflow_iter": last}
        saved |= {"cur_scale": scales[-1], "scale_window": 4}
        resumed = carry_over("late", Fields(saved), loss_scale)

        theirs, last = late_growth(scales[-1], 4, [1] * 14, cur_iter, last)
        ours = next(scales_of(*resumed, [1] * 14)).tolist()
        if scales[-1] == scales[-2:][0] / 2:
            # The last step has overflowed: one earlier, as after later overflows.
            assert ours[:-1] == theirs[1:]
        else:
            assert ours == theirs


def saved_by_flax():
    return DynamicScale(scale=jnp.float32(8), fin_steps=jnp.int32(3))


def saved_by_jmp():
    jmp = pytest.importorskip("jmp")
    return jmp.DynamicLossScale(jnp.float32(8), jnp.int32(3))


def saved_by_keras():
    keras = pytest.importorskip("keras")
    sgd = keras.optimizers.SGD(0.5)
    saved = keras.optimizers.LossScaleOptimizer(sgd, initial_scale=8.0)
    saved.build([keras.Variable(np.ones(2, "float32"))])
    saved.step_counter.assign(3)
    return saved


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("Flax, up to 0.12.12", saved_by_flax),
        ("jmp", saved_by_jmp),
        ("Keras 3", saved_by_keras),
    ],
)
def test_libraries_themselves(name, make, monkeypatch):
    if "KERAS_BACKEND" not in os.environ:
        monkeypatch.setenv("KERAS_BACKEND", "jax")
    _, state = carry_over(SAVED[name][0], make(), PEERS[name].ours())
    assert state.loss_scale_state[:2] == (8, 3)
