"""The program that computes the loss and its scaled gradient, and measures them."""

import dataclasses
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from optax_lossscale import _check as check
from optax_lossscale._autocast.cast import function_of
from optax_lossscale._autocast.evaluate import SHOWS
from optax_lossscale._gradients import loss_of
from optax_lossscale._jaxprs import parts
from optax_lossscale._jaxprs.lines import Source, source_of
from optax_lossscale._scaling import scale_up
from optax_lossscale._tree import is_argument, is_inexact
from optax_lossscale.diagnostics import _bits
from optax_lossscale.diagnostics._common import check_host
from optax_lossscale.diagnostics._trace import equations
from optax_lossscale.diagnostics._trace.interpreter import Interpreter, backward_keys
from optax_lossscale.diagnostics._trace.statistics import Recorder, norms
from optax_lossscale.diagnostics._trace.values import Place, Value

# Seconds before a line says that this takes long; and the number of operations from
# which on it says so at once.
PATIENCE, MANY = 10, 1000


def make_call(
    caller: str,
    loss_fn: Any,
    params: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    has_aux: Any,
) -> tuple[Callable[[Sequence[Any]], Any], list[Any], list[str], int]:
    """Takes a call apart.

    Args:
      caller: The name of the public function, for messages.
      loss_fn: The loss function.
      params: Its first argument.
      args: More arguments.
      kwargs: Its keyword arguments.
      has_aux: Whether it returns auxiliary data as well.

    Returns:
      A function that returns the loss of other arrays in place of these; the arrays,
      the differentiated ones first; their names; and how many are differentiated.

    Raises:
      TypeError: If `loss_fn` is no function, `has_aux` no boolean, an argument belongs
        to a transformation of JAX, or `params` has no floating-point array.
      ValueError: If an array was deleted.
    """
    # What with_loss_scale wraps: the scale comes from the state here.
    loss_fn = check.function("loss_fn", getattr(loss_fn, "without_scale", loss_fn))
    check.boolean("has_aux", has_aux)
    leaves, treedef = jax.tree.flatten((params, args, kwargs))
    names = [
        name + jax.tree_util.keystr(path)
        for name, x in [("params", params), ("args", args), *sorted(kwargs.items())]
        for path, _ in jax.tree.leaves_with_path(x)
    ]
    check_host(caller, [x for x in leaves if isinstance(x, jax.Array)])
    for name, x in zip(names, leaves, strict=True):
        if isinstance(x, jax.Array) and x.is_deleted():
            raise ValueError(
                f"{name} was deleted: the step donated it (donate_argnums). Pass a "
                "copy that was made before the step."
            )
    first = leaves[: len(jax.tree.leaves(params))]
    floats = [i for i, x in enumerate(first) if is_inexact(x) and not callable(x)]
    # Beside arrays, Python numbers are settings, as in the models of Equinox.
    arrays = [i for i in floats if is_argument(first[i])]
    chosen = {i: first[i] for i in arrays or floats}
    count = len(chosen)
    if not chosen:
        raise TypeError(
            "params must have a floating-point array to differentiate, got "
            f"{type(params).__name__} with none. If it is a model that is not a "
            "pytree, pass its parameters, and build the model in loss_fn."
        )
    chosen |= {i: x for i, x in enumerate(leaves) if is_argument(x)}

    def function(arrays):
        given = dict(enumerate(leaves)) | dict(zip(chosen, arrays, strict=True))
        params, args, kwargs = jax.tree.unflatten(treedef, given.values())
        return loss_of(loss_fn(params, *args, **kwargs), has_aux)

    return function, list(chosen.values()), [names[i] for i in chosen], count


def gradients_of(call: Any) -> Callable[..., Any]:
    """Returns a function of a loss scale and arrays: the loss, the scaled gradients.

    Args:
      call: What `make_call` returns.
    """
    function, _, _, count = call

    def program(scale, arrays):
        def scaled(first):
            loss = function([*first, *arrays[count:]])
            return scale_up(loss, scale), loss

        (_, loss), grads = jax.value_and_grad(scaled, has_aux=True)(arrays[:count])
        return loss, grads

    return program


def cast_by_hand(loss_fn: Any, call: Callable[..., Any]) -> Source | None:
    """Returns where a function in `autocast` casts to half precision by itself.

    Args:
      loss_fn: The loss function.
      call: Takes a call of a function apart: see `make_call`.

    Returns:
      The first such line; None if there is none, or if it is not in `autocast`.
    """
    written = function_of(getattr(loss_fn, "without_scale", loss_fn))
    if written is None:
        return None
    function, arrays, *_ = call(written)
    for equation in parts.all_equations(jax.make_jaxpr(function)(arrays).jaxpr):
        is_cast = equation.primitive.name == "convert_element_type"
        if is_cast and equations.in_half(equation.outvars[0].aval):
            return source_of(equation, Source(), is_backward=False)
    return None


