"""Mixed precision for JAX and Optax."""

from optax_lossscale import diagnostics as diagnostics
from optax_lossscale._autocast.cast import autocast as autocast
from optax_lossscale._optimizer import LossScaleOptimizer as LossScaleOptimizer
from optax_lossscale._rules.base import LossScale as LossScale
from optax_lossscale._rules.dynamic import (
    DynamicLossScale as DynamicLossScale,
    DynamicLossScaleState as DynamicLossScaleState,
)
from optax_lossscale._rules.fixed import (
    FixedLossScale as FixedLossScale,
    FixedLossScaleState as FixedLossScaleState,
)
from optax_lossscale._rules.headroom import (
    HeadroomLossScale as HeadroomLossScale,
    HeadroomLossScaleState as HeadroomLossScaleState,
)
from optax_lossscale._rules.identifiers import get_loss_scale as get_loss_scale
from optax_lossscale._rules.tolerant import (
    TolerantLossScale as TolerantLossScale,
    TolerantLossScaleState as TolerantLossScaleState,
)
from optax_lossscale._scale_parameter import (
    scale_as_parameter as scale_as_parameter,
    scale_gradient as scale_gradient,
    with_loss_scale as with_loss_scale,
)
from optax_lossscale._scaling import all_finite as all_finite
from optax_lossscale._state import (
    LossScaleOptimizerState as LossScaleOptimizerState,
    select_applied as select_applied,
)

__version__ = "0.1.0"
