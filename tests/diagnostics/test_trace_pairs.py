"""Faults of each kind, alone and in pairs: the more urgent one comes first."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arithmetic import TWO, half, total
from helpers import INF, NAN, exhaustive_but
from jax import lax
from tracing import Findings, line_of

from optax_lossscale.diagnostics import trace_numerics

# The kind of each fault, and what makes it: numbers that `loss_fn` reads. The most
# urgent comes first.
URGENCY = {
    "parameter": ("nonfinite_argument", {"params": NAN}),
    "data": ("nonfinite_argument", {"x": INF}),
    "overflow": ("forward", {"large": 300.0}),
    "constant": ("forward", {"shift": 0.0}),
    "backward": ("scale_too_high", {"steep": 3e5}),
    "underflow": ("underflow", {"tiny": 1e-8}),
    "rounding": ("precision", {"start": 2040.0, "count": 600.0}),
    "cancellation": ("precision", {"level": 2048.0}),
    "decision": ("decision", {"edge": 3000.0}),
}
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
        values |= URGENCY[name][1]
    names = URGENCY.keys() - {"parameter", "data"}
    params = {name: jnp.linspace(0.3, 1.7, 8) for name in names}
    params["overflow"] = params["overflow"].at[3].mul(values.pop("params"))
    x = jnp.ones(8).at[2].set(values.pop("x"))
    return params, x, jax.tree.map(jnp.float32, values)


@functools.cache
def traced():
    return Findings(loss_fn, *arguments())


def place(finding):
    if finding.kind == "nonfinite_argument":
        return finding.message.split()[1]  # Parameter or argument.
    return finding.operation.line


def expected(fault):
    arguments = {"parameter": "parameter", "data": "argument"}
    return arguments.get(fault) or line_of(fault, __file__)


def test_without_a_fault():
    findings = trace_numerics(loss_fn, *arguments()).findings
    assert findings == traced()(*arguments())
    assert [x.kind for x in findings] == ["fine"]


CASES = [x for n in (1, 2) for x in itertools.combinations(URGENCY, n)]
DEFAULT = [x for x in CASES if len(x) == 1 or "underflow" in x]


@pytest.mark.parametrize("faults", exhaustive_but(CASES, DEFAULT), ids="-".join)
def test_the_more_urgent_comes_first(faults):
    findings = traced()(*arguments(*faults))
    (first, *_), (last, *_) = (URGENCY[x] for x in (faults[0], faults[-1]))
    messages = [x.message for x in findings]
    assert findings[0].kind == first, messages
    if len(faults) == 1:
        assert len(findings) == 1, messages
    if len(faults) == 1 or first != last:
        assert place(findings[0]) == expected(faults[0]), messages
    if first == "underflow":  # Both are named.
        assert findings[-1].kind == last, messages
        assert place(findings[-1]) == expected(faults[-1]), messages
        assert "No loss scale" not in " ".join(messages)


def test_an_argument_that_reaches_the_loss_alone():
    bad = np.float32([np.nan, 1])

    def loss_fn(w, x):
        return total(half(w)) + total(half(x))

    (finding,) = trace_numerics(loss_fn, TWO, bad).findings
    assert finding.message.startswith("The argument args[0] held nan")
    (finding,) = trace_numerics(loss_fn, bad, TWO).findings
    assert finding.message.startswith("The parameter params held nan")
