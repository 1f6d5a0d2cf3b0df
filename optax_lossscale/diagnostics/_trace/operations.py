"""What is known of each operation after a run, as Python numbers."""

import functools
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from optax_lossscale._jaxprs import lines
from optax_lossscale.diagnostics import _bits
from optax_lossscale.diagnostics._trace import equations
from optax_lossscale.diagnostics._trace.program import Program
from optax_lossscale.diagnostics._trace.statistics import MAXIMA
from optax_lossscale.diagnostics._trace.values import Key, Site

# An operation makes an error of its own if its inputs have so many times smaller ones.
INHERITED = 4
# How many lines to name that led to an operation.
CALLERS = 3


class NumericRange(NamedTuple):
    """The range of an array's numbers; for an array in a loop, of all iterations.

    Attributes:
      dtype: The name of its dtype.
      shape: Its shape.
      smallest: The smallest magnitude that is not zero; 0.0 if there is none.
      largest: The largest finite magnitude; 0.0 if there is none.
      float32_largest: The largest finite magnitude if every operation in half precision
        were in float32.
      zeros: The share of zeros, from 0 to 1.
      infs: The share of inf and -inf.
      nans: The share of nan.
      flushed: The share that is zero, or too small for the dtype, but not zero in
        float32.
      float32_nonfinite: The share that is inf or nan in float32, too.
      error: The largest difference from float32, relative to `float32_largest`.

    Examples:
      >>> import jax.numpy as jnp
      >>> from optax_lossscale import diagnostics
      >>> def loss_fn(w):
      ...     return jnp.sum(w.astype(jnp.float16)).astype(jnp.float32)
      >>> trace = diagnostics.trace_numerics(loss_fn, jnp.array([1.0, 2.0, 0.0]))
      >>> cast = trace.operations[0].output
      >>> print(cast.dtype, cast.smallest, cast.largest, round(cast.zeros, 2))
      float16 1.0 2.0 0.33
    """

    dtype: str
    shape: tuple[int, ...]
    smallest: float
    largest: float
    float32_largest: float
    zeros: float
    infs: float
    nans: float
    flushed: float
    float32_nonfinite: float
    error: float

    @property
    def is_finite(self) -> bool:
        """Whether it holds neither inf nor nan."""
        return not self.infs and not self.nans


class NumericOperation(NamedTuple):
    """A floating-point result of an operation, in the forward or backward pass.

    Attributes:
      phase: "forward" or "backward".
      file: The file of the user's line; "" if the line is not known.
      line: The line. An operation of the backward pass has the line of the operation
        that it differentiates; in the backward rule of a `jax.custom_vjp` function, the
        line that calls this function. 0 if not known.
      function: The qualified name of the function with that line.
      callers: The user's lines that led there, the innermost first, up to the loss
        function: of each the file, the line and the function.
      scope: The named scopes around it, `Model/Block_0/Dense_1` for example.
      primitive: The name of the JAX primitive.
      dtype: The name of its dtype.
      shape: Its shape.
      inputs: The ranges of its floating-point inputs.
      output: The range of its result, a named tuple: `dtype` and `shape`; `smallest`
        and `largest`, the magnitudes that are neither zero nor inf or nan;
        `float32_largest`, the largest if half precision were float32; the shares
        `zeros`, `infs`, `nans` and `flushed` (zero, or too small for the dtype, but not
        zero in float32), from 0 to 1; `float32_nonfinite`, the share of inf and nan in
        float32; and `error`, the largest difference from float32, relative to
        `float32_largest`.
      opaque: Whether JAX cannot look into it (a Pallas kernel, a callback), or it could
        not run in float32: `float32_largest` and `error` start anew here.
      in_rule: Whether it is in the backward rule of a `jax.custom_vjp` function, which
        the line calls.
      for_derivative: Whether it is in the forward pass only for the derivative of its
        line: a `sqrt` needs a `div`.

    Examples:
      >>> import jax.numpy as jnp
      >>> from optax_lossscale import diagnostics
      >>> def loss_fn(w):
      ...     return jnp.sum(jnp.exp(w.astype(jnp.float16))).astype(jnp.float32)
      >>> trace = diagnostics.trace_numerics(loss_fn, jnp.array([1.0, 12.0]))
      >>> found = trace.first_nonfinite
      >>> print(found.phase, found.primitive, found.dtype, found.shape, found.line)
      forward exp float16 (2,) 2
    """

    phase: str
    file: str
    line: int
    function: str
    callers: tuple[tuple[str, int, str], ...]
    scope: str
    primitive: str
    dtype: str
    shape: tuple[int, ...]
    inputs: tuple[NumericRange, ...]
    output: NumericRange
    opaque: bool
    in_rule: bool
    for_derivative: bool

    @property
    def place(self) -> str:
        """Where it stands: file, line, function and scope."""
        if self.line:
            place = named(self.file, self.line, self.function)
        else:
            is_backward = self.phase == "backward"
            place = "gradient of the loss" if is_backward else "unknown line"
        return f"{place} ({self.scope})" if self.scope else place

    def __str__(self):
        shape = ",".join(map(str, self.shape))
        phase = f"{self.phase} pass"
        if self.in_rule:
            phase = "in its backward rule (jax.custom_vjp)"
        elif self.for_derivative:
            phase += ", for its derivative"
        own = [x for x in self.callers if not lines.is_installed(x[0])]
        calls = "".join(f", called from {named(*x)}" for x in own[:CALLERS])
        return f"{self.place}{calls}: {self.primitive} {self.dtype}[{shape}], {phase}"


