"""The verdict and the words of the trace, on small records: no program runs."""

import math

import numpy as np
import pytest
from helpers import exhaustive_but

from optax_lossscale._jaxprs.lines import Source
from optax_lossscale.diagnostics._trace import verdict, words
from optax_lossscale.diagnostics._trace.run import Outline, Run, Site
from optax_lossscale.diagnostics._trace.summary import FIELDS, WAVES
from optax_lossscale.diagnostics._trace.words import Fault

ZERO = dict.fromkeys(FIELDS, 0.0) | {"seen": 1.0}
USUAL = {"largest": 1.0, "float32_largest": 1.0, "smallest": 1.0}


def site(number, primitive="mul", inputs=(), phase="forward", dtype="float16", **about):
    source = Source("model.py", 10 + number, "loss_fn")
    shape = (4,) if primitive else ()
    about = {"is_decision": dtype == "bool"} | about
    return Site(
        dtype, shape, source, number, "", phase, primitive, tuple(inputs), **about
    )


def record(sites, found, losses=(1.0, 1.0), norms=(1.0, 0.0, 0.0), scale=1.0):
    """A run with one parameter, whose gradient is the last site; argument 0 first."""
    about = dict(enumerate(sites))
    last = len(sites) - 1
    outline = Outline(
        "float16", about, {0: "params['w']"}, ["params['w']"], 1, [last], True
    )
    numbers = {i: ZERO | USUAL | found.get(i, {}) for i in about}
    waves = np.full(len(WAVES), norms[0])
    return Run(outline, scale, numbers, losses, np.array([[*norms, *waves]]) * scale)


ARGUMENT = site(0, "", phase="argument", dtype="float32")


def program(primitive="dot_general", **about):
    """An argument, a result of the forward pass, one of the backward pass."""
    middle = site(1, primitive, (0,), **about)
    return [ARGUMENT, middle, site(2, "mul", (1,), "backward")]


def judged(at, scale=1.0):
    search = verdict.Search(lambda scale, *_: at(scale), 0.01, scale)
    return verdict.find_all(search), search


@pytest.mark.parametrize("limit", exhaustive_but([-126, -3, 0, 14, 125, 126], [14]))
def test_the_largest_scale_is_found_exactly(limit):
    asked = []

    def at(scale):
        asked.append(scale)
        is_over = scale > 2.0**limit
        found = (
            {2: {"infs": 0.5, "begins": 2.0, "float32_largest": 1e6}} if is_over else {}
        )
        norms = (1.0, math.inf if is_over else 0.0, 0.0)
        return record(program(), found, norms=norms, scale=scale)

    (finding, *_), search = judged(at)
    assert search.best.scale == 2.0**limit
    assert len(asked) < 14
    assert finding.kind == ("scale_too_high" if limit < 0 else "fine")


def test_no_scale():
    def at(scale):
        found = {2: {"infs": 0.5, "begins": 2.0, "float32_largest": 1e9}}
        return record(program(), found, norms=(1.0, math.inf, 0.0), scale=scale)

    (finding,), search = judged(at)
    assert search.best is None
    assert finding.kind == "backward"


@pytest.mark.parametrize("left", [0.0, 0.02, 0.4])
def test_what_a_scale_mends_comes_first(left):
    def at(scale):
        is_lost = scale < 2.0**20
        backward = {"flushed": 1.0 * is_lost, "float32_largest": 2.0**-30 * scale}
        found = {1: {"error": left}, 2: backward | {"error": max(left, is_lost)}}
        error = 1.0 if is_lost else left
        return record(program(), found, norms=(1.0, error, 1.0 * is_lost), scale=scale)

    findings, search = judged(at)
    first, *rest = findings
    assert first.kind == "underflow"
    assert f"initial_scale=2.0**{math.log2(search.best.scale):.0f}." in first.message
    assert (
        "100% of the gradients are flushed to zero at the loss scale 1, and 0% at"
        in (first.message)
    )
    # Rounding moves the gradients by 2%, too, if the parameters are rounded: see below.
    assert [x.kind for x in rest] == ["precision"] * (left > 0)
    assert "No loss scale" not in " ".join(x.message for x in findings)


def test_an_error_that_the_largest_scale_leaves():
    found = {1: {"error": 0.4}, 2: {"error": 0.4}}
    (finding,), _ = judged(
        lambda scale: record(program(), found, norms=(1.0, 0.4, 0.0), scale=scale)
    )
    assert finding.kind == "precision"
    assert finding.message.startswith(
        "matrix product at model.py:11, in loss_fn, float"
    )
    assert (
        'No loss scale helps: compute this line in float32 (float32="'
        in finding.message
    )


@pytest.mark.parametrize(("moved", "kind"), [(0.0, "precision"), (0.02, "fine")])
def test_an_error_no_larger_than_that_of_rounded_inputs(moved, kind):
    def at(scale, rounds=False):
        found = {1: {"error": 0.03}, 2: {"error": 0.03}}
        run = record(program(), found, norms=(1.0, 0.03, 0.0), scale=scale)
        run.norms[:, 3:] *= 1 + moved * rounds
        return run

    search = verdict.Search(at, 0.01, 1.0)
    (finding,) = verdict.find_all(search)
    assert finding.kind == kind
    assert math.isclose(search.floor, moved * 2**0.5, abs_tol=1e-6)


