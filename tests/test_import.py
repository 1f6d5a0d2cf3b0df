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
from helpers import assert_same_bits, signature
from peers import PEERS
from test_conformance import REFUSED_RUNS, RUNS
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


def torch_forms(config, scale, counter):
    del config["init_scale"]
    state = {"scale": scale, "_growth_tracker": counter, **config}
    yield state, {}
    arrays = {k: np.float32(v) if k == "scale" else v for k, v in state.items()}
    yield pickle.loads(pickle.dumps(arrays)), {}


def flax_forms(config, scale, counter):
    from flax import serialization
    from flax.training.dynamic_scale import DynamicScale

    now = {"scale": jnp.float32(scale), "fin_steps": jnp.int32(counter)}
    scaler = DynamicScale(**config | now)
    yield scaler, {}
    hyperparameters = {k: v for k, v in config.items() if k not in now}
    yield serialization.to_state_dict(scaler), hyperparameters
    blob = serialization.msgpack_serialize(serialization.to_state_dict(scaler))
    yield serialization.msgpack_restore(blob), hyperparameters


def jmp_forms(config, scale, counter):
    state = {**config, "loss_scale": jnp.float32(scale), "counter": jnp.int32(counter)}
    state["min_loss_scale"] = jnp.float32(state["min_loss_scale"])
    yield Fields(scale=max, **state), {}
    yield state, {}
    yield {k: state.pop(k) for k in ("loss_scale", "counter")}, state


def keras_forms(config, scale, counter):
    steps = {"dynamic_growth_steps": config["dynamic_growth_steps"]}
    state = {"step_counter": np.int32(counter), "dynamic_scale": np.float32(scale)}
    yield state, steps
    yield {k: float(v) for k, v in state.items()}, steps
    variables = {k: Variable(k, v) for k, v in state.items()}
    yield Fields(**variables, initial_scale=8.0, **steps), {}
    others = [Variable("iteration", 9), Variable("learning_rate", 0.0)]
    variables = [*others, *variables.values(), *others, Variable("momentum", [0, 0])]
    yield variables, steps
    yield {str(i): np.asarray(v) for i, v in enumerate(variables)}, steps


FORMS = {
    "PyTorch": torch_forms,
    "Flax": flax_forms,
    "jmp": jmp_forms,
    "Keras 3": keras_forms,
}


def recorded(name):
    for run in RUNS.values():
        is_its = run["peer"].startswith(PEERS[name].recorded)
        if is_its and run["id"] not in REFUSED_RUNS:
            yield run


@functools.partial(jax.jit, static_argnums=0)
def resume(loss_scale, state, finite):
    """Returns the scales and decisions of the rest of a run."""

    def step(state, finite):
        grads = jnp.where(finite, jnp.float32(1), jnp.float32(jnp.inf))
        state, should_apply = loss_scale.update(grads, state)
        return state, (state.loss_scale, should_apply)

    return jax.lax.scan(step, state, finite)[1]


