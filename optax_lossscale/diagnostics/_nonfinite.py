"""Which gradients were not finite, by name."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale._state import find_state, unbox
from optax_lossscale._tree import is_inexact
from optax_lossscale.diagnostics._common import check_host, named_leaves

LeafStatistics = Any
KINDS = ("finite", "inf", "nan")


class NonfiniteLeaf(NamedTuple):
    """A parameter whose gradients were not finite in some steps.

    Attributes:
      name: Its key path, `params['block_3']['attn']['kernel']` for example.
      last: What its gradient held in the last non-finite step: "inf", "nan" (perhaps
        with inf), or "finite" if only other gradients were not finite.
      inf_steps: The number of steps so far in which it held inf, but no nan.
      nan_steps: The number of steps so far in which it held nan.

    Examples:
      >>> from optax_lossscale.diagnostics import NonfiniteLeaf
      >>> print(NonfiniteLeaf("params['w']", "inf", inf_steps=3, nan_steps=1))
      params['w']: inf in 3 steps, nan in 1, most recently inf
    """

    name: str
    last: str
    inf_steps: int
    nan_steps: int

    def __str__(self):
        counts = f"inf in {self.inf_steps} steps, nan in {self.nan_steps}"
        return f"{self.name}: {counts}, most recently {self.last}"


def nonfinite_leaves(state: Any, params: Any) -> list[NonfiniteLeaf]:
    """Names the parameters that have had non-finite gradients so far.

    It needs `LossScaleOptimizer(..., track_leaves=True)`. Call it on the host, and only
    now and then: it waits for the state.

    The names do not tell the cause if several leaves are not finite at once. An inf in
    the forward pass can reach every parameter, and one in the backward pass every
    parameter whose gradient is computed after it, in the layers nearer to the input.
    `trace_numerics` names the operation where it began, and its line.

    Args:
      state: The state after a step; a pytree that holds one
        `LossScaleOptimizerState`. If it belongs to many members (`jax.vmap`) or
        devices (`jax.pmap`), each leaf is reported as in the worst of them.
      params: The parameters, for their names: a tree like the one that `init` got.

    Returns:
      A `NonfiniteLeaf` for each of them, the most frequent first. Its `last` is
      "finite" unless its gradient was among the non-finite ones of the last such step.

    Raises:
      ValueError: If `state` holds no such state, several, or one without statistics;
        if `params` has more or fewer leaves than `init` got.
      TypeError: Under a transformation of JAX, such as `jax.jit`.

    Examples:
      >>> import jax.numpy as jnp
      >>> import optax
      >>> from optax_lossscale import LossScaleOptimizer, diagnostics
      >>> optimizer = LossScaleOptimizer(optax.sgd(0.1), track_leaves=True)
      >>> params = {"dense": {"b": jnp.zeros(2), "w": jnp.ones(2)}}
      >>> state = optimizer.init(params)
      >>> grads = {"dense": {"b": jnp.ones(2), "w": jnp.array([1.0, jnp.inf])}}
      >>> _, state = optimizer.update(grads, state, params)
      >>> for leaf in diagnostics.nonfinite_leaves(state, params):
      ...     print(leaf)
      params['dense']['w']: inf in 1 steps, nan in 0, most recently inf
    """
    statistics = find_state(state).leaf_statistics
    if statistics is None:
        raise ValueError(
            "state has no statistics of leaves: create the optimizer with "
            "track_leaves=True. (describe_nonfinite(grads) works without them.)"
        )
    return read_statistics(statistics, leaf_names(params))


def leaf_names(params: Any) -> list[str]:
    """Returns the names of the parameters that are differentiated."""
    return list(named_leaves(params, "params"))


def read_statistics(
    statistics: LeafStatistics, names: list[str] | None
) -> list[NonfiniteLeaf]:
    """Copies statistics to the host; without names, the leaves are numbered."""
    check_host("nonfinite_leaves", statistics)
    fields = jax.device_get([unbox(field) for field in statistics])
    # The worst of the members or devices, if there are any; zero if there are none.
    last, inf_steps, nan_steps = (
        x.max(tuple(range(x.ndim - 1)), initial=0) for x in fields
    )
    if names is None:
        names = [f"leaf {i}" for i in range(len(last))]
    if len(names) != len(last):
        raise ValueError(
            f"params must have the {len(last)} leaves that the optimizer's init got, "
            f"but has {len(names)}. Inside optax.masked and optax.partition, init got "
            "optax.MaskedNode() in place of the other leaves."
        )
    kinds = (KINDS[kind] for kind in last)
    counts = (inf_steps.tolist(), nan_steps.tolist())
    leaves = map(NonfiniteLeaf, names, kinds, *counts)
    found = [leaf for leaf in leaves if leaf.inf_steps or leaf.nan_steps]
    return sorted(found, key=lambda leaf: -leaf.inf_steps - leaf.nan_steps)


class NonfiniteGradient(NamedTuple):
    """A gradient that is not finite.

    Attributes:
      name: Its key path, `grads['w']` for example.
      shape: Its shape.
      dtype: The name of its dtype.
      infs: How many of its numbers are inf or -inf.
      nans: How many are nan.
      first: The index of the first number that is not finite.

    Examples:
      >>> from optax_lossscale.diagnostics import NonfiniteGradient
      >>> print(NonfiniteGradient("grads['w']", (2, 3), "float16", 2, 0, (0, 1)))
      grads['w'], float16[2,3]: 2 inf, 0 nan of 6, first at [0, 1]
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    infs: int
    nans: int
    first: tuple[int, ...]

    def __str__(self):
        shape = ",".join(map(str, self.shape))
        size = int(np.prod(self.shape))
        first = f", first at {list(self.first)}" if self.shape else ""
        counts = f"{self.infs} inf, {self.nans} nan of {size}"
        return f"{self.name}, {self.dtype}[{shape}]: {counts}{first}"


