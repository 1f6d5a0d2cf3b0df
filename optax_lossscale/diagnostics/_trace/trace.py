"""`trace_numerics`: which line breaks in half precision, and why."""

import inspect
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.typing import ArrayLike

from optax_lossscale import _check as check
from optax_lossscale._autocast.cast import function_of
from optax_lossscale._jaxprs.primitives import Kind, names_of
from optax_lossscale._state import LossScaleOptimizerState
from optax_lossscale._tree import nodes_of
from optax_lossscale.diagnostics._common import check_host, scale_of
from optax_lossscale.diagnostics._trace.judge.findings import (
    FindingKind,
    NumericFinding,
)
from optax_lossscale.diagnostics._trace.judge.verdict import Search, closeness, find_all
from optax_lossscale.diagnostics._trace.judge.words import power
from optax_lossscale.diagnostics._trace.measure import tape
from optax_lossscale.diagnostics._trace.measure.call import Traced, make_call
from optax_lossscale.diagnostics._trace.run import NumericOperation

PRODUCTS = names_of(Kind.PRODUCT)
WIDTH = 79
TRY = "trace autocast(loss_fn) to try it."
IDLE = "trace autocast(loss_fn) without jax.jit to see why."


def not_followed(sites: Iterable[Any]) -> list[str]:
    """Returns a sentence about the primitives that could not run in float32, if any."""
    opaque = sorted({x.primitive for x in sites if x.opaque})
    return [f"Not followed in float32: {', '.join(opaque)}."] if opaque else []


class NumericsTrace(NamedTuple):
    """The result of `trace_numerics`. Print it.

    Attributes:
      findings: The faults and their remedies, the most urgent first.
      first_nonfinite: The first operation that makes an inf or nan from finite inputs,
        or a nan from an inf, even if later operations discard it. None if there is
        none.
      largest_scale: The largest power of two with which nothing in the backward pass
        overflows, from 2**-126 to 2**126; None if there is none.
      scale: The loss scale of this trace.
      loss: The loss. A compiled step may round it otherwise.
      float32_loss: The loss if every operation in half precision were in float32.
      dtype: The dtype to judge.
      computes_in_dtype: Whether the program computes in `dtype`.
      operations: All floating-point results, in order of execution.
      summary: How many matrix products compute in `dtype`.

    Examples:
      >>> import jax.numpy as jnp
      >>> from optax_lossscale import diagnostics
      >>> def loss_fn(w):
      ...     return jnp.sum(jnp.square(w.astype(jnp.float16))).astype(jnp.float32)
      >>> trace = diagnostics.trace_numerics(loss_fn, jnp.array([1.0, 2.0]))
      >>> print(trace.first_nonfinite, trace.largest_scale, trace.loss)
      None 8192.0 5.0

      The rows of a table, for pandas, `csv.DictWriter` or `json.dump`:

      >>> rows = [x._asdict() | x.output._asdict() for x in trace.operations]
      >>> print(rows[1]["phase"], rows[1]["primitive"], rows[1]["largest"])
      forward square 4.0
    """

    findings: list[NumericFinding]
    first_nonfinite: NumericOperation | None
    largest_scale: float | None
    scale: float
    loss: float
    float32_loss: float
    dtype: str
    computes_in_dtype: bool
    operations: list[NumericOperation]
    summary: str

    def __str__(self):
        lines = [wrapped(self.summary)] if self.summary else []
        lines += [wrapped(x.message) for x in self.findings]
        lines += map(wrapped, not_followed(self.operations))
        largest = "none" if self.largest_scale is None else power(self.largest_scale)
        lines.append(
            f"loss {self.loss:.6g}, in float32 {self.float32_loss:.6g}, loss scale "
            f"{power(self.scale)}, largest {largest}, operations {len(self.operations)}"
        )
        return "\n".join(lines)


