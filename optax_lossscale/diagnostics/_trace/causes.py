"""Why an operation breaks, and what to do about it."""

import math

import jax.numpy as jnp

from optax_lossscale.diagnostics._trace import equations
from optax_lossscale.diagnostics._trace.effects import LOST, percent
from optax_lossscale.diagnostics._trace.findings import log2_of, power
from optax_lossscale.diagnostics._trace.operations import INHERITED, Run, named
from optax_lossscale.diagnostics._trace.search import Search
from optax_lossscale.diagnostics._trace.values import Key

# They make large numbers of small ones.
INVERSE = ("div", "rsqrt", "log", "log1p")
ROUNDED = "A constant like 1e-8 is 0 in float16, and one like -1e9 is -inf."
POWERS = ("pow", "integer_pow")  # If the exponent is negative.
CASTS = "convert_element_type", "reduce_precision"
# They pass on the errors of their inputs, and others that are small beside these.
PASSES = (*CASTS, "gather", "concatenate", "select_n", "clamp", "mul", "div")
# Their results are exact where they are subnormal.
SUMS = ("add", "sub", "add_any", "reduce_sum", "cumsum", "scatter-add", "psum")


def kinds_of(run: Run, key: Key) -> str:
    """Returns "inf", "nan" or both; "overflow" in a run in which there is neither."""
    found = run.range(key)
    kinds = ["inf"] * (found.infs > 0) + ["nan"] * (found.nans > 0)
    return " and ".join(kinds) or "overflow"


def begins(run: Run, key: Key) -> str:
    """Returns "inf begins", "inf and nan begin" and the like."""
    kinds = kinds_of(run, key)
    return f"{kinds} {'begin' if ' and ' in kinds else 'begins'}"


def trouble_of(search: Search, run: Run, key: Key) -> tuple[str, str, str, str]:
    """Returns what is wrong with an operation at every loss scale.

    Returns:
      The kind of the finding; what happens here; why, a sentence or ""; what to do.
    """
    site, found, limits = run.site(key), run.range(key), run.limit(key)
    is_half = equations.is_half(found.dtype)
    kind = "backward" if site.phase == "backward" else "forward"
    what = f"{begins(run, key)} here"
    noun = "gradients" if site.phase == "backward" else "results"
    line = f"{'compute' if is_half else 'keep'} {_line_to_change(run, key)} in float32"
    is_cast = site.primitive in CASTS and not run.program.is_autocast
    if is_cast and is_half and run.exceeds(key):
        line += " without a cast back"
    line += ", without its precision=" if site.has_algorithm else ""
    passed = lines_to_pass(run, [key])
    fix = f"{line} ({passed})" if passed else line
    if found.float32_nonfinite and site.primitive.startswith("exp"):
        why = "The result is too large for float32 as well."
        fix = "make its inputs smaller, for example by subtracting the maximum"
        return kind, what, why, fix
    if limits is not None and run.exceeds(key):
        needed, end = log2_of(run, key), math.log2(limits.overflow)
        largest = f"The largest {noun[:-1]} would be 2^{needed:.1f}"
        why = f"{largest}; {found.dtype} ends at 2^{end:.0f}."
        if not all(map(math.isfinite, site.constants)):
            why = ROUNDED
        exponents = site.constants if site.primitive in POWERS else ()
        if site.primitive in INVERSE or min(exponents, default=0) < 0:
            fix += ", or keep its inputs away from zero"
        else:
            fix += ", or make its inputs smaller"
        return kind, what, why, fix
    if run.is_bad(key):
        why = _why(run, key)
        if any(map(math.isnan, site.constants)):
            fix = "use another number there"
        elif found.float32_nonfinite:
            what += ", in float32 too" if is_half else ""
            fix = (
                "keep its inputs in the domain of the operation and of its derivative. "
                "Add an epsilon, or guard log, sqrt, norm and division with a second "
                "jnp.where, before the operation"
            )
        return kind, what, why, _together(run, key, fix)
    if is_underflow(run, key):
        what = f"{found.flushed:.0%} of the {noun} are flushed to zero"
        is_small = limits and found.float32_largest < limits.normal
        why = f"The largest is 2^{log2_of(run, key):.1f}." if is_small else ""
        return "underflow", what, why, fix
    if run.is_decided_otherwise(key):
        share = (
            "" if not found.shape else f" for {percent(found.flushed)} of the numbers"
        )
        what = f"this is decided otherwise in float32{share}"
        return "decision", what, _why(run, key), _together(run, key, fix)
    what = f"the {noun} differ from float32 by {found.error:.2g} of the largest"
    sources = sources_of(search, run, key)
    places = dict.fromkeys(x.place for x in map(run.operation, sources) if x.line)
    places.pop(run.operation(key).place, None)
    if places:
        fix = f"{line}, and the lines that feed it: {'; '.join(places)}"
        passed = passed and lines_to_pass(run, [key, *sources])
        fix += f" ({passed})" if passed else ""
    if passed:
        fix += ". diagnostics.float32_lines finds the fewest lines that it takes"
    return "precision", what, _loss_of_precision(run, key), fix


