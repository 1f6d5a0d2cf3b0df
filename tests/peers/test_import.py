"""Recorded runs of others, resumed with ours in the middle."""

import copy
import dataclasses
import functools
import os
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_same_bits, exhaustive_but, signature
from peers import PEERS
from test_conformance import REFUSED_RUNS, RUNS, late_growth, liveliest
from test_live_peers import (
    LEARNING_RATE,
    flax_step,
    jmp_step,
    loss_fn,
    random_gradients,
)

from optax_lossscale import DynamicLossScale, LossScaleOptimizer, import_state

TORCH = {
    "scale": 1024.0,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 2000,
    "_growth_tracker": 7,
}
AMP = {"loss_scale": 8.0, "unskipped": 0, "scale_window": 9}
AMP |= {"min_loss_scale": 1.0, "max_loss_scale": 2.0**24}
ITERATIONS = {"cur_scale": 8.0, "cur_iter": 7, "last_overflow_iter": 3}
ITERATIONS |= {"scale_factor": 2.0, "scale_window": 9, "late_growth": False}
APEX = {**ITERATIONS, "min_loss_scale": 1.0}
DEEPSPEED = {**ITERATIONS, "min_scale": 1.0, "delayed_shift": 2, "cur_hysteresis": 2}
DEEPSPEED |= {"consecutive_hysteresis": False}
MEGATRON = {"scale": 8.0, "growth_tracker": 0, "hysteresis_tracker": 2}
MEGATRON |= {"hysteresis": 2, "min_scale": 1.0, "growth_interval": 9}
MEGATRON |= {"growth_factor": 2.0, "backoff_factor": 0.5}
FAIRSEQ = {"loss_scale": 8.0, "scale_factor": 2.0, "scale_window": 9}
FAIRSEQ |= {"tolerance": 0.0, "threshold": 1.0, "min_loss_scale": 1e-4}


class Fields:
    """An object with fields, as a library of its own has them."""

    def __init__(self, **fields):
        vars(self).update(fields)


class Variable:
    """A variable of Keras."""

    def __init__(self, name, value):
        self.name, self.value = name, value

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.value)


def torch_forms(config, now):
    del config["init_scale"]
    state = {"scale": now["scale"], "_growth_tracker": now["counter"], **config}
    yield state, {}
    arrays = {k: np.float32(v) if k == "scale" else v for k, v in state.items()}
    yield pickle.loads(pickle.dumps(arrays)), {}


def flax_forms(config, now):
    from flax import serialization
    from flax.training.dynamic_scale import DynamicScale

    saved = {"scale": jnp.float32(now["scale"]), "fin_steps": jnp.int32(now["counter"])}
    scaler = DynamicScale(**config | saved)
    yield scaler, {}
    hyperparameters = {k: v for k, v in config.items() if k not in saved}
    yield serialization.to_state_dict(scaler), hyperparameters
    blob = serialization.msgpack_serialize(serialization.to_state_dict(scaler))
    yield serialization.msgpack_restore(blob), hyperparameters


def jmp_forms(config, now):
    saved = {"loss_scale": jnp.float32(now["scale"])}
    saved["counter"] = jnp.int32(now["counter"])
    state = config | saved
    state["min_loss_scale"] = jnp.float32(state["min_loss_scale"])
    yield Fields(scale=max, **state), {}
    yield state, {}
    yield saved, {k: v for k, v in state.items() if k not in saved}


def keras_forms(config, now):
    steps = {"dynamic_growth_steps": config["dynamic_growth_steps"]}
    state = {"step_counter": np.int32(now["counter"])}
    state["dynamic_scale"] = np.float32(now["scale"])
    yield state, steps
    yield {k: float(v) for k, v in state.items()}, steps
    variables = {k: Variable(k, v) for k, v in state.items()}
    yield Fields(**variables, initial_scale=8.0, **steps), {}
    others = [Variable("iteration", 9), Variable("learning_rate", 0.0)]
    variables = [*others, *variables.values(), *others, Variable("momentum", [0, 0])]
    yield variables, steps
    yield {str(i): np.asarray(v) for i, v in enumerate(variables)}, steps


