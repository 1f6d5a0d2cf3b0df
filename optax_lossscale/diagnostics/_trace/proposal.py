"""`float32_lines`: the smallest set of lines of `autocast` to keep in float32."""

import dataclasses
import functools
import linecache
import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from optax_lossscale import _check as check
from optax_lossscale._autocast.cast import autocast, function_of
from optax_lossscale._autocast.choices import Line, Lines
from optax_lossscale._jaxprs.lines import Source, source_of
from optax_lossscale._tree import in_half
from optax_lossscale.diagnostics._trace import trace
from optax_lossscale.diagnostics._trace.judge import causes, verdict, words
from optax_lossscale.diagnostics._trace.judge.verdict import Effect, Search
from optax_lossscale.diagnostics._trace.measure import tape
from optax_lossscale.diagnostics._trace.measure.call import (
    Traced,
    gradients_of,
    make_call,
)
from optax_lossscale.diagnostics._trace.run import INHERITED, Run, named

FileLine = tuple[str, int]  # The file and the number; "" and 0 if they are not known.


class Suspect(NamedTuple):
    """The worst result of a line in half precision.

    Attributes:
      severity: The reasons for float32 as numbers, the strongest first.
      site: The site of the result.
    """

    severity: tuple[float, ...]
    site: int


@dataclasses.dataclass(frozen=True)
class Float32Line(Line):
    """A line to compute in float32.

    Attributes:
      file: The file.
      line: The number of the line; 0 if it is not known.
      function: The qualified name of the function.
      reason: Why float16 is not enough here.
      fix: What to write.
    """

    function: str
    reason: str
    fix: str

    def __str__(self):
        at = named(self.file, self.line, self.function)
        place = at if self.line else "gradient of the loss"
        head = trace.wrapped(f"{place}: {self.reason}")
        text = linecache.getline(self.file, self.line).strip()
        return "\n".join([head, *([f"    {text}"] if text else []), f"  {self.fix}"])


@dataclasses.dataclass(frozen=True)
class Float32Lines(Lines):
    """The result of `float32_lines`. Print it.

    Attributes:
      lines: The lines to compute in float32, in order of execution, each with `file`,
        `line`, `function`, `reason` and `fix`. None of them can be left out. Empty if
        there is nothing to do, or if no lines help.
      scale: The loss scale.
      loss_error: The difference of the loss from float32 with these lines in float32,
        relative to float32; inf if it is not finite.
      gradient_error: The norm of the difference of all gradients, relative to the norm
        of all gradients.
      verified: Whether the loss and the gradients agree with float32 then.
      message: The result in words.

    Examples:
      >>> import jax.numpy as jnp
      >>> from optax_lossscale import autocast, diagnostics
      >>> loss_fn = autocast(lambda w: jnp.sum(w @ w))
      >>> print(diagnostics.float32_lines(loss_fn, jnp.eye(2)))
      No line needs float32 at the loss scale 2^14, the largest that fits, within 1%
        (loss 0%, gradients 0%).
    """

    lines: list[Float32Line]
    scale: float
    loss_error: float
    gradient_error: float
    verified: bool
    message: str

    def __str__(self):
        return "\n".join([trace.wrapped(self.message), *map(str, self.lines)])


