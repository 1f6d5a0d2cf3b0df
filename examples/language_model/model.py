"""A decoder-only transformer, as GPT-2: pre-norm, learned positions, a tied head.

It is an ordinary float32 model, which the training step wraps in `autocast`.
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
# Keys and values.
Cache = tuple[jax.Array, jax.Array]


class Block(nnx.Module):
    """Attention, then a perceptron, each after a layer norm and around a residual."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        width = config.width

        def linear(inputs, outputs, std=STD):
            init = nnx.initializers.normal(std)
            return nnx.Linear(inputs, outputs, kernel_init=init, rngs=rngs)

        # Each block adds twice to the residual stream: keep its variance near one.
        last = STD / (2 * config.layers) ** 0.5
        self.heads = config.heads
        self.attention_norm = nnx.LayerNorm(width, rngs=rngs)
        self.query_key_value = linear(width, 3 * width)
        self.attention_out = linear(width, width, last)
        self.mlp_norm = nnx.LayerNorm(width, rngs=rngs)
        self.mlp_in = linear(width, 4 * width)
        self.mlp_out = linear(4 * width, width, last)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps [batch, time, width] to the same."""
        query, key, value = self._project(x)
        causal = jnp.tri(x.shape[1], dtype=bool)
        return self._finish(x, _mix(_scores(query, key, causal), value))

    def decode(
        self, x: jax.Array, cache: Cache, position: jax.Array
    ) -> tuple[jax.Array, Cache]:
        """Maps one position of each sequence, [batch, 1, width], to the same.

        As kernels for decoding do, it divides by the sum of the softmax last: they
        compute the parts of a long cache at the same time, each without that sum.

        Args:
          x: The activations.
          cache: The keys and values of the positions before, each [batch, context,
            heads, width / heads].
          position: The number of the position, int32[].

        Returns:
          The activations, and the cache with the keys and values of this position.
        """
        query, key, value = self._project(x)
        put = functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=1)
        keys, values = put(cache[0], key, position), put(cache[1], value, position)
        scores = _scores(query, keys, jnp.arange(keys.shape[1]) <= position)
        return self._finish(x, _mix_then_divide(scores, values)), (keys, values)

    def _project(self, x: jax.Array) -> list[jax.Array]:
        """Returns queries, keys and values: [batch, time, heads, width / heads]."""
        projected = self.query_key_value(self.attention_norm(x))
        by_head = projected.reshape(*x.shape[:2], 3, self.heads, -1)
        return [by_head[:, :, i] for i in range(3)]

    def _finish(self, x: jax.Array, mixed: jax.Array) -> jax.Array:
        x = x + self.attention_out(mixed.reshape(x.shape))
        return x + self.mlp_out(jax.nn.gelu(self.mlp_in(self.mlp_norm(x))))


def _scores(query, key, may_see):
    query = query * query.shape[-1] ** -0.5
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key)
    return jnp.where(may_see, scores, -jnp.inf)


def _mix(scores, value):
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), value)


def _mix_then_divide(scores, value):
    weights = jnp.exp(scores - scores.max(axis=-1, keepdims=True))
    mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, value)
    return mixed / jnp.einsum("bhqk->bqh", weights)[..., None]


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
            rngs=rngs,
        )
        self.tokens = embed(config.vocabulary)
        self.positions = embed(config.context)
        self.blocks = _stack_blocks(config, rngs)
        self.norm = nnx.LayerNorm(config.width, rngs=rngs)
        self.layers = config.layers
        self.cached = config.context, config.heads, config.width // config.heads
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
        return self._predict(x)

    def decode(self, tokens: jax.Array, cache: Cache, position: jax.Array):
        """Predicts the tokens after one position, as the whole sequence would.

        Args:
          tokens: The tokens at this position, int32[batch].
          cache: The result of `make_cache`, or the cache from the position before.
          position: Its number, int32[].

        Returns:
          Logits, f32[batch, vocabulary], and the cache for the next position.
        """
        x = self.tokens(tokens)[:, None] + self.positions(position)

        def call(block, x, cache):
            return block.decode(x, cache, position)

        scan = nnx.scan(call, in_axes=(0, nnx.Carry, 0), out_axes=(nnx.Carry, 0))
        x, cache = scan(self.blocks, x, cache)
        return self._predict(x)[:, 0], cache

    def make_cache(self, batch: int) -> Cache:
        """Returns an empty cache of the keys and values of all blocks."""
        shape = self.layers, batch, *self.cached
        return jnp.zeros(shape), jnp.zeros(shape)

    def _predict(self, x: jax.Array) -> jax.Array:
        return self.tokens.attend(self.norm(x))


def _stack_blocks(config: Config, rngs: nnx.Rngs) -> Block:
    @nnx.split_rngs(splits=config.layers)
    @nnx.vmap
    def make(rngs):
        return Block(config, rngs)

    return make(rngs)


def make_model(
    config: Config, sharding: NamedSharding | None = None
) -> tuple[nnx.GraphDef, Callable[[jax.Array], Any]]:
    """Returns the model without its parameters, and `init` of `make_functions`.

    `nnx.merge` joins it with the parameters.

    Args:
      config: The settings.
      sharding: As in `Transformer`.
    """

    def make(key):
        return Transformer(config, nnx.Rngs(key), sharding)

    def init(key):
        return nnx.to_pure_dict(nnx.state(make(key)))

    return nnx.graphdef(nnx.eval_shape(lambda: make(0))), init


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
    graphdef, init = make_model(config, sharding)

    def loss(params, tokens):
        logits = nnx.merge(graphdef, params)(tokens[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return losses.mean()

    return init, loss
