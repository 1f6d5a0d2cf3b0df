"""What float16 hides: decisions by lost numbers, and errors that others magnify."""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import exhaustive_but
from jax import lax
from tracing import Casts, by_hand, errors, line_of

from optax_lossscale import autocast
from optax_lossscale.diagnostics import trace_numerics

CLOSE = 0.01
rng = np.random.default_rng(0)
X, W = (
    (f * rng.standard_normal(s)).astype(np.float32)
    for s, f in [((8, 6), 1.0), ((6, 6), 0.4)]
)


def mean(x):
    return jnp.mean(x.astype(jnp.float32))


# `cast(x, n)` casts to float32 where the advice about the line `NAME n` says so.


def nan_to_num(cast, w, x):
    x, w = cast(cast(x) * 300, 1), cast(cast(w), 1)
    h = (x @ w) * 100  # nan_to_num 1
    h = jnp.nan_to_num(h)
    return mean(jnp.square(h.astype(jnp.float32) * 2.0**-14))


def where_finite(cast, w, x):
    x, w = cast(cast(x) * 300, 1), cast(cast(w), 1)
    h = (x @ w) * 100  # where_finite 1
    h = jnp.where(jnp.isfinite(h), h, 0)
    return mean(jnp.square(h.astype(jnp.float32) * 2.0**-14))


def where_positive(cast, w, x):
    h = cast(cast(x) @ cast(w) * 2.0**-13, 1)
    sq = jnp.square(h).sum(-1)  # where_positive 1
    norm = jnp.where(sq > 0, jnp.sqrt(jnp.where(sq > 0, sq, 1)), 1)
    return mean(jnp.sin(norm * 4096) ** 2)


def branch_of_sum(cast, w, x):
    h = cast(cast(x) @ cast(w) * 2.0**-13, 1)
    total = jnp.square(h).mean()  # branch_of_sum 1
    h = lax.cond(total > 0, lambda h: h * 4096, jnp.square, h)
    return mean(jnp.square(h.astype(jnp.float32)))


def not_itself(cast, w, x):
    x, w = cast(cast(x) * 300, 1), cast(cast(w), 1)
    h = (x @ w) * 100  # not_itself 1
    h = h - h.mean()
    return mean(jnp.square(jnp.where(h != h, 0, h).astype(jnp.float32) * 2.0**-14))


def two_norms(cast, w, x):
    def norm(x, n):
        size = jnp.square(cast(x, n)).mean(-1, keepdims=True) + 1e-3  # two_norms 1
        return cast(cast(x, n) * lax.rsqrt(size))

    x = norm(cast(x) @ cast(w) * 300, 1)
    return mean(jnp.sin(norm(cast(x) @ cast(w), 3).astype(jnp.float32)) ** 2)


def norms_of_queries(cast, w, x):
    def norm(x):
        size = jnp.square(cast(x, 1)).mean(-1, keepdims=True)  # norms_of_queries 1
        return cast(cast(x, 1) / jnp.sqrt(size + 1e-3))

    x, w = cast(x) * 600, cast(w)
    scores = norm(x @ w) @ norm(x @ w.T).T
    return mean(jnp.square((jax.nn.softmax(scores) @ x).astype(jnp.float32) / 600))


def box_areas(cast, w, x):
    sizes = cast(jnp.abs(cast(x) @ cast(w)) * 2.0**-14, 1)
    areas = sizes[:, :3] * sizes[:, 3:]  # box_areas 1
    ratios = areas / areas.sum(-1, keepdims=True)  # box_areas 2
    return mean(jnp.square(cast(ratios) * 3))


def shares(cast, w, x):
    h = cast(cast(x) @ cast(w) * 2.0**-14, 1)
    h = h * h / jnp.sum(h * h)  # shares 1
    return mean(jnp.square(h * 48))


def angles(cast, w, x):
    u = (cast(x + 9) @ cast(w)).astype(jnp.float32)
    u = u / jnp.linalg.norm(u, axis=-1, keepdims=True)
    cosines = cast(u[::2], 1) @ cast(u[1::2], 1).T  # angles 1
    return mean(jnp.arccos(jnp.clip(cosines.astype(jnp.float32), -0.999999, 0.999999)))


def squashed(cast, w, x):
    actions = jnp.tanh(cast(x, 1) @ cast(w, 1) * 2)  # squashed 1
    return mean(jnp.log(1 - jnp.square(actions.astype(jnp.float32)) + 1e-6))


def halvings(cast, w, x):
    def goes_on(state):
        size, step = cast(state[0], 1), state[1]
        return (size * size > 0) & (step < 20)  # halvings 1

    def count(start):
        step = lambda state: (state[0] * 0.5, state[1] + 1)  # noqa: E731
        return lax.while_loop(goes_on, step, (start, 0))[1]

    counts = count(cast(jnp.ones(()))), jax.vmap(count)(cast(jnp.arange(3.0))).sum()
    return jnp.float32(sum(counts)) * mean(jnp.square(cast(x) @ cast(w)))


def nearest(cast, w, x):
    values, codes = x @ w + 30, 30 + jnp.asarray(x[2:])
    z, c = cast(values, 1), cast(codes, 1)
    distances = jnp.square(z).sum(-1)[:, None] - 2 * z @ c.T  # nearest 1
    distances += jnp.square(c).sum(-1)
    return mean(jnp.square(codes[jnp.argmin(distances, -1)] - values))


