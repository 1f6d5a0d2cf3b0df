"""The policy, computed twice: as a sampler does, and as a trainer does.

Both compute the probabilities of the same model. The sampler has one token at a time,
and keeps the keys and values of those before; the trainer has whole sequences. They
round differently: the sampler divides by the sum of the softmax last.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from examples.language_model.config import Config
from examples.language_model.model import make_model


class Policy:
    """A transformer that answers prompts.

    Args:
      config: The settings of the transformer.
    """

    def __init__(self, config: Config):
        self._context = config.context
        self._graphdef, self._init = make_model(config)

    def init(self, key: jax.Array) -> Any:
        """Returns parameters, a dictionary of float32 arrays."""
        return self._init(key)

    def sample(
        self, params: Any, prompts: jax.Array, key: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Answers prompts, token by token with a cache of keys and values.

        Args:
          params: The parameters.
          prompts: int32[batch, prompt].
          key: A random key.

        Returns:
          The answers, int32[batch, context - prompt + 1], and the log-probability of
          each of their tokens, of the same shape in float32.
        """
        batch, length = prompts.shape
        # A prompt goes on with its own tokens, not with samples.
        padding = (0, 0), (0, self._context - length + 1)
        given = jnp.pad(prompts[:, 1:], padding, constant_values=-1)

        def step(carry, inputs):
            tokens, cache = carry
            position, given = inputs
            model = nnx.merge(self._graphdef, params)
            logits, cache = model.decode(tokens, cache, position)
            sampled = jax.random.categorical(jax.random.fold_in(key, position), logits)
            tokens = jnp.where(given < 0, sampled, given)
            return (tokens, cache), (tokens, _log_probs(logits, tokens))

        cache = nnx.merge(self._graphdef, params).make_cache(batch)
        inputs = jnp.arange(self._context), given.T
        _, outputs = jax.lax.scan(step, (prompts[:, 0], cache), inputs)
        answers, log_probs = (x[length - 1 :].T for x in outputs)
        return answers, log_probs

    def log_probs(
        self, params: Any, prompts: jax.Array, answers: jax.Array
    ) -> jax.Array:
        """Returns the log-probabilities of answers, from whole sequences.

        Args:
          params: The parameters.
          prompts: int32[batch, prompt].
          answers: int32[batch, answer].

        Returns:
          That of each token, f32[batch, answer].
        """
        tokens = jnp.concatenate([prompts, answers], axis=1)
        logits = nnx.merge(self._graphdef, params)(tokens[:, :-1])
        return _log_probs(logits[:, prompts.shape[1] - 1 :], answers)


def _log_probs(logits, tokens):
    return -optax.softmax_cross_entropy_with_integer_labels(logits, tokens)
