"""How to choose a loss scale: from the largest gradient, or by trying several."""

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_lossscale import _check as check
from optax_lossscale._optimizer import LossScaleOptimizer
from optax_lossscale._rules.dynamic import DynamicLossScale
from optax_lossscale._scaling import all_finite, exact_exp2
from optax_lossscale._tree import inexact_leaves
from optax_lossscale.diagnostics import _bits
from optax_lossscale.diagnostics._common import check_host, is_argument, power

# Larger than any exponent.
NO_LIMIT = 2**20


def suggest_loss_scale(
    grads: Any, dtype: Any = "float16", margin: float = 2.0
) -> jax.Array:
    """Suggests a loss scale from the largest gradient.

    It is the largest power of two from 2**-126 to 2**126 for which `largest * scale` is
    at most `largest number of dtype / 2**margin`, computed exactly. The margin leaves
    room for larger gradients that `grads` does not show: those of the next batch and of
    activations. `scale_sweep` tries scales instead.

    You may call it inside `jax.jit`, `jax.lax.scan` and `jax.vmap`, and on sharded
    arrays. With the loss function at hand, on the host, `trace_numerics` is better: it
    finds the largest scale exactly, gradients of activations included, and names the
    line that overflows or underflows.

    Args:
      grads: Unscaled gradients, any pytree, as `value_and_grad` returns them. None
        and integer leaves are ignored.
      dtype: The dtype that gradients are computed in: "float16", "bfloat16", or a
        float8.
      margin: How many bits to leave free above the largest gradient.

    Returns:
      The scale, f32[]; 1.0 if all gradients are zero, or one is inf or nan. It may be
      below 1, which `FixedLossScale` rejects; `DynamicLossScale` accepts it as
      `initial_scale` if `min_scale` is no larger.

    Raises:
      ValueError: If `margin` is not from 0 to 128, or `dtype` is none of those.
      TypeError: If `margin` is not a Python number, or `dtype` is not a dtype.

    Examples:
      >>> import jax.numpy as jnp
      >>> from optax_lossscale import DynamicLossScale
      >>> from optax_lossscale.diagnostics import suggest_loss_scale
      >>> grads = {"w": jnp.array([1e-3, -1e-9])}
      >>> scale = suggest_loss_scale(grads)
      >>> float(scale)  # 2**23: twice that would scale 0.001 to 16777, above 65504 / 4
      8388608.0
      >>> DynamicLossScale(initial_scale=float(scale)).initial_scale
      8388608.0
    """
    dtype, margin = check.dtype("dtype", dtype), check.bits("margin", margin)
    _bits.limits_of(dtype)
    return _suggest(inexact_leaves(grads), dtype, margin)


@functools.partial(jax.jit, static_argnames=("dtype", "margin"))
def _suggest(leaves: list[jax.Array], dtype: str, margin: float) -> jax.Array:
    mantissa, exponent = math.frexp(_bits.limits_of(dtype).largest * 2.0**-margin)
    found = {}
    for bits in (bits for x in leaves if x.size for bits in _bits.magnitudes(x)):
        found.setdefault(bits.dtype, []).append(jnp.max(bits))
    finite, highest = jnp.asarray(True), jnp.asarray(NO_LIMIT, jnp.int32)
    # Stacked: XLA would recompute a chain of scalars wherever its result is used.
    for largest in map(jnp.stack, found.values()):
        limit = int(math.ldexp(mantissa, _bits.mantissa_bits(largest) + 1))
        above = (_bits.mantissas(largest) > limit).astype(jnp.int32)
        fits = exponent - 1 - _bits.exponents(largest) - above
        fits = jnp.where(largest > 0, fits, NO_LIMIT)
        finite = finite & jnp.all(largest < _bits.infinity(largest))
        highest = jnp.minimum(highest, jnp.min(fits))
    says = finite & (highest < NO_LIMIT)
    scale = exact_exp2(highest.astype(jnp.float32))
    return jnp.where(says, scale, jnp.float32(1))


