"""What becomes of a non-finite step around and inside the parts of Optax.

`python tests/support/optax_table.py` writes the tables of the page anew.
"""

import dataclasses
import functools
import re
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from helpers import INF, NAN, RECIPES, arrays
from optimizers import trained

from benchmarks import report
from optax_lossscale import LossScaleOptimizer, all_finite

PAGE = RECIPES / "optax.md"
# What becomes of a step that should be skipped.
EXACT = "it is skipped, and leaves no trace"
COUNTS = "it is skipped, but a count or an average goes on"
MOVES = "the parameters move"
STOPS = "the parameters never move again"
NANS = "parameters become inf or nan"
STAYS = "; the scale does not fall"
FALLS = "; the scale falls in finite steps, too"
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
def overflow(x, factor):
    """Returns `x`, the gradient of which is multiplied."""
    del factor
    return x


@overflow.defjvp
def _(primals, tangents):
    return primals[0], tangents[0] * primals[1]


def loss_fn(params, target, factor):
    params = trained(params)
    params = params | {"b": overflow(params["b"], factor)}
    squares = jax.tree.map(lambda p, t: jnp.sum((p - t) ** 2), params, target)
    return 0.5 * optax.tree.sum(squares)


def batches(bad):
    """Returns the targets of all steps, and what the gradients are multiplied by."""
    steps = [jax.tree.map(lambda x, i=i: np.cos(3 * x + i), PARAMS) for i in range(6)]
    return [(t, np.float32(bad if i == BAD else 1)) for i, t in enumerate(steps)]


# The extra arguments of a step, of which the first that an optimizer takes are given.
EXTRAS = (("value", "grad", "value_fn"), (), ("grad_fn",))


def by_update(optimizer, extra):
    """Makes a step in two halves; without a state of ours it scales nothing."""
    scaler = LossScaleOptimizer(optax.identity())

    def step(params, state, target, factor):
        value_fn = functools.partial(loss_fn, target=target, factor=factor)
        is_scaled = not isinstance(optimizer, Plain)
        value, grads = (
            scaler.value_and_grad(value_fn, state)
            if is_scaled
            else jax.value_and_grad(value_fn)
        )(trained(params))
        every = {"value": value, "grad": grads, "value_fn": value_fn}
        every["grad_fn"] = lambda params, _: jax.grad(value_fn)(params)
        extras = {name: every[name] for name in extra}
        updates, state = optimizer.update(grads, state, params, **extras)
        return optax.apply_updates(params, updates), state

    return step


class Plain(optax.GradientTransformationExtraArgs):
    """Marks what has no loss scaling."""


def by_minimize(optimizer, _extra):
    def step(params, state, target, factor):
        return optimizer.minimize(loss_fn, params, state, target, factor)[:2]

    return step


@functools.cache
def compiled(optimizer, make_step):
    """Returns a step, compiled once, with extra arguments where they are taken."""
    steps = [jax.jit(make_step(optimizer, extra)) for extra in EXTRAS]

    def step(*args):
        for step in steps[:-1]:
            try:
                return step(*args)
            except (TypeError, ValueError) as error:
                if not re.search("unexpected keyword|grad_fn must be", str(error)):
                    raise
        return steps[-1](*args)

    return step


def train(optimizer, make_step, params, batches):
    """Returns the end of every step."""
    with jax.numpy_dtype_promotion("standard"), warnings.catch_warnings():
        # MultiSteps, around: the row says so itself.
        warnings.filterwarnings("ignore", "A LossScaleOptimizer is inside")
        state, ends = optimizer.init(params), []
        for batch in batches:
            params, state = compiled(optimizer, make_step)(params, state, *batch)
            ends.append((params, state))
    return ends


def agree(x, y):
    return all(
        np.allclose(a, b, rtol=1e-4, atol=1e-5, equal_nan=True)
        for a, b in zip(x, y, strict=True)
    )


def judge(ends, plain):
    """Says in words what became of a training with one step to be skipped."""
    wanted = [plain[i - (i >= BAD)] for i in range(STEPS)]
    params = [trained(params) for params, _ in ends]
    scale = optax.tree.get(ends[-1][1], "loss_scale")
    is_exact = all(
        agree(arrays(x), arrays(y)) for x, y in zip(ends, wanted, strict=True)
    )
    before, after, *later = (np.hstack(jax.tree.leaves(p)) for p in params[BAD - 1 :])
    if not all_finite(params):
        word = NANS
    elif all((p == after).all() for p in later):
        word = STOPS
    elif (after != before).any():
        word = MOVES
    else:
        word = EXACT if is_exact else COUNTS
    if scale == 2**15:
        word += STAYS
    elif scale != 2**14:
        word += FALLS
    return word


