"""The verdict on the forward pass, where no loss scale helps."""

import math

import jax.numpy as jnp

from optax_lossscale.diagnostics._trace import equations
from optax_lossscale.diagnostics._trace.findings import (
    SHOWN,
    NumericFinding,
    begins,
    distinct_lines,
    kinds_of,
    log2_of,
)
from optax_lossscale.diagnostics._trace.operations import Run
from optax_lossscale.diagnostics._trace.values import Key

# Results agree with float32 if they differ by less, relative to the largest.
CLOSE = 0.1
DOMAIN = "An input is outside of the domain of the function."


def find_nonfinite_arguments(run: Run) -> list[NumericFinding]:
    """Finds inf or nan in the arguments, if a gradient is not finite either."""
    names = run.program.arguments
    bad = [k for k in run.keys if k in names and not run.range(k).is_finite]
    losses = range(len(run.scales))
    results = [k for i in losses for k in run.gradients(i)]
    if not bad or all(run.range(k).is_finite for k in results):
        return []
    name = names[bad[0]]
    readers = (k for k in run.keys if any(bad[0] in x for x in run.site(k).inputs))
    operation = next(map(run.operation, readers), None)
    used = "" if operation is None else f" It is first used at {operation}."
    more = "" if len(bad) == 1 else f" (and {len(bad) - 1} more)"
    if bad[0] in run.program.parameters:
        kind = "parameter"
        fix = (
            "Restore a checkpoint, and find the step that was applied though its "
            "gradients were not finite."
        )
    else:
        kind, fix = "argument", "Look for the bad example in the data."
    message = (
        f"The {kind} {name}{more} held {kinds_of(run, bad[0])} before anything was "
        f"computed.{used} No loss scale helps. {fix}"
    )
    return [NumericFinding("nonfinite_argument", message, operation)]


def find_forward(run: Run) -> list[NumericFinding]:
    """Says where inf and nan begin in the forward pass."""
    keys = run.origins("forward")
    if keys and not run.bad_operands(keys[0]):
        # A nan made from an inf is a consequence, not a cause.
        keys = [key for key in keys if not run.bad_operands(key)]
    keys = distinct_lines(run, keys)[:SHOWN]
    found = [describe(run, key) for key in keys]
    known = {run.site(key).source for key in keys}
    later = [
        key
        for key in run.keys
        if run.site(key).phase == "forward"
        and run.site(key).primitive
        and run.exceeds(key)
        and run.site(key).source not in known
    ]
    if found and later:
        later = distinct_lines(run, later)[:SHOWN]
        lines = (f"{run.operation(k).place} (2^{log2_of(run, k):.1f})" for k in later)
        message = "These lines have results that do not fit either: "
        message += "; ".join(lines) + "."
        kind, operation = found[0].kind, run.operation(later[0])
        found.append(NumericFinding(kind, message, operation))
    return found


def is_harmless(run: Run) -> bool:
    """Whether the losses and the gradients of a run agree with float32."""
    losses = range(len(run.scales))
    results = [run.range(k) for i in losses for k in run.gradients(i)]
    pairs = run.losses.T.tolist()
    agree = all(math.isclose(x, y, rel_tol=CLOSE) for x, y in zip(*pairs, strict=True))
    return agree and all(x.is_finite and x.error < CLOSE for x in results)


def describe(run: Run, key: Key) -> NumericFinding:
    """Says why an operation of the forward pass makes inf or nan."""
    operation, found = run.operation(key), run.range(key)
    limits = run.limit(key)
    is_half = equations.is_half(jnp.dtype(found.dtype))
    text = f"{operation}: {begins(run, key)} here"
    bits, cause = None, _why(run, key)
    if limits is not None and run.exceeds(key):
        needed, end = log2_of(run, key), math.log2(limits.overflow)
        bits = needed - end
        name = run.dtype or found.dtype
        text += (
            f". The largest result would be 2^{needed:.1f}; {name} ends at "
            f"2^{end:.0f}. No loss scale helps, since this is the forward pass: "
            f"{'compute' if is_half else 'keep'} this line in float32, or make its "
            "inputs smaller."
        )
    elif is_half and found.infs and not cause:
        # What fits into float32 would exceed the limits of half precision.
        text += (
            ". The result is too large for float32 as well. No loss scale helps: make "
            "the inputs of this line smaller, for example by subtracting the maximum "
            "before jnp.exp."
        )
    elif is_half:
        text += (
            f", and it is no overflow. {cause or DOMAIN} No loss scale helps: compute "
            "this line in float32."
        )
    else:
        text += (
            f". {cause or DOMAIN} No loss scale helps, and this line is in "
            f"{found.dtype} already: keep its inputs inside the domain of the "
            "operation and of its derivative. Add an epsilon, or guard sqrt, norm and "
            "division with a second jnp.where."
        )
    kind = "would_overflow" if found.is_finite else "forward"
    return NumericFinding(kind, text, operation, bits=bits)


def _why(run: Run, key: Key) -> str | None:
    """Explains an operation that makes inf or nan, if inf or zeros go into it."""
    inputs = run.operands(key)
    flushed = max(inputs, key=lambda k: run.range(k).flushed, default=None)
    if run.bad_operands(key) or not all(map(math.isfinite, run.site(key).constants)):
        return (
            "An input holds inf, and inf - inf, inf / inf and 0 * inf are nan. (A "
            "constant like -1e9 is -inf in float16.)"
        )
    if flushed is not None and run.range(flushed).flushed:
        origin = run.operation(_flushed_first(run, flushed))
        return (
            "Its input holds zeros that float32 would not have: they were flushed at "
            f"{origin.place}."
        )
    if any(run.range(k).zeros for k in inputs):
        return (
            "An input holds zeros. (A constant below 2^-25, like 1e-8, is zero in "
            "float16.)"
        )
    return None


def _flushed_first(run: Run, key: Key) -> Key:
    """Returns the operation from which flushed zeros come."""
    while True:
        lost = [
            k for k in run.operands(key) if run.range(k).flushed and run.operands(k)
        ]
        if not lost:
            return key
        key = max(lost, key=lambda k: run.range(k).flushed)
