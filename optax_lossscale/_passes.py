"""Takes a program apart: the forward pass, and the backward pass of a scaled loss."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var, jaxpr_as_fun

from optax_lossscale._tree import is_key, split_arrays, strongly_typed

# Operations on single elements: XLA fuses them with their readers.
CHEAP = {
    *("add", "and", "broadcast_in_dim", "convert_element_type", "copy", "div", "eq"),
    *("exp", "ge", "gt", "integer_pow", "le", "logistic", "lt", "max"),
    *("min", "mul", "ne", "neg", "not", "or", "reshape", "rsqrt", "select_n", "sqrt"),
    *("square", "squeeze", "sub", "tanh", "transpose"),
}


class Passes(NamedTuple):
    """A step whose forward pass has run.

    Attributes:
      value: The value of the loss function.
      backward: Maps a scale, f32[], to the scaled gradients as they are born: without
        casts to wider dtypes at their end.
      finish: Makes the tree of scaled gradients from the result of `backward`; with
        `logs=True` it runs the callbacks that read these gradients, too.
      axes: The names of the axes along which devices communicate in `backward`.
    """

    value: Any
    backward: Callable[[jax.Array], list[jax.Array]]
    finish: Callable[..., Any]
    axes: set[Any]


def run_forward(
    scaled: Callable[[jax.Array], tuple[Any, Any]], scale: jax.Array
) -> Passes:
    """Runs the forward pass, which is all that does not depend on the scale.

    Args:
      scaled: Maps a scale to the value of the loss function and the scaled gradients.
      scale: f32[].

    Raises:
      TypeError: If the value depends on the scale, or the backward pass uses a
        `jax.Ref` of the forward pass.
    """
    joins = []

    def function(scale):
        (value, join_value), (grads, join_grads) = map(split_arrays, scaled(scale))
        joins[:] = join_value, join_grads
        return value, grads

    # Trace both passes, and tell them apart.
    program, (value, _) = jax.make_jaxpr(function, return_shape=True)(scale)
    jaxpr, join_value, join_grads = program.jaxpr, *joins
    value, grads = jaxpr.outvars[: len(value)], jaxpr.outvars[len(value) :]
    forward, backward, depend = _split(jaxpr)
    if not depend.isdisjoint(_variables(value)):
        raise TypeError(
            "With retries, the loss of this transform depends on the scale: both "
            "passes are in one jax.jit or jax.lax.scan. Compile around minimize."
        )
    # Take off their ends: casts of gradients, and callbacks that read gradients.
    casts, born = _casts_of(backward, grads)
    readers = _readers_of(backward, [*born, *_variables(grads)], depend)
    backward = [x for x in backward if x not in readers]
    # Without a loop, XLA would compute cheap values again by itself, and store less.
    cheap = _part_for(_read_by(backward), forward, _is_cheap)
    again = [*cheap, *backward]

    # Run the forward pass. What the rest reads of it is known then.
    made = depend.union(*(equation.outvars for equation in cheap))
    residuals = [x for x in _read_by(again) if x not in made]
    kept = [x for x in [*born, *_read_by(readers)] if x not in depend]
    outputs = [*value, *kept, *residuals]
    constants = dict(zip(jaxpr.constvars, program.consts, strict=True))
    results = _run(jaxpr, forward, outputs, constants)
    # Outside of jax.jit, a constant of the program is no jax.Array yet.
    results = [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in results]
    known = dict(zip(outputs[len(value) :], results[len(value) :], strict=True))
    born = [x for x in born if x in depend]
    sources = _read_by(cheap)

    def backward_pass(scale):
        inputs = {name: known[name] for name in residuals}
        for name, x in inputs.items():
            # jax_debug_key_reuse would count a key as used up by the first pass.
            x = jax.random.clone(x) if is_key(x) else x
            inputs[name] = _pin(x, scale) if name in sources else x
        inputs |= dict.fromkeys(jaxpr.invars, scale)
        return strongly_typed(_run(jaxpr, again, born, inputs))

    def finish(found, logs=False):
        found = known | dict(zip(born, found, strict=True))
        equations = [*casts, *readers] if logs else casts
        return join_grads(_run(jaxpr, equations, grads, found))

    effects: set[Any] = {x for equation in backward for x in equation.effects}
    axes = {x.name for x in effects if type(x).__name__ == "NamedAxisEffect"}
    return Passes(join_value(results[: len(value)]), backward_pass, finish, axes)


def _variables(atoms: Iterable[Any]) -> list[Var]:
    return [x for x in atoms if isinstance(x, Var)]


def _read_by(equations: list[JaxprEqn]) -> dict[Var, None]:
    """Returns the variables that equations read, each once."""
    return dict.fromkeys(_variables(x for e in equations for x in e.invars))


def _run(
    jaxpr: Jaxpr, equations: list[JaxprEqn], outputs: list[Any], known: dict[Var, Any]
) -> list[jax.Array]:
    """Runs a part of a program, given the values of variables."""
    part = jaxpr.replace(
        constvars=[], invars=list(known), outvars=outputs, eqns=equations
    )
    return jaxpr_as_fun(ClosedJaxpr(part, ()))(*known.values())


def _split(jaxpr: Jaxpr) -> tuple[list[JaxprEqn], list[JaxprEqn], set[Var]]:
    """Returns the forward and the backward pass, and what depends on the scale."""
    forward, backward, depend = [], [], set(jaxpr.invars)
    for equation in jaxpr.eqns:
        inputs = _variables(equation.invars)
        refs = [x for x in inputs if type(x.aval).__name__ == "AbstractRef"]
        # A callback that reads nothing of the backward pass runs where it is written.
        is_callback = bool(backward) and not equation.outvars and not refs
        if depend.isdisjoint(inputs) and not is_callback:
            forward.append(equation)
        elif depend.issuperset(refs):
            backward.append(equation)
            depend.update(equation.outvars)
        else:
            raise TypeError(
                "With retries, each repetition would change again the jax.Ref that "
                "this backward pass uses. Use no retries, or no jax.Ref there."
            )
    return forward, backward, depend


def _casts_of(
    backward: list[Any], grads: list[Any]
) -> tuple[list[JaxprEqn], dict[Any, None]]:
    """Returns casts to wider dtypes at the end of gradients, and what they cast.

    The step casts instead: XLA fuses the cast there.
    """
    casts: list[JaxprEqn] = []
    born: dict[Any, None] = dict.fromkeys(_variables(grads))
    for equation in reversed(backward):
        if equation.primitive.name == "convert_element_type":
            (old,), (new,) = equation.invars, equation.outvars
            if new in born and old.aval.dtype.itemsize < new.aval.dtype.itemsize:
                casts.insert(0, equation)
                born[old] = born.pop(new)
    return casts, born


def _readers_of(
    backward: list[JaxprEqn], grads: list[Var], depend: set[Var]
) -> list[JaxprEqn]:
    """Returns the equations that follow from gradients and on which none depends.

    They log gradients: once in a step, and not in each pass.
    """
    needed = set(map(id, _part_for(grads, backward)))
    known, readers = set(grads), []
    for equation in (x for x in backward if id(x) not in needed):
        inputs = depend.intersection(_variables(equation.invars))
        if inputs and inputs <= known:
            readers.append(equation)
            known.update(equation.outvars)
    return readers


def _part_for(
    wanted: Iterable[Var],
    equations: list[JaxprEqn],
    is_chosen: Callable[[JaxprEqn], bool] = lambda _: True,
) -> list[JaxprEqn]:
    """Returns the chosen ones of the equations that compute these variables."""
    wanted, part = set(wanted), []
    for equation in reversed(equations):
        if not wanted.isdisjoint(equation.outvars) and is_chosen(equation):
            part.insert(0, equation)
            wanted.update(_variables(equation.invars))
    return part


def _is_cheap(equation: JaxprEqn) -> bool:
    if equation.primitive.name in ("jit", "pjit", "custom_jvp_call"):
        key = "call_jaxpr" if "call_jaxpr" in equation.params else "jaxpr"
        return all(map(_is_cheap, equation.params[key].eqns))
    return equation.primitive.name in CHEAP


def _pin(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns `x`; keeps XLA from computing what follows from it before the loop."""
    pinned, _ = lax.optimization_barrier((x, scale))
    # In jax.shard_map it might vary over more devices then.
    return pinned if jax.typeof(pinned) == jax.typeof(x) else x
