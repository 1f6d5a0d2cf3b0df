"""Networks of sequences (batch, time, channels)."""

from benchmarks.networks.draws import (
    between,
    full,
    integers,
    linear,
    network,
    norm,
    normal,
    shifted,
    sized,
)

X, Y, TOKENS = normal(16, 12, 16), normal(16, 8), integers(64, 16, 12)
INPUT = "input", 1e-3, 1, 1e3
MEAN = "mean of the norm's input", 0, 500, 1000
QKV = {name: linear(16, 16) for name in "qkv"}
HEAD = QKV | {"o": linear(16, 16)}
MLP = {"up": linear(16, 64), "down": linear(64, 16)}
NORMS = {"norm1": norm(16), "norm2": norm(16)}


NORMED = {"in": shifted(linear(16, 16)), "norm": norm(16), "out": linear(16, 16)}
network("LayerNorm", NORMED, (X, X), *MEAN)(between("linear", "layer_norm"))
GAIN = {"gain": norm(16)["gain"]}
network("RMSNorm", NORMED | {"norm": GAIN}, (X, X), *MEAN)(
    between("linear", "rms_norm")
)
NORMED = {"in": linear(16, 16), "norm": GAIN, "out": linear(16, 16)}
network("RMSNorm of any size", NORMED, (sized(X), X), *INPUT)(
    between("linear", "rms_norm")
)


def head(nn, p, x, y, is_causal=False):
    q, k, v = (nn.linear(p[name], z) for name, z in (("q", x), ("k", y), ("v", y)))
    return nn.linear(p["o"], nn.attention(q, k, v, is_causal=is_causal))


def mlp(nn, p, x):
    return nn.linear(p["down"], nn.gelu(nn.linear(p["up"], x)))


@network("attention", HEAD, (sized(X), X), "input", 1e-3, 1, 10)
def attention(nn, p, x, y):
    return nn.squared_error(head(nn, p, x, x), y)


@network("causal attention", HEAD, (sized(X), X), "input", 1e-3, 1, 10)
def causal(nn, p, x, y):
    return nn.squared_error(head(nn, p, x, x, is_causal=True), y)


@network(
    "relative positions",
    QKV | {"bias": sized(normal(12, 12))},
    (X, X),
    *("biases of scores", 1e-3, 1, 100),
)
def relative(nn, p, x, y):
    q, k, v = (nn.linear(p[name], x) for name in "qkv")
    scores = nn.einsum("bqd,bkd->bqk", q, k) / 4 + p["bias"]
    return nn.squared_error(nn.softmax(scores) @ v, y)


@network(
    "rotary positions",
    QKV,
    (X, X, sized(normal(12, 8))),
    *("angles", 1, 100, 1e4),
)
def rotary(nn, p, x, y, angles):
    def rotated(x):
        a, b = x[..., :8], x[..., 8:]
        cos, sin = nn.cos(angles), nn.sin(angles)
        return nn.concatenate([a * cos - b * sin, a * sin + b * cos], -1)

    q, k, v = (nn.linear(p[name], x) for name in "qkv")
    return nn.squared_error(nn.attention(rotated(q), rotated(k), v), y)


@network("transformer encoder", HEAD | MLP | NORMS, (sized(X), X), *INPUT)
def encoder(nn, p, x, y):
    z = nn.layer_norm(p["norm1"], x)
    x = x + head(nn, p, z, z)
    x = x + mlp(nn, p, nn.layer_norm(p["norm2"], x))
    return nn.squared_error(x, y)


@network(
    "norms after the layers", HEAD | MLP | NORMS, (sized(X), X), "input", 1e-3, 1, 10
)
def post_norm(nn, p, x, y):
    x = nn.layer_norm(p["norm1"], x + head(nn, p, x, x))
    x = nn.layer_norm(p["norm2"], x + mlp(nn, p, x))
    return nn.squared_error(x, y)