@dataclasses.dataclass(frozen=True)
class Row:
    """A part of Optax.

    Attributes:
      code: What makes it, around `inner` if that occurs in it.
      inside: What becomes of the step if ours is in the place of `inner`.
      note: What to know if ours is outermost. A test runs `check` for it.
      minimize: What becomes of the step if ours is outermost, by `minimize`.
      make_params: Makes of the parameters what it takes.
    """

    code: str
    inside: str = EXACT
    note: str = ""
    check: Callable[["Row"], None] | None = None
    minimize: str = EXACT
    make_params: Callable[[Any], Any] = lambda params: params

    def make(self, inner=INNER):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            return eval(self.code, SCOPE | {"inner": inner})

    def params(self):
        return self.make_params(jax.tree.map(jnp.asarray, PARAMS))

    def optimizers(self):
        """Returns the three columns: what makes the optimizer, and its step."""
        yield lambda: LossScaleOptimizer(self.make()), by_update
        yield lambda: LossScaleOptimizer(self.make()), by_minimize
        if "inner" in self.code:
            yield lambda: self.make(LossScaleOptimizer(INNER)), by_update

    def cells(self):
        """Returns what happens, by column."""
        finite = batches(1)
        del finite[BAD]
        plain = Plain(*optax.with_extra_args_support(self.make()))
        wanted = train(plain, by_update, self.params(), finite)
        for make, make_step in self.optimizers():
            run = functools.partial(train, make(), make_step, self.params())
            try:
                ends = {bad: run(batches(bad)) for bad in (INF, NAN)}
            except (TypeError, ValueError):
                yield REFUSED
                continue
            found = {bad: judge(end, wanted) for bad, end in ends.items()}
            by_inf, by_nan = found.values()
            yield by_inf if by_inf == by_nan else f"inf: {by_inf}<br>nan: {by_nan}"


GRADS = {"a": jnp.ones(2, jnp.float32), "b": jnp.float32(1)}
OVERFLOW = GRADS | {"b": jnp.float32(INF)}


def both(row):
    """Makes the optimizer with ours outermost and with ours inside."""
    return LossScaleOptimizer(row.make()), row.make(LossScaleOptimizer(INNER))


def the_schedule_waits(row):
    ends = train(LossScaleOptimizer(row.make()), by_update, row.params(), batches(INF))
    assert optax.tree.get(ends[-1][1], "count") == STEPS - 1


def the_rate_is_read_and_set(row):
    for optimizer in both(row):
        params = row.params()
        state = optimizer.init(params)
        assert optax.tree.get(state, "rate") == 0.5
        state = optax.tree.set(state, rate=jnp.float32(0.25))
        updates, state = optimizer.update(GRADS, state, params)
        np.testing.assert_allclose(updates["b"], -0.1 * 0.25, rtol=1e-6)


def the_rate_is_among_the_hyperparameters(row):
    ends = train(LossScaleOptimizer(row.make()), by_update, row.params(), batches(INF))
    for i, (_, state) in enumerate(ends):
        rate = 0.5 ** (i - (i >= BAD))  # that of the last step that was applied
        assert optax.tree.get(state, "hyperparams") == {"learning_rate": rate}
        with pytest.raises(KeyError, match="multiple values for 'learning_rate'"):
            optax.tree.get(state, "learning_rate")


def inside_it_has_nothing_to_do(row):
    ends = train(LossScaleOptimizer(row.make()), by_update, row.params(), batches(INF))
    assert ends[-1][1].inner_state.total_notfinite == 0


def gradients_are_of_the_fast_half(row):
    optimizer = LossScaleOptimizer(row.make())
    params = row.params()
    state = optimizer.init(params)
    with pytest.raises(ValueError, match=r"structure|named tuple"):
        optimizer.minimize(loss_fn, params, state, *batches(1)[0])
    _, grads = optimizer.value_and_grad(loss_fn, state)(params.fast, *batches(1)[0])
    assert optimizer.update(grads, state, params)[1].last_step_applied


