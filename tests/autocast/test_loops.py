"""Loops that floating-point numbers end are solvers: they take the steps of float32."""

import functools

import jax
import jax.numpy as jnp
import pytest
from casting import dtypes, normal
from jax import lax

from optax_lossscale import autocast
from optax_lossscale._autocast.program import read
from optax_lossscale._jaxprs import ends
from optax_lossscale._jaxprs.parts import all_equations

pytestmark = pytest.mark.filterwarnings("ignore:autocast computes nothing")
W, X = normal(16, 16, scale=0.06), normal(64, 16)


def loop(flag, start=False, goes_on=lambda flag: ~flag):
    """Returns a loop that ends by `flag(new, old, key, w)`."""

    def f(w, x):
        def body(state):
            z, _, i, key = state
            key, now = jax.random.split(key)
            new = jnp.tanh(z @ w + x)
            return new, flag(new, z, now, w), i + 1, key

        def condition(state):
            return goes_on(state[1]) & (state[2] < 64)

        start_state = 0 * x, jnp.asarray(start), 0, jax.random.key(0)
        return lax.while_loop(condition, body, start_state)

    return f


def is_near(z, old):
    return jnp.max(jnp.abs(z - old)) < 1e-5


def status(z, old, key, w):
    return jnp.where(is_near(z, old), 1, 0)


def in_a_branch(z, old, key, w):
    is_large = jnp.max(jnp.abs(z)) > 1e9
    return lax.cond(is_large, lambda: jnp.bool_(True), lambda: is_near(z, old))


def the_branch_itself(z, old, key, w):
    return lax.cond(is_near(z, old), lambda: jnp.bool_(True), lambda: jnp.bool_(False))


def in_a_loop(z, old, key, w):
    return lax.fori_loop(0, 2, lambda i, flag: flag | is_near(z, old), False)


def steps_of_a_loop(z, old, key, w):
    """A search inside, whose number of steps is a flag."""
    size = jnp.max(jnp.abs(z - old))
    condition = lambda state: (state[0] < 1e-5) & (state[1] < 40)  # noqa: E731
    step = lambda state: (2 * state[0], state[1] + 1)  # noqa: E731
    return lax.while_loop(condition, step, (size, 0))[1] > 0


def noisy(z, old, key, w):
    """The error of a step with noise is no random number."""
    return is_near(z + 1e-7 * jax.random.normal(key, z.shape), old)


END = {
    "a comparison": (lambda z, old, key, w: is_near(z, old), False),
    "is_finite": (lambda z, old, key, w: ~jnp.isfinite(z).all(), False),
    "a function": (lambda z, old, key, w: jax.jit(is_near)(z, old), False),
    "a checkpoint": (lambda z, old, key, w: jax.checkpoint(is_near)(z, old), False),
    "a branch": (in_a_branch, False),
    "which branch": (the_branch_itself, False),
    "a loop": (in_a_loop, False),
    "the steps of a loop": (steps_of_a_loop, False),
    "examples of vmap":
        (lambda z, old, key, w: jax.vmap(is_near)(z, old).all(), False),
    "a count":
        (lambda z, old, key, w: jnp.sum(jnp.abs(z - old) < 1e-5) == z.size, False),
    "a number": (lambda z, old, key, w: jnp.max(jnp.abs(z - old)).astype(int), 9),
    "an error with noise": (noisy, False),
}  # fmt: skip


def categorical(z, old, key, w):
    return (jax.random.categorical(key, z) == 3).all()


def greedy_or_drawn(z, old, key, w):
    """The temperature is a number that no iteration changes."""
    best, drawn = jnp.argmax(z, -1), jax.random.categorical(key, z)
    return (jnp.where(w[0, 0] > 9, best, drawn) == 3).all()


def nucleus(z, old, key, w):
    sizes = jnp.sort(jax.nn.softmax(z), -1, descending=True)
    last = jnp.sum(jnp.cumsum(sizes, -1) < 0.9, -1, keepdims=True)
    least = jnp.take_along_axis(sizes, last, -1)
    likely = jnp.where(jax.nn.softmax(z) >= least, z, -jnp.inf)
    return (jax.random.categorical(key, likely) == 3).all()


GO_ON = {
    "argmax": lambda z, old, key, w: (jnp.argmax(z, -1) == 3).all(),
    "top_k": lambda z, old, key, w: (lax.top_k(z, 2)[1] == 3).all(),
    "argsort": lambda z, old, key, w: (jnp.argsort(z)[:, 0] == 3).all(),
    "categorical": categorical,
    "greedy or drawn": greedy_or_drawn,
    "nucleus": nucleus,
    "bernoulli": lambda z, old, key, w: (
        jax.random.bernoulli(key, jax.nn.sigmoid(z)).all()),
    "randint": lambda z, old, key, w: (
        (jax.random.randint(key, z.shape, 0, 16) == jnp.argmax(z)).all()),
}  # fmt: skip


