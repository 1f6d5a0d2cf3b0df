"""A cast of `autocast` has the line that mends it: with that in float32, it is gone."""

import re

import faulty_decisions  # noqa: F401 # They fill the table.
import jax
import jax.numpy as jnp
import pytest
from arithmetic import normal
from faults import FAULTS, X
from helpers import exhaustive_but
from jax import lax
from tracing import line_numbers, line_of

from optax_lossscale import autocast
from optax_lossscale.diagnostics import float32_lines, trace_numerics

pytestmark = pytest.mark.filterwarnings("ignore:autocast computes nothing")
PARAMS = {name: normal(6, 6, seed=i) for i, name in enumerate("abcd")}
BIG = 300  # Numbers that fit into float16, but not their squares.


def squared(w, x):
    h = BIG * (x @ w["a"])
    h = h * h
    out = h @ w["b"]  # squared
    return jnp.mean(out) * 1e-6


def moved(w, x):
    h = BIG * (x @ w["a"])
    h = h * h
    h = h.T
    h = jnp.concatenate([h, h[:, ::-1]], 1)
    out = w["b"] @ h  # moved
    return jnp.mean(out) * 1e-6


def read_by_three(w, x):
    h = BIG * (x @ w["a"])
    h = h * h
    q = h @ w["b"]  # read_by_three
    k = h @ w["c"]  # read_by_three
    v = h @ w["d"]  # read_by_three
    return jnp.mean(q) * 1e-6 + jnp.mean(k) * 1e-6 + jnp.mean(v) * 1e-6


@jax.jit
def dense(h, w):
    return h @ w  # in_a_call


def in_a_call(w, x):
    h = BIG * (x @ w["a"])
    h = h * h
    return jnp.mean(dense(h, w["b"])) * 1e-6


def in_a_loop(w, x):
    h = BIG * (x @ w["a"])
    h = h * h

    def body(total, w):
        return total + jnp.mean(h @ w) * 1e-6, None  # in_a_loop

    return lax.scan(body, 0.0, jnp.stack([w["b"], w["c"]]))[0]


def in_branches(w, x):
    h = BIG * (x @ w["a"])
    h = h * h
    out = lax.cond(
        x[0, 0] > 0,
        lambda h: h @ w["b"],  # in_branches
        lambda h: h @ w["c"],  # in_branches
        h,
    )
    return jnp.mean(out) * 1e-6


@jax.checkpoint
def block(h, w):
    h = h * h
    return h @ w  # in_a_checkpoint


def in_a_checkpoint(w, x):
    return jnp.mean(block(BIG * (x @ w["a"]), w["b"])) * 1e-6


def mapped(w, x):
    def of_row(x):
        h = BIG * (x @ w["a"])
        h = h * h
        return h @ w["b"]  # mapped

    return jnp.mean(jax.vmap(of_row)(x)) * 1e-6


@jax.custom_vjp
def bent(x):
    return jnp.sinh(x)


bent.defvjp(lambda x: (jnp.sinh(x), x), lambda x, g: (g * jnp.cosh(x),))


def of_a_rule(w, x):
    h = bent(8 * (x @ w["a"]))
    return jnp.mean(h @ w["b"]) * 1e-6  # of_a_rule


PROGRAMS = [
    squared, read_by_three, in_a_loop, moved, in_a_call, in_branches, in_a_checkpoint,
    mapped, of_a_rule,
]  # fmt: skip


def advised(finding):
    """Returns the lines of `float32=` that a finding advises."""
    (passed,) = re.findall(r'float32=(\[.*?\]|".*?")', finding.message)
    return re.findall(r'"(.*?)"', passed)