def eval_params_want_the_inner_state(row):
    ends = train(LossScaleOptimizer(row.make()), by_update, row.params(), batches(1))
    plain = Plain(*optax.with_extra_args_support(row.make()))
    wanted = train(plain, by_update, row.params(), batches(1))
    make = optax.contrib.schedule_free_eval_params
    params, state = ends[-1]
    assert agree(
        arrays(make(state.inner_state, params)), arrays(make(*wanted[-1][::-1]))
    )
    with pytest.raises(AttributeError):
        make(state, params)


def refuses_extra_arguments(row):
    optimizer = LossScaleOptimizer(row.make())
    state = optimizer.init(row.params())
    optimizer.update(GRADS, state, row.params())
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        optimizer.update(GRADS, state, row.params(), value=jnp.float32(1))


def its_own_gradients_may_overflow(row):
    guarded = row.make(optax.apply_if_finite(INNER, 2))
    for inner, limit in ((row.make(), 0), (guarded, 2)):
        optimizer, params = LossScaleOptimizer(inner), row.params()
        state = optimizer.init(params)
        for step in range(3):

            def grad_fn(params, _):
                return jax.tree.map(lambda x: jnp.full_like(x, INF), params)

            updates, state = optimizer.update(GRADS, state, params, grad_fn=grad_fn)
            assert state.last_step_applied
            assert optimizer.current_loss_scale(state) == 2**15
            assert all_finite(updates) == (step < limit)


def wants_the_loss(row):
    optimizer = LossScaleOptimizer(row.make())
    state = optimizer.init(row.params())
    with pytest.raises(TypeError, match="value"):
        optimizer.update(GRADS, state, row.params())
    optimizer.minimize(loss_fn, row.params(), state, *batches(1)[0])


def gradients_from_its_state_are_not_scaled(row):
    wants_the_loss(row)
    optimizer, params = LossScaleOptimizer(row.make()), row.params()
    state = optimizer.init(params)

    def tiny_fn(params):
        total = optax.tree.sum(optax.tree.cast(params, jnp.float16))
        return 1e-8 * total.astype(jnp.float32)

    _, lost = optax.value_and_grad_from_state(tiny_fn)(params, state=state)
    _, grads = optimizer.value_and_grad(tiny_fn, state)(params)
    assert optax.tree.norm(lost) == 0 < optax.tree.norm(grads)


