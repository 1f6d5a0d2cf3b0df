"""The rules of the package, which the tests find by themselves."""

import inspect

import optax_lossscale
from optax_lossscale import FixedLossScale, LossScale, TolerantLossScale

# The arguments of rules that have no default for all of theirs.
ARGUMENTS = {
    FixedLossScale: {"loss_scale_value": 2.0**15, "skip_nonfinite": True},
    TolerantLossScale: {"tolerance": 0.5},
}


def is_rule(x):
    """Whether a public name is a rule."""
    is_class = inspect.isclass(x) and issubclass(x, LossScale)
    return is_class and not inspect.isabstract(x)


def all_rules():
    """Returns a rule of each public class, by the name of the class."""
    public = vars(optax_lossscale).items()
    return {k: x(**ARGUMENTS.get(x, {})) for k, x in public if is_rule(x)}


RULES = all_rules()
# The public names of the rules, and of their states.
NAMES = {name for rule in RULES for name in (rule, f"{rule}State")}
