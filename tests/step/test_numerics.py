"""Finiteness, dtype rules and small tree functions."""

import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import exhaustive_but
from jax.sharding import PartitionSpec as P
from meshes import mesh_of, over_devices

from benchmarks import hlo
from optax_lossscale import all_finite
from optax_lossscale._scaling import exact_exp2, largest_magnitude
from optax_lossscale._tree import Template

pytestmark = pytest.mark.optimized
FLOATS = ["float8_e5m2", "float8_e4m3fn", "float16", "bfloat16", "float32", "complex64"]
FLOATS += ["float64", "complex128"] * jax.config.jax_enable_x64
# The arrays of 6 bits are in jax.numpy, but XLA has none.
NARROW = [name for name in dir(jnp) if name.startswith(("float8", "float4"))]
SHAPES = [(), (1,), (3, 5), (257,)]
ALL = exhaustive_but(FLOATS, ["float8_e4m3fn", "float16", *FLOATS[5:]])
FLOAT0 = np.zeros((2,), jax.dtypes.float0)


class TestAllFinite:
    @pytest.mark.parametrize("dtype", ALL)
    @pytest.mark.parametrize("shape", exhaustive_but(SHAPES, [(), (257,)]))
    def test_finds_any_element(self, dtype, shape):
        ones = np.ones(shape, jnp.dtype(dtype))
        assert all_finite({"a": ones})
        for bad in (np.inf, -np.inf, np.nan):
            if "e4m3" in dtype and not np.isnan(bad):
                continue  # a dtype without infinities
            for position in {0, ones.size // 2, ones.size - 1}:
                broken = ones.copy()
                broken.flat[position] = bad
                tree = [jnp.ones(2), {"x": jnp.asarray(broken), "y": None}]
                assert not all_finite(tree), (bad, position)
                assert not jax.jit(all_finite)(tree)

    @pytest.mark.parametrize("dtype", exhaustive_but(NARROW, ["float8_e4m3fn"]))
    def test_of_every_narrow_dtype(self, dtype):
        for number in (0.5, 1.0, 4.0):
            tree = [jnp.ones(2), jnp.full(300, number).astype(dtype)]
            assert all_finite(tree)
            assert jax.jit(all_finite)(tree)
            assert largest_magnitude(tree) == max(number, 1)
        for bad in (np.inf, np.nan):
            broken = jnp.ones(300).at[7].set(bad).astype(dtype)
            # Not all have inf and nan; some make nan of inf.
            truth = np.isfinite(np.asarray(broken, np.float32)).all()
            assert all_finite([jnp.ones(2), broken]) == truth

    def test_sees_both_parts_of_a_complex_number(self):
        for bad in (complex(1, np.nan), complex(np.inf, 1), complex(0, -np.inf)):
            assert not all_finite(jnp.asarray([1 + 1j, bad], jnp.complex64))

    def test_the_largest_numbers_are_finite(self):
        for dtype in ("float16", "bfloat16", "float32"):
            top = jnp.finfo(dtype).max
            assert all_finite(jnp.array([top, -top, 0], dtype))
        # Whose absolute value is beyond float32.
        assert all_finite(jnp.array([3e38 + 3e38j], jnp.complex64))

    def test_a_sum_that_overflows_is_finite(self):
        assert all_finite(jnp.full(1000, jnp.finfo(jnp.float32).max))
        assert all_finite(jnp.full(1000, jnp.finfo(jnp.float16).max))

    def test_trees_without_numbers_are_finite(self):
        for tree in (None, (), {}, jnp.zeros((0, 3)), jnp.arange(3), FLOAT0):
            assert all_finite(tree)
            assert all_finite(tree).dtype == bool

    def test_ignores_what_is_not_a_float(self):
        key = jax.random.key(0)
        tree = [jnp.arange(3), FLOAT0, key, None, True, 7, print, "inf", jnp.ones(1)]
        assert all_finite(tree)
        assert not all_finite([*tree, float("nan")])

    def test_finds_what_fast_math_takes_for_impossible(self):
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_enable_fast_math=true"
        code = (
            "import jax, numpy as np; from optax_lossscale import all_finite;"
            "print(jax.jit(all_finite)(np.float32([1, np.inf, np.nan])))"
        )
        env = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, "-c", code]
        assert subprocess.check_output(command, env=env, text=True) == "False\n"


