"""An array of the program and half precision make float32: accuracy of the promotion.

Each program is compared with float32, and with float16 by hand: there the operands of
products are cast, and all else is float32.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from casting import normal
from jax import lax

from optax_lossscale import autocast

SCALE = 2.0**10
HALF = jnp.float16


def by_hand(x, w):
    return jnp.matmul(x.astype(HALF), w.astype(HALF), preferred_element_type="float32")


def net(w, x, matmul):
    return matmul(jnp.tanh(matmul(x, w["a"])), w["b"])


def normed(x):
    x = x - x.mean(-1, keepdims=True)
    return x / jnp.sqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-5)


W = {"a": normal(8, 32, scale=8**-0.5), "b": normal(32, 8, scale=32**-0.5)}
KELVIN = 280 + 15 * normal(4, 8)


def rollout(n, w, u, matmul):
    start = u
    for _ in range(n):
        u = u + 0.1 * net(w, u / 300, matmul)
    return jnp.mean((u - start - 1) ** 2)


def steps(n, w, z, matmul):
    step = lambda z, _: (z + 0.01 * net(w, z, matmul), None)  # noqa: E731
    return jnp.mean(lax.scan(step, z, None, length=n)[0] ** 2)


def runge_kutta(w, z, matmul):
    for _ in range(16):
        half = z + 0.05 * net(w, z, matmul)
        z = z + 0.1 * net(w, half, matmul)
    return jnp.mean(z**2)


def coordinates(octaves, w, x, matmul):
    x = x + 0.02 * net(w, x, matmul)
    phases = x[:, None] * 2.0 ** jnp.arange(float(octaves))[:, None]
    features = jnp.concatenate([jnp.sin(phases), jnp.cos(phases)], -1)
    features = features.reshape(len(x), -1)
    return jnp.mean((matmul(features, features[:8].T) - 1) ** 2)


def times(w, x, matmul):
    """Time stamps times learned frequencies, plus what a network says."""
    phases = (100 + x[:, :1]) * w["a"][0] + w["a"][1] + net(w, x, matmul)[:, :1]
    return jnp.mean(matmul(jnp.sin(phases), w["b"]) ** 2)


def oscillation(w, x, matmul):
    u = 256 + 100 * jnp.sin(x)
    for _ in range(8):
        u = u + 0.1 * net(w, u / 256, matmul)
    return jnp.mean((u - 256 - 100 * jnp.sin(x) - 1) ** 2)


def offset_stream(w, h, matmul):
    for _ in range(3):
        h = h + net(w, normed(h), matmul)
    return jnp.mean(matmul(normed(h), w["a"]) ** 2) + 1e-3 * jnp.mean(h)


def low_rank(w, x, matmul):
    frozen = lax.stop_gradient(normal(8, 8))
    return jnp.mean(matmul(x, frozen + 0.1 * matmul(w["a"][:, :2], w["b"][:2])) ** 2)


def ensemble(w, u, matmul):
    start, noise = u[0], normal(12, 8)
    u = jnp.broadcast_to(start, noise.shape)
    for _ in range(8):
        u = u + 0.2 * net(w, u / 280 + 0.1 * noise, matmul)
    return jnp.mean((u - start - 1) ** 2)


def residual(begin, w, x, matmul):
    h = begin(w, x, matmul)
    for _ in range(3):
        h = h + net(w, normed(h), matmul)
    return jnp.mean(matmul(normed(h), w["a"]) ** 2)


def embedding(w, x, matmul):
    return w["a"].T[jnp.arange(16) % 5] + w["b"][:16]


def image(w, x, matmul):
    kernel = w["a"].reshape(8, 4, 8)[:, :3]
    if matmul is by_hand:
        x, kernel = x.astype(HALF), kernel.astype(HALF)
    x = x[None]
    h = lax.conv_general_dilated(
        x, kernel, (1,), "SAME", dimension_numbers=("NWC", "IWO", "NWC")
    )
    return h[0].astype(jnp.float32)


def indexed(w, data, matmul):
    rows = jnp.arange(4) % len(data)
    return rollout(16, w, data[rows], matmul)


def windows(w, series, matmul):
    cut = lambda i: lax.dynamic_slice(series, (i, 0), (2, 8))  # noqa: E731
    return rollout(16, w, jax.vmap(cut)(jnp.arange(3)), matmul)


def wave(w, x, matmul):
    u = start = jnp.cos(6 * x)
    u, _ = lax.scan(
        lambda u, _: (u + 0.001 * net(w, u, matmul), None), u, None, length=300
    )
    return jnp.mean((u - start - 0.1) ** 2)


def image_in_bytes(w, x, matmul):
    return rollout(16, w, x.astype(jnp.uint8).astype(jnp.float32), matmul)


def filled(w, x, matmul):
    u = jnp.full(x.shape, 125.0) * 2
    for _ in range(16):
        u = u + 0.1 * net(w, x + u / 250, matmul)
    return jnp.mean((u - 251) ** 2)


def in_units(w, x, matmul):
    """A network of normal numbers predicts in Pascal."""
    mean, size = 1e5 + w["b"][0], 5e4 + w["a"][:, 0]

    def step(x, _):
        return net(w, (x - mean) / size, matmul) * size + mean, None

    x, _ = lax.scan(step, 1e5 + 8e4 * x, length=4)
    return jnp.mean(((x - mean) / size - 1) ** 2)


def read_twice(w, x, matmul):
    mean, size = 40 + w["b"][0], 2 + w["a"][:, 0]
    u = net(w, x, matmul) * size + mean
    v = u + net(w, (u - mean) / size, matmul)
    return jnp.mean((u - mean - 1) ** 2) + jnp.mean((v - mean - 1) ** 2)


def anchors(w, x, matmul):
    start = 300 * jnp.sin(normal(4, 8)) ** 2
    boxes = start + net(w, x, matmul)[:, None]
    boxes = boxes + 0.1 * net(w, boxes / 300, matmul)
    return jnp.mean((boxes - start - 1) ** 2)


def compiled_step(w, start, matmul):
    euler = jax.jit(lambda x, f: x + 0.1 * f)
    x = jnp.broadcast_to(start[0], (12, 8))
    for _ in range(12):
        x = euler(x, net(w, x / 280 + 0.1 * normal(12, 8), matmul))
    return jnp.mean((x - start[0] - 1) ** 2)


def norm_with_an_offset(w, x, matmul):
    h = matmul(x, w["a"]) + 30.0 * jnp.ones(32)
    h = (h - h.mean(0)) * lax.rsqrt(h.var(0) + 1e-5) * (1 + w["b"][:, 0]) + w["b"][:, 1]
    return jnp.mean((matmul(jax.nn.relu(h), w["b"]) - 1) ** 2)


def shared_biases(w, x, matmul):
    for _ in range(4):
        h = jax.nn.relu(matmul(normed(x), w["a"]) + w["b"][:, 0])
        x = x + matmul(h, w["b"]) + w["a"][:, 0]
    return jnp.mean(x**2)


X = normal(16, 8)
CASES = {
    "12 steps near 280": (functools.partial(rollout, 12), KELVIN),
    "30 steps near 280": (functools.partial(rollout, 30), KELVIN),
    "30 small steps": (functools.partial(rollout, 30), X),
    "a scan of 2 steps": (functools.partial(steps, 2), X),
    "a scan of 100 steps": (functools.partial(steps, 100), X),
    "a scan of 127 steps": (functools.partial(steps, 127), X),
    "a scan of 128 steps": (functools.partial(steps, 128), X),
    "a scan of 1,000 steps": (functools.partial(steps, 1000), X / 4),
    "Runge-Kutta": (runge_kutta, X),
    "coordinates to 2^6": (functools.partial(coordinates, 6), X),
    "coordinates to 2^9": (functools.partial(coordinates, 9), X),
    "times and frequencies": (times, X),
    "an oscillation with an offset": (oscillation, X),
    "a stream with an offset": (offset_stream, 300 + X),
    "a low-rank update": (low_rank, X),
    "an ensemble from one state": (ensemble, KELVIN),
    "a residual stream from an embedding": (functools.partial(residual, embedding), X),
    "one from a convolution": (functools.partial(residual, image), X),
    "one from an input": (functools.partial(residual, lambda w, x, _: x), X),
    "a batch that is indexed": (indexed, KELVIN),
    "windows of a series": (windows, KELVIN),
    "a wave as the start": (wave, X),
    "an image in bytes": (image_in_bytes, KELVIN - 100),
    "a filled array as the start": (filled, X),
    "a rollout in physical units": (in_units, X),
    "a prediction in physical units, read twice": (read_twice, X),
    "anchors": (anchors, X),
    "an ensemble in a compiled step": (compiled_step, KELVIN),
    "a norm behind an offset": (norm_with_an_offset, X),
    "layers that share their biases": (shared_biases, X),
    "one from a product": (
        functools.partial(residual, lambda w, x, matmul: matmul(x, w["a"])[:, :8]), X,
    ),
}  # fmt: skip
OFTEN = ("12 steps near 280", "a scan of 127 steps", "times and frequencies")


def error(wanted, found):
    pairs = zip(jax.tree.leaves(wanted), jax.tree.leaves(found), strict=True)
    norm = np.linalg.norm
    return max(norm(np.float64(y) - x) / norm(np.float64(x)) for x, y in pairs)


@pytest.mark.parametrize(
    "name",
    [x if x in OFTEN else pytest.param(x, marks=pytest.mark.exhaustive) for x in CASES],
)
def test_gradients_are_as_near_as_by_hand(name):
    f, x = CASES[name]

    def run(f):
        scaled = jax.jit(jax.grad(lambda *args: SCALE * f(*args)))
        return jax.tree.map(lambda g: g / SCALE, scaled(W, x))

    plain = functools.partial(f, matmul=jnp.matmul)
    wanted, hand = run(plain), run(functools.partial(f, matmul=by_hand))
    assert error(wanted, run(autocast(plain))) < max(2 * error(wanted, hand), 0.002)