@pytest.mark.parametrize("is_only", [True, False])
def test_decisions_come_last(is_only):
    """Of two parameters: the gradient of the second is rounded, or right."""
    middle = [site(1, "add", (0,)), site(2, "lt", (1,), dtype="bool")]
    ends = [site(3, "select_n", (2, 1), "backward"), site(4, "mul", (0,), "backward")]
    sites = [ARGUMENT, *middle, *ends]

    def at(scale, rounds=False):
        errors = 0.4, 0.2 * (not is_only)
        found = {2: {"flushed": 0.25, "error": 1.0}, 1: {"error": 0.01}}
        found |= {3: {"error": errors[0]}, 4: {"error": errors[1]}}
        run = record(sites, found, scale=scale)
        outline = run.outline._replace(gradients=[3, 4], parameters=["w", "b"])
        numbers = run._numbers
        norms = np.concatenate([run.norms, run.norms])
        norms[:, 1] = np.array(errors) * scale
        return Run(outline, scale, numbers, run.losses, norms)

    search = verdict.Search(at, 0.01, 1.0)
    findings = verdict.find_all(search)
    assert [x.kind for x in findings] == ["precision"] * (not is_only) + ["decision"]
    message = findings[-1].message
    assert message.startswith("comparison at model.py:12, in loss_fn, bool[4], forward")
    assert "for 25% of the numbers" in message
    assert "cannot tell apart; if training is fine, leave it" in message
    assert "No loss scale" not in message


def test_inf_comes_before_all():
    def at(scale):
        found = {
            1: {"infs": 0.5, "begins": 2.0, "float32_largest": 1e6},
            2: {"nans": 1.0},
        }
        return record(program(), found, losses=(math.inf, 1.0), scale=scale)

    (finding,), _ = judged(at)
    assert finding.kind == "forward"
    assert "The largest result would be 2^19.9; float16 ends at 2^16" in finding.message


def test_an_argument_comes_before_what_it_makes():
    def at(scale):
        bad = {"nans": 0.25}
        found = {0: bad, 1: bad | {"begins": 0.0}, 2: bad}
        norms = (math.nan, math.nan, 0.0)
        return record(
            program(), found, losses=(math.nan,) * 2, norms=norms, scale=scale
        )

    (finding,), _ = judged(at)
    assert finding.kind == "nonfinite_argument"
    assert "The parameter params['w'] held nan" in finding.message
    assert "Restore a checkpoint" in finding.message


# The words.


def operation(primitive="exp", number=1, dtype="float16", **found):
    run = record(
        [ARGUMENT, site(number, primitive, (0,), dtype=dtype), ARGUMENT], {1: found}
    )
    return run.operation(1)


BAD = {"infs": 0.5, "begins": 2.0}
TOO = BAD | {"float32_nonfinite": 0.5}


@pytest.mark.parametrize(
    ("cause", "found", "why", "advice"),
    [
        (
            "range",
            BAD | {"float32_largest": 2.0**20},
            "ends at 2^16",
            "make its inputs sma",
        ),
        ("pole", BAD | {"float32_largest": 2.0**20}, "ends at 2^16", "away from zero"),
        (
            "float32 range",
            TOO,
            "too large for float32 as well",
            "subtracting the maximum",
        ),
        ("float32 inf", TOO, "An input holds inf", "keep inf out of its inputs"),
        ("zeros", TOO, "An input holds zeros", "a second jnp.where"),
        ("domain", TOO, "outside of the domain", "a second jnp.where"),
        ("nan", TOO, "A constant is nan", "use another number there"),
        ("constant", BAD, "-1e9 is -inf", "compute this line in float32"),
        ("terms", BAD, "while they are added", "compute this line in float32"),
        ("cast", BAD, "beyond the range of float16", "compute this line in float32"),
    ],
)
def test_float32_is_advised_only_where_it_is_right(cause, found, why, advice):
    message = words.explain(Fault("forward", operation(**found), cause)).message
    assert why in message
    assert f"No loss scale helps: {advice}" in message or advice in message
    assert ("in float32 (float32=" in message) == ("float32_nonfinite" not in found)


@pytest.mark.parametrize("cause", ["flushed", "rounded"])
def test_two_lines_to_change(cause):
    source = operation("square", number=1, flushed=1.0)
    fault = Fault("forward", operation("log", **BAD), cause, (source._replace(line=7),))
    finding = words.explain(fault)
    assert finding.other.line == 7
    assert "compute model.py:7, in loss_fn, and this line in float32" in finding.message
    assert 'float32=["model.py:7", "model.py:11"]' in finding.message
    by_hand = words.explain(fault._replace(is_autocast=False)).message
    assert "cast nothing in between" in by_hand


def test_a_constant_by_hand_may_be_a_rounded_one():
    fault = Fault("forward", operation("div", **TOO), "zeros", is_autocast=False)
    assert "A constant like 1e-8 is 0 in float16" in words.explain(fault).message
    fault = fault._replace(is_autocast=True)
    assert "1e-8" not in words.explain(fault).message


@pytest.mark.parametrize(
    ("primitive", "dtype", "phase", "name"),
    [
        ("dot_general", "float16", "forward", "matrix product"),
        ("reduce_sum", "float16", "forward", "sum"),
        ("convert_element_type", "float16", "forward", "layer's input"),
        ("convert_element_type", "float16", "backward", "cast"),
        ("convert_element_type", "float32", "forward", "cast"),
        ("cumlogsumexp", "float32", "forward", "cumlogsumexp"),
        ("random_bits", "float32", "forward", "random bits"),
    ],
)
def test_names_as_people_use_them(primitive, dtype, phase, name):
    sites = [ARGUMENT, site(1, primitive, (0,), phase, dtype), ARGUMENT]
    found = record(sites, {}).operation(1)
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
