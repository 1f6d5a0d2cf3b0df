"""The report on a state: whether training makes progress, and advice if it does not."""

import textwrap
from typing import Any, NamedTuple

from optax_lossscale._state import find_state
from optax_lossscale.diagnostics._advice import NOTHING, STATISTICS, words_of
from optax_lossscale.diagnostics._common import check_host, power
from optax_lossscale.diagnostics._reading import Reason, is_valid, read, read_leaves


class Report(NamedTuple):
    """The result of `report` and `check_health`. Print it.

    A report about many members or devices says how many of them skipped steps, and
    for which reasons. Its numbers are those of the worst one.

    Attributes:
      healthy: Whether training makes progress, as far as the state tells.
      diagnosis: The state of training, or its fault.
      advice: The steps to take, one after the other. Empty if there is nothing to do.
      loss_scale: The loss scale that the state holds.
      skipped_steps: Steps skipped so far, including vetoes by `skip_if`.
      consecutive_skipped_steps: Steps skipped since one was applied, without vetoes.
      stuck_steps: How many of these consecutive steps were skipped although the scale
        was at its minimum (for a rule without `min_scale`: although it did not fall).
      nonfinite_loss_steps: Steps skipped so far because of the loss; None without
        `check_loss`.
      retries: Passes that were repeated so far; None without `retries`.
      member: The index of the worst member, `(2,)` for example; `()` if the state
        belongs to one. `jax.tree.map(lambda x: x[result.member], state)` is its state.
      reason: The reason of the verdict as a short name, a `str` to compare and to log.
        Parameters or scale: "not_finite", "damaged_scale". Skipped steps: "loss" (which
        explains all), "loss_or_gradients", "fixed_scale", "at_minimum" (of the scale),
        "retries_failed", "long_overflow", "rule" (one of your own did not let the
        gradients pass), "overflow" (a few, as is usual), "veto". The last step was
        applied: "low_scale", "applied". No step was skipped: "repeated" (passes were),
        "new_scale" (no step at this scale yet), "unchecked" (by a fixed scale),
        "none_skipped".

    Examples:
      >>> import jax.numpy as jnp
      >>> import optax
      >>> from optax_lossscale import LossScaleOptimizer, diagnostics
      >>> optimizer = LossScaleOptimizer(optax.adam(0.1))
      >>> result = diagnostics.report(optimizer.init(jnp.ones(3)))
      >>> print(result.healthy, result.reason, result.loss_scale)
      True new_scale 32768.0
      >>> result
      No step has been taken yet, or the scale has just grown.
        loss scale       32768 (2^15)
        skipped steps    0
      What to do: nothing, as far as the state tells. If the loss does not fall, see
      that the gradients come from optimizer.value_and_grad or minimize, and run
      diagnostics.trace_numerics(loss_fn, params, batch, state=state).
    """

    healthy: bool
    diagnosis: str
    advice: tuple[str, ...]
    loss_scale: float
    skipped_steps: int
    consecutive_skipped_steps: int
    stuck_steps: int
    nonfinite_loss_steps: int | None
    retries: int | None
    member: tuple[int, ...]
    reason: str

    def __repr__(self):
        stuck, loss = self.stuck_steps, self.nonfinite_loss_steps
        log2 = f" ({power(self.loss_scale)})" if is_valid(self.loss_scale) else ""
        in_a_row = self.consecutive_skipped_steps
        of_which = f", of which {in_a_row} in a row" if in_a_row else ""
        rows = {
            "loss scale": f"{self.loss_scale:.10g}{log2}",
            "skipped steps": f"{self.skipped_steps}{of_which}",
            "stuck steps": stuck and f"{stuck} of these",
            "loss not finite": loss and f"{loss} steps",
            "repeated passes": self.retries,
        }
        lines = textwrap.wrap(self.diagnosis, 79)
        lines += [f"  {name:15}  {text}" for name, text in rows.items() if text]
        nothing = NOTHING + STATISTICS * bool(self.skipped_steps)
        lines += ["What to do:"] if self.advice else textwrap.wrap(nothing, 79)
        for number, item in enumerate(self.advice, start=1):
            lines += textwrap.wrap(f"{number}. {item}", 79, subsequent_indent="   ")
        return "\n".join(lines)


