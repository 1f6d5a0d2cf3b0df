"""Sums that lose terms, squares that overflow, logarithms of zero, lost gradients."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from arithmetic import TWO, mean, normal, total
from faults import W, X, fault, needs_devices
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P


def distance(x, y):
    return mean(jnp.square(x.astype(jnp.float32) - y))


def on_devices(local):
    """Maps a loss over two devices, and averages it."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    averaged = lambda w, x: lax.pmean(local(w, x), "x")  # noqa: E731
    specs = {"in_specs": (P(), P("x")), "out_specs": P()}
    return jax.shard_map(averaged, mesh=mesh, **specs)


# By hand. The casts with True mend these.

SHIFTED = {"w": W, "b": np.array([1990.3], np.float32)}


@fault(SHIFTED, X, kind="precision", mended=True, scale=2.0**4, default=True)
def regression(cast, params, x):
    x = cast(cast(x) @ cast(params["w"][:, :1]), True)
    x = x + cast(params["b"], True) - 1990  # regression
    return mean(jnp.square(x))


@fault(W, X, kind="precision", mended=True, scale=2.0**4)
def counter(cast, w, x):
    def body(count, _):
        return count + 1, None  # counter

    count, _ = lax.scan(body, cast(jnp.zeros(()), True), length=2200)
    return distance(cast(w), X[:6]) * count.astype(jnp.float32)


@fault(W, X, mended=True, scale=2.0**4, rounds=True)
def small_maximum(cast, w, x):
    x = jax.nn.softmax(cast(cast(x) @ cast(w) * 20, True))
    x = jnp.log(jnp.maximum(x, 1e-8))  # small_maximum
    return mean(x)


@fault(W, X, mended=True)
def clipped(cast, w, x):
    p = jax.nn.softmax(cast(cast(x) @ cast(w) * 20, True))
    return -mean(jnp.log(jnp.clip(p, 1e-8, 1.0)))  # clipped


ONE_EMPTY = X * np.float32([[0]] + [[1]] * 7)
rounded = "in float32 too.*A constant like 1e-8 is 0 in float16"


@fault(W, ONE_EMPTY, says=rounded, mended=True, rounds=True)
def divided(cast, w, x):
    x = cast(cast(x), True)
    x = x / jnp.maximum(jnp.abs(x).sum(-1, keepdims=True), 1e-8)  # divided
    return mean(jnp.square(x @ cast(w, True)))


@fault(W, X, mended=True, scale=2.0**4)
def silent_inf(cast, w, x):
    x = cast(cast(x) * 200, True)
    size = jnp.square(x).mean(-1, keepdims=True)  # silent_inf
    return distance(cast(x * lax.rsqrt(size)) @ cast(w), X)


@fault(W, X, mended=True, scale=2.0**4, rounds=True)
def small_variance(cast, w, x):
    x = cast(cast(x) @ cast(w) * 2.0**-9, True)
    x = x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)  # small_variance
    return distance(x, X)


@fault(W, X, mended=True, scale=2.0**4)
def summed(cast, w, x):
    x = jnp.square(cast(cast(x) @ cast(w) * 100, True))
    x = x.sum() / x.size  # summed
    return jnp.log(x.astype(jnp.float32))


LAST_LARGE = X * np.float32([[1]] * 7 + [[10]])


@fault(W, LAST_LARGE, mended=True, scale=2.0**4, marks=[needs_devices])
def one_device(cast, w, x):
    def local(w, x):
        x = cast(jnp.abs(cast(x) @ cast(w)) * 50, True)
        return jnp.log(mean(jnp.square(x)))  # one_device

    return on_devices(local)(w, x)


ATTENTION = {"q": W, "k": W.T, "bias": normal(6), "v": normal(6, 2)}


high = {"kind": "scale_too_high", "phase": "backward", "scale": 2.0**30}


@fault(ATTENTION, X, **high, default=True)
def attention(cast, params, x, mask=-1e30):
    p, x = cast((params, x))
    scores = (x @ p["q"]) @ (x @ p["k"] + p["bias"]).T
    scores = jnp.where(jnp.tri(len(x), dtype=bool), scores, mask)
    return mean(jnp.square(jax.nn.softmax(scores) @ x @ p["v"]))  # attention


@fault(ATTENTION, X, mended=True, scale=2.0**4, operation={"in_rule": True})
def in_rule(cast, params, x):
    """Beside a mask constant, which is no fault."""
    f = jax.custom_vjp(lambda x: jnp.tanh(x))
    f.defvjp(lambda x: (jnp.tanh(x), x), lambda x, g: (cast(wide(x) * wide(g)),))
    wide = lambda x: jnp.square(cast(x, True)) * 2.0**-14  # noqa: E731
    loss = attention(cast, params, x)
    return loss + mean(f(cast(x) * cast(params["q"][0]) * 300))  # in_rule


