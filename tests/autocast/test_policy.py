"""Each row and each rule of the policy: a program is wrong without it."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from casting import check, error, normal
from jax import lax

from optax_lossscale._autocast import plan, policy
from optax_lossscale._autocast.layers import Layer, Layers
from optax_lossscale._autocast.plan import Planner
from optax_lossscale._autocast.policy import State
from optax_lossscale._autocast.roles import Role
from optax_lossscale._jaxprs import ends, primitives
from optax_lossscale._jaxprs.primitives import Kind

X, W = normal(64, 16), normal(16, 16, scale=0.25)
P = {"w": W, "b": normal(16, scale=0.1), "out": normal(16, 8, scale=0.25)}
Y = np.arange(64) % 8


def cross_entropy(logits, y=Y):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
    return jnp.mean(losses)


def shrunk(x):
    """Divides by 1e5, without a tiny factor."""
    return 0.1 * (0.01 * (0.01 * x))


def read(p, h):
    """Returns a loss that reads `h` by a product, which wants no float32."""
    return jnp.mean((h @ p["out"]) ** 2)


def unit_length(p, x):
    v = 1e-4 * (p["b"] + x[0])
    return read(p, v / jnp.sqrt(v @ v))


def small_weights(p, x):
    return 1e6 * jnp.vdot(jnp.full(64, 1e-8), jnp.mean((x @ p["w"]) ** 2, -1))


def large_gain(p, x):
    u = (x @ p["w"]) * (1e5 + p["b"])
    inverse = 0.01 * (0.01 * (0.1 + 1e-4 * p["b"]))
    return read(p, u * inverse) + jnp.mean(jnp.tanh(u * inverse))


def two_gains(p, x):
    """A norm with a gain of its own, and another one."""
    u = x @ p["w"]
    u = u * lax.rsqrt(jnp.square(u).mean(-1, keepdims=True)) * (300 + p["b"])
    return read(p, shrunk(u * (300 + p["b"])))


def cubes(p, x):
    """Times its own statistic, but no norm: of twice `u` it is 8 times as large."""
    u = x @ p["w"]
    return read(p, shrunk(u * jnp.square(u).mean(-1, keepdims=True)))


def fixed_point(p, x):
    def step(state):
        z, _, i = state
        new = jnp.tanh(z @ w / 4 + x)
        return new, jnp.max(jnp.abs(new - z)) < 1e-5, i + 1

    w = lax.stop_gradient(p["w"])
    *_, steps = lax.while_loop(lambda s: ~s[1] & (s[2] < 64), step, (x, False, 0))
    return steps + jnp.mean((x @ p["w"]) ** 2)


def rms_norm(p, x):
    h = x @ p["w"]
    h = h * lax.rsqrt(jnp.mean(h**2, -1, keepdims=True) + 1e-6)
    return cross_entropy(h @ p["out"])


def square_by_product(p, x):
    h = x @ p["w"]
    return read(p, shrunk(h * h))


def softmax_by_hand(p, x):
    h = jnp.exp(x @ p["w"])
    return cross_entropy((h / h.sum(-1, keepdims=True)) @ p["out"])


def binary_cross_entropy(p, x):
    s = jax.nn.sigmoid((x @ p["w"])[:, 0])
    t = Y / 8
    return -jnp.mean(t * jnp.log(s + 1e-12) + (1 - t) * jnp.log(1 - s + 1e-12))


def masked(p, x):
    keep = jnp.arange(64)[:, None] > jnp.arange(16)  # Nothing is kept in the first row.
    h = jax.nn.softmax(x @ p["w"] + jnp.where(keep, 0.0, -1e9))
    h = jnp.where(keep, h @ p["w"], jnp.finfo(h.dtype).min)
    return cross_entropy(jax.nn.softmax(h) @ p["out"])


def tiny_constant(p, x):
    h = x @ p["w"]
    least = jnp.maximum(-jnp.abs(h), 1e-6) * 100 * 100 * 100
    return read(p, least) + 0.01 * jnp.mean(h**2)


def mean_of_products(p, x):
    u, v = x @ p["w"], x @ p["w"].T
    return jnp.mean(u * v)


def biases(p, x):
    h = x @ p["w"] + p["b"]
    return jnp.mean((jnp.tanh(h) @ p["out"]) ** 2)


def scaled_norm(p, x):
    h = (x @ p["w"]) * 1e-3
    return jnp.mean(jnp.sqrt(jnp.sum(h**2, -1) + 1e-12))


def large_factor(p, x):
    return read(p, shrunk(1000 * (x @ p["w"]) + x))


def gaussian_policy(p, x):
    mean = x @ p["w"]
    near = lax.stop_gradient(mean) + jnp.sin(X) * 0.005
    return jnp.mean(((near - mean) / jnp.exp(p["b"] - 5)) ** 2)


def near_difference(p, x):
    mean = x @ p["w"]
    near = lax.stop_gradient(mean) + 0.02 * (0.2 * jnp.sin(x @ p["w"].T))
    return read(p, (near - mean) * 100)


def square(p, x):
    return read(p, shrunk(jnp.square(x @ p["w"])))


def exponential(p, x):
    return read(p, shrunk(jnp.exp(x @ p["w"])))


def long_sum(p, x):
    return read(p, 0.01 * jnp.sum(1000 + x @ p["w"], 0) - 640)


def value_head(p, x):
    return jnp.mean((x @ p["w"] + (3000 + p["b"]) - 3000) ** 2)


def coordinates(p, x):
    at = (1000 + x) + jnp.tanh(x) @ p["w"]
    near = (at[:, None] - at[None]).reshape(-1, 16)
    return jnp.mean(jnp.sqrt(jnp.sum(near**2, -1) + 1e-6))


def hidden_variance(p, x):
    return jnp.mean(jnp.sqrt(jnp.var(x @ p["w"] + 500, -1) + 1e-5))


def ode(p, x):
    def step(z, _):
        return z + 0.01 * (jnp.tanh(z) @ p["w"]), None

    return jnp.mean(lax.scan(step, 10 + x, length=500)[0] ** 2)


def moving_average(p, x):
    def step(e, x):
        e = 0.98 * e + 0.02 * (x @ p["w"])
        return e, None

    x = jnp.concatenate([1 + x] * 4)
    return jnp.mean(lax.scan(step, jnp.ones(16), x)[0] ** 2)


def short_average(p, x):
    def step(e, x):
        return 0.99 * e + 0.01 * (3 + x @ p["w"]), None

    start = x[0] @ p["w"]
    return jnp.mean((lax.scan(step, start, jnp.concatenate([x, x[:32]]))[0] - 2) ** 2)


def best_path(p, x):
    def step(score, e):
        return jnp.max(score[:, None] + p["w"], 0) + e, None

    scores = 20 + jnp.concatenate([x] * 4) @ p["w"]
    best, _ = lax.scan(step, scores[0], scores[1:])
    return jnp.max(best) - jnp.sum(scores[:, 0])


def sum_in_a_loop(p, x):
    def step(total, x):
        return total + x @ p["w"], None

    return jnp.mean(lax.scan(step, jnp.zeros(16), 30 + x)[0] ** 2)


def positions(p, x):
    at = jnp.einsum("i,j->ij", 50.0 * jnp.arange(64.0), 0.9 ** jnp.arange(16.0))
    return jnp.mean(jnp.sin(at) * (x @ p["w"]))


def gates(p, x):
    h = jax.nn.sigmoid(x @ p["w"])
    return jnp.mean((h @ p["out"]) ** 2) - jnp.mean(jnp.log(1 - h))


def boxes(p, x):
    h = x @ p["w"]
    center, size = 1200 + x[:, :2] + 16 * h[:, :2], 16 * jnp.exp(h[:, 2:4])
    low, high = center - size / 2, center + size / 2
    return jnp.mean(jnp.abs(low - 1195) + jnp.minimum(high, 1204) - low)


def weather(p, x):
    return x + 0.3 * (jnp.tanh(((x - 300) / 10) @ p["w"]) @ p["w"].T)


def forecast_by_steps(p, x):
    x = weather(p, weather(p, weather(p, 300 + 10 * x)))
    return jnp.mean(((x - 301) / 10) ** 2)


def forecast(p, x):
    def step(x, _):
        return weather(p, x), jnp.mean(((x - 301) / 10) ** 2)

    return jnp.mean(lax.scan(step, 300 + 10 * x, length=4)[1])


def refined(p, x):
    image = 10 * jnp.cos(jnp.arange(512.0))[:, None] * P["b"]

    def step(at, _):
        i = jnp.floor(at)
        left, right = (image[i.astype(jnp.int32) + k] for k in (0, 1))
        found = left + (at - i)[:, None] * (right - left)
        return at + (jnp.tanh(found @ p["w"]) @ p["out"])[:, 0], None

    at, _ = lax.scan(step, 256 + 100 * jnp.sin(x[:, 0]), length=4)
    return jnp.mean(jnp.abs(at - 256 + x[:, 1]))


MANY = normal(1280, 16)
TOP2 = np.sort(MANY @ P["out"], 1)[:, -2:]
CERTAIN = MANY[np.argsort(TOP2[:, 0] - TOP2[:, 1])[:100]]


def confident(p, x):
    logits = 3 * CERTAIN @ p["out"]
    return cross_entropy(logits, jnp.argmax(logits, 1))


def confident_by_parts(p, x):
    logits = 3 * CERTAIN @ p["out"]
    labels = jnp.argmax(logits, 1)
    label_logits = jax.jit(lambda x: x[jnp.arange(100), labels])(logits)
    return jnp.mean(
        jax.jit(jax.nn.logsumexp, static_argnums=1)(logits, -1) - label_logits
    )


def confident_by_mixed_parts(p, x):
    """Each part is read by a product, too."""
    logits = 3 * CERTAIN @ p["out"]
    labels = jnp.argmax(logits, 1)
    read = lambda z: 1e-4 * (z @ p["out"].T)[:, 0]  # noqa: E731
    first = jax.jit(lambda z: jax.nn.logsumexp(z, -1) + read(z))(logits)
    hot = jax.nn.one_hot(labels, 8)
    second = jax.jit(lambda z: jnp.sum(z * hot, -1) + read(z))(logits)
    return jnp.mean(first - second)


def waves(times):
    return jnp.cos(3 * times) + jnp.sin(2 * times)


def barrier(p, x):
    times, h = lax.optimization_barrier((100 * x[:, 0], x @ p["w"]))
    return cross_entropy((h * waves(times)[:, None]) @ p["out"])


def sorted_together(p, x):
    times, h = lax.sort((100 * x[:, 0], (x @ p["w"])[:, 0]), num_keys=1)
    return cross_entropy((h * waves(times))[:, None] * (x @ p["out"]))


def running_product(p, x):
    def step(carry, _):
        h, size = carry
        h = h @ (8 * p["w"])
        norm = jnp.max(jnp.abs(h)) / 4
        return (h / norm, size * norm), None

    (h, size), _ = lax.scan(step, (x, jnp.float32(1.0)), length=20)
    return jnp.log(size) + jnp.mean(h**2)


def filled(p, x):
    h = (x @ p["w"]).at[jnp.arange(50, 70)].get(mode="fill", fill_value=1e5)
    return cross_entropy(jnp.where(h == 1e5, 0.0, h) @ p["out"], Y[:20])


FORMULAS = {
    "rms_norm large": (rms_norm, 300), "rms_norm tiny": (rms_norm, 1e-2),
    "square by product": (square_by_product, 300), "softmax": (softmax_by_hand, 4),
    "binary cross entropy": (binary_cross_entropy, 6), "masked": (masked, 1),
    "tiny constant": (tiny_constant, 1), "biases": (biases, 1),
    "scaled norm": (scaled_norm, 1), "large factor": (large_factor, 100),
    "gaussian policy": (gaussian_policy, 1), "value head": (value_head, 1),
    "boxes": (boxes, 1), "forecast": (forecast, 1), "gates": (gates, 6),
    "forecast by steps": (forecast_by_steps, 1), "refined": (refined, 1),
    "coordinates": (coordinates, 1), "hidden variance": (hidden_variance, 1),
    "ode": (ode, 1), "moving average": (moving_average, 1),
    "confident": (confident, 1), "confident by parts": (confident_by_parts, 1),
    "barrier": (barrier, 1), "sorted together": (sorted_together, 1),
    "running product": (running_product, 100), "filled": (filled, 1),
    "short average": (short_average, 1),
}  # fmt: skip


@pytest.mark.parametrize(("f", "size"), FORMULAS.values(), ids=FORMULAS)
def test_formulas_agree_with_float32(f, size):
    check(f, P, size * X)


def move(name, kind):
    """Returns a change of the table: a primitive of another kind."""
    return lambda patch: patch.setitem(primitives._ROWS, name, (kind, primitives.NONE))


def without_rule_a(patch):
    original = policy.kind_of

    def kind_of(equation, *about):
        if equation.primitive.name == "sub":
            return Kind.ARITHMETIC
        return original(equation, *about)

    patch.setattr(policy, "kind_of", kind_of)


def without_promotion(patch):
    widest, state_of_result = plan._widest, policy.state_of_result

    def of_result(kind, found):
        is_half = kind in policy.FOLLOWERS and State.HALF in found
        return State.HALF if is_half else state_of_result(kind, found)

    def of_loop(found):
        return State.HALF if State.HALF in found else widest(found)

    patch.setattr(policy, "state_of_result", of_result)
    patch.setattr(plan, "_widest", of_loop)


def with_any_gain(patch):
    original = Layers._layer

    def layer(layers, is_factor, large, part, result):
        is_gain = is_factor and layers.roles.of(part) == Role.PARAMETER
        found = original(layers, is_factor, large, part, result)
        return found or (Layer(large, part) if is_gain else None)

    patch.setattr(Layers, "_layer", layer)


def with_any_statistic(patch):
    def is_own(layers, x, other, degree):
        return layers._made_of(other)[:2] == (layers._made_of(x).array, True)

    patch.setattr(Layers, "_is_own", is_own)


def instead(owner, name, value):
    """Returns a change of the package: another value of a name."""
    return lambda patch: patch.setattr(owner, name, value)


NOBODY = collections.defaultdict(type(None))
without_readers = instead(Planner, "_find_readers", lambda *about: NOBODY.copy())
without_range = instead(policy, "state_of_constant", lambda *about: State.SOFT)
without_factors = instead(policy, "is_moderate", lambda factor: True)
without_squares = instead(policy, "_is_square", lambda equation: False)
without_solvers = instead(ends.Walk, "ends_by_floats", lambda *about: False)
without_products = instead(
    primitives, "table_name", lambda primitive, *about: primitive.name
)
without_second_gains = instead(Layers, "_note_gain", lambda *about: None)
without_sums = instead(policy, "is_sum", lambda equation: False)
cast_in_calls = instead(plan.Plan, "read_wide", frozenset())


def cast_inside(patch):
    patch.setattr(plan, "CAST_BEFORE", [])
    cast_in_calls(patch)


MUTATIONS = {
    "squares": (move("square", Kind.ARITHMETIC), square, 300),
    "squares of products": (without_squares, square_by_product, 300),
    "exp": (move("exp", Kind.ARITHMETIC), exponential, 5),
    "sums": (move("reduce_sum", Kind.ARITHMETIC), long_sum, 1),
    "bounded": (move("logistic", Kind.ARITHMETIC), gates, 6),
    "lengths": (without_sums, unit_length, 1),
    "small weights": (without_sums, small_weights, 1),
    "large gains": (with_any_gain, large_gain, 1),
    "second gains": (without_second_gains, two_gains, 1),
    "statistics": (with_any_statistic, cubes, 40),
    "solvers": (without_solvers, fixed_point, 1),
    "short averages": (without_factors, short_average, 1),
    "tiny constants": (without_range, tiny_constant, 1),
    "large factors": (without_factors, large_factor, 100),
    "positions in loops": (without_promotion, forecast, 1),
    "positions in steps": (without_promotion, forecast_by_steps, 1),
    "positions in an image": (without_promotion, refined, 1),
    "look ahead": (without_readers, mean_of_products, 100),
    "rule A": (without_rule_a, near_difference, 1),
    "rule T, jit": (without_readers, hidden_variance, 1),
    "ode": (without_promotion, ode, 1),
    "moving average": (without_promotion, moving_average, 1),
    "best path": (without_promotion, best_path, 1),
    "sums from zero": (without_promotion, sum_in_a_loop, 1),
    "products from one": (without_promotion, running_product, 100),
    "what fills": (without_range, filled, 1),
    "positions": (without_products, positions, 1),
    "opposite gradients": (without_readers, confident, 1),
    "opposite gradients of calls": (cast_inside, confident_by_parts, 1),
    "opposite gradients of casts": (cast_in_calls, confident_by_mixed_parts, 1),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize(("mutate", "f", "size"), MUTATIONS.values(), ids=MUTATIONS)
def test_each_rule_is_needed(mutate, f, size, monkeypatch):
    scale = 1.0  # A scale mends none of them.
    right = error(f, P, size * X, scale=scale)
    mutate(monkeypatch)
    wrong = error(f, P, size * X, scale=scale)
    assert right < 0.01
    assert wrong > 3 * right


def test_a_norm_computes_in_float32():
    def f(p, x):
        h = 0.03 * (0.03 * (x @ p["w"]))
        factor = lax.rsqrt(h.var(-1, keepdims=True) + 1e-12) * (100 + p["b"])
        return read(p, (h - h.mean(-1, keepdims=True)) * factor)  # a factor of 1e5

    assert error(f, P, X, scale=2.0**-6) < 0.01


def test_gradients_of_biases_are_sums_in_float32():
    def f(b, x, w):
        return jnp.mean((x @ w + b)[:, 0] * 1.0)

    x = jnp.ones((4096, 2))
    assert error(f, {"b": jnp.ones(2)}["b"], x, jnp.eye(2), scale=1.0) < 1e-3