def summarize(traced: Traced, nothing: str, kept: Sequence[Any] = ()) -> str:
    """Says how many products compute in the dtype to judge.

    Args:
      traced: The call.
      nothing: Why `autocast` casts nothing, if so.
      kept: What `autocast` keeps in float32 by its argument.
    """
    products = [x for x in traced.equations if x.primitive.name in PRODUCTS]
    types = [{str(x.aval.dtype) for x in y.invars[:2]} for y in products]
    count, dtype = types.count({traced.dtype}), traced.dtype
    text = f"{count} of {len(products)} matrix products compute in {dtype}."
    text *= bool(products)
    if not traced.computes_in_dtype:
        text = f"No operation computes in {dtype}: {nothing or TRY}"
    elif nothing:
        text += f" autocast casts nothing: {nothing}"
    names = ", ".join(x.name for x in kept)
    text += f" float32= keeps {names} in float32." * bool(kept)
    return text.strip()


def wrapped(text: str) -> str:
    """Breaks a text into lines, all but the first indented."""
    return textwrap.fill(text, WIDTH, subsequent_indent="  ")


def trace_numerics(
    loss_fn: Callable[..., Any],
    params: Any,
    /,
    *args: Any,
    state: Any = None,
    scale: ArrayLike | None = None,
    dtype: Any = "float16",
    has_aux: bool = False,
    **kwargs: Any,
) -> NumericsTrace:
    """Names the line where float16 breaks, in the forward or the backward pass.

    It computes the loss and its scaled gradient once more, and follows each
    floating-point result of each operation: how large and how small, how many zeros,
    subnormal numbers, inf and nan. Beside it runs the same program with every operation
    of half precision in float32, to compare each result with. Then it searches the
    largest loss scale with which nothing in the backward pass overflows, exactly, by
    trying.

    The verdict judges the effect on the gradients. All is "fine" if all gradients agree
    with float32 within 1% of their norm, or as far as they would with rounded
    parameters and data in float32, and the gradient of each parameter that matters
    within 10%; in bfloat16 these limits are 8 times as wide. A parameter is never fine
    if more than 1% of its gradient is flushed to zero. That holds for small gradients
    as well, because Adam would train this parameter like any other. Gradients that are
    roundoff in float32 do not count. If something is not fine, the first finding names
    the line where the error begins: inf and nan of float32 itself come first, then
    those of half precision, then faults that a loss scale mends, then those that none
    mends. A finding of the kind "decision" says that float32 chooses otherwise, among
    numbers that half precision cannot tell apart, or that a solver takes more
    iterations than in float32. It is no fault by itself.

    Of `autocast(f)` it compares with `f`, with its constants. In a program with casts
    written by hand, constants count as the dtype rounds them: 1e-8 is 0 in float16.

    Call it on the host with the arguments of a step that went wrong. It keeps a few
    numbers for each operation, so it needs little memory; arrays may be sharded over
    the devices of one process. It runs the program a few times, and callbacks in it
    once or more. It takes as long as a few first steps, most of it to compile; equal
    operations compile once. Under `jax.jit`, use `suggest_loss_scale`.

    Args:
      loss_fn: Called as `loss_fn(params, *args, **kwargs)`; returns a real scalar loss,
        or the loss and auxiliary data if `has_aux`. Trace several losses one by one.
      params: The parameters, any pytree or model. The arrays that `minimize` would
        train are differentiated.
      *args: More arguments. Arrays are arguments of the compiled program; everything
        else is passed as it is.
      state: The state, for its loss scale: a pytree that holds one
        `LossScaleOptimizerState`.
      scale: The loss scale, from 2**-126 to 2**126, in place of a state. Without either
        it is 1.
      dtype: The dtype to judge: "float16", "bfloat16" or a float8. If no operation
        computes in it, trace `autocast(loss_fn)` to try it for products.
      has_aux: Whether `loss_fn` returns auxiliary data as well.
      **kwargs: More arguments of `loss_fn`. If it has a keyword `state`, `scale`,
        `dtype` or `has_aux` itself, bind that with `functools.partial`.

    Returns:
      A `NumericsTrace`. Print it to read its findings.

    Raises:
      ValueError: If both `state` and `scale` are given, or a scale is out of range; if
        `state` holds no loss scale, or several states; if an argument was donated.
      TypeError: If `params` has nothing to differentiate, the loss is not a real
        scalar, `dtype` is no such dtype, or under a transformation of JAX, such as
        `jax.jit`.

    Examples:
      >>> import jax.numpy as jnp
      >>> from optax_lossscale import diagnostics
      >>> def loss_fn(params, x):
      ...     hidden = params["w"].astype(jnp.float16) * x
      ...     return jnp.mean(jnp.square(hidden).astype(jnp.float32))
      >>> params, x = {"w": jnp.array([1.0, 400.0])}, jnp.ones(2, jnp.float16)
      >>> trace = diagnostics.trace_numerics(loss_fn, params, x, scale=2.0**10)
      >>> found = trace.first_nonfinite
      >>> print(found.phase, found.primitive, found.line, found.output.float32_largest)
      forward square 3 160000.0
      >>> print(trace.findings[0].kind, trace.loss, trace.float32_loss)
      forward inf 80000.5

    References:
      The shadow in higher precision follows LLVM's
      [NumericalStabilitySanitizer](https://clang.llvm.org/docs/NumericalStabilitySanitizer.html).
    """
    name = "trace_numerics"
    with tape.diagnosis():
        scale = check_scale(name, loss_fn, args, state, scale)

        call = make_call(name, loss_fn, params, args, kwargs, has_aux)
        traced = Traced(call, dtype)
        cast = getattr(loss_fn, "without_scale", loss_fn)
        nothing = traced.reason
        if function_of(cast) is None:  # An autocast inside tells no reason twice.
            nothing = IDLE if traced.is_idle and not traced.is_autocast else ""
        traced.is_autocast &= not nothing
        search = Search(traced.at, closeness(traced.dtype), scale)
        run, best = search.run, search.best
        first = next(iter(run.nonfinite_origins()), None)
        sites = run.sites.items()
        operations = [k for k, x in sites if x.primitive and not x.is_decision]
        loss, float32_loss = run.losses
        findings = find_all(search)
        fine = FindingKind.FINE
        if not traced.computes_in_dtype and findings[0].kind == fine:
            findings = [NumericFinding(fine, f"Nothing to judge in {traced.dtype}.")]
        return NumericsTrace(
            findings=findings,
            first_nonfinite=None if first is None else run.operation(first),
            largest_scale=best and best.scale,
            scale=scale,
            loss=loss,
            float32_loss=float32_loss,
            dtype=traced.dtype,
            computes_in_dtype=traced.computes_in_dtype,
            summary=summarize(traced, nothing, getattr(loss_fn, "float32", ())),
            operations=list(map(run.operation, operations)),
        )


