"""`trace_numerics` names planted faults, and advises what mends them."""

import bisect
import re
from pathlib import Path

import faulty_arithmetic  # noqa: F401 # They fill the table.
import faulty_constructs  # noqa: F401
import faulty_decisions  # noqa: F401
import numpy as np
import pytest
from arithmetic import relative_errors
from faults import FAULTS, assert_named, cases

from optax_lossscale.diagnostics import trace_numerics

# A mask constant is -inf in float16.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in cast")
CLOSE = 0.01


@pytest.mark.parametrize("fault", cases())
def test_named(fault):
    assert_named(fault)


def test_every_mark_names_a_fault():
    files = {fault.file for fault in FAULTS.values()}
    text = "".join(Path(file).read_text() for file in files)
    marks = set(re.findall(r"# before (\w+)$", text, re.M))
    assert marks <= {fault.mark for fault in FAULTS.values()}


@pytest.mark.parametrize("fault", cases(lambda fault: fault.mended))
def test_mended(fault):
    loss, gradients = right = fault.by_hand(fault.exact)(1.0)
    is_finite = np.isfinite(loss) and np.isfinite(gradients).all()
    trace = fault.trace
    if not fault.rounds:
        assert np.isclose(trace.float32_loss, loss, rtol=1e-4)
        assert ("in float32 too" in str(trace)) == (not is_finite)
    if not is_finite:
        assert "this line in float32" not in trace.findings[0].message
        right = fault.by_hand(fault.right)(1.0)
    result = fault.by_hand(fault.program)(fault.scale)
    broken = relative_errors(result, right)
    assert np.isclose(trace.loss, result[0], rtol=1e-3, equal_nan=True)
    mended = relative_errors(fault.by_hand(fault.mended)(fault.scale), right)
    assert not np.max(broken) < 5 * CLOSE
    assert np.max(mended) < CLOSE
    trace = trace_numerics(fault.mended, *fault.args, scale=fault.scale)
    assert [x.kind for x in trace.findings] == ["fine"], str(trace)


@pytest.mark.parametrize(
    "fault", cases(lambda fault: fault.phase == "backward" and not fault.mended)
)
def test_scale(fault):
    run, trace = fault.by_hand(fault.program), fault.trace
    overflows = lambda e: not np.isfinite(run(2.0**e)[1]).all()  # noqa: E731
    exponent = bisect.bisect(range(-126, 127), False, key=overflows) - 127
    largest = None if exponent < -126 else 2.0**exponent
    assert trace.largest_scale == largest, str(trace)
    message = trace.findings[0].message
    if fault.kind != "underflow":
        assert f"2^{exponent}" in message or exponent in (0, -127), message
        return
    assert f"Use that: initial_scale=2.0**{exponent}." in message
    assert "No loss scale" not in " ".join(str(trace).split())
    truth = fault.by_hand(fault.exact)(1.0)
    (_, before), (_, after) = (relative_errors(run(x), truth) for x in (1.0, largest))
    assert before > 5 * CLOSE
    assert after < 2 * CLOSE