@fault(W, X, mended=True, scale=2.0**4)
def power_iteration(cast, w, x):
    """Each iteration but the first reads what is inf."""
    w, x = cast((w * 2.0**-14, x))

    def body(u, _):
        u = cast(x @ w + u @ w @ w, True)
        u = u * lax.rsqrt(jnp.square(u).sum(-1, keepdims=True))  # power_iteration
        return cast(u), None

    u, _ = lax.scan(body, cast(jnp.ones((8, 6))), length=3)
    return distance(u, X)


# One of these numbers is flushed, too.
FLUSHED = np.array([5e-4, *np.linspace(0.7, 2, 7)], np.float32)


two_lines = "float32 would not have.*compute .*, and this line in float32"


@fault(FLUSHED, says=two_lines, mended=True, default=True)
def divided_by_flushed(cast, w):
    h = cast(cast(w) * float(np.float16(3e-5)), True)
    s = jnp.sum(h * h)  # before divided_by_flushed
    return total(h / s) * 2.0**-14  # divided_by_flushed


@fault(np.float32([0, 12]), says=two_lines, mended=True, default=True)
def logarithm_of_cancelled(cast, w):
    q = jax.nn.sigmoid(cast(w, True))  # before logarithm_of_cancelled
    return -total(jnp.log(1 - q))  # logarithm_of_cancelled


small = {"kind": "underflow", "says": "% of the results are flushed"}


@fault(TWO * 1e-5, **small, mended=True, default=True)
def safe_norm(cast, w):
    return optax.safe_norm(cast(w, True), 1e-6).astype(jnp.float32)  # safe_norm


# The twin is nan, too, so float32 is no help.

SPARSE = np.float32([[0, 0, 0], [2, 2, 2]])
backward = {"kind": "backward", "phase": "backward"}


def guarded_log(cast, w):
    x = jnp.maximum(cast(w), 0)
    return total(jnp.where(x > 0, jnp.log(jnp.where(x > 0, x, 1)), 0))


@fault(SPARSE, **backward, mended=guarded_log, default=True)
def log_in_where(cast, w):
    x = cast(w)
    return total(jnp.where(x > 0, jnp.log(x), 0))  # log_in_where


guard = r"jnp.log\(jnp.where\(x > 0, x, 1\)\)"


@fault(np.float32([-1, 2]), **backward, says=guard, mended=guarded_log, default=True)
def log_of_maximum(cast, w):
    x = jnp.maximum(cast(w), 0)
    return total(jnp.where(x > 0, jnp.log(x), 0.0))  # log_of_maximum


def guarded_norm(cast, w):
    return total(jnp.sqrt(jnp.square(cast(w)).sum(-1) + 1e-3))


@fault(SPARSE, mended=guarded_norm)
def norm_of_zero(cast, w):
    return total(jnp.linalg.norm(cast(w), axis=-1))  # norm_of_zero


def guarded_root(cast, w):
    return total(jnp.sqrt(jnp.maximum(cast(w), 1e-3)))


@fault(SPARSE, mended=guarded_root)
def sqrt_of_maximum(cast, w):
    return total(jnp.sqrt(jnp.maximum(cast(w), 0)))  # sqrt_of_maximum


# What is said of them is all that is to be learned.


@fault(np.float32([0.3, 0.5, 3]), says="too large for float32 as well", default=True)
def exp_too_large(cast, w):
    return total(jnp.exp(cast(w) * 40))  # exp_too_large


@fault(TWO, says="A constant is nan", default=True)
def constant_of_nan(cast, w):
    return total(cast(w) * jnp.float16(np.nan))  # constant_of_nan


@fault(TWO * 0.3, kind="precision", says="No loss scale helps", default=True)
def cancels(cast, w):
    h = cast(w) + 2000
    return total(jnp.square(h - 2000))  # cancels


AROUND_ONE = np.full(3000, 1.01, np.float32)
second = {"kind": "precision", "before": ("scale_too_high",)}


@fault(AROUND_ONE, **second, says=r"spacing of 2\^1 at 2\^11", default=True)
def running_sum(cast, w):
    sums = jnp.cumsum(cast(w)) - jnp.arange(3000, dtype=jnp.float16)  # running_sum
    return total(jnp.square(sums.astype(jnp.float32)))


