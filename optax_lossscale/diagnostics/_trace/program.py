"""The program that computes the loss and its scaled gradient, and measures them."""

import functools
import itertools
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale._gradients import scaled_value_and_grad
from optax_lossscale._tree import is_inexact
from optax_lossscale.diagnostics._common import is_argument, named_leaves
from optax_lossscale.diagnostics._trace import equations
from optax_lossscale.diagnostics._trace.interpreter import Interpreter
from optax_lossscale.diagnostics._trace.statistics import Statistics
from optax_lossscale.diagnostics._trace.values import Key, Place, Site, Value

PATIENCE = 10  # Seconds before a line says that this takes long.


class Call(NamedTuple):
    """A call of a loss function, with its arrays apart from everything else.

    Attributes:
      loss_fn: The function.
      has_aux: Whether it returns auxiliary data as well.
      num_losses: How many losses it returns, or None.
      treedef: The structure of the arguments.
      leaves: The leaves of the arguments: params, args and kwargs.
      names: Their names.
      differentiated: The indices of the leaves to differentiate.
      arrays: The indices of the other arrays.
    """

    loss_fn: Callable[..., Any]
    has_aux: bool
    num_losses: int | None
    treedef: Any
    leaves: list[Any]
    names: list[str]
    differentiated: list[int]
    arrays: list[int]

    def __call__(self, parameters: Sequence[Any], arrays: Sequence[Any]) -> Any:
        """Calls the function with other arrays."""
        leaves = list(self.leaves)
        for i, x in zip(self.differentiated, parameters, strict=True):
            leaves[i] = x
        for i, x in zip(self.arrays, arrays, strict=True):
            leaves[i] = x
        params, args, kwargs = jax.tree.unflatten(self.treedef, leaves)
        return self.loss_fn(params, *args, **kwargs)

    def flat(self) -> list[Any]:
        """Returns the arrays, the differentiated ones first."""
        return [self.leaves[i] for i in (*self.differentiated, *self.arrays)]

    def flat_names(self) -> list[str]:
        """Returns the names of the arrays."""
        return [self.names[i] for i in (*self.differentiated, *self.arrays)]


def make_call(
    loss_fn: Callable[..., Any],
    params: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    has_aux: bool,
    num_losses: int | None,
) -> Call:
    """Takes a call apart.

    Raises:
      TypeError: If `params` has no floating-point array.
    """
    leaves, treedef = jax.tree.flatten((params, args, kwargs))
    names = [
        *_names(params, "params"),
        *(name for i, x in enumerate(args) for name in _names(x, f"args[{i}]")),
        *(name for key in sorted(kwargs) for name in _names(kwargs[key], key)),
    ]
    count = len(jax.tree.leaves(params))
    differentiated = [
        i for i in range(count) if is_inexact(leaves[i]) and not callable(leaves[i])
    ]
    if not differentiated:
        raise TypeError(
            "params must have a floating-point array to differentiate, got "
            f"{type(params).__name__} with none. If it is a model that is not a "
            "pytree, pass its parameters, and build the model in loss_fn."
        )
    for name, x in zip(names, leaves, strict=True):
        if isinstance(x, jax.Array) and x.is_deleted():
            raise ValueError(
                f"{name} was deleted: the step donated it (donate_argnums). Pass a "
                "copy that was made before the step."
            )
    chosen = set(differentiated)
    arrays = [i for i, x in enumerate(leaves) if is_argument(x) and i not in chosen]
    return Call(
        loss_fn, has_aux, num_losses, treedef, leaves, names, differentiated, arrays
    )


def _names(tree: Any, name: str) -> list[str]:
    return [key for key, x in named_leaves(tree, name).items() if x is not None]


class Program(NamedTuple):
    """A compiled program.

    Attributes:
      run: Maps a scale for each loss, f32[n], to keys, their statistics, and the losses
        with what they would be in float32, float64[n, 2].
      sites: By key, what it measures, in order of execution.
      before: See `Interpreter`.
      gradients: For each loss, the keys of the parameters' gradients.
      arguments: The names of the arguments, by key.
      parameters: The keys of those that are differentiated.
      compiled: The compiled program.
    """

    run: Callable[[Any], tuple[list[Key], Statistics, np.ndarray]]
    sites: dict[Key, Site]
    before: dict[Key, tuple[tuple[Key, ...], tuple[Key, ...]]]
    gradients: list[tuple[Key, ...]]
    arguments: dict[Key, str]
    parameters: set[Key]
    compiled: Any


class _Traced(NamedTuple):
    jaxpr: Any
    loss_scale: Any
    consts: list[Any]
    gradients: int


