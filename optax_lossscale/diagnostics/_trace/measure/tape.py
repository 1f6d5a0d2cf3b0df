"""A program as a tape of steps, of which equal ones compile once."""

import contextlib
import contextvars
import functools
import itertools
import math
import sys
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

from optax_lossscale._jaxprs import parts
from optax_lossscale._jaxprs.primitives import Kind, Trait, has, kind_of
from optax_lossscale._tree import split_arrays
from optax_lossscale.diagnostics._common import is_watched
from optax_lossscale.diagnostics._trace.measure.twin import (
    bind_on_refs,
    constants_of,
    walk,
)

# Seconds between two lines that say how far a run is.
PATIENCE = 5
# From so many numbers on, a step is worth some optimization.
LARGE = 2**14
# From so many iterations on, a loop is.
LONG = 2**11
# With it a step of one operation compiles in half the time. Newer versions of XLA do
# not have it.
SIMPLER = ("xla_cpu_use_fusion_emitters", False)


def key_of(function: Callable[..., Any], equation: Any) -> Hashable:
    """Returns a key, equal for equations with which the function does the same.

    It does so with arrays of the same types. None for a kernel or a callback, whose
    function may close over anything, or if a parameter has no hash.
    """
    if any(has(x.primitive.name, Trait.OPAQUE) for x in parts.equations_in(equation)):
        return None
    types = [x.aval for x in (*equation.invars, *equation.outvars)]
    try:
        key = function, *_key_of_operation(equation), *types
        hash(key)
    except TypeError:
        return None
    return key


def _key_of_operation(equation):
    params = ((name, _key_of_value(x)) for name, x in sorted(equation.params.items()))
    return equation.primitive, *params, parts.context_of(equation)


def _key_of_value(x):
    """Returns a key of a parameter, equal for equal programs."""
    if parts.is_jaxpr(x):
        jaxpr, consts = parts.opened(x)
        # Two programs that hold arrays are equal only if they are the same.
        return x if consts else _key_of_program(jaxpr)
    if isinstance(x, tuple):
        return type(x), *map(_key_of_value, x)
    # 0.0 equals -0.0, and True equals 1.
    return type(x), repr(x) if isinstance(x, float | np.floating) else x


def _key_of_program(jaxpr):
    """Returns a key of a jaxpr: its equations, with numbers in place of variables."""
    numbers: dict[Any, int] = {}

    def key_of_atom(x):
        if parts.is_literal(x):
            return np.asarray(x.val).tobytes(), x.aval
        return numbers.setdefault(x, len(numbers)), x.aval

    def key_of_atoms(atoms):
        return tuple(map(key_of_atom, atoms))

    arguments = key_of_atoms((*jaxpr.constvars, *jaxpr.invars))
    equations = [
        (key_of_atoms(x.invars), _key_of_operation(x), key_of_atoms(x.outvars))
        for x in jaxpr.eqns
    ]
    return arguments, *equations, key_of_atoms(jaxpr.outvars)


class Slot:
    """Stands for an array of a tape.

    Attributes:
      number: Its place.
      aval: Its type.
      shape, dtype: Those of the type.
    """

    def __init__(self, number: int, aval: Any):
        """Takes a place and a type."""
        self.number, self.aval = number, aval
        self.shape, self.dtype = aval.shape, aval.dtype


