"""`float32_lines`: the smallest set of lines to keep in float32."""

import functools
import linecache
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from optax_lossscale import _check as check
from optax_lossscale._autocast.cast import autocast, function_of
from optax_lossscale._jaxprs.lines import Source
from optax_lossscale.diagnostics._trace import causes, program, trace, verdict, verify
from optax_lossscale.diagnostics._trace.effects import Effect
from optax_lossscale.diagnostics._trace.findings import log2_of, power
from optax_lossscale.diagnostics._trace.operations import INHERITED, Run, named
from optax_lossscale.diagnostics._trace.search import Search
from optax_lossscale.diagnostics._trace.values import Key
from optax_lossscale.diagnostics._trace.verify import Line


class Float32Line(NamedTuple):
    """A line to compute in float32.

    Attributes:
      file: The file.
      line: The number of the line; 0 if it is not known.
      function: The qualified name of the function.
      reason: Why float16 is not enough here.
      fix: What to write.
    """

    file: str
    line: int
    function: str
    reason: str
    fix: str

    def __str__(self):
        place = named(*self[:3]) if self.line else "gradient of the loss"
        found = trace.wrapped(f"{place}: {self.reason}")
        text = linecache.getline(self.file, self.line).strip()
        return "\n".join([found, *([f"    {text}"] if text else []), f"  {self.fix}"])