class TestLeavesThatVaryOverDifferentAxes:
    """Inside `jax.shard_map`, which keeps book of what varies over which axis."""

    def over_a_mesh(self, function, *, reduced):
        specs = [P("a"), P("b"), P(("a", "b")), P()]
        out = P() if reduced else P(("a", "b"))

        @over_devices((specs,), out, mesh_of(a=4, b=2))
        def mapped(leaves):
            result = function(leaves, axis_name=("a", "b") if reduced else None)
            return result if reduced else result.reshape(1)

        return mapped

    @pytest.mark.parametrize("reduced", [False, True])
    def test_values(self, reduced):
        check = self.over_a_mesh(all_finite, reduced=reduced)
        largest = self.over_a_mesh(largest_magnitude, reduced=reduced)
        # Which devices hold row 3: of 4, of 2, of 8, and of what is replicated.
        holders = [{6, 7}, {1, 3, 5, 7}, {3}, set(range(8))]
        for changed, holder in enumerate(holders):
            leaves = [np.ones(n, np.float32) for n in (4, 4, 8, 4)]
            leaves[changed][3] = np.nan
            holder = set(range(8)) if reduced else holder
            expected = [device not in holder for device in range(8)]
            assert np.resize(check(leaves), 8).tolist() == expected
            leaves[changed][3] = -5
            expected = [5 if device in holder else 1 for device in range(8)]
            assert np.resize(largest(leaves), 8).tolist() == expected

    def test_reduces_one_scalar(self):
        leaves = [jnp.ones(n) for n in (4, 4, 8, 4)]
        for function, dtype in ((all_finite, "s32"), (largest_magnitude, "f32")):
            mapped = self.over_a_mesh(function, reduced=True)
            module = hlo.parse(mapped.lower(leaves).compile().as_text())
            assert module.count("all-reduce") == 1
            (reduced,) = (i for i in module.running() if i.opcode == "all-reduce")
            assert reduced.type == f"{dtype}[]"


def test_the_largest_magnitude_is_finite_and_that_of_a_part():
    top = np.finfo(np.float32).max
    for tree, largest in [
        (jnp.array([1 - 4j, 3 + 1j]), 4),
        (jnp.array([1.0, -np.inf]), top),
        ([jnp.ones(2), {"x": np.float16(-8), "y": None}], 8),
    ]:
        assert largest_magnitude(tree) == largest
    assert np.isfinite(largest_magnitude([jnp.nan, jnp.ones(2)]))


@pytest.mark.parametrize(
    ("function", "bad", "one", "found"),
    [(all_finite, np.inf, True, False), (largest_magnitude, -7, 1, 7)],
)
def test_reduces_over_named_axes(function, bad, one, found):
    grid = jnp.ones((2, 3)).at[1, 2].set(bad)

    def reduced(axis_name):
        reduce = functools.partial(function, axis_name=axis_name)
        return jax.vmap(jax.vmap(reduce, axis_name="b"), axis_name="a")(grid).tolist()

    assert reduced(None) == [[one] * 3, [one, one, found]]
    assert reduced("b") == [[one] * 3, [found] * 3]
    assert reduced(("a", "b")) == [[found] * 3] * 2
    with pytest.raises(NameError, match="nowhere"):
        function(jnp.ones(3), axis_name="nowhere")


def test_powers_of_two_are_exact_and_within_bounds():
    exponents = np.array([-np.inf, -200, -126, 3, 126, 127, np.nan], np.float32)
    assert exact_exp2(exponents).tolist() == [
        *[2.0**-126] * 3, 8.0, *[2.0**126] * 2, 2.0**-126,
    ]  # fmt: skip


def test_a_template_holds_one_tree_until_it_is_filled():
    template = Template()
    for name in ("first", "second"):
        arrays = template.take({"name": name, "x": jnp.ones(2)})
        assert template.fill(arrays)["name"] == name
    template.take({"name": "third"})
    with pytest.raises(RuntimeError, match="traced a function twice"):
        template.take({"name": "fourth"})
