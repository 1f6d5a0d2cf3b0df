"""A step of reinforcement learning: sample, reward, update. Begin here.

The algorithm is group relative policy optimization (GRPO) of `DeepSeekMath
<https://arxiv.org/abs/2402.03300>`_, without its penalty of the distance to the first
policy.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from examples.common.precision import compute_in
from examples.grpo import task
from examples.grpo.config import Config
from examples.grpo.policy import Policy
from optax_lossscale import (
    DynamicLossScale,
    FixedLossScale,
    LossScaleOptimizer,
    diagnostics,
)

# The updates until the learning rate of reinforcement learning is reached.
WARMUP = 20


class TrainState(NamedTuple):
    """All that changes, and all that a checkpoint holds.

    Attributes:
      params: The parameters, float32.
      opt_state: The state of the optimizer, with the loss scale.
    """

    params: Any
    opt_state: Any


class Batch(NamedTuple):
    """Answers, with their prompts, probabilities and advantages.

    Attributes:
      prompts: int32[batch, digits + 1].
      answers: int32[batch, digits].
      log_probs: That of each token in the sampler, f32[batch, digits].
      advantages: How much better an answer is than others of its group, f32[batch].
    """

    prompts: jax.Array
    answers: jax.Array
    log_probs: jax.Array
    advantages: jax.Array


class Trainer:
    """The compiled functions of a run.

    Sampler and trainer are compiled on their own, as they are different programs where
    people train large models.

    Args:
      config: The settings.
    """

    def __init__(self, config: Config):
        self._config = config
        # Of the parameters, and of the problems and answers.
        self._keys = jax.random.split(jax.random.key(config.seed))
        self._policy = Policy(config.model())
        # autocast, unless the dtype is float32.
        self._sample_answers = compute_in(config.dtype, self._policy.sample)
        self._loss_fn = compute_in(config.dtype, self._loss)
        # Adam's first updates are large, and the policy is to change little.
        first = config.learning_rate / WARMUP
        warmup = optax.linear_schedule(first, config.learning_rate, WARMUP - 1)
        self._optimizer = make_optimizer(config.dtype, warmup, config.retries)
        decay = optax.cosine_decay_schedule(
            config.supervised_rate, max(config.supervised_steps, 1)
        )
        self._supervised_optimizer = make_optimizer("float32", decay)
        self._supervise = jax.jit(self._supervise_once, donate_argnums=0)
        self._sample = jax.jit(self._sample_batch)
        self._update = jax.jit(self._update_once_each, donate_argnums=0)

    def init(self, step: int) -> TrainState:
        """Returns a state with the first parameters.

        Args:
          step: Its optimizer is that after so many steps.
        """
        params = self._policy.init(self._keys[0])
        is_supervised = step < self._config.supervised_steps
        optimizer = self._supervised_optimizer if is_supervised else self._optimizer
        return TrainState(params, optimizer.init(params))

    def step(self, state: TrainState, step: int) -> tuple[TrainState, dict[str, Any]]:
        """Takes a step, and returns the next state and scalars by name.

        Args:
          state: The state, which is consumed.
          step: The number of steps before.
        """
        key = jax.random.fold_in(self._keys[1], step)
        if step < self._config.supervised_steps:
            state, metrics = self._supervise(state, key)
            if step + 1 == self._config.supervised_steps:
                opt_state = self._optimizer.init(state.params)
                state = state._replace(opt_state=opt_state)
            return state, metrics
        batch, reward = self._sample(state.params, key)
        state, metrics = self._update(state, batch)
        return state, {"reward": reward, **metrics}

    def _supervise_once(self, state, key):
        prompts = task.draw(key, self._config.supervised_batch, self._config.digits)

        def loss_fn(params):
            answers = task.solve(prompts)
            return -self._policy.log_probs(params, prompts, answers).mean()

        params, opt_state, loss = self._supervised_optimizer.minimize(loss_fn, *state)
        metrics = {"loss": loss, **scaling(opt_state)}
        return TrainState(params, opt_state), metrics

    def _sample_batch(self, params, key):
        problems, group = self._config.problems, self._config.group
        problem_key, answer_key = jax.random.split(key)
        prompts = task.draw(problem_key, problems, self._config.digits)
        prompts = jnp.repeat(prompts, group, axis=0)
        answers, log_probs = self._sample_answers(params, prompts, answer_key)
        rewards = task.reward(prompts, answers)
        advantages = compare(rewards.reshape(problems, group)).reshape(-1)
        return Batch(prompts, answers, log_probs, advantages), rewards.mean()

    def _update_once_each(self, state, batch):
        """Updates the parameters once for each mini-batch."""

        def update(state, batch):
            params, opt_state, (loss, metrics) = self._optimizer.minimize(
                self._loss_fn, *state, batch, has_aux=True
            )
            return TrainState(params, opt_state), {"loss": loss, **metrics}

        count = self._config.minibatches
        batches = jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), batch)
        state, metrics = jax.lax.scan(update, state, batches)
        metrics = {
            # The sampler had the parameters of the first update alone.
            "mean_difference": metrics["mean_difference"][0],
            "largest_difference": metrics["largest_difference"][0],
            "clipped": metrics["clipped"].mean(),
            "loss": metrics["loss"].mean(),
            **scaling(state.opt_state),
        }
        return state, metrics

    def _loss(self, params, batch):
        log_probs = self._policy.log_probs(params, batch.prompts, batch.answers)
        return clipped_loss(log_probs, batch, self._config.clip)


def compare(rewards: jax.Array) -> jax.Array:
    """Returns how much better than its group each answer is, in standard deviations.

    Args:
      rewards: f32[problems, group].
    """
    better = rewards - rewards.mean(axis=1, keepdims=True)
    return better / (rewards.std(axis=1, keepdims=True) + 1e-4)


def clipped_loss(
    log_probs: jax.Array, batch: Batch, clip: float
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns the loss of proximal policy optimization, and scalars by name.

    Args:
      log_probs: Those of the trainer, f32[batch, digits].
      batch: Answers, with the log-probabilities of the sampler.
      clip: How far from 1 the ratio of the probabilities counts.
    """
    difference = log_probs - batch.log_probs
    ratio = jnp.exp(difference)
    near = jnp.clip(ratio, 1 - clip, 1 + clip)
    advantages = batch.advantages[:, None]
    gain = jnp.minimum(ratio * advantages, near * advantages)
    metrics = {
        "mean_difference": jnp.abs(difference).mean(),
        "largest_difference": jnp.abs(difference).max(),
        "clipped": (ratio != near).mean(),
    }
    return -gain.mean(), metrics


def scaling(opt_state: Any) -> dict[str, jax.Array]:
    """Returns the scalars of the optimizer's state that are logged, by name."""
    metrics = diagnostics.metrics(opt_state)
    names = "loss_scale", "skipped_steps", "retries"
    return {name: metrics[name] for name in names if name in metrics}


def make_optimizer(
    dtype: str, learning_rate: optax.Schedule, retries: int = 0
) -> LossScaleOptimizer:
    """Returns the optimizer for a dtype of the computation.

    In float16 no batch is lost: where gradients overflow, the pass runs again
    at a lower scale. The scale doubles often, because a run is short. bfloat16 and
    float32 need no scale, but a step that is not finite is skipped all the same.
    """
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(learning_rate))
    if dtype == "float16":
        rule = DynamicLossScale(growth_interval=50)
        return LossScaleOptimizer(inner, rule, retries=retries)
    return LossScaleOptimizer(inner, FixedLossScale(1.0, skip_nonfinite=True))
