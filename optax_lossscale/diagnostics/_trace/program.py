"""The program that computes the loss and its scaled gradient, and measures them."""

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale._gradients import loss_of
from optax_lossscale._scaling import scale_up
from optax_lossscale._tree import is_inexact
from optax_lossscale.diagnostics._trace import equations
from optax_lossscale.diagnostics._trace.interpreter import Interpreter
from optax_lossscale.diagnostics._trace.statistics import Recorder, Statistics, norms
from optax_lossscale.diagnostics._trace.values import Key, Place, Site, Value

PATIENCE = 10  # Seconds before a line says that this takes long.


class Call(NamedTuple):
    """A call of a loss function, with its arrays apart from everything else.

    Attributes:
      function: Returns the loss of other arrays in place of these.
      arrays: The arrays, the differentiated ones first.
      names: Their names.
      differentiated: How many of them are differentiated.
    """

    function: Callable[[Sequence[Any]], Any]
    arrays: list[Any]
    names: list[str]
    differentiated: int


def make_call(
    loss_fn: Callable[..., Any],
    params: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    has_aux: bool,
) -> Call:
    """Takes a call apart.

    Raises:
      TypeError: If `params` has no floating-point array.
      ValueError: If an array was deleted.
    """
    paths, treedef = jax.tree.flatten_with_path((params, args, kwargs))
    names, leaves = [_name(path) for path, _ in paths], [x for _, x in paths]
    for name, x in zip(names, leaves, strict=True):
        if isinstance(x, jax.Array) and x.is_deleted():
            raise ValueError(
                f"{name} was deleted: the step donated it (donate_argnums). Pass a "
                "copy that was made before the step."
            )
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
    others = set(range(len(leaves))) - set(differentiated)
    chosen = [*differentiated, *(i for i in sorted(others) if _is_argument(leaves[i]))]

    def function(arrays):
        given = list(leaves)
        for i, x in zip(chosen, arrays, strict=True):
            given[i] = x
        params, args, kwargs = jax.tree.unflatten(treedef, given)
        return loss_of(loss_fn(params, *args, **kwargs), has_aux)

    arrays, names = [leaves[i] for i in chosen], [names[i] for i in chosen]
    return Call(function, arrays, names, len(differentiated))


def _is_argument(x: Any) -> bool:
    """Whether `x` is an array that a compiled function can take as an argument."""
    if isinstance(x, np.ndarray | np.generic):
        return jnp.issubdtype(x.dtype, jnp.number) or x.dtype == bool
    return isinstance(x, jax.Array)


def _name(path: Any) -> str:
    """Returns the name of a leaf: params['w'], args[0], or the keyword."""
    (part, *rest), keystr = path, jax.tree_util.keystr
    if part.idx < 2:
        return ("params", "args")[part.idx] + keystr(tuple(rest))
    return rest[0].key + keystr(tuple(rest[1:]))


class Program(NamedTuple):
    """A compiled program.

    Attributes:
      run: Maps a loss scale to the statistics of everything in `keys`; to the loss, and
        what it would be in float32; and to the norms of each gradient, f32[n, 4]: see
        `statistics.norms`.
      keys: The keys of the statistics.
      sites: By key, what was measured, in order of execution.
      before: See `Interpreter`.
      parameters: The keys of the parameters that are differentiated.
      loss: The keys of the loss.
      gradients: For each of them, the keys of its gradient.
      judged: The dtype that all numbers should fit into; None if the program computes
        in the dtype in question.
      compiled: The compiled program.
      closed: The jaxpr that it follows.
    """

    run: Callable[[float], tuple[Statistics, list[float], Any]]
    keys: list[Key]
    sites: dict[Key, Site]
    before: dict[Key, tuple[tuple[Key, ...], tuple[Key, ...]]]
    parameters: list[Key]
    loss: tuple[Key, ...]
    gradients: list[tuple[Key, ...]]
    judged: str | None
    compiled: Any
    closed: Any


def _trace(call: Call) -> Any:
    """Returns the closed jaxpr of the loss and of its scaled gradient."""

    def program(scale, parameters, others):
        def scaled(parameters):
            loss = call.function([*parameters, *others])
            return scale_up(loss, scale), loss

        (_, loss), grads = jax.value_and_grad(scaled, has_aux=True)(parameters)
        return loss, grads

    n = call.differentiated
    return jax.make_jaxpr(program)(jnp.float32(1), call.arrays[:n], call.arrays[n:])


def make_program(call: Call, dtype: str) -> Program:
    """Traces and compiles.

    Args:
      call: The call to follow.
      dtype: The dtype in question.
    """
    closed = _trace(call)
    jaxpr, consts = closed.jaxpr, list(closed.consts)
    followed = list(equations.all_equations(jaxpr))
    results = (x.aval for equation in followed for x in equation.outvars)
    computes = any(getattr(x, "dtype", None) == jnp.dtype(dtype) for x in results)
    judged = None if computes else jnp.dtype(dtype)
    constants = [f"(array {j} that loss_fn closes over)" for j in range(len(consts))]
    known: dict[str, Any] = {}

    def run(zero, scale, arrays, consts):
        interpreter = Interpreter(zero, loss_scale=jaxpr.invars[0])
        place = Place((), Recorder(judged))
        outside = place._replace(phase="argument")
        names, inputs = [*call.names, *constants], [*arrays, *consts]
        values = [
            interpreter.measure((name,), Value(x), outside)
            for name, x in zip(names, inputs, strict=True)
        ]
        n = len(arrays)
        variables = [*values[n:], Value(scale), *values[:n]]
        loss, *gradients = interpreter.run(jaxpr, variables, place)
        statistics = place.recorder.finish()
        known.update(
            keys=place.recorder.keys,
            sites=interpreter.sites,
            before=interpreter.before,
            loss=loss.keys,
            gradients=[x.keys for x in gradients],
        )
        found = [norms(x.real, x.shadow, judged) for x in gradients]
        return statistics, (loss.real, loss.shadow), jnp.stack(found)

    def arguments(scale):
        return jnp.uint32(0), jnp.float32(scale), call.arrays, consts

    compiled = compile_function(run, arguments(1), len(followed))

    @functools.cache
    def run_at(scale):
        statistics, losses, sizes = run_quietly(compiled, arguments(scale))
        return statistics, [float(x) for x in losses], sizes.astype(float)

    return Program(
        run=run_at,
        closed=closed,
        parameters=[(name,) for name in call.names[: call.differentiated]],
        judged=judged and judged.name,
        compiled=compiled,
        **known,
    )


def compile_function(
    function: Callable[..., Any], arguments: tuple[Any, ...], count: int
) -> Any:
    """Compiles a function that rounds as its program says.

    Args:
      function: The function.
      arguments: Arguments, for their shapes and dtypes.
      count: The number of operations in it.
    """
    text = f"Compiling {count} operations, please wait ..."
    with jax.disable_jit(False), _patience(text):
        return (
            jax.jit(function)
            .lower(*arguments)
            .compile(compiler_options={"xla_allow_excess_precision": False})
        )


def run_quietly(compiled: Any, arguments: tuple[Any, ...]) -> Any:
    """Returns the results on the host; inf and nan raise no errors."""
    with jax.disable_jit(False), jax.debug_nans(False), jax.debug_infs(False):
        return jax.device_get(compiled(*arguments))


@contextlib.contextmanager
def _patience(text: str) -> Iterator[None]:
    """Writes a line to stderr if something takes long."""
    write = functools.partial(print, text, file=sys.stderr, flush=True)
    timer = threading.Timer(PATIENCE, write)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
