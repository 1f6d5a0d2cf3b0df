"""Solvers: the loops that floating-point numbers end.

This loop finds the square root of 2:

    def body(state):
        x, _, n = state
        new = (x + 2 / x) / 2
        return new, jnp.abs(new - x) > 1e-6, n + 1

    jax.lax.while_loop(lambda state: state[1], body, (jnp.float32(1), True, 0))

A walk through the body says that `new` depends on the STATE. The flag compares numbers
of the state, so it is COMPARED. The condition reads the flag, so the loop is a solver.
With the condition `state[2] < 10` it is none: the counter is STATE.
"""

import collections
import enum
import heapq
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from optax_lossscale._jaxprs import flow, parts, primitives
from optax_lossscale._jaxprs.primitives import Trait
from optax_lossscale._tree import is_inexact


class Dependence(enum.IntEnum):
    """What decides an array in a loop. Of several the largest wins.

    - FIXED: The same in each iteration.
    - DRAWN: Random, and made of nothing else that changes.
    - STATE: The state of the loop.
    - COMPARED: An integer or a flag that is made of a comparison of floating-point
      numbers of the state: the comparison itself, and all that follows from it.
    """

    FIXED = 0
    DRAWN = 1
    STATE = 2
    COMPARED = 3

    __hash__ = int.__hash__  # Python's own, of an `Enum`, is slow.


Dependences = list[Dependence]


class Walk:
    """Follows dependences through jaxprs, each once for those of its arguments."""

    def __init__(self):
        self._jaxprs: dict[Any, _Jaxpr] = {}
        self._found: dict[Any, Dependences] = {}
        self._have_solvers: dict[int, bool] = {}  # by the id of a jaxpr

    def holds_solver(self, equation: Any) -> bool:
        """Whether an equation is a `while` that ends by floats, or holds one."""
        inside = map(self._has_solver, parts.jaxprs_in(equation))
        return self.ends_by_floats(equation) or any(inside)

    def _has_solver(self, jaxpr):
        if id(jaxpr) not in self._have_solvers:
            found = any(map(self.holds_solver, jaxpr.eqns))
            self._have_solvers[id(jaxpr)] = found
        return self._have_solvers[id(jaxpr)]

    def ends_by_floats(self, equation: Any) -> bool:
        """Whether an equation is a `while` that floating-point numbers end.

        Such a loop waits until its numbers are as near to each other as a tolerance
        says, and roundoff of half precision may keep them apart. Its condition compares
        numbers of the state, or reads an integer or a flag that the body made of such a
        comparison, also in functions, branches and inner loops.

        Two comparisons end no solver: an `argmax` compares numbers only with each
        other, and a random number is compared with anything.
        """
        if equation.primitive.name != "while":
            return False
        asked, consts, carry = flow.while_parts(equation, equation.invars)
        state = [
            Dependence.FIXED if is_kept else Dependence.STATE
            for is_kept in _kept(equation.params["body_jaxpr"], len(consts), len(carry))
        ]
        given = [Dependence.FIXED] * (len(asked) + len(consts)) + state
        return self._while(equation, given)[0] == Dependence.COMPARED

    def _results(self, x: Any, given: Sequence[Dependence]) -> Dependences:
        """Returns the dependences of the results of a jaxpr."""
        jaxpr, _ = parts.opened(x)
        key = id(jaxpr), *given
        if key not in self._found:
            inside = self._inside(jaxpr)
            inside.assign(dict(zip(jaxpr.invars, given, strict=True)))
            self._found[key] = list(map(inside.dependence, jaxpr.outvars))
        return self._found[key]

    def _inside(self, jaxpr):
        if id(jaxpr) not in self._jaxprs:
            self._jaxprs[id(jaxpr)] = _Jaxpr(jaxpr, self)
        return self._jaxprs[id(jaxpr)]

    def of(self, equation: Any, given: Sequence[Dependence]) -> Sequence[Dependence]:
        """Returns the dependences of the results of an equation."""
        name, n = equation.primitive.name, len(equation.outvars)
        if name == "while":
            return self._while(equation, given)[1]
        if name == "scan":
            return self._loop(
                equation.params["jaxpr"], *flow.scan_parts(equation, given)
            )
        if jaxprs := flow.bodies_of(equation).jaxprs:
            read = {i for _, operands in jaxprs for i in operands}
            # The index of a branch, which says which of them runs.
            decides = [x for i, x in enumerate(given) if i not in read]
            found = [self._results(x, [given[i] for i in on]) for x, on in jaxprs]
            return [max((*decides, *x)) for x in zip(*found, strict=True)]
        if primitives.has(name, Trait.RANDOM):
            return [Dependence.DRAWN] * n
        if primitives.has(name, Trait.PARALLEL) and n == len(given):
            return given
        made = max(given, default=Dependence.FIXED)
        pairs = zip(equation.invars, given, strict=True)
        floats = {dependence for x, dependence in pairs if is_inexact(x.aval)}
        is_decided = max(floats, default=Dependence.FIXED) == Dependence.STATE
        if is_decided and Dependence.DRAWN not in floats:
            # An operation that returns places, as `argmax`, decides nothing.
            made = made if primitives.has(name, Trait.PLACE) else Dependence.COMPARED
        return [made] * n

    def _while(
        self, equation: Any, given: Sequence[Dependence]
    ) -> tuple[Dependence, Dependences]:
        """Returns the dependences of the condition of a `while`, and of its results."""
        asked, consts, carry = flow.while_parts(equation, given)
        params = equation.params
        last = self._loop(params["body_jaxpr"], consts, carry)
        (goes_on,) = self._results(params["cond_jaxpr"], [*asked, *last])
        kept = _kept(params["body_jaxpr"], len(consts), len(carry))
        pairs = zip(last, kept, strict=True)
        return goes_on, [x if is_kept else max(x, goes_on) for x, is_kept in pairs]

    def _loop(
        self,
        body: Any,
        consts: Sequence[Dependence],
        carry: Sequence[Dependence],
        xs: Sequence[Dependence] = (),
    ) -> Dependences:
        """Returns the dependences of the results of a loop, after many iterations."""
        jaxpr, _ = parts.opened(body)
        key = "loop", id(jaxpr), *consts, *carry, *xs
        if key not in self._found:
            inside, n = self._inside(jaxpr), len(carry)
            inside.assign(dict(zip(jaxpr.invars, (*consts, *carry, *xs), strict=True)))
            state = jaxpr.invars[len(consts) : len(consts) + n]
            becomes = collections.defaultdict(list)  # by result, the state it becomes
            for x, y in zip(map(parts.variable_of, jaxpr.outvars), state, strict=False):
                becomes[x].append(y)
            changed = set(becomes)
            # Only dependences that rise go around again: an iteration costs no walk.
            while risen := {
                y: inside.dependence(x)
                for x in changed.intersection(becomes)
                for y in becomes[x]
                if inside.dependence(x) > inside.dependence(y)
            }:
                changed = inside.assign(risen)
            results = *state, *jaxpr.outvars[n:]
            self._found[key] = list(map(inside.dependence, results))
        return self._found[key]


