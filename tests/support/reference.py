"""The rules in plain Python and NumPy, one step at a time: the oracle."""

import math

import numpy as np


class Dynamic:
    """The rule of `DynamicLossScale`, written down from its pseudocode."""

    def __init__(
        self,
        initial_scale=2.0**15,
        growth_interval=2000,
        growth_factor=2.0,
        backoff_factor=0.5,
        min_scale=1.0,
        max_scale=2.0**126,
        hysteresis=1,
        consecutive_hysteresis=False,
    ):
        f32 = np.float32
        self.growth_interval = growth_interval
        self.growth_factor, self.backoff_factor = (
            f32(growth_factor),
            f32(backoff_factor),
        )
        self.min_scale, self.max_scale = f32(min_scale), f32(max_scale)
        self.hysteresis = hysteresis
        self.consecutive_hysteresis = consecutive_hysteresis
        self.loss_scale = f32(initial_scale)
        self.good_steps = 0
        self.hysteresis_left = hysteresis

    def step(self, finite):
        with np.errstate(over="ignore", under="ignore"):
            if finite:
                self._finite()
            else:
                self._non_finite()
        return float(self.loss_scale), self.good_steps, self.hysteresis_left

    def _finite(self):
        self.good_steps += 1
        grew = self.good_steps >= self.growth_interval
        if grew:
            grown = self.loss_scale * self.growth_factor
            self.loss_scale = min(grown, self.max_scale)
            self.good_steps = 0
        if grew or self.consecutive_hysteresis:
            self.hysteresis_left = self.hysteresis

    def _non_finite(self):
        self.good_steps = 0
        self.hysteresis_left = max(self.hysteresis_left - 1, 0)
        if self.hysteresis_left == 0:
            backed_off = self.loss_scale * self.backoff_factor
            self.loss_scale = max(backed_off, self.min_scale)


class Tolerant:
    """The rule of `TolerantLossScale`, as fairseq counts: by iteration numbers."""

    def __init__(
        self,
        tolerance,
        initial_scale=2.0**15,
        growth_interval=2000,
        growth_factor=2.0,
        backoff_factor=0.5,
        min_scale=1.0,
        max_scale=2.0**126,
    ):
        self.tolerance, self.growth_interval = tolerance, growth_interval
        self.growth_factor, self.backoff_factor = growth_factor, backoff_factor
        self.min_scale, self.max_scale = min_scale, max_scale
        self.loss_scale = initial_scale
        self.iteration = self.overflows = 0
        self.last_overflow = self.last_change = -1

    def step(self, finite):
        if finite:
            good_steps = self.iteration - self.last_overflow
            if good_steps % self.growth_interval == 0:
                grown = self.loss_scale * self.growth_factor
                self.loss_scale = min(grown, self.max_scale)
                self.last_change = self.iteration
        else:
            self.last_overflow = self.iteration
            self.overflows += 1
            share = self.overflows / (self.iteration - self.last_change)
            if share >= self.tolerance:
                backed_off = self.loss_scale * self.backoff_factor
                self.loss_scale = max(backed_off, self.min_scale)
                self.last_change = self.iteration
                self.overflows = 0
        self.iteration += 1
        return self.loss_scale


class Headroom:
    """The rule of `HeadroomLossScale`, in exponents and in double."""

    def __init__(
        self,
        initial_scale,
        min_margin,
        growth_interval,
        release_steps,
        hysteresis,
        min_scale,
        max_scale,
    ):
        self.min_margin, self.hysteresis = min_margin, hysteresis
        self.growth_interval, self.release_steps = growth_interval, release_steps
        self.lowest, self.highest = math.log2(min_scale), math.log2(max_scale)
        self.exponent, self.margin = math.log2(initial_scale), min_margin
        self.peak = 16 - min_margin - self.exponent
        self.overflowed = False

    def step(self, largest):
        """Takes a step; returns the highest exponent there is room for, if finite."""
        room = None
        if not math.isfinite(largest):
            self.exponent -= 1
            self.overflowed = True
        else:
            self._learn(largest)
            room = 16 - self.peak - self.margin
            if self.exponent > math.floor(room):
                self.exponent = math.floor(room)
            elif self.exponent < math.floor(room - self.hysteresis):
                self.exponent = math.floor(room - self.hysteresis)
        self.exponent = min(max(self.exponent, self.lowest), self.highest)
        return room

    def _learn(self, largest):
        if largest == 0:
            self.peak -= 1 / self.growth_interval
        elif math.log2(largest) > self.peak:
            self.peak = math.log2(largest)
        else:
            self.peak -= (self.peak - math.log2(largest)) / self.release_steps
        if self.overflowed:
            left = 16 - self.peak - self.exponent - 2.0**-10
            self.margin = max(self.margin, left)
        else:
            shrunk = self.margin - 1 / self.growth_interval
            self.margin = max(shrunk, self.min_margin)
        self.overflowed = False


class MomentumSGD:
    """Loss-scaled `optax.sgd(learning_rate, momentum)` for one number."""

    def __init__(self, rule, param, learning_rate, momentum):
        self.rule, self.param = rule, np.float32(param)
        self.learning_rate, self.momentum = map(np.float32, (learning_rate, momentum))
        self.trace = np.float32(0)
        self.skipped = self.consecutive = 0

    def step(self, gradient):
        finite = bool(np.isfinite(gradient))
        self.rule.step(finite)
        if finite:
            self.trace = np.float32(gradient) + self.momentum * self.trace
            self.param = self.param - self.learning_rate * self.trace
        self.skipped += not finite
        self.consecutive = 0 if finite else self.consecutive + 1
        return float(self.param)
