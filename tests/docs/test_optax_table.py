"""A LossScaleOptimizer around every part of Optax, and inside of them."""

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
REFUSED, SKIPPED = "an error", "it is skipped, and leaves no trace"
COUNTED = "it is skipped, but a count or an average advances"
# What becomes of a step with an inf, and of one with a nan, if a LossScaleOptimizer
# takes the place of `inner`. `overflowing` is a mask, true for the parameter whose
# gradient is not finite. `freeze` and `selective_transform` are right: an overflow in a
# frozen parameter does no harm. Two optimizers in a partition would have two scales for
# one loss.
OUTCOMES = {
    SKIPPED: [
        "inner",
        "optax.chain(inner, optax.clip(1.0))",
        "optax.chain(optax.clip_by_global_norm(1.0), inner)",
        "optax.chain(optax.clip_by_block_rms(1.0), inner)",
        "optax.chain(optax.adaptive_grad_clip(0.1), inner)",
        "optax.chain(optax.add_decayed_weights(0.1), inner)",
        "optax.chain(inner, optax.freeze(overflowing))",
        "optax.named_chain(('first', optax.identity()), ('then', inner))",
        "optax.flatten(inner)",
        "optax.contrib.sam(inner, optax.sgd(0.05), opaque_mode=True)",
        "optax.contrib.split_real_and_imaginary(inner)",
    ],
    COUNTED: [
        "optax.chain(inner, optax.scale_by_schedule(schedule))",
        "optax.inject_hyperparams(lambda rate: optax.chain(inner, optax.scale(rate)))"
        "(rate=0.5)",
        "optax.chain(optax.add_noise(0.01, 0.55, jax.random.key(0)), inner)",
        "optax.conditionally_transform(inner, lambda step: step % 2 == 0)",
        "optax.conditionally_mask(inner, lambda step: step % 2 == 0)",
        "optax.lookahead(inner, sync_period=2, slow_step_size=0.5)",
        "optax.chain(inner, optax.contrib.reduce_on_plateau(patience=1))",
    ],
    ("the parameters move; the scale does not fall", SKIPPED): [
        "optax.chain(optax.clip(1.0), inner)",
    ],
    (SKIPPED, "the parameters move; the scale does not fall"): [
        "optax.chain(optax.zero_nans(), inner)",
    ],
    "the parameters move": [
        "optax.chain(inner, optax.add_noise(0.01, 0.55, jax.random.key(0)))",
        "optax.chain(inner, optax.add_decayed_weights(0.1))",
        "optax.chain(inner, optax.ema(0.9))",
        "optax.masked(inner, overflowing)",
        "optax.contrib.schedule_free(inner, 0.1)",
    ],
    "the parameters never move again; the scale falls in finite steps, too": [
        "optax.chain(optax.ema(0.9), inner)",
        "optax.MultiSteps(inner, 2).gradient_transformation()",
    ],
    "parameters become inf or nan; the scale does not fall": [
        "optax.masked(inner, {'a': True, 'b': False})",
        "optax.partition({'x': inner, 'y': optax.sgd(0.1)}, {'a': 'x', 'b': 'y'})",
    ],
    "the parameters move; the scale does not fall": [
        "optax.chain(optax.freeze(overflowing), inner)",
        "optax.selective_transform(inner, freeze_mask=overflowing)",
    ],
    REFUSED: ["optax.partition({'x': inner, 'y': inner}, {'a': 'x', 'b': 'y'})"],
    f"{COUNTED}; the scale does not fall": ["optax.apply_if_finite(inner, 5)"],
    "parameters become inf or nan; the scale falls in finite steps, too": [
        "optax.contrib.sam(inner, optax.sgd(0.05))",
        "optax.chain(optax.contrib.sam(inner, optax.sgd(0.05)))",
        "optax.contrib.mechanize(inner)",
    ],
    "the parameters never move again": [
        "optax.chain(inner, optax.scale_by_backtracking_linesearch(5))",
    ],
}
INSIDE = {code: word for word, codes in OUTCOMES.items() for code in codes}
# These have no `inner`, and stand inside a LossScaleOptimizer alone.
PARTS = [
    *INSIDE,
    "optax.sgd(schedule, momentum=0.9)",
    "optax.inject_hyperparams(optax.sgd)(learning_rate=schedule)",
    "optax.polyak_sgd(0.1)",
    "optax.contrib.momo(0.1)",
    "optax.contrib.sophia(0.1)",
    "optax.lbfgs()",
]
# Parts whose `update` needs an extra argument. `minimize` passes the first three.
EXTRA = {
    "value": ["reduce_on_plateau", "polyak_sgd", "momo", "linesearch", "lbfgs"],
    "grad": ["linesearch", "lbfgs"],
    "value_fn": ["linesearch", "lbfgs"],
    "grad_fn": ["opaque_mode"],
    "obj_fn": ["sophia"],
}
# `minimize` raises an error: the fast parameters alone have gradients; a chain hides
# that SAM takes no extra arguments; nothing would check the gradients of `grad_fn`; it
# does not pass `obj_fn`.
BY_HAND = ["lookahead", "optax.chain(optax.contrib.sam", "opaque_mode", "sophia"]

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


def by_update(optimizer, code):
    """Makes a step in two halves, with the extra arguments that the part needs."""
    rule = getattr(optimizer, "loss_scale", None)
    scaler = LossScaleOptimizer(optax.identity(), rule)

    def step(params, state, target, factor):
        def value_fn(params):
            return loss_fn(params, target, factor)

        value, grads = scaler.value_and_grad(value_fn, state)(trained(params))
        every = {"value": value, "grad": grads, "value_fn": value_fn}
        every["grad_fn"] = lambda params, _: jax.grad(value_fn)(params)
        every["obj_fn"] = value_fn
        needed = [x for x, parts in EXTRA.items() if any(p in code for p in parts)]
        extra = {name: every[name] for name in needed}
        updates, state = optimizer.update(grads, state, params, **extra)
        return optax.apply_updates(params, updates), state

    return step


def by_minimize(optimizer, _):
    def step(params, state, target, factor):
        return optimizer.minimize(loss_fn, params, state, target, factor)[:2]

    return step


def train(optimizer, way, code, *bads):
    """Returns for each bad factor the end of every step; None leaves the step out."""
    step, trainings = jax.jit(way(optimizer, code)), []
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
        word = SKIPPED
    else:
        word = COUNTED
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
    return words[0] if words[0] == words[1] else tuple(words)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:A LossScaleOptimizer is inside")  # of MultiSteps
@pytest.mark.parametrize("code", PARTS)
def test_outermost_a_skip_leaves_no_trace_and_inside_it_may(code):
    outermost = LossScaleOptimizer(make(code))
    if any(part in code for part in BY_HAND):
        assert outcome(outermost, by_minimize, code) == REFUSED
        assert outcome(outermost, by_update, code) == SKIPPED
    else:
        assert outcome(outermost, by_minimize, code) == SKIPPED
    if code in INSIDE:
        inside = make(code, LossScaleOptimizer(INNER))
        assert outcome(inside, by_update, code) == INSIDE[code]


def test_page_counts_the_parts_and_says_where_they_stand():
    assert f"{len(PARTS)} parts of Optax, and inside {len(INSIDE)} of them" in TEXT
    assert INSIDE.keys() == {code for code in PARTS if "inner" in code}