class ScaleSweep(NamedTuple):
    """What `scale_sweep` returns, for n scales in the order given.

    Attributes:
      scales: f32[n], the loss scales.
      lost: f32[n], the share of gradients that are zero at this scale, of those that
        are nonzero at some scale. nan if the scale overflows.
      subnormal: f32[n], the share, of the same, that is nonzero at this scale, but
        subnormal in the dtype before it is unscaled. nan if the scale overflows.
      overflows: bool[n], whether a gradient is inf or nan at this scale.
      suggested: f32[], the largest scale that is at least a factor of 4 below the
        smallest one that overflows; if there is none, the smallest scale below that
        one; if there is none either, 1. If no scale overflows, the largest.

    Examples:
      >>> import jax.numpy as jnp
      >>> from optax_lossscale.diagnostics import scale_sweep
      >>> sweep = scale_sweep(lambda w, x: jnp.sum(w * x), jnp.ones(2), jnp.ones(2))
      >>> print(sweep.scales.shape, sweep.suggested == 2.0**31)
      (32,) True
    """

    scales: jax.Array
    lost: jax.Array
    subnormal: jax.Array
    overflows: jax.Array
    suggested: jax.Array

    def __str__(self) -> str:
        """Returns a table of the scales, and the suggested scale."""
        lines = [f"{'loss scale':<12}{'lost':>8}{'subnormal':>12}"]
        rows = map(np.asarray, (self.scales, self.lost, self.subnormal, self.overflows))
        for scale, lost, subnormal, overflows in zip(*rows, strict=True):
            shares = f"{lost:>8.1%}{subnormal:>12.1%}"
            result = f"{'overflows':>20}" if overflows else shares
            lines.append(f"{power(scale):<12}{result}")
        return "\n".join([*lines, f"suggested: {power(float(self.suggested))}"])


def scale_sweep(
    loss_fn: Callable[..., Any],
    params: Any,
    *args: Any,
    scales: Iterable[float] | None = None,
    dtype: Any = "float16",
    has_aux: bool = False,
    **kwargs: Any,
) -> ScaleSweep:
    """Computes the gradients of a batch at several loss scales, and what each loses.

    It scales the loss and unscales the gradients as `LossScaleOptimizer` does. So it
    finds overflows of activations too, which `suggest_loss_scale` cannot see. One batch
    says little about the next: use a typical one, and repeat this with trained
    parameters. It shows what each scale loses of the gradients of parameters. For the
    line that overflows or underflows, and the largest scale exactly, use
    `trace_numerics`.

    Call it on the host. It compiles one function and calls it for one scale after the
    other. It needs memory for two booleans per parameter. Arrays may be sharded.

    Args:
      loss_fn: Called as `loss_fn(params, *args, **kwargs)`; returns a real scalar loss,
        or the loss and auxiliary data if `has_aux`. It has to compute in `dtype`
        itself.
      params: The parameters, any pytree of arrays. Integer ones are not
        differentiated.
      *args: More arguments, usually the batch. Arrays are arguments of the compiled
        function; everything else is passed as it is.
      scales: Loss scales, each from 2**-126 to 2**126, in any order. The default is
        the powers of two from 1 to 2**31.
      dtype: The dtype that gradients are computed in, which decides what is subnormal:
        "float16", "bfloat16", or a float8.
      has_aux: Whether `loss_fn` returns auxiliary data as well.
      **kwargs: More arguments of `loss_fn`. If it has a keyword `scales`, `dtype` or
        `has_aux` itself, bind that with `functools.partial`.

    Returns:
      `ScaleSweep`; print it to read a table. Shares are 0 if all gradients are zero at
      every scale.

    Raises:
      ValueError: If `scales` is empty, or one of them is out of range; if `dtype` is
        none of those.
      TypeError: If `scales` is not a sequence of numbers; if the loss is not a real
        scalar; under a transformation of JAX, such as `jax.jit`.

    Examples:
      >>> import jax.numpy as jnp
      >>> from optax_lossscale.diagnostics import scale_sweep
      >>> def loss_fn(params, batch):
      ...     products = params["w"].astype(jnp.float16) * batch.astype(jnp.float16)
      ...     return jnp.sum(products.astype(jnp.float32)) * 1e-6
      >>> params, batch = {"w": jnp.ones(3)}, jnp.array([1e-3, 0.1, 1.0])
      >>> sweep = scale_sweep(loss_fn, params, batch, scales=[1, 2**10, 2**30, 2**40])
      >>> print(sweep)
      loss scale      lost   subnormal
      2^0            33.3%       66.7%
      2^10            0.0%       33.3%
      2^30            0.0%        0.0%
      2^40                   overflows
      suggested: 2^30
      >>> float(sweep.suggested)
      1073741824.0
    """
    check_host("scale_sweep", (params, args, kwargs))
    dtype = check.dtype("dtype", dtype)
    _bits.limits_of(dtype)
    chosen = _check_scales([2.0**i for i in range(32)] if scales is None else scales)
    leaves, treedef = jax.tree.flatten((args, kwargs))
    arrays = {i: x for i, x in enumerate(leaves) if is_argument(x)}

    def call(params, arrays):
        filled = [arrays.get(i, x) for i, x in enumerate(leaves)]
        args, kwargs = jax.tree.unflatten(treedef, filled)
        return loss_fn(params, *args, **kwargs)

    step = _make_step(call, dtype, has_aux)
    seen, finite, nonzero, subnormal = None, [], [], []
    for scale in chosen:
        is_finite, masks, counts = step(params, arrays, jnp.float32(scale))
        # bool() waits, so that only one scale's gradients are in memory.
        finite.append(bool(is_finite))
        if finite[-1]:
            seen = masks if seen is None else _either(seen, masks)
        sums = np.asarray(counts, np.float64).sum(axis=0).tolist()
        nonzero.append(sums[0])
        subnormal.append(sums[1])

    total = sum(float(_count(mask)) for mask in seen or [])
    # Zero at this scale, but nonzero at another.
    lost = (total - np.asarray(nonzero)) / max(total, 1)
    shares = np.stack([lost, np.asarray(subnormal) / max(total, 1)])
    shares = np.where(finite, shares, np.nan).astype(np.float32)
    # nan is a valid result here.
    with jax.debug_nans(False):
        lost, subnormal = map(jnp.asarray, shares)
    return ScaleSweep(
        scales=jnp.asarray(chosen, jnp.float32),
        lost=lost,
        subnormal=subnormal,
        overflows=~jnp.asarray(finite, bool),
        suggested=jnp.asarray(_suggested(chosen, finite), jnp.float32),
    )


