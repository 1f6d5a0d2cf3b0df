"""Layers: what PyTorch computes in one operation, found in the structure of a program.

- A linear layer, or a convolution: a product, moved or multiplied by numbers, or a sum
  of products, plus a bias. A bias has one dimension, and the program has read it as
  nothing else before.
- A norm: an array, perhaps less its own mean, times what follows from its own
  statistics, times a gain, plus a bias.
- A gain: a factor that is smaller than the result. A mask: a factor that was a bool.
"""

from typing import Any, NamedTuple

from optax_lossscale._autocast.program import Program, Step
from optax_lossscale._jaxprs import primitives
from optax_lossscale._jaxprs.primitives import Kind, Trait


class Layer(NamedTuple):
    """What a step is in a layer.

    Attributes:
      operand: The operand of the layer, which decides the dtype of the result.
      part: The operand of the step that gives way: a bias, a gain, a mask, statistics.
      is_norm: Whether it is a step of a norm. Those compute in float32.
    """

    operand: Any
    part: Any
    is_norm: bool


def layers_of(program: Program) -> dict[Step, Layer]:
    """Returns the steps of a program in which a part of a layer gives way."""
    search = _Search(program)
    found = ((step, search.look(step)) for step in program.steps)
    return {step: layer for step, layer in found if layer is not None}


class _Search:
    """A search for layers, which looks at each step once, in their order."""

    def __init__(self, program: Program):
        self._number = program.number
        self._inputs = {*program.jaxpr.invars, *program.jaxpr.constvars}
        self._sources: dict[Any, Any] = {}  # what was moved to a variable
        self._origins: dict[Any, tuple[Any, bool]] = {}
        self._products: set[Any] = set()
        self._masks: set[Any] = set()
        self._centered: dict[Any, Any] = {}  # by a difference, what is less its mean
        self._norms: dict[Any, Any] = {}  # by a norm, its operand
        self._data: set[Any] = set()  # what is read otherwise than as a part

    def look(self, step: Step) -> Layer | None:
        """Returns what a step is in a layer, if it is anything."""
        inputs = [x for x in step.inputs if x is not None and self._number(x) is None]
        sources = [self._sources.get(x, x) for x in inputs]
        results, layer = step.equation.outvars, None
        if primitives.has(step.name, Trait.KEEPS) and len(step.inputs) == 1:
            self._sources.update(zip(results, sources, strict=False))
            return None
        if len(inputs) == 2 and results:
            layer = self._layer(step.name, *inputs, results[0])
        count = {"add": 2, "mul": 1, "div": 1}.get(step.name)
        is_kept = len(inputs) == count and self._products.issuperset(sources)
        if step.kind == Kind.PRODUCT or is_kept:
            self._products.update(results)
        is_cast = step.name == "convert_element_type" and len(inputs) == 1
        is_bool = is_cast and inputs[0].aval.dtype == bool
        is_kept = step.kind == Kind.ARITHMETIC and self._masks.issuperset(sources)
        if is_bool or (is_kept and len(inputs) == 1):
            self._masks.update(results)
        if layer is not None and layer.is_norm:
            self._norms[results[0]] = layer.operand
        if step.name == "sub" and len(inputs) == 2 and self._is_own(*inputs):
            self._centered[results[0]] = inputs[0]
        if step.kind != Kind.PRODUCT:
            self._trace(inputs, results)
        part = None if layer is None else layer.part
        pairs = zip(inputs, sources, strict=True)
        self._data.update(source for x, source in pairs if x is not part)
        return layer

    def _layer(self, name, x, y, result):
        """Returns what a sum or a product of two arrays is in a layer."""
        pairs = [(x, y), (y, x)]
        if name == "mul":
            for x, part in pairs:
                if self._sources.get(part, part) in self._masks:
                    return Layer(x, part, is_norm=False)
            for x, part in pairs:
                if self._is_own(x, part):
                    source = self._sources.get(x, x)
                    return Layer(self._centered.get(source, x), part, is_norm=True)
        for x, part in pairs:
            source, small = (self._sources.get(z, z) for z in (x, part))
            if not small.aval.size < result.aval.size == x.aval.size:
                continue
            if name in ("add", "mul") and source in self._norms:
                return Layer(self._norms[source], part, is_norm=True)
            is_vector = sum(n > 1 for n in small.aval.shape) < 2
            is_bias = is_vector and source in self._products and small not in self._data
            if name == "mul" or (name == "add" and is_bias):
                return Layer(x, part, is_norm=False)
        return None

    def _origin(self, variable):
        """Returns what an array is made of, and whether it is a statistic of that."""
        source = self._sources.get(variable, variable)
        return self._origins.get(source, (source, False))

    def _is_own(self, variable, statistic):
        """Whether an array is made of another one's statistics."""
        origin, is_statistic = self._origin(variable)
        return not is_statistic and self._origin(statistic) == (origin, True)

    def _trace(self, inputs, results):
        """Notes what the results are made of: one array, and perhaps parameters."""
        origins = {self._origin(x) for x in inputs}
        largest = max((x.aval.size for x, _ in origins), default=0)
        # A gain, say, which the program gets, is smaller.
        origins = {
            (x, is_statistic)
            for x, is_statistic in origins
            if x not in self._inputs or x.aval.size == largest
        }
        if len({x for x, _ in origins}) != 1:
            return
        ((origin, _), *_), size = origins, max(x.aval.size for x in inputs)
        for x in results:
            is_statistic = x.aval.size < size or all(y for _, y in origins)
            self._origins[x] = origin, is_statistic
