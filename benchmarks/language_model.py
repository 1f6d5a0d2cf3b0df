"""A character-level transformer, and the text on which it is trained."""

import sysconfig
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

CHARACTERS = 128


def source_text(*patterns: str) -> np.ndarray:
    """Returns the ASCII codes of source files in the standard library, uint8[n].

    Args:
      *patterns: Glob patterns of file names, `"*.py"` for example.
    """
    library = Path(sysconfig.get_path("stdlib"))
    paths = sorted(path for pattern in patterns for path in library.glob(pattern))
    source = b"".join(path.read_bytes() for path in paths)
    return np.frombuffer(source, np.uint8) % CHARACTERS


def init(
    key: jax.Array,
    layers: int,
    width: int,
    *,
    positions: int = 0,
    embedding_std: float = CHARACTERS**-0.5,
) -> dict[str, Any]:
    """Returns random float32 parameters.

    Args:
      key: A random key.
      layers: The number of blocks.
      width: The number of channels.
      positions: The number of positions to embed. With 0, the network knows the order
        of characters only through its causal mask.
      embedding_std: The standard deviation of the character embedding.
    """
    keys = iter(jax.random.split(key, 6 * layers + 2))

    def matrix(rows, columns, std=None):
        std = rows**-0.5 if std is None else std
        return std * jax.random.normal(next(keys), (rows, columns), jnp.float32)

    shapes = {"qkv": (width, 3 * width), "out": (width, width)}
    shapes |= {"up": (width, 4 * width), "down": (4 * width, width)}
    blocks = [{k: matrix(*s) for k, s in shapes.items()} for _ in range(layers)]
    params = {"blocks": blocks, "embed": matrix(CHARACTERS, width, embedding_std)}
    if positions:
        params["positions"] = matrix(positions, width, 1.0)
    return params | {"head": matrix(width, CHARACTERS)}


def normalize(x: jax.Array) -> jax.Array:
    """Returns `x` with mean 0 and variance 1, computed in float32."""
    wide = x.astype(jnp.float32)
    wide = (wide - wide.mean(-1, keepdims=True)) * jax.lax.rsqrt(
        wide.var(-1, keepdims=True) + 1e-5
    )
    return wide.astype(x.dtype)


def attend(x: jax.Array, block: dict[str, jax.Array], heads: int) -> jax.Array:
    """Returns causal self-attention over `x`, [batch, time, channel]."""
    size = x.shape[-1] // heads
    qkv = jnp.split(normalize(x) @ block["qkv"], 3, axis=-1)
    q, k, v = (t.reshape(*x.shape[:2], heads, size) for t in qkv)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * size**-0.5
    causal = jnp.tri(x.shape[1], dtype=bool)
    scores = jnp.where(causal, scores.astype(jnp.float32), -jnp.inf)
    weights = jax.nn.softmax(scores).astype(x.dtype)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
    return mixed.reshape(x.shape) @ block["out"]


def loss(
    params: Any, tokens: jax.Array, *, heads: int, dtype: Any = jnp.float16
) -> jax.Array:
    """Returns the mean cross entropy of predicting each next character, f32[].

    Args:
      params: As `init` returns them. The blocks may be stacked in one: they are
        scanned then.
      tokens: Character codes, int[batch, time].
      heads: The number of attention heads.
      dtype: The dtype of the computation.
    """
    params = jax.tree.map(lambda p: p.astype(dtype), params)
    x = params["embed"][tokens[:, :-1]]
    if "positions" in params:
        x = x + params["positions"]

    def run(x, block):
        x = x + attend(x, block, heads)
        return x + jax.nn.gelu(normalize(x) @ block["up"]) @ block["down"], None

    if isinstance(params["blocks"], dict):
        x, _ = jax.lax.scan(run, x, params["blocks"])
    else:
        for block in params["blocks"]:
            x, _ = run(x, block)
    logits = (normalize(x) @ params["head"]).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return losses.mean()