def lines_to_pass(run: Run, keys: list[Key]) -> str:
    """Returns how to keep lines in float32 by `autocast`; "" if that is no way."""
    sources = [run.site(key).source for key in keys]
    names = list(dict.fromkeys(named(*x.own[:2], "") for x in sources if x.line))
    is_cell = any(x.startswith("In[") for x in names)
    if not names or is_cell or not run.program.is_autocast or run.program.by_hand:
        return ""
    text = ", ".join(f'"{x}"' for x in names)
    return f"float32={text}" if len(names) == 1 else f"float32=[{text}]"


def _line_to_change(run: Run, key: Key) -> str:
    """Returns "this line", or the user's line that calls an installed library."""
    source = run.site(key).source
    is_own = source.own[:2] == (source.file, source.line)
    return "this line" if is_own else f"the call at {named(*source.own)}"


def _together(run: Run, key: Key, fix: str) -> str:
    """Adds to the advice the line where zeros come from, if it is another one."""
    first = flushed_before(run, key)
    if first is None:
        return fix
    place, passed = run.operation(first).place, lines_to_pass(run, [first, key])
    more = f" ({passed})" if passed else ", and cast nothing in between"
    return f"compute {place}, and this line in float32{more}"


def flushed_before(run: Run, key: Key) -> Key | None:
    """Returns where zeros come from that break an operation of another line."""
    is_hidden = run.exceeds(key) or run.bad_operands(key)
    if is_hidden or not (run.is_lost(key) or run.is_decided_otherwise(key)):
        return None
    first = _flushed_first(run, key)
    same = first and run.site(first).source == run.site(key).source
    return None if same else first


def _why(run: Run, key: Key) -> str:
    """Explains an operation that makes inf or nan, or decides otherwise."""
    site, inputs = run.site(key), run.operands(key)
    before = map(run.site, run.ancestors([key], run.bad_operands))
    is_constant = not all(math.isfinite(c) for x in before for c in x.constants)
    if any(map(math.isnan, site.constants)):
        return "A constant is nan."
    if is_constant or run.bad_operands(key):
        text = "An input holds inf, and inf - inf, inf / inf and 0 * inf are nan."
        return f"{text} {ROUNDED}" if is_constant else text
    first = _flushed_first(run, key)
    if first is not None:
        if 0.0 in run.site(first).constants:
            return f"An input holds zeros. {ROUNDED}"
        return (
            "Its input holds zeros that float32 would not have: they were flushed at "
            f"{run.operation(first).place}."
        )
    if site.decides:
        return "Its operands are near each other."
    if any(run.range(k).zeros for k in inputs):
        return "An input holds zeros."
    if site.primitive in (*SUMS, *equations.PRODUCTS):
        return "Its terms overflow while they are added."
    if site.primitive in CASTS:
        return f"Its input is beyond the range of {site.dtype}."
    return "An input is outside of the domain of the function."


