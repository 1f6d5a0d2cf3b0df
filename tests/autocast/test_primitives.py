"""The table of JAX's primitives has all of them."""

import collections
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from casting import dtypes
from jax.extend.core import Primitive

from optax_lossscale import autocast
from optax_lossscale._jaxprs import primitives

# A fresh process: other tests and libraries register primitives of their own.
LIST = """
import gc, importlib, os, warnings
from jax.extend.core import Primitive
import jax
names = "ad_checkpoint custom_batching custom_derivatives debug experimental.checkify"
names += " experimental.custom_partitioning experimental.layout experimental.overlap"
names += " ffi image lax"
names += " lax.linalg nn nn.initializers numpy numpy.fft numpy.linalg random ref"
names += " scipy.cluster.vq scipy.fft scipy.integrate scipy.interpolate scipy.linalg"
names += " scipy.ndimage scipy.optimize scipy.signal scipy.sparse.linalg"
names += " scipy.spatial.transform scipy.special scipy.stats sharding"
for name in names.split():
    try:
        importlib.import_module("jax." + name)
    except ModuleNotFoundError:
        # Older versions lack them.
        if name not in ("experimental.overlap", "ref", "scipy.interpolate"):
            raise
print(*{x.name for x in gc.get_objects() if isinstance(x, Primitive)})
"""


def test_every_primitive_of_jax_is_in_the_table():
    command = [sys.executable, "-W", "ignore", "-c", LIST]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    names = set(found.stdout.split())
    assert {"dot_general", "shard_map", "cholesky"} < names
    missing = names - {name for *_, row in primitives.TABLE for name in row.split()}
    assert not missing, f"Which row of optax_lossscale/_jaxprs/primitives.py? {missing}"


def test_each_primitive_has_one_row():
    names = [name for *_, row in primitives.TABLE for name in row.split()]
    assert [x for x, n in collections.Counter(names).items() if n > 1] == []


def test_traits_are_looked_up():
    Kind, Trait = primitives.Kind, primitives.Trait
    assert primitives.kind_of("tanh") == Kind.BOUNDED
    assert primitives.kind_of("somebody's own") == Kind.FLOAT32
    assert primitives.has("psum", Trait.COLLECTIVE)
    assert not primitives.has("psum", Trait.CHEAP)
    assert not primitives.has("somebody's own", Trait.CHEAP)
    assert primitives.names_of(Kind.LOOP) == {"scan", "while"}
    assert primitives.names_of(Trait.ORDER) == {"lt", "le", "gt", "ge"}


MOVES = {
    "stack": lambda h: jnp.stack([h, h]),
    "unstack": lambda h: jnp.stack(jnp.unstack(h)[::2]),
    "tile": lambda h: jnp.tile(h, (2, 1)),
    "top_k": lambda h: jax.lax.top_k(h, 2)[0],
    "device_put": lambda h: jax.device_put(h, jax.devices()[0]),
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_moves_between_products_stay_half(move):
    @autocast
    def f(w, x):
        h = move(x @ w) * 0.5
        return h @ jnp.ones((h.shape[-1], 2))

    ones = jnp.ones((4, 4))
    assert dtypes(f, ones, ones, names=["mul"]) == [jnp.float16]


def test_a_primitive_like_add_needs_one_row_of_the_table(monkeypatch):
    plus = Primitive("plus")
    plus.def_abstract_eval(lambda x, y: x)
    monkeypatch.setitem(primitives._ROWS, "plus", primitives._ROWS["add"])

    def f(p, x):
        h = x @ p["w"]
        return plus.bind(h, jnp.broadcast_to(p["b"], h.shape)) @ p["w"]

    params = {"w": jnp.ones((4, 4)), "b": jnp.ones(4)}
    found = dtypes(autocast(f), params, jnp.ones((2, 4)), names=["plus"])
    assert found == [jnp.float16]