def _trace(call: Call, index: int | None) -> _Traced:
    """Traces the scaled gradient of one loss."""

    def loss_fn(parameters, arrays):
        out = call(parameters, arrays)
        if index is None:
            return out
        if not call.has_aux:
            return _pick(out, index, call.num_losses)
        if not isinstance(out, tuple | list) or len(out) != 2:
            raise TypeError("With has_aux=True loss_fn must return losses and aux.")
        return _pick(out[0], index, call.num_losses), out[1]

    def program(scale, parameters, arrays):
        function = scaled_value_and_grad(
            loss_fn, scale, call.has_aux, jax.value_and_grad
        )
        value, grads = function(parameters, arrays)
        return value[0] if call.has_aux else value, grads

    parameters = [call.leaves[i] for i in call.differentiated]
    arrays = [call.leaves[i] for i in call.arrays]
    with equations.lines_of_backward_rules():
        closed = jax.make_jaxpr(program)(jnp.float32(1), parameters, arrays)
    return _Traced(
        closed.jaxpr, closed.jaxpr.invars[0], list(closed.consts), len(parameters)
    )


def _pick(losses: Any, index: int, count: int | None) -> Any:
    if not isinstance(losses, tuple | list) or len(losses) != count:
        raise TypeError(
            f"There are {count} loss scales, so loss_fn must return a tuple or list of "
            f"{count} losses, got {jax.tree.map(jnp.shape, losses)}. If the state "
            "belongs to many members or devices, pass the state of one."
        )
    return losses[index]


def make_program(call: Call, dtype: str) -> tuple[Program, bool]:
    """Traces and compiles.

    Args:
      call: The call to follow.
      dtype: The dtype in question.

    Returns:
      The program; and whether it computes in `dtype`. If it does not, its statistics
      are those of numbers that should fit into it.
    """
    indices = [None] if call.num_losses is None else range(call.num_losses)
    traced = [_trace(call, index) for index in indices]
    computes = any(_computes_in(x.jaxpr, jnp.dtype(dtype)) for x in traced)
    judged = None if computes else jnp.dtype(dtype)
    known: dict[str, Any] = {}

    @jax.jit
    def run(zero, scales, arrays, consts):
        interpreter = Interpreter(zero, judged)
        recorder = interpreter.new_recorder()
        names = call.flat_names()
        arguments = [
            interpreter.argument((name,), x, recorder)
            for name, x in zip(names, arrays, strict=True)
        ]
        gradients, losses = [], []
        for i, part in enumerate(traced):
            names = (f"(array {j} that loss_fn closes over)" for j in itertools.count())
            constants = [
                interpreter.argument((i, name), x, recorder)
                for name, x in zip(names, consts[i], strict=False)
            ]
            scale = Value(scales[i], scales[i])
            found = interpreter.run(
                part.jaxpr,
                constants,
                [scale, *arguments],
                Place((i,)),
                recorder,
                part.loss_scale,
            )
            gradients.append(found[-part.gradients :])
            losses.append((found[0].real, found[0].shadow))
        known.update(interpreter=interpreter, gradients=gradients, keys=recorder)
        return recorder.finish(), losses

    arrays, consts = call.flat(), [x.consts for x in traced]
    arguments = (jnp.uint32(0), jnp.ones(len(traced), jnp.float32), arrays, consts)
    count = sum(_count(x.jaxpr) for x in traced)
    text = f"trace_numerics: compiling {count} operations, please wait ..."
    with jax.disable_jit(False), _Patience(text):
        compiled = run.lower(*arguments).compile(
            compiler_options={"xla_allow_excess_precision": False}
        )
    interpreter = known["interpreter"]

    def run_at(scales):
        scales = jnp.asarray(scales, jnp.float32)
        with jax.disable_jit(False), jax.debug_nans(False), jax.debug_infs(False):
            found = compiled(jnp.uint32(0), scales, arrays, consts)
        measured, losses = jax.device_get(found)
        return known["keys"].keys, measured, np.array(losses, np.float64)

    names = call.flat_names()[: len(call.differentiated)]
    program = Program(
        run=run_at,
        sites=interpreter.sites,
        before=interpreter.before,
        gradients=[
            tuple(key for x in found for key in x.keys) for found in known["gradients"]
        ],
        arguments={
            key: key[-1]
            for key, site in interpreter.sites.items()
            if site.phase == "argument"
        },
        parameters={(name,) for name in names},
        compiled=compiled,
    )
    return program, computes


def _computes_in(jaxpr: Any, dtype: Any) -> bool:
    return any(
        getattr(x.aval, "dtype", None) == dtype
        for equation in jaxpr.eqns
        for x in equation.outvars
    ) or any(
        _computes_in(inner, dtype)
        for equation in jaxpr.eqns
        for inner in equations.inner_jaxprs(equation)
    )


def _count(jaxpr: Any) -> int:
    inner = equations.inner_jaxprs
    return sum(1 + sum(map(_count, inner(e))) for e in jaxpr.eqns)


class _Patience:
    """Writes a line to stderr if something takes long."""

    def __init__(self, text: str):
        write = functools.partial(print, text, file=sys.stderr, flush=True)
        self._timer = threading.Timer(PATIENCE, write)

    def __enter__(self):
        self._timer.daemon = True
        self._timer.start()

    def __exit__(self, *_):
        self._timer.cancel()
