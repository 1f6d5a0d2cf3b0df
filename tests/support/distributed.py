"""One training run, fifty steps with overflows, on many devices in every way."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

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


def init_params(leaf=None):
    """Returns the parameters, with the scale by this name if there is one."""
    rng = np.random.default_rng(0)
    shapes = {"w1": (16, 16), "b1": (16,), "w2": (16, 16)}
    params = {k: rng.normal(size=s).astype(np.float32) / 4 for k, s in shapes.items()}
    return params | ({leaf: np.float32(SCALE.initial_scale)} if leaf else {})


def make_batches():
    rng = np.random.default_rng(1)
    x = rng.normal(size=(STEPS, BATCH, 16)).astype(np.float32)
    for step, example in OVERFLOWS.items():
        x[step, example, 3] = np.inf
    return x, np.sin(np.where(np.isfinite(x), x, 0))[..., ::-1].copy()


def loss_fn(params, x, y):
    hidden = jnp.tanh(x @ params["w1"] + params["b1"])
    return jnp.mean((hidden @ params["w2"] - y) ** 2)


def make_optimizer(**options):
    return LossScaleOptimizer(optax.sgd(0.5, momentum=0.9), SCALE, **options)


def init(optimizer, params):
    if "loss_scale" in params:
        optimizer = scale_as_parameter(optimizer)
    return optimizer.init(params)


def apply_gradients(optimizer, grads, params, state, **extra_args):
    """Takes the step of a trainer if the scale is a parameter."""
    if "loss_scale" not in params:
        return optimizer.apply_gradients(grads, params, state, **extra_args)
    optimizer = scale_as_parameter(optimizer)
    updates, state = optimizer.update(grads, state, params, **extra_args)
    return optax.apply_updates(params, updates), state


def gradients(optimizer, loss_fn, params, state, *batch):
    """Returns the gradients, as a trainer computes them if the scale is a parameter."""
    if "loss_scale" in params:
        return jax.grad(with_loss_scale(loss_fn))(params, *batch)
    return optimizer.value_and_grad(loss_fn, state)(params, *batch)[1]


def minimize(optimizer, loss_fn, params, state, *batch):
    if "loss_scale" not in params:
        return optimizer.minimize(loss_fn, params, state, *batch)[:2]
    loss, grads = jax.value_and_grad(with_loss_scale(loss_fn))(params, *batch)
    return apply_gradients(optimizer, grads, params, state, value=loss)


def record(optimizer, state):
    """What must be the same on all devices and in every way of running."""
    return (
        optimizer.current_loss_scale(state),
        state.last_step_applied,
        state.skipped_steps,
    )


def train(step, params, state, batches):
    """Runs all steps; returns the final parameters and the record of every step."""
    records = []
    for batch in zip(*batches, strict=True):
        params, state, row = step(params, state, *batch)
        # Waits for every step: with many of them in flight, eight devices on two
        # cores may find no thread left for a collective to meet in.
        records.append(jax.device_get(row))
    return *jax.device_get((params, state)), records


def one_device():
    optimizer = make_optimizer()

    @jax.jit
    def step(params, state, x, y):
        params, state, _ = optimizer.minimize(loss_fn, params, state, x, y)
        return params, state, record(optimizer, state)

    params = init_params()
    return train(step, params, optimizer.init(params), make_batches())


def pmap(leaf=None):
    # A trainer that averages the gradients needs no axis_name.
    axis_name = None if leaf else "batch"
    optimizer = make_optimizer(axis_name=axis_name)
    replicate = functools.partial(jax.tree.map, lambda x: jnp.stack([x] * 8))

    @functools.partial(jax.pmap, axis_name="batch")
    def step(params, state, x, y):
        grads = gradients(optimizer, loss_fn, params, state, x, y)
        grads = lax.pmean(grads, "batch")
        params, state = apply_gradients(optimizer, grads, params, state)
        return params, state, record(optimizer, state)

    params = init_params(leaf)
    state = replicate(init(optimizer, params))
    batches = [b.reshape(STEPS, 8, BATCH // 8, 16) for b in make_batches()]
    return train(step, replicate(params), state, batches)


def shard_map(check_vma=True, leaf=None):
    optimizer = make_optimizer(axis_name="batch", check_loss=check_vma)
    mesh = jax.make_mesh((8,), ("batch",), axis_types=(AxisType.Auto,))

    def global_loss_fn(params, x, y):
        return lax.pmean(loss_fn(params, x, y), "batch")

    def step(params, state, x, y):
        if check_vma:
            # The loss is the mean over all devices, and so are its gradients.
            params, state = minimize(optimizer, global_loss_fn, params, state, x, y)
        else:
            grads = gradients(optimizer, loss_fn, params, state, x, y)
            grads = lax.pmean(grads, "batch")
            params, state = apply_gradients(optimizer, grads, params, state)
        return params, state, record(optimizer, state)

    data = P("batch")
    step = jax.jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(P(), P(), data, data),
            out_specs=P(),
            check_vma=check_vma,
        )
    )
    params = init_params(leaf)
    return train(step, params, init(optimizer, params), make_batches())


def sharded_jit(kind=AxisType.Auto, leaf=None):
    optimizer = make_optimizer(check_loss=True)
    mesh = jax.make_mesh((8,), ("batch",), axis_types=(kind,))
    batches = jax.device_put(make_batches(), NamedSharding(mesh, P(None, "batch")))

    @jax.jit
    def step(params, state, x, y):
        params, state = minimize(optimizer, loss_fn, params, state, x, y)
        return params, state, record(optimizer, state)

    @jax.jit
    def all_steps(params, state, batches):
        def body(carry, batch):
            *carry, row = step(*carry, *batch)
            return tuple(carry), row

        return lax.scan(body, (params, state), batches)

    with jax.set_mesh(mesh):
        params = jax.device_put(init_params(leaf), NamedSharding(mesh, P()))
        state = jax.jit(functools.partial(init, optimizer))(params)
        (params, state), rows = all_steps(params, state, batches)
    params, state, rows = jax.device_get((params, state, rows))
    return params, state, list(zip(*rows, strict=True))


def one_overflow(way, axis_name=None, bad=64.0):
    """Takes a step of eight examples, one on each device; returns all results.

    Args:
      way: "sharded jit" or "shard_map".
      axis_name: That of the optimizer.
      bad: The fourth example. The others are 1/8.
    """
    rule = DynamicLossScale(2.0**20)
    options = {"axis_name": axis_name, "retries": 24}
    optimizer = LossScaleOptimizer(optax.sgd(0.5, momentum=0.9), rule, **options)
    mesh = jax.make_mesh((8,), ("i",), axis_types=(AxisType.Auto,))

    def loss_fn(param, x):
        products = param.astype(jnp.float16) * x.astype(jnp.float16)
        loss = jnp.mean(products.astype(jnp.float32))
        return loss if way == "sharded jit" else lax.pmean(loss, "i")

    def step(param, state, x):
        return optimizer.minimize(loss_fn, param, state, x)

    if way == "shard_map":
        specs = {"in_specs": (P(), P(), P("i")), "out_specs": P()}
        step = jax.shard_map(step, mesh=mesh, **specs)

    param, x = jnp.float32(1), jnp.full(8, 0.125).at[3].set(bad)
    start = jax.device_put((param, optimizer.init(param)), NamedSharding(mesh, P()))
    x = jax.device_put(x, NamedSharding(mesh, P("i")))
    results = jax.jit(step, donate_argnums=(0, 1))(*start, x)
    return jax.device_get(results)
