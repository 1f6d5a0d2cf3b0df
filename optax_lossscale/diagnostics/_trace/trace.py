"""`trace_numerics`: which line breaks in half precision, and why."""

import csv
import json
import math
import os
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer

from optax_lossscale import _check as check
from optax_lossscale._state import find_state, unbox
from optax_lossscale.diagnostics import _bits
from optax_lossscale.diagnostics._common import check_host
from optax_lossscale.diagnostics._files import write_file
from optax_lossscale.diagnostics._trace import search
from optax_lossscale.diagnostics._trace.findings import NumericFinding, power
from optax_lossscale.diagnostics._trace.operations import NumericOperation, Run
from optax_lossscale.diagnostics._trace.program import make_call, make_program
from optax_lossscale.diagnostics._trace.verdict import find_all

WIDTH = 79
SHOWN_FINDINGS = 6


class NumericsTrace(NamedTuple):
    """What `trace_numerics` found. Print it.

    Attributes:
      findings: What breaks and what to do, the most urgent first.
      first_nonfinite: The first operation whose inputs are finite and whose result is
        not, or which turns inf into nan, even if later operations discard it. None if
        there is none.
      largest_scale: The largest power of two with which nothing in the backward pass
        overflows, from 2**-126 to 2**126; None if there is none. A tuple for several
        losses.
      scale: The loss scale of this trace; a tuple for several losses.
      loss: The loss; a tuple for several losses.
      float32_loss: The loss if every operation in half precision were in float32.
      dtype: The dtype in question.
      computes_in_dtype: Whether the program computes in `dtype`. If it does not, the
        findings say what would overflow or underflow.
      operations: All floating-point results, in order of execution.

    Examples:
      >>> import jax.numpy as jnp
      >>> from optax_lossscale import diagnostics
      >>> def loss_fn(w):
      ...     return jnp.sum(jnp.square(w.astype(jnp.float16))).astype(jnp.float32)
      >>> trace = diagnostics.trace_numerics(loss_fn, jnp.array([1.0, 2.0]))
      >>> print(trace.first_nonfinite, trace.largest_scale, trace.loss)
      None 8192.0 5.0
    """

    findings: list[NumericFinding]
    first_nonfinite: NumericOperation | None
    largest_scale: float | tuple[float | None, ...] | None
    scale: float | tuple[float, ...]
    loss: float | tuple[float, ...]
    float32_loss: float | tuple[float, ...]
    dtype: str
    computes_in_dtype: bool
    operations: list[NumericOperation]

    def __str__(self):
        lines = []
        if not self.computes_in_dtype:
            text = (
                f"No operation computes in {self.dtype}. The findings say what would "
                "overflow or underflow if all did."
            )
            lines += textwrap.wrap(text, WIDTH)
        for finding in self.findings[:SHOWN_FINDINGS]:
            lines += textwrap.wrap(finding.message, WIDTH, subsequent_indent="  ")
        if len(self.findings) > SHOWN_FINDINGS:
            lines.append(
                f"and {len(self.findings) - SHOWN_FINDINGS} more: see findings"
            )
        opaque = {x.primitive for x in self.operations if x.opaque}
        if opaque:
            names = ", ".join(sorted(opaque))
            text = f"Not followed in float32: {names}."
            lines += textwrap.wrap(text, WIDTH, subsequent_indent="  ")
        facts = {
            "loss": _text(self.loss, "{:.6g}".format),
            "in float32": _text(self.float32_loss, "{:.6g}".format),
            "loss scale": _text(self.scale, power),
            "largest": _text(self.largest_scale, power),
            "operations": f"{len(self.operations)}",
        }
        return "\n".join([*lines, ", ".join(f"{k} {v}" for k, v in facts.items())])

    def to_csv(self, path: str | os.PathLike[str]) -> Path:
        """Writes the operations to a file, one row each.

        Args:
          path: The file; an old one is replaced.

        Returns:
          The path of the file, absolute.
        """
        rows = list(map(_flat, self.operations))

        def write(file):
            writer = csv.DictWriter(file, list(rows[0]) if rows else [])
            writer.writeheader()
            writer.writerows(rows)

        return write_file(path, write)

    def to_json(self, path: str | os.PathLike[str]) -> Path:
        """Writes the findings and the operations to a file.

        Args:
          path: The file; an old one is replaced.

        Returns:
          The path of the file, absolute.
        """
        found = self._asdict() | {
            "findings": [x._asdict() | _named(x) for x in self.findings],
            "first_nonfinite": self.first_nonfinite and _flat(self.first_nonfinite),
            "operations": list(map(_flat, self.operations)),
        }
        text = json.dumps(_plain(found), indent=1, allow_nan=False)
        return write_file(path, lambda file: file.write(text + "\n"))