def named(file: str, line: int, function: str) -> str:
    """Writes a line and its function."""
    inside = f", in {function}" if function not in ("", "<module>") else ""
    return f"{_short(file)}:{line}{inside}"


def _short(file: str) -> str:
    """Returns the last two parts of a path; all below the folder of libraries.

    Of a file below the current folder, parts of the way from there. A cell of a
    notebook is "In[3]".
    """
    ipython = sys.modules.get("IPython")
    shell = ipython and ipython.get_ipython()
    cell = shell and shell.compile.format_code_name(file)
    if cell:
        return cell[1]
    *_, installed = re.split(r"-packages[\\/]", file)
    below = installed.removeprefix(os.getcwd() + os.sep)
    parts = below.replace("\\", "/").split("/")
    return "/".join(parts if lines.is_installed(file) else parts[-2:])


class Run:
    """One run of the program: what was measured at a loss scale.

    Attributes:
      program: The program.
      scale: The loss scale.
      losses: The loss, and what it would be in float32.
      norms: Of each parameter's gradient, f64[n, 4]: see `statistics.norms`.
      keys: The keys of everything that ran, in order of execution; arguments first.
    """

    def __init__(self, program: Program, scale: float):
        """Runs the program at a loss scale."""
        self.program, self.scale = program, scale
        self._statistics, self.losses, self.norms = program.run(scale)
        self._rows = {key: i for i, key in enumerate(program.keys)}
        self.range = functools.cache(self._range)
        counts = self._statistics.counts
        self._seen, self._nonfinite = counts[:, 0] > 0, counts[:, 2:4].any(1)
        self.keys = sorted(filter(self._ran, program.sites), key=self._order)

    def _row(self, key: Key) -> int:
        return self._rows[self.site(key).moved or key]

    def _ran(self, key: Key) -> bool:
        return self._seen[self._row(key)]

    def _order(self, key: Key) -> Any:
        """Returns what to sort by."""
        if self.site(key).phase == "argument":
            return []
        return [-(x == "condition") if isinstance(x, str) else x for x in key]

    def site(self, key: Key) -> Site:
        """Returns what is measured."""
        return self.program.sites[key]

    def _range(self, key: Key) -> NumericRange:
        """Returns the numbers at a site."""
        site, found = self.site(key), self._statistics.row(self._row(key))
        seen, _ = max(found.pop("seen"), 1.0), found.pop("begins")
        numbers = {
            name: float(np.int32(x).view(np.float32)) if name in MAXIMA else x / seen
            for name, x in found.items()
        }
        largest = numbers["float32_largest"]
        numbers["error"] = numbers["error"] / largest if largest else 0.0
        return NumericRange(dtype=site.dtype, shape=site.shape, **numbers)

    def operation(self, key: Key) -> NumericOperation:
        """Returns an operation."""
        site = self.site(key)
        own = site.source.file, site.source.line, site.primitive
        inputs = (self.inputs(x) for x in site.inputs)
        names = ("phase", "scope", "primitive", "dtype", "shape", "opaque")
        return NumericOperation(
            **vars(site.source),
            **{name: getattr(site, name) for name in names},
            inputs=tuple(self.range(x[-1]) for x in inputs if x),
            output=self.range(key),
            for_derivative=site.phase == "forward" and own not in self._needed,
        )

    @functools.cached_property
    def _needed(self):
        """The lines on which the loss depends, with the primitives in them."""
        sites = map(self.site, self.ancestors(self.inputs(self.program.loss)))
        return {(x.source.file, x.source.line, x.primitive) for x in sites}

    @property
    def backward(self) -> list[Key]:
        """The operations of the backward pass."""
        sites = ((key, self.site(key)) for key in self.keys)
        return [k for k, x in sites if x.phase == "backward" and x.primitive]

    @property
    def gradients(self) -> list[Key]:
        """The sites of the parameters' gradients."""
        return self.inputs(k for keys in self.program.gradients for k in keys)

    def operands(self, key: Key) -> list[Key]:
        """Returns the sites of the inputs of an operation."""
        return [k for keys in self.site(key).inputs for k in self.inputs(keys)]

    def inputs(self, keys: Iterable[Key]) -> list[Key]:
        """Returns the sites of an input that ran."""
        return [k for k in keys if k in self.program.sites and self._ran(k)]

    # What is not finite.

    def limit(self, key: Key) -> _bits.Limits | None:
        """Returns the limits of half precision that apply, if any do."""
        dtype = self.site(key).dtype
        return _bits.limits_of(dtype) if equations.is_half(dtype) else None

    def exceeds(self, key: Key) -> bool:
        """Whether the result in float32 is too large for the dtype."""
        limits, largest = self.limit(key), self.range(key).float32_largest
        if limits is None or largest < limits.overflow:
            return False
        return largest > limits.overflow or limits.tie_overflows

    def is_bad(self, key: Key) -> bool:
        """Whether there is inf or nan."""
        return self._nonfinite[self._row(key)]

    def is_origin(self, key: Key) -> bool:
        """Whether inf or nan begins here."""
        return self._begins(key) > 0

    def _begins(self, key):
        """Returns 2 if inf or nan begins with finite inputs: see `Statistics`."""
        site = self.site(key)
        if not site.primitive or site.moved:
            return 0
        return self._statistics.row(self._rows[key])["begins"]

    def bad_operands(self, key: Key) -> list[Key]:
        """Returns the inputs with inf or nan from which an operation makes others."""
        operands = self.operands(key) if self._begins(key) < 2 else ()
        return list(filter(self.is_bad, operands))

    def origins(self, phase: str | None = None) -> list[Key]:
        """Returns where inf or nan begins, in order of execution."""
        keys = (k for k in self.keys if phase in (None, self.site(k).phase))
        return list(filter(self.is_origin, keys))

    def nonfinite_origins(self) -> Iterator[Key]:
        """Yields where inf or nan begins, but for constants: `jnp.var` holds a nan."""
        origins = (k for k in self.origins() if self.site(k).inputs)
        return (k for k in origins if not self.range(k).is_finite)

    def causes(self, keys: Iterable[Key]) -> list[Key]:
        """Returns where the inf and nan of these sites begin, in order of execution."""
        reached = self.ancestors(filter(self.is_bad, keys), self.bad_operands)
        return [key for key in self.keys if key in reached and self.is_origin(key)]

    def ancestors(
        self, keys: Iterable[Key], parents: Callable[[Key], Iterable[Key]] | None = None
    ) -> set[Key]:
        """Returns the sites on which others depend, and these themselves.

        Args:
          keys: Where to begin.
          parents: Returns those of one site; all operands if None.
        """
        found, ahead = set(), list(keys)
        while ahead:
            key = ahead.pop()
            if key not in found:
                found.add(key)
                ahead += (parents or self.operands)(key)
        return found

    def beginning(self, key: Key, small: float) -> Key:
        """Returns where the error of a finite result begins.

        Args:
          key: The site of the result.
          small: An error that is not worth following.
        """

        def wrong(k):
            ranges = ((x, self.range(x)) for x in self.operands(k))
            return [
                x
                for x, found in ranges
                if found.error >= small or found.flushed or self.is_lost(x)
            ]

        # An inf or nan may be swallowed: 1 / inf is 0.
        reached = self.ancestors([key], wrong)
        lost = (k for k in self.keys if k in reached and self.is_lost(k))
        if origins := list(filter(self.is_origin, lost)):
            # In a loop, an inf that is made later comes in earlier.
            return min(origins, key=lambda k: bool(self.bad_operands(k)))
        seen, found = set(), key
        while key not in seen:
            seen.add(key)
            found = key if self.site(key).primitive else found
            operands = [k for k in self.operands(key) if k not in seen]
            otherwise = [k for k in operands if self.is_decided_otherwise(k)]
            if otherwise and not self.site(key).primitive:
                key = otherwise[0]  # It took another branch.
                continue
            numbers = [k for k in operands if k not in otherwise]
            worst = max(numbers, key=lambda k: self.range(k).error, default=key)
            least = max(small, min(self.range(key).error, 1) / INHERITED)
            if self.range(worst).error >= least:
                key = worst
            elif otherwise:  # The index is wrong, or the mask.
                key = otherwise[0]
        return found

    def is_lost(self, key: Key) -> bool:
        """Whether there is inf or nan that is not in float32, too."""
        found = self.range(key)
        return self.is_bad(key) and found.infs + found.nans > found.float32_nonfinite

    def is_decided_otherwise(self, key: Key) -> bool:
        """Whether it is a decision that is another one in float32."""
        return self.site(key).is_decision and self.range(key).flushed > 0
