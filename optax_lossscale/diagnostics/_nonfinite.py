"""Which gradients are not finite, by name."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optax_lossscale._scaling import all_finite
from optax_lossscale.diagnostics._common import check_host, named_leaves, on_auto_axes


def nonfinite_leaves(grads: Any) -> dict[str, jax.Array]:
    """Says which gradients hold inf or nan, also inside a compiled step.

    It needs no optimizer and no state. Return the result from the step, or put it into
    the record of the step. On the host, `describe_nonfinite` tells more.

    Several names at once do not tell the cause. An inf in the forward pass can reach
    every parameter, and an inf in the backward pass can reach all layers nearer to the
    input. `trace_numerics` names the operation where it began, and its line.

    Args:
      grads: Gradients, scaled or not; any pytree. Leaves that are not floating-point
        or complex are ignored.

    Returns:
      By key path, `"grads['w']"` for example, bool[]: True if the leaf is not finite.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from optax_lossscale import diagnostics
      >>> grads = {"b": jnp.ones(2), "w": jnp.array([1.0, jnp.inf])}
      >>> flags = jax.jit(diagnostics.nonfinite_leaves)(grads)
      >>> print([name for name, is_nonfinite in flags.items() if is_nonfinite])
      ["grads['w']"]
    """
    return {name: ~all_finite(x) for name, x in named_leaves(grads, "grads").items()}


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
    """Names the gradients that are not finite, counts inf and nan, and says where.

    Call it on the host: it waits for the gradients. It needs no optimizer and no state,
    and takes any tree, so it describes parameters or a batch as well. Inside a compiled
    step use `nonfinite_leaves`, which also explains why several names do not tell the
    cause.

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
    check_host("describe_nonfinite", grads)
    return find_nonfinite(named_leaves(grads, "grads"))


def find_nonfinite(leaves: dict[str, jax.Array]) -> list[NonfiniteGradient]:
    """Describes the leaves, by name, that are not finite."""
    # Leaf by leaf: leaves of the same shape share one compiled program.
    counts = jax.device_get({name: _count(x) for name, x in leaves.items()})
    gradients = []
    for name, x in leaves.items():
        infs, nans = map(int, counts[name])
        if infs or nans:
            first = tuple(map(int, jax.device_get(_first(x))))
            gradient = NonfiniteGradient(name, x.shape, x.dtype.name, infs, nans, first)
            gradients.append(gradient)
    return gradients


@jax.jit
def _count(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    nan, nonfinite = jnp.isnan(x), ~jnp.isfinite(x)
    return jnp.sum(nonfinite & ~nan), jnp.sum(nan)


@jax.jit
def _first(x: jax.Array) -> list[jax.Array]:
    """Returns the index of the first number that is not finite."""

    def first(x):
        # Axis by axis: to flatten a sharded array, XLA would gather it.
        left, index = ~jnp.isfinite(x), []
        for axis in range(x.ndim):
            others = [other for other in range(x.ndim) if other != axis]
            index.append(jnp.argmax(jnp.any(left, others)))
            places = lax.broadcasted_iota(index[-1].dtype, x.shape, axis)
            left &= places == index[-1]
        return index

    return on_auto_axes(first, x)
