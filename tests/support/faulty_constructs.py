"""An inf that begins in each construct of JAX: in calls, loops, branches, rules."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arithmetic import TWO, total
from faults import fault, needs_devices
from helpers import INF
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P

# The first operation that makes an inf.
product, exponential = {"primitive": "mul"}, {"primitive": "exp"}


@fault(TWO, operation=exponential)
def jit_called_twice(cast, w):
    helper = jax.jit(lambda x: jnp.exp(x))  # jit_called_twice
    return total(helper(helper(cast(w)) * 5.0))


@fault(TWO * 1.5, operation=product)
def jax_nn_overflows_inside(cast, w):
    w = jax.nn.silu(cast(w) * 2e4) * cast(TWO)  # jax_nn_overflows_inside
    return total(w)


backward = {"kind": "scale_too_high", "phase": "backward", "scale": 4.0}


@fault(TWO, **backward, operation=product)
def custom_jvp(cast, w):
    @jax.custom_jvp
    def f(x):
        return x

    @f.defjvp
    def _(primals, tangents):
        return f(*primals), tangents[0] * jnp.float16(3e4)  # custom_jvp

    return total(f(cast(w)))


rule = {"in_rule": True}


@fault(TWO, **backward, operation=product | rule, default=True)
def custom_vjp(cast, w):
    f = jax.custom_vjp(lambda x: x)
    f.defvjp(lambda x: (x, None), lambda _, g: (g * jnp.float16(3e4),))
    x = f(cast(w))  # custom_vjp
    return total(x)


at_any_scale = backward | {"kind": "backward"}


@fault(np.ones(2, np.float32), **at_any_scale, operation=rule, default=True)
def any_scale(cast, w):
    largest = jnp.float16(65504)
    f = jax.custom_vjp(lambda x: x)
    f.defvjp(lambda x: (x, x), lambda x, g: (g + largest + x * largest,))
    return total(f(cast(w)))  # any_scale


numbers = np.array([1, 3, 9], np.float16)


@fault(TWO, numbers, operation=exponential | {"shape": (3, 2)})
def vmap(cast, w, xs):
    return total(jax.vmap(lambda x: jnp.exp(cast(w) * x))(xs))  # vmap


@fault(TWO, operation=product)
def scan(cast, w):
    def body(x, y):
        x = x * y  # scan
        return x, jnp.sin(x)

    # 2 * 16^4 overflows.
    xs = jnp.full(8, 16, jnp.float16)
    x, out = lax.scan(body, cast(w), xs, reverse=True)
    return total(x) + total(out)


# It runs backwards: 4 * 8^5 is the first that overflows.
@fault(TWO * 1e-3, **backward, operation=product, default=True)
def backward_of_scan(cast, w):
    def body(x, _):
        return x * jnp.float16(8), None  # backward_of_scan

    return total(lax.scan(body, cast(w), length=6)[0])


@fault(TWO, operation=product)
def nested_scans(cast, w):
    def inner(x, _):
        return x * jnp.float16(4), None  # nested_scans

    def outer(x, _):
        return lax.scan(inner, x, length=3)[0], None

    return total(lax.scan(outer, cast(w), length=4)[0])


# 16 * 16^3, in one part or the other.
@fault(TWO * 8, operation=product)
def parts_change_places(cast, w):
    def inner(state, _):
        x, y = state
        return (y, x * jnp.float16(16)), y  # parts_change_places

    def outer(state, _):
        return lax.scan(inner, state, length=2)

    state, out = lax.scan(outer, (cast(w), cast(w)), length=3)
    return total(state[0]) + total(out)


@fault(TWO, operation=product)
def fori_loop(cast, w):
    body = lambda i, x: x * jnp.float16(8)  # noqa: E731 # fori_loop
    return total(lax.fori_loop(0, 9, body, cast(w)))


@fault(TWO, operation=product, default=True)
def while_loop(cast, w):
    def body(state):
        return state[0] + 1, state[1] * jnp.float16(256)  # while_loop

    start = 0, lax.stop_gradient(cast(w))
    return total(lax.while_loop(lambda s: s[0] < 5, body, start)[1]) + total(w)


@fault(TWO * 300, operation={"primitive": "square"}, default=True)
def checkpoint(cast, w):
    @jax.checkpoint
    def block(x):
        return jnp.sin(jnp.square(x))  # checkpoint

    return total(block(cast(w)))


@fault(TWO * 10, operation=exponential, default=True)
def loop_in_a_checkpoint(cast, w):
    def body(x, _):
        return jnp.exp(x), None  # loop_in_a_checkpoint

    run = jax.checkpoint(lambda x: lax.scan(body, x, length=2)[0])
    return total(run(cast(w)))


number = product | {"shape": ()}


@fault(TWO * 2, jax.random.PRNGKey, operation=number)
@fault(TWO * 2, jax.random.key, name="-key", operation=number)
def dropout(cast, w, make_key):
    key = make_key(0)
    keep = jax.random.bernoulli(key, 0.5, (64,))
    x = jnp.where(keep, cast(w)[0] * 4e4, 0)  # dropout
    return total(x + jax.random.normal(key, (64,), jnp.float16))


wide = product | {"dtype": "complex64"}


@fault(TWO, np.array([2, 1]), operation=wide)
def complex_numbers(cast, w, i):
    x = w[jnp.argsort(i)] * 1e30
    z = lax.complex(x, x) * lax.complex(x, x)  # complex_numbers
    return jnp.real(z).sum() + jnp.imag(z).sum()


opaque = {"primitive": "pure_callback", "opaque": True}


@fault(TWO, operation=opaque, default=True)
def callback(cast, w):
    x = lax.stop_gradient(cast(w))
    return total(jax.pure_callback(lambda x: x * INF, x, x)) + total(w)  # callback


@fault(TWO, dtype="bfloat16", operation=exponential | {"dtype": "bfloat16"})
def bfloat16(cast, w):
    return total(jnp.exp(w.astype(jnp.bfloat16) * 60))  # bfloat16


quantized = product | {"dtype": "float16"}


@fault(TWO, dtype="float8_e5m2", operation=quantized, default=True)
def float8(cast, w):
    x = cast((w * 250).astype(jnp.float8_e5m2))
    return total(x * x)  # float8


needs_float64 = pytest.mark.skipif(not jax.config.jax_enable_x64, reason="no float64")
wide = exponential | {"dtype": "float64"}


@fault(TWO, marks=[needs_float64], operation=wide)
def float64(cast, w):
    return jnp.sum(jnp.exp(w.astype(float) * 400))  # float64


@fault(TWO, operation=product, default=True)
def before_a_loop(cast, w):
    x = cast(w) * 6e4  # before_a_loop
    y, ys = lax.scan(lambda y, z: (jnp.sin(y) + x, z * 2), cast(w), x)
    return total(y) + total(ys)


@fault(TWO, operation=product, default=True)
def before_a_branch(cast, w):
    x = cast(w) * 6e4  # before_a_branch
    return total(lax.cond(w[0] > 0, lambda x: x * 2, jnp.sin, x))


@fault(TWO, operation=product, default=True)
def beside_a_mask(cast, w):
    mask = jnp.eye(2, dtype=bool)
    x = jnp.where(mask, cast(w), jnp.float16(-INF))
    x = x * 4e4  # beside_a_mask
    return total(jnp.where(mask, x, 0))


# Only the second device overflows, and it is the worst device that counts.
numbers = np.array([1.0, 2.0, 3.0, 6e4], np.float32)
half_of_it = product | {"shape": (2,), "infs": 0.5}
one_of_two = {"operation": half_of_it, "marks": [needs_devices]}


@fault(TWO, numbers, False, name="-unchecked", **one_of_two)
@fault(TWO, numbers, True, default=True, **one_of_two)
def shard_map(cast, w, x, check_vma):
    def local(w, x):
        y = cast(w) * cast(x)  # shard_map
        y, _ = lax.scan(lambda y, _: (jnp.sin(y), None), y, length=2)
        y = lax.cond(w[0] > 0, jnp.cos, jnp.sin, y)
        return lax.psum(total(y), "x")

    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    specs = {"in_specs": (P(), P("x")), "out_specs": P()}
    return jax.shard_map(local, mesh=mesh, check_vma=check_vma, **specs)(w, x)
