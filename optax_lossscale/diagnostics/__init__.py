"""What happened during training, and why."""

from optax_lossscale.diagnostics._history import History as History
from optax_lossscale.diagnostics._plots import (
    plot_exponents as plot_exponents,
    plot_history as plot_history,
    plot_sweep as plot_sweep,
)
