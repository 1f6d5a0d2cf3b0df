"""A decoder-only transformer, as GPT-2: pre-norm, learned positions, a tied head.

It computes in `dtype`. Parameters, layer norms, the softmax of the attention and the
logits that it returns are float32.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import NamedSharding

from examples.language_model.config import Config

STD = 0.02


class Block(nnx.Module):
    """Attention, then a perceptron, each after a layer norm and around a residual."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        width, dtype = config.width, jnp.dtype(config.dtype)

        def linear(inputs, outputs, std=STD):
            init = nnx.initializers.normal(std)
            return nnx.Linear(inputs, outputs, kernel_init=init, dtype=dtype, rngs=rngs)

        # Each block adds twice to the residual stream: keep its variance near one.
        last = STD / (2 * config.layers) ** 0.5
        self.heads = config.heads
        self.attention_norm = layer_norm(config, rngs)
        self.query_key_value = linear(width, 3 * width)
        self.attention_out = linear(width, width, last)
        self.mlp_norm = layer_norm(config, rngs)
        self.mlp_in = linear(width, 4 * width)
        self.mlp_out = linear(4 * width, width, last)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps [batch, time, width] to the same."""
        x = x + self.attention_out(self._attend(self.attention_norm(x)))
        return x + self.mlp_out(jax.nn.gelu(self.mlp_in(self.mlp_norm(x))))

    def _attend(self, x: jax.Array) -> jax.Array:
        projected = self.query_key_value(x)
        by_head = projected.reshape(*x.shape[:2], 3, self.heads, -1)
        query, key, value = (by_head[:, :, i] for i in range(3))
        # Not jax.nn.dot_product_attention, which knows no float16 on CPU.
        query = query * query.shape[-1] ** -0.5
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key).astype(jnp.float32)
        causal = jnp.tri(x.shape[1], dtype=bool)
        weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf))
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights.astype(value.dtype), value)
        return mixed.reshape(x.shape)


class Transformer(nnx.Module):
    """Predicts the next token at each position.

    The parameters of all blocks are stacked, whether `scan_layers` is set or not:
    checkpoints fit either way.

    Args:
      config: The settings.
      rngs: The random keys of the parameters.
      sharding: Where activations, [batch, time, width], belong, if parameters are
        sharded: without it the compiler might gather the activations in their place.
    """

    def __init__(
        self, config: Config, rngs: nnx.Rngs, sharding: NamedSharding | None = None
    ):
        embed = functools.partial(
            nnx.Embed,
            features=config.width,
            embedding_init=nnx.initializers.normal(STD),
            dtype=jnp.dtype(config.dtype),
            rngs=rngs,
        )
        self.tokens = embed(config.vocabulary)
        self.positions = embed(config.context)
        self.blocks = _stack_blocks(config, rngs)
        self.norm = layer_norm(config, rngs)
        self.sharding = sharding
        self.unroll = 1 if config.scan_layers else config.layers
        self.remat = config.remat

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Maps int32[batch, time] to logits, f32[batch, time, vocabulary]."""
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1]))

        def place(x):
            return jax.lax.with_sharding_constraint(x, self.sharding)

        def call(block, x):
            return place(block(x)) if self.sharding else block(x)

        call = nnx.remat(call) if self.remat else call
        scan = nnx.scan(
            call, in_axes=(0, nnx.Carry), out_axes=nnx.Carry, unroll=self.unroll
        )
        x = scan(self.blocks, place(x) if self.sharding else x)
        return self.tokens.attend(self.norm(x)).astype(jnp.float32)


def layer_norm(config: Config, rngs: nnx.Rngs) -> nnx.LayerNorm:
    """Returns a layer norm that computes in float32 and returns it."""
    return nnx.LayerNorm(config.width, dtype=jnp.float32, rngs=rngs)


def _stack_blocks(config: Config, rngs: nnx.Rngs) -> Block:
    @nnx.split_rngs(splits=config.layers)
    @nnx.vmap
    def make(rngs):
        return Block(config, rngs)

    return make(rngs)


def make_functions(
    config: Config, sharding: NamedSharding | None = None
) -> tuple[Callable[[jax.Array], Any], Callable[[Any, jax.Array], jax.Array]]:
    """Returns two functions of the model, whose parameters are a dictionary of arrays.

    Args:
      config: The settings.
      sharding: As in `Transformer`.

    Returns:
      `init`, which maps a random key to the parameters, and `loss`, which maps
      parameters and tokens, int32[batch, time], to the mean cross entropy of predicting
      each next token, f32[].
    """

    def make(key):
        return Transformer(config, nnx.Rngs(key), sharding)

    graphdef = nnx.graphdef(nnx.eval_shape(lambda: make(0)))

    def init(key):
        return nnx.to_pure_dict(nnx.state(make(key)))

    def loss(params, tokens):
        logits = nnx.merge(graphdef, params)(tokens[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return losses.mean()

    return init, loss
