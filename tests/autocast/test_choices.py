"""`float32=` by function, class, method and scope, in models that nobody edits."""

import functools

import jax
import jax.numpy as jnp
import pytest
from casting import dtypes, errors, normal, products
from helpers import exhaustive_but
from jax import lax

from optax_lossscale import autocast

X, W = normal(16, 8), normal(8, 8, scale=0.4)


def kept(h, w):
    return jax.nn.relu(h @ w)


class Block:
    def __call__(self, h, w):
        return self.inner(h, w) @ w

    def inner(self, h, w):
        return jnp.tanh(h @ w)


def widths(f, *args):
    """Returns how many products compute in float32 and in float16, forward."""
    found = dtypes(f, *args)
    return found.count(jnp.float32), found.count(jnp.float16)


WAYS = {
    "plain": lambda f: f,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "scan": lambda f: (
        lambda h, w: lax.scan(lambda h, _: (f(h, w), None), h, length=2)[0]
    ),
    "vmap": lambda f: jax.vmap(f, (0, None)),
}


CHOICES = [
    (kept, 1), ([kept], 1), (functools.partial(kept), 1), (jax.jit(kept), 1),
    (Block, 2), (Block.inner, 1), (Block().inner, 1), ([kept, Block], 3),
    ("outer", 4), ("outer/model", 3), ("outer/~/model", 3), ("model", 3), ("ute", 0),
]  # fmt: skip


@pytest.mark.parametrize(
    ("way", "float32", "inside"),
    [("plain", *x) for x in CHOICES]
    + [(way, *x) for way in [*WAYS][1:] for x in ((kept, 1), (Block, 2), ("model", 3))],
)
def test_by_function_class_method_and_scope(way, float32, inside):
    def f(w, x):
        with jax.named_scope("outer"):
            h = x @ w
            with jax.named_scope("model"):
                h = WAYS[way](lambda h, w: Block()(kept(h, w), w))(h, w)
        return jnp.mean((h @ w) ** 2)

    if not inside:
        with pytest.warns(UserWarning, match=r"casts nothing: ute. A string"):
            autocast(f, float32=float32)(W, X)
        return
    cast = autocast(f, float32=float32)
    assert widths(cast, W, X) == (inside, 5 - inside)
    # The derivative, too: of each product but the first by both of its operands.
    both = [x for kinds in products(cast, W, X) for x in kinds]
    found = both.count("float32"), both.count("float16")
    again = found[0] + found[1] - 14  # A checkpoint computes some again.
    assert (again > 0) == (way == "checkpoint")
    assert 3 * inside - (float32 == "outer") <= found[0] <= 3 * inside + again
    assert found[1] >= 14 - 3 * inside


@functools.cache
def linen():
    nn = pytest.importorskip("flax.linen")

    class Linen(nn.Module):
        @nn.compact
        def __call__(self, x):
            h = nn.Dense(8, name="first")(x)
            h = nn.MultiHeadDotProductAttention(2, name="attention")(h[None])[0]
            return nn.Dense(8, name="last")(h)

    model = Linen()
    params = jax.jit(model.init)(jax.random.key(0), X)
    chosen = {"class": nn.MultiHeadDotProductAttention, "method": nn.Dense.__call__}
    return params, model.apply, chosen


@functools.cache
def flax_nnx():
    nnx = pytest.importorskip("flax.nnx")

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(8, 8, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)

        def __call__(self, x):
            return self.attention(self.first(x)[None])[0]

    graph, params = nnx.split(Model(nnx.Rngs(0)))
    apply = lambda params, x: nnx.merge(graph, params)(x)  # noqa: E731
    chosen = {"class": nnx.MultiHeadAttention, "function": nnx.dot_product_attention}
    return params, apply, chosen


@functools.cache
def equinox():
    eqx = pytest.importorskip("equinox")
    keys = jax.random.split(jax.random.key(0))
    first = eqx.nn.Linear(8, 8, key=keys[0])
    attention = eqx.nn.MultiheadAttention(2, 8, key=keys[1])
    params, static = eqx.partition((first, attention), eqx.is_array)

    def apply(params, x):
        first, attention = eqx.combine(params, static)
        h = jax.vmap(first)(x)
        return attention(h, h, h)

    chosen = {"class": eqx.nn.MultiheadAttention, "method": eqx.nn.Linear.__call__}
    return params, apply, chosen


@functools.cache
def haiku():
    hk = pytest.importorskip("haiku")

    def forward(x):
        h = hk.Linear(8, name="first")(x)
        h = hk.nets.MLP([8, 8], name="middle")(h)
        return hk.Linear(8, name="last")(h)

    model = hk.without_apply_rng(hk.transform(forward))
    params = jax.jit(model.init)(jax.random.key(0), X)
    return params, model.apply, {"class": hk.nets.MLP}


@functools.cache
def exact(make):
    """Returns a loss of a model, and its value and gradient in float32."""
    params, apply, _ = make()

    def f(params, x):
        return jnp.mean(apply(params, x) ** 2)

    return f, jax.jit(jax.value_and_grad(f))(params, X)


