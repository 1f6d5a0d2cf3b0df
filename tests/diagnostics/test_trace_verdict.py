"""The verdict and the words of the trace, on small records: no program runs."""

import json
import math
import pickle
import re

import numpy as np
import pytest
from helpers import exhaustive_but

from optax_lossscale._jaxprs.lines import Source
from optax_lossscale.diagnostics._trace.judge import verdict, words
from optax_lossscale.diagnostics._trace.judge.findings import (
    Cause,
    FindingKind,
    NumericFinding,
)
from optax_lossscale.diagnostics._trace.judge.words import Fault
from optax_lossscale.diagnostics._trace.run import FIELDS, WAVES, Outline, Run, Site

ZERO = dict.fromkeys(FIELDS, 0.0) | {"seen": 1.0}
USUAL = {"largest": 1.0, "float32_largest": 1.0, "smallest": 1.0}


def site(number, primitive="mul", inputs=(), phase="forward", dtype="float16", **about):
    source = Source("model.py", 10 + number, "loss_fn")
    shape = (4,) if primitive else ()
    about = {"is_decision": dtype == "bool"} | about
    about |= {"primitive": primitive, "inputs": tuple(inputs), "phase": phase}
    return Site(dtype, shape, source, number, **about)


ARGUMENT = site(0, "", phase="argument", dtype="float32")
# An argument, a result of the forward pass, one of the backward pass.
PRODUCT = site(1, "dot_general", (0,))
PROGRAM = [ARGUMENT, PRODUCT, site(2, "mul", (1,), "backward")]


def numbers_of(found, sites):
    """Returns the numbers of all sites: the usual ones, but for those of `found`."""
    return {i: ZERO | USUAL | found.get(i, {}) for i, _ in enumerate(sites)}


def record(found, sites=PROGRAM, losses=(1.0, 1.0), norms=(1.0, 0.0, 0.0), scale=1.0):
    """A run with one parameter, whose gradient is the last site; argument 0 first."""
    about, name = dict(enumerate(sites)), "params['w']"
    outline = Outline("float16", about, {0: name}, [name], 1, [len(sites) - 1], True)
    norms = np.array([[*norms, *np.full(len(WAVES), norms[0])]]) * scale
    return Run(outline, scale, numbers_of(found, sites), losses, norms)


def runs(found, **about):
    """Returns a program that is run at a scale, with the same numbers at each."""
    return lambda scale, *_: record(found, scale=scale, **about)


def judged(at, scale=1.0):
    search = verdict.Search(at, 0.01, scale)
    return verdict.find_all(search), search


BAD = {"infs": 0.5, "begins": 2.0}
OVERFLOW = BAD | {"float32_largest": 1e6}


@pytest.mark.parametrize("limit", exhaustive_but([-126, -3, 0, 14, 125, 126], [14]))
def test_the_largest_scale_is_found_exactly(limit):
    asked = []

    def at(scale, *_):
        asked.append(scale)
        is_over = scale > 2.0**limit
        norms = (1.0, math.inf if is_over else 0.0, 0.0)
        return runs({2: OVERFLOW} if is_over else {}, norms=norms)(scale)

    (finding, *_), search = judged(at)
    assert search.best.scale == 2.0**limit
    assert len(asked) < 14
    assert finding.kind == ("scale_too_high" if limit < 0 else "fine")


def test_no_scale():
    (finding,), search = judged(runs({2: OVERFLOW}, norms=(1.0, math.inf, 0.0)))
    assert search.best is None
    assert finding.kind == "backward"


@pytest.mark.parametrize("left", [0.0, 0.02, 0.4])
def test_what_a_scale_mends_comes_first(left):
    def at(scale, *_):
        is_lost = scale < 2.0**20
        backward = {"flushed": 1.0 * is_lost, "float32_largest": 2.0**-30 * scale}
        error = max(left, is_lost)
        found = {1: {"error": left}, 2: backward | {"error": error}}
        return runs(found, norms=(1.0, error, 1.0 * is_lost))(scale)

    findings, search = judged(at)
    first, *rest = findings
    assert first.kind == "underflow"
    assert f"initial_scale=2.0**{math.log2(search.best.scale):.0f}." in first.message
    shares = "100% of the gradients are flushed to zero at the loss scale 1, and 0% at"
    assert shares in first.message
    # Rounding moves the gradients by 2%, too, if the parameters are rounded: see below.
    assert [x.kind for x in rest] == ["precision"] * (left > 0)
    assert "No loss scale" not in " ".join(x.message for x in findings)


