"""One screen about the state of loss scaling, in plain words."""

import textwrap
from typing import Any

import jax
import numpy as np

from optax_lossscale._state import find_state, unbox
from optax_lossscale.diagnostics import _health
from optax_lossscale.diagnostics._common import power
from optax_lossscale.diagnostics._nonfinite import (
    NonfiniteLeaf,
    leaf_names,
    read_statistics,
)

SHOWN = 8
WIDTH = 79
TRACE = (
    "diagnostics.trace_numerics(loss_fn, params, batch, state=state) names the "
    "operation and its line."
)
SPREAD = (
    "find where the inf or nan began. The table does not tell: from the forward pass "
    "it can reach every parameter, and from the backward pass every parameter whose "
    "gradient is computed after it, in the layers nearer to the input. In the second "
    "case the bad leaf nearest to the loss is next to the cause, but the tree does not "
    f"say which that is. {TRACE}"
)


def report(state: Any, params: Any = None) -> str:
    """Says how loss scaling is doing, and what to do next.

    Call it on the host, between steps: it waits for the state.

    It says where to look only if one leaf of several was not finite in the last
    non-finite step. Otherwise it points to `trace_numerics`, because an inf spreads.

    Args:
      state: The state after a step; a pytree that holds one
        `LossScaleOptimizerState`. If it belongs to many members (`jax.vmap`) or
        devices (`jax.pmap`), the report is about the worst of them; with several
        losses it shows the lowest scale.
      params: The parameters, for the names of their leaves. They are only used if the
        optimizer was created with `track_leaves=True`.

    Returns:
      A few lines of text, to print.

    Raises:
      ValueError: If `state` holds no such state or several, or has no members; if
        `params` has more or fewer leaves than `init` got.
      TypeError: Under a transformation of JAX, such as `jax.jit`.

    Examples:
      >>> import jax.numpy as jnp
      >>> import optax
      >>> from optax_lossscale import LossScaleOptimizer, diagnostics
      >>> optimizer = LossScaleOptimizer(optax.sgd(0.1), track_leaves=True)
      >>> params = {"b": jnp.zeros(2), "w": jnp.ones(2)}
      >>> state = optimizer.init(params)
      >>> grads = {"b": jnp.ones(2), "w": jnp.array([1.0, jnp.inf])}
      >>> _, state = optimizer.update(grads, state, params)
      >>> print(diagnostics.report(state, params))
      The last step was skipped, and the loss scale is still adjusting.
        loss scale           16384 (2^14)
        skipped steps        1, of which 1 in a row
      Steps with non-finite gradients:
           inf     nan  last
             1       0  inf      params['w']
      What to do: nothing yet. Each skip lowers the scale. A few in a row are usual
      at the start, and single ones later, when the scale has grown too high. If they
      continue, look at params['w'].
    """
    limit = _health.START_UP + 1
    health = _health.check_health(
        state, patience=1, max_consecutive_skipped_steps=limit, raise_error=False
    )
    found = find_state(state)
    statistics = None
    leaves: list[NonfiniteLeaf] = []
    tracked = 0
    if statistics is not None:
        names = None if params is None else leaf_names(params)
        leaves = read_statistics(statistics, names)
        tracked = unbox(statistics.last).shape[-1]
    never_skipped = not np.any(jax.device_get(unbox(found.skipped_steps)))
    headline, advice = _judge(health, leaves, tracked, never_skipped)
    lines = [headline, *_numbers(health), *_table(leaves)]
    return "\n".join([*lines, *textwrap.wrap(f"What to do: {advice}", WIDTH)])


def _numbers(health: _health.Health) -> list[str]:
    explained = ", which is not a valid loss scale"
    if not _health.is_damaged(health.loss_scale):
        explained = f" ({power(health.loss_scale)})"
    at_minimum = ""
    if health.stuck_steps:
        at_minimum = f", could not go lower for {health.stuck_steps} skipped steps"
    skipped = f"{health.skipped_steps}"
    if health.consecutive_skipped_steps:
        skipped += f", of which {health.consecutive_skipped_steps} in a row"
    lines = [
        f"  loss scale           {health.loss_scale:g}{explained}{at_minimum}",
        f"  skipped steps        {skipped}",
    ]
    if health.nonfinite_loss_steps:
        lines.append(f"  loss not finite      {health.nonfinite_loss_steps} steps")
    return lines


def _table(leaves: list[NonfiniteLeaf]) -> list[str]:
    if not leaves:
        return []
    lines = ["Steps with non-finite gradients:", "     inf     nan  last"]
    for leaf in leaves[:SHOWN]:
        counts = f"{leaf.inf_steps:8} {leaf.nan_steps:7}"
        lines.append(f"{counts}  {leaf.last:8} {leaf.name}")
    if len(leaves) > SHOWN:
        lines.append(f"  and {len(leaves) - SHOWN} more: see nonfinite_leaves")
    return lines


def _judge(
    health: _health.Health,
    leaves: list[NonfiniteLeaf],
    tracked: int,
    never_skipped: bool,
) -> tuple[str, str]:
    """Returns what is wrong, if anything, and what to do about it."""
    if _health.is_damaged(health.loss_scale):
        return "The loss scale is damaged.", health.message
    if leaves and never_skipped:
        return (
            "Steps were applied though their gradients were not finite.",
            "restore parameters that are finite, and use a loss scale that skips such "
            'steps: "dynamic", or a FixedLossScale with skip_nonfinite=True.',
        )
    skips = health.consecutive_skipped_steps
    if skips and health.nonfinite_loss_steps == health.skipped_steps:
        return (
            "The last step was skipped, because its loss was not finite.",
            "if this continues, look for a nan or inf in the data or the parameters, "
            f"and for an overflow in the forward pass. {TRACE}",
        )
    last = [leaf for leaf in leaves if leaf.last != "finite"]
    # The only leaf of a tree is not finite whatever the cause.
    alone = len(last) == 1 < tracked
    if not health.healthy:
        headline = "Many steps in a row were skipped."
        if health.stuck_steps:
            headline = "Steps are skipped, and the loss scale cannot go lower."
        # Above its minimum the scale itself may be too high: blame no gradient yet.
        if not last or not health.stuck_steps:
            return headline, f"{health.message} {TRACE}"
        suspect = _suspect(last[0]) if alone else SPREAD
        if _health.may_be_frozen(health):
            suspect = f"if the loss is finite, {_health.CALL_INSIDE}{suspect}"
        return headline, suspect
    if skips:
        look = SPREAD if last else f"call check_health. {TRACE}"
        if alone:
            look = f"look at {last[0].name}."
        return (
            "The last step was skipped, and the loss scale is still adjusting.",
            "nothing yet. Each skip lowers the scale. A few in a row are usual at the "
            "start, and single ones later, when the scale has grown too high. If they "
            f"continue, {look}",
        )
    if health.loss_scale <= 1:
        return (
            "The last step was applied, but its loss scale is too low to help.",
            "find out what keeps the scale low, and check with underflow_stats whether "
            f"gradients are lost. {TRACE}",
        )
    return "The last step was applied.", "nothing."


def _suspect(leaf: NonfiniteLeaf) -> str:
    """Advises on the only gradient that was not finite in the last non-finite step."""
    name = f"{leaf.name} ({leaf.last})"
    if leaf.last == "nan":
        return (
            f"look at {name}: nan rather than inf comes from 0/0, inf - inf, log or "
            "sqrt at 0, or from an overflow in the layer after it. Fix that, or "
            "compute it in float32."
        )
    return f"compute {name} in float32, lower the learning rate or clip gradients."
