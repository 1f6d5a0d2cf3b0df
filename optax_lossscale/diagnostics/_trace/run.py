"""One run of a program: the statistics of each result, as Python numbers.

The side that measures makes it; the side that judges reads it.
"""

import dataclasses
import functools
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from optax_lossscale._jaxprs import lines
from optax_lossscale._jaxprs.primitives import Trait, names_of
from optax_lossscale._tree import is_half
from optax_lossscale.diagnostics import _bits

# The statistics of a result at a site. Shares are those of the worst iteration of a
# loop, or of the worst device.
FIELDS = (
    "seen", "begins", "zeros", "infs", "nans", "flushed", "float32_nonfinite",
    "largest", "float32_largest", "error", "smallest",
)  # fmt: skip
# The column "begins". Inf or nan begins at a result: it has some, and its operands are
# finite; it has more than they have, or nan where they have inf alone; or nowhere.
FROM_FINITE, MORE, NOWHERE = 2, 1, 0
# A sketch of a gradient has a projection on a wave of each of these squared
# frequencies, of which none is a multiple of another.
WAVES = (1, 2, 3, 5)
# An error begins at an operation if it is so many times as large as those before it.
INHERITED = 4
# At most so many lines are named that led to an operation.
CALLERS = 3
# The primitive of two sites of a solver: its iterations, f32[], and whether it stands
# still.
SOLVER = "while"
# Everyday names of primitives.
NOUNS = {
    "add": "sum of two", "add_any": "sum of gradients", "cumsum": "running sum",
    "conv_general_dilated": "convolution", "convert_element_type": "cast",
    "div": "division", "dot_general": "matrix product", "exp": "exponential",
    "integer_pow": "power", "is_finite": "test for inf and nan", "log": "logarithm",
    "logistic": "sigmoid", "mul": "product", "pow": "power", "psum": "sum over devices",
    "ragged_dot_general": "matrix product", "reduce_max": "maximum",
    "reduce_min": "minimum", "reduce_sum": "sum", "rsqrt": "1 / square root",
    "select_and_gather_add": "max-pooling", "select_and_scatter_add": "max-pooling",
    "select_n": "choice", "while": "solver", "sqrt": "square root", "sub": "difference",
    **dict.fromkeys(names_of(Trait.ORDER | Trait.EQUAL), "comparison"),
}  # fmt: skip


@dataclasses.dataclass
class Site:
    """A recorded value of the program: its place and its type, without its numbers.

    Attributes:
      primitive: The name of the primitive that made it; "" for an input or output of
        the program, a loop, a branch or a device.
      dtype, shape: Its type.
      source, scope: Its line and its named scopes.
      phase: "argument", "forward", "backward", or "scale" for the scaling of the loss.
      inputs: The sites of its operands.
      constants: The operands that are constants in the program, and an exponent.
      row: The site with the same magnitudes: itself, but for moves.
      is_decision: Whether it is a flag or an integer: a comparison, an index, a mask.
      opaque: Whether it could not run in float32.
      readers: The products that a cast of `autocast` is for. If all are in float32,
        there is no cast. The cast has the line of the first.
    """

    dtype: str
    shape: tuple[int, ...]
    source: lines.Source
    row: int
    scope: str = ""
    phase: str = "forward"
    primitive: str = ""
    inputs: tuple[int, ...] = ()
    constants: tuple[float, ...] = ()
    is_decision: bool = False
    opaque: bool = False
    readers: list[int] = dataclasses.field(default_factory=list)


def ratio(part: float, whole: float) -> float:
    """Returns a part of a whole; inf if that is no number, and 0 of nothing."""
    if not math.isfinite(part) or not math.isfinite(whole):
        return math.inf
    return float(part / whole) if whole else math.inf if part else 0.0


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
      float32_nonfinite: The share that is inf or nan in float32 as well.
      error: The largest difference from float32, relative to `float32_largest`; inf if
        all is zero in float32 alone.

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
      name: What people call it, "matrix product" for example.
      primitive: The name of the JAX primitive, `dot_general` for example.
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
    name: str
    primitive: str
    dtype: str
    shape: tuple[int, ...]
    inputs: tuple[NumericRange, ...]
    output: NumericRange
    opaque: bool
    in_rule: bool
    for_derivative: bool

    @property
    def own(self) -> tuple[str, int, str]:
        """File, line and function of the innermost line that the user can change."""
        return lines.own_of([(self.file, self.line, self.function), *self.callers])

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
        return f"{self.name} at {self.place}{calls}, {self.dtype}[{shape}], {phase}"


class Spacing(NamedTuple):
    """The spacing of half precision at the largest term, and this term, as log2."""

    step: int
    top: int