def check_scale(name: str, loss_fn: Any, args: Any, state: Any, scale: Any) -> float:
    """Returns the loss scale for a function of this name, and a call of `loss_fn`."""
    check_host(name, (state, scale))
    given = {k for k, x in (("state", state), ("scale", scale)) if x is not None}
    if names := given.intersection(_free_names(loss_fn, args)):
        raise TypeError(
            f"loss_fn has an argument {min(names)!r} of its own. Bind that, by "
            f"functools.partial(loss_fn, {min(names)}=...), to pass {name} the other."
        )
    if state is not None and scale is not None:
        raise ValueError("Pass state or scale, not both: a state has its loss scale.")
    if state is not None:
        return check.scale("the loss scale of state", scale_of(state).item())
    if nodes_of(LossScaleOptimizerState, scale):
        raise TypeError("scale must be a number, got a state. Pass that as state=.")
    number = np.asarray(1.0 if scale is None else scale)
    if number.shape:
        raise ValueError(
            f"scale must be a number, got shape {number.shape}. Trace losses that have "
            "scales of their own one by one."
        )
    return check.scale("scale", number.item())


def _free_names(loss_fn: Any, args: Any) -> list[str]:
    """Returns the arguments of `loss_fn` that nothing is passed for by position."""
    function = inspect.unwrap(getattr(loss_fn, "without_scale", loss_fn))
    try:
        names = [*inspect.signature(function).parameters][1 + len(args) :]
    except (TypeError, ValueError):  # Some functions have no signature.
        return []
    return [x for x in names if x not in getattr(function, "keywords", ())]