def float32_lines(
    loss_fn: Callable[..., Any],
    params: Any,
    /,
    *args: Any,
    state: Any = None,
    scale: ArrayLike | None = None,
    dtype: Any = "float16",
    tolerance: float = 0.01,
    has_aux: bool = False,
    **kwargs: Any,
) -> Float32Lines:
    """Proposes the smallest set of lines of `autocast` to keep in float32.

    It suspects lines with results that are out of range, flushed to zero, not finite or
    imprecise in half precision. It computes these lines in float32, and runs the step
    to verify that the loss and the gradients then agree with float32. Finally it drops
    lines until none can be dropped.

    It runs `autocast(f, float32=lines)` and `f`, so it compiles the gradient once for
    each set of lines that it tries. Float32 is what `f` computes on your device: on a
    GPU products are TF32, unless you ask for more. The set belongs to these parameters
    and this batch: ask again later.

    It is for `autocast` alone. Of a function with casts written by hand nobody knows
    which float32 program was meant: remove the casts, and wrap it in `autocast`.
    `trace_numerics` judges such a function line by line, as it is.

    Call it on the host with the arguments of a step, as `trace_numerics`. At a terminal
    or in a notebook it says on stderr how far it is.

    Args:
      loss_fn: `autocast(f)`. Called as `loss_fn(params, *args, **kwargs)`; returns a
        real scalar loss, or the loss and auxiliary data if `has_aux`. It may keep lines
        in float32 already: they are proposed as well.
      params: The parameters, any pytree or model. The arrays that `minimize` would
        train are differentiated.
      *args: More arguments.
      state: The state, for its loss scale: a pytree that holds one
        `LossScaleOptimizerState`.
      scale: The loss scale, from 2**-126 to 2**126, in place of a state. Without either
        it is the largest with which nothing in the backward pass overflows, at least 1.
      dtype: The dtype that `autocast` computes in: "float16" or "bfloat16".
      tolerance: How far the loss and the gradients may be from float32, relative to the
        loss, and to the norm of all gradients.
      has_aux: Whether `loss_fn` returns auxiliary data as well.
      **kwargs: More arguments of `loss_fn`. If it has a keyword `state`, `scale`,
        `dtype`, `tolerance` or `has_aux` itself, bind that with `functools.partial`.

    Returns:
      A `Float32Lines`. Print it to read the lines, why they need float32, and how to
      keep them there.

    Raises:
      ValueError: If both `state` and `scale` are given, or a number is out of range; if
        `state` holds no loss scale, or several states; if an argument was donated.
      TypeError: If `loss_fn` is no `autocast`, with the first line that casts by hand;
        if `params` has nothing to differentiate, the loss is not a real scalar, `dtype`
        is no dtype, or under a transformation of JAX, such as `jax.jit`.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from optax_lossscale import autocast, diagnostics
      >>> @autocast
      ... def loss_fn(w, x):
      ...     scores = (x @ w) @ (x @ w).T
      ...     return jnp.mean(jax.nn.softmax(scores / 1e5)[:, 0])
      >>> found = diagnostics.float32_lines(loss_fn, jnp.eye(4), 200 * jnp.eye(4))
      >>> len(found.lines), found.verified
      (0, True)
    """
    name = "float32_lines"
    with tape.diagnosis():

        def call(function):
            return make_call(name, function, params, args, kwargs, has_aux)

        cast = getattr(loss_fn, "without_scale", loss_fn)
        given = Traced(call(loss_fn), dtype)  # It raises an error for another dtype.
        if (function := function_of(cast)) is None:
            raise TypeError(_refusal(given, given.is_autocast or given.is_idle))
        tolerance = check.share("tolerance", tolerance)
        is_given = scale is not None or state is not None
        scale = trace.check_scale(name, loss_fn, args, state, scale)
        if nothing := given.reason:
            if given.computes_in_dtype:  # The function casts by itself.
                raise TypeError(_refusal(given, calls_autocast=False))
            text = f"No line needs float32. {trace.summarize(given, nothing)}"
            return Float32Lines([], scale, 0.0, 0.0, True, text)
        # The lines that it has already are proposed as well.
        followed = given
        if getattr(cast, "float32", ()):
            followed = Traced(call(autocast(function, jnp.dtype(given.dtype))), dtype)
        search = Search(followed.at, tolerance, scale)
        if not is_given:
            # Where all is flushed to zero, nothing overflows, but in float32 it would.
            largest = search.best.scale if search.best else math.inf
            search.run = search.at(max(min(largest, search.predicted), 1.0))
        suspects = _suspects(search.run)
        lines = sorted(suspects, key=lambda x: suspects[x].severity, reverse=True)
        trials = Trials(search, lines, _compared(search.run, function, call))
        kept = _minimal(lines, trials.help)
        after, before = trials.effect(kept or []), trials.effect([])
        proposal = [
            _describe(search, suspects[line].site)
            for line in suspects
            if line in (kept or ())
        ]
        text = _message(search, is_given, kept, len(lines), after, before)
        errors = after.loss, after.gradients
        return Float32Lines(proposal, search.run.scale, *errors, kept is not None, text)