def trace_numerics(
    loss_fn: Callable[..., Any],
    params: Any,
    *args: Any,
    state: Any = None,
    scale: Any = None,
    dtype: Any = "float16",
    has_aux: bool = False,
    **kwargs: Any,
) -> NumericsTrace:
    """Names the line where float16 breaks, in the forward or the backward pass.

    It computes the loss and its scaled gradient once more, and follows each
    floating-point result of each operation: how large and how small, how many zeros,
    subnormal numbers, inf and nan. Beside it runs the same program with every operation
    of half precision in float32, so it knows what each result would have been. Then it
    searches the largest loss scale with which nothing in the backward pass overflows,
    exactly, by trying.

    Call it on the host with the arguments of a step that went wrong. It compiles one
    program, which returns a few numbers for each operation, so it needs little memory;
    arrays may be sharded. It runs the program a few times, with callbacks in it. With
    several losses it traces each, with its forward pass. Use `scale_sweep` to see what
    each scale loses of the parameters' gradients, and `suggest_loss_scale` under
    `jax.jit`.

    Args:
      loss_fn: Called as `loss_fn(params, *args, **kwargs)`; returns a real scalar loss,
        or the loss and auxiliary data if `has_aux`. With several loss scales it returns
        a tuple or list of as many losses.
      params: The parameters, any pytree. Its floating-point arrays are differentiated.
      *args: More arguments. Arrays are arguments of the compiled program; everything
        else is passed as it is.
      state: The state, for its loss scale: a pytree that holds one
        `LossScaleOptimizerState`.
      scale: The loss scale, from 2**-126 to 2**126, in place of a state; a sequence for
        several losses. Without either it is 1.
      dtype: The dtype in question: "float16", "bfloat16" or a float8. If no operation
        computes in it, the trace says what would happen if all did.
      has_aux: Whether `loss_fn` returns auxiliary data as well.
      **kwargs: More arguments of `loss_fn`. If it has a keyword `state`, `scale`,
        `dtype` or `has_aux` itself, bind that with `functools.partial`.

    Returns:
      A `NumericsTrace`. Print it to read what breaks, why, and what to do.

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
    if not callable(loss_fn):
        raise TypeError(f"loss_fn must be a function, got {loss_fn!r}.")
    if any(isinstance(x, Tracer) for x in jax.tree.leaves((params, args, kwargs))):
        raise TypeError(
            "trace_numerics is for the host: call it outside of jit, scan, vmap and "
            "the like, with the arguments of the step."
        )
    check_host("trace_numerics", (state, scale))
    has_aux = check.boolean("has_aux", has_aux)
    dtype = check.dtype("dtype", dtype)
    _bits.limits_of(dtype)
    scales, count = _scales(state, scale)
    call = make_call(loss_fn, params, args, kwargs, has_aux, count)
    program, computes = make_program(call, dtype)

    runs: dict[tuple[float, ...], Run] = {}

    def at(wanted: list[float]) -> Run:
        if tuple(wanted) not in runs:
            runs[tuple(wanted)] = Run(program, wanted, None if computes else dtype)
        return runs[tuple(wanted)]

    run = at(scales)
    best = [search.find_largest(run, at, i) for i in range(len(scales))]
    largest = [None if x is None else x.scales[i] for i, x in enumerate(best)]
    factual = [k for k in run.origins() if not run.range(k).is_finite]
    losses = run.losses.T.tolist()

    def one(values):
        return values[0] if count is None else tuple(values)

    return NumericsTrace(
        findings=find_all(run, best),
        first_nonfinite=run.operation(factual[0]) if factual else None,
        largest_scale=one(largest),
        scale=one(scales),
        loss=one(losses[0]),
        float32_loss=one(losses[1]),
        dtype=dtype,
        computes_in_dtype=computes,
        operations=[run.operation(k) for k in run.keys if run.site(k).primitive],
    )


def _scales(state: Any, scale: Any) -> tuple[list[float], int | None]:
    """Returns the loss scales, and how many losses there are if several."""
    if state is not None and scale is not None:
        raise ValueError("Pass state or scale, not both: a state has its loss scale.")
    found = 1.0 if scale is None else scale
    if state is not None:
        found = jax.device_get(unbox(find_state(state).loss_scale_state.loss_scale))
    name = "scale" if state is None else "the loss scale of state"
    array = np.asarray(found)
    if array.ndim > 1 or not array.size:
        raise ValueError(
            f"{name} must be a number, or one for each loss, got shape {array.shape}. "
            "If the state belongs to many members or devices, pass the state of one."
        )
    if not array.ndim:
        return [check.scale(name, array.item())], None
    checked = [check.scale(f"{name}[{i}]", x) for i, x in enumerate(array.tolist())]
    return checked, len(checked)


def _text(value: Any, write: Callable[[float], str]) -> str:
    if isinstance(value, tuple):
        return "(" + ", ".join(_text(x, write) for x in value) + ")"
    return "none" if value is None else write(value)


def _flat(operation: NumericOperation) -> dict[str, Any]:
    """Returns an operation as one row."""
    found = operation._asdict()
    output = found.pop("output")._asdict()
    inputs = found.pop("inputs")
    found["input_largest"] = max((x.largest for x in inputs), default=0.0)
    found["inputs_finite"] = all(x.is_finite for x in inputs)
    return found | {k: v for k, v in output.items() if k not in ("dtype", "shape")}


def _named(finding: NumericFinding) -> dict[str, Any]:
    found = {"operation": finding.operation, "other": finding.other}
    return {k: None if v is None else _flat(v) for k, v in found.items()}


def _plain(value: Any) -> Any:
    """Returns a value without nan and inf, which JSON does not have, as strings."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    return value
