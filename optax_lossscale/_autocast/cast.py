"""`autocast`: a float32 function computes in half precision."""

import contextlib
import functools
import inspect
import itertools
import operator
import reprlib
import types
from collections.abc import Callable, Collection
from typing import Any, Literal, Protocol, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from optax_lossscale import _check as check
from optax_lossscale._autocast import reasons
from optax_lossscale._autocast.choices import Chooser, Float32, Lines, choices_of
from optax_lossscale._autocast.evaluate import DIAGNOSES, IDLE_MARK, MARK, evaluate
from optax_lossscale._autocast.plan import plan_call, state_of_array
from optax_lossscale._autocast.roles import is_traced, roles_of_call
from optax_lossscale._jaxprs import parts
from optax_lossscale._models import Model, hint_of_trace, is_mutable
from optax_lossscale._tree import (
    Args,
    Out,
    Template,
    is_argument,
    split_arrays,
)
from optax_lossscale._warn import warn

USAGE = (
    "Write loss_fn = autocast(loss_fn, dtype=jnp.float16), or @autocast above the "
    "function."
)


class _Scalar(Protocol):
    """A dtype as JAX writes it: `jnp.float16`."""

    @property
    def dtype(self) -> np.dtype[Any]: ...


Dtype = Literal["float16", "bfloat16", "float32"] | np.dtype[Any] | type[Any] | _Scalar


@overload
def autocast(
    fun: Callable[Args, Out],
    dtype: Dtype = jnp.float16,
    *,
    float32: Float32 | Lines | Collection[Float32] = (),
) -> Callable[Args, Out]: ...
@overload
def autocast(
    fun: None = None,
    dtype: Dtype = jnp.float16,
    *,
    float32: Float32 | Lines | Collection[Float32] = (),
) -> Callable[[Callable[Args, Out]], Callable[Args, Out]]: ...
def autocast(
    fun: Callable[..., Any] | None = None,
    dtype: Dtype = jnp.float16,
    *,
    float32: Float32 | Lines | Collection[Float32] = (),
) -> Callable[..., Any]:
    """Makes a float32 function compute in half precision where that is fast and safe.

    Matrix products and convolutions compute in `dtype`, also in the backward pass, and
    operations that add, multiply or move their results keep that dtype. Combined with
    an array of yours, they are float32, as in PyTorch, but for parts of layers: biases
    and gains, which are parameters, masks, and the statistics of norms. Sums, squares,
    exp, log, roots, divisions and differences compute in float32, also in the backward
    pass: gradients of biases are sums. So do operations with constants that `dtype`
    cannot hold, and operations that `autocast` does not know, such as kernels. Nothing
    in the function or in a library that it calls has to change.

    The result is an ordinary function of float32: arguments, results and gradients have
    the dtypes and the structure that they have without `autocast`. Inside of it
    everything looks like float32. `precision="highest"` and dtypes other than float32
    stay as they are.

    Each call traces `fun`, so compile the training step with `jax.jit`. For float16,
    use it with `LossScaleOptimizer`, since float16 gradients vanish without a scale.

    Args:
      fun: A function of arrays in any pytrees, for example a loss function. Other
        leaves are static. The parameters are the arrays of the first argument that
        has any: of the model itself in `autocast(model)(x)`, of the object of a method,
        of `params` in `functools.partial(apply, params)`. Those of Flax nnx modules
        are parameters anywhere, and other arrays then are data. Flax nnx modules may be
        arguments, and changes of their variables come back. It may close over arrays,
        but not over a module that it changes. If it is an `autocast` already, its
        `dtype` changes, and `float32` is added to it. Without `fun` the result is a
        decorator: `@autocast(dtype=jnp.bfloat16)`.
      dtype: The dtype to compute in: float16 or bfloat16; or float32, which returns
        the function as it is.
      float32: Code to keep in float32, with its derivative; one or several. A function,
        a class or a method: all that runs inside of it, also in a library. The name of
        a `jax.named_scope`, or of a module that names its scope, as Flax and Haiku do:
        "encoder/attention". A line, "file.py:123", where the path may be the end of a
        path and the innermost line of your code counts; or the result of
        `diagnostics.float32_lines`.

    Returns:
      A function with the arguments and the results of `fun`.

    Raises:
      TypeError: If `fun` is no function, or `float32` holds something else.
      ValueError: If `dtype` is something else.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import optax
      >>> from optax_lossscale import LossScaleOptimizer, autocast
      >>> @autocast
      ... def loss_fn(params, x, y):
      ...     return jnp.mean((jax.nn.relu(x @ params["w"]) - y) ** 2)
      >>> params = {"w": jnp.ones((4, 2))}
      >>> optimizer = LossScaleOptimizer(optax.sgd(0.1))
      >>> state = optimizer.init(params)
      >>> x, y = jnp.ones((8, 4)), jnp.ones((8, 2))
      >>> params, state, loss = optimizer.minimize(loss_fn, params, state, x, y)
      >>> print(loss, params["w"].dtype)
      9.0 float32

      The matrix product is float16, the mean of squares is not:

      >>> program = str(jax.make_jaxpr(loss_fn)(params, x, y))
      >>> "f16[8,2] = dot_general" in program, "f32[] = reduce_sum" in program
      (True, True)
    """
    if fun is None:
        return _Decorator(autocast, dtype=dtype, float32=float32)
    if isinstance(fun, type) and hasattr(fun, "dtype"):  # jnp.float16.
        raise TypeError(f"fun must be a function, got {fun!r}. {USAGE}")
    check.function("fun", fun, USAGE)
    name = _name_of(dtype)
    choices: Any = choices_of(float32)
    if (inner := function_of(fun)) is not None:
        fun, choices = inner, [*vars(fun)["float32"], *choices]
    given: Any = fun
    if name == "float32":
        return given
    written, held = _opened(given)

    told: list[str] = []  # It warns once.
    of = getattr(fun, "__name__", "the function")

    @functools.wraps(given, updated=())
    def cast(*args, **kwargs):
        def flat(*arrays):
            (args, kwargs), changes = model.copies(join(arrays))
            out = written(*args, **kwargs)
            return results.take((out, changes()))

        _name_like(flat, given)
        results = Template(lambda x: isinstance(x, jax.Array))
        with Model((*held, *args), kwargs) as model:
            arrays, join = split_arrays(model.arrays, is_traced)
            with hint_of_trace():
                closed = parts.traced(flat, *arrays)
            arrays = list(map(jnp.asarray, arrays))
            named = {"args": args, "kwargs": kwargs}
            roles = roles_of_call((*held, *args), kwargs, len(arrays))
            asks = not told or DIAGNOSES.value
            arrays, reason = _computed(
                closed, arrays, roles, name, choices, named, asks
            )
            if (notes := reasons.NOTES.get()) is not None:
                notes.append(f"{reason}." if reason else "")
            if DIAGNOSES.value:
                mark = IDLE_MARK if reason else MARK
                arrays = [checkpoint_name(x, mark) for x in arrays]
            if reason and not told:
                told.append(reason)
                warn(f"autocast computes nothing of {of} in {name}: {reason}.")
            out, changes = results.fill(arrays)
            _check_result(of, out)
            model.write_changes(changes)
        return out

    # A wrapper of it also gets this, but is another function.
    vars(cast)["autocast"] = cast
    vars(cast)["float32"] = choices
    inner = getattr(fun, "without_scale", None)  # The function in `with_loss_scale`.
    if inner is not None:
        vars(cast)["without_scale"] = autocast(inner, dtype, float32=choices)
    return cast


