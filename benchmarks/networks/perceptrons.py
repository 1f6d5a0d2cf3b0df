"""Networks of linear layers."""

from benchmarks.networks.draws import full, linear, matrix, network, normal, sized

X, Y = normal(128, 16), normal(128, 8)
LAYERS = {"hidden": [linear(16, 32), linear(32, 32)], "out": linear(32, 8)}
TWO = {"in": linear(16, 16), "out": linear(16, 16)}
INPUT = "input", 1e-3, 1, 1e3


def perceptron(activation):
    def loss(nn, p, x, y):
        for q in p["hidden"]:
            x = getattr(nn, activation)(nn.linear(q, x))
        return nn.squared_error(nn.linear(p["out"], x), y)

    return loss


network("ReLU MLP", LAYERS, (sized(X), Y), *INPUT)(perceptron("relu"))
network("GELU MLP", LAYERS, (sized(X), Y), *INPUT)(perceptron("gelu"))
network("tanh MLP", LAYERS, (sized(X), Y), *INPUT)(perceptron("tanh"))
# Larger weights, as ReLU halves the squares.
DEEP = [{"w": normal(16, 16, std=(2 / 16) ** 0.5), "b": normal(16, std=0.1)}] * 30
network(
    "MLP of 30 layers",
    LAYERS | {"hidden": DEEP, "out": linear(16, 8)},
    (sized(X), Y),
    *("input", 1, 30, 1e3),
)(perceptron("relu"))


@network("PReLU MLP", LAYERS | {"slopes": [full(0.25, 1)] * 2}, (sized(X), Y), *INPUT)
def prelu(nn, p, x, y):
    for q, slope in zip(p["hidden"], p["slopes"], strict=True):
        x = nn.prelu(slope, nn.linear(q, x))
    return nn.squared_error(nn.linear(p["out"], x), y)


@network(
    "residual MLP",
    {"hidden": [linear(16, 16)] * 4, "out": linear(16, 8)},
    (sized(X), Y),
    *INPUT,
)
def residual(nn, p, x, y):
    for q in p["hidden"]:
        x = x + nn.linear(q, nn.relu(x))
    return nn.squared_error(nn.linear(p["out"], x), y)


# As diffusion models keep the size of their streams.
@network(
    "residual MLP divided by sqrt(2)",
    {"in": linear(16, 16), "hidden": [linear(16, 16)] * 16, "out": linear(16, 8)},
    (sized(X), Y),
    *INPUT,
)
def divided(nn, p, x, y):
    x = nn.linear(p["in"], x)
    for q in p["hidden"]:
        x = (x + nn.linear(q, nn.relu(x))) / 2**0.5
    return nn.squared_error(nn.linear(p["out"], x), y)


@network(
    "SwiGLU",
    {"gate": linear(16, 64), "up": linear(16, 64), "out": linear(64, 8)},
    (sized(X), Y),
    *("input", 1e-3, 1, 30),
)
def swiglu(nn, p, x, y):
    x = nn.silu(nn.linear(p["gate"], x)) * nn.linear(p["up"], x)
    return nn.squared_error(nn.linear(p["out"], x), y)


BLOCK = {"up": linear(16, 64), "down": linear(64, 16), "scale": sized(full(1, 16))}


@network(
    "LayerScale",
    {"blocks": [BLOCK] * 2, "out": linear(16, 8)},
    (X, Y),
    *("gains of the layers", 1e-6, 1e-4, 1),
)
def layer_scale(nn, p, x, y):
    for q in p["blocks"]:
        branch = nn.linear(q["down"], nn.gelu(nn.linear(q["up"], x)))
        x = x + branch * q["scale"]
    return nn.squared_error(nn.linear(p["out"], x), y)


# A weather model.
@network(
    "increments times their size",
    TWO | {"std": sized(full(1, 16))},
    (sized(X), X, sized(full(1), -1)),
    *("state", 1e-8, 1, 1e5),
)
def increments(nn, p, x, y, inverse):
    def step(x):
        hidden = nn.tanh(nn.linear(p["in"], x * inverse))
        return nn.linear(p["out"], hidden) * p["std"]

    return nn.squared_error(step(x + step(x)) * inverse, y)


@network(
    "gain that two readers read",
    TWO | {"gain": sized(full(1, 16)), "inverse": sized(full(1, 16), -1)},
    (X, sized(full(1), -2)),
    *("gain", 1e-8, 1, 1e5),
)
def two_readers(nn, p, x, penalty):
    u = nn.linear(p["in"], x) * p["gain"]
    hidden = nn.tanh(nn.linear(p["out"], u * p["inverse"]))
    return nn.squared_error(hidden, x) + penalty * (u * u).mean()


@network(
    "chain of gains",
    TWO
    | {"a": sized(full(1, 16)), "b": sized(full(1, 16)), "c": sized(full(1, 16), -2)},
    (X, X),
    *("gains", 1e-4, 1, 300),
)
def chain_of_gains(nn, p, x, y):
    u = nn.linear(p["in"], x) * p["a"] * p["b"]
    return nn.squared_error(nn.tanh(nn.linear(p["out"], u * p["c"])), y)


@network(
    "FiLM",
    {"in": linear(16, 16), "gain": linear(16, 16), "shift": linear(16, 16)}
    | {"out": linear(16, 8)},
    (X, Y, sized(X)),
    *("condition", 1e-3, 1, 1e3),
)
def film(nn, p, x, y, condition):
    x = nn.linear(p["in"], x)
    x = x * (1 + nn.linear(p["gain"], condition)) + nn.linear(p["shift"], condition)
    return nn.squared_error(nn.linear(p["out"], nn.relu(x)), y)


@network(
    "LoRA",
    {"frozen": linear(16, 16), "a": linear(16, 4)}
    | {"b": {"w": sized(matrix(4, 16)), "b": sized(normal(16))}},
    (X, X),
    *("second factor", 1e-6, 1e-3, 1),
)
def lora(nn, p, x, y):
    x = nn.linear(p["frozen"], x) + nn.linear(p["b"], nn.linear(p["a"], x))
    return nn.squared_error(nn.tanh(x), y)


@network(
    "weight norm",
    {"v": sized(matrix(16, 16)), "gain": full(1, 16), "b": normal(16)},
    (X, X),
    *("weights before the norm", 1e-6, 1, 1e3),
)
def weight_norm(nn, p, x, y):
    w = p["gain"] * p["v"] / (p["v"] ** 2).sum(0) ** 0.5
    return nn.squared_error(nn.tanh(nn.linear({"w": w, "b": p["b"]}, x)), y)


@network(
    "bilinear",
    {"w": normal(8, 16, 8, std=1 / 11), "b": normal(8)},
    (sized(X), Y, sized(Y)),
    *("input and target", 1e-3, 1, 1e3),
)
def bilinear(nn, p, x, y, target):
    return nn.squared_error(nn.bilinear(p, x, y), target)


@network(
    "mixture of experts",
    {"router": linear(16, 4), "up": matrix(4, 16, 32), "down": matrix(4, 32, 8)},
    (sized(X), Y),
    *INPUT,
)
def mixture_of_experts(nn, p, x, y):
    gates = nn.softmax(nn.linear(p["router"], x))
    hidden = nn.relu(nn.einsum("bi,eih->ebh", x, p["up"]))
    experts = nn.einsum("ebh,eho->ebo", hidden, p["down"])
    return nn.squared_error(nn.einsum("be,ebo->bo", gates, experts), y)
