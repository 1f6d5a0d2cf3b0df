"""Autocast against float16 by hand: what a compiled training step moves and needs.

`python -m benchmarks.by_hand` compiles steps of twelve models for an H100, which need
not be present (`pip install 'jax[cuda12]'`), and writes `results/by_hand.json` and
`results/by_hand.md`. Each model is written once, with casts by hand: to float16 before
products, back to float32 in norms, softmax and losses. In float32 these casts do
nothing, and that function is what `autocast` gets.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import SingleDeviceSharding

from benchmarks import report
from benchmarks.compiled import H100, TPU, describe, device, place
from benchmarks.errors import differences, gradients
from benchmarks.systems import lower, static
from optax_lossscale import autocast

RESULTS = report.RESULTS / "by_hand.json"
PAGE = report.RESULTS / "by_hand.md"
SCALE = 2.0**12
WAYS = "by hand", "autocast", "float32"
NUMBERS = "bytes", "temp_bytes"
STREAM_DTYPES = {H100: "float16", TPU: "bfloat16"}
# Of each, whether the model casts its residual stream.
STREAMS = ("by hand", False), ("autocast", False), ("autocast", True)
# A model: the shapes of parameters and batch, and the loss of a dtype.
Model = tuple[Any, Any, Callable[[Any], Callable[..., jax.Array]]]


def of(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    """Returns the shape of an array."""
    return jax.ShapeDtypeStruct(shape, dtype)


def dense(p: Any, x: jax.Array, dtype: Any) -> jax.Array:
    """Returns x @ w + b in a dtype."""
    y = x.astype(dtype) @ p["w"].astype(dtype)
    return y + p["b"].astype(dtype) if "b" in p else y


def layer(m: int, n: int) -> Any:
    """Returns the shapes of a dense layer."""
    return {"w": of(m, n), "b": of(n)}


def normed(p: Any, x: jax.Array, axes: Any, dtype: Any) -> jax.Array:
    """Returns a norm, computed in float32."""
    x = x.astype(jnp.float32)
    size = x.var(axes, keepdims=True)
    x = (x - x.mean(axes, keepdims=True)) * lax.rsqrt(size + 1e-5)
    return (x * p["gain"] + p["bias"]).astype(dtype)


def norm(n: int) -> Any:
    """Returns the shapes of a norm."""
    return {"gain": of(n), "bias": of(n)}


def conv(w: jax.Array, x: jax.Array, stride: int, dtype: Any) -> jax.Array:
    """Returns a convolution in a dtype."""
    about = {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}
    strides = (stride, stride)
    x, w = x.astype(dtype), w.astype(dtype)
    return lax.conv_general_dilated(x, w, strides, "SAME", **about)


def cross_entropy(logits: jax.Array, y: jax.Array) -> jax.Array:
    """Returns the loss of logits, in float32."""
    logits = logits.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def attention(p: Any, x: jax.Array, y: jax.Array, heads: int, bias: Any, dtype: Any):
    """Returns attention of x to y; `bias` is added to the scores."""
    split = lambda z: z.reshape(*z.shape[:2], heads, -1)  # noqa: E731
    q, k, v = (split(dense(p[n], z, dtype)) for n, z in (("q", x), ("k", y), ("v", y)))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32)
    weights = jax.nn.softmax(scores / q.shape[-1] ** 0.5 + bias).astype(dtype)
    return dense(
        p["o"], jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape), dtype
    )


def heads_of(n: int) -> Any:
    """Returns the shapes of attention."""
    return {name: layer(n, n) for name in "qkvo"}


def block(
    p: Any,
    h: jax.Array,
    bias: Any,
    dtype: Any,
    heads: int = 8,
    stream: Any = None,
) -> jax.Array:
    """Returns a block of a transformer, which casts its stream if it has a dtype."""
    x = normed(p["norm1"], h, -1, dtype)
    h = h + attention(p["attention"], x, x, heads, bias, dtype)
    h = h.astype(stream or h.dtype)
    x = dense(p["up"], normed(p["norm2"], h, -1, dtype), dtype)
    h = h + dense(p["down"], jax.nn.gelu(x), dtype)
    return h.astype(stream or h.dtype)


def block_of(n: int) -> Any:
    """Returns the shapes of a block."""
    mlp = {"up": layer(n, 4 * n), "down": layer(4 * n, n)}
    return {"norm1": norm(n), "norm2": norm(n), "attention": heads_of(n), **mlp}


def causal(n: int) -> jax.Array:
    """Returns what is added to scores to mask what comes later."""
    return jnp.where(jnp.tri(n, dtype=bool), 0.0, -1e9)


def recurrent(cell: str) -> Model:
    """An LSTM or a GRU in a scan."""
    gates, n = {"LSTM": 4, "GRU": 3}[cell], 512
    params = {"x": layer(n, gates * n), "h": layer(n, gates * n), "out": layer(n, n)}

    def make(dtype):
        def step(p, state, x):
            h, c = state
            a, b = dense(p["x"], x, dtype), dense(p["h"], h, dtype)
            if cell == "LSTM":
                i, f, g, o = jnp.split(a + b, 4, -1)
                c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
                h = jax.nn.sigmoid(o) * jnp.tanh(c)
            else:
                (r, z, n), (s, y, m) = jnp.split(a, 3, -1), jnp.split(b, 3, -1)
                z = jax.nn.sigmoid(z + y)
                h = (1 - z) * jnp.tanh(n + jax.nn.sigmoid(r + s) * m) + z * h
            return (h, c), h

        def loss(p, x, y):
            start = jnp.zeros((x.shape[1], n), dtype)
            _, h = lax.scan(functools.partial(step, p), (start, start), x)
            return cross_entropy(dense(p["out"], h, dtype), y)

        return loss

    return params, (of(128, 64, n), of(128, 64, dtype=jnp.int32)), make


def resnet() -> Model:
    """Bottleneck-free residual blocks with batch norm."""
    n = 128
    one = {"a": of(3, 3, n, n), "b": of(3, 3, n, n), "norm1": norm(n), "norm2": norm(n)}
    params = {"stem": of(7, 7, 3, n), "norm": norm(n), "blocks": [one] * 4}
    params["out"] = layer(n, 1000)

    def make(dtype):
        def loss(p, x, y):
            h = conv(p["stem"], x, 2, dtype)
            h = jax.nn.relu(normed(p["norm"], h, (0, 1, 2), dtype))
            window = (1, 2, 2, 1)
            h = lax.reduce_window(h, -jnp.inf, lax.max, window, window, "VALID")
            for q in p["blocks"]:
                z = conv(q["a"], h, 1, dtype)
                z = jax.nn.relu(normed(q["norm1"], z, (0, 1, 2), dtype))
                z = normed(q["norm2"], conv(q["b"], z, 1, dtype), (0, 1, 2), dtype)
                h = jax.nn.relu(h + z)
            h = h.astype(jnp.float32).mean((1, 2))
            return cross_entropy(dense(p["out"], h, dtype), y)

        return loss

    return params, (of(32, 112, 112, 3), of(32, dtype=jnp.int32)), make


def convnet(layers: int = 6, n: int = 128, images: int = 32, side: int = 56) -> Model:
    """Convolutions with norms on a residual stream."""
    one = {"w": of(3, 3, n, n), "norm": norm(n)}
    params = {"stem": of(3, 3, 3, n), "blocks": [one] * layers}

    def make(dtype):
        def loss(p, x):
            h = conv(p["stem"], x, 1, dtype)
            for q in p["blocks"]:
                z = conv(q["w"], h, 1, dtype)
                h = h + jax.nn.relu(normed(q["norm"], z, (0, 1, 2), dtype))
            return jnp.mean(jnp.square(h.astype(jnp.float32)))

        return loss

    return params, (of(images, side, side, 3),), make


def unet() -> Model:
    """Two levels down and up, with group norm and concatenated shortcuts."""
    n, m = 64, 128
    conv_of = lambda a, b: {"w": of(3, 3, a, b), "norm": norm(b)}  # noqa: E731
    params = {"in": conv_of(3, n), "down": conv_of(n, m), "middle": conv_of(m, m)}
    params |= {"up": conv_of(m + m, n), "last": conv_of(n + n, n)}
    params["out"] = of(3, 3, n, 3)

    def make(dtype):
        def unit(p, x, stride=1):
            h = conv(p["w"], x, stride, dtype)
            grouped = h.reshape(*h.shape[:3], 8, -1).astype(jnp.float32)
            size = grouped.var((1, 2, 4), keepdims=True)
            grouped = grouped - grouped.mean((1, 2, 4), keepdims=True)
            h = (grouped * lax.rsqrt(size + 1e-5)).reshape(h.shape)
            return jax.nn.silu(
                (h * p["norm"]["gain"] + p["norm"]["bias"]).astype(dtype)
            )

        def twice(x):
            return jnp.repeat(jnp.repeat(x, 2, 1), 2, 2)

        def loss(p, x, y):
            first = unit(p["in"], x)
            second = unit(p["down"], first, 2)
            h = unit(p["middle"], second)
            h = unit(p["up"], jnp.concatenate([h, second], -1))
            h = unit(p["last"], jnp.concatenate([twice(h), first], -1))
            h = conv(p["out"], h, 1, dtype).astype(jnp.float32)
            return jnp.mean(jnp.square(h - y))

        return loss

    return params, (of(16, 64, 64, 3), of(16, 64, 64, 3)), make


def vit() -> Model:
    """Patches, a class token, learned positions."""
    n = 384
    params = {
        "patch": of(16, 16, 3, n),
        "class": of(1, 1, n),
        "positions": of(1, 256, n),
    }
    params |= {"blocks": [block_of(n)] * 6, "norm": norm(n), "out": layer(n, 1000)}

    def make(dtype):
        def loss(p, x, y):
            w = p["patch"].reshape(-1, n)
            x = x.reshape(len(x), 15, 16, 17, 16, 3).transpose(0, 1, 3, 2, 4, 5)
            h = dense({"w": w}, x.reshape(len(x), 255, -1), dtype)
            first = jnp.broadcast_to(p["class"].astype(dtype), (len(x), 1, n))
            h = jnp.concatenate([first, h], 1) + p["positions"].astype(dtype)
            for q in p["blocks"]:
                h = block(q, h, 0.0, dtype)
            return cross_entropy(
                dense(p["out"], normed(p["norm"], h[:, 0], -1, dtype), dtype), y
            )

        return loss

    return params, (of(32, 240, 272, 3), of(32, dtype=jnp.int32)), make


def gpt(
    blocks: int = 6,
    n: int = 768,
    heads: int = 8,
    batch: int = 8,
    length: int = 512,
    vocabulary: int = 50304,
    form: str = "",
    stream: Any = None,
) -> Model:
    """GPT-2; its form may be "scanned" or "rematerialized", its stream of a dtype."""
    params = {"tokens": of(vocabulary, n), "positions": of(length, n), "norm": norm(n)}
    stacked = jax.tree.map(lambda x: of(blocks, *x.shape), block_of(n))
    params["blocks"] = stacked if form == "scanned" else [block_of(n)] * blocks

    def make(dtype):
        def run(h, q):
            return block(q, h, causal(length), dtype, heads, stream), None

        def loss(p, tokens):
            x, y = tokens[:, :-1], tokens[:, 1:]
            h = (p["tokens"][x] + p["positions"]).astype(stream or dtype)
            if form == "scanned":
                h, _ = lax.scan(run, h, p["blocks"])
            else:
                once = jax.checkpoint(run) if form else run
                for q in p["blocks"]:
                    h, _ = once(h, q)
            h = normed(p["norm"], h, -1, dtype)
            return cross_entropy(h @ p["tokens"].T.astype(dtype), y)

        return loss

    return params, (of(batch, length + 1, dtype=jnp.int32),), make


def t5() -> Model:
    """An encoder and a decoder with RMSNorm and relative positions."""
    n, length, vocabulary = 512, 256, 32128
    attend = {"attention": heads_of(n), "norm1": {"gain": of(n)}}
    mlp = {
        "up": {"w": of(n, 2 * n)},
        "gate": {"w": of(n, 2 * n)},
        "down": {"w": of(2 * n, n)},
    }
    one = {
        **attend,
        "cross": heads_of(n),
        "norm2": {"gain": of(n)},
        "norm3": {"gain": of(n)},
    }
    params = {
        "tokens": of(vocabulary, n),
        "relative": of(32, 8),
        "encoder": [one | mlp] * 3,
    }
    params |= {"decoder": [one | mlp] * 3, "norm": {"gain": of(n)}}

    def make(dtype):
        def rms(p, x):
            x = x.astype(jnp.float32)
            size = jnp.mean(jnp.square(x), -1, keepdims=True)
            return (x * lax.rsqrt(size + 1e-6) * p["gain"]).astype(dtype)

        def run(p, h, bias, memory=None):
            x = rms(p["norm1"], h)
            h = h + attention(p["attention"], x, x, 8, bias, dtype)
            if memory is not None:
                x = rms(p["norm2"], h)
                h = h + attention(p["cross"], x, memory, 8, 0.0, dtype)
            x = rms(p["norm3"], h)
            up = jax.nn.gelu(dense(p["gate"], x, dtype)) * dense(p["up"], x, dtype)
            return h + dense(p["down"], up, dtype)

        def loss(p, x, y):
            at = jnp.arange(length)
            near = jnp.clip(at[:, None] - at + 16, 0, 31)
            bias = p["relative"][near].transpose(2, 0, 1)
            h = p["tokens"][x].astype(dtype)
            for q in p["encoder"]:
                h = run(q, h, bias)
            memory, h = h, p["tokens"][y[:, :-1]].astype(dtype)
            for q in p["decoder"]:
                h = run(q, h, bias + causal(length), memory)
            h = rms(p["norm"], h)
            return cross_entropy(h @ p["tokens"].T.astype(dtype), y[:, 1:])

        return loss

    tokens = of(16, length, dtype=jnp.int32), of(16, length + 1, dtype=jnp.int32)
    return params, tokens, make


def moe() -> Model:
    """Blocks whose experts are chosen by a router: two of eight."""
    n, experts = 512, 8
    one = block_of(n) | {"router": {"w": of(n, experts)}}
    one |= {"up": of(experts, n, 2 * n), "down": of(experts, 2 * n, n)}
    params = {"tokens": of(1024, n), "blocks": [one] * 4, "norm": norm(n)}

    def make(dtype):
        def mixed(p, h):
            x = normed(p["norm2"], h, -1, dtype)
            logits = dense(p["router"], x, dtype).astype(jnp.float32)
            weights, chosen = lax.top_k(jax.nn.softmax(logits), 2)
            weights = weights / weights.sum(-1, keepdims=True)
            gates = (jax.nn.one_hot(chosen, experts) * weights[..., None]).sum(-2)
            up = jnp.einsum("btd,edf->btef", x, p["up"].astype(dtype))
            down = jax.nn.silu(up) * gates.astype(dtype)[..., None]
            return h + jnp.einsum("btef,efd->btd", down, p["down"].astype(dtype))

        def loss(p, tokens):
            x, y = tokens[:, :-1], tokens[:, 1:]
            h = p["tokens"][x].astype(dtype)
            for q in p["blocks"]:
                z = normed(q["norm1"], h, -1, dtype)
                h = h + attention(q["attention"], z, z, 8, causal(256), dtype)
                h = mixed(q, h)
            return cross_entropy(
                normed(p["norm"], h, -1, dtype) @ p["tokens"].T.astype(dtype), y
            )

        return loss

    return params, (of(16, 257, dtype=jnp.int32),), make


def mamba() -> Model:
    """Selective state spaces, by an associative scan."""
    n, state = 256, 8
    one = {"norm": norm(n), "in": {"w": of(n, 2 * n)}, "out": {"w": of(n, n)}}
    one |= {"b": {"w": of(n, state)}, "c": {"w": of(n, state)}, "dt": layer(n, n)}
    params = {"tokens": of(1024, n), "blocks": [one | {"a": of(n, state)}] * 3}

    def make(dtype):
        def mixer(p, h):
            x, gate = jnp.split(
                dense(p["in"], normed(p["norm"], h, -1, dtype), dtype), 2, -1
            )
            x = jax.nn.silu(x)
            dt = jax.nn.softplus(dense(p["dt"], x, dtype).astype(jnp.float32))
            b, c = (dense(p[k], x, dtype).astype(jnp.float32) for k in "bc")
            decay = jnp.exp(-dt[..., None] * jnp.exp(p["a"]))
            new = (dt * x)[..., None] * b[..., None, :]
            join = lambda u, v: (u[0] * v[0], v[0] * u[1] + v[1])  # noqa: E731
            _, s = lax.associative_scan(join, (decay, new), axis=1)
            y = jnp.sum(s * c[..., None, :], -1).astype(dtype)
            return h + dense(p["out"], y * jax.nn.silu(gate), dtype)

        def loss(p, tokens):
            h = p["tokens"][tokens[:, :-1]].astype(dtype)
            for q in p["blocks"]:
                h = mixer(q, h)
            return cross_entropy(h @ p["tokens"].T.astype(dtype), tokens[:, 1:])

        return loss

    return params, (of(8, 257, dtype=jnp.int32),), make


def dlrm() -> Model:
    """Embeddings, their products with each other, and an MLP."""
    n, tables = 128, 26
    params = {
        "tables": of(tables, 10_000, n),
        "bottom": [layer(13, 512), layer(512, n)],
    }
    pairs = (tables + 1) * tables // 2
    params["top"] = [layer(pairs + n, 1024), layer(1024, 512), layer(512, 1)]

    def make(dtype):
        def mlp(layers, h):
            for q in layers[:-1]:
                h = jax.nn.relu(dense(q, h, dtype))
            return dense(layers[-1], h, dtype)

        def loss(p, x, ids, y):
            h = mlp(p["bottom"], x)
            found = p["tables"][jnp.arange(tables), ids].astype(dtype)
            features = jnp.concatenate([h[:, None], found], 1)
            products = jnp.einsum("bid,bjd->bij", features, features)
            i, j = jnp.triu_indices(tables + 1, 1)
            top = jnp.concatenate([h, products[:, i, j]], 1)
            logits = mlp(p["top"], top)[:, 0].astype(jnp.float32)
            return optax.sigmoid_binary_cross_entropy(logits, y).mean()

        return loss

    batch = of(2048, 13), of(2048, tables, dtype=jnp.int32), of(2048)
    return params, batch, make


def mlp(layers: int = 12, n: int = 2048, batch: int = 64) -> Model:
    """Wide layers with relu."""

    def make(dtype):
        def loss(p, x):
            for w in p:
                x = jax.nn.relu(x.astype(dtype) @ w.astype(dtype))
            return jnp.mean(jnp.square(x.astype(jnp.float32)))

        return loss

    return [of(n, n)] * layers, (of(batch, n),), make


MODELS: dict[str, Callable[[], Model]] = {
    "LSTM": functools.partial(recurrent, "LSTM"),
    "GRU": functools.partial(recurrent, "GRU"),
    "ResNet": resnet, "U-Net": unet, "ViT": vit, "MoE": moe, "T5": t5, "Mamba": mamba,
    "DLRM": dlrm, "GPT-2": gpt, "MLP": mlp, "convnet": convnet,
    "GPT-2, scanned": functools.partial(gpt, form="scanned"),
    "GPT-2, rematerialized": functools.partial(gpt, form="rematerialized"),
}  # fmt: skip


def loss_of(make: Callable[..., Any], way: str, dtype: Any = jnp.float16) -> Any:
    """Returns the loss function of a model in one of the `WAYS`."""
    loss_fn = make(dtype if way == "by hand" else jnp.float32)
    return autocast(loss_fn, dtype) if way == "autocast" else loss_fn


def compile_(
    model: Model, way: str, on: jax.Device | None, dtype: Any = jnp.float16
) -> dict[str, Any]:
    """Compiles a training step with Adam, and returns what it needs."""
    params, batch, make = model
    system = static(optax.adam(1e-3), loss_of(make, way, dtype), SCALE)
    args = params, jax.eval_shape(system.init, params), *batch
    if on is not None:
        args = jax.tree.map(
            functools.partial(place, sharding=SingleDeviceSharding(on)), args
        )
    with jax.numpy_dtype_promotion("standard"):
        compiled = lower(system, *args).compile()
    return {"way": way, **describe(compiled)}


def rows_of(name: str) -> list[dict[str, Any]] | None:
    """Returns what the steps of a model need; None without the compiler."""
    if (on := device(H100)) is None:
        return None
    rows = [{"model": name, **compile_(MODELS[name](), way, on)} for way in WAYS]
    print(table({name: {"rows": rows}}), flush=True)
    return rows


def stream_rows() -> list[dict[str, Any]] | None:
    """Returns what GPT-2 needs if it casts its residual stream; None without compilers.

    The error is that of the worst gradient of a small GPT-2 on this machine.
    """
    rows = []
    for target, dtype in STREAM_DTYPES.items():
        if (on := device(target)) is None:
            return None
        half = jnp.dtype(dtype)
        for way, is_cast in STREAMS:
            stream = half if is_cast else None
            needs = compile_(gpt(stream=stream), way, on, half)
            error = _stream_error(way, stream, half)
            rows.append({"target": target, "is_cast": is_cast, **needs, "error": error})
            print(rows[-1], flush=True)
    return rows


def _stream_error(way: str, stream: Any, dtype: Any) -> float:
    """Returns the error of the worst gradient of a small GPT-2, of three draws."""
    small = functools.partial(gpt, n=128, batch=2, length=64, vocabulary=1000)
    shapes, batch, make = small(stream=stream)
    *_, exact = small()
    functions = loss_of(make, way, dtype), exact(jnp.float32)
    worst = []
    for seed in range(3):
        params, (tokens,) = arrays((shapes, batch), seed)
        found = differences(*(gradients(f, params, tokens) for f in functions))
        worst.append(found[1] if found else np.inf)
    return float(max(worst))


def arrays(shapes: Any, seed: int = 0) -> Any:
    """Returns arrays of these shapes: tokens, and initial values of layers."""
    rng = np.random.default_rng(seed)

    def make(path, x):
        if jnp.issubdtype(x.dtype, jnp.integer):
            return rng.integers(0, 1000, x.shape, dtype=x.dtype)
        if len(x.shape) < 2:
            return np.full(x.shape, float("gain" in jax.tree_util.keystr(path)), "f4")
        size = (2 / np.prod(x.shape[:-1])) ** 0.5
        return size * rng.standard_normal(x.shape, dtype=np.float32)

    return jax.tree_util.tree_map_with_path(make, shapes)


def ratios(rows: list[dict[str, Any]]) -> list[float]:
    """Returns bytes and memory of autocast, and those of float32, by hand 1."""
    hand, *others = rows
    return [x[number] / hand[number] for x in others for number in NUMBERS]


def table(found: dict[str, Any]) -> str:
    """Returns a table: bytes and memory of autocast and float32, by hand 1."""
    cells = [
        [name, *(f"{x:.2f}" for x in ratios(entry["rows"]))]
        for name, entry in found.items()
    ]
    header = [f"{way}: {x}" for way in WAYS[1:] for x in ("bytes", "temporary memory")]
    return report.table(["float16 by hand is 1", *header], cells)


def stream_table(rows: list[dict[str, Any]]) -> str:
    """Returns a table: bytes, memory and errors of a stream, by hand 1."""
    hand = {row["target"]: row for row in rows if row["way"] == "by hand"}
    cells = []
    for row in rows:
        first = hand[row["target"]]
        stream = "" if row is first else ", stream cast" * row["is_cast"]
        ratios = (f"{row[x] / first[x]:.2f}" for x in NUMBERS)
        dtype = STREAM_DTYPES[row["target"]]
        name = f"{row['target']}, {dtype}: {row['way']}{stream}"
        cells.append([name, *ratios, f"{100 * row['error']:.2g}%"])
    header = [
        "by hand is 1",
        "bytes",
        "temporary memory",
        "error of the worst gradient",
    ]
    return report.table(header, cells)


def page() -> str:
    """Returns the page of the committed results."""
    found = report.load(RESULTS)
    versions = found["LSTM"]["versions"]
    names = ("jax", "jaxlib", "jax-cuda12-plugin", "optax")
    text = ", ".join(f"{name} {versions[name]}" for name in names)
    return (
        "# autocast against float16 by hand\n\n"
        "What a training step with Adam moves, and the temporary memory that it needs, "
        "as compiled\nfor an H100, relative to the same model with casts by hand. "
        "The body of a loop counts\nonce, however often it runs. "
        "This compiler reports no flops. "
        f"`python -m benchmarks.by_hand` makes the table, here\nwith {text}.\n"
        "The streams of GPT-2 and ViT begin at an embedding or a table of positions. "
        "They are float32\nwith `autocast`, as in PyTorch, and float16 by hand.\n\n"
        + table({name: found[name] for name in MODELS if name in found})
        + "\n## A residual stream in half precision\n\n"
        "GPT-2 above, and for a TPU v5e in bfloat16. *Stream cast* is `autocast` of a "
        "model that casts\nits stream after the embedding and after each addition, "
        "`h = (h + mlp(h)).astype(dtype)`. The errors\nare those of a small GPT-2 on "
        "a CPU, the largest of three draws.\n\n"
        + stream_table(found["GPT-2, its stream"]["rows"])
    )


def main() -> None:
    """Compiles all models, or those that are named, and writes the results."""
    parts: dict[str, Callable[[], Any]] = {
        name: functools.partial(rows_of, name) for name in MODELS
    }
    parts["GPT-2, its stream"] = stream_rows
    report.measure_parts("benchmarks.by_hand", __doc__, parts, RESULTS)
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
