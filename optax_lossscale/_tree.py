"""Trees of arrays: which leaves are arrays, their dtypes, selection between trees."""

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

# The user's types: a tree, such as the parameters; the arguments of a function, and its
# result, such as a loss, or a loss with auxiliary data.
Tree = TypeVar("Tree")
Args = ParamSpec("Args")
Out = TypeVar("Out")


# A tuple, which `isinstance` takes faster than a union: eager steps ask it often.
ARRAYS = (jax.Array, np.ndarray, np.generic)


def is_float0(leaf: Any) -> bool:
    """Whether `leaf` is a float0 array, JAX's empty gradient of an integer."""
    return getattr(leaf, "dtype", None) == jax.dtypes.float0


def is_array(leaf: Any) -> bool:
    """Whether `leaf` is an array of numbers or PRNG keys."""
    return isinstance(leaf, ARRAYS) and not is_float0(leaf)


def is_argument(leaf: Any) -> bool:
    """Whether `leaf` is an array that a compiled function can take as an argument."""
    if isinstance(leaf, np.ndarray | np.generic):
        return jnp.issubdtype(leaf.dtype, jnp.number) or leaf.dtype == bool
    return isinstance(leaf, jax.Array)


def is_key(leaf: Any) -> bool:
    """Whether `leaf` is an array of PRNG keys."""
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def unbox(value: Any) -> jax.Array:
    """Returns the array in a box, such as a variable of Flax nnx."""
    (array,) = jax.tree.leaves(value)
    return array


def has_gradient(leaf: Any) -> bool:
    """Whether `leaf` is a float or complex array of JAX; NumPy's are constants."""
    return isinstance(leaf, jax.Array) and is_inexact(leaf)


def split_arrays(
    tree: Any, is_chosen: Callable[[Any], bool] = is_array
) -> tuple[list[jax.Array], Callable[[Sequence[Any]], Any]]:
    """Returns the arrays of a tree, and a function that puts others in their places."""
    leaves, treedef = jax.tree.flatten(tree)
    # None is no leaf, so it can mark the arrays. `join` must not hold them: they may be
    # tracers of a trace that has ended.
    constants = [None if is_chosen(x) else x for x in leaves]

    def join(arrays):
        rest = iter(arrays)
        return treedef.unflatten([next(rest) if x is None else x for x in constants])

    return [x for x in leaves if is_chosen(x)], join


class Template:
    """The structure of a tree, and its leaves that are not arrays.

    A function that JAX traces can return only arrays. So it returns those of `take`,
    and `fill` puts the results of JAX in their places. A nonlocal variable in place of
    the template would keep the tracers of the last trace.
    """

    def __init__(self, is_chosen: Callable[[Any], bool] = is_array):
        """Makes an empty template.

        Args:
          is_chosen: Whether a leaf counts as an array.
        """
        self._is_chosen, self._is_filled = is_chosen, True

    def take(self, tree: Any) -> list[jax.Array]:
        """Returns the arrays of a tree, and keeps the rest.

        Raises:
          RuntimeError: If `fill` was not called since the last `take`, whose tree
            would be lost.
        """
        if not self._is_filled:
            raise RuntimeError("JAX has traced a function twice that it traces once.")
        self._is_filled = False
        arrays, self._join = split_arrays(tree, self._is_chosen)
        return arrays

    def fill(self, arrays: Sequence[Any]) -> Any:
        """Returns the last tree of `take`, with other arrays."""
        self._is_filled = True
        return self._join(arrays)


def is_inexact(leaf: Any) -> bool:
    """Whether `leaf` is a float or complex array or Python number."""
    dtype = getattr(leaf, "dtype", None)
    if dtype is None:
        return isinstance(leaf, float | complex)
    return jnp.issubdtype(dtype, jnp.inexact)


def is_inexact_array(leaf: Any) -> bool:
    """Whether `leaf` is a float or complex array, of JAX or NumPy."""
    return is_array(leaf) and is_inexact(leaf)