def steps(f):
    return int(jax.jit(f)(W, X)[2])


@pytest.mark.parametrize(("flag", "start"), END.values(), ids=END)
def test_a_flag_that_compares_numbers_ends_a_solver(flag, start):
    goes_on = (lambda x: ~x) if start is False else (lambda x: x > 0)
    assert dtypes(autocast(loop(flag, start, goes_on)), W, X) == ["float32"]


def test_a_status_of_integers_ends_a_solver():
    f = loop(status, 0, lambda status: status == 0)
    assert dtypes(autocast(f), W, X) == ["float32"]
    assert steps(autocast(f)) == steps(f) < 64


@pytest.mark.parametrize("flag", GO_ON.values(), ids=GO_ON)
def test_generation_stays_in_half_precision(flag):
    assert dtypes(autocast(loop(flag)), W, X) == ["float16"]


def test_a_state_that_no_iteration_changes_ends_nothing():
    def f(w, x):
        def body(state):
            z, i, heat = state
            return jnp.tanh(z @ w), i + jnp.where(heat > 0, 1, 2), heat

        return lax.while_loop(lambda s: s[1] < 9, body, (x, 0, w[0, 0]))

    assert dtypes(autocast(f), W, X) == ["float16"]


def test_a_flag_on_its_way_through_the_state_ends_a_solver():
    """The condition reads what the body got from a flag of the iteration before."""

    def f(w, x):
        def body(state):
            z, near, _, i = state
            new = jnp.tanh(z @ w + x)
            return new, is_near(new, z), near, i + 1

        goes_on = lambda s: ~s[2] & (s[3] < 64)  # noqa: E731
        return lax.while_loop(goes_on, body, (0 * x, False, False, 0))[0]

    assert dtypes(autocast(f), W, X) == ["float32"]


class Counts(ends.Walk):
    """A walk that counts the equations that it looks at."""

    seen = asked = 0

    def ends_by_floats(self, equation):
        self.asked += 1
        return super().ends_by_floats(equation)

    def of(self, equation, given):
        self.seen += 1
        return super().of(equation, given)


def looks_at(f, *args):
    """Returns how many equations a walk of a loop looks at, and how many there are."""
    jaxpr, walk = jax.make_jaxpr(f)(*args).jaxpr, Counts()
    list(map(walk.ends_by_floats, jaxpr.eqns))
    return walk.seen, len(list(all_equations(jaxpr)))


def test_loops_in_loops_are_followed_once():
    """Each jaxpr is walked for its arguments, however deep it lies."""

    def f(x):
        for _ in range(8):
            inner = lambda i, x: jnp.sin(x)  # noqa: E731
            x = lax.fori_loop(0, 2, inner, x)
        return x

    def nested(depth, x):
        if not depth:
            return f(x)
        return lax.fori_loop(0, 2, lambda i, x: nested(depth - 1, x), x)

    def run(x):
        body = lambda s: (nested(5, s[0]), s[1] + 1)  # noqa: E731
        return lax.while_loop(lambda s: s[1] < 3, body, (x, 0))

    seen, n = looks_at(run, 1.0)
    assert seen <= 4 * n


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["plain", "in a function"])
def test_flags_that_hand_each_other_on_are_followed_once(wrap):
    """An iteration changes one flag: the walk looks at what reads this flag alone."""

    @wrap
    def handed_on(near, flags):
        return [near, *(~x for x in flags[:-1])]

    def f(n, w, x):
        def body(state):
            z, flags = state
            new = jnp.tanh(z @ w + x)
            return new, handed_on(is_near(new, z), flags)

        return lax.while_loop(lambda s: ~s[1][-1], body, (0 * x, [False] * n))[0]

    few, many = (looks_at(functools.partial(f, n), W, X)[0] for n in (50, 100))
    assert many < 2.2 * few
    assert dtypes(autocast(functools.partial(f, 50)), W, X) == ["float32"]


def test_rules_in_rules_are_searched_once():
    """A function with a derivative of its own is searched for solvers, also inside."""

    def with_rule(f):
        g = jax.custom_jvp(lambda x: f(2 * x))
        g.defjvp(lambda x, t: (f(*x), *t))
        return g

    def asked(depth):
        f, walk = jnp.sin, Counts()
        for _ in range(depth):
            f = with_rule(f)
        read(jax.make_jaxpr(f)(1.0), "float16", walk=walk)
        return walk.asked

    counts = {depth: asked(depth) for depth in (10, 20, 40)}
    assert counts[40] - counts[20] == 2 * (counts[20] - counts[10])
