"""One training run, fifty steps with overflows, on many devices in every way."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from meshes import mesh_of, over_devices

from optax_lossscale import (
    DynamicLossScale,
    LossScaleOptimizer,
    scale_as_parameter,
    with_loss_scale,
)

STEPS, BATCH = 50, 32
# Steps at which one example of the batch overflows, and which example.
OVERFLOWS = {3: 0, 4: 31, 17: 9, 30: 16, 31: 16, 32: 17}
SCALE = DynamicLossScale(2.0**10, growth_interval=5)


def make_batches():
    rng = np.random.default_rng(1)
    x = rng.normal(size=(STEPS, BATCH, 16)).astype(np.float32)
    for step, example in OVERFLOWS.items():
        x[step, example, 3] = np.inf
    return x, np.sin(np.where(np.isfinite(x), x, 0))[..., ::-1].copy()


def loss_fn(params, x, y):
    hidden = jnp.tanh(x @ params["w1"] + params["b1"])
    return jnp.mean((hidden @ params["w2"] - y) ** 2)


def mean_over_devices(tree):
    return lax.pmean(tree, "batch")


def make(leaf, **options):
    """Returns an optimizer, the parameters, and the state.

    Args:
      leaf: The name of the scale among the parameters, or None.
      **options: Of the optimizer.
    """
    rng = np.random.default_rng(0)
    shapes = {"w1": (16, 16), "b1": (16,), "w2": (16, 16)}
    params = {k: rng.normal(size=s).astype(np.float32) / 4 for k, s in shapes.items()}
    optimizer = LossScaleOptimizer(optax.sgd(0.5, momentum=0.9), SCALE, **options)
    if leaf is None:
        return optimizer, params, optimizer.init(params)
    params[leaf] = np.float32(SCALE.initial_scale)
    return optimizer, params, scale_as_parameter(optimizer).init(params)


def train(optimizer, loss_fn, params, state, batches, average=None):
    """Takes all steps; returns the parameters, the state, and a record of each step.

    Args:
      optimizer: Of what `make` returns.
      loss_fn: The loss function.
      params: The parameters. With the scale among them, a trainer takes the steps.
      state: The state.
      batches: What to scan over.
      average: Averages the gradients over the devices, if the loss does not.
    """

    def step(carry, batch):
        params, state = carry
        if "loss_scale" in params:
            grad_fn = jax.value_and_grad(with_loss_scale(loss_fn))
            loss, grads = grad_fn(params, *batch)
            grads = average(grads) if average else grads
            updates, state = scale_as_parameter(optimizer).update(
                grads, state, params, value=loss
            )
            params = optax.apply_updates(params, updates)
        elif average:
            _, grads = optimizer.value_and_grad(loss_fn, state)(params, *batch)
            params, state = optimizer.apply_gradients(average(grads), params, state)
        else:
            params, state, _ = optimizer.minimize(loss_fn, params, state, *batch)
        scale = optimizer.current_loss_scale(state)
        return (params, state), (scale, state.last_step_applied, state.skipped_steps)

    (params, state), records = lax.scan(step, (params, state), batches)
    return params, state, records


def one_device():
    optimizer, *start = make(None)
    run = jax.jit(functools.partial(train, optimizer, loss_fn))
    return jax.device_get(run(*start, make_batches()))


def pmap(leaf):
    # A trainer that averages the gradients needs no axis_name.
    optimizer, *start = make(leaf, axis_name=None if leaf else "batch")
    run = functools.partial(train, optimizer, loss_fn, average=mean_over_devices)
    batches = [x.reshape(STEPS, 8, BATCH // 8, 16) for x in make_batches()]
    run = jax.pmap(run, axis_name="batch", in_axes=(None, None, 1))
    results = jax.device_get(run(*start, batches))
    for x in jax.tree.leaves(results):
        np.testing.assert_array_equal(x, np.broadcast_to(x[0], x.shape))
    return jax.tree.map(lambda x: x[0], results)


def shard_map(leaf, *, check_vma=True):
    optimizer, *start = make(leaf, axis_name="batch", check_loss=check_vma)

    def global_loss_fn(*args):
        return mean_over_devices(loss_fn(*args))

    if check_vma:
        # The loss is the mean over all devices, and so are its gradients.
        run = functools.partial(train, optimizer, global_loss_fn)
    else:
        run = functools.partial(train, optimizer, loss_fn, average=mean_over_devices)
    specs = (P(), P(), P(None, "batch")), P()
    run = over_devices(*specs, check_vma=check_vma)(run)
    return jax.device_get(run(*start, make_batches()))


def sharded_jit(leaf, *, kind=AxisType.Auto):
    optimizer, *start = make(leaf, check_loss=True)
    mesh = mesh_of(kind, batch=8)
    with jax.set_mesh(mesh):
        start = jax.device_put(start, NamedSharding(mesh, P()))
        batches = jax.device_put(make_batches(), NamedSharding(mesh, P(None, "batch")))
        run = jax.jit(functools.partial(train, optimizer, loss_fn))
        return jax.device_get(run(*start, batches))


WAYS = {
    "pmap": pmap,
    "shard_map": shard_map,
    "sharded jit": sharded_jit,
    "shard_map, unchecked": functools.partial(shard_map, check_vma=False),
    "explicit": functools.partial(sharded_jit, kind=AxisType.Explicit),
}
