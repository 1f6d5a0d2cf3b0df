"""The verdict: what breaks, why, and what to do, the most urgent first."""

import math
from typing import NamedTuple

from optax_lossscale.diagnostics import _bits
from optax_lossscale.diagnostics._trace.interpreter import Key
from optax_lossscale.diagnostics._trace.operations import NumericOperation, Run
from optax_lossscale.diagnostics._trace.search import headroom

# A smaller share of gradients that are flushed to zero is not worth a word.
LOST = 0.01
SHOWN = 3
# A scale that is at most this many bits too high comes down within a few skipped steps.
USUAL_BITS = 4


class NumericFinding(NamedTuple):
    """Something that `trace_numerics` found.

    Attributes:
      kind: "nonfinite_argument": a parameter or the data held inf or nan.
        "forward": inf or nan begins in the forward pass, so no loss scale helps.
        "backward": inf or nan begins in the backward pass at every loss scale.
        "scale_too_high": the backward pass overflows at this loss scale.
        "underflow": results of the backward pass are flushed to zero.
        "no_scale": no loss scale fits two operations.
        "would_overflow", "would_underflow": the same, if the program computed in the
        dtype in question.
        "fine": nothing was found.
      message: What happens and what to do, in plain words.
      operation: The operation, or None.
      other: A second operation that matters, or None.
      bits: How many bits are missing, or None.

    Examples:
      >>> import jax.numpy as jnp
      >>> from optax_lossscale import diagnostics
      >>> def loss_fn(w):
      ...     return jnp.sum(jnp.exp(w.astype(jnp.float16))).astype(jnp.float32)
      >>> trace = diagnostics.trace_numerics(loss_fn, jnp.array([1.0, 12.0]))
      >>> trace.findings[0].kind
      'forward'
    """

    kind: str
    message: str
    operation: NumericOperation | None = None
    other: NumericOperation | None = None
    bits: float | None = None