def describe_nonfinite(grads: Any) -> list[NonfiniteGradient]:
    """Names the gradients of a tree that are not finite, and counts inf and nan.

    Call it on the host, with any tree. It needs no optimizer and no state.

    As with `nonfinite_leaves`, several names at once do not tell the cause, because an
    inf spreads towards the input. `trace_numerics` names the operation where it began.

    Args:
      grads: Gradients, scaled or not; any pytree. Leaves that are not floating-point
        or complex are ignored.

    Returns:
      A `NonfiniteGradient` for each leaf that is not finite, in the order of the
      tree. A complex number with an inf and a nan counts as nan.

    Raises:
      TypeError: Under a transformation of JAX, such as `jax.jit`.

    Examples:
      >>> import jax.numpy as jnp
      >>> from optax_lossscale import diagnostics
      >>> w = jnp.array([[1.0, jnp.inf], [jnp.nan, 0.0]], jnp.float16)
      >>> grads = {"b": jnp.ones(2), "w": w}
      >>> for gradient in diagnostics.describe_nonfinite(grads):
      ...     print(gradient)
      grads['w'], float16[2,2]: 1 inf, 1 nan of 4, first at [0, 1]
    """
    leaves = named_leaves(grads, "grads")
    named = [(name, jnp.asarray(x)) for name, x in leaves.items() if is_inexact(x)]
    check_host("describe_nonfinite", [x for _, x in named])
    # Leaf by leaf: leaves of the same shape share one compiled program.
    counts = jax.device_get([_count(x) for _, x in named])
    found = []
    for (name, x), numbers in zip(named, counts, strict=True):
        infs, nans, first = map(int, numbers)
        if infs or nans:
            index = tuple(map(int, np.unravel_index(first, x.shape)))
            gradient = NonfiniteGradient(name, x.shape, x.dtype.name, infs, nans, index)
            found.append(gradient)
    return found


@jax.jit
def _count(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    nan, nonfinite = jnp.isnan(x), ~jnp.isfinite(x)
    first = jnp.argmax(nonfinite) if x.size else jnp.zeros((), jnp.int32)
    return jnp.sum(nonfinite & ~nan), jnp.sum(nan), first