# A model, what to compute in float32, and how many products do or do not.
MODELS = [
    (linen, "class", 6, 2), (linen, "Linen/last", 1, 7), (flax_nnx, "function", 2, 5),
    (equinox, "method", 5, 2), (haiku, "class", 2, 2),
    (linen, "method", 2, 6), (linen, "attention", 6, 2), (flax_nnx, "class", 6, 1),
    (equinox, "class", 6, 1), (haiku, "middle", 2, 2),
]  # fmt: skip


@pytest.mark.parametrize("case", exhaustive_but(MODELS, MODELS[:5]))
def test_in_libraries(case):
    make, float32, *counts = case
    params, _, chosen = make()
    f, wanted = exact(make)
    cast = autocast(f, float32=chosen.get(float32, float32))
    assert widths(cast, params, X) == tuple(counts)
    assert errors(jax.jit(jax.value_and_grad(cast))(params, X), wanted) < 0.01


class Last(Block):
    def __init__(self):
        self.size = 8


class Caller:
    def forward(self, h, w):
        return h @ w


UNMATCHED = {
    r"Last. It inherits __call__.* Define __call__ in it": Last,
    "Caller. Either it does not run here": Caller,
    "Block.__call__. Either it does not run here, or it casts": Block.__call__,
    "kept. A string is the name of a scope": "kept",
    "test_choices.py:1. .* its number may have changed: ask": "test_choices.py:1",
}


@pytest.mark.parametrize(("match", "float32"), UNMATCHED.items())
def test_what_matches_nothing_warns(match, float32):
    with pytest.warns(UserWarning, match=match):
        autocast(lambda w, x: kept(x, w) @ w, float32=[float32, kept])(W, X)


@pytest.mark.parametrize("empty", ["/", "~", "~/~"])
def test_a_name_of_nothing_is_refused(empty):
    with pytest.raises(TypeError, match="float32 must hold lines"):
        autocast(lambda w, x: x @ w, float32=empty)


@pytest.mark.parametrize("f", [jnp.matmul, jnp.dot, jnp.vdot])
def test_what_jax_inlines_is_refused(f):
    with pytest.raises(
        TypeError, match=r'which JAX inlines.* Name that line, "file.py:'
    ):
        autocast(lambda w, x: f(x, w), float32=[kept, f])


class Solver:
    """Runs a program that was traced before, as solvers of libraries do."""

    def run(self, program, *args):
        self.steps = 1 + jnp.int32(0)  # Nothing that computes in half precision.
        return jax.core.eval_jaxpr(program.jaxpr, program.consts, *args)[0]


def test_a_class_whose_work_was_traced_elsewhere_warns():
    def f(w, x):
        program = jax.make_jaxpr(kept)(x, w)
        return Solver().run(program, x, w) @ w

    match = "casts nothing: Solver. .* was traced before: then name the function"
    with pytest.warns(UserWarning, match=match):
        found = widths(autocast(f, float32=Solver), W, X)
    assert found == (0, 2)
    assert widths(autocast(f, float32=kept), W, X) == (1, 1)


def distances(a, b):
    return jnp.sum(a**2, -1)[:, None] - 2 * a @ b.T + jnp.sum(b**2, -1)


CODES = jax.device_put(4 + normal(30, 8, scale=0.3))


def quantized(w, x):
    z = 0.3 * (x @ w) + 4
    near = jnp.argmin(distances(z, CODES), -1)
    chosen = CODES[near] + 0 * w[0]
    return jnp.mean((z - lax.stop_gradient(chosen)) ** 2), near


def discrepancy(w, x):
    z = 0.3 * (x @ w) + 3
    y = 3 + 0.3 * jnp.sin(X)
    kernel = lambda a, b: jnp.mean(jnp.exp(-distances(a, b) / 2))  # noqa: E731
    return kernel(z, z) + kernel(y, y) - 2 * kernel(z, y), None


@pytest.mark.parametrize("f", [quantized, discrepancy])
def test_differences_of_products_by_the_name_of_their_function(f):
    x = normal(256, 8)
    run = lambda f: jax.jit(jax.grad(f, has_aux=True))(W, x)  # noqa: E731
    (grads, codes), (wanted, right) = run(autocast(f, float32=distances)), run(f)
    worse, wrong = run(autocast(f))
    error = lambda g: float(jnp.linalg.norm(g - wanted) / jnp.linalg.norm(wanted))  # noqa: E731
    assert error(grads) < 0.002
    assert error(worse) > 3 * error(grads)
    if codes is not None:
        assert jnp.sum(codes != right) == 0 < jnp.sum(wrong != right)


def test_a_function_of_a_solver_is_float32_already():
    def f(w, x):
        step = lambda s: (s[0] + 0.5, kept(s[1], w))  # noqa: E731
        return lax.while_loop(lambda s: s[0] < 1, step, (0.0, x))[1] @ w

    jax.eval_shape(autocast(f, float32=kept), W, X)  # Warnings are errors.