class Program:
    """A compiled program: the loss and its scaled gradient.

    Attributes:
      dtype: The name of the dtype in question.
      closed: The jaxpr that it follows.
      equations: All equations in it.
      is_autocast: Whether `autocast` made it, so that it has the constants and the
        decisions of the float32 function.
      by_hand: Where that function casts by itself: see `cast_by_hand`.
      computes_in_dtype: Whether anything computes in the dtype in question.
      parameters: The keys of the parameters that are differentiated.
      keys: The keys of the statistics.
      sites: By key, what was measured, in order of execution.
      scaled: The keys of what depends on the loss scale: the backward pass.
      loss: The keys of the loss.
      gradients: For each of the parameters, the keys of its gradient.
      run: Maps a loss scale to the statistics of everything in `keys`; to the loss, and
        what it would be in float32; and to the norms of each gradient, f32[n, 4]: see
        `statistics.norms`.
    """

    def __init__(self, call: Any, dtype: Any, by_hand: Source | None = None):
        """Traces the program.

        Args:
          call: What `make_call` returns.
          dtype: The dtype in question.
          by_hand: What `cast_by_hand` returns.
        """
        self.by_hand = by_hand
        self.dtype = check.dtype("dtype", dtype)
        _bits.limits_of(self.dtype)  # Some have no zero.
        _, arrays, names, count = call
        shown = SHOWS.set(True)
        try:
            self.closed = jax.make_jaxpr(gradients_of(call))(jnp.float32(1), arrays)
        finally:
            SHOWS.reset(shown)
        self.parameters = [(name,) for name in names[:count]]
        self.equations = followed = list(parts.all_equations(self.closed.jaxpr))
        casts = (x for x in followed if x.primitive.name == "convert_element_type")
        self.is_autocast = any(map(equations.is_autocast, casts))
        results = (x.aval for equation in followed for x in equation.outvars)
        halves = {x.dtype.name for x in results if equations.in_half(x)}
        self.computes_in_dtype = self.dtype in halves
        if halves and not self.computes_in_dtype:
            raise ValueError(
                f"Nothing computes in {self.dtype}, but the program computes in "
                f"{min(halves)}. Pass dtype={min(halves)!r}."
            )
        self._arrays = [*arrays, *self.closed.consts]
        closed_over = range(len(self.closed.consts))
        names += [f"(array {i} that loss_fn closes over)" for i in closed_over]
        self._names = names

    @property
    def forward(self) -> Iterator[Any]:
        """The equations of the forward pass, which do not depend on the scale."""
        scale, *_ = self.closed.jaxpr.invars
        for equation in self.closed.jaxpr.eqns:
            if any(x is scale for x in equation.invars):
                return
            yield from parts.equations_in(equation)

    @functools.cached_property
    def run(self) -> Callable[[float], Any]:
        """Runs the program at a loss scale; compiles it the first time."""
        run, about = self.compile(Interpreter)
        self.keys, self.sites, self.loss, self.gradients = about
        self.scaled = backward_keys(self.sites)
        for key in self.scaled.intersection(self.sites):
            if self.sites[key].phase == "forward":
                site = dataclasses.replace(self.sites[key], phase="backward")
                self.sites[key] = site
        return functools.cache(run)

    def compile(self, make: Callable[..., Interpreter], *options: Any) -> Any:
        """Compiles the program, as an interpreter runs it.

        Args:
          make: Returns the interpreter. It takes what `Interpreter` takes, and more.
          *options: Arrays that it takes, for their shapes and dtypes.

        Returns:
          A function of the loss scale and of such arrays, which returns what `run`
          does; and the attributes of this class that say what the numbers belong to.
        """
        jaxpr, about = self.closed.jaxpr, []

        def follow(zero, scale, arrays, *options):
            known = zero, jaxpr.invars[0], self.dtype, self.is_autocast
            interpreter = make(*known, *options)
            place = Place((), Recorder())
            outside = place._replace(phase="argument")
            inputs = [
                interpreter.measure((name,), interpreter.value(x), outside)
                for name, x in zip(self._names, arrays, strict=True)
            ]
            n = len(inputs) - len(jaxpr.constvars)
            variables = [*inputs[n:], Value(scale), *inputs[:n]]
            loss, *gradients = interpreter.run(jaxpr, variables, place)
            statistics, keys = place.recorder.finish(), [x.keys for x in gradients]
            about[:] = place.recorder.keys, interpreter.sites, loss.keys, keys
            sizes = [norms(x.real, x.shadow) for x in gradients]
            return statistics, (loss.real, loss.shadow), jnp.stack(sizes)

        def arguments(scale, *options):
            return jnp.uint32(0), jnp.float32(scale), self._arrays, *options

        def run(*given):
            statistics, losses, sizes = execute(*arguments(*given))
            return statistics, [float(x) for x in losses], sizes.astype(float)

        count = len(self.equations)
        text = f"Compiling {count} operations: 4 to 8 times as long as for the step."
        delay = PATIENCE if count < MANY else 0
        told = {"file": sys.stderr, "flush": True}
        timer = threading.Timer(delay, print, [text], told)
        timer.daemon = True
        timer.start()
        try:
            execute = compile_function(follow, arguments(1, *options))
        finally:
            timer.cancel()
        return run, about


def compile_function(
    function: Callable[..., Any], arguments: tuple[Any, ...]
) -> Callable[..., Any]:
    """Compiles a function that rounds as its program says.

    Args:
      function: The function.
      arguments: Arguments, for their shapes and dtypes.

    Returns:
      A function that returns the results on the host; inf and nan raise no errors.
    """
    options: dict[str, Any] = {"xla_allow_excess_precision": False}
    if jax.default_backend() == "cpu":
        # It runs a few times only, and LLVM would take most of the time.
        options["xla_backend_optimization_level"] = 0
    with jax.disable_jit(False):
        compiled = jax.jit(function).lower(*arguments).compile(options)

    def run(*arguments):
        with jax.disable_jit(False), jax.debug_nans(False), jax.debug_infs(False):
            return jax.device_get(compiled(*arguments))

    return run
