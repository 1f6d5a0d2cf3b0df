"""The model of `faulty_transformer` in Flax Linen, with the same twelve faults.

Parameters, batch and losses are the same. Flax's own layers are used where a fault can
be in them: `# fault: NAME` then ends the line that calls the layer.

    faulty = faulty_linen.plant("variance")
    faulty.loss_fn(faulty.params, *faulty.args)
"""

from typing import Any

import faulty_transformer
import flax.linen as nn
import jax
import jax.numpy as jnp
from faulty_transformer import CONTEXT, HEADS, LAYERS, VOCABULARY, WIDTH, Faulty


def plant(
    name: str | None, *, mended: bool = False, dtype: Any = jnp.float16
) -> Faulty:
    """Returns the model with one fault, as `faulty_transformer.plant` does."""
    plain = faulty_transformer.plant(name, mended=mended)
    fault = None if mended else name
    model = Transformer(fault, dtype, vocabulary=len(plain.params["embed"]))

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        inputs = batch["tokens"], batch["features"]
        with jax.numpy_dtype_promotion("standard"):  # nn.LayerNorm needs it
            logits: Any = model.apply({"params": params}, *inputs)
        return faulty_transformer.objective(logits, batch, fault)

    files = __file__, faulty_transformer.__file__
    lines, causes = faulty_transformer.marked(name, *files)
    return Faulty(loss_fn, rename(plain.params), plain.args, plain.scale, lines, causes)


def rename(params: Any) -> Any:
    """Returns the parameters of `faulty_transformer` as `Transformer` names them."""
    renamed = {
        "embed": {"embedding": params["embed"]},
        "positions": params["positions"],
        "head": {"kernel": params["head"], "bias": params["bias"]},
    }
    for i, block in enumerate(params["blocks"]):
        kernels = {name: {"kernel": kernel} for name, kernel in block.items()}
        renamed[f"attention_{i}"] = {name: kernels[name] for name in ("qkv", "out")}
        renamed[f"feed_forward_{i}"] = {name: kernels[name] for name in ("up", "down")}
    return renamed


def normalize(x: jax.Array, dtype: Any, fault: str | None) -> jax.Array:
    """Returns `x` with mean 0 and variance 1."""
    norm = nn.LayerNorm(
        epsilon=1e-5,
        dtype=dtype,
        use_bias=False,
        use_scale=False,
        force_float32_reductions=fault != "variance",
    )
    if fault == "variance":
        x = x.astype(dtype)
    return norm(x)  # fault: variance


class Attention(nn.Module):
    """Causal self-attention."""

    fault: str | None
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        dense = {"use_bias": False, "dtype": self.dtype}
        normal = normalize(x, self.dtype, self.fault)
        qkv = nn.Dense(3 * WIDTH, name="qkv", **dense)(normal)
        q, k, v = jnp.split(qkv.reshape(*x.shape[:2], 3 * HEADS, -1), 3, axis=2)
        if self.fault == "logits":
            scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)  # fault: logits
        else:
            q, k = q.astype(jnp.float32), k.astype(jnp.float32)
            scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
        mask = nn.make_causal_mask(x[..., 0], dtype=self.dtype)
        if self.fault == "mask":
            scores = scores.astype(self.dtype)
            scores = scores + (1 - mask) * -1e9  # fault: mask
        else:
            scores = jnp.where(mask == 1, scores.astype(jnp.float32), -1e9)
        weights = nn.softmax(scores).astype(self.dtype)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
        return nn.Dense(WIDTH, name="out", **dense)(mixed.reshape(x.shape))


class FeedForward(nn.Module):
    """Two layers with a GELU between them."""

    fault: str | None
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        dense = {"use_bias": False, "dtype": self.dtype}
        normal = normalize(x, self.dtype, self.fault)
        h = nn.Dense(4 * WIDTH, name="up", **dense)(normal)
        if self.fault != "gelu":
            h = h.astype(jnp.float32)
        h = nn.gelu(h)  # fault: gelu
        return nn.Dense(WIDTH, name="down", **dense)(h)


class Transformer(nn.Module):
    """A language model: tokens and features to logits, [batch, time, vocabulary]."""

    fault: str | None = None
    dtype: Any = jnp.float16
    vocabulary: int = VOCABULARY

    @nn.compact
    def __call__(self, tokens: jax.Array, features: jax.Array) -> jax.Array:
        embed = nn.Embed(self.vocabulary, WIDTH, dtype=self.dtype, name="embed")
        std = nn.initializers.normal(1.0)
        positions = self.param("positions", std, (CONTEXT, WIDTH))
        x = embed(tokens[:, :-1]) + positions.astype(self.dtype)
        x = x + features.astype(self.dtype)  # fault: data
        if self.fault != "residual":
            x = x.astype(jnp.float32)
        for i in range(LAYERS):
            attention = Attention(self.fault, self.dtype, name=f"attention_{i}")
            x = x + attention(x).astype(x.dtype)  # fault: residual
            forward = FeedForward(self.fault, self.dtype, name=f"feed_forward_{i}")
            x = x + forward(x).astype(x.dtype)  # fault: residual
        x = normalize(x, self.dtype, self.fault)
        head = nn.Dense(self.vocabulary, dtype=self.dtype, name="head")
        return head(x)  # breaks: sum