class Verdict:
    """Finds what to say about a run."""

    def __init__(self, run: Run, best: list[Run | None], dtype: str):
        """Prepares the verdict.

        Args:
          run: The run at the scale in question.
          best: For each loss, the run at its largest scale.
          dtype: The dtype in question.
        """
        self.run, self.best, self.dtype = run, best, dtype

    def findings(self) -> list[NumericFinding]:
        """Returns what was found, what to fix first."""
        found = self._forward() or self._arguments()
        if not found:
            for loss, best in enumerate(self.best):
                found += self._backward(loss, best)
        return found or [self._fine()]

    # The forward pass.

    def _arguments(self) -> list[NumericFinding]:
        run = self.run
        names = run.program.arguments
        bad = [k for k in run.keys if k in names and not run.range(k).is_finite]
        results = [
            k for grads in run.program.gradients for x in grads.values() for k in x
        ]
        if not bad or all(run.range(k).is_finite for k in run.inputs(tuple(results))):
            return []
        reader = next(
            (k for k in run.keys if any(bad[0] in keys for keys in run.site(k).inputs)),
            None,
        )
        name = names[bad[0]]
        kind = "parameter" if name.startswith("params") else "argument"
        used = (
            "" if reader is None else f" It is first used at {run.operation(reader)}."
        )
        count = "" if len(bad) == 1 else f" (and {len(bad) - 1} more)"
        fix = (
            "Restore a checkpoint from before that, and find the step that was applied "
        )
        fix += "though its gradients were not finite."
        if kind == "argument":
            fix = "Look for the bad example in the data."
        message = (
            f"The {kind} {name}{count} held {_kinds(run, bad[0])} before anything was "
            f"computed.{used} No loss scale helps. {fix}"
        )
        operation = None if reader is None else run.operation(reader)
        return [NumericFinding("nonfinite_argument", message, operation)]

    def _forward(self) -> list[NumericFinding]:
        run = self.run
        keys = _distinct_lines(run, run.origins("forward"))
        found = [self._forward_finding(key) for key in keys[:SHOWN]]
        known = {run.site(key).source for key in keys[:SHOWN]}
        later = [
            key
            for key in run.keys
            if run.site(key).phase == "forward"
            and run.site(key).primitive
            and run.exceeds(key)
            and run.limit(key) is not None
        ]
        later = [
            k for k in _distinct_lines(run, later) if run.site(k).source not in known
        ]
        if found and later:
            lines = "; ".join(
                f"{run.operation(k).place} (2^{_log2(run, k):.1f})"
                for k in later[:SHOWN]
            )
            message = f"Once that is mended, these would overflow as well: {lines}."
            found.append(NumericFinding("forward", message, run.operation(later[0])))
        return found

    def _forward_finding(self, key: Key) -> NumericFinding:
        run = self.run
        operation, found = run.operation(key), run.range(key)
        limits = run.limit(key)
        text = f"{operation}: {_kinds(run, key)} begins here"
        bits = None
        if limits is not None and run.exceeds(key):
            needed = _log2(run, key)
            bits = needed - math.log2(limits.overflow)
            end = math.log2(limits.overflow)
            text += f". The largest result would be 2^{needed:.1f}; "
            text += f"{self._dtype_of(key)} ends at 2^{end:.0f}. "
            text += "No loss scale helps, since this is the forward pass: compute this "
            text += "line in float32, or make its inputs smaller."
        else:
            text += f", though {found.dtype} has the range for the result. "
            text += self._why_not_finite(key)
            text += " No loss scale helps: compute this line in float32."
        if self._is_harmless():
            text += " The loss and the gradients of this batch do not suffer from it."
        kind = "forward" if not found.is_finite else "would_overflow"
        return NumericFinding(kind, text, operation, bits=bits)

    def _why_not_finite(self, key: Key) -> str:
        run = self.run
        inputs = [k for keys in run.site(key).inputs for k in run.inputs(keys)]
        flushed = max(inputs, key=lambda k: run.range(k).flushed, default=None)
        if flushed is not None and run.range(flushed).flushed:
            origin = self._flushed_first(flushed)
            return (
                f"Its input holds zeros that float32 would not have: they were flushed "
                f"at {run.operation(origin).place}."
            )
        if any(run.range(k).zeros for k in inputs):
            return (
                "An input holds zeros: a constant like 1e-8 is zero in float16, which "
                "ends at 2^-24 below."
            )
        if any(not run.range(k).is_finite for k in inputs) or run.site(key).constants:
            return (
                "It computes inf - inf, 0 * inf or 0 / 0. A constant like -1e9 is -inf "
                "in float16."
            )
        return "Its inputs are outside the domain of the function."

    def _flushed_first(self, key: Key) -> Key:
        """Returns the operation from which flushed zeros come."""
        run = self.run
        while True:
            inputs = [k for keys in run.site(key).inputs for k in run.inputs(keys)]
            lost = [k for k in inputs if run.range(k).flushed and run.site(k).primitive]
            if not lost:
                return key
            key = max(lost, key=lambda k: run.range(k).flushed)

    def _is_harmless(self) -> bool:
        run = self.run
        results = [
            k for grads in run.program.gradients for x in grads.values() for k in x
        ]
        known = [run.range(k) for k in run.inputs(tuple(results))]
        loss, wide = run.losses.T.tolist()
        agrees = all(
            math.isclose(x, y, rel_tol=0.02) for x, y in zip(loss, wide, strict=True)
        )
        return agrees and all(x.is_finite and x.error < 0.1 for x in known)

    # The backward pass.

    def _backward(self, loss: int, best: Run | None) -> list[NumericFinding]:
        run = self.run
        origins = [k for k in run.origins("backward") if k[0] == loss]
        if best is None:
            found = [
                NumericFinding(
                    "backward",
                    f"{run.operation(key)}: {_kinds(run, key)} begins here, in the "
                    "backward pass, at every loss scale. Compute this line, or its "
                    "derivative, in float32.",
                    run.operation(key),
                )
                for key in _distinct_lines(run, origins)[:SHOWN]
            ]
            return found
        scale, largest = run.scales[loss], best.scales[loss]
        found = []
        conflict = self._conflict(loss, best)
        if origins:
            found.append(self._too_high(origins[0], scale, largest, conflict is None))
        return found + ([conflict] if conflict else self._underflow(loss, best))

    def _too_high(self, key, scale, largest, is_usual):
        run, operation = self.run, self.run.operation(key)
        room = headroom(run, key)
        would = "" if not math.isfinite(room) else (
            f" (it would be 2^{_log2(run, key):.1f})"
        )  # fmt: skip
        text = (
            f"{operation}: {_kinds(run, key)} begins here{would}, at the loss scale "
            f"{_power(scale)}. The largest scale with which nothing in the backward "
            f"pass overflows is {_power(largest)}."
        )
        if not operation.line:
            text += " This is the gradient of the loss itself, which has the dtype of "
            text += "the loss: return the loss in float32."
        bits = math.log2(scale / largest)
        if is_usual and bits <= USUAL_BITS:
            text += " Nothing is wrong: the scale is too high for this batch alone, "
            text += (
                "which is usual after it has grown. A dynamic scale skips this step "
            )
            text += "and lowers itself."
        elif is_usual:
            text += " Start at a lower loss scale, or let a dynamic one come down."
        return NumericFinding("scale_too_high", text, operation, bits=bits)

    def _lost(self, run: Run, loss: int) -> float:
        """Returns the largest share of a parameter's gradients that is flushed."""
        keys = [k for x in run.program.gradients[loss].values() for k in x]
        return max((run.range(k).flushed for k in run.inputs(tuple(keys))), default=0.0)

    def _losers(self, run: Run, loss: int) -> list[Key]:
        """Returns where results of the backward pass are flushed, the most first."""
        gains: dict[Key, float] = {}
        for key in run.keys:
            site = run.site(key)
            if site.phase != "backward" or key[0] != loss or run.limit(key) is None:
                continue
            inputs = [k for keys in site.inputs for k in run.inputs(keys)]
            before = max((run.range(k).flushed for k in inputs), default=0.0)
            gain = run.range(key).flushed - before
            if gain >= LOST:
                gains[key] = gain
        ordered = sorted(gains, key=lambda key: -gains[key])
        return _distinct_lines(run, ordered)

    def _underflow(self, loss: int, best: Run) -> list[NumericFinding]:
        run = self.run
        if self._lost(run, loss) < LOST:
            return []
        found = []
        for key in self._losers(run, loss)[:SHOWN]:
            now, then = run.range(key).flushed, best.range(key).flushed
            operation = run.operation(key)
            text = (
                f"{operation}: {now:.0%} of the results are flushed to zero at the "
                f"loss scale {_power(run.scales[loss])}, and {then:.0%} at "
                f"{_power(best.scales[loss])}, the largest with which nothing "
                "overflows."
            )
            kind = "underflow" if run.range(key).zeros else "would_underflow"
            found.append(NumericFinding(kind, text, operation))
        return found

    def _conflict(self, loss: int, best: Run) -> NumericFinding | None:
        """Finds two operations that no loss scale fits."""
        if self._lost(best, loss) < LOST:
            return None
        tiny = {key: -self._normal_bits(best, key) for key in self._losers(best, loss)}
        low = next((key for key, bits in tiny.items() if bits > 0), None)
        if low is None:
            return None
        backward = (
            k for k in best.keys if best.site(k).phase == "backward" and k[0] == loss
        )
        high = min(backward, key=lambda k: headroom(best, k))
        bits = math.ceil(tiny[low])
        first, second = best.operation(high), best.operation(low)
        share = best.range(low).flushed
        text = (
            f"No loss scale fits both: above {_power(best.scales[loss])}, {first} "
            f"overflows; at that scale {share:.0%} of the results of {second} are "
            f"still flushed to zero: the largest is 2^{_log2(best, low):.1f}. They are "
            f"{bits} bits apart. Keep one of the two lines in float32, or give the loss "
            "that feeds the second a scale of its own (num_losses)."
        )
        return NumericFinding("no_scale", text, first, second, float(bits))

    def _normal_bits(self, run: Run, key: Key) -> float:
        """Returns how many bits the largest result is above the subnormal numbers."""
        limits = run.limit(key)
        assert limits is not None  # Only such operations lose.
        return _log2(run, key) - math.log2(limits.normal)

    def _fine(self) -> NumericFinding:
        largest = [run.scales[i] for i, run in enumerate(self.best) if run is not None]
        room = f" The largest loss scale is {_power(min(largest))}." if largest else ""
        return NumericFinding(
            "fine", f"Nothing overflows, and no gradients are lost.{room}"
        )

    def _dtype_of(self, key: Key) -> str:
        dtype = self.run.site(key).dtype
        return dtype if self.run.limit(key) == _known_limits(dtype) else self.dtype


def _known_limits(dtype: str) -> _bits.Limits | None:
    return None if dtype in ("float32", "float64", "complex64", "complex128") else (
        _bits.limits_of(dtype)
    )  # fmt: skip


def _kinds(run: Run, key: Key) -> str:
    found = run.range(key)
    kinds = ["inf"] * (found.infs > 0) + ["nan"] * (found.nans > 0)
    return " and ".join(kinds) or "overflow"


def _log2(run: Run, key: Key) -> float:
    return math.log2(run.range(key).float32_largest)


def _power(scale: float) -> str:
    exponent = math.log2(scale)
    return f"2^{exponent:.{0 if exponent.is_integer() else 2}f}"


def _distinct_lines(run: Run, keys: list[Key]) -> list[Key]:
    """Returns the first site of each line."""
    found: dict[object, Key] = {}
    for key in keys:
        site = run.site(key)
        found.setdefault((site.source, site.scope, site.source.line or key), key)
    return list(found.values())
