"""The layers of the networks, as PyTorch has them. `in_jax` has the same names."""

import functools

import torch
import torch.nn.functional as F
from torch import (
    concatenate as concatenate,
    cos as cos,
    einsum as einsum,
    exp as exp,
    log as log,
    sigmoid as sigmoid,
    sin as sin,
    tanh as tanh,
    zeros_like as zeros_like,
)

attention = F.scaled_dot_product_attention
binary_cross_entropy = F.binary_cross_entropy_with_logits
cross_entropy, squared_error = F.cross_entropy, F.mse_loss
relu, silu, softplus = F.relu, F.silu, F.softplus
gelu = functools.partial(F.gelu, approximate="tanh")
cosine_similarity, log_softmax, logsumexp, normalize, softmax = (
    functools.partial(f, dim=-1)
    for f in (
        F.cosine_similarity,
        F.log_softmax,
        torch.logsumexp,
        F.normalize,
        F.softmax,
    )
)
max_pool = functools.partial(F.max_pool2d, kernel_size=2)
upsample = functools.partial(F.interpolate, scale_factor=2)


def dot(x, y):
    # On a CPU torch.dot does not promote, and refuses two dtypes.
    return torch.dot(x.float(), y.float())


def linear(p, x):
    if "b" not in p:
        return x @ p["w"]
    # `nn.Linear` without a view of the weight: PyTorch casts a parameter once,
    # however often it is used, but a view each time.
    y = torch.addmm(p["b"], x.reshape(-1, x.shape[-1]), p["w"])
    return y.reshape(*x.shape[:-1], -1)


def bilinear(p, x, y):
    return F.bilinear(x, y, p["w"], p["b"])


def embedding(table, indices):
    return F.embedding(indices, table)


def prelu(slope, x):
    return F.prelu(x, slope)


def conv(p, x, stride=1, groups=1, dilation=1):
    around = dilation * (p["w"].shape[-1] // 2)
    return F.conv2d(x, p["w"], p["b"], stride, around, dilation, groups)


def conv_transpose(p, x):
    """Doubles the sides of images, by kernels of 2 x 2."""
    return F.conv_transpose2d(x, p["w"], p["b"], stride=2)


def layer_norm(p, x):
    return F.layer_norm(x, x.shape[-1:], p["gain"], p["b"])


def rms_norm(p, x):
    return F.rms_norm(x, x.shape[-1:], p["gain"], eps=1e-5)


def batch_norm(p, x):
    return F.batch_norm(x, None, None, p["gain"], p["b"], training=True)


def group_norm(p, x):
    """Returns the norm of images in four groups of channels."""
    return F.group_norm(x, 4, p["gain"], p["b"])


def _cell(cell, p, x, state):
    # PyTorch stores the weights of a layer transposed.
    weights = p["x"]["w"].T, p["h"]["w"].T, p["x"]["b"], p["h"]["b"]
    return cell(x, state, *weights)


lstm_cell = functools.partial(_cell, torch.lstm_cell)
gru_cell = functools.partial(_cell, torch.gru_cell)
