"""Layers: what PyTorch computes in one operation, found in the structure of a program.

- A linear layer, or a convolution: a product, moved or multiplied by numbers, or a sum
  of products, plus a bias.
- A norm: an array, perhaps less its own mean, times what sums, powers and roots make of
  its own numbers, times one gain, plus a bias.
- A gain: a factor of a norm or of its statistics, or a number without dimensions. In a
  loop, a factor of the state is none, but a decay. A mask: a factor of two known
  numbers.

Biases and gains are parameters, as `roles` finds them. A bias has one dimension.
"""

import collections
import math
from typing import Any, NamedTuple

from optax_lossscale._autocast import policy
from optax_lossscale._autocast.roles import Role, steps_of
from optax_lossscale._jaxprs import primitives
from optax_lossscale._jaxprs.primitives import Kind, Trait


class Layer(NamedTuple):
    """What a step is in a layer; in none by default.

    Attributes:
      operand: The operand of the layer, which decides the dtype of the result.
      part: The operand of the step that gives way: a bias, a gain, a mask, statistics.
      is_norm: Whether it is a step of a norm. Those compute in float32.
    """

    operand: Any = None
    part: Any = None
    is_norm: bool = False


class Layers(collections.defaultdict[Any, Layer]):
    """By step of a program, what it is in a layer. Looks at each step once."""

    def __init__(self, program: Any):
        """Takes a program with its steps."""
        super().__init__(Layer)
        self._program = program
        self._sources: dict[Any, Any] = {}  # by variable, what it is a copy of
        # By array, what it is made of, and whether it is a statistic of that.
        self._origins: dict[Any, tuple[Any, bool]] = {}
        self._products: set[Any] = set()
        self._centered: dict[Any, Any] = {}  # by a difference, what is less its mean
        self._norms: dict[Any, Any] = {}  # by a norm, its operand
        self._gained: set[Any] = set()  # norms, and statistics, that have their gain
        for step in program.steps:
            inputs = [x for x in step.inputs if x and program.number(x) is None]
            sources, results = list(map(self._source, inputs)), step.equation.outvars
            if step.has(Trait.KEEPS) and len(step.inputs) == 1:
                self._sources.update(zip(results, sources, strict=False))
                continue
            if len(inputs) == 2 and results and policy.is_float32(results[0].aval):
                self._find(step, inputs, results[0])
            is_scaled = step.has(Trait.TIMES | Trait.OVER) and len(inputs) == 1
            is_linear = is_scaled or (step.has(Trait.PLUS) and len(inputs) == 2)
            is_product = is_linear and self._products.issuperset(sources)
            if is_product or step.kind == Kind.PRODUCT:
                self._products.update(results)
            self._note_origins(step, inputs, results)

    def _source(self, variable):
        return self._sources.get(variable, variable)

    def _find(self, step, inputs, result):
        """Notes what a step of two arrays is in a layer."""
        if step.has(Trait.MINUS) and self._is_own(*inputs):
            self._centered[result] = inputs[0]
        if not step.has(Trait.PLUS | Trait.TIMES):
            return
        for large, part in (inputs, inputs[::-1]):
            layer = self._layer(step.has(Trait.TIMES), large, part, result)
            if layer is not None:
                self[step] = layer
                if layer.is_norm:
                    self._norms[result] = layer.operand
                return

    def _layer(self, is_factor, large, part, result):
        """Returns what a sum or a product is, if one operand is a part of a layer."""
        program, source, small = self._program, self._source(large), self._source(part)
        numbers = program.masks.get(part, [math.inf])
        if is_factor and all(map(policy.is_moderate, numbers)):
            return Layer(large, part)
        if is_factor and self._is_own(large, part):
            self._note_gain(result, small in self._gained)
            return Layer(self._centered.get(source, large), part, is_norm=True)
        # Flax multiplies the statistics by the gain first, which broadcasts both.
        _, is_statistic = self._origin(large)
        is_whole = is_statistic or large.aval.size == result.aval.size
        is_vector = sum(n != 1 for n in small.aval.shape) < 2
        is_part = is_whole and program.role(small) == Role.PARAMETER
        if not is_part or not (is_factor or is_vector):
            return None
        is_number = not (part.aval.shape and small.aval.shape)
        has_gain = source in self._gained
        if source in self._norms or (is_factor and is_statistic):
            is_gain = is_factor and not is_number
            if is_gain and has_gain:
                return None
            self._note_gain(result, is_gain or has_gain)
            operand, is_norm = self._norms.get(source, large), source in self._norms
            return Layer(operand, part, is_norm)
        if not is_factor:
            return Layer(large, part) if source in self._products else None
        is_gain = is_number and program.role(large) != Role.STATE
        return Layer(large, part) if is_gain else None

    def _note_gain(self, result, has_gain):
        if has_gain:
            self._gained.add(result)

    def _origin(self, variable):
        source = self._source(variable)
        return self._origins.get(source, (source, False))

    def _is_own(self, variable, other):
        """Whether an array is made of another one's statistics."""
        origin, _ = self._origin(variable)
        return self._origin(other) == (origin, True)

    def _note_origins(self, step, inputs, results):
        """Notes which array results are made of, as a norm is; gains do not count."""
        arrays = [x for x in inputs if self._program.role(x) != Role.PARAMETER]
        origins = set(map(self._origin, arrays))
        steps = list(steps_of([step]))
        if len({x for x, _ in origins}) != 1 or not all(map(_is_of_norm, steps)):
            return
        has_sum = any(x.name == "reduce_sum" for x in steps)
        ((origin, _), *_) = origins
        for x in results:
            is_smaller = all(x.aval.size != y.aval.size for y in arrays)
            is_statistic = (has_sum and is_smaller) or all(y for _, y in origins)
            self._origins[x] = origin, is_statistic


def _is_of_norm(step):
    """Whether a step moves, scales, sums up or takes powers, or holds such steps."""
    kinds = {step.kind, primitives.kind_of(step.name)}
    follows = not kinds.isdisjoint(policy.FOLLOWERS)
    return follows or step.bodies or step.has(Trait.SUM | Trait.POWER)
