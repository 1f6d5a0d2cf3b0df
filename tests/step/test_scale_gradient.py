"""`scale_gradient` keeps the value, and multiplies the gradients by a scale."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import INF, NAN, WRAPS, assert_same_bits, every_wrap
from jax import lax
from meshes import PARTS, WHOLE, over_devices

from optax_lossscale import scale_gradient

TWO, FOUR = jax.device_put(np.float32(2)), jax.device_put(np.float32(4))
DTYPES = ["float8_e5m2", "float16", "bfloat16", "float32", "complex64"]
DTYPES += ["float64"] * jax.config.jax_enable_x64
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


def pull_back(scale, x, gradient):
    """Returns the gradient of `x`, given that of the result."""
    (found,) = jax.vjp(lambda x: scale_gradient(x, scale), x)[1](gradient)
    return found


@every_dtype
@every_wrap
def test_keeps_the_value_to_the_bit(wrap, dtype):
    x = jnp.array([-0.0, NAN, jnp.finfo(dtype).smallest_subnormal, INF, 1.5], dtype)
    for scale in map(jnp.float32, (1024, 0.1, -1, NAN)):
        found, _ = wrap(functools.partial(jax.vjp, scale_gradient))(x, scale)
        assert_same_bits((found, wrap(scale_gradient)(x, scale)), (x, x))


@every_dtype
@every_wrap
def test_multiplies_gradients_in_at_least_float32(wrap, dtype):
    # In float16 these scales are inf and zero.
    for scale, gradient in ((2.0**20, -(2.0**-13)), (2.0**-26, 2.0**15)):
        gradient = jnp.full(3, gradient, dtype)
        found = wrap(pull_back)(jnp.float32(scale), gradient, gradient)
        assert_same_bits(found, jnp.full(3, scale * gradient[0].item(), dtype))


def test_gradients_that_are_not_finite():
    inf = pull_back(2.0**20, jnp.float16(1), jnp.float16(1))
    assert (inf, pull_back(2.0**-20, jnp.float16(1), inf)) == (INF, INF)
    found = pull_back(2.0, jnp.complex64(1), jnp.complex64(complex(INF, 1)))
    assert (found.real, found.imag) == (INF, 2)


def test_other_leaves_pass_through():
    leaves = [None, 3, True, "s", jnp.sin, jnp.float32, jnp.arange(2)]
    leaves += [jax.random.key(0), np.zeros(2, jax.dtypes.float0)]
    pairs = zip(scale_gradient(leaves, 2.0), leaves, strict=True)
    assert all(x is y for x, y in pairs)
    _, pull = jax.vjp(lambda tree: scale_gradient(tree, 2.0), (jnp.arange(2), TWO))
    assert pull((leaves[-1], FOUR))[0][1] == 8


def test_names_a_scale_of_another_type():
    for scale in (jnp.float16(2), jnp.ones(2, jnp.float32), [2.0], None, True):
        with pytest.raises(TypeError, match=r"^scale must .* got "):
            scale_gradient(TWO, scale)


@pytest.mark.parametrize(
    "scale", [3, 3.0, np.float32(3), jax.device_put(np.float32(3))]
)
@pytest.mark.parametrize("x", [2.0, np.float32(2), np.ones(2, np.float32), TWO])
def test_numbers_and_arrays(x, scale):
    found = jax.grad(lambda x: jnp.sum(scale_gradient(x, scale)))(x)
    assert_same_bits(found, jnp.full(np.shape(x), 3, found.dtype))


def test_a_computed_scale_compiles_once_and_has_no_derivative():
    function = jax.value_and_grad(lambda x, scale: scale_gradient(x, 2 * scale) ** 2)
    compiled = jax.jit(function)
    found = [compiled(TWO, jnp.float32(scale)) for scale in (1, 2, -1)]
    assert (found, compiled._cache_size()) == ([(4, 8), (4, 16), (4, -8)], 1)
    found = jax.vmap(function, (None, 0))(TWO, jnp.arange(3, dtype=jnp.float32))
    assert [x.tolist() for x in found] == [[4, 4, 4], [0, 8, 16]]
    for derivative in (jax.grad, jax.jacfwd):
        assert derivative(lambda scale: scale_gradient(TWO, scale))(TWO) == 0
        assert derivative(lambda scale: pull_back(scale, TWO, TWO))(TWO) == 0


TRANSFORMS = {
    **WRAPS,
    "checkpoint": jax.checkpoint,
    "scan": lambda f: lambda x: lax.scan(lambda x, _: (f(x), None), x, length=1)[0],
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_acts_on_the_first_derivative_alone(transform):
    inside = transform(lambda x: scale_gradient(x, 4.0) ** 3)
    outside = transform(lambda x: scale_gradient(x**3, 4.0))
    for f in (inside, outside):

        @jax.jit
        def derivatives(x, tangent, f=f):
            pairs = itertools.product((jax.grad, jax.jacfwd), repeat=2)
            first = jax.linearize(f, x)[1](tangent), jax.value_and_grad(f)(x)
            second = [outer(inner(f))(x) for outer, inner in pairs]
            return jax.jvp(f, (x,), (tangent,)), first, second

        expected = (8, 4 * 12 * 4), (4 * 12 * 4, (8, 4 * 12)), [4 * 12] * 4
        assert derivatives(TWO, FOUR) == expected


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(check_vma):
    @over_devices((PARTS, WHOLE), PARTS, check_vma=check_vma)
    def gradients(each, same):
        def gradient(x, scale):
            return jax.grad(lambda x: jnp.sum(scale_gradient(x, scale) * each))(x)

        found = [gradient(x, s) for x in (each, same) for s in (each[0], same)]
        return jnp.stack([each * 0 + x for x in found], 1)

    i = np.arange(8, dtype=np.float32)
    expected = np.stack([i * i, 4 * i, i * i, 4 * i])
    if check_vma:  # The gradients of what all devices share are added up.
        expected[2:] = expected[2:].sum(1, keepdims=True)
    np.testing.assert_array_equal(gradients(i, FOUR).T, expected)
