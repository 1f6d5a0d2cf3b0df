"""Every optimizer of Optax trains every model, whatever stands beside its parameters.

Integers, flags, keys, functions and settings have no gradient, and an inner optimizer
does not know of them. The truth is the optimizer of Optax alone, with the parameters
alone. The operations of a step run one by one, and the update of the inner optimizer is
one program, so that both compute the same to the bit.
"""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from helpers import as_bits, exhaustive_but, relaxed
from mixed_models import KINDS, X, loss_of_dict, make_dict
from optimizers import (
    NAMES,
    NOT_FOR_MINIMIZE,
    REFUSES_EXTRA_ARGS,
    WANT_PER_EXAMPLE_GRADIENTS,
    make,
    trained,
)

from optax_lossscale import LossScaleOptimizer, _hints
from optax_lossscale._tree import difference

STEPS = 3
CHAINS = {
    "clip_adam": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)),
    "decay_clip": optax.chain(
        optax.scale_by_adam(),
        optax.add_decayed_weights(0.1),
        optax.clip_by_global_norm(1.0),
        optax.scale(-0.1),
    ),
}
CALL_THE_LOSS = {"lbfgs", "contrib.sophia", "contrib.hutchinson_estimator_diag_hessian"}
CALL_THE_LOSS |= {"scale_by_backtracking_linesearch", "scale_by_zoom_linesearch"}
# They fail without us as well: one takes a single matrix and no tree; the others ask
# the dtype of None, which `eqx.filter` puts into the place of all else.
FAILS = {
    "contrib.scale_by_muon": tuple(KINDS),
    "contrib.galore": ("dict", "equinox"),
    "contrib.scale_by_galore": ("dict", "equinox"),
}

BY_DEFAULT = {
    "dict": """MultiSteps adafactor apply_if_finite contrib.mechanize contrib.prodigy
    contrib.reduce_on_plateau decay_clip masked novograd partition""",
    "equinox": "contrib.prodigy decay_clip",
    "nnx": "clip_adam",
}
CELLS = [
    (kind, name)
    for kind in KINDS
    for name in [*CHAINS, *NAMES]
    if kind not in FAILS.get(name, ())
]
TYPICAL_CELLS = [(kind, x) for kind, names in BY_DEFAULT.items() for x in names.split()]
TYPICAL = {"MultiSteps", "adam", "contrib.prodigy", "inject_hyperparams", "lamb", "sgd"}


@functools.cache
def make_inner(name):
    """Makes an optimizer whose update is compiled once, but for the loss in it."""
    inner = relaxed(CHAINS[name]) if name in CHAINS else make(name)
    compiled = jax.jit(inner.update)

    def update(updates, state, params=None, *, value_fn=None, obj_fn=None, **extra):
        run = compiled
        if name in CALL_THE_LOSS:
            given = {"value_fn": value_fn, "obj_fn": obj_fn}
            functions = {k: f for k, f in given.items() if f is not None}
            run = jax.jit(functools.partial(inner.update, **functions))
        return run(updates, state, params, **extra)

    return inner._replace(update=update)


def with_slow(name, params):
    """Returns the parameters as the optimizer wants them."""
    return optax.LookaheadParams(params, params) if name == "lookahead" else params


def arguments(name, grads, value, loss_fn):
    """Returns gradients and extra arguments, whatever the optimizer asks for."""
    if name in WANT_PER_EXAMPLE_GRADIENTS:
        grads = jax.tree.map(lambda x: jnp.stack([x, x]), grads)

    def function(params, obj_fn=None):
        return loss_fn(params, X)

    extra = {"value": value, "grad": grads, "value_fn": function, "obj_fn": function}
    return grads, {} if name in REFUSES_EXTRA_ARGS else extra


def apply_updates(params, updates):
    with jax.numpy_dtype_promotion("standard"):
        if isinstance(params, optax.LookaheadParams):
            return type(params)(*map(eqx.apply_updates, params, updates))
        return eqx.apply_updates(params, updates)


def bits(tree):
    tree = nnx.state(tree) if isinstance(tree, nnx.Module) else tree
    leaves = jax.tree.leaves(tree)
    return [as_bits(x) if hasattr(x, "dtype") else (type(x), x) for x in leaves]


