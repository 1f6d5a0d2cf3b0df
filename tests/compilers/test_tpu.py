"""What the real TPU compiler makes of a step; it needs no TPU, only libtpu."""

import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import plain_step, relaxed, scaled_step
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

from optax_lossscale import LossScaleOptimizer

pytest.importorskip("libtpu", reason="install the extra `tpu`")
# Several test processes may compile at once, as there is no TPU to contend for.
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"

SHAPES = {"w1": (1024, 1024), "w2": (1024, 1024), "b": (1024,)}
REPLICATED = dict.fromkeys(SHAPES, P())
SHARDED = {"w1": P(None, "x"), "w2": P("x", None), "b": P()}
LAYOUTS = {
    "1 chip": (1, REPLICATED),
    "4 chips, replicated": (4, REPLICATED),
    "4 chips, sharded": (4, SHARDED),
}


def loss_fn(params, x):
    hidden = jnp.tanh(x @ params["w1"])
    return jnp.mean((hidden @ params["w2"] + params["b"]) ** 2)


def compile_step(optimizer, step, chips, specs):
    """Compiles a step for `chips` TPUs, with parameters and state sharded alike."""
    topology = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2")
    mesh = Mesh(np.array(topology.devices[:chips]), ("x",), axis_types=(AxisType.Auto,))

    def placed(path, leaf):
        names = [key.key for key in path if hasattr(key, "key")]
        spec = specs[names[-1]] if names else P()
        return jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec)
        )

    params = {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in SHAPES.items()}
    state = jax.eval_shape(optimizer.init, params)
    params = {k: placed((jax.tree_util.DictKey(k),), x) for k, x in params.items()}
    state = jax.tree_util.tree_map_with_path(placed, state)
    sharding = NamedSharding(mesh, P("x"))
    x = jax.ShapeDtypeStruct((512, 1024), jnp.float32, sharding=sharding)
    return jax.jit(step, donate_argnums=(0, 1)).lower(params, state, x).compile()


def reductions(compiled):
    """Returns the results of all all-reduces, without their layouts."""
    found = re.findall(r"= (.*?) all-reduce(?:-start)?\(", compiled.as_text())
    return [re.sub(r"\{[^}]*\}", "", result) for result in found]


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_step_selects_and_adds_one_scalar_reduction(layout):
    inner = relaxed(optax.adam(1e-3))
    optimizer = LossScaleOptimizer(inner)

    plain = plain_step(loss_fn, inner)
    scaled = scaled_step(loss_fn, optimizer)

    theirs = compile_step(inner, plain, *layout)
    ours = compile_step(optimizer, scaled, *layout)
    text = ours.as_text()
    assert " conditional(" not in text
    assert text.count("all-gather(") == theirs.as_text().count("all-gather(")
    added = len(reductions(ours)) - len(reductions(theirs))
    scalars = [r for r in reductions(ours) if set(re.findall(r"\[.*?\]", r)) == {"[]"}]
    # Replicated gradients are known to agree; a sum of shards needs one reduction.
    assert added == len(scalars) == (layout[1] is SHARDED)
    temp = [c.memory_analysis().temp_size_in_bytes for c in (ours, theirs)]
    assert temp[0] <= 1.05 * temp[1] + 4096
    bytes_accessed = [c.cost_analysis()["bytes accessed"] for c in (ours, theirs)]
    assert bytes_accessed[0] <= 1.15 * bytes_accessed[1]