NEEDS_VALUE = "`update` needs `value`, which `minimize` passes"
NEEDS_FUNCTION = (
    "`update` needs `value`, `grad` and `value_fn`, which `minimize` passes"
)
PARTITION = "optax.partition({'x': inner, 'y': %s}, {'a': 'x', 'b': 'y'})"
ROWS = [
    Row("inner"),
    Row(
        "optax.sgd(schedule, momentum=0.9)",
        note="the schedule counts applied steps",
        check=the_schedule_waits,
    ),
    Row("optax.chain(inner, optax.scale_by_schedule(schedule))", COUNTS),
    Row(
        "optax.inject_hyperparams(optax.sgd)(learning_rate=schedule)",
        note="read the rate by `optax.tree.get(state, 'hyperparams')`: there are two "
        "`learning_rate` in the state",
        check=the_rate_is_among_the_hyperparameters,
    ),
    Row(
        "optax.inject_hyperparams(lambda rate: optax.chain(inner, optax.scale(rate)))"
        "(rate=0.5)",
        COUNTS,
        "read and set `rate` by `optax.tree.get` and `optax.tree.set`",
        the_rate_is_read_and_set,
    ),
    Row("optax.chain(optax.clip(1.0), inner)", f"inf: {MOVES}{STAYS}<br>nan: {EXACT}"),
    Row("optax.chain(inner, optax.clip(1.0))"),
    Row("optax.chain(optax.clip_by_global_norm(1.0), inner)"),
    Row("optax.chain(optax.clip_by_block_rms(1.0), inner)"),
    Row("optax.chain(optax.adaptive_grad_clip(0.1), inner)"),
    Row(
        "optax.chain(optax.zero_nans(), inner)", f"inf: {EXACT}<br>nan: {MOVES}{STAYS}"
    ),
    Row("optax.chain(optax.add_noise(0.01, 0.55, jax.random.key(0)), inner)", COUNTS),
    Row("optax.chain(inner, optax.add_noise(0.01, 0.55, jax.random.key(0)))", MOVES),
    Row("optax.chain(optax.add_decayed_weights(0.1), inner)"),
    Row("optax.chain(inner, optax.add_decayed_weights(0.1))", MOVES),
    Row("optax.chain(optax.ema(0.9), inner)", STOPS + FALLS),
    Row("optax.chain(inner, optax.ema(0.9))", MOVES),
    Row("optax.masked(inner, overflowing)", MOVES),
    Row("optax.masked(inner, {'a': True, 'b': False})", NANS + STAYS),
    Row("optax.chain(optax.freeze(overflowing), inner)", MOVES + STAYS),
    Row("optax.chain(inner, optax.freeze(overflowing))"),
    Row("optax.selective_transform(inner, freeze_mask=overflowing)", MOVES + STAYS),
    Row(PARTITION % "optax.sgd(0.1)", NANS + STAYS),
    Row(PARTITION % "inner", REFUSED),
    Row("optax.named_chain(('first', optax.identity()), ('then', inner))"),
    Row("optax.flatten(inner)"),
    Row(
        "optax.apply_if_finite(inner, 5)",
        COUNTS + STAYS,
        "leave it out: it never sees inf or nan",
        inside_it_has_nothing_to_do,
    ),
    Row(
        "optax.MultiSteps(inner, 2).gradient_transformation()",
        STOPS + FALLS,
        "see [Gradient accumulation](accumulation.md)",
    ),
    Row("optax.conditionally_transform(inner, lambda step: step % 2 == 0)", COUNTS),
    Row("optax.conditionally_mask(inner, lambda step: step % 2 == 0)", COUNTS),
    Row(
        "optax.lookahead(inner, sync_period=2, slow_step_size=0.5)",
        COUNTS,
        "`minimize` raises an error: call `value_and_grad` on the fast parameters, "
        "then `update`",
        gradients_are_of_the_fast_half,
        minimize=REFUSED,
        make_params=optax.LookaheadParams.init_synced,
    ),
    Row(
        "optax.contrib.schedule_free(inner, 0.1)",
        MOVES,
        "evaluate with `schedule_free_eval_params(state.inner_state, params)`",
        eval_params_want_the_inner_state,
    ),
    Row("optax.contrib.sam(inner, optax.sgd(0.05))", NANS + FALLS),
    Row(
        "optax.chain(optax.contrib.sam(inner, optax.sgd(0.05)))",
        NANS + FALLS,
        "`minimize` raises an error: leave out the chain, which hides that SAM "
        "takes no extra arguments",
        refuses_extra_arguments,
        minimize=REFUSED,
    ),
    Row(
        "optax.contrib.sam(inner, optax.sgd(0.05), opaque_mode=True)",
        note="`minimize` raises an error, and nothing checks the gradients of "
        "`grad_fn`: see [below](#sharpness-aware-minimization)",
        check=its_own_gradients_may_overflow,
        minimize=REFUSED,
    ),
    Row("optax.contrib.mechanize(inner)", NANS + FALLS),
    Row(
        "optax.chain(inner, optax.contrib.reduce_on_plateau(patience=1))",
        COUNTS,
        NEEDS_VALUE,
        wants_the_loss,
    ),
    Row("optax.contrib.split_real_and_imaginary(inner)"),
    Row("optax.polyak_sgd(0.1)", note=NEEDS_VALUE, check=wants_the_loss),
    Row("optax.contrib.momo(0.1)", note=NEEDS_VALUE, check=wants_the_loss),
    Row(
        "optax.chain(inner, optax.scale_by_backtracking_linesearch(5))",
        STOPS,
        NEEDS_FUNCTION,
        wants_the_loss,
    ),
    Row(
        "optax.lbfgs()",
        note=f"{NEEDS_FUNCTION}; the gradients of `optax.value_and_grad_from_state` "
        "and of the line search are not scaled",
        check=gradients_from_its_state_are_not_scaled,
    ),
]


def grouped(words):
    """Returns pairs of words and all parts that have them."""
    parts = {}
    for code, cell in words.items():
        parts.setdefault(cell, []).append(f"`{code}`")
    return [[cell, "<br>".join(codes)] for cell, codes in parts.items()]


def page(text):
    """Returns a page with the tables of the rows."""
    notes = grouped({row.code: row.note for row in ROWS if row.note})
    inside = grouped({row.code: row.inside for row in ROWS if "inner" in row.code})
    tables = [
        report.table(["part", "what to know"], [line[::-1] for line in notes]),
        report.table(["what becomes of the step", "inside of"], inside),
    ]
    return report.replace_tables(text, tables)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