def test_an_error_that_the_largest_scale_leaves():
    found = {1: {"error": 0.4}, 2: {"error": 0.4}}
    (finding,), _ = judged(runs(found, norms=(1.0, 0.4, 0.0)))
    assert finding.kind == "precision"
    place = "matrix product at model.py:11, in loss_fn, float"
    assert finding.message.startswith(place)
    advice = 'compute this line in float32, by autocast(loss_fn, float32="'
    assert advice in finding.message


@pytest.mark.parametrize(("moved", "kind"), [(0.0, "precision"), (0.02, "fine")])
def test_an_error_no_larger_than_that_of_rounded_inputs(moved, kind):
    def at(scale, rounds=False):
        found = {1: {"error": 0.03}, 2: {"error": 0.03}}
        run = runs(found, norms=(1.0, 0.03, 0.0))(scale)
        run.norms[:, 3:] *= 1 + moved * rounds
        return run

    (finding,), search = judged(at)
    assert finding.kind == kind
    assert math.isclose(search.floor, moved * 2**0.5, abs_tol=1e-6)


@pytest.mark.parametrize("is_only", [True, False])
def test_decisions_come_last(is_only):
    """Of two parameters: the gradient of the second is rounded, or right."""
    middle = [site(1, "add", (0,)), site(2, "lt", (1,), dtype="bool")]
    ends = [site(3, "select_n", (2, 1), "backward"), site(4, "mul", (0,), "backward")]
    sites = [ARGUMENT, *middle, *ends]

    errors = 0.4, 0.2 * (not is_only)
    found = {2: {"flushed": 0.25, "error": 1.0}, 1: {"error": 0.01}}
    found |= {3: {"error": errors[0]}, 4: {"error": errors[1]}}

    def at(scale, *_):
        run = runs(found, sites=sites)(scale)
        outline = run.outline._replace(gradients=[3, 4], parameters=["w", "b"])
        norms = np.concatenate([run.norms, run.norms])
        norms[:, 1] = np.array(errors) * scale
        return Run(outline, scale, numbers_of(found, sites), run.losses, norms)

    findings, _ = judged(at)
    assert [x.kind for x in findings] == ["precision"] * (not is_only) + ["decision"]
    message = findings[-1].message
    assert message.startswith("comparison at model.py:12, in loss_fn, bool[4], forward")
    assert "for 25% of the numbers" in message
    assert "cannot tell apart; if training is fine, leave it" in message
    assert "No loss scale" not in message


def test_inf_comes_before_all():
    found = {1: OVERFLOW, 2: {"nans": 1.0}}
    (finding,), _ = judged(runs(found, losses=(math.inf, 1.0)))
    assert finding.kind == "forward"
    assert "The largest result would be 2^19.9; float16 ends at 2^16" in finding.message


def test_an_argument_comes_before_what_it_makes():
    bad = {"nans": 0.25}
    found = {0: bad, 1: bad | {"begins": 0.0}, 2: bad}
    not_finite = {"losses": (math.nan,) * 2, "norms": (math.nan, math.nan, 0.0)}
    (finding,), _ = judged(runs(found, **not_finite))
    assert finding.kind == "nonfinite_argument"
    assert "The parameter params['w'] held nan" in finding.message
    assert "Restore a checkpoint" in finding.message


# The words.

FORWARD = FindingKind.FORWARD


def test_every_kind_is_documented():
    documented = re.findall(r'"(\w+)":', NumericFinding.__doc__ or "")
    assert documented == list(FindingKind)


def test_a_kind_is_printed_as_a_string():
    finding = NumericFinding(FORWARD, "message")
    assert str(finding) == str(NumericFinding("forward", "message"))
    assert f"{finding.kind}" == json.loads(json.dumps(finding.kind)) == "forward"
    assert pickle.loads(pickle.dumps(FORWARD)) is FORWARD


def operation(primitive="exp", number=1, dtype="float16", **found):
    made = site(number, primitive, (0,), dtype=dtype)
    return record({1: found}, [ARGUMENT, made, ARGUMENT]).operation(1)


TOO = BAD | {"float32_nonfinite": 0.5}
LARGE = BAD | {"float32_largest": 2.0**20}