class Float32Lines(NamedTuple):
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
      >>> from optax_lossscale import diagnostics
      >>> def loss_fn(w):
      ...     return jnp.sum(jnp.square(w.astype(jnp.float16))).astype(jnp.float32)
      >>> print(diagnostics.float32_lines(loss_fn, jnp.array([1.0, 2.0])))
      No line needs float32 at the loss scale 2^13 within 1% (loss 0%, gradients 0%).
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
    params: optax.Params,
    /,
    *args: Any,
    state: Any = None,
    scale: ArrayLike | None = None,
    dtype: Any = "float16",
    tolerance: float = 0.01,
    has_aux: bool = False,
    **kwargs: Any,
) -> Float32Lines:
    """Proposes the smallest set of lines to keep in float32.

    It suspects lines with results that are out of range, flushed to zero, not finite or
    imprecise in half precision. It computes these lines in float32, and runs the step
    to verify that the loss and the gradients then agree with float32. Finally it drops
    lines until none can be dropped.

    A line in float32 casts its inputs, and computes the result and its derivative in
    float32. If half precision goes on after it, cast the result back: otherwise JAX
    computes everything after it in float32, too. Lines in loops, branches,
    `jax.checkpoint`, `jax.shard_map` and rules of derivatives count, too; kernels that
    JAX cannot look into stay as they are. The set belongs to these parameters and this
    batch: ask again later.

    Of `autocast(f)` it runs `autocast(f, float32=lines)` and `f`, so it compiles the
    gradient once for each set of lines that it tries. In a program with casts written
    by hand, it compiles one program and runs that a few dozen times.

    Call it on the host with the arguments of a step, as `trace_numerics`. It says on
    stderr how far it is.

    Args:
      loss_fn: Called as `loss_fn(params, *args, **kwargs)`; returns a real scalar loss,
        or the loss and auxiliary data if `has_aux`.
      params: The parameters, any pytree. Its floating-point arrays are differentiated.
      *args: More arguments.
      state: The state, for its loss scale: a pytree that holds one
        `LossScaleOptimizerState`.
      scale: The loss scale, from 2**-126 to 2**126, in place of a state. Without either
        it is the largest with which nothing in the backward pass overflows, at least 1.
      dtype: The dtype in question: "float16", "bfloat16" or a float8.
      tolerance: How far the loss and the gradients may be from float32, relative to the
        loss, and to the norm of all gradients.
      has_aux: Whether `loss_fn` returns auxiliary data as well.
      **kwargs: More arguments of `loss_fn`.

    Returns:
      A `Float32Lines`. Print it to read the lines, why they need float32, and what to
      write.

    Raises:
      ValueError: If both `state` and `scale` are given, or a number is out of range; if
        `state` holds no loss scale, or several states; if an argument was donated.
      TypeError: If `params` has nothing to differentiate, the loss is not a real
        scalar, `dtype` is no such dtype, or under a transformation of JAX, such as
        `jax.jit`.

    Examples:
      >>> import jax.numpy as jnp
      >>> from optax_lossscale import diagnostics
      >>> def loss_fn(w, x):
      ...     weights = jnp.exp((w * x).astype(jnp.float16))
      ...     weights = weights / weights.sum()
      ...     return jnp.sum(jnp.square(weights).astype(jnp.float32))
      >>> x = jnp.arange(8, dtype=jnp.float16)
      >>> found = diagnostics.float32_lines(loss_fn, jnp.float32(2), x)
      >>> [x.line for x in found.lines], found.verified
      ([2, 3], True)
    """
    name = "float32_lines"

    def call(function):
        return program.make_call(name, function, params, args, kwargs, has_aux)

    by_hand = program.cast_by_hand(loss_fn, call)
    followed = program.Program(call(loss_fn), dtype, by_hand)
    tolerance = check.share("tolerance", tolerance)
    is_given = scale is not None or state is not None
    scale = trace.check_scale(name, state, scale)
    if not followed.computes_in_dtype:
        text = f"No operation computes in {followed.dtype}, so no line needs float32."
        return Float32Lines([], scale, 0.0, 0.0, True, text)
    function = function_of(getattr(loss_fn, "without_scale", loss_fn))
    if function is not None:  # The lines that it has already are proposed, too.
        cast = call(autocast(function, jnp.dtype(followed.dtype)))
        followed = program.Program(cast, dtype, by_hand)
    search = Search(followed, tolerance, scale)
    if not is_given:
        # Where all is flushed to zero, nothing overflows, but in float32 it would.
        found = math.inf if search.best is None else search.best.scale
        search.run = search.at(max(min(found, search.predicted), 1.0))
    suspects, sources = _suspects(search)
    lines = sorted(suspects, key=lambda x: -suspects[x][0])
    if function is None:
        compare = verify.promote_lines(search.run, lines)
    else:
        compare = verify.cast_lines(search.run, function, call)
    effect = functools.cache(lambda lines: search.judge(*compare(lines)))
    kept = verify.minimal(lines, lambda lines: effect(frozenset(lines)).is_fine)
    effects = [effect(frozenset(x)) for x in (kept or (), ())]
    text = _message(search, kept, len(lines), *effects)
    text = " ".join([*trace.casts_left(followed), text])
    keys = [key for line, (_, key) in suspects.items() if line in (kept or ())]
    found = [_describe(search, sources, key) for key in keys]
    after, _ = effects
    errors = after.loss, after.gradients, after.is_fine
    return Float32Lines(found, search.run.scale, *errors, text)


def _overflows_on(run: Run, key: Key, source: Source) -> bool:
    """Whether a gradient is cast on a line, from numbers that are out of range."""
    is_there = run.site(key).source == source
    return is_there and any(map(run.exceeds, run.operands(key)))


def _message(
    search: Search, kept: list[Line] | None, count: int, after: Effect, before: Effect
) -> str:
    """Says what these lines do, of so many that use half precision."""
    (first, *_), followed = verdict.find_all(search), search.run.program
    tolerance = f"{100 * search.close:g}%"
    text = f"at the loss scale {power(search.run.scale)} within {tolerance} ({after}"
    advice = "Pass them: autocast(f, float32=lines)."
    if not followed.is_autocast:
        cast = f".astype(jnp.{followed.dtype})"
        advice = f"Where half precision goes on, cast back with {cast}."
    if kept is None:
        text = (
            "No lines help: with all of them in float32, the loss or the gradients "
            f"are not finite, or differ from float32. {first.message}"
        )
    elif not kept:
        text = f"No line needs float32 {text})."
    else:
        text = (
            f"Compute {len(kept)} of the {count} lines that use half precision in "
            f"float32. Then loss and gradients agree with float32 {text}; before: "
            f"{before}). {advice}"
        )
        text = f"{first.message} {text}" if first.kind == "no_scale" else text
    return " ".join([text, *trace.not_followed(followed.sites.values())])


