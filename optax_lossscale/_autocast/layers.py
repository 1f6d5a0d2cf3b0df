"""Layers: PyTorch computes each in one operation. A program shows them by structure.

- A linear layer, or a convolution: a product, moved or multiplied by constants, or a
  sum of products, plus a bias.
- A norm: an array, perhaps less its own mean, times a statistic that undoes its size,
  as 1 / std does: of twice the array the norm is the same. Times one gain, plus a bias.
  Statistics are made of sums, powers and roots of the array's own values.
- A gain: a factor of a norm or of its statistics, or a factor without dimensions. In a
  loop, a factor of the state is none, but a decay. A mask: a factor of two known
  values.

Biases and gains are parameters, as `roles` says. A bias has one dimension.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from optax_lossscale._autocast import policy
from optax_lossscale._autocast.program import Program, Step
from optax_lossscale._autocast.roles import Role, Roles
from optax_lossscale._jaxprs import primitives
from optax_lossscale._jaxprs.primitives import Kind, Trait


class Layer(NamedTuple):
    """The role of a step in a layer; all None if it is in no layer.

    Attributes:
      operand: The layer's input. The result has its dtype.
      part: The operand of the step that gives way: a bias, a gain, a mask, statistics.
      is_norm: Whether the layer is a norm. Its steps compute in float32.
    """

    operand: Any = None
    part: Any = None
    is_norm: bool = False


class MadeOf(NamedTuple):
    """The one array that an array is made of, as in a norm; parameters do not count.

    Attributes:
      array: That array; the index of an argument stands for it.
      is_statistic: Whether it is a statistic of that array.
      degree: If that array doubles, it becomes 2**degree times as large: 2 for a sum of
        squares, -1 for 1 / std.
    """

    array: Any
    is_statistic: bool = False
    degree: float = 1


NO_LAYER = Layer()


class Layers:
    """By step of a program, its role in a layer. Each step is looked at once.

    Attributes:
      program: The program.
      roles: The roles of its arrays.
      bodies: By step, the layers of the programs in it, each with the indices of its
        operands.
    """

    def __init__(
        self,
        program: Program,
        roles: Roles,
        bodies: Mapping[Step, Sequence[tuple["Layers", Sequence[int]]]],
        given: tuple[MadeOf, ...] | None = None,
    ):
        """Takes the attributes, and the arrays of the arguments: themselves if None."""
        variables = program.jaxpr.invars
        if given is None:
            given = tuple(map(MadeOf, range(len(variables))))
        self.program, self.roles, self.bodies = program, roles, bodies
        self._given, self._others = given, {}
        self._layers: dict[Step, Layer] = {}
        self._sources: dict[Any, Any] = {}  # by a copy, the variable
        self._noted = dict(zip(variables, given, strict=True))
        self._products: set[Any] = set()
        self._centered: dict[Any, Any] = {}  # by an array less its mean, the array
        self._norms: dict[Any, Any] = {}  # by a norm, its input
        self._gained: set[Any] = set()  # norms, and statistics, that have their gain
        for step in program.steps:
            inputs = [x for x in step.inputs if x and program.known(x) is None]
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
            self._note_made_of(step, inputs, results)

    def __getitem__(self, step: Step) -> Layer:
        return self._layers.get(step, NO_LAYER)

    def for_arguments(self, given: tuple[MadeOf, ...]) -> "Layers":
        """Returns the layers for arguments made of these arrays, found once each."""
        if given == self._given:
            return self
        if given not in self._others:
            about = self.program, self.roles, self.bodies
            self._others[given] = Layers(*about, given)
        return self._others[given]

    def _source(self, variable):
        return self._sources.get(variable, variable)

    def _find(self, step, inputs, result):
        """Notes the role of a step of two arrays in a layer."""
        if step.has(Trait.MINUS) and self._is_own(*inputs, degree=1):
            self._centered[result] = inputs[0]
        if not step.has(Trait.PLUS | Trait.TIMES):
            return
        for large, part in (inputs, inputs[::-1]):
            layer = self._layer(step.has(Trait.TIMES), large, part, result)
            if layer is not None:
                self._layers[step] = layer
                if layer.is_norm:
                    self._norms[result] = layer.operand
                return

    def _layer(self, is_factor, large, part, result):
        """Returns the role of a sum or a product; None if no operand is a part."""
        inputs = large, part, result
        if is_factor and (layer := self._mask(large, part) or self._norm(*inputs)):
            return layer
        if not self._is_parameter(is_factor, *inputs):
            return None
        affine = self._gain_or_bias_of_norm(is_factor, *inputs)
        return affine or self._bias_or_scalar(is_factor, large, part)

    def _mask(self, large, part):
        """Returns the role of a product with a mask."""
        values = self.program.masks.get(part, [math.inf])
        return Layer(large, part) if all(map(policy.is_moderate, values)) else None

    def _norm(self, large, part, result):
        """Returns the role of a product of an array and its own statistics."""
        if not self._is_own(large, part, degree=-self._made_of(large).degree):
            return None
        self._note_gain(result, self._source(part) in self._gained)
        operand = self._centered.get(self._source(large), large)
        return Layer(operand, part, is_norm=True)

    def _is_parameter(self, is_factor, large, part, result):
        """Whether an operand may be a gain, a bias or a scalar of a layer."""
        small = self._source(part)
        # Flax multiplies the statistics by the gain first, which broadcasts both.
        is_statistic = self._made_of(large).is_statistic
        is_whole = is_statistic or large.aval.size == result.aval.size
        is_vector = sum(n != 1 for n in small.aval.shape) < 2
        is_part = is_whole and self.roles.of(small) == Role.PARAMETER
        return is_part and (is_factor or is_vector)

    def _gain_or_bias_of_norm(self, is_factor, large, part, result):
        """Returns the role of a gain or a bias of a norm, which has one gain."""
        source = self._source(large)
        is_norm, has_gain = source in self._norms, source in self._gained
        if not is_norm and not (is_factor and self._made_of(large).is_statistic):
            return None
        is_gain = is_factor and not self._is_scalar(part)
        if is_gain and has_gain:
            return None
        self._note_gain(result, is_gain or has_gain)
        return Layer(self._norms.get(source, large), part, is_norm)

    def _bias_or_scalar(self, is_factor, large, part):
        """Returns the role of a bias of a product, or of a scalar that scales."""
        if is_factor:
            is_layer = self._is_scalar(part) and self.roles.of(large) != Role.STATE
        else:
            is_layer = self._source(large) in self._products
        return Layer(large, part) if is_layer else None

    def _is_scalar(self, part):
        return not (part.aval.shape and self._source(part).aval.shape)

    def _note_gain(self, result, has_gain):
        if has_gain:
            self._gained.add(result)

    def _made_of(self, variable):
        source = self._source(variable)
        return self._noted.get(source, MadeOf(source))

    def _is_own(self, variable, other, degree):
        """Whether `other` is a statistic, of a degree, of the array of `variable`."""
        wanted = MadeOf(self._made_of(variable).array, True, degree)
        return self._made_of(other) == wanted

    def _note_made_of(self, step, inputs, results):
        """Notes the arrays of results. A norm has none: its gain may be large."""
        arrays = [x for x in inputs if self.roles.of(x) != Role.PARAMETER]
        made_of = dict(zip(arrays, map(self._made_of, arrays), strict=True))
        array, *others = {x.array for x in made_of.values()} or [None]
        is_norm = others or array is None or self._norms.keys() & results
        if is_norm or not self._is_of_norm(step):
            return
        if step.bodies:
            self._noted.update(self._made_inside(step, array, results))
        elif (degree := self._degree(step, made_of)) is not None:
            is_statistic = all(x.is_statistic for x in made_of.values())
            for x in results:
                is_smaller = all(x.aval.size != y.aval.size for y in arrays)
                is_sum = step.name == "reduce_sum" and is_smaller
                self._noted[x] = MadeOf(array, is_statistic or is_sum, degree)

    def _made_inside(self, step, array, results):
        """Yields the results of a call that are made of an array, and how."""
        bodies = self.bodies[step]
        if len(bodies) == 1 and not step.carry:
            ((body, operands),) = bodies
            given = [self._made_of(step.inputs[i]) for i in operands]
            # An array is the first operand that is made of it, whoever calls.
            arrays = [x.array for x in given]
            places = (x._replace(array=arrays.index(x.array)) for x in given)
            inside = body.for_arguments(tuple(places))
            for x, y in zip(results, inside.of_results, strict=True):
                if isinstance(y.array, int) and arrays[y.array] == array:
                    yield x, y._replace(array=array)

    @functools.cached_property
    def of_results(self) -> list[MadeOf]:
        """The arrays that the results are made of."""
        return list(map(self._made_of, self.program.outputs))

    def _is_of_norm(self, step):
        """Whether a step moves, scales, sums up or takes powers, or all in it do."""
        if step.bodies:
            return all(body.are_of_norm for body, _ in self.bodies[step])
        kinds = {step.kind, primitives.kind_of(step.name)}
        follows = not kinds.isdisjoint(policy.FOLLOWERS)
        return follows or step.has(Trait.SUM | Trait.POWER)

    @functools.cached_property
    def are_of_norm(self) -> bool:
        """Whether all of its steps may be steps of a norm."""
        return all(map(self._is_of_norm, self.program.steps))

    def _degree(self, step, made_of):
        """Returns the degree of the results of a step; None if they have none."""
        degrees = [made_of[x].degree if x in made_of else 0 for x in step.inputs]
        if step.has(Trait.TIMES):
            return sum(degrees)
        if step.has(Trait.OVER):
            return degrees[0] - degrees[1]
        if step.has(Trait.POWER):
            exponent = _exponent(self.program, step)
            return None if exponent is None else degrees[0] * exponent
        common = {x.degree for x in made_of.values()}
        return common.pop() if len(common) == 1 else None


def _exponent(program, step):
    """Returns the exponent of a power or a root; None if it is unknown."""
    if step.name == "pow":
        return program.known(step.equation.invars[1])
    return step.equation.params.get("y", primitives.EXPONENTS.get(step.name))


def find_layers(
    program: Program, roles: tuple[Role, ...], found: dict[Any, Layers]
) -> Layers:
    """Returns the layers of a program.

    Layers depend on roles, and roles on layers: a parameter that is combined with data
    outside of layers is MIXED. This may end other layers, so they are found again,
    until no more parameters are MIXED.

    Args:
      program: The program.
      roles: The roles of its arguments.
      found: The layers of programs that were found before, each once for its roles.
    """
    key = program, roles
    if key not in found:
        given = dict(zip(program.jaxpr.invars, roles, strict=True))
        layers = _layers(program, given, found)
        while mixed := _mixed(layers):
            given |= dict.fromkeys(mixed, Role.MIXED)
            layers = _layers(program, given, found)
        found[key] = layers
    return found[key]


def _layers(program, given, found):
    """Returns the layers of a program, for these roles of its arguments."""
    roles, bodies = Roles(program, given), {}
    for step in program.steps:
        if step.bodies:
            inside = roles.inside(step)
            bodies[step] = [
                (find_layers(body, tuple(inside[i] for i in operands), found), operands)
                for body, operands in step.bodies
            ]
        roles.follow(step, [body.roles for body, _ in bodies.get(step, ())])
    return Layers(program, roles, bodies)


def _mixed(layers):
    """Returns the parameters among the arguments that are MIXED after all."""
    mixed: set[Any] = set()
    role = layers.roles.of
    for step in reversed(layers.program.steps):
        atoms, part = step.equation.invars, layers[step].part
        found = [x in mixed for x in step.equation.outvars]
        is_layer = step.bodies or step.kind == Kind.PRODUCT or step.is_parallel
        mixes = not is_layer and max(map(role, atoms), default=0) >= Role.DATA
        # The sum of the squares of a parameter, say, is added to the loss: no matter.
        is_array = any(x.aval.shape for x in mixed.intersection(step.equation.outvars))
        back = found if step.is_parallel else [any(found)] * len(atoms)
        for x, y in zip(atoms, back, strict=True):
            is_parameter = role(x) == Role.PARAMETER and x is not part
            if is_parameter and (mixes or (y and (is_array or not x.aval.shape))):
                mixed.add(x)
        for body, operands in layers.bodies.get(step, ()):
            pairs = zip(operands, body.program.jaxpr.invars, strict=True)
            inside = (atoms[i] for i, x in pairs if body.roles.of(x) > Role.PARAMETER)
            mixed.update(x for x in inside if role(x) == Role.PARAMETER)
    return mixed.intersection(layers.program.jaxpr.invars)
