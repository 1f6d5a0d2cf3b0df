"""Where a fault begins, and its cause: a small record, for the words."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from optax_lossscale._jaxprs.primitives import Kind, Trait, has, kind_of
from optax_lossscale._tree import is_half
from optax_lossscale.diagnostics._trace.judge.findings import Cause, FindingKind
from optax_lossscale.diagnostics._trace.judge.words import CAST_PRIMITIVES, Fault
from optax_lossscale.diagnostics._trace.run import INHERITED, Run, spacing

# Of an array, a smaller share that is flushed to zero is not worth a word.
SHARE = 0.01
# They make large numbers of small ones; a power does if its exponent is negative.
INVERSE, POWERS = ("div", "rsqrt", "log", "log1p"), ("pow", "integer_pow")
EXPONENTIALS = ("exp", "exp2", "expm1")
# They compute nothing, and so they flush nothing.
EXACT = (Kind.MOVE, Kind.SPREAD)
# Max-pooling: it chooses, but returns numbers, not flags.
CHOOSERS = ("select_and_scatter_add", "select_and_gather_add")


class Explanation(NamedTuple):
    """The cause of a fault.

    Attributes:
      cause: The cause.
      others: Other sites that have to change: those before that made the fault; of a
        cast, those that read it.
    """

    cause: Cause
    others: Sequence[int] = ()


def origin_of_error(run: Run, key: int, small: float) -> int:
    """Returns where the error of a result begins.

    Args:
      run: The run.
      key: The site of the result.
      small: An error that is not worth following.
    """
    swallowed = _swallowed_before(run, key, small)
    if swallowed is not None:
        return swallowed
    seen, begin, ahead = set(), key, key
    while ahead is not None:
        seen.add(ahead)
        begin = ahead if run.site(ahead).primitive else begin
        ahead = _wrong_operand(run, ahead, small, seen)
    if run.is_decided_otherwise(begin) and (zeros := vanished_inputs(run, begin)):
        return zeros.others[-1]
    moved = run.site(begin).row  # A move has the error of the value that it moves.
    return moved if run.site(moved).primitive else begin


def _swallowed_before(run, key, small):
    """Returns where inf or nan begins that float32 does not have; None if nowhere.

    It may be swallowed on the way to the result: 1 / inf is 0.
    """

    def wrong_operands(k):
        return filter(is_wrong, run.operands(k))

    def is_wrong(k):
        numbers = run.range(k)
        return numbers.error >= small or numbers.flushed or run.is_lost(k)

    reached = run.ancestors([key], wrong_operands) if run.lost_origins else ()
    origins = (k for k in run.lost_origins if k in reached)
    # In a loop, an inf that is made later comes in earlier.
    return min(origins, key=lambda k: bool(run.bad_operands(k)), default=None)


def _wrong_operand(run, key, small, seen):
    """Returns the operand from which a result has its error; None if it has its own.

    Args:
      run: The run.
      key: The site of the result.
      small: An error that is not worth following.
      seen: Operands to pass over.
    """
    operands = [k for k in run.operands(key) if k not in seen]
    decisions = [k for k in operands if run.site(k).is_decision]
    otherwise = list(filter(run.is_decided_otherwise, decisions))
    if not run.site(key).primitive:  # It leaves a branch or a loop.
        if otherwise:
            return otherwise[0]  # It took another branch.
        otherwise = decisions  # A loop that did not end is not seen inside.
    worst = _worst(run, [k for k in operands if not run.site(k).is_decision])
    least = max(small, min(run.range(key).error, 1) / INHERITED)
    if worst is not None and run.range(worst).error >= least:
        return worst
    return next(iter(otherwise), None)  # The index is wrong, or the mask.


def _worst(run, keys):
    """Returns the site with the largest error; None of none."""
    return max(keys, key=lambda k: run.range(k).error, default=None)


def newly_flushed(run: Run, key: int) -> float:
    """Returns the share of the results that is flushed here, and not before."""
    shares = (run.range(k).flushed for k in run.operands(key))
    return run.range(key).flushed - max(shares, default=0.0)


def is_underflow(run: Run, key: int) -> bool:
    """Whether results are flushed to zero here, or too small to be precise."""
    limits, result = run.limit(key), run.range(key)
    if limits is None or has(run.site(key).primitive, Trait.SUM):
        return False
    is_small = 0 < result.float32_largest < limits.normal
    return is_small or newly_flushed(run, key) >= SHARE


def has_half(run: Run, key: int) -> bool:
    """Whether a result or an operand is in half precision."""
    return any(is_half(run.site(k).dtype) for k in [key, *run.operands(key)])


def sources_of_error(run: Run, key: int, close: float) -> list[int]:
    """Returns the operations before that may have made the error of a result.

    These are those whose errors are large beside the result; if there are none, as in
    `acos(x)` near 1 or `log(1 - x)`, the nearest ones in half precision.
    """
    least = close / 2 * run.range(key).float32_largest

    def parents(k):
        operands = run.operands(k)
        otherwise = [x for x in operands if run.is_decided_otherwise(x)]
        errors = {x: run.range(x).error for x in operands if x not in otherwise}
        large = [
            x for x, e in errors.items() if e * run.range(x).float32_largest > least
        ]
        if otherwise or large:
            return [*otherwise, *large]
        own = run.range(k).error if run.limit(k) else math.inf
        worst = min(own, max(errors.values(), default=0.0))
        return [x for x, e in errors.items() if 0 < worst <= INHERITED * e]

    reached = run.ancestors([key], parents)
    return [k for k in run.sites if k in reached and run.site(k).primitive]


def vanished_inputs(run: Run, key: int) -> Explanation | None:
    """Returns the cause of zeros that break an operation, if float32 has none there.

    Returns:
      `FLUSHED` by the site where they were, or `ROUNDED` by the sites that rounded a
      number from which another one is subtracted; None if there are no such zeros.
    """
    zeros = _origin_of_zeros(run, key)
    if zeros is None:
        return None
    if not _flushes_nothing(run, zeros):
        return Explanation(Cause.FLUSHED, [zeros])
    # Each number is there, and only their difference is not.
    rounded = _rounded_operands(run, zeros)
    return Explanation(Cause.ROUNDED, rounded) if rounded else None


def _origin_of_zeros(run, key):
    """Returns where the zeros that an operation reads begin; None if there are none.

    The walk follows the operand with the most zeros, if it has at least as many: a sum
    is zero only if all of its terms are. Of a division only the divisor counts.
    """

    def flushed(k):
        return run.range(k).flushed

    def zeros_among(keys):
        return [k for k in keys if flushed(k) and not run.site(k).is_decision]

    operands, origin, seen = run.operands(key), None, set()
    is_division = has(run.site(key).primitive, Trait.OVER)
    at = zeros_among(operands[-1:] if is_division else operands)
    while at:
        origin = max(at, key=flushed)
        seen.add(origin)
        least = 0 if _flushes_nothing(run, origin) else flushed(origin)
        zeros = zeros_among(run.operands(origin))
        at = [k for k in zeros if k not in seen and flushed(k) >= least]
    return origin


def _flushes_nothing(run, key):
    """Whether zeros at a site are not flushed there."""
    name = run.site(key).primitive
    is_exact = not name or kind_of(name) in EXACT or has(name, Trait.SUM)
    return is_exact or not run.limit(key)


def _rounded_operands(run, key):
    """Returns where half precision rounds the operands of an operation, in order.

    It follows the largest error, as far as that is inherited.
    """
    way, worst = [], _worst(run, run.operands(key) or [key])
    while worst not in way and run.range(worst).error > 0:
        way = [worst, *way]
        least = run.range(worst).error / INHERITED
        ahead = [k for k in run.operands(worst) if run.range(k).error > least]
        worst = _worst(run, ahead or [worst])
    return [k for k in way if run.site(k).primitive and run.limit(k)]


def _rounded_before(run, key):
    """Returns the nearest results in half precision, among which a decision chose."""

    def parents(k):
        is_move = kind_of(run.site(k).primitive) in EXACT or run.site(k).row != k
        return run.operands(k) if k == key or (is_move and not run.limit(k)) else []

    reached = run.ancestors([key], parents)
    return [k for k in run.sites if k in reached and run.limit(k)]


def fault_of(run: Run, key: int, close: float) -> Fault:
    """Returns the fault of an operation that is wrong at every loss scale.

    Args:
      run: The run.
      key: The site of the operation.
      close: How far results may be from float32.
    """
    kind, explanation = _classify(run, key, close)
    own = run.site(key).source
    others = [k for k in explanation.others if run.site(k).source != own]
    operation, *sources = map(run.operation, [key, *others])
    forward = (x for x in run.sites.values() if x.phase == "forward")
    lines = [x.source.own for x in forward if kind_of(x.primitive) == Kind.PRODUCT]
    return Fault(
        kind,
        operation,
        explanation.cause,
        sources=tuple(sources),
        dtype=run.outline.dtype,
        is_autocast=run.outline.is_autocast,
        products=lines.count(operation.own),
    )


def _classify(run: Run, key: int, close: float) -> tuple[FindingKind, Explanation]:
    """Returns the kind of the fault at a site, and its cause."""
    site = run.site(key)
    if run.is_bad(key) or run.exceeds(key):
        return FindingKind.of_nonfinite(site.phase), _explain_nonfinite(run, key)
    if is_underflow(run, key):
        return FindingKind.UNDERFLOW, _explain_underflow(run, key)
    if site.is_decision or site.primitive in CHOOSERS:
        others = _rounded_before(run, key)
        return FindingKind.DECISION, Explanation(Cause.DECIDED, others)
    return FindingKind.PRECISION, _explain_imprecision(run, key, close)


def _explain_underflow(run, key):
    """Returns the cause of results that are flushed to zero, or nearly."""
    limits, largest = run.limit(key), run.range(key).float32_largest
    is_small = limits is not None and 0 < largest < limits.normal
    cause = Cause.SMALL if is_small else Cause.UNKNOWN
    return Explanation(cause, run.ran(run.site(key).readers))


def _explain_imprecision(run, key, close):
    """Returns the cause of finite results that differ from float32."""
    cause, is_sum = Cause.UNKNOWN, has(run.site(key).primitive, Trait.SUM)
    if is_sum and (terms := spacing(run.operation(key))):
        is_small = run.range(key).float32_largest < 2.0**terms.top / 4
        cause = Cause.CANCEL if is_small else Cause.TERMS_LOST
    # A line that casts is not to be computed in float32: the next one is.
    before = sources_of_error(run, key, close)
    return Explanation(
        cause, [k for k in before if run.site(k).primitive not in CAST_PRIMITIVES]
    )


def _explain_nonfinite(run, key):
    """Returns the cause of inf or nan."""
    explanation = _cause_of_nonfinite(run, key)
    if explanation.others:
        return explanation
    return explanation._replace(others=run.ran(run.site(key).readers))


def _cause_of_nonfinite(run: Run, key: int) -> Explanation:
    """Returns the cause of inf or nan, and the sites before it that made them."""
    site = run.site(key)
    if any(map(math.isnan, site.constants)):
        return Explanation(Cause.NAN)
    if run.range(key).float32_nonfinite:
        return Explanation(cause_in_float32(run, key))
    if run.exceeds(key):
        return Explanation(_cause_of_overflow(site))
    if any(map(math.isinf, _constants_before(run, key))):
        return Explanation(Cause.CONSTANT)
    if run.bad_operands(key):
        return Explanation(Cause.INF)
    if (vanished := vanished_inputs(run, key)) is not None:
        return vanished
    if has(site.primitive, Trait.SUM) or kind_of(site.primitive) == Kind.PRODUCT:
        return Explanation(Cause.TERMS)
    return Explanation(
        Cause.CAST if site.primitive in CAST_PRIMITIVES else Cause.UNKNOWN
    )


def _cause_of_overflow(site):
    """Returns the cause of a result that is too large for the dtype."""
    if any(map(math.isinf, site.constants)):
        return Cause.CONSTANT
    is_pole = site.primitive in INVERSE or _exponent(site) < 0
    return Cause.POLE if is_pole else Cause.RANGE


def cause_in_float32(run: Run, key: int) -> Cause:
    """Returns the cause of inf or nan in float32, which is never the advice there."""
    site = run.site(key)
    is_inf = any(run.range(k).float32_nonfinite for k in run.bad_operands(key))
    if is_inf or any(map(math.isinf, _constants_before(run, key))):
        return Cause.FLOAT32_INF
    if site.primitive in EXPONENTIALS:
        return Cause.FLOAT32_RANGE
    if _makes_no_nan(site):
        return Cause.FLOAT32_GROWS
    if not run.is_origin(key):  # Half precision does not tell whether it is inf or nan.
        return Cause.FLOAT32_ONLY
    has_zeros = any(run.range(k).zeros for k in run.operands(key))
    if run.range(key).nans:
        return Cause.ZEROS if has_zeros else Cause.DOMAIN
    is_pole = has_zeros and has(site.primitive, Trait.POLE)
    return Cause.ZEROS if is_pole else Cause.FLOAT32_GROWS


def _makes_no_nan(site):
    """Whether finite operands make inf, if too large, but never nan."""
    name = site.primitive
    if name == "integer_pow":
        return _exponent(site) > 0
    is_sum = has(name, Trait.SUM | Trait.PLUS | Trait.MINUS | Trait.TIMES)
    return is_sum or name == "square" or kind_of(name) == Kind.PRODUCT


def _constants_before(run, key):
    """Returns the constants of an operation, and of those that gave it inf or nan."""
    before = map(run.site, run.ancestors([key], run.bad_operands))
    return [c for x in before for c in x.constants]


def _exponent(site):
    """Returns the exponent of a power, if it is a constant; else 0."""
    return min(site.constants, default=0) if site.primitive in POWERS else 0