def report(state: Any, params: Any = None) -> Report:
    """Says how loss scaling is doing, with advice.

    Print it on the host, between steps: it waits for the state. With `params` it also
    names the leaves that are not finite.

    Training is not healthy, and `check_health` raises an error, if

    - 100 steps in a row were skipped although the scale was at its minimum (for a rule
      without `min_scale`, such as `FixedLossScale`: although the scale did not fall);
    - 1,000 steps in a row were skipped for any reason but `skip_if`;
    - the loss scale is nan, or not between 2**-126 and 2**126;
    - `params` are given, and are not finite, or the inner state holds nan.

    The state does not tell everything:

    - The loss function. If that divides by an overflow, as a norm may, it returns zeros
      and finite gradients, and training stops unnoticed: `trace_numerics` finds that.
      Nor does the state tell whether a trainer scales the loss.
    - The rule. So the report does not know whether a fixed scale skips steps at all. It
      shows the scale as it is: if you restored it or set it by hand, it may be out of
      the bounds, to which `optimizer.current_loss_scale(state)` clips it. And it takes
      a rule for one of this package if its state is: give a rule that skips finite
      gradients a state of its own, and the report does not call them non-finite.
    - Gradients far below the range of float16. Those of 2**-60 are zero until a dynamic
      scale has doubled about 20 times, which takes 40,000 steps by default. If the loss
      does not fall, ask `suggest_loss_scale` for a higher scale.

    Args:
      state: The state after a step; a pytree that holds one
        `LossScaleOptimizerState`. If it belongs to many members (`jax.vmap`) or
        devices (`jax.pmap`), the report says how many skipped steps, and is about the
        worst of them: one with a damaged scale, one that is not finite, one beyond
        these limits, or else one that skips steps now, of which the `reason` in
        `Report` that stands first is the worst. Then come the nearest to a limit, the
        most skipped steps, the most retries and the lowest scale. An array with first
        axes as long as theirs counts as theirs.
      params: The parameters, batch statistics or a model: any pytree. Of each leaf that
        is not finite, in the inner state as well, the report counts inf and nan. These
        reach parameters of float16 when a new value is rounded, and batch statistics
        from the forward pass, although gradients are checked. An inf in the inner state
        counts as healthy, because some optimizers begin with it.

    Returns:
      A `Report`. Print it, or read its numbers.

    Raises:
      ValueError: If `state` holds no such state, or several.
      TypeError: Under a transformation of JAX, such as `jax.jit`; if `params` has
        leaves, but no array among them.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import optax
      >>> from optax_lossscale import LossScaleOptimizer, diagnostics
      >>> optimizer = LossScaleOptimizer(optax.sgd(0.1))
      >>> params = {"b": jnp.zeros(2), "w": jnp.ones(2)}
      >>> state = optimizer.init(params)
      >>> grads = {"b": jnp.ones(2), "w": jnp.array([1.0, jnp.inf])}
      >>> for _ in range(3):
      ...     _, state = optimizer.update(grads, state, params)
      >>> print(diagnostics.report(state))
      The last 3 steps were skipped: their gradients were not finite. A few skips in
      a row are usual at the start, and a single one later, when the loss scale has
      grown too high.
        loss scale       4096 (2^12)
        skipped steps    3, of which 3 in a row
      What to do:
      1. If they continue: Run diagnostics.trace_numerics(loss_fn, params, batch,
         state=state) with the arguments of a skipped step. It names the line where
         inf or nan begins.

      Of three members:

      >>> members = jax.vmap(lambda _: optimizer.init(params))(jnp.arange(3))
      >>> grads = {"b": jnp.ones((3, 2)), "w": jnp.ones((3, 2)).at[1, 0].set(jnp.nan)}
      >>> _, members = jax.vmap(lambda g, s: optimizer.update(g, s))(grads, members)
      >>> print(diagnostics.report(members))
      Members that skipped steps: 1 of 3; the last step: 1. The worst is member [1].
      The last step was skipped: its gradients were not finite. A few skips in a row
      are usual at the start, and a single one later, when the loss scale has grown
      too high.
        loss scale       16384 (2^14)
        skipped steps    1, of which 1 in a row
      What to do: nothing, as far as the state tells. If the loss does not fall, see
      that the gradients come from optimizer.value_and_grad or minimize, and run
      diagnostics.trace_numerics(loss_fn, params, batch, state=state). If the
      evaluation alone is nan, see that select_applied keeps returned batch
      statistics of skipped steps.
    """
    state = find_state(state)
    check_host("report (or check_health)", (state, params))
    members = read(state, params)
    reading = members.reading
    broken = read_leaves(params, state.inner_state)
    words = words_of(members, broken)
    return Report(
        healthy=reading.measure < 1 and not broken.is_unhealthy,
        diagnosis=words.diagnosis,
        advice=words.advice,
        loss_scale=reading.loss_scale,
        skipped_steps=reading.skipped_steps,
        consecutive_skipped_steps=reading.consecutive_skipped_steps,
        stuck_steps=reading.stuck_steps,
        nonfinite_loss_steps=reading.nonfinite_loss_steps,
        retries=reading.retries,
        member=members.worst,
        reason=Reason.NOT_FINITE if broken.is_unhealthy else reading.reason,
    )


def check_health(state: Any, params: Any = None) -> Report:
    """Raises an error with advice if training makes no progress.

    A compiled step cannot raise an error, so training may skip every step unnoticed.
    Call this on the host from time to time, for example when you log losses. It waits
    for the state and copies a few numbers to the host.

    `diagnostics.report` gives the same verdict and raises no error. For limits of your
    own, compare the numbers of that report.

    Args:
      state: The state after a step; a pytree that holds one
        `LossScaleOptimizerState`. Of many members or devices the worst one counts.
      params: The parameters, batch statistics or a model: any pytree. If it is given,
        it must be finite as well, and the inner state must hold no nan.

    Returns:
      A `diagnostics.Report`, which is healthy.

    Raises:
      FloatingPointError: If training is not healthy, by the limits of
        `diagnostics.report`. The message is the report.
      TypeError: Under a transformation of JAX, such as `jax.jit`; if `params` has
        leaves, but no array among them.
      ValueError: If `state` holds none or several of these states.

    Examples:
      >>> import jax.numpy as jnp
      >>> import optax
      >>> from optax_lossscale import LossScaleOptimizer
      >>> from optax_lossscale.diagnostics import check_health
      >>> optimizer = LossScaleOptimizer(optax.sgd(0.1), initial_scale=2.0)
      >>> params = jnp.ones(3)
      >>> state = optimizer.init(params)
      >>> for _ in range(5):
      ...     _, state = optimizer.update(params * jnp.nan, state)
      >>> result = check_health(state)
      >>> result.stuck_steps, result.consecutive_skipped_steps
      (4, 5)
    """
    result = report(state, params)
    if not result.healthy:
        raise FloatingPointError(str(result))
    return result
