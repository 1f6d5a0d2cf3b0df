"""Every optimizer of Optax, found by inspection, and a problem to run it on."""

import functools
import inspect
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from helpers import relaxed

INNER = optax.adam(0.1)


def map_leaves(f):
    return lambda tree, params=None: jax.tree.map(f, tree)


def is_matrix(x):
    return x.ndim == 2


# What the required parameters of a factory are given, by name. `key` is given
# wherever there is one: without it the factories that draw noise refuse.
VALUES = [
    ("base_optimizer fast_optimizer inner optimizer tx", INNER),
    ("adv_optimizer", optax.sgd(0.01)),
    ("transforms", {"matrix": INNER, "vector": optax.sgd(0.1)}),
    ("key seed", 0),
    ("eta", 0.01),
    ("clipping learning_rate noise_multiplier", 0.1),
    ("gamma slow_step_size step_size", 0.5),
    ("decay", 0.9),
    ("l2_norm_clip max_delta max_norm threshold", 1.0),
    ("sync_period", 2),
    ("max_consecutive_errors", 3),
    ("max_backtracking_steps max_linesearch_steps", 5),
    ("measure_name", "magnitude"),
    ("f", map_leaves(jnp.negative)),
    ("measure", map_leaves(jnp.abs)),
    ("freeze_mask mask", map_leaves(is_matrix)),
    ("param_labels", map_leaves(lambda x: "matrix" if is_matrix(x) else "vector")),
    ("should_transform_fn", lambda step: step % 2 == 0),
    ("step_size_fn", lambda step: 1 / (1.0 + step)),
]
ARGUMENTS = {name: value for names, value in VALUES for name in names.split()}

# Factories whose parameters' names say too little.
BY_HAND = {
    "MultiSteps": lambda f: f(INNER, 2).gradient_transformation(),
    "chain": lambda f: f(optax.clip(1.0), INNER),
    "inject_hyperparams": lambda f: f(optax.adam)(learning_rate=0.1),
    "inject_stateful_hyperparams": lambda f: f(optax.adam)(learning_rate=0.1),
    "named_chain": lambda f: f(("clip", optax.clip(1.0)), ("adam", INNER)),
}

EXCLUDED = {
    "monitor": "its own state gains entries at the first update: no loop can carry it"
}

PARAMS = {"w": np.linspace(-1, 2, 12).reshape(4, 3), "b": np.array([-0.0, 1.0, -2.0])}
PARAMS_OF = {
    "contrib.scale_by_muon": lambda params: params["w"],  # one matrix only
    "lookahead": optax.LookaheadParams.init_synced,
}
WANT_PER_EXAMPLE_GRADIENTS = (
    "contrib.differentially_private_aggregate",
    "contrib.dpsgd",
)
# Declared as taking extra arguments, but its update refuses them.
REFUSES_EXTRA_ARGS = ("contrib.sam",)
# What `minimize` cannot run: it differentiates all of the parameters, per batch,
# and passes on `value`, `grad` and `value_fn`.
NOT_FOR_MINIMIZE = {
    "contrib.hutchinson_estimator_diag_hessian": "wants the extra argument obj_fn",
    "contrib.sophia": "wants the extra argument obj_fn",
    "lookahead": "wants gradients of the fast half of the parameters",
    **dict.fromkeys(REFUSES_EXTRA_ARGS, "refuses extra arguments"),
    **dict.fromkeys(WANT_PER_EXAMPLE_GRADIENTS, "wants gradients per example"),
}


def makes_transformation(function) -> bool:
    """Tells by its annotation, or else by its docstring, what a function returns."""
    try:
        returned = inspect.signature(function).return_annotation
    except (TypeError, ValueError):
        return False
    if returned is inspect.Signature.empty:
        returned = inspect.getdoc(function) or ""
    words = str(returned).lower().replace(" ", "")
    return "gradienttransformation" in words


def find_factories():
    """Returns what Optax exports that makes an optimizer, by name."""
    found = {}
    for prefix, module in (("", optax), ("contrib.", optax.contrib)):
        for name in dir(module):
            value = getattr(module, name)
            is_function = callable(value) and not inspect.isclass(value)
            is_factory = is_function and makes_transformation(value)
            if (is_factory and not name.startswith("_")) or prefix + name in BY_HAND:
                found[prefix + name] = value
    return found


FACTORIES = find_factories()
NAMES = sorted(FACTORIES.keys() - EXCLUDED.keys())


@functools.cache
def make(name):
    """Makes an optimizer, or tells what the tables above lack for it."""
    factory = FACTORIES[name]
    parameters = inspect.signature(factory).parameters.values()
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    wanted = [
        p.name
        for p in parameters
        if p.kind not in optional and (p.default is p.empty or p.name == "key")
    ]
    advice = (
        f"optax.{name}{inspect.signature(factory)} cannot be made. Add its arguments "
        "to ARGUMENTS or BY_HAND, or the reason against it to EXCLUDED."
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        if name in BY_HAND:
            made = BY_HAND[name](factory)
        else:
            missing = [key for key in wanted if key not in ARGUMENTS]
            assert not missing, f"{advice} Unknown: {missing}."
            made = factory(**{key: ARGUMENTS[key] for key in wanted})
    assert isinstance(made, optax.GradientTransformation), f"{advice} Got {made!r}."
    return relaxed(made)


def make_params(name, dtype=jnp.float32):
    params = jax.tree.map(lambda x: jnp.asarray(x, dtype), PARAMS)
    return PARAMS_OF.get(name, lambda params: params)(params)


def trained(params):
    """Returns the part of the parameters that gradients are taken of."""
    return params.fast if isinstance(params, optax.LookaheadParams) else params


def make_targets(name, dtype=jnp.float32):
    """Returns what the loss draws the parameters to in three steps."""

    def target(step, x):
        return (2 * np.cos(3 * np.asarray(x, np.float64) + step)).astype(x.dtype)

    params = trained(make_params(name, dtype))
    return [jax.tree.map(functools.partial(target, step), params) for step in range(3)]


def loss_fn(params, target):
    """Half the squared distance: its gradient is the difference, to the bit."""

    def square(param, target):
        return jnp.sum((param - target).astype(jnp.float32) ** 2)

    return 0.5 * optax.tree.sum(jax.tree.map(square, trained(params), target))


def gradients(name, params, target):
    grads = jax.tree.map(jnp.subtract, trained(params), target)
    if name in WANT_PER_EXAMPLE_GRADIENTS:
        return jax.tree.map(lambda x: jnp.stack([x, x]), grads)
    return grads


def value_fn(params, target, obj_fn=None):
    """The loss, for line searches, which pass all other extra arguments on."""
    del obj_fn
    return loss_fn(params, target)


def extra_args(name, params, target, grads):
    """Returns all that any optimizer asks for besides gradients, as a pytree."""
    if name in REFUSES_EXTRA_ARGS:
        return {}
    function = jax.tree_util.Partial(value_fn, target=target)
    value = function(params)
    return {"value": value, "grad": grads, "value_fn": function, "obj_fn": function}
