"""Which loops end by floating-point numbers: solvers."""

import enum
import functools
from collections.abc import Callable, Sequence
from typing import Any

from optax_lossscale._jaxprs import flow, parts, primitives
from optax_lossscale._jaxprs.primitives import Kind, Trait
from optax_lossscale._tree import is_inexact


class Origin(enum.IntEnum):
    """What an array in a loop comes from. Of several the largest wins.

    - FIXED: The same in each iteration.
    - DRAWN: Random, and made of nothing else that changes.
    - STATE: The state of the loop.
    - COMPARED: An integer or a flag, which compares floating-point numbers of the
      state, or depends on such a one.
    """

    FIXED = 0
    DRAWN = 1
    STATE = 2
    COMPARED = 3


Origins = list[Origin]


def by_floats(equation: Any) -> bool:
    """Whether it is a `while` whose end floating-point numbers of its state decide.

    Roundoff of half precision may never be as small as its tolerance. The condition
    compares them itself, or reads a flag that the body got from a comparison, also
    through integers, functions, branches and inner loops. An `argmax` compares numbers
    only with each other, and a random number is compared with anything: no end of a
    loop waits for their last digits.
    """
    if equation.primitive.name != "while":
        return False
    asked, consts, carry = flow.while_parts(equation, equation.invars)
    state = [
        Origin.FIXED if is_kept else Origin.STATE
        for is_kept in _kept(equation.params["body_jaxpr"], len(consts), len(carry))
    ]
    given = [Origin.FIXED] * (len(asked) + len(consts)) + state
    return _Walk().while_loop(equation, given)[0] == Origin.COMPARED


def _kept(closed: Any, before: int, n: int) -> list[bool]:
    """Returns of each part of a state whether a body returns it as it is."""
    jaxpr, _ = parts.opened(closed)
    given = jaxpr.invars[before : before + n]
    return [x is y for x, y in zip(given, jaxpr.outvars[:n], strict=True)]


class _Walk:
    """Follows origins through jaxprs, each once for the origins of its arguments."""

    def __init__(self):
        self._found: dict[Any, Origins] = {}

    def results(self, x: Any, given: Sequence[Origin]) -> Origins:
        """Returns the origins of the results of a jaxpr."""
        jaxpr, _ = parts.opened(x)
        key = id(jaxpr), *given
        if key not in self._found:
            known = dict(zip(jaxpr.invars, given, strict=True))

            def origin(x):
                if parts.is_ref(x):
                    return Origin.STATE  # Some iteration may write it.
                # Constants and numbers are fixed.
                return known.get(parts.variable_of(x), Origin.FIXED)

            for equation in jaxpr.eqns:
                results = self._of(equation, list(map(origin, equation.invars)))
                pairs = zip(equation.outvars, results, strict=True)
                known.update((x, _held(x, result)) for x, result in pairs)
            self._found[key] = list(map(origin, jaxpr.outvars))
        return self._found[key]

    def _of(self, equation, given):
        name, n = equation.primitive.name, len(equation.outvars)
        if name == "while":
            return self.while_loop(equation, given)[1]
        if name == "scan":
            consts, carry, xs = flow.scan_parts(equation, given)
            body = equation.params["jaxpr"]
            return self._last(lambda x: self.results(body, [*consts, *x, *xs]), carry)
        if name == "cond":
            index, *operands = given
            found = [self.results(x, operands) for x in equation.params["branches"]]
            return [max(index, *x) for x in zip(*found, strict=True)]
        if primitives.kind_of(name) in (Kind.CALL, Kind.DEVICES):
            return self.results(parts.called_jaxpr(equation), given)
        if primitives.has(name, Trait.RANDOM):
            return [Origin.DRAWN] * n
        if primitives.has(name, Trait.PARALLEL) and n == len(given):
            return given
        made = max(given, default=Origin.FIXED)
        pairs = zip(equation.invars, given, strict=True)
        floats = {origin for x, origin in pairs if is_inexact(x.aval)}
        is_decided = max(floats, default=Origin.FIXED) == Origin.STATE
        if is_decided and Origin.DRAWN not in floats:
            # What returns places, as `argmax` does, decides nothing.
            made = made if primitives.has(name, Trait.PLACE) else Origin.COMPARED
        return [made] * n

    def while_loop(
        self, equation: Any, given: Sequence[Origin]
    ) -> tuple[Origin, Origins]:
        """Returns the origins of the condition of a `while`, and of its results."""
        asked, consts, carry = flow.while_parts(equation, given)
        params = equation.params
        body = functools.partial(self.results, params["body_jaxpr"])
        last = self._last(lambda x: body([*consts, *x]), carry)
        (goes_on,) = self.results(params["cond_jaxpr"], [*asked, *last])
        kept = _kept(params["body_jaxpr"], len(consts), len(carry))
        pairs = zip(last, kept, strict=True)
        return goes_on, [x if is_kept else max(x, goes_on) for x, is_kept in pairs]

    def _last(
        self, step: Callable[[Origins], Origins], state: Sequence[Origin]
    ) -> Origins:
        """Returns the results of a step, with the state after many steps."""
        state, n = list(state), len(state)
        while True:
            results = step(state)
            after = list(map(max, state, results[:n]))
            if after == state:
                return [*after, *results[n:]]
            state = after


def _held(variable: Any, origin: Origin) -> Origin:
    """Returns the origin of a variable; floating-point numbers decide nothing yet."""
    return min(origin, Origin.STATE) if is_inexact(variable.aval) else origin
