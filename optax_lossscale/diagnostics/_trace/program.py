"""The program that computes the loss and its scaled gradient, beside its twin."""

import contextlib
import functools
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from optax_lossscale import _check as check
from optax_lossscale._autocast.evaluate import SHOWS
from optax_lossscale._gradients import loss_of
from optax_lossscale._jaxprs import parts
from optax_lossscale._jaxprs.lines import AUTOCAST
from optax_lossscale._scaling import scale_up
from optax_lossscale._tree import is_argument, is_inexact, types_of
from optax_lossscale.diagnostics import _bits, _common
from optax_lossscale.diagnostics._trace import summary, twin
from optax_lossscale.diagnostics._trace.evaluate import Evaluator
from optax_lossscale.diagnostics._trace.flow import Place
from optax_lossscale.diagnostics._trace.run import Outline, Run
from optax_lossscale.diagnostics._trace.twin import Value

# Seconds before a line says that this takes long, and before a bar moves.
PATIENCE, LONG = 10, 60
WIDTH = 30
# How many characters of the types of arguments an error shows.
SHOWN = 300


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
      ValueError: If an array was deleted, or is spread over several processes.
    """
    # What with_loss_scale wraps: the scale comes from the state here.
    loss_fn = check.function("loss_fn", getattr(loss_fn, "without_scale", loss_fn))
    check.boolean("has_aux", has_aux)
    leaves, treedef = jax.tree.flatten((params, args, kwargs))
    taken = "params", "args"  # A keyword of this name is another argument.
    named = {
        f"kwargs[{k!r}]" if k in taken else k: x for k, x in sorted(kwargs.items())
    }
    names = [
        name + jax.tree_util.keystr(path)
        for name, x in [("params", params), ("args", args), *named.items()]
        for path, _ in jax.tree.leaves_with_path(x)
    ]
    _common.check_host(caller, [x for x in leaves if isinstance(x, jax.Array)])
    for name, x in zip(names, leaves, strict=True):
        if isinstance(x, jax.Array):
            _check_array(name, x)
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

    shown = {"params": params} | {f"args[{i}]": x for i, x in enumerate(args)} | named

    def function(arrays):
        given = dict(enumerate(leaves)) | dict(zip(chosen, arrays, strict=True))
        first, rest, keywords = jax.tree.unflatten(treedef, given.values())
        try:
            loss = loss_of(loss_fn(first, *rest, **keywords), has_aux)
        except Exception as error:
            text = ", ".join(f"{k}={types_of(x)}" for k, x in shown.items())
            text = textwrap.shorten(text, SHOWN)
            error.add_note(f"{caller} called loss_fn({text}), traced as by jax.jit.")
            raise
        if jnp.shape(loss):
            raise TypeError(f"loss_fn must return a scalar loss, got {types_of(loss)}.")
        return loss

    return function, list(chosen.values()), [names[i] for i in chosen], count


def _check_array(name: str, x: jax.Array) -> None:
    text = f"{name} is spread over several processes. Pass arrays of one process."
    if x.is_deleted():
        text = f"{name} was deleted: the step donated it (donate_argnums). Pass a copy "
        text += "that was made before the step."
    if x.is_deleted() or not x.is_fully_addressable:
        raise ValueError(text)


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


class Program:
    """A compiled program: the loss and its scaled gradient.

    Attributes:
      dtype: The name of the dtype in question.
      closed: The jaxpr that it follows.
      equations: All equations in it.
      is_autocast: Whether `autocast` casts anything in it.
      computes_in_dtype: Whether anything computes in the dtype in question.
      run: Runs it at a loss scale. Two more arguments say whether the twin takes the
        program's decisions, and whether to round the parameters and the data first.
    """

    def __init__(self, call: Any, dtype: Any):
        """Traces a call, as `make_call` returns it."""
        self.dtype = check.dtype("dtype", dtype)
        _bits.limits_of(self.dtype)  # Some have no zero.
        _, self._arrays, self._names, self._count = call
        shown = SHOWS.set(True)
        try:
            scale = jnp.float32(1)
            self.closed = jax.make_jaxpr(gradients_of(call))(scale, self._arrays)
        finally:
            SHOWS.reset(shown)
        self.equations = list(parts.all_equations(self.closed.jaxpr))
        self.is_autocast = any(map(is_autocast, self.equations))
        results = (x.aval for equation in self.equations for x in equation.outvars)
        halves = {x.dtype.name for x in results if twin.in_half(x)}
        self.computes_in_dtype = self.dtype in halves
        if halves and not self.computes_in_dtype:
            raise ValueError(
                f"Nothing computes in {self.dtype}, but the program computes in "
                f"{min(halves)}. Pass dtype={min(halves)!r}."
            )
        self.run = functools.cache(self._run)
        self._rows: list[int] = []  # The sites in the order of the summaries.

    @property
    def forward(self) -> Iterator[Any]:
        """The equations of the forward pass, which do not depend on the scale."""
        scale, *_ = self.closed.jaxpr.invars
        for equation in self.closed.jaxpr.eqns:
            if any(x is scale for x in equation.invars):
                return
            yield from parts.equations_in(equation)

    def _run(self, scale, follows=False, rounds=False):
        compiled, outline = self._compiled
        arrays = [*self._arrays, *self.closed.consts]
        if rounds:
            arrays = [twin.rounded(x, self.dtype) for x in arrays]
        rows, losses, sizes = compiled(jnp.float32(scale), jnp.bool_(follows), arrays)
        numbers = {k: summary.numbers(x) for k, x in zip(self._rows, rows, strict=True)}
        return Run(
            outline, scale, numbers, list(map(float, losses)), sizes.astype(float)
        )

    @functools.cached_property
    def _compiled(self):
        """What runs, and what is known of it."""
        jaxpr, found = self.closed.jaxpr, []
        closed_over = range(len(jaxpr.constvars))
        names = [f"(array {i} that loss_fn closes over)" for i in closed_over]
        names = [*self._names, *names]

        def follow(scale, follows, arrays):
            place = Place((), summary.Recorder(), phase="argument")
            evaluator = Evaluator(jaxpr.invars[0], follows)
            inputs = [
                evaluator.measure(name, Value(x, x), place)
                for name, x in zip(names, arrays, strict=True)
            ]
            n = len(self._arrays)
            values = [*inputs[n:], Value(scale, scale), *inputs[:n]]
            place = place._replace(phase="forward")
            loss, *grads = evaluator.run(jaxpr, values, place)
            named = {x.site: name for x, name in zip(inputs, names, strict=True)}
            parameters, ends = names[: self._count], [x.site for x in grads]
            known = parameters, loss.site, ends, self.is_autocast
            found[:] = [Outline(self.dtype, evaluator.sites, named, *known)]
            summaries, self._rows = evaluator.finish(place), place.recorder.sites
            sizes = [summary.norms(x.real, x.wide) for x in grads]
            return summaries, loss[:2], jnp.stack(sizes)

        arguments = (
            jnp.float32(1),
            jnp.bool_(False),
            [*self._arrays, *self.closed.consts],
        )
        with _progress(len(self.equations)):
            run = compile_function(follow, arguments)
        _mark_backward(found[0].sites)
        return run, found[0]


def _mark_backward(sites):
    """Marks what depends on the loss scale as backward."""
    first = ("scale", "backward")
    reached, before = {k for k, x in sites.items() if x.phase in first}, 0
    while len(reached) != before:
        before = len(reached)
        reached |= {k for k, x in sites.items() if not reached.isdisjoint(x.inputs)}
    for k in reached:
        if sites[k].phase == "forward":
            sites[k].phase = "backward"


def is_autocast(equation: Any) -> bool:
    """Whether `autocast` made a cast."""
    traceback = equation.source_info.traceback
    frames = traceback.frames if traceback is not None else ()
    is_cast = equation.primitive.name == "convert_element_type"
    return is_cast and any(x.file_name.startswith(AUTOCAST) for x in frames)


@contextlib.contextmanager
def _progress(count):
    """Says on stderr that compiling takes long; where it does, a bar moves.

    XLA does not say how far it is. So the bar is half full after a minute, and goes on
    by half of what is left with as much time again.
    """
    done, start = threading.Event(), time.monotonic()

    def report():
        show = functools.partial(print, file=sys.stderr, flush=True)
        if done.wait(PATIENCE):
            return
        text = (
            f"Compiling {count} operations, each with its float32 twin: 2 to 13 times"
        )
        show(f"{text} as long as compiling the step.")
        delay = LONG - PATIENCE
        while not done.wait(delay):
            delay, passed = 1, time.monotonic() - start
            bar = "#" * int(WIDTH * passed / (passed + LONG))
            show(f"\r[{bar:.<{WIDTH}}] {passed:.0f} s", end="")
        if delay == 1:
            show()

    threading.Thread(target=report, daemon=True).start()
    try:
        yield
    finally:
        done.set()


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
    with jax.disable_jit(False), _memory_told():
        compiled = jax.jit(function).lower(*arguments).compile(options)

    def run(*arguments):
        quiet = jax.debug_nans(False), jax.debug_infs(False)
        with jax.disable_jit(False), quiet[0], quiet[1], _memory_told():
            return jax.device_get(compiled(*arguments))

    return run


@contextlib.contextmanager
def _memory_told():
    """Says what to do if the device has too little memory."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            text = "The trace needs more memory than a step. Pass a smaller batch: "
            error.add_note(f"{text}a few examples are enough.")
        raise
