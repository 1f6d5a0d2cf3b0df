"""Loss scaling for float16 training with Optax."""

from optax_lossscale import diagnostics as diagnostics
from optax_lossscale._accumulate import (
    AccumulationState as AccumulationState,
    accumulate_gradients as accumulate_gradients,
    has_updated as has_updated,
)
from optax_lossscale._headroom import (
    HeadroomLossScale as HeadroomLossScale,
    HeadroomLossScaleState as HeadroomLossScaleState,
)
from optax_lossscale._health import Health as Health, check_health as check_health
from optax_lossscale._import import import_state as import_state
from optax_lossscale._logmax import (
    LogMaxLossScale as LogMaxLossScale,
    LogMaxLossScaleState as LogMaxLossScaleState,
)
from optax_lossscale._loss_scale import (
    DynamicLossScale as DynamicLossScale,
    FixedLossScale as FixedLossScale,
    FixedLossScaleState as FixedLossScaleState,
    LossScale as LossScale,
    LossScaleState as LossScaleState,
)
from optax_lossscale._optimizer import LossScaleOptimizer as LossScaleOptimizer
from optax_lossscale._registry import get_loss_scale as get_loss_scale
from optax_lossscale._state import (
    LossScaleOptimizerState as LossScaleOptimizerState,
    select_applied as select_applied,
)
from optax_lossscale._tolerance import (
    TolerantLossScale as TolerantLossScale,
    TolerantLossScaleState as TolerantLossScaleState,
)
from optax_lossscale._tree import all_finite as all_finite

__version__ = "0.1.0"
