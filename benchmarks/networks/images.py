"""Networks of images (batch, channels, height, width)."""

from benchmarks.networks.draws import (
    between,
    conv,
    integers,
    linear,
    network,
    norm,
    normal,
    shifted,
    sized,
)

X, LABELS = normal(8, 8, 12, 12), integers(8, 8)
INPUT = "input", 1e-3, 1, 1e3
MEAN = "mean of the norm's input", 0, 500, 1000


@network(
    "convnet",
    {"first": conv(8, 16), "second": conv(16, 16), "out": linear(16, 8)},
    (sized(normal(64, 8, 12, 12)), integers(8, 64)),
    *INPUT,
)
def convnet(nn, p, x, y):
    x = nn.max_pool(nn.relu(nn.conv(p["first"], x)))
    x = nn.relu(nn.conv(p["second"], x, dilation=2))
    return nn.cross_entropy(nn.linear(p["out"], x.mean((2, 3))), y)


@network(
    "depthwise convolution",
    {"depth": conv(1, 8), "point": conv(8, 8, 1)},
    (sized(X), X),
    *INPUT,
)
def depthwise(nn, p, x, y):
    x = nn.relu(nn.conv(p["depth"], x, groups=8))
    return nn.squared_error(nn.conv(p["point"], x), y)


@network(
    "transposed convolution",
    {"up": {"w": normal(8, 16, 2, 2, std=0.3), "b": normal(16)}, "out": conv(16, 4)},
    (sized(X), normal(8, 4, 24, 24)),
    *INPUT,
)
def transposed(nn, p, x, y):
    x = nn.relu(nn.conv_transpose(p["up"], x))
    return nn.squared_error(nn.conv(p["out"], x), y)


@network(
    "squeeze and excitation",
    {"in": conv(8, 8), "squeeze": linear(8, 4), "excite": linear(4, 8)}
    | {"out": conv(8, 8)},
    (sized(X), X),
    *INPUT,
)
def squeeze(nn, p, x, y):
    x = nn.conv(p["in"], x)
    gain = nn.relu(nn.linear(p["squeeze"], x.mean((2, 3))))
    gain = nn.sigmoid(nn.linear(p["excite"], gain))
    return nn.squared_error(nn.conv(p["out"], x * gain[:, :, None, None]), y)


NORMED = {"in": shifted(conv(8, 16)), "norm": norm(16), "out": conv(16, 8)}
network("BatchNorm", NORMED, (X, X), *MEAN)(between("conv", "batch_norm"))
network("GroupNorm", NORMED, (X, X), *MEAN)(between("conv", "group_norm"))


@network(
    "ResNet block",
    {"a": conv(8, 16), "b": conv(16, 16), "shortcut": conv(8, 16, 1)}
    | {"norm1": norm(16), "norm2": norm(16), "out": linear(16, 8)},
    (sized(X), LABELS),
    *INPUT,
)
def resnet(nn, p, x, y):
    z = nn.relu(nn.batch_norm(p["norm1"], nn.conv(p["a"], x, stride=2)))
    z = nn.batch_norm(p["norm2"], nn.conv(p["b"], z))
    x = nn.relu(z + nn.conv(p["shortcut"], x, stride=2))
    return nn.cross_entropy(nn.linear(p["out"], x.mean((2, 3))), y)


@network(
    "U-Net block",
    {
        "in": {"conv": conv(8, 8), "norm": norm(8)},
        "down": {"conv": conv(8, 16), "norm": norm(16)},
        "middle": {"conv": conv(16, 16), "norm": norm(16)},
        "up": {"conv": conv(24, 8), "norm": norm(8)},
        "out": conv(8, 8),
    },
    (sized(X), X),
    *INPUT,
)
def unet(nn, p, x, y):
    def unit(q, x, stride=1):
        return nn.silu(nn.group_norm(q["norm"], nn.conv(q["conv"], x, stride=stride)))

    first = unit(p["in"], x)
    second = unit(p["middle"], unit(p["down"], first, 2))
    x = nn.concatenate([nn.upsample(second), first], 1)
    return nn.squared_error(nn.conv(p["out"], unit(p["up"], x)), y)


@network(
    "patches and positions",
    {"patch": linear(128, 16), "positions": normal(9, 16), "out": linear(16, 8)}
    | {name: linear(16, 16) for name in "qkv"},
    (sized(X), LABELS),
    *("input", 1e-3, 1, 10),
)
def patches(nn, p, x, y):
    x = nn.einsum("ncxayb->nxycab", x.reshape(8, 8, 3, 4, 3, 4)).reshape(8, 9, 128)
    x = nn.linear(p["patch"], x) + p["positions"]
    x = x + nn.attention(*(nn.linear(p[name], x) for name in "qkv"))
    return nn.cross_entropy(nn.linear(p["out"], x.mean(1)), y)
