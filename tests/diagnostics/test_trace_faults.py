"""Faults of each kind, alone and in pairs: the more urgent one comes first."""

import functools
import itertools

import jax
import jax.numpy as jnp
import pytest
from helpers import INF, NAN, exhaustive_but
from jax import lax
from tracing import Traced, line_of, total

from optax_lossscale.diagnostics import trace_numerics

# What makes each fault: numbers that `loss_fn` reads. The most urgent comes first.
FAULTS = {
    "parameter": {"params": NAN},
    "data": {"x": INF},
    "overflow": {"large": 300.0},
    "constant": {"shift": 0.0},
    "backward": {"steep": 3e5},
    "underflow": {"tiny": 1e-8},
    "rounding": {"start": 2040.0, "count": 600.0},
    "cancellation": {"level": 2048.0},
    "decision": {"edge": 3000.0},
}
KINDS = dict(zip(FAULTS, [
    "nonfinite_argument", "nonfinite_argument", "forward", "forward", "scale_too_high",
    "underflow", "precision", "precision", "decision",
], strict=True))  # fmt: skip
HEALTHY = {
    "params": 1.0, "x": 1.0, "large": 1.0, "shift": 1.0, "steep": 1.0, "tiny": 1.0,
    "start": 0.0, "count": 8.0, "level": 0.0, "edge": 0.0,
}  # fmt: skip


def loss_fn(params, x, f):
    """A sum of parts, each with a parameter of its own. By hand, all is half."""
    p = {name: w.astype(jnp.float16) for name, w in params.items()}
    x, g = x.astype(jnp.float16), {k: v.astype(jnp.float16) for k, v in f.items()}
    y = jnp.square(p["overflow"] * x * g["large"])  # overflow
    loss = total(y) / f["large"] ** 2
    y = p["constant"] * x * g["shift"]
    y = y / (jnp.abs(y) + 1e-8)  # constant
    loss += total(y * p["constant"])
    y = jnp.sin(p["backward"]).astype(jnp.float32)  # backward
    loss += jnp.sum(y) * f["steep"]
    y = jnp.sin(p["underflow"]).astype(jnp.float32)  # underflow
    loss += jnp.sum(y) * f["tiny"]
    step = lambda i, n: n + 1  # noqa: E731 # rounding
    n = lax.fori_loop(0, f["count"].astype(jnp.int32), step, g["start"])
    share = n.astype(jnp.float32) / (f["start"] + f["count"])
    loss += total(jnp.sin(p["rounding"])) * share
    y = p["cancellation"] + g["level"]
    loss += total(jnp.square(y - g["level"]))  # cancellation
    z = p["decision"] + g["edge"]
    is_above = z > g["edge"] + 0.6  # decision
    return loss + total(jnp.where(is_above, 3 * p["decision"], p["decision"]))


def arguments(*faults):
    values = dict(HEALTHY)
    for name in faults:
        values |= FAULTS[name]
    params = {
        name: jnp.linspace(0.3, 1.7, 8)
        for name in FAULTS
        if name not in ("parameter", "data")
    }
    params["overflow"] = params["overflow"].at[3].mul(values.pop("params"))
    x = jnp.ones(8).at[2].set(values.pop("x"))
    return params, x, jax.tree.map(jnp.float32, values)


@functools.cache
def traced():
    return Traced(loss_fn, *arguments())


def is_named(finding, fault):
    if KINDS[fault] == "nonfinite_argument":
        return (
            f"The {'parameter' if fault == 'parameter' else 'argument'} "
            in finding.message
        )
    return finding.operation.line == line_of(fault, __file__)


def test_without_a_fault():
    found = trace_numerics(loss_fn, *arguments()).findings
    assert found == traced()(*arguments())
    assert [x.kind for x in found] == ["fine"]


@pytest.mark.parametrize("fault", FAULTS)
def test_one_fault(fault):
    (found,) = traced()(*arguments(fault))
    assert found.kind == KINDS[fault], found.message
    assert is_named(found, fault), found.message


PAIRS = list(itertools.combinations(FAULTS, 2))
DEFAULT = [pair for pair in PAIRS if "underflow" in pair]


@pytest.mark.parametrize("pair", exhaustive_but(PAIRS, DEFAULT), ids="-".join)
def test_the_more_urgent_comes_first(pair):
    first, second = pair
    found = traced()(*arguments(*pair))
    messages = [x.message for x in found]
    assert found[0].kind == KINDS[first], messages
    if KINDS[first] != KINDS[second]:
        assert is_named(found[0], first), messages
    if first == "underflow":  # Both are named.
        assert found[-1].kind == KINDS[second], messages
        assert is_named(found[-1], second), messages
        assert "No loss scale" not in " ".join(messages)