def tf_keras_forms(config, now):
    state = {
        "loss_scale": np.float32(now["scale"]),
        "dynamic_counter": Variable("good_steps:0", np.int64(now["counter"])),
    }
    steps = {"dynamic_growth_steps": config["dynamic_growth_steps"]}
    yield Fields(**state, **steps, _loss_scale=max, iterations=9, dynamic=True), {}
    yield state, steps


def apex_amp_forms(config, now):
    # The first is not saved, and the second is not what it says: it is always 2.
    del config["init_scale"], config["scale_factor"]
    state = {"loss_scale": now["scale"], "unskipped": now["counter"]}
    yield {"loss_scaler0": state}, config
    attributes = {f"_{name}": value for name, value in state.items()}
    attributes |= {f"_{name}": config[name] for name in config if "_loss" in name}
    attributes |= {"_scale_seq_len": config["scale_window"], "_has_overflow": False}
    yield {"loss_scaler": Fields(loss_scale=max, **attributes), "overflow": False}, {}


def iterations(config, now):
    names = ("scale_factor", "scale_window")
    state = {"cur_scale": now["scale"], "cur_iter": now["iter"]}
    state["last_overflow_iter"] = now["last_overflow"]
    return state | {name: config[name] for name in names}


def apex_forms(config, now):
    state = iterations(config, now)
    asked = {"min_loss_scale": 1.0, "late_growth": False}
    yield Fields(**state, loss_scale=now["scale"], backward=max), asked
    groups = {"optimizer_state_dict": {"state": {}}, "fp32_groups": [[np.ones(3)]]}
    yield {"dynamic_loss_scale": True, **state, **groups}, asked


def deepspeed_forms(config, now):
    state = iterations(config, now) | {"cur_hysteresis": now["hysteresis"]}
    names = ("min_scale", "delayed_shift", "consecutive_hysteresis")
    state |= {name: config[name] for name in names}
    asked = {"late_growth": False}
    others = {"raise_error_at_min_scale": True, "dynamic": True, "dtype": "half"}
    scaler = Fields(**state, **others, loss_scale=now["scale"])
    yield scaler, asked
    saved = {"loss_scaler": scaler, "overflow": False, "fp32_flat_groups": []}
    yield saved, asked
    yield Fields(state_dict=lambda: saved), asked


def megatron_forms(config, now):
    del config["initial_scale"]
    state = {"scale": np.float32([now["scale"]]), "growth_tracker": now["counter"]}
    state["hysteresis_tracker"] = now["hysteresis"]
    yield state, config
    yield {"optimizer": {"state": {}}, "grad_scaler": state}, config


def fairseq_forms(config, now):
    del config["init_scale"]
    counters = {
        "loss_scale": now["scale"],
        "_iter": now["iter"],
        "_last_overflow_iter": now["last_overflow"],
        "_last_rescale_iter": now["last_rescale"],
        "_overflows_since_rescale": now["overflows_since_rescale"],
    }
    yield Fields(**counters, **config, scale=max, update=max), {}
    yield counters, config


FORMS = {
    "PyTorch": torch_forms,
    "Flax, up to 0.12.12": flax_forms,
    "jmp": jmp_forms,
    "Keras 3": keras_forms,
    "tf_keras": tf_keras_forms,
    "apex, amp": apex_amp_forms,
    "apex, fp16_utils": apex_forms,
    "apex, contrib": apex_forms,
    "DeepSpeed, ZeRO": deepspeed_forms,
    "Megatron": megatron_forms,
    "fairseq": fairseq_forms,
}


def recorded(name):
    for run in RUNS.values():
        is_its = run["peer"].startswith(PEERS[name].recorded)
        is_dynamic = run["config"].get("dynamic", True)
        if is_its and is_dynamic and run["id"] not in REFUSED_RUNS:
            yield run


def peer_states(run):
    """Yields what a peer holds after each step, by the rules of the peer."""
    now = {"last_overflow": -1, "last_rescale": -1}
    for i, finite in enumerate(run["finite"]):
        for name in ("counter", "hysteresis", "overflows_since_rescale"):
            now[name] = run[name][i] if run.get(name) else None
        if not finite:
            now["last_overflow"] = i
        if finite:
            window = run["config"].get("scale_window", 1)
            rescaled = (i - now["last_overflow"]) % window == 0
        else:
            rescaled = now["overflows_since_rescale"] == 0
        if rescaled:
            now["last_rescale"] = i
        yield {**now, "iter": i + 1, "scale": run["scale"][i + 1]}