class Tape:
    """Records calls as steps, to run them one by one.

    So the time to compile grows with the kinds of steps, and not with their number; and
    an array is dropped after its last use.
    """

    def __init__(self, avals: Sequence[Any]):
        """Begins with the types of the arguments."""
        # By `id`. Each is held, so that no other object gets its id.
        self._constants: dict[int, tuple[Any, Slot, jax.Array]] = {}
        self._steps: list[tuple[Any, list[int], list[int]]] = []
        self._kinds, self._before = _KINDS.get(({}, {}))
        self._count = 0
        self.inputs = list(map(self._slot, avals))

    def _slot(self, aval):
        self._count += 1
        return Slot(self._count, _type(aval))

    def call(self, function: Callable[..., Any], *args: Any, key: Any = None) -> Any:
        """Adds a step: a function of pytrees of slots and constants.

        Args:
          function: The function.
          *args: Its arguments.
          key: Equals that of functions that do the same; None if there are none.

        Returns:
          Slots for its results.
        """
        leaves, treedef = jax.tree.flatten(args)
        slots = list(map(self._slot_of, leaves))
        avals = tuple(x.aval for x in slots)
        kind = _Kind(function, treedef, avals, is_one=key is not None)
        if key is not None:
            key = key, treedef, avals
            kind = self._kinds.setdefault(key, self._before.get(key, kind))
        results = list(map(self._slot, kind.avals))
        numbers = [x.number for x in slots], [x.number for x in results]
        self._steps.append((kind.compiled, *numbers))
        return kind.fill(results)

    def _slot_of(self, x):
        if isinstance(x, Slot):
            return x
        if id(x) not in self._constants:
            constant = jnp.asarray(x)
            self._constants[id(x)] = x, self._slot(jax.typeof(constant)), constant
        return self._constants[id(x)][1]

    def compiled(self, results: Any) -> Callable[..., Any]:
        """Returns a function of arguments that returns results on the host.

        Steps that do not depend on the first argument run once, until another argument
        changes. Inf and nan raise no errors.
        """
        leaves, treedef = jax.tree.flatten(results)
        wanted = [self._slot_of(x).number for x in leaves]
        constants = self._constants.values()
        first, *others = (x.number for x in self.inputs)
        varying, before, after = {first}, [], []
        for step in self._steps:
            is_fixed = varying.isdisjoint(step[1])
            (before if is_fixed else after).append(step)
            varying.update(() if is_fixed else step[2])
        after = _with_last_uses(after, wanted)
        read = {i for _, arguments, *_ in after for i in arguments}
        before = _with_last_uses(before, read.union(wanted))
        kept: list[Any] = [(), {}]

        def run_steps(x, *arrays):
            with quiet(), _explicit_mesh(arrays):
                if any(a is not b for a, b in itertools.zip_longest(arrays, kept[0])):
                    kept[:] = (), {}
                    values = {slot.number: x for _, slot, x in constants}
                    values |= zip(others, arrays, strict=True)
                    kept[:] = arrays, _execute(before, values)
                values = _execute(after, kept[1] | {first: x})
                leaves = jax.device_get([values[i] for i in wanted])
            return jax.tree.unflatten(treedef, leaves)

        return run_steps


@functools.cache
def _type(aval):
    """Returns a type of an array, one for equal ones."""
    return jax.eval_shape(lambda x: x, aval)


def _explicit_mesh(arrays):
    """Enters the mesh of explicit axes, which steps of constants alone would lack."""
    for x in arrays:
        if parts.explicit_axes(x):
            return jax.set_mesh(x.sharding.mesh)
    return contextlib.nullcontext()


def _with_last_uses(steps, wanted):
    """Adds to each step the arrays that no later step reads, and no result needs."""
    read, backwards = set(wanted), []
    for function, arguments, made in reversed(steps):
        last = {*arguments, *made} - read
        read |= last
        backwards.append((function, arguments, made, last))
    return backwards[::-1]


def _execute(steps, values):
    """Runs steps on values by their numbers; drops those that nothing reads."""
    tell = teller()
    for i, (function, arguments, made, last) in enumerate(steps):
        tell(f"{i} of {len(steps)} operations; equal ones compile once")
        results = function(*[values[i] for i in arguments])
        # On a CPU, the collectives of two steps would wait for each other's threads.
        if any(len(x.devices()) > 1 for x in results):
            jax.block_until_ready(results)
        values.update(zip(made, results, strict=True))
        for i in last:
            values.pop(i, None)
    return values


class _Kind:
    """A function of arrays of some types, which is compiled once.

    It is in no circle of references, so the compiled program is dropped with it.
    """

    def __init__(self, function, treedef, avals, is_one):
        self._avals, self._is_one, self._fills = avals, is_one, []
        self._flat = functools.partial(_flat, function, treedef, self._fills)

    @functools.cached_property
    def compiled(self):
        """The compiled function, of the leaves of the arguments."""
        if self._is_one:
            size = max((math.prod(x.shape) for x in self._avals), default=0)
            options = _options(True, size >= LARGE)
            return jax.jit(self._flat, compiler_options=options)
        # Tracing it registers sites, so it must be traced once.
        closed = jax.make_jaxpr(self._flat)(*self._avals)
        options = _options(False, _iterations(closed.jaxpr) >= LONG)
        return jax.jit(jaxpr_as_fun(closed), compiler_options=options)

    @functools.cached_property
    def avals(self):
        """The types of the results."""
        return self.compiled.eval_shape(*self._avals)

    def fill(self, arrays: Sequence[Any]) -> Any:
        """Returns a result of the function that holds these arrays."""
        # JAX may trace the function again, under another mesh, or if its caches were
        # cleared. It returns an equal tree, so the first structure fits any.
        return self._fills[0](arrays)


