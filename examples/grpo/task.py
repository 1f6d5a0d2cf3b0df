"""The task: sort digits. A prompt is `5239>`, and its right answer `2359`.

Tokens are bytes. A program can tell whether an answer is right, and so rewards it.
"""

import jax
import jax.numpy as jnp

# One more than the bytes: the language model has at least one word.
VOCABULARY = 257


def draw(key: jax.Array, count: int, digits: int) -> jax.Array:
    """Draws prompts: int32[count, digits + 1]."""
    numbers = jax.random.randint(key, (count, digits), ord("0"), ord("9") + 1)
    return jnp.pad(numbers, ((0, 0), (0, 1)), constant_values=ord(">"))


def solve(prompts: jax.Array) -> jax.Array:
    """Returns the right answers: int32[count, digits]."""
    return jnp.sort(prompts[:, :-1], axis=1)


def reward(prompts: jax.Array, answers: jax.Array) -> jax.Array:
    """Returns 1 for each answer that is right, and 0 for others: f32[count]."""
    is_right = (answers == solve(prompts)).all(axis=1)
    return is_right.astype(jnp.float32)