@functools.partial(jax.jit, static_argnums=0)
def resume(loss_scale, state, finite):
    """Returns the scales and decisions of the rest of a run."""

    def step(state, finite):
        grads = jnp.where(finite, jnp.float32(1), jnp.float32(jnp.inf))
        state, should_apply = loss_scale.update(grads, state)
        return state, (state.loss_scale, should_apply)

    return jax.lax.scan(step, state, finite)[1]


def resume_in_the_middle(name, runs):
    """Resumes each run after many of its steps, and compares it with its own end.

    Returns:
      How many times, and in how many of them the scale grew and fell later on.
    """
    count = grown = fallen = 0
    for run in runs:
        config = dict(run["config"])
        if "min_loss_scale_after" in run:
            config["min_loss_scale"] = run["min_loss_scale_after"]
        scale, states = np.array(run["scale"]), list(peer_states(run))
        normal = (scale >= 2.0**-126) & (scale <= 2.0**126)
        end = int(np.argmin([*normal, False])) - 1
        expected = run["applied"] or run["finite"]
        rules = set()
        for step in range(1, end, 1 + end // 20):
            forms = FORMS[name](copy.deepcopy(config), states[step - 1])
            if step != 1 and count % 7:
                # All forms now and then, the first everywhere.
                forms = [next(forms)]
            imported = [import_state(saved, **options) for saved, options in forms]
            for loss_scale, state in imported:
                assert loss_scale.initial_scale == np.float32(scale[step])
                # One program for all the steps of a run: the first scale and the
                # length of the rest do not matter to it.
                rules.add(dataclasses.replace(loss_scale, initial_scale=scale[0]))
                assert_same_bits(state, imported[0][1])
            finite = np.ones(max(800, end), bool)
            finite[: end - step] = run["finite"][step:end]
            outputs = resume(next(iter(rules)), imported[0][1], finite)
            mine, applied = (np.array(x)[: end - step] for x in outputs)
            rest = scale[step + 1 : end + 1]
            # The scale is rounded to float32 once, and whenever it changes.
            changes = 1 + np.cumsum(np.diff(rest, prepend=scale[step]) != 0)
            error = abs(np.float64(mine) - rest)
            assert np.all(error <= changes * 2.0**-22 * rest), (run["id"], step)
            assert applied.tolist() == expected[step:end], (run["id"], step)
            grown += np.any(np.diff(rest) > 0)
            fallen += np.any(np.diff(rest) < 0)
            count += 1
        assert len(rules) <= 1
    return count, grown, fallen


@pytest.mark.parametrize("name", FORMS)
def test_the_liveliest_run_is_resumed_in_the_middle(name):
    count, grown, fallen = resume_in_the_middle(name, [liveliest(recorded(name))])
    assert min(count, grown, fallen) >= 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", FORMS)
def test_recorded_runs_are_resumed_in_the_middle(name):
    count, grown, fallen = resume_in_the_middle(name, recorded(name))
    print(f"{name}: {count} states resumed")
    assert count >= 70
    assert grown >= 15 <= fallen


FP16_OPTIMIZER = {"fp32_groups_flat": [np.ones(3)], "clip_grad": 0.0}
FP16_OPTIMIZER |= {"dynamic_loss_scale": True, "optimizer_state_dict": {}}
NO_HYSTERESIS = {"min_scale": 1, "delayed_shift": 1, "cur_hysteresis": 1}
NO_HYSTERESIS |= {"consecutive_hysteresis": False}


@pytest.mark.parametrize(
    ("others", "options"),
    [
        (FP16_OPTIMIZER, {"min_loss_scale": 1.0}),
        (NO_HYSTERESIS, {"late_growth": True}),
        ({"fp32_groups": []}, {"min_loss_scale": 1.0, "late_growth": True}),
    ],
    ids=["FP16_Optimizer", "DynamicLossScaler", "FP16_UnfusedOptimizer"],
)
def test_late_growth_of_deepspeed(others, options):
    for cur_iter in range(1, 20):
        scales, last = late_growth(64.0, 4, [*(1, 1, 0), *[1] * 20][:cur_iter])
        saved = {"cur_iter": cur_iter, "last_overflow_iter": last, **others}
        saved |= {"cur_scale": scales[-1], "scale_factor": 2.0, "scale_window": 4}
        with pytest.raises(ValueError, match=f"lacks '{next(iter(options))}'"):
            import_state(saved)
        loss_scale, state = import_state(saved, **options)

        theirs, last = late_growth(scales[-1], 4, [1] * 14, cur_iter, last)
        ours = resume(loss_scale, state, np.ones(14, bool))[0].tolist()
        if scales[-1] == scales[-2:][0] / 2:
            # The last step has overflowed: one earlier, as after later overflows.
            assert ours[:-1] == theirs[1:]
        else:
            assert ours == theirs


def flax_run(gradients):
    from flax.training.dynamic_scale import DynamicScale

    scaler = DynamicScale(growth_interval=3, growth_factor=4.0)
    scaler = scaler.replace(fin_steps=jnp.int32(0), scale=jnp.float32(2.0**20))
    return flax_step, scaler


def jmp_run(gradients):
    jmp = pytest.importorskip("jmp")

    scaler = jmp.DynamicLossScale(jnp.float32(2.0**20), period=3, factor=4)
    return jmp_step, jax.tree.map(jnp.asarray, scaler)


@pytest.mark.parametrize("live", [flax_run, jmp_run])
@pytest.mark.parametrize("split", exhaustive_but([1, 13, 14, 30], [13]))
def test_a_live_run_goes_on_with_ours(live, split):
    gradients = random_gradients(runs=1)[0]
    with jax.numpy_dtype_promotion("standard"):
        step, scaler = live(gradients)
        start = jnp.float32(1), scaler
        (param, saved), _ = jax.lax.scan(step, start, gradients[:split])
        _, theirs = jax.lax.scan(step, (param, saved), gradients[split:])
    loss_scale, loss_scale_state = import_state(saved)
    optimizer = LossScaleOptimizer(optax.sgd(LEARNING_RATE), loss_scale)
    state = optimizer.init(param)
    types = signature(state)
    state = state._replace(loss_scale_state=loss_scale_state)
    assert signature(state) == types

    def our_step(carry, gradient):
        param, state, _ = optimizer.minimize(loss_fn, *carry, gradient)
        scale = optimizer.current_loss_scale(state)
        return (param, state), (param, scale, state.last_step_applied)

    _, ours = jax.lax.scan(our_step, (param, state), gradients[split:])
    assert_same_bits(ours, theirs)
    assert np.any(np.diff(ours[1]) > 0)
    assert np.any(np.diff(ours[1]) < 0)


@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept")
def test_keras_itself(monkeypatch):
    if "KERAS_BACKEND" not in os.environ:
        monkeypatch.setenv("KERAS_BACKEND", "jax")
    keras = pytest.importorskip("keras")
    if keras.backend.backend() != "jax":
        pytest.skip("another backend is chosen")
    optimizer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.5, momentum=0.5), 64.0, dynamic_growth_steps=3
    )
    variable = keras.Variable(np.ones(2, "float32"))
    with jax.numpy_dtype_promotion("standard"):
        optimizer.build([variable])
        values, variables = [variable.value], optimizer.variables
        now = [v.value for v in variables]
        for factor in (1, 1, 1, np.inf, 1, 1):
            grads = [jnp.ones(2) * factor]
            values, now = optimizer.stateless_apply(now, grads, values)
        for variable, value in zip(variables, now, strict=True):
            variable.assign(value)
        store = {}
        optimizer.save_own_variables(store)
        saves = [(optimizer, {}), (optimizer.variables, {"dynamic_growth_steps": 3})]
        saves += [(store, {"dynamic_growth_steps": 3})]
        for saved, options in saves:
            loss_scale, state = import_state(saved, **options)
            assert loss_scale.growth_interval == 3
            assert (state.loss_scale, state.good_steps) == (64, 2)