class _Jaxpr:
    """The dependences of the variables of a jaxpr, for the arguments assigned last."""

    def __init__(self, jaxpr: Any, walk: Walk):
        self._equations, self._walk = jaxpr.eqns, walk
        self._operands = [list(map(parts.variable_of, x.invars)) for x in jaxpr.eqns]
        self._readers = collections.defaultdict(list)
        for i, variables in enumerate(self._operands):
            for x in set(variables):
                self._readers[x].append(i)
        self._waiting = list(range(len(jaxpr.eqns)))  # a heap
        results = itertools.chain.from_iterable(x.outvars for x in jaxpr.eqns)
        variables = [*jaxpr.constvars, *jaxpr.invars, *results]
        self._bounds = {x: _bounds(x) for x in variables}
        self._known = {x: lowest for x, (lowest, _) in self._bounds.items()}

    def dependence(self, atom: Any) -> Dependence:
        """Returns the dependence of a result of the jaxpr."""
        return self._known.get(parts.variable_of(atom), Dependence.FIXED)

    def assign(self, dependences: Mapping[Any, Dependence]) -> set[Any]:
        """Assigns dependences to arguments; returns the variables that this changes.

        It follows only the equations that read these.
        """
        changed: set[Any] = set()
        self._note(dependences.items(), changed)
        while self._waiting:
            i = heapq.heappop(self._waiting)
            if self._waiting and self._waiting[0] == i:
                continue  # Two of its operands have changed.
            given = [self._known.get(x, Dependence.FIXED) for x in self._operands[i]]
            results = self._walk.of(self._equations[i], given)
            pairs = zip(self._equations[i].outvars, results, strict=True)
            self._note(pairs, changed)
        return changed

    def _note(self, dependences, changed):
        for x, dependence in dependences:
            lowest, highest = self._bounds[x]
            dependence = min(max(dependence, lowest), highest)
            if dependence is not self._known[x]:
                self._known[x] = dependence
                changed.add(x)
                for i in self._readers[x]:
                    heapq.heappush(self._waiting, i)


def _bounds(variable: Any) -> tuple[Dependence, Dependence]:
    """Returns the smallest and the largest dependence that a variable can have."""
    if parts.is_ref(variable):
        return Dependence.STATE, Dependence.STATE  # Any iteration may write it.
    # A floating-point number ends no loop before something compares it.
    is_float = is_inexact(variable.aval)
    return Dependence.FIXED, Dependence.STATE if is_float else Dependence.COMPARED


def _kept(closed: Any, before: int, n: int) -> list[bool]:
    """Returns of each part of a state whether a body returns it as it is."""
    jaxpr, _ = parts.opened(closed)
    given = jaxpr.invars[before : before + n]
    return [x is y for x, y in zip(given, jaxpr.outvars[:n], strict=True)]
