"""States after steps of training, which the tests of `report` read."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
from helpers import INF, NAN

from optax_lossscale import DynamicLossScale, FixedLossScale, LossScaleOptimizer

PARAMS = {"b": np.zeros(2, np.float32), "w": np.ones(3, np.float32)}
# A step is a gradient, perhaps with a loss, and perhaps with a veto.
LOST, OVERFLOW = (NAN, NAN), (INF, 1.0)
VETOED, VETOED_OVERFLOW = (1.0, 1.0, True), (INF, 1.0, True)
SKIPPING = FixedLossScale(8.0, skip_nonfinite=True)
ONE, HIGH = DynamicLossScale(1.0), DynamicLossScale(2.0**20)


@functools.cache
def trainer(loss_scale, check_loss, **options):
    """Returns an optimizer, and a function that takes its state through steps."""
    inner = optax.sgd(0.5)
    optimizer = LossScaleOptimizer(inner, loss_scale, check_loss=check_loss, **options)

    @jax.jit
    def train(state, columns, count):
        def step(i, state):
            grad, loss, veto = (x[i] for x in columns)
            grads = jax.tree.map(lambda x: jnp.full_like(x, grad), PARAMS)
            extra = {"value": loss} if check_loss else {}
            return optimizer.update(grads, state, PARAMS, skip_if=veto, **extra)[1]

        return jax.lax.fori_loop(0, count, step, state)

    return optimizer, train


def run(*steps, loss_scale="dynamic", check_loss=None, **options):
    """Returns the state after steps."""
    if check_loss is None:
        check_loss = any(isinstance(step, tuple) for step in steps)
    optimizer, train = trainer(loss_scale, check_loss, **options)
    state = optimizer.init(PARAMS)
    if not steps:
        return state
    steps = [step if isinstance(step, tuple) else (step,) for step in steps]
    steps = [step + (1.0, False)[len(step) - 1 :] for step in steps]
    # The first steps alone run. Of few lengths: few programs.
    grads, losses, vetoes = np.resize(np.float32(steps), (max(8, len(steps)), 3)).T
    return train(state, (grads, losses, vetoes > 0), len(steps))


def retry(*factors, **options):
    """Returns the state after steps of `minimize` in which the loss has these factors.

    The derivative with respect to float16 numbers overflows at 2**20, not at 2**15.
    """
    options = {"loss_scale": HIGH, "retries": 24} | options
    optimizer = LossScaleOptimizer(optax.sgd(0.5), **options)

    def loss_fn(params, factor):
        half = params.astype(jnp.float16)
        return jnp.sum(half.astype(jnp.float32)) * factor

    def step(carry, factor):
        return optimizer.minimize(loss_fn, *carry, factor)[:2], None

    param = jnp.float32(1)
    carry = param, optimizer.init(param)
    return jax.lax.scan(step, carry, jnp.array(factors, jnp.float32))[0][1]


def with_numbers(scale=4.0, **numbers):
    """Returns a state with this loss scale and these counts."""
    state = run()
    rule = state.loss_scale_state._replace(loss_scale=jnp.float32(scale))
    numbers = {name: jnp.asarray(x, jnp.int32) for name, x in numbers.items()}
    return state._replace(loss_scale_state=rule, **numbers)


def rows_of(verdict):
    """Returns the rows of numbers of a printed report, by their names."""
    return dict(re.findall(r"^  (\S.*?)  +(.*)$", str(verdict), re.M))
