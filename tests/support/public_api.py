"""The public API as text: names, parameters, defaults, fields and states.

`python tests/support/public_api.py` writes `tests/docs/public_api.txt` anew.
"""

import inspect
from pathlib import Path

import jax
import jax.numpy as jnp
import optax

import optax_lossscale
from optax_lossscale import diagnostics

PATH = Path(__file__).parents[1] / "docs" / "public_api.txt"
RULES = {
    "fixed": optax_lossscale.FixedLossScale(2.0),
    "dynamic": optax_lossscale.DynamicLossScale(),
    "tolerant": optax_lossscale.TolerantLossScale(0.5),
    "headroom": optax_lossscale.HeadroomLossScale(),
    "logmax": optax_lossscale.LogMaxLossScale(),
}


def public_api() -> str:
    """Returns a line for each name, method, property and leaf of a state."""
    lines = []
    for module in (optax_lossscale, diagnostics):
        for name, value in sorted(vars(module).items()):
            if not name.startswith("_") and not inspect.ismodule(value):
                lines += _describe(f"{module.__name__}.{name}", value)
    for name, rule in RULES.items():
        for options in ({}, {"num_losses": 2}, {"track_leaves": True}):
            optimizer = optax_lossscale.LossScaleOptimizer(
                optax.sgd(0.1), rule, **options
            )
            lines += _leaves(f"state of {name}, {options}", optimizer)
    optimizer = optax_lossscale.LossScaleOptimizer(optax.sgd(0.1))
    accumulating = optax_lossscale.accumulate_gradients(optimizer, 2)
    lines += _leaves("state of accumulate_gradients", accumulating)
    return "\n".join(lines) + "\n"


def _describe(name, value):
    if not inspect.isclass(value):
        return [name + _parameters(value)]
    fields = getattr(value, "_fields", None)
    shown = _parameters(value) if value.__new__ is not tuple.__new__ else ""
    lines = [name + shown]
    for member in dir(value):
        if member.startswith("_") or (fields is not None and hasattr(tuple, member)):
            continue
        found = inspect.getattr_static(value, member)
        if isinstance(found, property):
            lines.append(f"{name}.{member}")
        elif callable(getattr(value, member)):
            lines.append(f"{name}.{member}{_parameters(getattr(value, member))}")
        elif isinstance(found, bool | int | float | str):
            lines.append(f"{name}.{member} = {found!r}")
    return lines


def _parameters(function):
    # Without annotations, whose text depends on the versions of Python and JAX.
    parameters = []
    for parameter in inspect.signature(function).parameters.values():
        default = parameter.default
        if callable(default) and default is not inspect.Parameter.empty:
            default = _Named(default.__name__)
        empty = inspect.Parameter.empty
        parameters.append(parameter.replace(annotation=empty, default=default))
    return str(inspect.Signature(parameters))


class _Named:
    def __init__(self, name):
        self.name = name

    def __repr__(self):
        return self.name


def _leaves(name, optimizer):
    state = optimizer.init({"w": jnp.ones(3)})
    return [
        f"{name}{jax.tree_util.keystr(path)}: {leaf.dtype}{list(leaf.shape)}"
        for path, leaf in jax.tree.leaves_with_path(state)
    ]


if __name__ == "__main__":
    PATH.write_text(public_api())