def _suspects(search: Search) -> tuple[dict[Line, tuple[float, Key]], set[Key]]:
    """Returns the lines in half precision, and the sites whose errors are magnified.

    The lines are in order of execution; with each is how much speaks for float32, and
    the site that says so.
    """
    run, effect = search.run, search.effect(search.run)
    found: dict[Line, tuple[float, Key]] = {}
    sources = set()
    if not effect.is_fine:
        begins = verdict.beginning_of(search, run, effect.wrong)
        sources = set(causes.sources_of(search, run, begins))
    reached = run.ancestors([*run.inputs(run.program.loss), *run.gradients])
    for key in run.keys:
        site = run.site(key)
        if not site.primitive or causes.half_of(run, key) is None:
            continue
        severity = (key in sources) + (_severity(run, key) if key in reached else -1.0)
        line = site.source.own[:2]
        if line not in found or severity > found[line][0]:
            found[line] = severity, key
    return found, sources


def _severity(run: Run, key: Key) -> float:
    """Returns how much speaks for float32 at a site."""
    operands, error = run.operands(key), run.range(key).error
    inherited = max((run.range(k).error for k in operands), default=0.0)
    return (
        8 * run.exceeds(key)
        + 4 * any(map(run.exceeds, operands))
        + 2 * run.is_origin(key)
        + causes.is_underflow(run, key)
        + min(error if error > INHERITED * inherited else error / 100, 1)
    )


def _describe(search: Search, sources: set[Key], key: Key) -> Float32Line:
    """Returns a line, why it needs float32, and what to write.

    Args:
      search: The search.
      sources: The operations whose errors others magnify.
      key: The site that speaks for the line.
    """
    run = search.run
    site, (trouble, what, why, _) = run.site(key), causes.trouble_of(search, run, key)
    kind = "gradients" if site.phase == "backward" else "values"
    reason = f"{what}{' in the backward pass' * (kind == 'gradients')}"
    if trouble == "precision" and run.range(key).error < search.close / 2:
        reason += ", and other lines magnify that"
    reason += f". {why}" if why else ""
    half = causes.half_of(run, key)
    beyond = [k for k in run.operands(key) if run.exceeds(k)]
    if beyond and not run.exceeds(key):
        reason = (
            f"it reads {kind} up to 2^{log2_of(run, beyond[0]):.1f}, which leave the "
            f"range of {half}."
        )
    if run.program.is_autocast and site.source.line:
        fix = causes.lines_to_pass(run, [key]) or "float32=lines"
        return Float32Line(*site.source.own, reason, fix)
    fix = "cast each input with .astype(jnp.float32)"
    sites = run.program.sites
    on_line = {k: x for k, x in sites.items() if x.source == site.source}
    states = (x.inputs for k, x in sites.items() if k[-2:-1] == ("state",))
    if any(k in on_line for inputs in states for keys in inputs for k in keys):
        fix += ", and keep the state of the loop in float32"
    if not site.source.line:
        fix = "return the loss in float32"
    elif {x.primitive for x in on_line.values()} <= {*verify.EXACT, *causes.CASTS}:
        casts = [k for k in sources if run.site(k).source == site.source]
        names = [k[0] for x in casts for k in run.operands(x) if len(k) == 1]
        if kind == "gradients":  # Those of other parameters may leave the range, too.
            pairs = zip(run.program.parameters, run.program.gradients, strict=True)
            names = [
                name
                for (name,), keys in pairs
                if any(_overflows_on(run, k, site.source) for k in run.inputs(keys))
            ]
        what = ", ".join(dict.fromkeys(names)) or "it"
        fix = f"keep {what} in float32: without the cast to {half}"
    elif site.scope:
        fix += "; for a layer, dtype=jnp.float32"
    return Float32Line(*site.source.own, reason, fix)