def alone(name, kind):
    """Yields the model and the state after each step of the optimizer of Optax."""
    inner, model = make_inner(name), kind.make()
    params = with_slow(name, kind.params(model))
    state = inner.init(params)
    for _ in range(STEPS):
        value, grads = kind.value_and_grad(kind.loss_fn)(model, X)

        def loss_fn(params, x, model=model):
            return kind.loss_fn(kind.join(model, params), x)

        grads, extra = arguments(name, grads, value, loss_fn)
        updates, state = inner.update(grads, state, params, **extra)
        params = apply_updates(params, updates)
        model = kind.join(model, trained(params))
        yield bits(model), bits(state)


def in_one_call(name, kind):
    optimizer, model = LossScaleOptimizer(make_inner(name)), kind.make()
    state = optimizer.init(model)
    for _ in range(STEPS):
        model, state, _ = optimizer.minimize(kind.loss_fn, model, state, X)
        yield bits(model), bits(state.inner_state)


def in_two_calls(name, kind):
    optimizer, model = LossScaleOptimizer(make_inner(name)), kind.make()
    is_nnx = isinstance(model, nnx.Module)
    params = with_slow(name, kind.params(model) if is_nnx else model)
    state = optimizer.init(params)
    for _ in range(STEPS):
        value, grads = optimizer.value_and_grad(kind.loss_fn, state)(model, X)

        def loss_fn(params, x, model=model):
            return kind.loss_fn(kind.join(model, params) if is_nnx else params, x)

        grads, extra = arguments(name, grads, value, loss_fn)
        takes_model = is_nnx and name != "lookahead"
        updates, state = optimizer.update(
            grads, state, model if takes_model else params, **extra
        )
        params = apply_updates(params, updates)
        model = kind.join(model, trained(params)) if is_nnx else trained(params)
        yield bits(model), bits(state.inner_state)


def ways_of(name):
    return [in_two_calls] if name in NOT_FOR_MINIMIZE else [in_one_call, in_two_calls]


@pytest.mark.parametrize(
    "cell", exhaustive_but(CELLS, TYPICAL_CELLS), ids=[", ".join(x) for x in CELLS]
)
def test_trains_every_model_as_alone(cell):
    kind, name = KINDS[cell[0]], cell[1]
    wanted = list(alone(name, kind))
    for way in ways_of(name):
        assert list(way(name, kind)) == wanted, way.__name__


@pytest.mark.parametrize("name", FAILS)
def test_fails_where_it_fails_alone(name):
    inner = make_inner(name)
    for kind in map(KINDS.__getitem__, FAILS[name]):
        model = kind.make()
        is_nnx = isinstance(model, nnx.Module)
        params = nnx.state(model, nnx.Param) if is_nnx else model
        params = eqx.filter(params, eqx.is_inexact_array)
        words = "structure error|no attribute 'dtype'|(got|value:) None"  # Older JAX.
        with pytest.raises((AttributeError, ValueError), match=words):
            inner.update(params, inner.init(params), params)
        for way in ways_of(name):
            with pytest.raises((AttributeError, ValueError), match=words):
                list(way(name, kind))


@pytest.mark.parametrize(
    "name",
    exhaustive_but([x for x in NAMES if x not in FAILS | NOT_FOR_MINIMIZE], TYPICAL),
)
def test_a_state_that_knows_integers_is_refused(name):
    inner, model = make(name), make_dict()
    optimizer = LossScaleOptimizer(inner)
    state = optimizer.init(model)
    of_integers = inner.init({x: jnp.asarray(model[x]) for x in ("b", "ids", "w")})
    if not difference(of_integers, state.inner_state):
        return  # It depends on no parameter.

    def step(state):
        return optimizer.minimize(loss_of_dict, model, state, X)[1]

    with pytest.raises((TypeError, ValueError)) as caught:
        jax.eval_shape(step, state._replace(inner_state=of_integers))
    notes = getattr(caught.value, "__notes__", ())
    assert _hints.PARAMETERS in " ".join([str(caught.value), *notes])