def test_returns_ordinary_values():
    loss_scale, state = import_state(TORCH)
    assert loss_scale == DynamicLossScale(1024.0, 2000, min_scale=2.0**-126)
    assert signature(state) == signature(loss_scale.init())
    assert (state.loss_scale, state.good_steps, state.hysteresis_left) == (1024, 7, 1)


def test_a_scaler_that_has_a_state_dict():
    scaler = Fields(state_dict=lambda: TORCH, _growth_tracker=None)
    assert import_state(scaler) == import_state(TORCH)


def test_keyword_arguments_replace_what_was_saved():
    saved = {"loss_scale": 2.0, "counter": 0, "period": 3, "factor": 2}
    saved["min_loss_scale"] = 1.0
    assert import_state(saved, min_loss_scale=0.25)[0].min_scale == 0.25
    for none in (0, 0.0):
        assert import_state(saved, min_loss_scale=none)[0].min_scale == 2.0**-126


def test_flax_without_minimum():
    from flax.training.dynamic_scale import DynamicScale

    saved = DynamicScale(minimum_scale=None)
    assert import_state(saved)[0] == PEERS["Flax, up to 0.12.12"].ours(
        minimum_scale=None
    )


def test_flax_that_grows_on_time():
    saved = {"scale": 8.0, "fin_steps": 2, "growth_factor": 2.0, "backoff_factor": 0.5}
    saved |= {"growth_interval": 3, "minimum_scale": None}
    finite = np.array([1, 1, 1, 1, 0, 1, 1, 1], bool)
    for late, scales in (
        (True, [8, 16, 16, 16, 8, 8, 8, 8]),
        (False, [16, 16, 16, 32, 16, 16, 16, 32]),
    ):
        found, _ = resume(*import_state(saved, late_growth=late), finite)
        assert found.tolist() == scales
    assert import_state(saved) == import_state(saved, late_growth=True)


