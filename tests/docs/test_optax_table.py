"""The page about Optax's parts says what running them shows."""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from helpers import INF, NAN, RECIPES, arrays
from optimizers import trained

from optax_lossscale import LossScaleOptimizer, all_finite

pytestmark = pytest.mark.usefixtures("standard_dtype_promotion")
TEXT = (RECIPES / "optax.md").read_text()
TABLES = re.findall(r"^\| (.*) \| (.*) \|$", TEXT, re.MULTILINE)
SECOND = TABLES.index(("what becomes of the step", "inside of"))


def codes(cell):
    return [code.strip("`") for code in cell.split("<br>")]


# Of each part of Optax, what there is to know, and what becomes of the step inside it.
NOTES = {code: note for cell, note in TABLES[2:SECOND] for code in codes(cell)}
INSIDE = {code: word for word, cell in TABLES[SECOND + 2 :] for code in codes(cell)}
PARTS = list(INSIDE | NOTES)
REFUSED = "an error"

PARAMS = {"a": np.array([1.0, 2.0], np.float32), "b": np.float32(3)}
SCOPE = {
    "overflowing": {"a": False, "b": True},
    "jax": jax,
    "optax": optax,
    "schedule": lambda step: 0.5**step,
}
INNER = optax.sgd(0.1, momentum=0.9)
STEPS, BAD = 6, 2


@jax.custom_jvp
def overflow(x, _):
    """Returns `x`, the gradient of which is multiplied."""
    return x


@overflow.defjvp
def _(primals, tangents):
    return primals[0], tangents[0] * primals[1]


def loss_fn(params, target, factor):
    params = trained(params)
    params = params | {"b": overflow(params["b"], factor)}
    squares = jax.tree.map(lambda p, t: jnp.sum((p - t) ** 2), params, target)
    return 0.5 * optax.tree.sum(squares)


def make(code, inner=INNER):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return eval(code, SCOPE | {"inner": inner})


def by_update(optimizer, note):
    """Makes a step in two halves, with the extra arguments that the note names."""
    scaler = LossScaleOptimizer(optax.identity())

    def step(params, state, target, factor):
        def value_fn(params):
            return loss_fn(params, target, factor)

        value, grads = scaler.value_and_grad(value_fn, state)(trained(params))
        every = {"value": value, "grad": grads, "value_fn": value_fn}
        every["grad_fn"] = lambda params, _: jax.grad(value_fn)(params)
        every["obj_fn"] = value_fn
        extra = {name: x for name, x in every.items() if f"`{name}`" in note}
        updates, state = optimizer.update(grads, state, params, **extra)
        return optax.apply_updates(params, updates), state

    return step


def by_minimize(optimizer, _):
    def step(params, state, target, factor):
        return optimizer.minimize(loss_fn, params, state, target, factor)[:2]

    return step


def train(optimizer, way, code, *bads):
    """Returns for each bad factor the end of every step; None leaves the step out."""
    step, trainings = jax.jit(way(optimizer, NOTES.get(code, ""))), []
    start = optax.LookaheadParams.init_synced(PARAMS) if "lookahead" in code else PARAMS
    for bad in bads:
        carry, ends = (start, optimizer.init(start)), []
        for i in range(STEPS):
            target = jax.tree.map(lambda x, i=i: jnp.cos(3 * x + i), PARAMS)
            if i != BAD or bad is not None:
                carry = step(*carry, target, jnp.float32(bad if i == BAD else 1))
                ends.append(carry)
        trainings.append(ends)
    return trainings


def agree(x, y):
    return all(
        np.allclose(a, b, rtol=1e-4, atol=1e-5, equal_nan=True)
        for a, b in zip(arrays(x), arrays(y), strict=True)
    )


def judge(ends, finite):
    """Says in words what became of a training with one step to be skipped."""
    params = [trained(params) for params, _ in ends]
    scale = optax.tree.get(ends[-1][1], "loss_scale")
    before, after, *later = (np.hstack(jax.tree.leaves(p)) for p in params[BAD - 1 :])
    if not all_finite(params):
        word = "parameters become inf or nan"
    elif all((p == after).all() for p in later):
        word = "the parameters never move again"
    elif (after != before).any():
        word = "the parameters move"
    elif all(agree(x, finite[i - (i >= BAD)]) for i, x in enumerate(ends)):
        word = "it is skipped, and leaves no trace"
    else:
        word = "it is skipped, but a count or an average goes on"
    if scale == 2**15:
        return f"{word}; the scale does not fall"
    return word if scale == 2**14 else f"{word}; the scale falls in finite steps, too"


def outcome(optimizer, way, code):
    """Says what becomes of a step with inf, and of one with nan where it differs."""
    (finite,) = train(LossScaleOptimizer(make(code), 1.0), by_update, code, None)
    try:
        words = [judge(ends, finite) for ends in train(optimizer, way, code, INF, NAN)]
    except (TypeError, ValueError):
        return REFUSED
    return words[0] if words[0] == words[1] else "inf: {}<br>nan: {}".format(*words)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:A LossScaleOptimizer is inside")  # of MultiSteps
@pytest.mark.parametrize("code", PARTS)
def test_row_is_what_running_it_shows(code):
    skipped, outermost = INSIDE["inner"], LossScaleOptimizer(make(code))
    if "`minimize` raises an error" in NOTES.get(code, ""):
        assert outcome(outermost, by_minimize, code) == REFUSED
        assert outcome(outermost, by_update, code) == skipped
    else:
        assert outcome(outermost, by_minimize, code) == skipped
    if code in INSIDE:
        inside = make(code, LossScaleOptimizer(INNER))
        assert outcome(inside, by_update, code) == INSIDE[code]


def test_page_counts_the_parts_and_says_where_they_stand():
    assert f"{len(PARTS)} parts of Optax" in TEXT
    assert INSIDE.keys() == {code for code in PARTS if "inner" in code}