def _check_scales(scales: Any) -> list[float]:
    array = np.asarray(list(scales) if isinstance(scales, Iterable) else scales)
    if array.ndim != 1:
        raise TypeError(
            "scales must be a sequence of numbers, [2.0**10, 2.0**15, 2.0**20] for "
            f"example, got {scales!r}."
        )
    if not array.size:
        raise ValueError(
            "scales must hold at least one loss scale, got none. Omit it to try the "
            "powers of two from 1 to 2**31."
        )
    return [check.scale(f"scales[{i}]", x) for i, x in enumerate(array.tolist())]


def _make_step(
    loss_fn: Callable[..., Any], dtype: str, has_aux: bool
) -> Callable[..., Any]:
    # The step reads the scale from the state, so one program serves all scales.
    rule = DynamicLossScale(min_scale=check.SMALLEST_SCALE)
    optimizer = LossScaleOptimizer(optax.identity(), rule, skip="where")
    transform = functools.partial(jax.value_and_grad, allow_int=True)
    limit = _bits.limits_of(dtype).normal

    @jax.jit
    def step(params, arrays, scale):
        state = optimizer.init(None)
        at_scale = state.loss_scale_state._replace(loss_scale=scale)
        state = state._replace(loss_scale_state=at_scale)
        _, grads = optimizer.value_and_grad(
            loss_fn, state, has_aux=has_aux, transform=transform
        )(params, arrays)
        parts = [bits for x in inexact_leaves(grads) for bits in _bits.magnitudes(x)]
        threshold = _bits.threshold_bits
        normal = {
            kind: threshold(limit, scale, jnp.zeros((), kind), inclusive=True)
            for kind in {bits.dtype for bits in parts}
        }
        found = [_compare(bits, normal[bits.dtype]) for bits in parts]
        counts = [jnp.zeros(2, jnp.float32), *(counts for _, counts in found)]
        return all_finite(grads), [mask for mask, _ in found], jnp.stack(counts)

    return step


@jax.jit
def _compare(bits: jax.Array, normal: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns which numbers are not zero; counts these, and the subnormal ones."""
    nonzero = bits > 0
    return nonzero, _bits.reduce_counts([nonzero, nonzero & (bits < normal)], bits)[0]


@jax.jit
def _either(left: list[jax.Array], right: list[jax.Array]) -> list[jax.Array]:
    return [x | y for x, y in zip(left, right, strict=True)]


@jax.jit
def _count(mask: jax.Array) -> jax.Array:
    return _bits.reduce_counts([mask], jnp.zeros(mask.shape, jnp.int32))[0][0]


def _suggested(scales: list[float], finite: list[bool]) -> float:
    overflowing = [x for x, ok in zip(scales, finite, strict=True) if not ok]
    limit = min(overflowing, default=math.inf)
    below = [x for x in scales if x < limit]
    with_room = [x for x in below if x <= limit / 4]
    return max(with_room, default=min(below, default=1.0))
