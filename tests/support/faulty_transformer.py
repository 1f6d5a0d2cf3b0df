"""A small transformer with float16 compute in which one of twelve faults is planted.

Each fault is one computation in float16, or one wrong input, that breaks a step. The
line to change ends in `# fault: NAME`. If another line breaks first, it ends in
`# breaks: NAME`.

    fault = faulty_transformer.plant("gelu")
    jax.value_and_grad(fault.program)(*fault.args)
    fault.lines  # where it breaks
"""

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from faults import Fault

LAYERS, WIDTH, HEADS = 4, 32, 2
BATCH, CONTEXT, VOCABULARY = 2, 16, 64
HALF = jnp.float16


# The table in benchmarks/results/tools.md says what each is, in this order.
FAULTS = (
    "logits", "mask", "softmax", "mean", "variance", "division", "exponential", "gelu",
    "residual", "sum", "logarithm", "data",
)  # fmt: skip


KINDS = {
    "sum": {"kind": "scale_too_high", "phase": "backward"},
    "data": {"kind": "nonfinite_argument"},
}


def plant(name: str | None, *, layers: int = LAYERS) -> Fault:
    """Returns the transformer with one fault, or without any.

    Args:
      name: The name of one of `FAULTS`, or None for the sound model.
      layers: The number of layers. A residual stream needs four to overflow.
    """
    scale = 2.0**15 if name == "sum" else 2.0**10
    breaks = f"  # breaks: {name}" in Path(__file__).read_text(encoding="utf-8")
    mark = f"{'breaks' if breaks else 'fault'}: {name}"
    args = inputs(name, layers)
    about = {"scale": scale} | KINDS.get(name, {})
    return Fault(partial(loss, fault=name), args, __file__, mark, **about)


