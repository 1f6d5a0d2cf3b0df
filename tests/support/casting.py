"""What the tests of `autocast` share: programs in value, and where they compute."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from arithmetic import normal as normal

from optax_lossscale import LossScaleOptimizer, autocast
from optax_lossscale._jaxprs.parts import all_equations

PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot_general")


def x64():
    """Returns a context in which JAX has dtypes of 64 bits."""
    if isinstance(getattr(jax, "enable_x64", None), type(jax.debug_nans)):
        return jax.enable_x64(True)
    from jax.experimental import enable_x64  # Older versions.

    return enable_x64(True)


def compiled_step(f, params, *args):
    """Returns a function of the scale: the loss and the unscaled gradients."""
    optimizer = LossScaleOptimizer(optax.sgd(1.0))
    fresh = optimizer.init(params)
    run = jax.jit(
        lambda state, *args: optimizer.value_and_grad(f, state)(*args),
        # Otherwise XLA computes runs of float16 operations in float32 on a CPU.
        compiler_options={"xla_allow_excess_precision": False},
    )

    def at_scale(scale):
        state = optax.tree.set(fresh, loss_scale=jnp.float32(scale))
        return run(state, params, *args)

    return at_scale


def errors(found, wanted):
    """Returns the worst relative error of the loss and of the gradients; nan is inf."""
    (loss, grads), (true_loss, true_grads) = found, wanted
    # Flattened: older versions of Flax compare a State by identity.
    types = [jax.tree.flatten(jax.tree.map(jax.typeof, x)) for x in (grads, true_grads)]
    assert types[0] == types[1]
    pairs = zip(jax.tree.leaves(grads), jax.tree.leaves(true_grads), strict=True)
    found = [abs(float(loss) / float(true_loss) - 1)]
    for x, y in pairs:
        x, y = (np.ravel(z).astype(float) for z in (x, y))
        if np.linalg.norm(y) > 1e-6:
            found.append(np.linalg.norm(x - y) / np.linalg.norm(y))
    # Python's max would lose a nan.
    return float(np.max(np.nan_to_num(found, nan=np.inf)))


def error(f, params, *args, scale=2.0**12, dtype=jnp.float16):
    """Returns the worst error of `autocast(f)` against float32, at all the scales."""
    wanted = jax.jit(jax.value_and_grad(f))(params, *args)
    step = compiled_step(autocast(f, dtype), params, *args)
    return max(errors(step(x), wanted) for x in np.atleast_1d(scale))


def equations(f, *args, names=PRODUCTS):
    """Returns the equations of a function that have one of these names."""
    jaxpr = jax.make_jaxpr(f)(*args).jaxpr
    return [x for x in all_equations(jaxpr) if x.primitive.name in names]


def dtypes(f, *args, names=PRODUCTS):
    """Returns the dtypes of the results of such equations."""
    return [x.outvars[0].aval.dtype for x in equations(f, *args, names=names)]


def saved(f, params):
    """Returns how many bytes the backward pass reads."""
    backward = jax.eval_shape(lambda params: jax.vjp(f, params)[1], params)
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(backward))


def products(f, *args):
    """Returns the dtypes that the products compute in, in both passes."""
    found = equations(jax.value_and_grad(f, allow_int=True), *args)
    return [{v.aval.dtype.name for v in (*x.invars, *x.outvars)} for x in found]


def check(f, params, *args, tolerance=0.01, scales=(1.0, 2.0**12), dtype=jnp.float16):
    """Checks that `autocast(f)` computes in `dtype`, and agrees with float32."""
    found = products(autocast(f, dtype), params, *args)
    assert found
    assert all(x == {jnp.dtype(dtype).name} for x in found), found
    assert error(f, params, *args, scale=scales, dtype=dtype) < tolerance
