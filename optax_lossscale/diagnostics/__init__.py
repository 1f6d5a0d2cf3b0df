"""What happened during training, and why.

Functions that are pure and may be called under `jax.jit`, unless they say that they are
for the host.
"""

from optax_lossscale.diagnostics._metrics import metrics as metrics
from optax_lossscale.diagnostics._nonfinite import (
    NonfiniteGradient as NonfiniteGradient,
    NonfiniteLeaf as NonfiniteLeaf,
    describe_nonfinite as describe_nonfinite,
    nonfinite_leaves as nonfinite_leaves,
)
from optax_lossscale.diagnostics._report import report as report
from optax_lossscale.diagnostics._sweep import (
    ScaleSweep as ScaleSweep,
    scale_sweep as scale_sweep,
    suggest_loss_scale as suggest_loss_scale,
)
from optax_lossscale.diagnostics._underflow import (
    ExponentHistogram as ExponentHistogram,
    Underflow as Underflow,
    UnderflowStats as UnderflowStats,
    exponent_histogram as exponent_histogram,
    underflow_stats as underflow_stats,
)