def test_a_checkpoint_of_fairseq_has_the_scale_alone():
    options = {"scale_factor": 2.0, "scale_window": 3, "tolerance": 0.25}
    options |= {"threshold": None, "min_loss_scale": 1e-4}
    saved = {"state": {}, "param_groups": [], "loss_scale": 64.0}
    with pytest.raises(ValueError, match="'loss_scale', 'tolerance': fairseq"):
        import_state(saved)
    with pytest.raises(ValueError, match=r"lacks 'scale_factor', .*'min_loss_scale'"):
        import_state(saved, tolerance=0.25)
    loss_scale, state = import_state(saved, **options)
    assert loss_scale == PEERS["fairseq"].ours(init_scale=64.0, **options)
    assert state == loss_scale.init()


def flax_dict(**fields):
    return {"scale": 8.0, "fin_steps": 0, **fields}


def jmp_dict(**fields):
    start = {"loss_scale": 8.0, "counter": 0, "period": 3, "factor": 2}
    return {**start, "min_loss_scale": 1.0, **fields}


def keras_dict(**fields):
    start = {"dynamic_scale": 8.0, "step_counter": 0, "dynamic_growth_steps": 3}
    return {**start, **fields}


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        (None, "recognized by.*'fin_steps': Flax.*got a NoneType with nothing"),
        (3.0, "got a float with nothing"),
        ("state", "got a str with nothing"),
        ([], "got a list with nothing"),
        ({}, "saved is empty.*enabled=False.*FixedLossScale"),
        ({"step": 1}, "got a dict with 'step'"),
        ({"0": 1, "1": 2}, "got a dict with nothing"),
        (DynamicLossScale(), "got a DynamicLossScale with .*'growth_factor'"),
        (DynamicLossScale().init(), "got a LossScaleState with 'loss_scale'"),
        (TORCH | {"fin_steps": 0}, "exactly one.*'_growth_tracker', 'fin_steps'"),
        (flax_dict(), "lacks 'growth_factor', .*'minimum_scale'.*growth_interval=2000"),
        ({"fin_steps": 0}, "lacks 'scale', 'growth_factor'"),
        ({"step_counter": 0}, "lacks 'dynamic_scale', 'dynamic_growth_steps'"),
        (Fields(counter=0, period=3), "lacks 'loss_scale', 'factor'"),
        (TORCH | {"scale": jnp.ones(8)}, r"scale must be one number, got shape \(8,\)"),
        (TORCH | {"scale": np.float16(8)}, "scale must not be of half precision"),
        (TORCH | {"scale": jnp.bfloat16(8)}, "scale must be a real number"),
        (flax_dict(minimum_scale=-1.0), "minimum_scale must not be negative"),
        (flax_dict(minimum_scale=16.0), "scale must lie between the minimum, 16.0"),
        (flax_dict(growth_interval=2, fin_steps=3), "fin_steps must be below 3"),
        (jmp_dict(counter=3), "counter must be below 3, .*got 3"),
        (jmp_dict(factor=1), "factor must be above 1"),
        (jmp_dict(loss_scale=0.5), "loss_scale must lie between the minimum, 1.0"),
        (
            keras_dict(dynamic_growth_steps=0),
            "dynamic_growth_steps must be .*at least 1",
        ),
        (TORCH | {"growth_interval": 0}, "growth_interval must be .*at least 1.*got 0"),
        (keras_dict(step_counter=3), "step_counter must be below 3"),
        (
            AMP | {"unskipped": 9},
            "unskipped must be below 9.*A fixed scale is FixedLoss",
        ),
        (AMP | {"loss_scale": 2.0**25}, r"the maximum, 16777216.0, got 33554432.0"),
        ({"loss_scaler0": AMP, "loss_scaler1": AMP}, r"several.*saved\['loss_scaler0'"),
        ({"loss_scaler0": {}}, "saved is empty.*ConstantGradScaler"),
        (
            {"loss_scale": 8.0, "state": {}},
            "'tolerance': fairseq.*'loss_scale', 'state'",
        ),
        (
            FAIRSEQ | {"_iter": 3, "_last_rescale_iter": 3},
            "_last_rescale_iter must be b",
        ),
        (APEX | {"last_overflow_iter": 7}, "last_overflow_iter must be below cur_iter"),
        (DEEPSPEED | {"cur_hysteresis": 0}, "cur_hysteresis must be .*at least 1"),
        (MEGATRON | {"growth_tracker": 9}, "growth_tracker must be below 9"),
    ],
)
def test_names_what_is_unknown_or_missing(saved, message):
    hyperparameters = {}
    if "fin_steps" in str(saved) and "lacks" not in message:
        defaults = {"growth_factor": 2.0, "backoff_factor": 0.5}
        defaults |= {"growth_interval": 2000, "minimum_scale": 1.0}
        if "_growth_tracker" not in saved:
            hyperparameters = {k: v for k, v in defaults.items() if k not in saved}
    with pytest.raises(ValueError, match=message):
        import_state(saved, **hyperparameters)