def inputs(name: str | None, layers: int) -> tuple[Any, dict[str, Any]]:
    """Returns parameters and a batch with which the fault breaks the step."""
    vocabulary = 4096 if name == "softmax" else VOCABULARY
    random = np.random.default_rng(0)

    def normal(*shape, std=None):
        std = shape[0] ** -0.5 if std is None else std
        return (std * random.standard_normal(shape)).astype(np.float32)

    shapes = {"qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH)}
    shapes |= {"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    blocks = [{k: normal(*s) for k, s in shapes.items()} for _ in range(layers)]
    params: dict[str, Any] = {
        "embed": normal(vocabulary, WIDTH, std=1.0),
        "positions": normal(CONTEXT, WIDTH, std=1.0),
        "blocks": blocks,
        "head": normal(WIDTH, vocabulary),
        "bias": np.zeros(vocabulary, np.float32),
    }
    batch = {
        "tokens": random.integers(vocabulary, size=(BATCH, CONTEXT + 1)),
        "features": normal(BATCH, CONTEXT, WIDTH, std=0.1),
        "weights": np.ones((BATCH, CONTEXT), np.float32),
    }
    match name:
        case "logits":
            blocks[0]["qkv"][:, : 2 * WIDTH] *= 200
        case "softmax":
            params["bias"] += 3
        case "mean":
            params["head"] *= 8
        case "variance":
            params["positions"] *= 200
        case "division":
            batch["weights"][1] = 0  # a sequence that is all padding
        case "exponential":
            batch["reference"] = np.full((BATCH, CONTEXT), -4.5, np.float32)
            batch["reference"][0, 3] = -20
        case "gelu":
            for block in blocks:  # one channel of outliers
                block["up"][:, 0] *= 256
                block["down"][0] /= 256
        case "residual":
            for block in blocks:
                block["out"] *= 16000
                block["down"] *= 16000
        case "logarithm":
            params["bias"][batch["tokens"][0, 5]] = -24
        case "data":
            batch["features"][1, 2, 3] = np.nan
    return jax.tree.map(jnp.asarray, (params, batch))


def normalize(x: jax.Array, fault: str | None) -> jax.Array:
    """Returns `x` with mean 0 and variance 1."""
    x = x.astype(HALF if fault == "variance" else jnp.float32)
    x = x - x.mean(-1, keepdims=True)
    variance = jnp.square(x).mean(-1, keepdims=True)  # fault: variance
    return (x * jax.lax.rsqrt(variance + 1e-5)).astype(HALF)


def attend(x: jax.Array, block: Any, fault: str | None) -> jax.Array:
    """Returns causal self-attention over `x`, [batch, time, channel]."""
    qkv = normalize(x, fault) @ block["qkv"]
    q, k, v = jnp.split(qkv.reshape(*x.shape[:2], 3 * HEADS, -1), 3, axis=2)
    if fault != "logits":
        q, k = q.astype(jnp.float32) * q.shape[-1] ** -0.5, k.astype(jnp.float32)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)  # fault: logits
    causal = jnp.tri(x.shape[1], dtype=bool)
    if fault == "mask":
        scores = scores.astype(HALF)
        scores += (1 - causal.astype(HALF)) * -1e9  # fault: mask
    else:
        scores = jnp.where(causal, scores.astype(jnp.float32), -jnp.inf)
    weights = jax.nn.softmax(scores).astype(HALF)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
    return (mixed.reshape(x.shape) @ block["out"]).astype(x.dtype)


def feed_forward(x: jax.Array, block: Any, fault: str | None) -> jax.Array:
    """Returns the two layers with a GELU between them."""
    h = normalize(x, fault) @ block["up"]
    if fault != "gelu":
        h = h.astype(jnp.float32)
    h = 0.5 * h * (1 + jnp.tanh(0.79788 * (h + 0.044715 * h**3)))  # fault: gelu
    return (h.astype(HALF) @ block["down"]).astype(x.dtype)


def loss(params: Any, batch: Any, *, fault: str | None) -> jax.Array:
    """Returns the loss of predicting each next token, f32[]."""
    params = jax.tree.map(lambda p: p.astype(HALF), params)
    x = params["embed"][batch["tokens"][:, :-1]] + params["positions"]
    x = x + batch["features"].astype(HALF)  # fault: data
    if fault != "residual":
        x = x.astype(jnp.float32)
    for block in params["blocks"]:
        x = x + attend(x, block, fault)  # fault: residual
        x = x + feed_forward(x, block, fault)  # fault: residual
    x = normalize(x, fault)
    logits = x @ params["head"] + params["bias"]  # breaks: sum
    return objective(logits, batch, fault)


def objective(logits: jax.Array, batch: Any, fault: str | None) -> jax.Array:
    """Returns the weighted cross entropy and a penalty of large logits, f32[]."""
    dtype = logits.dtype
    if fault == "softmax":
        exponentials = jnp.exp(logits)
        total = exponentials.sum(-1, keepdims=True)  # fault: softmax
        logs = jnp.log(exponentials / total)
    elif fault == "logarithm":
        logs = jnp.log(jax.nn.softmax(logits))  # fault: logarithm
    else:
        logs = jax.nn.log_softmax(logits.astype(jnp.float32))
    targets = batch["tokens"][:, 1:, None]
    losses = -jnp.take_along_axis(logs, targets, -1)[..., 0].astype(jnp.float32)
    wide = logits.astype(dtype if fault == "mean" else jnp.float32)
    penalty = jnp.square(wide).sum() / wide.size  # fault: mean
    weights = batch["weights"]
    if fault == "sum":
        return (losses * weights).sum() + 1e-3 * penalty  # fault: sum
    if fault == "division":
        losses, weights = losses.astype(dtype), weights.astype(dtype)
    means = (losses * weights).sum(-1) / (weights.sum(-1) + 1e-8)  # fault: division
    value = means.astype(jnp.float32).mean() + 1e-3 * penalty.astype(jnp.float32)
    if "reference" in batch:  # the log-probabilities of an earlier policy
        log_ratio = -losses - batch["reference"]
        log_ratio = log_ratio.astype(dtype if fault == "exponential" else jnp.float32)
        ratio = jnp.exp(log_ratio)  # fault: exponential
        clipped = jnp.minimum(ratio, jnp.clip(ratio, 0.8, 1.2))
        value = value - clipped.astype(jnp.float32).mean()
    return value