def spacing(operation: NumericOperation) -> Spacing | None:
    """Returns the spacing at the largest term of an operation.

    None if nothing is in half precision, or all is zero.
    """
    ranges = operation.output, *operation.inputs  # Of a running sum, the first.
    halves = [x.dtype for x in ranges if is_half(x.dtype)]
    largest = max(x.largest for x in ranges)
    if not halves or not largest:
        return None
    top = math.floor(math.log2(largest))
    return Spacing(top - jnp.finfo(halves[0]).nmant, top)


def named(file: str, line: int, function: str) -> str:
    """Writes a line and its function."""
    inside = f", in {function}" if function not in ("", "<module>") else ""
    return f"{_short(file)}:{line}{inside}"


def _short(file: str) -> str:
    """Returns the last two parts of a path; all below the folder of libraries.

    For a file below the current folder, the path from there. A cell of a
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


def sketch_distance(before: Any, after: Any) -> Any:
    """Estimates how far the gradients of two runs are from each other.

    From projections on `WAVES`; of n of them the relative error is about 1/sqrt(2 n).

    Args:
      before: f64[parameters, 3 + n]: `Run.norms` of one run.
      after: Those of the other.

    Returns:
      f64[parameters]: the norm of the difference of each parameter's gradients.
    """
    change = np.sum(np.square(after[:, 3:] - before[:, 3:]), 1)
    return np.sqrt(2 * change / len(WAVES))


def depending_on(keys: Iterable[int], inputs: Mapping[int, Iterable[int]]) -> set[int]:
    """Returns the sites that depend on others, and these themselves.

    Args:
      keys: The others.
      inputs: Of each site, in order of execution, those that it depends on.
    """
    reached, before = set(keys), -1
    while len(reached) != before:  # Loops alone need another turn.
        before = len(reached)
        for key, sites in inputs.items():
            if not reached.isdisjoint(sites):
                reached.add(key)
    return reached


class Outline(NamedTuple):
    """What is known of a program before it runs.

    Attributes:
      dtype: The name of the dtype to judge.
      sites: All sites, by their numbers, in order of execution.
      names: By site, the names of the arguments.
      parameters: The names of the parameters that are differentiated.
      loss: The site of the loss.
      gradients: For each parameter, the site of its gradient.
      is_autocast: Whether `autocast` made it.
    """

    dtype: str
    sites: dict[int, Site]
    names: dict[int | None, str]
    parameters: list[str]
    loss: int | None
    gradients: list[int | None]
    is_autocast: bool


class Run:
    """One run of a program at a loss scale.

    Attributes:
      outline: The program.
      scale: The loss scale.
      losses: The loss, and the loss in float32.
      norms: Of each parameter's gradient, f64[n, 3 + len(WAVES)]: the norms of the
        gradient in float32, of its error, and of what was flushed to zero; then a
        sketch of the gradient in float32, for `sketch_distance`.
      sites: All sites that ran, by their numbers, in order of execution.
    """

    def __init__(
        self,
        outline: Outline,
        scale: float,
        numbers: Mapping[int, Mapping[str, float]],
        losses: Sequence[float],
        norms: Any,
    ):
        """Keeps the numbers of a run.

        Args:
          outline: The program.
          scale: The loss scale.
          numbers: By site, the statistics of its row, by the names in `FIELDS`.
          losses: See the attribute.
          norms: See the attribute.
        """
        self.outline, self.scale, self._numbers = outline, scale, numbers
        self.losses, self.norms = losses, norms
        ran = ((i, x) for i, x in outline.sites.items() if numbers[x.row]["seen"])
        self.sites = dict(ran)
        self.range = functools.cache(self._range)

    def site(self, key: int) -> Site:
        """Returns a site."""
        return self.outline.sites[key]

    def _range(self, key):
        """Returns the numbers at a site."""
        site = self.site(key)
        numbers = dict(self._numbers[site.row])
        del numbers["seen"], numbers["begins"]
        largest = numbers["float32_largest"]
        numbers["error"] = ratio(numbers["error"], largest)
        return NumericRange(dtype=site.dtype, shape=site.shape, **numbers)

    def operation(self, key: int) -> NumericOperation:
        """Returns an operation."""
        site = self.site(key)
        own = site.source.file, site.source.line, site.primitive
        names = ("phase", "scope", "primitive", "dtype", "shape", "opaque")
        return NumericOperation(
            **vars(site.source),
            **{name: getattr(site, name) for name in names},
            name=self._name(site),
            inputs=tuple(self.range(x) for x in self.operands(key)),
            output=self.range(key),
            for_derivative=site.phase == "forward" and own not in self._needed,
        )

    def _name(self, site):
        is_cast = site.primitive == "convert_element_type" and is_half(site.dtype)
        if is_cast and site.phase == "forward" and self.outline.is_autocast:
            names = {self.outline.names.get(x) for x in site.inputs}
            is_weight = not names.isdisjoint(self.outline.parameters)
            return "layer's weight" if is_weight else "layer's input"
        return NOUNS.get(site.primitive, site.primitive.replace("_", " "))

    @functools.cached_property
    def _needed(self):
        """The lines on which the loss depends, with the primitives in them."""
        sites = map(self.site, self.ancestors(self.ran([self.outline.loss])))
        return {(x.source.file, x.source.line, x.primitive) for x in sites}

    @property
    def backward(self) -> list[int]:
        """The operations of the backward pass."""
        sites = self.sites.items()
        return [k for k, x in sites if x.phase == "backward" and x.primitive]

    @property
    def solvers(self) -> list[int]:
        """The sites of solvers: iterations, and whether one stands still."""
        return [k for k, x in self.sites.items() if x.primitive == SOLVER]

    @property
    def gradients(self) -> list[int]:
        """The sites of the parameters' gradients."""
        return self.ran(self.outline.gradients)

    def ran(self, keys: Iterable[int | None]) -> list[int]:
        """Returns those of the sites that ran."""
        return [k for k in keys if k in self.sites]

    def operands(self, key: int) -> list[int]:
        """Returns the sites of the inputs of an operation."""
        return self.ran(self.site(key).inputs)

    # What is not finite.

    def limit(self, key: int) -> _bits.Limits | None:
        """Returns the limits of half precision that apply, if any do."""
        dtype = self.site(key).dtype
        return _bits.limits_of(dtype) if is_half(dtype) else None

    def exceeds(self, key: int) -> bool:
        """Whether the result in float32 is too large for the dtype."""
        limits, largest = self.limit(key), self.range(key).float32_largest
        if limits is None or largest < limits.overflow:
            return False
        return largest > limits.overflow or limits.tie_overflows

    def is_bad(self, key: int) -> bool:
        """Whether there is inf or nan."""
        return not self.range(key).is_finite

    def is_lost(self, key: int) -> bool:
        """Whether there is inf or nan that float32 does not have."""
        result = self.range(key)
        return self.is_bad(key) and result.infs + result.nans > result.float32_nonfinite

    @functools.cached_property
    def lost_origins(self) -> list[int]:
        """Returns where inf or nan begins that float32 does not have."""
        return list(filter(self.is_lost, self.origins()))

    def is_decided_otherwise(self, key: int) -> bool:
        """Whether it is a decision that differs in float32."""
        return self.site(key).is_decision and self.range(key).flushed > 0

    def _begins(self, key):
        """Returns how inf or nan begins at a site: `FROM_FINITE` and the others."""
        site = self.site(key)
        is_operation = site.primitive and site.row == key
        return self._numbers[key]["begins"] if is_operation else NOWHERE

    def is_origin(self, key: int) -> bool:
        """Whether inf or nan begins here."""
        return self._begins(key) != NOWHERE

    def bad_operands(self, key: int) -> list[int]:
        """Returns the inputs with inf or nan from which an operation makes others."""
        operands = () if self._begins(key) == FROM_FINITE else self.operands(key)
        return list(filter(self.is_bad, operands))

    def origins(self, phase: str | None = None) -> list[int]:
        """Returns where inf or nan begins, in order of execution."""
        keys = (k for k, x in self.sites.items() if phase in (None, x.phase))
        return list(filter(self.is_origin, keys))

    def nonfinite_origins(self) -> list[int]:
        """Returns where inf or nan begins, but for constants: `jnp.var` holds a nan."""
        return [k for k in self.origins() if self.site(k).inputs and self.is_bad(k)]

    def origins_behind(self, keys: Iterable[int]) -> list[int]:
        """Returns where the inf and nan of these sites begin, in order of execution."""
        reached = self.ancestors(filter(self.is_bad, keys), self.bad_operands)
        origins = [k for k in self.sites if k in reached and self.is_origin(k)]
        # A constant may be of a branch that nobody takes: `jnp.var` holds a nan.
        return [k for k in origins if self.site(k).inputs] or origins

    def ancestors(
        self, keys: Iterable[int], parents: Callable[[int], Iterable[int]] | None = None
    ) -> set[int]:
        """Returns the sites on which others depend, and these themselves.

        Args:
          keys: Where to begin.
          parents: Returns those of one site; all operands if None.
        """
        reached, ahead = set(), list(keys)
        while ahead:
            key = ahead.pop()
            if key not in reached:
                reached.add(key)
                ahead += (parents or self.operands)(key)
        return reached
