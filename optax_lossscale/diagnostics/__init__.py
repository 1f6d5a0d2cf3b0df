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