@pytest.mark.parametrize("program", exhaustive_but(PROGRAMS, PROGRAMS[:3]))
def test_the_product_is_named_and_float32_mends_it(program):
    first, *_ = trace_numerics(autocast(program), PARAMS, X).findings
    products = line_numbers(program.__name__, __file__)
    assert (first.kind, first.operation.name) == ("forward", "layer's input")
    assert first.operation.line in products
    lines = advised(first)
    assert {int(x.rpartition(":")[2]) for x in lines} == set(products), first.message
    mended = trace_numerics(autocast(program, float32=lines), PARAMS, X)
    kinds = [x.kind for x in mended.findings]
    assert kinds[0] in ("fine", "scale_too_high"), str(mended)
    found = float32_lines(autocast(program), PARAMS, X)
    ran = products[:1] if program is in_branches else products  # It takes one.
    assert {x.line for x in found.lines} >= set(ran), str(found)
    assert found.verified


ADVISED = ["nan_to_num", "angles", "nearest", "neighbours"]


@pytest.mark.parametrize("name", exhaustive_but(ADVISED, ADVISED[:1]))
def test_with_the_lines_that_a_finding_advises_it_is_gone(name):
    fault = FAULTS[name]
    options = {"scale": fault.scale}
    first, *_ = trace_numerics(autocast(fault.exact), *fault.args, **options).findings
    mended = autocast(fault.exact, float32=advised(first))
    trace = trace_numerics(mended, *fault.args, **options)
    assert [x.kind for x in trace.findings] == ["fine"], str(trace)


def test_a_cast_of_the_user_keeps_its_line():
    def loss_fn(w, x):
        h = BIG * (x @ w["a"])
        h = h * h
        h = h.astype(jnp.float16)  # the user's
        h = h.T
        out = h * jnp.float16(0.5)
        return jnp.mean(out.astype(jnp.float32)) * 1e-6

    first, *_ = trace_numerics(autocast(loss_fn), PARAMS, X).findings
    assert first.operation.line == line_of("the user's", __file__)


def test_one_layer_of_several_on_a_line_is_named_by_its_scope():
    def loss_fn(w, x):
        for name in "abc":
            with jax.named_scope(f"layer_{name}"):
                x = BIG ** (name == "b") * (x @ w[name]) ** 2
        return jnp.mean(x) * 1e-9

    first, *_ = trace_numerics(autocast(loss_fn), PARAMS, X).findings
    assert first.operation.scope == "layer_c"
    assert ' write with jax.named_scope("name"): around its call' in first.message
    mended = autocast(loss_fn, float32="layer_c")
    first, *_ = trace_numerics(mended, PARAMS, X, scale=1.0).findings
    assert first.kind == "fine", first.message
    # The only product of its line is named by that.
    first, *_ = trace_numerics(autocast(squared), PARAMS, X).findings
    assert "named_scope" not in first.message


def test_a_gradient_that_a_product_rounds_has_the_line_of_the_product():
    def loss_fn(w, x):
        likelihoods = jnp.exp(-40 + 0 * x) @ jax.nn.softmax(w["a"])  # the product
        return -jnp.mean(jnp.log(likelihoods + 1e-30))

    trace = trace_numerics(autocast(loss_fn), PARAMS, X)
    product = line_of("the product", __file__)
    casts = [x.operation for x in trace.findings if x.operation.name == "cast"]
    assert {x.line for x in casts} == {product}, str(trace)
    mended = autocast(loss_fn, float32=f"test_trace_casts.py:{product}")
    (first,) = trace_numerics(mended, PARAMS, X).findings
    assert first.kind == "fine", first.message


def test_a_line_that_rounding_saves_from_a_nan_of_float32_is_named():
    def loss_fn(w, x):
        h = x @ jnp.eye(6) + 0 * (x @ w["a"])
        distances = jnp.sqrt(jnp.sum((h - x) ** 2, -1))  # a distance of zero
        return jnp.mean(distances)

    (first,) = trace_numerics(autocast(loss_fn), PARAMS, X).findings
    assert first.operation.line == line_of("a distance of zero", __file__)
    assert "float32 makes inf or nan here" in first.message
    assert "guard log, sqrt, norm" in first.message

    def overflowing(w, x):
        return loss_fn(w, x) + jnp.mean((1e5 * x) @ w["b"])  # less urgent

    (first,) = trace_numerics(autocast(overflowing), PARAMS, X).findings
    assert first.operation.line == line_of("a distance of zero", __file__)
