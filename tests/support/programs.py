"""Random programs, of all that JAX has: dtypes, calls, loops, rules, derivatives.

A program is a function of parameters and data. It takes the same decisions in each
trace, which follow from its seed, from shapes and from dtypes alone. Numbers stay
small, and no decision falls by a number that was computed, so that the result in half
precision is near.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

BATCH, N = 4, 8
FLOATS = ["float32", "float32", "float32", "float16", "bfloat16"]
DTYPES = [*FLOATS, "complex64", "int32", "int8", "bool"]


def arguments(seed, *, x64=False):
    """Returns parameters and data for a program."""
    rng = np.random.default_rng(seed)
    wide = ["float64", "complex128", "int64"] if x64 else []

    def normal(*shape):
        return rng.normal(size=shape).astype(np.float32)

    params = {"w": normal(N, N), "b": normal(N), "g": 1 + normal(N) / 4, "t": normal()}
    # A gain of any size, and a gain that takes it back.
    size = np.float32(10.0 ** rng.uniform(-19, 19))
    params |= {"large": size * params["g"], "small": 1 / size / params["g"]}
    data = [normal(BATCH, N), normal(N), normal(BATCH, 1)]
    for dtype in rng.choice([*DTYPES, *wide], 3):
        data.append((3 * normal(BATCH, N)).astype(dtype))
    return params, data


def like(x, other):
    """Returns an array of the type of another."""
    x = cast(x, other.dtype if kind_of(other) in "fc" else "float32")
    x = x if x.shape == other.shape else jnp.broadcast_to(x.mean(), other.shape)
    x, sharding = cast(x, other.dtype), jax.typeof(other).sharding
    is_there = jax.typeof(x).sharding == sharding
    return x if is_there else jax.sharding.reshard(x, sharding)


def kind_of(x):
    """Returns the kind of a dtype, as NumPy calls it; of bfloat16, too, "f"."""
    return jnp.dtype(getattr(x, "dtype", x)).kind.replace("V", "f")


def cast(x, dtype):
    """Returns an array in a dtype; where floats become integers, ones."""
    if kind_of(x) in "fc" and kind_of(dtype) in "ib":
        return jnp.ones_like(x, dtype)
    return (x.real if kind_of(x) == "c" != kind_of(dtype) else x).astype(dtype)


def small(x):
    """Returns an array whose numbers are small."""
    return x if kind_of(x) in "ib" else x / (1 + abs(x) / 4)


class Program:
    """A random program."""

    def __init__(self, seed, depth=2, length=6):
        """Takes the seed, how deep it nests, and how many operations it has."""
        self.seed, self.depth, self.length = seed, depth, length

    def __call__(self, params, *data):
        """Returns a loss, f32[], and arrays of several dtypes."""
        self.rng, self.is_moved = np.random.default_rng(self.seed), False
        found = self.block(params, data, self.depth, self.length)
        terms = [jnp.mean(jnp.tanh(cast(x, "float32"))) for x in found]
        return sum(terms), found[-3:]

    def choose(self, values):
        return values[self.rng.integers(len(values))]

    def block(self, params, values, depth, length):
        """Returns the values, and the results of operations with them."""
        values = [*values, params["b"]]
        for _ in range(length):
            x, y = self.choose(values[-6:]), self.choose(values)
            if depth and self.rng.random() < 0.3:
                values.append(self.nested(params, x, values, depth - 1))
            elif x.shape[-1:] == (N,) and self.rng.random() < 0.4:
                values.append(self.layer(params, x))
            else:
                values.append(self.choose([self.single, self.double])(x, y))
        return values

    def single(self, x, _):
        """Returns a function of one array."""
        turned = [] if x.ndim == 0 else [lambda x: x[..., ::-1]]
        moves = [*turned, lambda x: -x, lambda x: x + 1, lambda x: x * 2]
        smooth = [jnp.sin, jnp.tanh, lambda x: jnp.exp(-x * x), lambda x: x / 2]
        reals = [jax.nn.silu, jax.nn.relu, lambda x: jnp.clip(x, -2, 2)]
        reals += [lambda x: lax.rsqrt(1 + x * x), lambda x: jnp.sqrt(1 + x * x)]
        if x.ndim:
            reals += [lambda x: jnp.sort(x, -1), lambda x: jnp.cumsum(x, -1) / N]
            reals += [functools.partial(jnp.mean, axis=-1, keepdims=True)]
            reals += [functools.partial(jnp.max, axis=-1, keepdims=True)]
        complexes = [jnp.conj, lambda x: x * 1j, jnp.real, jnp.abs]
        kinds = {"b": [jnp.logical_not], "i": moves, "c": [*moves, *smooth, *complexes]}
        known = kinds.get(kind_of(x), [*moves, *smooth, *reals])
        dtype = self.choose(DTYPES)
        return self.choose([*known, lambda x: cast(x, dtype)])(x)

    def double(self, x, y):
        """Returns a function of two arrays, of any dtypes."""
        if x.dtype == bool:
            return jnp.where(x, small(y), self.choose([0, 1, 0.5]))
        x, y = jnp.broadcast_arrays(small(x), small(y))
        ways = [jnp.multiply, lambda x, y: 1.0 * x - y, lambda x, y: 1.0 * x + y]
        if "c" not in (kind_of(x), kind_of(y)):
            ways += [jnp.maximum, lambda x, y: x / (1 + abs(1.0 * y))]
        if x.ndim:
            add_up = functools.partial(jnp.einsum, "...i,...i->...")
            ways += [lambda x, y: add_up(x, y)[..., None] / (2 * N)]
            ways += [lambda x, y: jnp.einsum("...i,i->...i", x, y[(0,) * (y.ndim - 1)])]
            ways += [lambda x, y: jnp.where(jnp.arange(x.shape[-1]) % 3 == 0, x, y)]
            ways += [lambda x, y: jnp.concatenate([x, y], -1)[..., ::2]]
        return self.choose(ways)(x, y)

    def layer(self, params, x):
        """Returns a layer, or almost one."""
        dtype = x.dtype if kind_of(x) in "fc" else jnp.float32
        x, w, b, g = (cast(z, dtype) for z in (small(x), *map(params.get, "wbg")))
        h = self.choose([x @ w / 3, x @ w / 3, x])
        mean = h.mean(-1, keepdims=True)
        root = lax.rsqrt(jnp.square(abs(h)).mean(-1, keepdims=True) + 1)
        mask, t = (jnp.arange(N) % 2 == 0).astype(dtype), cast(params["t"], dtype)
        forms = [h + b, h * g, h * root, (h - mean) * root * g + b, h * mask, h + x]
        if dtype != jnp.float16:
            gain, back = (cast(params[z], dtype) for z in ("large", "small"))
            forms += [h * gain * back, h * back * gain]
        return self.choose([*forms, h * mean * t, h * jnp.exp(-abs(mean)) + b])

    def inside(self, x, values, depth):
        """Returns a function to the type of `x`, and its arguments after the first."""
        seed, used = int(self.rng.integers(2**31)), [self.choose(values) for _ in "123"]

        def function(x, params, *others):
            before, self.rng = self.rng, np.random.default_rng(seed)
            result = like(self.block(params, [*others, x], depth, 2)[-1], x)
            self.rng = before
            return result

        return function, used

    def nested(self, params, x, values, depth):
        """Returns a result of a function that JAX calls, repeats or differentiates."""
        (f, used), (g, others) = (self.inside(x, values, depth) for _ in "12")
        ways = [self.scan, self.loop, self.stopped, self.branch, self.rule, self.twice]
        if x.ndim == 2:
            ways += [self.mapped]
        if kind_of(x) == "f":
            ways += [self.moved, self.slope]
        return self.choose(ways)(f, g, x, params, used, others)

    def twice(self, f, g, x, params, used, others):
        f = self.choose([jax.jit, jax.checkpoint])(f)
        return f(f(x, params, *used), params, *others)

    def branch(self, f, g, x, params, used, others):
        which = jnp.argmax(jnp.arange(2) == self.rng.integers(2))
        return lax.switch(which, [f, g], x, params, *used)

    def scan(self, f, g, x, params, used, others):
        def body(x, y):
            x = f(x, params, y, *used[1:])
            return x, g(x, params, *others)

        last, every = lax.scan(body, x, jnp.stack([used[0]] * 3))
        return self.choose([last, every[1]])

    def loop(self, f, g, x, params, used, others):
        return lax.fori_loop(0, 3, lambda i, x: f(x, params, *used), x)

    def stopped(self, f, g, x, params, used, others):
        """Returns the end of a loop that nobody differentiates."""
        x, params, used = lax.stop_gradient((x, params, used))
        if self.choose([True, False]):
            # A flag ends it, which compares numbers that are far from each other.
            def step_and_compare(state):
                i, x, _ = state
                is_small = jnp.max(jnp.abs(cast(x, "float32"))) < 1e4
                return i + 1, f(x, params, *used), is_small & (i > 0)

            start = 0, x, False
            return lax.while_loop(lambda s: ~s[2], step_and_compare, start)[1]
        step = lambda s: (s[0] + 1, f(s[1], params, *used))  # noqa: E731
        zero = self.choose([0, 0.0])
        return lax.while_loop(lambda s: s[0] < 2, step, (zero, x))[1]

    def mapped(self, f, g, x, params, used, others):
        return jax.vmap(lambda x: f(x, params, *used))(x)

    def rule(self, f, g, x, params, used, others):
        """Returns a result of a rule, whose other result nobody reads."""
        both = lambda *args: (f(*args), g(*args))  # noqa: E731
        if self.choose([True, False]) or self.is_moved:  # JAX moves no custom_vjp.
            ruled = jax.custom_jvp(both)
            ruled.defjvp(functools.partial(jax.jvp, both))
        else:
            ruled = jax.custom_vjp(both)
            ruled.defvjp(functools.partial(jax.vjp, both), lambda back, ct: back(ct))
        return ruled(x, params, *used)[0]

    def moved(self, f, g, x, params, used, others):
        before, self.is_moved = self.is_moved, True
        result = jax.jvp(lambda x: f(x, params, *used), (x,), (jnp.ones_like(x),))[1]
        self.is_moved = before
        return result

    def slope(self, f, g, x, params, used, others):
        return jax.grad(lambda x: cast(f(x, params, *used), "float32").sum())(x)
