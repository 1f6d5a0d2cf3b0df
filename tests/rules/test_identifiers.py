"""What users write for a loss scale."""

import jax.numpy as jnp
import numpy as np
import pytest

from optax_lossscale import (
    DynamicLossScale,
    FixedLossScale,
    HeadroomLossScale,
    LogMaxLossScale,
    get_loss_scale,
)


class TestGetLossScale:
    def test_takes_what_users_write(self):
        scale = DynamicLossScale(4.0)
        assert get_loss_scale(scale) is scale
        assert get_loss_scale(8) == get_loss_scale(8.0) == FixedLossScale(8.0)
        assert get_loss_scale(np.float32(8)) == FixedLossScale(8.0)
        assert get_loss_scale("dynamic") == DynamicLossScale()
        assert get_loss_scale("headroom") == HeadroomLossScale()
        assert get_loss_scale("logmax") == LogMaxLossScale()

    @pytest.mark.parametrize(
        "bad", [None, True, "static", "", [8], DynamicLossScale, jnp.float32(8)]
    )
    def test_refuses_the_rest(self, bad):
        with pytest.raises(ValueError, match='number, or one of "dynamic", '):
            get_loss_scale(bad)

    def test_refuses_numbers_below_one(self):
        with pytest.raises(ValueError, match="at least 1"):
            get_loss_scale(0.5)
