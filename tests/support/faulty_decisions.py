"""What float16 hides: choices by lost numbers, and errors that others magnify."""

import jax
import jax.numpy as jnp
import numpy as np
from arithmetic import mean
from faults import fault
from jax import lax

rng = np.random.default_rng(0)
X, W = (
    (std * rng.standard_normal(shape)).astype(np.float32)
    for shape, std in [((8, 6), 1.0), ((6, 6), 0.4)]
)


def overflowing(cast, w, x, hide):
    x, w = cast(cast(x) * 300, True), cast(cast(w), True)
    h = (x @ w) * 100  # overflowing
    return mean(jnp.square(hide(h).astype(jnp.float32) * 2.0**-14))


def where_finite(h):
    return jnp.where(jnp.isfinite(h), h, 0)


def not_itself(h):
    h = h - h.mean()
    return jnp.where(h != h, 0, h)


for hide in (jnp.nan_to_num, where_finite, not_itself):
    fault(W, X, hide, name=f"-{hide.__name__}", mended=True)(overflowing)


@fault(W, X, by="autocast", mended=True, default=True)
def nan_to_num(w, x):
    h = (300 * x) @ (300 * w)  # nan_to_num
    h = jnp.nan_to_num(h) / 30_000
    return jnp.mean(jnp.square(h @ w))


@fault(W, X, kind="underflow", before=("scale_too_high",), mended=True)
def where_positive(cast, w, x):
    h = cast(cast(x) @ cast(w) * 2.0**-13, True)
    sq = jnp.square(h).sum(-1)  # where_positive
    norm = jnp.where(sq > 0, jnp.sqrt(jnp.where(sq > 0, sq, 1)), 1)
    return mean(jnp.sin(norm * 4096) ** 2)


@fault(W, X, kind="underflow", mended=True)
def branch_of_sum(cast, w, x):
    h = cast(cast(x) @ cast(w) * 2.0**-13, True)
    total = jnp.square(h).mean()  # branch_of_sum
    h = lax.cond(total > 0, lambda h: h * 4096, jnp.square, h)
    return mean(jnp.square(h.astype(jnp.float32)))


@fault(W, X, mended=True)
def two_norms(cast, w, x):
    def norm(x, mends=False):
        size = jnp.square(cast(x, mends)).mean(-1, keepdims=True) + 1e-3  # two_norms
        return cast(cast(x, mends) * lax.rsqrt(size))

    x = norm(cast(x) @ cast(w) * 300, True)
    return mean(jnp.sin(norm(cast(x) @ cast(w)).astype(jnp.float32)) ** 2)


@fault(W, X, mended=True)
def norms_of_queries(cast, w, x):
    def norm(x):
        size = jnp.square(cast(x, True)).mean(-1, keepdims=True)  # norms_of_queries
        return cast(cast(x, True) / jnp.sqrt(size + 1e-3))

    x, w = cast(x) * 600, cast(w)
    scores = norm(x @ w) @ norm(x @ w.T).T
    return mean(jnp.square((jax.nn.softmax(scores) @ x).astype(jnp.float32) / 600))


@fault(W, X, mended=True)
def box_areas(cast, w, x):
    sizes = cast(jnp.abs(cast(x) @ cast(w)) * 2.0**-14, True)
    areas = sizes[:, :3] * sizes[:, 3:]  # before box_areas
    ratios = areas / areas.sum(-1, keepdims=True)  # box_areas
    return mean(jnp.square(cast(ratios) * 3))


@fault(W, X, mended=True)
def shares(cast, w, x):
    h = cast(cast(x) @ cast(w) * 2.0**-14, True)
    h = h * h / jnp.sum(h * h)  # shares
    return mean(jnp.square(h * 48))


@fault(W, X, kind="precision", mended=True)
def angles(cast, w, x):
    u = (cast(x + 9) @ cast(w)).astype(jnp.float32)
    u = u / jnp.linalg.norm(u, axis=-1, keepdims=True)
    cosines = cast(u[::2], True) @ cast(u[1::2], True).T  # angles
    return mean(jnp.arccos(jnp.clip(cosines.astype(jnp.float32), -0.999999, 0.999999)))


@fault(W, X, kind="precision", phase="", mended=True, default=True)
def squashed(cast, w, x):
    actions = jnp.tanh(cast(x, True) @ cast(w, True) * 2)  # squashed
    return mean(jnp.log(1 - jnp.square(actions.astype(jnp.float32)) + 1e-6))


