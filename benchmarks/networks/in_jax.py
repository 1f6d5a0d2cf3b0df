"""The layers of the networks, as formulas in JAX. `in_torch` has the same names."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.nn import (
    gelu as gelu,
    log_softmax as log_softmax,
    relu as relu,
    sigmoid as sigmoid,
    silu as silu,
    softmax as softmax,
    softplus as softplus,
)
from jax.numpy import (
    concatenate as concatenate,
    cos as cos,
    dot as dot,
    einsum as einsum,
    exp as exp,
    log as log,
    sin as sin,
    tanh as tanh,
    zeros_like as zeros_like,
)
from jax.numpy.linalg import norm
from optax.losses import (
    sigmoid_binary_cross_entropy,
    softmax_cross_entropy_with_integer_labels,
)

logsumexp = functools.partial(jax.nn.logsumexp, axis=-1)


def linear(p, x):
    return x @ p["w"] + p["b"] if "b" in p else x @ p["w"]


def bilinear(p, x, y):
    return jnp.einsum("bi,oij,bj->bo", x, p["w"], y) + p["b"]


def embedding(table, indices):
    return table[indices]


def prelu(slope, x):
    return jnp.where(x >= 0, x, slope * x)


def _of_channels(array, x):
    return array.reshape(-1, *[1] * (x.ndim - 2))


def conv(p, x, stride=1, groups=1, dilation=1):
    around = dilation * (p["w"].shape[-1] // 2)
    x = lax.conv_general_dilated(
        *(x, p["w"], (stride, stride), [(around, around)] * 2),
        rhs_dilation=(dilation, dilation),
        feature_group_count=groups,
    )
    return x + _of_channels(p["b"], x)


def conv_transpose(p, x):
    """Doubles the sides of images, by kernels of 2 x 2."""
    x = lax.conv_transpose(
        *(x, p["w"], (2, 2), "VALID"),
        dimension_numbers=("NCHW", "OIHW", "NCHW"),
        transpose_kernel=True,
    )
    return x + _of_channels(p["b"], x)


def max_pool(x):
    window = (1, 1, 2, 2)
    return lax.reduce_window(x, -jnp.inf, lax.max, window, window, "VALID")


def upsample(x):
    return x.repeat(2, 2).repeat(2, 3)


def _normalized(x, axes):
    mean, variance = (f(x, axes, keepdims=True) for f in (jnp.mean, jnp.var))
    return (x - mean) * lax.rsqrt(variance + 1e-5)


def layer_norm(p, x):
    return _normalized(x, -1) * p["gain"] + p["b"]


def rms_norm(p, x):
    mean = jnp.mean(x**2, -1, keepdims=True)
    return x * lax.rsqrt(mean + 1e-5) * p["gain"]


def _norm_of_images(p, x, shape, axes):
    normalized = _normalized(x.reshape(shape), axes).reshape(x.shape)
    return normalized * _of_channels(p["gain"], x) + _of_channels(p["b"], x)


def batch_norm(p, x):
    return _norm_of_images(p, x, x.shape, (0, *range(2, x.ndim)))


def group_norm(p, x):
    """Returns the norm of images in four groups of channels."""
    return _norm_of_images(p, x, (len(x), 4, -1), -1)


def attention(q, k, v, is_causal=False):
    """Returns attention of one head."""
    q, k, v = (x[:, :, None] for x in (q, k, v))
    return jax.nn.dot_product_attention(q, k, v, is_causal=is_causal)[:, :, 0]


def lstm_cell(p, x, state):
    h, c = state
    i, f, g, o = jnp.split(linear(p["x"], x) + linear(p["h"], h), 4, -1)
    c = sigmoid(f) * c + sigmoid(i) * jnp.tanh(g)
    return sigmoid(o) * jnp.tanh(c), c


def gru_cell(p, x, h):
    (r, z, n), (s, y, m) = (
        jnp.split(linear(p[name], a), 3, -1) for name, a in (("x", x), ("h", h))
    )
    z = sigmoid(z + y)
    return (1 - z) * jnp.tanh(n + sigmoid(r + s) * m) + z * h


def normalize(x):
    return x / norm(x, axis=-1, keepdims=True)


def cosine_similarity(x, y):
    return jnp.sum(x * y, -1) / (norm(x, axis=-1) * norm(y, axis=-1))


def squared_error(x, y):
    return jnp.mean((x - y) ** 2)


def cross_entropy(logits, labels):
    return jnp.mean(softmax_cross_entropy_with_integer_labels(logits, labels))


def binary_cross_entropy(logits, labels):
    return jnp.mean(sigmoid_binary_cross_entropy(logits, labels))