def _flushed_first(run: Run, key: Key) -> Key | None:
    """Returns where zeros that float32 would not have come from, if they go in here."""

    def flushed(k):
        operands = (x for x in run.operands(k) if not run.site(x).is_decision)
        return [x for x in operands if run.range(x).flushed]

    reached = run.ancestors(flushed(key), flushed)
    # In float32, a difference may be zero, but nothing is flushed.
    halves = (k for k in run.keys if k in reached and run.limit(k))
    found = [k for k in halves if run.site(k).primitive]
    rounded = [k for k in found if 0.0 in run.site(k).constants]
    return next(iter(rounded + found), None)


def is_underflow(run: Run, key: Key) -> bool:
    """Whether results are flushed to zero here, or too small to be precise."""
    limits, found = run.limit(key), run.range(key)
    if limits is None or run.site(key).primitive in SUMS:
        return False
    return gain(run, key) >= LOST or 0 < found.float32_largest < limits.normal


def half_of(run: Run, key: Key) -> str | None:
    """Returns the half precision of a result or of its inputs, if there is any."""
    dtypes = (run.site(k).dtype for k in [key, *run.operands(key)])
    return next(filter(equations.is_half, dtypes), None)


def _loss_of_precision(run: Run, key: Key) -> str:
    """Explains a loss of precision in a sum."""
    operands, found = run.operands(key), run.range(key)
    # Of a running sum, the result is the largest.
    largest = max((run.range(k).largest for k in (*operands, key)), default=0.0)
    half = half_of(run, key)
    if run.site(key).primitive not in SUMS or half is None or not largest:
        return ""
    exponent = math.floor(math.log2(largest))
    spacing = power(2.0 ** (exponent - jnp.finfo(half).nmant))
    text = f"{half} has a spacing of {spacing} at 2^{exponent}"
    if found.float32_largest < largest / 4:
        return f"{text}, and the inputs, which are as large as this, nearly cancel."
    return f"{text}: smaller terms of the sum are lost."


def sources_of(search: Search, run: Run, key: Key) -> list[Key]:
    """Returns the operations before that may have made the error of a result.

    These are those whose errors are large beside the result; if there are none, as in
    `acos(x)` near 1 or `log(1 - x)`, the nearest ones in half precision.
    """
    sizes = [run.range(key).float32_largest]
    if run.site(key).primitive == "select_n":  # Its constants may be large masks.
        numbers = (k for k in run.operands(key) if not run.site(k).is_decision)
        sizes += filter(None, (run.range(k).float32_largest for k in numbers))
    least = search.close / 2 * min(sizes)

    def parents(k):
        site, operands = run.site(k), run.operands(k)
        pole = equations.POLE_AT_ZERO.get(site.primitive)
        if k == key and run.is_bad(k) and pole is not None and operands:
            operands = run.inputs(site.inputs[min(pole, len(site.inputs) - 1)])
        otherwise = [x for x in operands if run.is_decided_otherwise(x)]
        errors = {x: run.range(x).error for x in operands if x not in otherwise}
        # In a product of matrices, the terms may be larger than the inputs.
        end = 0 if site.primitive in equations.PRODUCTS else least
        large = [x for x, e in errors.items() if e * run.range(x).float32_largest > end]
        is_passed = site.primitive in PASSES or site.moved
        is_found = otherwise or large or (run.limit(k) and not is_passed)
        if is_found and not site.is_decision:
            return [*otherwise, *large]
        own = run.range(k).error if run.limit(k) else math.inf
        if site.is_decision:
            own = float(jnp.finfo(run.program.dtype).eps) / 2  # Roundoff is enough.
        worst = min(own, max(errors.values(), default=0.0))
        nearest = [x for x, e in errors.items() if 0 < worst <= INHERITED * e]
        return [*otherwise, *nearest]

    found = run.ancestors([key], parents)
    return [k for k in run.keys if k in found and run.site(k).primitive]


def gain(run: Run, key: Key) -> float:
    """Returns the share of the results that is flushed here, and not before."""
    shares = (run.range(k).flushed for k in run.operands(key))
    return run.range(key).flushed - max(shares, default=0.0)