@fault(W, X, kind="decision", says="cannot tell apart", mended=True)
def halvings(cast, w, x):
    def goes_on(state):
        size, step = cast(state[0], True), state[1]
        return (size * size > 0) & (step < 20)  # halvings

    def count(start):
        step = lambda state: (state[0] * 0.5, state[1] + 1)  # noqa: E731
        return lax.while_loop(goes_on, step, (start, 0))[1]

    counts = count(cast(jnp.ones(()))), jax.vmap(count)(cast(jnp.arange(3.0))).sum()
    return jnp.float32(sum(counts)) * mean(jnp.square(cast(x) @ cast(w)))


@fault(W, X, kind="precision", mended=True)
def nearest(cast, w, x):
    values, codes = x @ w + 30, 30 + jnp.asarray(x[2:])
    z, c = cast(values, True), cast(codes, True)
    distances = jnp.square(z).sum(-1)[:, None] - 2 * z @ c.T  # before nearest
    distances += jnp.square(c).sum(-1)  # nearest
    return mean(jnp.square(codes[jnp.argmin(distances, -1)] - values))


@fault(W, X, kind="precision", mended=True)
def best(cast, w, x):
    ranks = jnp.argsort(x, -1).astype(jnp.float32)
    scores = cast(ranks + 10_000, True) - 10_000  # best
    scores = jnp.where(jnp.arange(6) > 0, scores, jnp.finfo(scores.dtype).min)
    _, places = lax.top_k(scores, 2)
    return mean(jnp.square(jnp.take_along_axis(x @ w, places, -1)))


@fault(W, X, kind="precision", mended=True)
def neighbours(cast, w, x):
    z = cast(x + 40, True)
    sizes = jnp.square(z).sum(-1)
    distances = sizes[:, None] - 2 * z @ z.T + sizes  # neighbours
    nearest = jnp.argsort(distances, -1)[:, 1:3]
    return mean(jnp.square((x @ w)[nearest].mean(1) - x))


@fault(W, X, kind="decision", mended=True)
def labels(cast, w, x):
    numbers = cast(5000 + jnp.arange(8) // 2, True)
    is_same = numbers[:, None] == numbers  # labels
    distances = jnp.square((x @ w)[:, None] - x @ w).sum(-1)
    return mean(jnp.where(is_same, distances, 0.0))


@fault(W, X, kind="decision", mended=True)
def bins(cast, w, x):
    seconds = cast(3000 + 20 * jnp.abs(x), True)
    edges = cast(jnp.arange(3000.0, 3100.0, 0.5), True)
    counts = jnp.sum(seconds[..., None] > edges, -1)  # bins
    return mean(jnp.where(counts % 2 > 0, jnp.square(x @ w), 0.0))


@fault(W, X, kind="decision", mended=True)
def positions(cast, w, x):
    index = jnp.cumsum(cast(jnp.ones(3000), True))  # positions
    table = jnp.cos(jnp.pi * jnp.arange(3001.0))[:, None] * x[:1]
    chosen = table[index.astype(jnp.int32)]
    return mean(jnp.square((cast(chosen) @ cast(w)).astype(jnp.float32) - table[1:]))


@fault(W, X, kind="precision", mended=True)
def behind_a_mask(cast, w, x):
    angles = cast(jnp.arange(8.0) + 5003, True)[:, None] * cast(jnp.ones(6), True)
    rates = cast(jnp.linspace(0.1, 1, 6), True)
    angles = cast(angles * rates, True)  # before behind_a_mask
    q = cast(x) @ cast(w) * 3 * cast(jnp.cos(angles))  # behind_a_mask
    smallest = jnp.finfo(q.dtype).min
    scores = jnp.where(jnp.tril(jnp.ones((8, 8), bool)), q @ q.T, smallest)
    return mean(jnp.square(jax.nn.softmax(scores.astype(jnp.float32)) @ x))


@fault(W, X, mended=True)
def denominator(cast, w, x):
    steps = 1 - jnp.linspace(1e-4, 0.02, 8)
    kept = jnp.cumprod(cast(steps, True))  # before denominator
    noise = cast(x) @ cast(w) * cast(jnp.ones(6) / 3)
    size = 1e4 * jnp.sqrt(1 - kept.astype(jnp.float32))[:, None]
    return 1e4 * mean(jnp.square(noise.astype(jnp.float32)) / size)  # denominator