def best(cast, w, x):
    ranks = jnp.argsort(x, -1).astype(jnp.float32)
    scores = cast(ranks + 10_000, 1) - 10_000  # best 1
    scores = jnp.where(jnp.arange(6) > 0, scores, jnp.finfo(scores.dtype).min)
    _, places = lax.top_k(scores, 2)
    return mean(jnp.square(jnp.take_along_axis(x @ w, places, -1)))


def neighbours(cast, w, x):
    z = cast(x + 40, 1)
    sizes = jnp.square(z).sum(-1)
    distances = sizes[:, None] - 2 * z @ z.T + sizes  # neighbours 1
    nearest = jnp.argsort(distances, -1)[:, 1:3]
    return mean(jnp.square((x @ w)[nearest].mean(1) - x))


def labels(cast, w, x):
    numbers = cast(5000 + jnp.arange(8) // 2, 1)
    is_same = numbers[:, None] == numbers  # labels 1
    distances = jnp.square((x @ w)[:, None] - x @ w).sum(-1)
    return mean(jnp.where(is_same, distances, 0.0))


def bins(cast, w, x):
    seconds = cast(3000 + 20 * jnp.abs(x), 1)
    edges = cast(jnp.arange(3000.0, 3100.0, 0.5), 1)
    counts = jnp.sum(seconds[..., None] > edges, -1)  # bins 1
    return mean(jnp.where(counts % 2 > 0, jnp.square(x @ w), 0.0))


def behind_a_mask(cast, w, x):
    angles = cast(jnp.arange(8.0) + 5003, 1)[:, None] * cast(jnp.ones(6), 1)
    angles = cast(angles * cast(jnp.linspace(0.1, 1, 6), 1), 1)  # behind_a_mask 1
    q = cast(x) @ cast(w) * 3 * cast(jnp.cos(angles))
    smallest = jnp.finfo(q.dtype).min
    scores = jnp.where(jnp.tril(jnp.ones((8, 8), bool)), q @ q.T, smallest)
    return mean(jnp.square(jax.nn.softmax(scores.astype(jnp.float32)) @ x))


def denominator(cast, w, x):
    steps = 1 - jnp.linspace(1e-4, 0.02, 8)
    kept = jnp.cumprod(cast(steps, 1))  # denominator 1
    noise = cast(x) @ cast(w) * cast(jnp.ones(6) / 3)
    size = 1e4 * jnp.sqrt(1 - kept.astype(jnp.float32))
    return 1e4 * mean(jnp.square(noise.astype(jnp.float32)) / size[:, None])


CASES = {
    denominator: [1],
    behind_a_mask: [1],
    bins: [1],
    labels: [1],
    neighbours: [1],
    nearest: [1],
    best: [1],
    angles: [1],
    squashed: [1],
    halvings: [1],
    two_norms: [1],
    norms_of_queries: [1],
    box_areas: [1, 2],
    shares: [1],
    nan_to_num: [1],
    where_finite: [1],
    where_positive: [1],
    branch_of_sum: [1],
    not_itself: [1],
}


@pytest.mark.parametrize("loss_fn", exhaustive_but(CASES, [squashed]))
def test_what_a_decision_hides(loss_fn):
    truth = by_hand(partial(loss_fn, Casts(jnp.float32)), W, X)(1.0)
    scale = 1.0
    broken = errors(by_hand(partial(loss_fn, Casts()), W, X)(scale), truth)
    assert not np.max(broken) < 0.1
    trace = trace_numerics(partial(loss_fn, Casts()), W, X, scale=scale)
    assert np.isclose(trace.float32_loss, truth[0], rtol=1e-4)
    marks = [line_of(f"{loss_fn.__name__} {i}", __file__) for i in CASES[loss_fn]]
    messages = " ".join(x.message for x in trace.findings)
    assert all(f"{Path(__file__).name}:{x}," in messages for x in marks), str(trace)
    repaired = by_hand(partial(loss_fn, Casts(repaired=CASES[loss_fn])), W, X)(scale)
    assert np.max(errors(repaired, truth)) < CLOSE


def test_places_along_a_sharded_axis():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))

    def loss_fn(w, x):
        h = x.astype(jnp.float16) * w[0].astype(jnp.float16)
        return mean(jnp.square(h)) + mean(jnp.argmax(h, 0))

    with jax.set_mesh(mesh):
        x = jax.device_put(X, jax.NamedSharding(mesh, jax.P("x")))
        assert trace_numerics(loss_fn, W, x).findings[0].kind == "fine"


def test_autocast_of_an_overflow_that_nan_to_num_hides():
    def loss_fn(w, x):
        h = (300 * x) @ (300 * w)  # hidden overflow
        h = jnp.nan_to_num(h) / 30_000
        return jnp.mean(jnp.square(h @ w))

    (finding, *_) = trace_numerics(autocast(loss_fn), W, X).findings
    assert finding.operation.line == line_of("hidden overflow", __file__)
    kept = autocast(loss_fn, float32=f"{Path(__file__).name}:{finding.operation.line}")
    found, truth = by_hand(kept, W, X)(1.0), by_hand(loss_fn, W, X)(1.0)
    assert np.max(errors(found, truth)) < CLOSE
