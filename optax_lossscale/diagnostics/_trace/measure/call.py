"""A call of a loss function: its arrays, and its program with the scaled gradient."""

import copy
import functools
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale import _check as check, _models
from optax_lossscale._autocast.evaluate import DIAGNOSES, IDLE_MARK, MARK
from optax_lossscale._autocast.reasons import NOTES
from optax_lossscale._gradients import check_scalar_loss, loss_of
from optax_lossscale._jaxprs import parts
from optax_lossscale._scaling import scale_up
from optax_lossscale._tree import in_half, is_argument, is_inexact, types_of
from optax_lossscale.diagnostics import _bits, _common
from optax_lossscale.diagnostics._trace.measure import statistics, twin
from optax_lossscale.diagnostics._trace.measure.bodies import Place
from optax_lossscale.diagnostics._trace.measure.interpreter import Interpreter
from optax_lossscale.diagnostics._trace.measure.rows import TapeRows
from optax_lossscale.diagnostics._trace.measure.tape import Tape, quiet
from optax_lossscale.diagnostics._trace.measure.twin import Pair
from optax_lossscale.diagnostics._trace.run import Outline, Run, depending_on

# How many characters of the types of arguments an error shows.
TYPES_SHOWN = 300


class Call(NamedTuple):
    """A call of a loss function as a function of arrays.

    Attributes:
      function: Returns the loss, of other arrays in place of these.
      arrays: The arrays of the arguments, the differentiated ones first.
      names: Their names.
      differentiated: How many are differentiated.
    """

    function: Callable[[Sequence[Any]], Any]
    arrays: list[Any]
    names: list[str]
    differentiated: int


def make_call(
    caller: str,
    loss_fn: Any,
    params: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    has_aux: Any,
) -> Call:
    """Makes a call of a loss function a function of its arrays.

    Args:
      caller: The name of the public function, for messages.
      loss_fn: The loss function.
      params: Its first argument.
      args: More arguments.
      kwargs: Its keyword arguments.
      has_aux: Whether it returns auxiliary data as well.

    Raises:
      TypeError: If `loss_fn` is no function, `has_aux` no boolean, an argument belongs
        to a transformation of JAX, or `params` has no floating-point array.
      ValueError: If an array was deleted, or is spread over several processes; if two
        are on different devices.
    """
    # The function inside of with_loss_scale: the scale comes from the state here.
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
    _check_devices(dict(zip(names, leaves, strict=True)))
    chosen = _differentiated(params, leaves)
    count = len(chosen)
    chosen |= {i: x for i, x in enumerate(leaves) if is_argument(x)}

    shown = {"params": params} | {f"args[{i}]": x for i, x in enumerate(args)} | named

    def function(arrays):
        given = dict(enumerate(leaves)) | dict(zip(chosen, arrays, strict=True))
        first, rest, keywords = jax.tree.unflatten(treedef, given.values())
        try:
            loss = loss_of(loss_fn(first, *rest, **keywords), has_aux)
        except Exception as error:
            text = ", ".join(f"{k}={types_of(x)}" for k, x in shown.items())
            text = textwrap.shorten(text, TYPES_SHOWN)
            error.add_note(f"{caller} called loss_fn({text}), traced as by jax.jit.")
            if "transform" in kwargs:
                error.add_note(f"{caller} needs no transform: leave it out.")
            raise
        check_scalar_loss(loss)
        return loss

    return Call(function, list(chosen.values()), [names[i] for i in chosen], count)


def _check_devices(leaves: dict[str, Any]) -> None:
    """Checks that all arrays are in this process, and on the same devices.

    Args:
      leaves: The leaves of the arguments by their names.
    """
    places: dict[Any, str] = {}
    for name, x in leaves.items():
        if isinstance(x, jax.Array):
            if not x.is_fully_addressable:
                raise ValueError(
                    f"{name} is spread over several processes. Pass arrays of one "
                    "process."
                )
            if x.committed:
                places.setdefault(frozenset(x.devices()), name)
    if len(places) > 1:
        (here, one), (there, other), *_ = places.items()
        raise ValueError(
            f"{one} is on {sorted(map(str, here))}, and {other} on "
            f"{sorted(map(str, there))}. Pass all arrays on the same devices."
        )


def _differentiated(params: Any, leaves: list[Any]) -> dict[int, Any]:
    """Returns the leaves that a training step differentiates, by their places.

    Args:
      params: The first argument.
      leaves: The leaves of all arguments, of which its own come first.
    """
    trained = enumerate(_models.are_trained(params))
    chosen = {i: leaves[i] for i, x in trained if x and is_inexact(leaves[i])}
    if not chosen:
        raise TypeError(
            "params must have a floating-point array to differentiate, got "
            f"{type(params).__name__} with none. If it is a model that is not a "
            "pytree, pass its parameters, and build the model in loss_fn."
        )
    return chosen


def gradients_of(call: Call) -> Callable[..., Any]:
    """Returns a function of a loss scale and arrays: the loss, the scaled gradients."""

    def program(scale, arrays):
        count = call.differentiated
        first, rest = arrays[:count], arrays[count:]

        def scaled(first):
            loss = call.function([*first, *rest])
            return scale_up(loss, scale), loss

        (_, loss), grads = jax.value_and_grad(scaled, has_aux=True)(first)
        return loss, grads

    return program


