"""The verdict: the findings, the most urgent first.

It rests on the effect: as long as the gradients agree with float32, all is fine. If
they do not, it goes from the wrong gradients up to the line where that begins. First
come inf and nan of float32 itself, since no line in float32 mends them. Then come inf
and nan of half precision, then faults that a scale mends, then those that none mends.
Decisions that differ in float32 come last.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from optax_lossscale.diagnostics import _common
from optax_lossscale.diagnostics._bits import limits_of
from optax_lossscale.diagnostics._trace.judge import causes, words
from optax_lossscale.diagnostics._trace.judge.findings import (
    FindingKind,
    NumericFinding,
)
from optax_lossscale.diagnostics._trace.run import (
    INHERITED,
    Run,
    depending_on,
    ratio,
    sketch_distance,
)

# Results agree with float32 if they differ by less: 20 times the precision of float16.
CLOSE = 0.01
# With fewer bits of precision more is usual, but never more than this.
FARTHEST = 0.5
# The gradient of one parameter may be farther: rounding the parameters alone does that.
LEAF = 10
# An error that is a smaller share of the norm of all gradients never matters.
PART = 0.1
# The exponents of the smallest and of the largest scale.
LEAST, MOST = -126, 126
# How many lines to name of each kind.
LINES = 3
# An inf that is swallowed leaves larger errors than this.
SWALLOWED = 0.5


class Effect(NamedTuple):
    """How far the loss and the gradients are from float32.

    Attributes:
      loss: The difference of the loss, relative to float32; inf if it is not finite.
      gradients: The norm of the difference of all gradients, relative to the norm of
        all; inf if it is not finite.
      parameters: The same of the gradient of each parameter.
      wrong: The numbers of the parameters whose gradients are wrong, the worst first.
      parts: Those that are wrong by themselves, and not only as a part of all.
      is_fine: Whether the gradients agree with float32, and the loss is finite.
      floor: How far rounded parameters and data alone move the gradients; 0 if that
        does not matter.
    """

    loss: float
    gradients: float
    parameters: list[float]
    wrong: list[int]
    parts: list[int]
    is_fine: bool
    floor: float = 0.0

    def __str__(self):
        loss, gradients, floor = map(
            _common.percent, (self.loss, self.gradients, self.floor)
        )
        text = f"loss {loss}, gradients {gradients}"
        return text + f"; rounded parameters and data {floor}" * (self.floor > 0)


class Search:
    """Runs a program at several scales.

    Attributes:
      close: How far gradients may be from float32.
      at: Runs the program at a scale.
      predicted: The largest scale at which the backward pass in float32 is in range.
      run: The run at the scale in question.
      best: The run at the largest scale with which the gradients are finite, and no
        overflow in the backward pass changes them; None if there is none.
    """

    def __init__(self, at: Callable[..., Run], close: float, scale: float):
        """Runs the program until the largest scale is known."""
        self.close, self.at = close, functools.cache(at)
        self.run = self.at(scale)
        # Gradients that are zero in theory, as that of a bias before a normalization,
        # are roundoff: a scale that is no power of two rounds them differently.
        factor, before = 1.375, self.run.norms
        with np.errstate(invalid="ignore"):
            change = sketch_distance(before, self.at(scale * factor).norms / factor)
            self._noise = change > CLOSE * before[:, 0]
        rooms = [headroom(self.run, key) for key in self.run.backward]
        predicted = math.log2(scale) + min([2.0 * MOST, *rooms]) - 2**-20
        exponent = min(max(math.floor(predicted), LEAST), MOST)
        self.predicted = 2.0**exponent
        self.best = self._find_largest([exponent, exponent + 1])

    def _find_largest(self, guesses):
        """Returns the run at the largest scale that fits: guesses, then bisection."""
        below, above = LEAST - 1, MOST + 1
        while above - below > 1:
            inside = (x for x in guesses if below < x < above)
            middle = next(inside, (below + above) // 2)
            is_sound = self._is_sound(self.at(2.0**middle))
            below, above = (middle, above) if is_sound else (below, middle)
        return self.at(2.0**below) if below >= LEAST else None

    def _is_sound(self, run):
        """Whether no overflow in the backward pass matters, at the scale of the run."""
        if any(map(run.is_bad, run.gradients)):
            return False
        origins = run.origins("backward")
        return not any(map(run.exceeds, origins)) or not self.effect(run).wrong

    @functools.cached_property
    def floor(self) -> float:
        """How far all gradients move if float32 gets rounded parameters and data."""
        before = self.run.norms
        change = sketch_distance(before, self.at(self.run.scale, True).norms)
        return ratio(math.hypot(*change), math.hypot(*before[:, 0]))

    def effect(self, run: Run) -> Effect:
        """Returns how far a run is from float32."""
        effect = self.judge(run.norms, run.losses)
        if effect.wrong and not effect.parts and self.close < effect.gradients:
            # Half precision can be no better than its inputs, above all near a minimum.
            most = min(INHERITED * self.floor, LEAF * self.close)
            if effect.gradients <= most:
                is_fine = math.isfinite(run.losses[0])
                effect = effect._replace(wrong=[], is_fine=is_fine, floor=self.floor)
        return effect

    def judge(self, norms: Any, losses: Sequence[float]) -> Effect:
        """Compares the norms of gradients, and losses, with float32."""
        sizes, differences, lost = norms.T[:3]
        total, difference = math.hypot(*sizes), math.hypot(*differences)
        gradients = ratio(difference, total)
        allowed = self.close * np.maximum(LEAF * sizes, PART * total)
        is_wrong = ~np.isfinite(differences) | (differences > allowed)
        is_wrong |= lost > causes.SHARE * sizes
        parts = np.flatnonzero(is_wrong & ~self._noise).tolist()
        wrong = sorted(parts, key=lambda i: -ratio(differences[i], 1))
        if gradients > self.close and not wrong:
            wrong = [int(np.argmax(differences))]
        loss = ratio(abs(losses[0] - losses[1]), abs(losses[1]))
        parameters = list(map(ratio, differences, sizes))
        is_fine = not wrong and math.isfinite(losses[0])
        return Effect(loss, gradients, parameters, wrong, parts, is_fine)


def closeness(dtype: str) -> float:
    """Returns how far results may be from float32 in a dtype: 0.01 in float16."""
    return min(CLOSE * 2.0 ** (10 - jnp.finfo(dtype).nmant), FARTHEST)


def headroom(run: Run, key: int) -> float:
    """Returns how many bits a result could grow by before it overflows."""
    limits, largest = run.limit(key), run.range(key).float32_largest
    if limits is None or not largest:
        return math.inf
    return math.log2(limits.overflow / largest)


def find_all(search: Search) -> list[NumericFinding]:
    """Returns the findings, the most urgent first."""
    findings, run = _judge(search), search.run
    standing, others = [], []
    for key in _distinct_lines(run, _slow_solvers(run)):
        stands_still = _stands_still(run, key)
        finding = words.slow_solver(run.operation(key), run.outline.dtype, stands_still)
        (standing if stands_still else others).append(finding)
    standing, others = standing[:LINES], others[:LINES]
    if findings[0].kind == FindingKind.FINE:
        return [*standing, *findings, *others]
    return [*findings, *standing, *others]


def _stands_still(run, key):
    """Whether a solver never reaches its tolerance, of the site of its iterations."""
    flags = (k for k in run.solvers if key in run.operands(k))
    return any(map(run.is_decided_otherwise, flags))


def _slow_solvers(run):
    """Returns the solvers that take more iterations than in float32."""
    counts = ((k, run.range(k)) for k in run.solvers if not run.site(k).is_decision)
    return [k for k, x in counts if x.largest > x.float32_largest]


def _judge(search):
    """Returns the findings about results."""
    run, best = search.run, search.best
    if run.outline.loss is None and not math.isfinite(run.losses[0]):
        return [words.constant_loss(run.losses[0])]
    effect = search.effect(run)
    if effect.floor and best is not None:  # If a scale mends it, it is no roundoff.
        raw = search.judge(run.norms, run.losses)
        effect = raw if _underflow(search, best, raw) else effect
    if best is None or not effect.is_fine:
        findings = _bad_argument(run) or _bad_float32(search)
        findings = findings or _wrong(search, effect)
        if findings:
            return [_beside_loss(run, findings[0]), *findings[1:]]
    swallowed = [run.operation(key) for key in run.nonfinite_origins()[:1]]
    largest = best and best.scale
    first = swallowed[0] if swallowed else None
    return [words.fine(str(effect), largest, first, is_near=not effect.floor)]


def _bad_argument(run):
    """Finds inf or nan in the arguments from which the loss or a gradient has it."""
    results = [*run.ran([run.outline.loss]), *run.gradients]
    reached = run.ancestors(filter(run.is_bad, results), run.bad_operands)
    arguments = [k for k, x in run.sites.items() if x.phase == "argument"]
    bad = [k for k in arguments if k in reached and run.is_bad(k)]
    if not bad:
        return []
    readers = depending_on(bad[:1], {k: run.operands(k) for k in run.sites})
    operations = (k for k in run.sites if k in readers and run.site(k).primitive)
    reader = next(operations, bad[0])
    name = run.outline.names[bad[0]]
    is_parameter = name in run.outline.parameters
    more, held = len(bad) - 1, words.kinds_of(run.range(bad[0]))
    operation = run.operation(reader)
    return [words.nonfinite_argument(name, more, is_parameter, held, operation)]


def _bad_float32(search):
    """Finds where float32 itself makes inf or nan of the loss or of a gradient."""
    if not _float32_origins(search.run):
        return []
    # A large scale alone may overflow float32: one that fits decides, or at most 1.
    run = search.best or search.at(min(search.run.scale, 1.0))
    key = next(iter(_float32_origins(run)), None)
    if key is None:
        return []
    if run.is_origin(key):
        return [words.explain(causes.fault_of(run, key, search.close))]
    cause = causes.cause_in_float32(run, key)
    is_hidden = not run.is_bad(key)
    return [words.in_float32(run.operation(key), cause, is_hidden)]


def _float32_origins(run):
    """Returns where inf and nan of the loss and the gradients begin in float32."""

    def is_bad(key):
        return run.range(key).float32_nonfinite > 0

    def bad_operands(key):
        return list(filter(is_bad, run.operands(key)))

    results = [*run.ran([run.outline.loss]), *run.gradients]
    reached = run.ancestors(filter(is_bad, results), bad_operands)
    keys = (k for k in run.sites if k in reached and run.site(k).primitive)
    return [k for k in keys if not bad_operands(k)]


def _beside_loss(run, finding):
    """Adds to a finding of inf or nan that the loss is huge in float32 as well."""
    loss = run.losses[1]
    kinds = FindingKind.FORWARD, FindingKind.BACKWARD, FindingKind.SCALE_TOO_HIGH
    if finding.kind not in kinds or not math.isfinite(loss):
        return finding
    if abs(loss) < limits_of(run.outline.dtype).overflow:
        return finding
    text = words.huge_loss(loss, run.outline.dtype)
    return finding._replace(message=f"{finding.message} {text}")


def _wrong(search, effect):
    """Says why the loss or the gradients are not those of float32."""
    run, best = search.run, search.best
    in_loss, late = (
        run.origins_behind(run.ran([run.outline.loss])),
        run.origins_behind(run.gradients),
    )
    if in_loss or (best is None and late):
        return _nonfinite(search, in_loss or late)
    if best is None or not effect.wrong:
        return [_explain(search, run, _origin_of(search, run, effect.wrong))]
    at_best = search.effect(best)
    if run.scale > best.scale and (begin := late or run.origins("backward")):
        first, scales = run.operation(begin[0]), (run.scale, best.scale)
        findings = [words.too_high(first, *scales, at_best.is_fine)]
    else:
        findings = _underflow(search, best, effect)
    if not at_best.wrong:
        return findings
    # An inf of the forward pass that is swallowed, as by tanh, is there at each scale.
    origins = (_origin_of(search, best, [i]) for i in at_best.wrong)
    swallowed = (k for k in origins if best.is_lost(k))
    for key in swallowed:
        if best.site(key).phase == "forward":
            return [_explain(search, best, key), *findings]
    return findings + _left(search, best, at_best.wrong, bool(findings))


def _nonfinite(search, keys):
    """Says where inf and nan begin, at every loss scale."""
    run = search.run
    keys = [k for k in keys if run.site(k).phase == "forward"] or keys
    # A nan made from an inf is a consequence, also of an inf that a loop made before.
    first = {k for k in keys if not run.bad_operands(k)}
    later = depending_on(first, {k: run.bad_operands(k) for k in run.sites}) - first
    keys = [k for k in keys if k not in later]
    # It may begin in an inf that is swallowed, as in log(1 / inf).
    begin = (causes.origin_of_error(run, k, SWALLOWED) for k in keys)
    keys = (x if run.is_lost(x) else k for k, x in zip(keys, begin, strict=True))
    keys = itertools.islice(_distinct_lines(run, keys), LINES)
    return [_explain(search, run, key) for key in keys]


def _distinct_lines(run, keys):
    """Yields the first site of each line."""
    seen = set()
    for key in keys:
        site = run.site(key)
        line = site.source, site.scope, site.source.line or key
        if line not in seen:
            seen.add(line)
            yield key


def _losers(run, wrong):
    """Returns where gradients of these parameters are flushed, the most first."""
    reached = run.ancestors(run.ran(run.outline.gradients[i] for i in wrong))
    sites = [k for k in run.backward if k in reached and run.limit(k)]
    gains = {k: causes.newly_flushed(run, k) for k in sites}
    losers = sorted(gains, key=lambda key: -gains[key])
    return list(_distinct_lines(run, [k for k in losers if gains[k] >= causes.SHARE]))


def _underflow(search, best, effect):
    """Says where gradients are lost that a larger scale brings back."""
    run, after = search.run, search.effect(best)
    pairs = list(zip(effect.parameters, after.parameters, strict=True))
    helped = [i for i in effect.wrong if pairs[i][0] - pairs[i][1] > search.close]
    if not helped:
        return []
    keys = _losers(run, helped)
    keys = [k for k in keys if best.range(k).flushed < run.range(k).flushed]
    keys = keys[:LINES] or [_origin_of(search, run, helped)]
    scales = run.scale, best.scale
    return [
        words.underflow(
            run.operation(k),
            *scales,
            shares=(run.range(k).flushed, best.range(k).flushed),
            errors=pairs[helped[0]],
            is_first=k == keys[0],
        )
        for k in keys
    ]


def _left(search, best, wrong, is_second):
    """Says why gradients are wrong even at the largest scale.

    Args:
      search: The search.
      best: The run at that scale.
      wrong: The parameters whose gradients are.
      is_second: Whether a scale mends something else.
    """
    missing = [
        (k, math.ceil(math.log2(limits.normal / largest)))
        for k in _losers(best, wrong)
        if (limits := best.limit(k))
        and 0 < (largest := best.range(k).float32_largest) < limits.normal
    ]
    if missing and best.scale < 2.0**MOST:
        low, bits = missing[0]
        high = min(best.backward, key=lambda k: headroom(best, k))
        pair = best.operation(high), best.operation(low)
        is_autocast = best.outline.is_autocast
        return [words.no_scale(*pair, best.scale, bits, is_autocast)]
    scale = best.scale if is_second else None
    keys = (_origin_of(search, best, [i]) for i in wrong)
    findings = (_explain(search, best, key, scale) for key in keys)
    first = next(findings)
    if first.kind != FindingKind.DECISION:
        return [first]
    # Of another parameter, an error that is no choice comes first.
    others = (x for x in findings if x.kind != FindingKind.DECISION)
    return [*itertools.islice(others, 1), first]


def _origin_of(search, run, wrong):
    """Returns where the error of the worst gradient begins, or else of the loss."""
    worst = run.ran(run.outline.gradients[i] for i in wrong[:1])
    (*_, key) = worst or run.ran([run.outline.loss])
    return causes.origin_of_error(run, key, search.close / 2)


def _explain(search, run, key, scale=None):
    """Explains why an operation is wrong at every loss scale."""
    is_known = run.is_bad(key) and (
        run.range(key).float32_nonfinite
        or run.bad_operands(key)
        or causes.vanished_inputs(run, key)
    )
    if not run.limit(key) and not is_known and not run.site(key).is_decision:
        # A line in float32 magnifies an error of half precision.
        halves = [
            k for k in causes.sources_of_error(run, key, search.close) if run.limit(k)
        ]
        key = halves[-1] if halves else key
    return words.explain(causes.fault_of(run, key, search.close), scale)
