"""The plan of a program in words, as CONTRIBUTING.md shows it."""

import jax.numpy as jnp
from casting import normal
from jax import lax
from tracing import line_of

from optax_lossscale._autocast.describe import describe

PARAMS, X = {"w": normal(8, 8), "gain": normal()}, normal(16, 8)


def loss_fn(params, x):
    def step(h, _):
        return jnp.tanh(h @ params["w"]), None  # inside

    h = jnp.exp(x) @ params["w"] * params["gain"]  # layer
    h, _ = lax.scan(step, h, length=2)  # loop
    h = jnp.sum(h @ params["w"] * 2)  # sum
    return h + jnp.sum(jnp.dot(x, params["w"], precision="highest"))  # mine


WANTED = """\
HALF = exp(WIDE)  float32, rounded for products; layer
HALF = dot_general(HALF, WIDE)  product; layer
HALF = mul(HALF, WIDE)  arithmetic, operand 2 gives way; layer
HALF = scan(WIDE, HALF)  loop; loop
  HALF = dot_general(HALF, HALF)  product; inside
  SOFT = tanh(HALF)  bounded; inside
HALF = dot_general(HALF, WIDE)  product; sum
SOFT = mul(HALF, SOFT)  arithmetic, read in float32; sum
WIDE = reduce_sum(SOFT)  float32; sum
WIDE = dot_general(WIDE, WIDE)  float32, product in the table, chosen by float32=; mine
WIDE = reduce_sum(WIDE)  float32, chosen by float32=; mine
WIDE = add(WIDE, WIDE)  arithmetic, chosen by float32=; mine"""


def test_each_step_has_a_line_with_states_and_reasons():
    mine = f"test_describe.py:{line_of('mine', __file__)}"
    found = describe(loss_fn, PARAMS, X, float32=mine)
    for x in ("inside", "layer", "loop", "sum", "mine"):
        found = found.replace(f"test_describe.py:{line_of(x, __file__)}", x)
    lines = zip(found.splitlines(), WANTED.splitlines(), strict=True)
    for line, wanted in lines:
        step, reasons = wanted.split(")  ")
        assert line == f"{step + ')':40}  {reasons}"