class Trials:
    """Tries sets of lines in float32. Each set runs once."""

    def __init__(
        self, search: Search, lines: list[FileLine], compare: Callable[..., Any]
    ):
        """Prepares to try.

        Args:
          search: The search, for its tolerance.
          lines: All suspected lines.
          compare: Compares a set of lines in float32 with all in float32; returns
            norms and losses for `Search.judge`.
        """
        self._search, self._lines = search, lines
        self._effect = functools.cache(lambda lines: search.judge(*compare(lines)))

    def effect(self, lines: Iterable[FileLine]) -> Effect:
        """Returns how far the step is from float32 with these lines in float32."""
        return self._effect(frozenset(lines))

    def help(self, lines: Iterable[FileLine]) -> bool:
        """Whether it is enough that these lines compute in float32."""
        effect, close = self.effect(lines), self._search.close
        # If the loss differs even with all lines in float32, that is roundoff.
        is_close = effect.loss <= close or self.effect(self._lines).loss > close
        return effect.is_fine and is_close


def _refusal(given: Traced, calls_autocast: bool) -> str:
    """Says why a function that is no `autocast` is refused."""
    text = "loss_fn must be autocast(f), whose lines float32= keeps in float32. "
    if calls_autocast:
        return (
            f"{text}This one calls an autocast, as jax.jit(autocast(f)) does: pass the "
            "function inside, float32_lines(autocast(f), ...)."
        )
    for equation in given.equations:
        is_cast = equation.primitive.name == "convert_element_type"
        if is_cast and in_half(equation.outvars[0].aval):
            at = source_of(equation, Source(), is_backward=False)
            place = named(at.file, at.line, at.function)
            return (
                f"{text}This one casts by hand, first at {place}: remove its casts, "
                "and wrap it in autocast. trace_numerics judges lines as they are."
            )
    return f"{text}Wrap it: float32_lines(autocast(loss_fn), ...)."


def _compared(run: Run, function: Any, call: Callable[..., Any]) -> Callable[..., Any]:
    """Compares `autocast(function, float32=lines)` with the function."""

    def gradients(function):
        taken = call(function)
        scale, arrays = jnp.float32(run.scale), taken.arrays
        closed = jax.make_jaxpr(gradients_of(taken))(scale, arrays)
        loss, *grads = tape.results_of(closed, scale, *arrays)
        return loss, grads

    truth = functools.cache(lambda: gradients(function))

    def compare(lines):
        names = [f"{file}:{number}" for file, number in lines if number]
        with warnings.catch_warnings(action="ignore"):  # A line of constants alone.
            half = jnp.dtype(run.outline.dtype)
            loss, grads = gradients(autocast(function, half, float32=names))
        pairs = zip(grads, truth()[1], strict=True)
        sizes = np.array([_norms(*pair) for pair in pairs])
        return sizes, (float(loss), float(truth()[0]))

    return compare


def _norms(real: Any, wide: Any) -> list[Any]:
    """Returns the first three of `statistics.norms`.

    The gradients are on the host, where no shape of them has to compile.
    """
    kind = complex if jnp.iscomplexobj(wide) else float
    real, wide = (np.asarray(x, kind).ravel().view(float) for x in (real, wide))
    with np.errstate(over="ignore", invalid="ignore"):
        arrays = wide, real - wide, np.where(real == 0, wide, 0)
        return list(map(np.linalg.norm, arrays))


