"""The training step, compiled for a mesh of devices."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from optax.microbatching import AccumulationType

from examples.common.precision import compute_in
from examples.language_model.config import Config
from examples.language_model.model import make_functions
from examples.language_model.optimizer import averaged_parameters, make_optimizer
from examples.language_model.sharding import shard_batch, shard_state
from optax_lossscale import LossScaleOptimizer, diagnostics


class TrainState(NamedTuple):
    """All that changes, and all that a checkpoint holds.

    Attributes:
      step: i32[], the number of steps so far, skipped or not.
      params: The parameters, float32.
      opt_state: The state of the optimizer, with the loss scale and the averaged
        parameters.
    """

    step: jax.Array
    params: Any
    opt_state: Any


class Trainer:
    """The compiled functions of a run.

    Args:
      config: The settings.
      mesh: The devices, as `make_mesh` returns them. They need not be present if
        functions are only compiled.

    Attributes:
      state: The shapes, dtypes and shardings of the state.
      batch: The shape, dtype and sharding of a batch.
      loss: Maps parameters and tokens to the mean cross entropy, f32[].
      init: Returns the first state, given a random key.
      step: Maps a state, which it consumes, and a batch to the next state and a
        dictionary of scalars.
      evaluate: Maps a state and a stack of batches to the perplexity of the averaged
        parameters.
    """

    def __init__(self, config: Config, mesh: Mesh):
        self._config = config
        self._optimizer = make_optimizer(config)
        self._init_params, loss = make_functions(config, shard_batch(mesh, ndim=3))
        self.loss = compute_in(config.dtype, loss)  # autocast, unless it is float32
        shapes = jax.eval_shape(self._init, jax.random.key(0))
        shardings = shard_state(shapes, mesh)
        self.state = jax.tree.map(_describe, shapes, shardings)
        shape = (config.batch_size, config.context + 1)
        self.batch = jax.ShapeDtypeStruct(
            shape, jnp.int32, sharding=shard_batch(mesh, ndim=2)
        )
        everywhere = NamedSharding(mesh, P())
        self.init = jax.jit(self._init, out_shardings=shardings)
        self.step = jax.jit(
            self._step, donate_argnums=0, out_shardings=(shardings, everywhere)
        )
        self.evaluate = jax.jit(self._evaluate, out_shardings=everywhere)

    def check_health(self, state: TrainState) -> None:
        """Raises FloatingPointError, with advice, if all steps are skipped for long.

        It waits for the device: call it where you save.
        """
        if isinstance(self._optimizer, LossScaleOptimizer):
            diagnostics.check_health(state.opt_state)

    def _init(self, key):
        params = self._init_params(key)
        return TrainState(jnp.int32(0), params, self._optimizer.init(params))

    def _step(self, state, tokens):
        step, params, opt_state = state
        if isinstance(self._optimizer, LossScaleOptimizer):
            params, opt_state, loss = self._optimizer.minimize(
                self.loss, params, opt_state, tokens, transform=self._value_and_grad
            )
        else:
            loss, grads = self._value_and_grad(self.loss)(params, tokens)
            updates, opt_state = self._optimizer.update(grads, opt_state, params)
            params = optax.apply_updates(params, updates)
        metrics = {"loss": loss, **self._scaling_metrics(opt_state)}
        return TrainState(step + 1, params, opt_state), metrics

    def _value_and_grad(self, function, **options):
        """As `jax.value_and_grad`, which it averages over micro-batches."""
        function = jax.value_and_grad(function, **options)
        if self._config.accumulate == 1:
            return function
        return optax.microbatch(
            function,
            argnums=1,  # tokens
            microbatch_size=self._config.batch_size // self._config.accumulate,
            accumulator=AccumulationType.MEAN,
        )

    def _scaling_metrics(self, opt_state):
        if not isinstance(self._optimizer, LossScaleOptimizer):
            return {"loss_scale": jnp.float32(1), "skipped_steps": jnp.int32(0)}
        metrics = diagnostics.metrics(opt_state)
        # Bits between the largest gradient, times the next scale, and 65504.
        scaled = metrics["loss_scale"] * optax.tree.get(opt_state, "largest")
        headroom = jnp.log2(float(jnp.finfo(jnp.float16).max) / scaled)
        return metrics | {"headroom": headroom}

    def _evaluate(self, state, batches):
        params = averaged_parameters(state.opt_state)
        losses = jax.lax.map(lambda tokens: self.loss(params, tokens), batches)
        return jnp.exp(losses.mean())


def _describe(x, sharding):
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