class Compiled(NamedTuple):
    """A compiled program.

    Attributes:
      run: Maps a loss scale and arrays to rows, losses, and norms of gradients.
      recorder: The sites of the rows.
      outline: What is known of the program before it runs.
    """

    run: Callable[..., Any]
    recorder: TapeRows
    outline: Outline


class Traced:
    """A call as a jaxpr that returns the loss and its scaled gradient.

    Attributes:
      dtype: The name of the dtype to judge.
      equations: All equations of the jaxpr.
      is_autocast: Whether `autocast` casts anything in it.
      is_idle: Whether it holds an `autocast` that casts nothing.
      reason: Why the outermost `autocast` casts nothing; "" if it does.
      computes_in_dtype: Whether anything computes in the dtype to judge.
    """

    def __init__(self, call: Call, dtype: Any):
        """Traces a call."""
        self.dtype = check.dtype("dtype", dtype)
        _bits.limits_of(self.dtype)  # Some have no zero.
        self._call = call
        token = NOTES.set(reasons := [])
        try:
            with DIAGNOSES(True):
                program, scale = gradients_of(call), jnp.float32(1)
                self._closed = jax.make_jaxpr(program)(scale, call.arrays)
        finally:
            NOTES.reset(token)
        self._constants = twin.constants_of(self._closed)
        self.reason = reasons[-1] if reasons else ""
        self.equations = list(parts.all_equations(self._closed.jaxpr))
        # A jaxpr from JAX's cache adds no reason, but holds the marks.
        marked = (x for x in self.equations if x.primitive.name == "name")
        marks = {x.params["name"] for x in marked}
        self.is_autocast, self.is_idle = MARK in marks, IDLE_MARK in marks
        results = (x.aval for equation in self.equations for x in equation.outvars)
        halves = {x.dtype.name for x in results if in_half(x)}
        self.computes_in_dtype = self.dtype in halves
        if halves and not self.computes_in_dtype:
            raise ValueError(
                f"Nothing computes in {self.dtype}, but the program computes in "
                f"{min(halves)}. Pass dtype={min(halves)!r}."
            )

    def with_arrays(self, arrays: Sequence[Any]) -> "Traced":
        """Returns the call of other arrays, which shares the compiled program."""
        self.program  # noqa: B018
        other = copy.copy(self)
        other._call = self._call._replace(arrays=list(arrays))
        return other

    def at(self, scale: float, rounds: bool = False) -> Run:
        """Runs the program at a loss scale.

        Args:
          scale: The loss scale.
          rounds: Whether to round the parameters and the data first.
        """
        program = self.program
        arrays = [*self._call.arrays, *self._constants]
        if rounds:
            arrays = [twin.rounded(x, self.dtype) for x in arrays]
        rows, losses, norms = program.run(jnp.float32(scale), *arrays)
        rows = program.recorder.with_beginnings(np.concatenate(rows))
        pairs = zip(program.recorder.sites, rows, strict=True)
        numbers = {site: statistics.numbers(row) for site, row in pairs}
        losses, norms = list(map(float, losses)), np.array(norms, float)
        return Run(program.outline, scale, numbers, losses, norms)

    @functools.cached_property
    def program(self) -> Compiled:
        """The program, which is compiled once."""
        jaxpr, count = self._closed.jaxpr, len(self._call.arrays)
        closed_over = range(len(jaxpr.constvars))
        names = [f"(array {i} that loss_fn closes over)" for i in closed_over]
        names = [*self._call.names, *names]
        arrays = [jnp.float32(1), *self._call.arrays, *self._constants]
        tape = Tape(list(map(jax.typeof, arrays)))
        recorder = TapeRows(tape.call)
        interpreter = Interpreter(jaxpr.invars[0])
        place = Place((), interpreter, recorder)
        with quiet():
            entrance = place._replace(phase="argument")
            scale, *inputs = map(Pair, tape.inputs)
            pairs = zip(names, inputs, strict=True)
            inputs = [interpreter.record(name, x, entrance) for name, x in pairs]
            values = [*inputs[count:], scale, *inputs[:count]]
            loss, *grads = interpreter.interpret(jaxpr, values, place)
            call = functools.partial(tape.call, statistics.norms, key=statistics.norms)
            norms = [call(x.real, x.in_float32) for x in grads]
            results = recorder.rows, (loss.real, loss.in_float32), norms
        _mark_backward(interpreter.sites)
        named = {x.site: name for x, name in zip(inputs, names, strict=True)}
        outline = Outline(
            dtype=self.dtype,
            sites=interpreter.sites,
            names=named,
            parameters=names[: self._call.differentiated],
            loss=loss.site,
            gradients=[x.site for x in grads],
            is_autocast=self.is_autocast,
        )
        return Compiled(tape.compiled(results), recorder, outline)


def _mark_backward(sites):
    """Marks the sites that depend on the loss scale as backward."""
    first = [k for k, x in sites.items() if x.phase in ("scale", "backward")]
    for k in depending_on(first, {k: x.inputs for k, x in sites.items()}):
        if sites[k].phase == "forward":
            sites[k].phase = "backward"