def _minimal(
    lines: list[FileLine], helps: Callable[[list[FileLine]], bool]
) -> list[FileLine] | None:
    """Returns lines that help, of which none can be dropped; None if none help.

    Args:
      lines: All lines, the most helpful first.
      helps: Whether it is enough that these compute in float32.
    """
    count, tell = 0, tape.teller()
    while not helps(lines[:count]):
        if count == len(lines):
            return None
        count = min(2 * count or 1, len(lines))
    kept, before = lines[:count], None
    while kept != before:
        before = kept
        for line in reversed(before):
            tell(f"float32_lines: {len(kept)} of {len(lines)} lines are left")
            rest = [x for x in kept if x != line]
            kept = rest if helps(rest) else kept
    return kept


def _suspects(run: Run) -> dict[FileLine, Suspect]:
    """Returns the suspect of each line in half precision, in order of execution."""
    suspects: dict[FileLine, Suspect] = {}
    for key, site in run.sites.items():
        if site.primitive and causes.has_half(run, key):
            suspect, line = Suspect(_severity(run, key), key), site.source.own[:2]
            if line not in suspects or suspect.severity > suspects[line].severity:
                suspects[line] = suspect
    return suspects


def _severity(run: Run, key: int) -> tuple[float, ...]:
    """Returns the reasons for float32 at a site as numbers, the strongest first."""
    operands, error = run.operands(key), run.range(key).error
    inherited = max((run.range(k).error for k in operands), default=0.0)
    leaves_range = run.exceeds(key), any(map(run.exceeds, operands)), run.is_origin(key)
    is_own = error > INHERITED * inherited
    return *leaves_range, causes.is_underflow(run, key), is_own, error


def _message(
    search: Search,
    is_given: bool,
    kept: list[FileLine] | None,
    count: int,
    after: Effect,
    before: Effect,
) -> str:
    """Says in words which lines help, and how much.

    Args:
      search: The search.
      is_given: Whether the user gave the scale.
      kept: The lines that help; None if none do.
      count: How many lines use half precision.
      after: The effect with these lines in float32.
      before: The effect without.
    """
    first, *_ = verdict.find_all(search)
    at = f"at the loss scale {words.power(search.run.scale)}"
    at += ", the largest that fits," * (search.run.scale > 1 and not is_given)
    text = f"{at} within {100 * search.close:g}% ({after}"
    if kept is None:
        loss, norms = search.run.losses[1], search.run.norms[:, 0]
        is_finite = math.isfinite(loss) and np.isfinite(norms).all()
        what = "the loss or the gradients are not finite"
        why = f"with all of them in float32, {what}, or differ from float32"
        why = why if is_finite else f"in float32, too, {what}"
        return f"No lines help: {why}. {first.message}"
    if not kept:
        return f"No line needs float32 {text})."
    return (
        f"Compute {len(kept)} of the {count} lines that use half precision in "
        f"float32. Then loss and gradients agree with float32 {text}; before: "
        f"{before}). Pass them: autocast(f, float32=lines)."
    )


def _describe(search: Search, key: int) -> Float32Line:
    """Returns the line of a site, with its reason and its fix."""
    run, site = search.run, search.run.site(key)
    fault = causes.fault_of(run, key, search.close)
    event = words.event_of(fault)
    if site.phase == "backward":
        event += " in the backward pass"
    reason = f"{event}. {words.why_of(fault)}".strip()
    beyond = [k for k in run.operands(key) if run.exceeds(k)]
    if beyond and not run.exceeds(key):
        size = math.log2(run.range(beyond[0]).float32_largest)
        reason = f"it reads numbers up to 2^{size:.1f}, out of the range of "
        reason += f"{run.outline.dtype}."
    fix = words.lines_to_pass([fault.operation], True) or "float32=lines"
    return Float32Line(*site.source.own, reason, fix)