@fault(W, X, kind="precision", default=True)
def zero_in_float32(cast, w, x):
    rounded = cast(x).astype(jnp.float32)  # zero_in_float32
    error = 1e4 * (rounded @ w - x @ w)  # In float32 it is zero, and its gradient.
    harmless = jnp.sum(cast(w).astype(jnp.float32))
    return jnp.mean(jnp.tanh(x @ w)) + jnp.mean(error**2) + harmless * 1e-3


# A loss scale mends these, or none fits.

backward = {"kind": "underflow", "phase": "backward"}
lost = backward | {"says": "of the gradients are flushed"}


@fault(TWO, **lost, default=True)
def flushed(cast, w):
    return total(jnp.sin(cast(w))) * 2.0**-26  # flushed


SINES = np.linspace(0.1, 1.4, 50, dtype=np.float32)
imprecise = "too small to be precise: 7.5% off at the loss scale 1"


@fault(SINES, **backward, says=imprecise, default=True)
def subnormal(cast, w):
    return total(jnp.sin(cast(w))) * 3e-7  # subnormal


@fault(normal(2, 8, 8, scale=0.3), normal(6, 8), **lost, default=True)
def small_weight(cast, params, x):
    x = jnp.tanh(cast(x) @ cast(params[0]))
    return 2.0**-24 * total(jnp.square(x @ cast(params[1])))  # small_weight


@fault(W, X, **lost, default=True, marks=[needs_devices])
def flushed_on_devices(cast, w, x):
    def local(w, x):
        x = jnp.sin(cast(x) @ cast(w)).astype(jnp.float32)  # flushed_on_devices
        return jnp.mean(x) * 2.0**-24

    return on_devices(local)(w, x)


# At the largest scale, 2**9, the third product is 2**(9 - 42); normal numbers begin at
# 2**-14.
apart = r"results of .*float16\[2\].*19 bits apart.*a scale of its own"


no_scale = {"kind": "no_scale", "phase": "backward", "says": apart}


@fault((np.ones(2, np.float32),) * 2, **no_scale, default=True)
def two_branches(cast, params):
    w, v = cast(params)
    tiny = jnp.float16(2.0**-14)
    return total(w) * 64.0 + total(v * tiny * tiny * tiny)  # two_branches


def perceptron(params, x, y, activation, size):
    """A perceptron, whose gradients are all zero without a scale."""
    h = x
    for w, b in params[:-1]:
        h = getattr(jax.nn, activation)(h @ w + b)
    w, b = params[-1]
    return jnp.mean((h @ w + b - y) ** 2) * size  # perceptron


def layers(depth=2, activation="relu", size=1e-9, batch=32, width=16):
    """Returns the arguments of a perceptron."""
    params, x = [], normal(batch, 8)
    for inner, outer in itertools.pairwise([8, *[width] * depth, 1]):
        w = normal(inner, outer, scale=inner**-0.5)
        params.append((w, np.zeros(outer, np.float32)))
    return params, x, np.sin(2 * x[:, :1]), activation, size


CHANGES = [
    {}, {"depth": 1}, {"depth": 6}, {"depth": 3, "activation": "tanh"},
    *({"activation": x} for x in ("gelu", "sigmoid", "softplus", "elu")),
    *({"size": x} for x in (1e-8, 1e-20)), {"activation": "silu", "size": 1e-15},
    *({"batch": x} for x in (8, 1024)), *({"width": x} for x in (4, 64)),
]  # fmt: skip
for changes in CHANGES:
    name = "".join(f"-{key}-{value}" for key, value in changes.items())
    about = lost | {"name": name, "default": changes == {"depth": 1}}
    fault(*layers(**changes), by="autocast", **about)(perceptron)


last = {"kind": "precision", "before": ("underflow",) * 3, "says": "^At the loss scale"}


@fault(*layers(), by="autocast", **last)
def beside_an_underflow(params, *args):
    """Its other faults are those of the perceptron."""
    ((w, b), *others), x = params, args[0]
    h = jax.nn.relu(x @ w + b)  # before beside_an_underflow
    h = (h + 3000) @ jnp.eye(len(b), dtype=b.dtype) - 3000  # beside_an_underflow
    return perceptron(others, h, *args[1:])


@fault(W, X, by="autocast", mended=True, default=True)
def forward_algorithm(w, x):
    h = jnp.abs(x @ w) * 2.0**-6
    for _ in range(3):
        h = h * h[:, :1]  # before forward_algorithm
    return mean(jnp.log(h.sum(-1))) + mean(h @ w)  # forward_algorithm
