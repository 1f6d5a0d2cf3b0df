"""What users write for a loss scale, and what is refused."""

import dataclasses
import fractions
import functools
import json
import math
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from rules import RULES

from optax_lossscale import (
    DynamicLossScale,
    FixedLossScale,
    HeadroomLossScale,
    LossScaleOptimizer,
    TolerantLossScale,
    get_loss_scale,
)

CASES = [
    *RULES.values(),
    DynamicLossScale(2.0**10, 7, 4.0, 0.25, 0.5, 2.0**20, 3, True),
    HeadroomLossScale(dtype=jnp.float8_e5m2, min_margin=2),
]
every_rule = pytest.mark.parametrize("rule", CASES)


@every_rule
def test_a_rule_is_a_frozen_value(rule):
    config = json.loads(json.dumps(rule.get_config()))
    again = type(rule).from_config(config)
    assert again == rule == pickle.loads(pickle.dumps(rule))
    assert hash(again) == hash(rule)
    assert again.get_config() == config
    assert {type(value) for value in config.values()} <= {int, float, bool, str}
    with pytest.raises(dataclasses.FrozenInstanceError):
        rule.initial_scale = 3.0
    # It is no pytree.
    assert jax.tree.leaves(rule) == [rule]


def test_from_config_refuses_unknown_keys():
    with pytest.raises(TypeError, match="increment_period"):
        DynamicLossScale.from_config({"increment_period": 3})


def test_normalizes_what_numbers_it_takes():
    scale = DynamicLossScale(
        np.float32(16), np.int64(3), fractions.Fraction(2), min_scale=2, hysteresis=2.0
    )
    assert scale == DynamicLossScale(16.0, 3, 2.0, min_scale=2.0, hysteresis=2)
    assert type(scale.growth_interval) is int
    assert type(scale.initial_scale) is float


SCALES = [0, -0.0, -8.0, np.inf, -np.inf, np.nan, 1e-46, 2.0**-127, 2.0**127, 10**400]
COUNTS = [0, -1, 0.5, 1.5, np.nan, np.inf, 2**31]
BITS = [-0.5, 128.5, np.nan, np.inf]
BAD_VALUES = {
    "loss_scale_value": [*SCALES, 0.5],
    "initial_scale": SCALES,
    "min_scale": SCALES,
    "max_scale": SCALES,
    "growth_interval": COUNTS,
    # The last two of each are 1, or 0, in float32 alone.
    "growth_factor": [1.0, 0.5, -2.0, np.inf, np.nan, 1 + 1e-9, 1 + 2.0**-24],
    "backoff_factor": [0.0, 1.0, 2.0, -0.5, np.nan, 1 - 1e-8, 1e-46],
    "hysteresis": COUNTS,
    "hysteresis_bits": BITS,
    "tolerance": [-0.1, 1.1, 5, np.nan, np.inf],
    "dtype": ["float32", "int8", None],
    "min_margin": BITS,
    "release_steps": COUNTS,
}
NOT_NUMBERS = [
    True,
    "8",
    b"8",
    None,
    [8.0],
    1j,
    np.ones(2),
    jax.device_put(np.float32(2)),
]
BAD_TYPES = {
    "skip_nonfinite": [0, 1, None, "True"],
    "consecutive_hysteresis": [0, 1, None, "True"],
    "dtype": ["half precision", [8]],
}


@every_rule
def test_every_hyperparameter_is_checked(rule):
    def check(name, bad_values, error):
        for bad in bad_values:
            with pytest.raises(error, match=rf"^{name} must ") as raised:
                dataclasses.replace(rule, **{name: bad})
            assert repr(bad) in str(raised.value)

    for name in rule.get_config():
        values = BAD_VALUES.get(name, [])
        check(name, values, ValueError)
        check(name, BAD_TYPES.get(name, NOT_NUMBERS), TypeError)


@pytest.mark.parametrize(
    "bounds", [{"initial_scale": 0.5}, {"max_scale": 8.0}, {"min_scale": 2.0**16}]
)
@pytest.mark.parametrize("make", [DynamicLossScale, HeadroomLossScale])
def test_refuses_an_initial_scale_out_of_bounds(make, bounds):
    with pytest.raises(ValueError, match="initial_scale must lie between") as error:
        make(**bounds)
    assert repr(next(iter(bounds.values()))) in str(error.value)


@pytest.mark.parametrize("half", [np.float16, jnp.float16, jnp.bfloat16])
def test_refuses_numbers_of_half_precision(half):
    for name in ("initial_scale", "min_scale", "max_scale"):
        with pytest.raises(ValueError, match=f"{name} must not be of half precision"):
            DynamicLossScale(**{name: half(8)})
    with pytest.raises(ValueError, match=r"loss_scale_value.*Pass a Python number"):
        FixedLossScale(half(8))


def test_the_smallest_factors_that_it_takes_do_change_the_scale():
    factors = {"growth_factor": 1 + 2.0**-23, "backoff_factor": 1 - 2.0**-24}
    for initial in (2.0**15, np.float32(2.0**15 * 1.3), np.nextafter(np.float32(2), 1)):
        for rule in (DynamicLossScale, functools.partial(TolerantLossScale, 0)):
            scale = rule(initial_scale=initial, growth_interval=1, **factors)
            grown, _ = scale.update(1.0, scale.init())
            lower, _ = scale.update(jnp.nan, scale.init())
            assert lower.loss_scale < initial < grown.loss_scale


class TestGetLossScale:
    def test_takes_what_users_write(self):
        scale = DynamicLossScale(4.0)
        assert get_loss_scale(scale) is scale
        assert get_loss_scale(8) == get_loss_scale(8.0) == FixedLossScale(8.0)
        assert get_loss_scale(np.float32(8)) == FixedLossScale(8.0)
        assert get_loss_scale("dynamic") == DynamicLossScale()
        assert get_loss_scale("headroom") == HeadroomLossScale()

    @pytest.mark.parametrize(
        "bad",
        [
            None,
            True,
            "static",
            "",
            [8],
            DynamicLossScale,
            jax.device_put(np.float32(8)),
        ],
    )
    def test_refuses_the_rest(self, bad):
        with pytest.raises(ValueError, match=r"one of \['dynamic', 'headroom'\], got"):
            get_loss_scale(bad)

    @pytest.mark.parametrize("number", [0.5, np.float32(0.5), 0, -1, math.nan, 1e39])
    def test_the_error_of_a_number_names_what_the_user_wrote(self, number):
        for make in (get_loss_scale, lambda x: LossScaleOptimizer(optax.sgd(0.1), x)):
            with pytest.raises(ValueError, match=r"^A fixed loss scale must") as error:
                make(number)
            assert repr(number) in str(error.value)
            assert "loss_scale_value" not in str(error.value)
        with pytest.raises(ValueError, match=r"^initial_scale must"):
            LossScaleOptimizer(optax.sgd(0.1), dynamic=False, initial_scale=number)
