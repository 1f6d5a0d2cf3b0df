"""Layers: what PyTorch computes in one operation, found in the structure of a program.

- A linear layer, or a convolution: a product, moved or multiplied by numbers, or a sum
  of products, plus a bias. A bias has one dimension, and the program has read it as
  nothing else before.
- A norm: an array, perhaps less its own mean, times what follows from its own
  statistics, times a gain, plus a bias.
- A gain: a factor that is smaller than the result. A mask: a factor that was a bool.
"""

import collections
from typing import Any, NamedTuple

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
        self._number = program.number
        self._inputs = {*program.jaxpr.invars, *program.jaxpr.constvars}
        self._sources: dict[Any, Any] = {}  # what was moved to a variable
        # By array, what it is made of, and whether it is a statistic of that.
        self._origins: dict[Any, tuple[Any, bool]] = {}
        self._products: set[Any] = set()
        self._masks: set[Any] = set()
        self._centered: dict[Any, Any] = {}  # by a difference, what is less its mean
        self._norms: dict[Any, Any] = {}  # by a norm, its operand
        # What is read otherwise than as a part of a layer, and what not by calls alone.
        self._data, self._read = set(program.data), set(program.data)
        for step in program.steps:
            self._look(step)

    def _source(self, variable):
        return self._sources.get(variable, variable)

    def _look(self, step):
        """Notes what a step is, and what its results are."""
        inputs = [x for x in step.inputs if x is not None and self._number(x) is None]
        sources, results = list(map(self._source, inputs)), step.equation.outvars
        if primitives.has(step.name, Trait.KEEPS) and len(step.inputs) == 1:
            self._sources.update(zip(results, sources, strict=False))
            return
        layer = Layer()
        if len(inputs) == 2 and step.name in ("add", "mul"):
            layer = self._layer(step.name == "mul", inputs, results[0])
        if layer.part is not None:
            self[step] = layer
        if layer.is_norm:
            self._norms[results[0]] = layer.operand
        if step.name == "sub" and len(inputs) == 2 and self._is_own(*inputs):
            self._centered[results[0]] = inputs[0]
        is_linear = len(inputs) == {"add": 2, "mul": 1, "div": 1}.get(step.name)
        if is_linear and self._products.issuperset(sources):
            self._products.update(results)
        is_mask = step.kind == Kind.ARITHMETIC and self._masks.issuperset(sources)
        if step.name == "convert_element_type":
            is_mask = step.equation.invars[0].aval.dtype == bool
        if is_mask and len(inputs) == 1:
            self._masks.update(results)
        if step.kind == Kind.PRODUCT:
            self._products.update(results)
        elif inputs:
            self._trace(inputs, results)
        pairs = zip(inputs, sources, strict=True)
        read = {source for x, source in pairs if x is not layer.part}
        self._data |= read
        self._read |= set() if step.bodies else read
        for body, reads in step.bodies:
            given = zip(reads, body.jaxpr.invars, strict=True)
            sources = ((self._source(step.inputs[i]), x) for i, x in given)
            body.data.update(x for source, x in sources if source in self._read)

    def _layer(self, is_factor, inputs, result):
        """Returns what a sum or a product of two arrays is in a layer."""
        for large, part in (inputs, inputs[::-1]):
            source, small = self._source(large), self._source(part)
            is_small = small.aval.size < result.aval.size == large.aval.size
            is_bias = not is_factor and small not in self._data
            is_vector = sum(n > 1 for n in small.aval.shape) < 2
            if is_factor and small in self._masks:
                return Layer(large, part)
            if is_factor and self._is_own(large, part):
                return Layer(self._centered.get(source, large), part, is_norm=True)
            if is_small and (is_factor or is_bias) and source in self._norms:
                return Layer(self._norms[source], part, is_norm=True)
            is_bias &= is_vector and source in self._products
            if is_small and (is_bias or (is_factor and source not in self._masks)):
                return Layer(large, part)
        return Layer()

    def _origin(self, variable):
        source = self._source(variable)
        return self._origins.get(source, (source, False))

    def _is_own(self, variable, other):
        """Whether an array is made of another one's statistics."""
        origin, _ = self._origin(variable)
        return self._origin(other) == (origin, True)

    def _trace(self, inputs, results):
        """Notes what results are made of: of one array, and perhaps of parameters."""
        origins = set(map(self._origin, inputs))
        largest = max(x.aval.size for x, _ in origins)
        # A gain, say, is smaller, and the program gets it.
        origins = {x for x in origins if x[0] not in self._inputs} | {
            x for x in origins if x[0].aval.size == largest
        }
        (origin, _), *_ = origins
        if any(x is not origin for x, _ in origins):
            return
        size = max(x.aval.size for x in inputs)
        for x in results:
            is_statistic = x.aval.size < size or all(y for _, y in origins)
            self._origins[x] = origin, is_statistic