class _Decorator(functools.partial):
    """`autocast` without a function."""

    def __enter__(self):
        raise TypeError(
            f"autocast is no context manager: it traces a function. {USAGE}"
        )

    __exit__ = __enter__


def function_of(fun: Any) -> Any:
    """Returns the function of `autocast(function)`; None if it is something else."""
    if isinstance(fun, types.MethodType):
        written = function_of(fun.__func__)
        return written and types.MethodType(written, fun.__self__)
    is_cast = getattr(fun, "autocast", object()) is fun
    return fun.__wrapped__ if is_cast else None


def _opened(fun: Any) -> tuple[Any, tuple[Any, ...]]:
    """Returns a function, and its first arguments: those that `fun` holds."""
    if isinstance(fun, functools.partial):
        function, held = _opened(fun.func)
        return functools.partial(function, **fun.keywords), (*held, *fun.args)
    if isinstance(fun, types.MethodType):
        return fun.__func__, (fun.__self__,)
    is_model = is_mutable(fun) or not jax.tree_util.all_leaves([fun])
    return (operator.call, (fun,)) if is_model else (fun, ())


def _name_of(dtype: Any) -> str:
    """Returns the name of a dtype to compute in."""
    names = [x.name for x in map(jnp.dtype, ("float16", "bfloat16", "float32"))]
    is_value = dtype is None or isinstance(dtype, jax.Array | np.ndarray | np.generic)
    with contextlib.suppress(TypeError):
        if not is_value and (name := jnp.dtype(dtype).name) in names:
            return name
    raise ValueError(
        f"dtype must be float16, bfloat16 or float32, got {reprlib.repr(dtype)}."
    )


def _name_like(function: Any, fun: Any) -> None:
    """Gives a function the name and the line of the user's, for the errors of JAX."""
    # Those of the arguments would be wrong: it takes their arrays.
    function.__signature__ = inspect.signature(function)
    while isinstance(fun, functools.partial):
        fun = fun.func
    fun = inspect.unwrap(fun)
    function.__wrapped__ = fun if hasattr(fun, "__code__") else type(fun).__call__


def _check_result(of: str, out: Any) -> None:
    """Raises an error if an object in a result holds an array that is no result."""
    for x in itertools.filterfalse(is_argument, jax.tree.leaves(out)):
        if any(map(parts.has_ended, jax.tree.leaves(getattr(x, "__dict__", None)))):
            raise TypeError(
                f"{of} returns {type(x).__qualname__}, which holds arrays, but is no "
                "pytree. Register it, as by jax.tree_util.register_dataclass, or "
                "return the arrays in a tuple or a dict."
            )


def _computed(closed, arrays, roles, dtype, choices, called_with, asks):
    """Returns the results in half precision; and if asked, why no product is in it."""
    is_chosen = Chooser(choices)
    planner, plan = plan_call(closed, roles, dtype, is_chosen if choices else None)
    outputs = tuple(map(state_of_array, closed.jaxpr.outvars))
    results = evaluate(planner, plan, arrays, outputs, is_saved=True)
    is_chosen.warn_of_unmatched(plan.program)
    reason = reasons.reason(plan, called_with, is_chosen, dtype) if asks else None
    # Known values are no arrays yet.
    return list(map(jnp.asarray, results)), reason