@network(
    "transformer decoder",
    MLP | {"self": HEAD, "cross": HEAD} | {f"norm{i}": GAIN for i in (1, 2, 3)},
    (sized(X), X, X),
    *INPUT,
)
def decoder(nn, p, x, y, memory):
    z = nn.rms_norm(p["norm1"], x)
    x = x + head(nn, p["self"], z, z, is_causal=True)
    x = x + head(nn, p["cross"], nn.rms_norm(p["norm2"], x), memory)
    x = x + mlp(nn, p, nn.rms_norm(p["norm3"], x))
    return nn.squared_error(x, y)


@network(
    "language model",
    HEAD | MLP | NORMS | {"tokens": sized(normal(64, 16)), "positions": normal(12, 16)},
    (TOKENS, integers(64, 192)),
    *("embeddings", 1e-3, 1, 30),
)
def language_model(nn, p, tokens, y):
    x = nn.embedding(p["tokens"], tokens) + p["positions"]
    z = nn.layer_norm(p["norm1"], x)
    x = x + head(nn, p, z, z, is_causal=True)
    x = x + mlp(nn, p, nn.layer_norm(p["norm2"], x))
    return nn.cross_entropy(nn.linear({"w": p["tokens"].T}, x).reshape(192, 64), y)


@network(
    "embedding",
    {"tokens": sized(normal(64, 16)), "out": linear(16, 8)},
    (TOKENS, integers(8, 16)),
    *("embeddings", 1e-6, 1, 1e3),
)
def embedding(nn, p, tokens, y):
    x = nn.embedding(p["tokens"], tokens).mean(1)
    return nn.cross_entropy(nn.linear(p["out"], x), y)


def cell(gates):
    return {
        "x": linear(16, 16 * gates),
        "h": linear(16, 16 * gates),
        "o": linear(16, 8),
    }


@network("unrolled LSTM", cell(4), (sized(X), Y), "input", 1e-3, 1, 100)
def lstm(nn, p, x, y):
    state = nn.zeros_like(x[:, 0]), nn.zeros_like(x[:, 0])
    for t in range(12):
        state = nn.lstm_cell(p, x[:, t], state)
    return nn.squared_error(nn.linear(p["o"], state[0]), y)


@network("unrolled GRU", cell(3), (sized(X), Y), "input", 1e-3, 1, 100)
def gru(nn, p, x, y):
    h = nn.zeros_like(x[:, 0])
    for t in range(12):
        h = nn.gru_cell(p, x[:, t], h)
    return nn.squared_error(nn.linear(p["o"], h), y)


@network(
    "unrolled average",
    {"in": linear(16, 16), "a": normal(16, mean=3)},
    (sized(normal(16, 40, 16)), normal(16, 16)),
    *INPUT,
)
def average(nn, p, x, y):
    h, a = nn.zeros_like(x[:, 0]), nn.sigmoid(p["a"])
    for t in range(40):
        h = a * h + (1 - a) * nn.linear(p["in"], x[:, t])
    return nn.squared_error(h, y)


@network(
    "unrolled state space",
    {"in": linear(16, 16), "step": linear(16, 16), "a": normal(16), "o": linear(16, 8)},
    (sized(X), Y),
    *INPUT,
)
def state_space(nn, p, x, y):
    h, step = nn.zeros_like(x[:, 0]), nn.softplus(nn.linear(p["step"], x))
    for t in range(12):
        h = nn.exp(-step[:, t] * nn.exp(p["a"])) * h + nn.linear(p["in"], x[:, t])
    return nn.squared_error(nn.linear(p["o"], h), y)


@network(
    "steps of Euler",
    {"in": linear(16, 32), "out": linear(32, 16)},
    (X, X, sized(full(1))),
    *("step", 1e-3, 0.03, 1),
)
def euler(nn, p, x, y, step):
    for _ in range(20):
        x = x + step * nn.linear(p["out"], nn.tanh(nn.linear(p["in"], x)))
    return nn.squared_error(x, y)