WHOLE = [
    TORCH,
    flax_dict(
        growth_factor=2.0, backoff_factor=0.5, growth_interval=9, minimum_scale=1.0
    ),
    jmp_dict(),
    keras_dict(),
    {"loss_scale": 8.0, "dynamic_counter": 0, "dynamic_growth_steps": 3},
    AMP,
    APEX,
    DEEPSPEED,
    MEGATRON,
    FAIRSEQ,
]
BAD = [np.nan, np.inf, -7, "8", [8.0, 8.0], {}, 1j, object(), 2.0**127, 1e400]
FLAGS = ("consecutive_hysteresis", "late_growth")


@pytest.mark.parametrize(
    ("saved", "key"), [(saved, key) for saved in WHOLE for key in saved]
)
def test_names_every_damaged_key(saved, key):
    import_state(saved)
    # Without it DeepSpeed's state is like that of apex, which has fewer names.
    if key != "cur_hysteresis":
        with pytest.raises(ValueError, match=f"'{key}'"):
            import_state({k: v for k, v in saved.items() if k != key})
    bad_values = [*BAD, 1.0 if key in FLAGS else True]
    if key == "hysteresis_tracker":
        bad_values.remove(-7)
    for bad in bad_values:
        with pytest.raises(ValueError, match=rf"^Damaged state of .*\b{key}\b"):
            import_state(saved | {key: bad})
    if "min" in key or key == "threshold":
        assert import_state(saved | {key: None}) == import_state(saved | {key: 0})
    else:
        with pytest.raises(ValueError, match=rf"\b{key} must be a real number"):
            import_state(saved | {key: None})


def test_refuses_unknown_keyword_arguments():
    message = "PyTorch's GradScaler has no 'growth_intervall', only 'scale'"
    with pytest.raises(ValueError, match=message):
        import_state(TORCH, growth_intervall=3)


def test_ignores_what_else_was_saved():
    assert import_state(TORCH | {"growth_intervall": 3}) == import_state(TORCH)


def test_under_jit_names_the_key():
    with pytest.raises(ValueError, match="scale"):
        jax.jit(lambda scale: import_state(TORCH | {"scale": scale})[1])(1.0)