def _flat(function, treedef, fills, *leaves):
    """Calls a function of leaves; notes how to put arrays into its result."""
    arrays, fill = split_arrays(function(*jax.tree.unflatten(treedef, leaves)))
    fills[:] = fills or [fill]
    return arrays


Kinds = dict[Hashable, _Kind]
# The kinds of steps of this diagnosis, and those of the last one before it.
_KINDS: contextvars.ContextVar[tuple[Kinds, Kinds]]
_KINDS = contextvars.ContextVar("_KINDS")
# The kinds of the last diagnosis that succeeded. On a CPU each takes about 1.6 MB.
_last: Kinds = {}


@contextlib.contextmanager
def diagnosis() -> Iterator[None]:
    """Context manager of a diagnosis, which asks for numbers on the host.

    Its compiled steps are kept until the next diagnosis has ended, which may be of the
    same program. A diagnosis that fails drops nothing.
    """
    global _last
    token = _KINDS.set(({}, _last))
    try:
        with jax.transfer_guard("allow"):
            yield
        _last, _ = _KINDS.get()
    finally:
        _KINDS.reset(token)


def _iterations(jaxpr):
    """Returns how often the innermost `scan` runs in all."""
    counts = [1]
    for equation in jaxpr.eqns:
        length = equation.params["length"] if equation.primitive.name == "scan" else 1
        counts += [length * _iterations(x) for x in parts.jaxprs_in(equation)]
    return max(counts)


def _options(is_one, is_optimized):
    options: dict[str, Any] = {"xla_allow_excess_precision": False}
    if jax.default_backend() == "cpu":
        # Most steps run a few times only, and LLVM would take most of the time.
        options["xla_backend_optimization_level"] = int(is_optimized)
        options |= [SIMPLER] if is_one and _is_known(SIMPLER) else []
    return options


@functools.cache
def _is_known(option):
    """Whether this version of XLA has a compiler option."""
    try:
        jax.jit(lambda: 0).lower().compile(dict([option]))
    except jax.errors.JaxRuntimeError:
        return False
    return True


def teller() -> Callable[[str], None]:
    """Returns a function that prints progress, every few seconds at most."""
    told = time.monotonic()

    def tell(text):
        nonlocal told
        if time.monotonic() - told > PATIENCE and is_watched():
            told = time.monotonic()
            print(text, file=sys.stderr, flush=True)

    return tell


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Context manager that runs steps with JAX's debug checks off.

    To an error of XLA it adds the remedy.
    """
    nans, infs = jax.debug_nans(False), jax.debug_infs(False)
    try:
        with jax.disable_jit(False), nans, infs:
            yield
    except jax.errors.JaxRuntimeError as error:
        text = "If no callback raised this, XLA cannot compile a step of the trace. "
        text += "Trace a part of the loss, or fewer layers."
        if "RESOURCE_EXHAUSTED" in str(error):
            text = "The trace needs more memory than a step. Pass a smaller batch: "
            text += "a few examples are enough."
        error.add_note(text)
        raise


def results_of(closed: Any, *args: Any) -> list[Any]:
    """Runs a closed jaxpr as a tape; returns the results on the host."""
    arrays = [*constants_of(closed), *args]
    tape = Tape(list(map(jax.typeof, arrays)))
    with quiet():
        results = _record(tape, closed.jaxpr, tape.inputs)
    return tape.compiled(results)(*arrays)


def _record(tape, jaxpr, args):
    """Adds the equations of a jaxpr to a tape, one by one; returns its results."""

    def follow(_, equation, inputs):
        if kind_of(equation.primitive.name) == Kind.CALL:
            inner, consts = parts.opened(parts.called_jaxpr(equation))
            return _record(tape, inner, [*consts, *inputs])
        bind = functools.partial(bind_on_refs, equation)
        return tape.call(bind, inputs, key=key_of(bind_on_refs, equation))

    return walk(jaxpr, args, follow)
