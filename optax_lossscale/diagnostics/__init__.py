"""Diagnoses of a training run: skipped steps, lost gradients, and their reasons.

The functions are pure, and you may call them under `jax.jit`, unless their
documentation says that they run on the host.
"""

from optax_lossscale.diagnostics._compare import compare as compare
from optax_lossscale.diagnostics._metrics import metrics as metrics
from optax_lossscale.diagnostics._nonfinite import (
    NonfiniteGradient as NonfiniteGradient,
    describe_nonfinite as describe_nonfinite,
    nonfinite_leaves as nonfinite_leaves,
)
from optax_lossscale.diagnostics._plots import (
    plot_exponents as plot_exponents,
    plot_history as plot_history,
)
from optax_lossscale.diagnostics._report import (
    Report as Report,
    check_health as check_health,
    report as report,
)
from optax_lossscale.diagnostics._suggest import (
    suggest_loss_scale as suggest_loss_scale,
)
from optax_lossscale.diagnostics._trace.judge.findings import (
    NumericFinding as NumericFinding,
)
from optax_lossscale.diagnostics._trace.proposal import (
    Float32Lines as Float32Lines,
    float32_lines as float32_lines,
)
from optax_lossscale.diagnostics._trace.run import (
    NumericOperation as NumericOperation,
)
from optax_lossscale.diagnostics._trace.trace import (
    NumericsTrace as NumericsTrace,
    trace_numerics as trace_numerics,
)
from optax_lossscale.diagnostics._underflow import (
    ExponentHistogram as ExponentHistogram,
    UnderflowStats as UnderflowStats,
    exponent_histogram as exponent_histogram,
    underflow_stats as underflow_stats,
)