def splits(run):
    """Yields some steps in a run after which its scale is a normal number."""
    scale = np.array(run["scale"])
    normal = (scale >= 2.0**-126) & (scale <= 2.0**126)
    end = int(np.argmin([*normal, False])) - 1
    for step in sorted(
        {1, end // 3, end // 2, end // 2 + 1, end - 1} & set(range(end))
    ):
        if step:
            yield step, end


@pytest.mark.parametrize("name", FORMS)
def test_recorded_runs_are_resumed_in_the_middle(name):
    count = 0
    grown = fallen = 0
    for run in recorded(name):
        config = dict(run["config"])
        if "min_loss_scale_after" in run:
            config["min_loss_scale"] = run["min_loss_scale_after"]
        for step, end in splits(run):
            now = run["scale"][step], run["counter"][step - 1]
            rest = np.array(run["scale"][step + 1 : end + 1])
            for saved, options in FORMS[name](copy.deepcopy(config), *now):
                loss_scale, state = import_state(saved, **copy.deepcopy(options))
                # One program for all the splits of a run: the first scale and the
                # length of the rest do not matter to it.
                same = dataclasses.replace(loss_scale, initial_scale=run["scale"][0])
                finite = np.ones(max(800, end), bool)
                finite[: end - step] = run["finite"][step:end]
                outputs = resume(same, state, finite)
                scale, applied = (np.array(x)[: end - step] for x in outputs)
                changes = np.cumsum(np.diff(rest, prepend=now[0]) != 0)
                error = abs(np.float64(scale) - rest)
                assert np.all(error <= changes * 2.0**-22 * rest), (run["id"], step)
                expected = run["applied"] or run["finite"]
                assert applied.tolist() == expected[step:end]
                count += 1
            grown += np.any(np.diff(rest) > 0)
            fallen += np.any(np.diff(rest) < 0)
    print(f"{name}: {count} states resumed")
    assert count >= 40
    assert grown >= 5 <= fallen


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
@pytest.mark.parametrize("split", [1, 13, 14, 30])
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
    assert import_state(saved)[0] == PEERS["Flax"].ours(minimum_scale=None)


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
        (None, "counter.*'fin_steps': Flax.*got a NoneType with nothing"),
        (3.0, "got a float with nothing"),
        ("state", "got a str with nothing"),
        ([], "got a list with nothing"),
        ({}, "saved is empty.*enabled=False.*FixedLossScale"),
        ({"step": 1}, "got a dict with 'step'"),
        ({"0": 1, "1": 2}, "got a dict with nothing"),
        (DynamicLossScale(), "got a DynamicLossScale with 'growth_factor'"),
        (DynamicLossScale().init(), "got a LossScaleState with 'loss_scale'"),
        (TORCH | {"fin_steps": 0}, "exactly one.*'_growth_tracker', 'fin_steps'"),
        (TORCH | {"growth": 1}, "PyTorch's GradScaler has no 'growth', only 'scale'"),
        (TORCH | {"minimum_scale": 1}, "has no 'minimum_scale'"),
        (flax_dict(), "lacks 'growth_factor', .*'minimum_scale'.*growth_interval=2000"),
        ({"fin_steps": 0}, "lacks 'scale', 'growth_factor'"),
        ({"step_counter": 0}, "lacks 'dynamic_scale', 'dynamic_growth_steps'"),
        (Fields(counter=0, period=3), "lacks 'loss_scale', 'factor'"),
        (TORCH | {"scale": jnp.ones(8)}, r"scale must be one number, got shape \(8,\)"),
        (TORCH | {"scale": np.float16(8)}, "scale must not be of half precision"),
        (TORCH | {"scale": jnp.bfloat16(8)}, "scale must be a real number"),
        (flax_dict(minimum_scale=-1.0), "minimum_scale must not be negative"),
        (flax_dict(minimum_scale=16.0), "scale must not lie below the minimum, 16.0"),
        (flax_dict(growth_interval=2, fin_steps=3), "fin_steps must be below 3"),
        (jmp_dict(counter=3), "counter must be below 3, .*got 3"),
        (jmp_dict(factor=1), "factor must be above 1"),
        (jmp_dict(loss_scale=0.5), "loss_scale must not lie below the minimum, 1.0"),
        (jmp_dict(min_loss_scale=None), "min_loss_scale must be a real number"),
        (
            keras_dict(dynamic_growth_steps=0),
            "dynamic_growth_steps must be .*at least 1",
        ),
        (TORCH | {"growth_interval": 0}, "growth_interval must be .*at least 1.*got 0"),
        (keras_dict(step_counter=3), "step_counter must be below 3"),
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
]
BAD = [np.nan, np.inf, -1, "8", [8.0], {}, 1j, True, object(), 2.0**127, 1e400]


@pytest.mark.parametrize(
    ("saved", "key"), [(saved, key) for saved in WHOLE for key in saved]
)
def test_names_every_damaged_key(saved, key):
    import_state(saved)
    with pytest.raises(ValueError, match=f"'{key}'"):
        import_state({k: v for k, v in saved.items() if k != key})
    for bad in BAD:
        with pytest.raises(ValueError, match=rf"^Damaged state of .*\b{key}\b"):
            import_state(saved | {key: bad})
    if key not in ("minimum_scale",):
        with pytest.raises(ValueError, match=rf"\b{key} must be a real number"):
            import_state(saved | {key: None})


def test_refuses_unknown_keyword_arguments():
    with pytest.raises(ValueError, match="has no 'growth_intervall', only"):
        import_state(TORCH, growth_intervall=3)


def test_under_jit_names_the_key():
    with pytest.raises(ValueError, match="scale"):
        jax.jit(lambda scale: import_state(TORCH | {"scale": scale})[1])(1.0)
