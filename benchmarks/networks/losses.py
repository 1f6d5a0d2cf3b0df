"""Losses of a linear layer, or of a small network."""

import numpy as np

from benchmarks.networks.draws import (
    full,
    integers,
    linear,
    matrix,
    network,
    normal,
    sized,
)

X, Y = normal(128, 16), normal(128, 8)
ONE, TWO = linear(16, 8), {"in": linear(16, 16), "out": linear(16, 8)}
SUMMED = {"w": matrix(16, 16)}
TARGETS, LOGITS = ("targets", 1e-3, 1, 1e3), ("logits", 1, 30, 1e3)


def of(loss):
    return lambda nn, p, x, y: getattr(nn, loss)(nn.linear(p, x), y)


network("squared error", ONE, (X, sized(Y)), *TARGETS)(of("squared_error"))
network("cross entropy", ONE, (sized(X), integers(8, 128)), *LOGITS)(
    of("cross_entropy")
)
network(
    "binary cross entropy", ONE, (sized(X), normal(128, 8, mean=0.5, std=0.1)), *LOGITS
)(of("binary_cross_entropy"))


@network("log-sum-exp", ONE, (sized(X),), *LOGITS)
def log_sum_exp(nn, p, x):
    return nn.logsumexp(nn.linear(p, x)).mean()


@network("distillation", ONE, (sized(X), sized(Y)), *LOGITS)
def distillation(nn, p, x, teacher):
    wanted = nn.softmax(teacher / 4)
    return -(wanted * nn.log_softmax(nn.linear(p, x) / 4)).sum(-1).mean()


@network(
    "contrastive loss",
    {"x": ONE, "y": ONE, "scale": lambda random, size: np.log(size)},
    (X, X, lambda random, size: np.arange(128)),
    *("logits", 1, 14, 100),
)
def contrastive(nn, p, x, y, labels):
    x, y = (nn.normalize(nn.linear(p[name], z)) for name, z in (("x", x), ("y", y)))
    return nn.cross_entropy(nn.linear({"w": y.T}, x) * nn.exp(p["scale"]), labels)


@network("cosine similarity", ONE, (sized(X), Y), "input", 1e-3, 1, 1e3)
def cosine(nn, p, x, y):
    return 1 - nn.cosine_similarity(nn.linear(p, x), y).mean()


@network(
    "mixture of Gaussians",
    {"in": linear(16, 16)} | {x: linear(16, 8) for x in ("logits", "mean", "scale")},
    (X, sized(normal(128, 1))),
    *("targets", 1, 10, 100),
)
def mixture(nn, p, x, y):
    x = nn.tanh(nn.linear(p["in"], x))
    logits, mean, scale = (nn.linear(p[k], x) for k in ("logits", "mean", "scale"))
    z = (y - mean) / nn.exp(scale)
    return -nn.logsumexp(nn.log_softmax(logits) - z**2 / 2 - scale).mean()


@network(
    "Gaussian with a variance",
    {"mean": ONE, "variance": ONE},
    (X, sized(Y)),
    *("targets", 1, 10, 100),
)
def gaussian(nn, p, x, y):
    mean, log_variance = nn.linear(p["mean"], x), nn.linear(p["variance"], x)
    return (log_variance + (y - mean) ** 2 / nn.exp(log_variance)).mean()


@network(
    "VAE",
    {"in": linear(16, 32), "mean": linear(32, 4), "variance": linear(32, 4)}
    | {"z": linear(4, 32), "out": linear(32, 16)},
    (sized(X), normal(128, 4)),
    *("input", 1e-3, 0.1, 1),
)
def autoencoder(nn, p, x, noise):
    hidden = nn.relu(nn.linear(p["in"], x))
    mean, log_variance = nn.linear(p["mean"], hidden), nn.linear(p["variance"], hidden)
    z = mean + nn.exp(log_variance / 2) * noise
    found = nn.linear(p["out"], nn.relu(nn.linear(p["z"], z)))
    divergence = nn.exp(log_variance) + mean**2 - 1 - log_variance
    return nn.squared_error(found, x) + divergence.sum(-1).mean() / 2


@network(
    "policy gradient",
    TWO,
    (X, Y, normal(128, mean=-8), sized(normal(128))),
    *("advantages", 1e-3, 1, 1e3),
)
def policy(nn, p, x, action, old, advantage):
    mean = nn.linear(p["out"], nn.tanh(nn.linear(p["in"], x)))
    log_prob = -((action - mean) ** 2).sum(-1) / 2
    return -(nn.exp(log_prob - old) * advantage).mean()


@network(
    "sum of 1e5 terms",
    {"w": matrix(16, 100)},
    (sized(normal(1000, 16)),),
    *("terms", 1e-2, 1, 30),
)
def large_sum(nn, p, x):
    return (nn.linear(p, x) ** 2).sum() / 1e5


@network(
    "masked mean of 16384 tokens by dot",
    SUMMED,
    (sized(normal(2**14, 16)), full(1, 2**14)),
    *("logits", 1, 8, 30),
)
def masked_mean(nn, p, x, mask):
    return nn.dot(mask, nn.logsumexp(nn.linear(p, x))) / mask.sum()


@network(
    "dot of losses and weights",
    SUMMED,
    (normal(64, 16), sized(full(1, 64)), sized(full(1), -1)),
    *("weights", 1e-8, 1e-7, 1),
)
def small_weights(nn, p, x, weights, inverse):
    return nn.dot(weights, (nn.linear(p, x) ** 2).mean(-1)) * inverse


@network(
    "weighted sums by einsum",
    SUMMED,
    (sized(normal(8, 4096, 16)), full(2**-12, 8, 4096)),
    *("terms", 1, 30, 100),
)
def weighted_sums(nn, p, x, weights):
    return nn.einsum("bt,bt->b", weights, (nn.linear(p, x) ** 2).sum(-1)).mean()
