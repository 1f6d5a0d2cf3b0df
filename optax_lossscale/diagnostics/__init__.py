"""What happened during training, and why."""

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