@pytest.mark.parametrize(
    ("cause", "found", "why", "advice"),
    [
        (Cause.RANGE, LARGE, "ends at 2^16", "make its inputs sma"),
        (Cause.POLE, LARGE, "ends at 2^16", "away from zero"),
        (
            Cause.FLOAT32_RANGE,
            TOO,
            "too large for float32 as well",
            "subtracting the max",
        ),
        (Cause.FLOAT32_INF, TOO, "An input holds inf", "keep inf out of its inputs"),
        (Cause.ZEROS, TOO, "An input holds zeros", "a second jnp.where"),
        (Cause.DOMAIN, TOO, "outside of the domain", "a second jnp.where"),
        (Cause.NAN, TOO, "A constant is nan", "use another number there"),
        (Cause.CONSTANT, BAD, "-1e9 is -inf", "compute this line in float32"),
        (Cause.TERMS, BAD, "while they are added", "compute this line in float32"),
        (
            Cause.CAST,
            BAD,
            "beyond the range of float16",
            "compute this line in float32",
        ),
    ],
)
def test_float32_is_advised_only_where_it_is_right(cause, found, why, advice):
    message = words.explain(Fault(FORWARD, operation(**found), cause)).message
    assert why in message
    assert advice in message
    assert ("in float32, by autocast(" in message) == ("float32_nonfinite" not in found)


@pytest.mark.parametrize(
    ("dtype", "end"),
    [
        ("float16", "2^16."),
        ("bfloat16", "2^128."),
        ("float8_e5m2", "2^15.9."),
        ("float8_e4m3fn", "2^8.86."),
    ],
)
def test_a_dtype_ends_where_it_overflows(dtype, end):
    fault = Fault(FORWARD, operation(dtype=dtype, **LARGE), Cause.RANGE)
    assert f"{dtype} ends at {end} " in words.explain(fault).message


@pytest.mark.parametrize("cause", [Cause.FLUSHED, Cause.ROUNDED])
def test_two_lines_to_change(cause):
    source = operation("square", number=1, flushed=1.0)
    fault = Fault(FORWARD, operation("log", **BAD), cause, (source._replace(line=7),))
    finding = words.explain(fault)
    assert finding.other.line == 7
    assert "compute model.py:7, in loss_fn, and this line in float32" in finding.message
    assert 'float32=["model.py:7", "model.py:11"]' in finding.message
    by_hand = words.explain(fault._replace(is_autocast=False)).message
    assert "cast nothing in between" in by_hand


def test_a_constant_by_hand_may_be_a_rounded_one():
    fault = Fault(FORWARD, operation("div", **TOO), Cause.ZEROS, is_autocast=False)
    assert "A constant like 1e-8 is 0 in float16" in words.explain(fault).message
    fault = fault._replace(is_autocast=True)
    assert "1e-8" not in words.explain(fault).message


@pytest.mark.parametrize(
    ("primitive", "dtype", "phase", "name"),
    [
        ("dot_general", "float16", "forward", "matrix product"),
        ("reduce_sum", "float16", "forward", "sum"),
        ("convert_element_type", "float16", "forward", "layer's weight"),
        ("convert_element_type", "float16", "backward", "cast"),
        ("convert_element_type", "float32", "forward", "cast"),
        ("cumlogsumexp", "float32", "forward", "cumlogsumexp"),
        ("random_bits", "float32", "forward", "random bits"),
    ],
)
def test_names_as_people_use_them(primitive, dtype, phase, name):
    """The only input is a parameter."""
    made = site(1, primitive, (0,), phase, dtype)
    found = record({}, [ARGUMENT, made, ARGUMENT]).operation(1)
    assert found.name == name
    assert str(found) == f"{name} at model.py:11, in loss_fn, {dtype}[4], {phase} pass"


@pytest.mark.parametrize(
    ("scale", "largest", "alone", "advice"),
    [
        (2.0**15, 2.0**14, True, "Nothing is wrong"),
        (2.0**30, 2.0**14, True, "Start at a lower loss scale"),
        (1.0, 2.0**-7, True, "DynamicLossScale(2.0**-7, min_scale=2.0**-11)"),
        (2.0**15, 2.0**14, False, "overflows is 2^14."),
    ],
)
def test_the_words_of_a_scale_that_is_too_high(scale, largest, alone, advice):
    finding = words.too_high(operation(infs=1.0), scale, largest, alone)
    assert advice in finding.message


@pytest.mark.parametrize(
    ("largest", "advice"),
    [
        (2.0**14, "initial_scale=2.0**14."),
        (2.0**-7, "DynamicLossScale(2.0**-7, min_scale=2.0**-11)."),
    ],
)
def test_the_words_of_an_underflow(largest, advice):
    shares = {"shares": (1.0, 0.0), "errors": (1.0, 0.0), "is_first": True}
    finding = words.underflow(operation(flushed=1.0), 2.0**-20, largest, **shares)
    assert finding.message.endswith(f"Use that: {advice}")
