"""The rules in plain Python and NumPy, one step at a time: the oracle."""

import dataclasses
import math

import numpy as np


@dataclasses.dataclass
class Dynamic:
    """The rule of `DynamicLossScale`, written down from its pseudocode."""

    initial_scale: float
    growth_interval: int
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    min_scale: float = 1.0
    max_scale: float = 2.0**126
    hysteresis: int = 1
    consecutive_hysteresis: bool = False

    def __post_init__(self):
        self.loss_scale = np.float32(self.initial_scale)
        self.good_steps, self.hysteresis_left = 0, self.hysteresis

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
            grown = self.loss_scale * np.float32(self.growth_factor)
            self.loss_scale = min(grown, np.float32(self.max_scale))
            self.good_steps = 0
        if grew or self.consecutive_hysteresis:
            self.hysteresis_left = self.hysteresis

    def _non_finite(self):
        self.good_steps = 0
        self.hysteresis_left = max(self.hysteresis_left - 1, 0)
        if self.hysteresis_left == 0:
            backed_off = self.loss_scale * np.float32(self.backoff_factor)
            self.loss_scale = max(backed_off, np.float32(self.min_scale))


@dataclasses.dataclass
class Tolerant:
    """The rule of `TolerantLossScale`, as fairseq counts: by iteration numbers."""

    tolerance: float
    initial_scale: float
    growth_interval: int
    growth_factor: float
    backoff_factor: float
    min_scale: float
    max_scale: float

    def __post_init__(self):
        self.loss_scale = self.initial_scale
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


@dataclasses.dataclass
class Headroom:
    """The rule of `HeadroomLossScale`, in exponents and in double."""

    initial_scale: float
    min_margin: float
    growth_interval: int
    release_steps: int
    hysteresis_bits: float
    min_scale: float
    max_scale: float

    def __post_init__(self):
        self.exponent, self.margin = math.log2(self.initial_scale), self.min_margin
        self.peak = 16 - self.margin - self.exponent
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
            elif self.exponent < math.floor(room - self.hysteresis_bits):
                self.exponent = math.floor(room - self.hysteresis_bits)
        lowest, highest = math.log2(self.min_scale), math.log2(self.max_scale)
        self.exponent = min(max(self.exponent, lowest), highest)
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
