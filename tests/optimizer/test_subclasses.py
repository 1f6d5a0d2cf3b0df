"""Subclasses, copies, and optimizers as constants of compiled functions."""

import abc
import copy
import inspect
import pickle

import equinox as eqx
import jax
import numpy as np
import optax
import pytest

from optax_lossscale import DynamicLossScale, LossScaleOptimizer
from optax_lossscale._optimizer import STEP

ONES = np.ones(2, np.float32)


def halve(updates, state, params=None):
    del params
    return jax.tree.map(lambda u: -0.5 * u, updates), state


# Of functions of modules, as pickle takes no others.
INNER = optax.GradientTransformation(optax.init_empty_state, halve)


class Weighted(LossScaleOptimizer):
    """Has an attribute and a method of its own."""

    def __new__(cls, weight, inner, rule=None):
        self = super().__new__(cls, inner, rule)
        self.weight = weight
        return self

    def weighted(self, grads, params, state):
        grads = jax.tree.map(lambda g: g * self.weight, grads)
        return self.apply_gradients(grads, params, state)


BASE = LossScaleOptimizer(INNER, DynamicLossScale(8.0), axis_name=None)
WEIGHTED = Weighted(1.0, INNER)
every_optimizer = pytest.mark.parametrize(
    "optimizer", [BASE, WEIGHTED], ids=["base", "subclass"]
)


def one_step(optimizer, params=ONES):
    step = getattr(optimizer, "weighted", optimizer.apply_gradients)
    return step(ONES, params, optimizer.init(params))[0]


@pytest.mark.parametrize("name", STEP)
@pytest.mark.parametrize("is_mixin", [False, True])
def test_the_parts_of_a_step_are_not_overridden(name, is_mixin):
    bases = [type("Mixin", (), {name: print})] if is_mixin else []
    own = {} if is_mixin else {name: print}
    with pytest.raises(
        TypeError, match=f"Mine must not override {name}: .*Wrap the inner optimizer"
    ):
        type("Mine", (*bases, LossScaleOptimizer), own)


def test_each_has_a_compiled_function_of_its_own():
    step = jax.jit(one_step, static_argnums=0)
    for weight in (1.0, 2.0, 4.0):
        optimizer = Weighted(weight, INNER)
        assert step(optimizer).tolist() == [1 - weight / 2] * 2
        assert jax.jit(one_step)(optimizer, ONES).tolist() == [1 - weight / 2] * 2


@pytest.mark.parametrize(
    "again",
    [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))],
    ids=["copy", "deepcopy", "pickle"],
)
@every_optimizer
def test_copies(optimizer, again):
    copied = again(optimizer)
    assert type(copied) is type(optimizer)
    assert copied == optimizer
    assert hash(copied) == hash(optimizer)
    assert one_step(copied).tolist() == [0.5, 0.5]
    # The functions of the tuple are those of the copy.
    for function in copied:
        assert inspect.getclosurevars(function).nonlocals == {"self": copied}
        assert function not in list(optimizer)


def test_subclasses_with_different_arrays_are_not_equal():
    optimizers = Weighted(ONES, INNER), Weighted(2 * ONES, INNER)
    assert optimizers[0] != optimizers[1]
    # A compiled function compares them, because their hash is the same.
    step = jax.jit(one_step)
    assert [step(x).tolist() for x in optimizers] == [[0.5, 0.5], [0, 0]]


class Trainer(eqx.Module):
    optimizer: LossScaleOptimizer
    params: jax.Array


@pytest.mark.parametrize("wrap", [jax.jit, eqx.filter_jit])
@every_optimizer
def test_is_an_argument_and_an_attribute(optimizer, wrap):
    assert wrap(one_step)(optimizer, ONES).tolist() == [0.5, 0.5]
    trainer = Trainer(optimizer, ONES)
    step = wrap(lambda trainer: one_step(trainer.optimizer, trainer.params))
    assert step(trainer).tolist() == [0.5, 0.5]
    assert len(jax.tree.leaves(trainer)) == 1


@pytest.mark.parametrize("again", [lambda x: x, copy.copy])
@every_optimizer
def test_attributes_never_change(optimizer, again):
    optimizer = again(optimizer)
    with pytest.raises(AttributeError, match=r"weight of a .* cannot change: compiled"):
        optimizer.weight = 5.0
    with pytest.raises(AttributeError, match=r"_options of a .* cannot change"):
        del optimizer._options
    assert one_step(optimizer).tolist() == [0.5, 0.5]


@every_optimizer
def test_functions_are_not_replaced(optimizer):
    with pytest.raises(TypeError, match=r"GradientTransformationExtraArgs\(optimizer"):
        optimizer._replace(update=print)
    with pytest.raises(
        TypeError, match=r"Write \w+\(inner_optimizer\): \w+\._make has"
    ):
        optimizer._make([print, print])


def test_the_signature_is_that_of_the_constructor():
    assert [*inspect.signature(Weighted).parameters] == ["weight", "inner", "rule"]
    assert next(iter(inspect.signature(LossScaleOptimizer).parameters)) == (
        "inner_optimizer"
    )


def test_the_author_of_a_class_may_register_it():
    @jax.tree_util.register_pytree_node_class
    class Learned(Weighted):
        def tree_flatten(self):
            return [self.weight], self.inner_optimizer

        @classmethod
        def tree_unflatten(cls, inner, weights):
            return cls(*weights, inner)

    @jax.tree_util.register_static
    class Static(LossScaleOptimizer):
        """Registered as it would be anyway."""

    learned = Learned(np.float32(1), INNER)
    assert jax.tree.leaves(learned) == [1]
    assert jax.jit(one_step)(learned).tolist() == [0.5, 0.5]
    assert jax.jit(one_step)(Static(INNER)).tolist() == [0.5, 0.5]


def test_an_abstract_base_class_beside_it():
    class Named(abc.ABC):
        @abc.abstractmethod
        def name(self) -> str: ...

    class Both(Named, LossScaleOptimizer):
        def name(self):
            return "both"

    assert one_step(Both(INNER)).tolist() == [0.5, 0.5]