@functools.cache
def is_half(dtype: Any) -> bool:
    """Whether a dtype is a floating-point one of at most 16 bits."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits <= 16


def in_half(x: Any) -> bool:
    """Whether an array, or its type, is in half precision."""
    return hasattr(x, "dtype") and is_half(x.dtype)


def is_float32_scalar(leaf: Any) -> bool:
    """Whether `leaf` is an array f32[]."""
    return (np.shape(leaf), getattr(leaf, "dtype", None)) == ((), jnp.float32)


def types_of(tree: Any) -> Any:
    """Replaces each leaf by its type, for error messages."""

    def type_of(x):
        is_array = hasattr(x, "dtype") and not isinstance(x, type)  # jnp.float16 is one
        return jax.typeof(x) if is_array else type(x).__name__

    return jax.tree.map(type_of, tree)


def map_named(function: Callable[[Any, Any], Any], name: str, tree: Any) -> Any:
    """Calls `function(path, node)` for nodes of this name; the rest stays as it is."""

    def is_named(path, _):
        return bool(path) and jax.tree_util.keystr(path[-1:], simple=True) == name

    return jax.tree.map_with_path(
        lambda path, x: function(path, x) if is_named(path, x) else x,
        tree,
        is_leaf=is_named,
        is_leaf_takes_path=True,
    )


def classes_of(library: str, *names: str) -> tuple[type, ...]:
    """Returns classes of a library; none if it is not imported."""
    module = sys.modules.get(library)
    # Another thread may be importing it.
    return tuple(getattr(module, x) for x in names if hasattr(module, x))


def nodes_of(classes: Any, tree: Any) -> list[Any]:
    """Returns the outermost nodes of a tree that are instances of these classes."""

    def is_wanted(node):
        return isinstance(node, classes)

    return list(filter(is_wanted, jax.tree.leaves(tree, is_leaf=is_wanted)))


def inexact_leaves(tree: Any) -> list[jax.Array]:
    """Returns the floating-point and complex leaves of a tree, as arrays."""
    return [jnp.asarray(x) for x in jax.tree.leaves(tree) if is_inexact(x)]


def zero_update(like: Any) -> Any:
    """Returns an update without effect, with the shape and dtype of `like`."""
    if is_float0(like):
        return np.zeros(like.shape, jax.dtypes.float0)
    # Minus zero: x + -0.0 is x for every x, but -0.0 + 0.0 is 0.0.
    value = -0.0 if is_inexact(like) else 0
    is_shape = isinstance(like, jax.ShapeDtypeStruct)
    return (lax.full_like if is_shape else filled_like)(like, value)


@functools.partial(jax.jit, static_argnums=1, inline=True)
def filled_like(like: Any, value: float) -> jax.Array:
    """As `lax.full_like`; compiled, so that an eager call transfers no constant."""
    return lax.full_like(like, value)


def strongly_typed(tree: Any) -> Any:
    """Converts Python numbers and NumPy arrays to JAX arrays of strong types.

    The first update would lose a weak type, and jit would trace a second time.
    """

    def strong(leaf):
        others = bool | int | float | complex | np.ndarray | np.generic
        if isinstance(leaf, others) and not is_float0(leaf):
            leaf = jnp.asarray(leaf)
        if not is_array(leaf) or not getattr(leaf, "weak_type", False):
            return leaf
        return lax.convert_element_type(leaf, leaf.dtype)

    return jax.tree.map(strong, tree)


def difference(got: Any, wanted: Any) -> str:
    """Describes where two trees differ in structure or shapes; "" if they do not."""

    def leaf(path, x, y):
        if np.shape(x) != np.shape(y):
            place = jax.tree_util.keystr(path)
            raise ValueError(f"{place} is of shape {np.shape(x)}, not {np.shape(y)}.")

    try:
        jax.tree.map_with_path(leaf, got, wanted)
        # Until here, `got` may have a leaf where `wanted` has a subtree.
        jax.tree.map(lambda *_: None, wanted, got)
    except ValueError as error:
        return str(error)
    return ""


def cast_like(tree: Any, like: Any) -> Any:
    """Gives the leaves of `tree` the dtypes of `like`, strongly typed.

    Leaves of `like` that are not arrays are constants: the result keeps them.
    """

    def cast(new, old):
        return lax.convert_element_type(new, old.dtype) if is_array(old) else old

    return jax.tree.map(cast, tree, like)


def select(pred: jax.Array, on_true: Any, on_false: Any) -> Any:
    """Selects between trees; leaves that are not arrays are constants."""
    leaves, treedef = jax.tree.flatten(on_true)
    others = treedef.flatten_up_to(on_false)
    arrays = {i: x for i, x in enumerate(leaves) if is_array(x)}
    chosen = [others[i] for i in arrays]
    selected = in_one_program(_select, pred, [*arrays.values()], chosen)
    arrays = dict(zip(arrays, selected, strict=True))
    return treedef.unflatten([arrays.get(i, x) for i, x in enumerate(leaves)])


def in_one_program(
    function: Callable[..., list[jax.Array]], scalar: jax.Array, *lists: list[jax.Array]
) -> list[jax.Array]:
    """Calls a compiled function of lists, so that an eager call is fast.

    It is called for each array where arrays lie on different devices.
    """
    concrete = (x for x in lists[0] if not isinstance(x, Tracer))
    if len({frozenset(x.devices()) for x in concrete if isinstance(x, jax.Array)}) < 2:
        return function(scalar, *lists)
    each = zip(*lists, strict=True)
    return [y for arrays in each for y in function(scalar, *([x] for x in arrays))]


@functools.partial(jax.jit, inline=True)
def _select(
    pred: jax.Array, on_true: list[jax.Array], on_false: list[jax.Array]
) -> list[jax.Array]:
    def leaf(x, y):
        if is_key(x):
            # The step has used a copy of the old key: jax_debug_key_reuse would raise.
            clone = jax.random.clone
            return clone(lax.select(pred, clone(x), clone(y)))
        return lax.select(pred, x, y)

    return list(map(leaf, on_true, on_false))
