"""Mistakes of which JAX, Optax or Flax say what is wrong, but not what to write."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

from optax_lossscale import LossScaleOptimizer, _hints, _nnx, autocast

W, X = {"w": np.ones(2, np.float32)}, np.ones((4, 2), np.float32)
MOMENTUM = optax.sgd(0.5, 0.9)
optimizer = LossScaleOptimizer(MOMENTUM)


class Model(nnx.Module):
    def __init__(self):
        self.layer = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
        self.norm = nnx.BatchNorm(2, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return jnp.mean(self.norm(self.layer(x)))


def loss_fn(params):
    return sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(params))


def minimize(params, made_for, optimizer=optimizer, loss_fn=loss_fn, *batch, **options):
    state = optimizer.init(made_for)
    optimizer.minimize(loss_fn, params, state, *batch, **options)


def partition_without_the_name():
    inner = optax.partition({"a": optax.adam(1e-3)}, {"w": "a"})
    optimizer = LossScaleOptimizer(inner)
    optimizer.update({"v": W["w"]}, optimizer.init(W))


def net_and_params(params, model):
    return model(X) * loss_fn(params)


def closed_over(use):
    """Returns a call that closes over a module, which JAX refuses to change there."""

    def call():
        model = Model()
        use(lambda params: model(X) * loss_fn(params))

    return call


def two_models(model, other):
    return model(X) + other(X)


def shared(transform=None, **options):
    """Returns a call of `minimize` with a model in two arguments."""

    def call():
        model, repeats = Model(), LossScaleOptimizer(MOMENTUM, **options)
        minimize(model, model, repeats, two_models, model, transform=transform)

    return call


def part_of_a_module_in_the_batch():
    model = Model()

    def loss_fn(model, batch):
        return model(X) + jnp.mean(batch["layer"](X))

    minimize(model, model, optimizer, loss_fn, {"layer": model.layer})


def module_from_outside_of_a_scan():
    model = Model()

    def body(state, x):
        grad_fn = optimizer.value_and_grad(lambda model, x: model(x), state)
        return state, grad_fn(model, x)[0]

    jax.lax.scan(body, optimizer.init(model), X[None])


# What somebody may write, by the note that the error then has.
MISTAKES = {
    _hints.PARAMETERS: {
        "a state of more parameters": lambda: minimize(W, W | {"b": np.float32(0)}),
        "a state of other shapes": lambda: minimize(W, {"w": np.ones(3, np.float32)}),
        "a state of a tuple": lambda: minimize(W, (W["w"],)),
        "a state of a layer": lambda: minimize(
            Model(), Model().layer, optimizer, lambda model: model(X)
        ),
        "gradients of other shapes": lambda: optimizer.update(
            {"w": np.ones(3, np.float32)}, optimizer.init(W), W
        ),
        "gradients of other names": lambda: optimizer.apply_gradients(
            {"v": W["w"]}, W, optimizer.init(W)
        ),
        "a name that a partition does not know": partition_without_the_name,
        "gradients in the place of the model": lambda: optimizer.apply_gradients(
            Model(), nnx.state(Model(), nnx.Param), optimizer.init(Model())
        ),
    },
    _hints.DEVICES: {
        "an axis without devices": lambda: minimize(
            W, W, LossScaleOptimizer(MOMENTUM, axis_name="batch")
        ),
    },
    _nnx.MODULES: {
        "in the closure of autocast": closed_over(lambda f: autocast(f)(W)),
        "in the closure of the loss": closed_over(lambda f: minimize(W, W, loss_fn=f)),
        "in the closure, with retries": closed_over(
            lambda f: minimize(W, W, LossScaleOptimizer(MOMENTUM, retries=3), f)
        ),
        "not the first argument": lambda: minimize(
            W, W, optimizer, net_and_params, Model()
        ),
        "from outside of a scan": module_from_outside_of_a_scan,
    },
    _nnx.SHARED: {
        "in two arguments": shared(),
        "in two arguments, with retries": shared(retries=3),
        "in two arguments, by nnx": shared(transform=nnx.value_and_grad),
        "a part in the batch": part_of_a_module_in_the_batch,
    },
}
CASES = [
    pytest.param(hint, mistake, id=name)
    for hint, mistakes in MISTAKES.items()
    for name, mistake in mistakes.items()
]


@pytest.mark.parametrize(("hint", "mistake"), CASES)
def test_a_note_says_what_to_write(hint, mistake):
    with pytest.raises(Exception) as caught:  # noqa: PT011
        mistake()
    assert sum(note.endswith(hint) for note in caught.value.__notes__) == 1


def test_the_note_on_a_state_names_what_differs():
    for made_for, words in [
        (W | {"b": np.float32(0)}, "init makes no state.inner_state[0].trace['b']. "),
        (
            {"w": np.ones(3)},
            "['w'] must be of shape (2,), as init makes it, got (3,). ",
        ),
        ({}, "state.inner_state[0].trace['w'] is missing, which init makes. "),
    ]:
        with pytest.raises(Exception) as caught:  # noqa: PT011
            minimize(W, made_for)
        (note,) = (x for x in caught.value.__notes__ if x.endswith(_hints.PARAMETERS))
        assert note.removesuffix(_hints.PARAMETERS).endswith(words)


def test_what_the_note_on_modules_says_to_write():
    model = Model()
    before = model.norm.mean[...]
    transform = nnx.value_and_grad
    minimize(W, W, optimizer, net_and_params, model, transform=transform)
    assert (model.norm.mean[...] != before).any()


def test_what_the_note_on_a_module_in_two_arguments_says_to_write():
    model, alone = Model(), Model()
    minimize(model, model, optimizer, two_models, nnx.clone(model))
    other = Model()(X)
    minimize(alone, alone, optimizer, lambda model: model(X) + other)
    trained, wanted, first = (
        jax.tree.leaves(nnx.state(x, nnx.Param)) for x in (model, alone, Model())
    )
    assert all(map(np.array_equal, trained, wanted))
    assert not all(map(np.array_equal, trained, first))


@pytest.mark.parametrize(
    "words",
    [
        "The water is at trace level.",
        "Encountered an unexpected tracer from a different trace level.",
        "Why: Inconsistent aliasing detected",
    ],
)
def test_an_error_of_the_loss_itself_has_no_note(words):
    def loss_fn(params):
        raise ValueError(words)

    for model in (W, Model()):
        with pytest.raises(ValueError, match=words) as caught:
            minimize(model, model, optimizer, loss_fn)
        notes = getattr(caught.value, "__notes__", ())
        assert not {_nnx.MODULES, _nnx.SHARED}.intersection(notes)


def test_an_error_of_the_inner_optimizer_itself_has_no_note():
    def update(updates, state, params=None):
        raise ValueError("a reason of its own")

    inner = optax.GradientTransformation(MOMENTUM.init, update)
    with pytest.raises(ValueError, match="a reason of its own") as caught:
        minimize(W, W, LossScaleOptimizer(inner))
    assert _hints.PARAMETERS not in getattr(caught.value, "__notes__", ())


class TestWords:
    def test_of_a_state_of_nnx_optimizer(self):
        trainer = nnx.Optimizer(Model(), optimizer, wrt=nnx.Param)
        for state in (trainer.opt_state, trainer):
            with pytest.raises(ValueError, match=r"be what optimizer\.init\(model\)"):
                optimizer.minimize(lambda model: model(X), Model(), state)

    def test_of_gradients_in_the_place_of_the_state(self):
        grads = nnx.state(Model(), nnx.Param)
        with pytest.raises(ValueError, match=r"exactly one .*The order is minimize"):
            optimizer.minimize(lambda model: model(X), Model(), grads)
        with pytest.raises(ValueError, match=r"got State\. .*The order is minimize"):
            optimizer.update(grads, grads, Model())

    def test_of_a_model_in_the_place_of_its_loss(self):
        state = optimizer.init(Model())
        with pytest.raises(TypeError, match=r"Argument 0 .*The order is minimize"):
            optimizer.minimize(Model(), lambda model: model(X), state)

    def test_of_gradients_in_the_place_of_the_loss(self):
        with pytest.raises(TypeError, match=r"^loss_fn .*, apply_gradients\(grads"):
            optimizer.minimize(W, W, optimizer.init(W))

    @pytest.mark.parametrize("batch", [X, {"x": X}, (X, X), "x"])
    def test_of_a_batch_in_the_place_of_argnums(self, batch):
        words = r"^argnums must be an integer .*value_and_grad\(loss_fn, state\)\(par"
        with pytest.raises(TypeError, match=words):
            optimizer.value_and_grad(loss_fn, optimizer.init(W), batch)

    def test_of_a_complex_loss(self):
        with pytest.raises(TypeError, match=r"floating-point scalar, got complex64"):
            minimize(W, W, optimizer, lambda params: loss_fn(params).astype(complex))

    def test_of_a_train_state_in_the_place_of_its_parts(self):
        state = TrainState.create(apply_fn=None, params=W, tx=optimizer)
        for call in (
            lambda: optimizer.minimize(
                lambda state: loss_fn(state.params), state, state.opt_state
            ),
            lambda: optimizer.init(state),
        ):
            with pytest.raises(TypeError, match=r"in a TrainState\. .*\.params, and"):
                call()
        with pytest.raises(ValueError, match=r"got TrainState\. .*\.opt_state\. "):
            optimizer.minimize(loss_fn, W, state)

    @pytest.mark.parametrize("options", [{}, {"dtype": jnp.bfloat16}])
    def test_of_autocast_as_a_context(self, options):
        words = r"Write loss_fn = autocast\(loss_fn, dtype"
        with pytest.raises(TypeError, match=words), autocast(**options):
            pass
        with pytest.raises(TypeError, match=words), autocast("cuda", **options):
            pass

    def test_of_one_layer_of_several(self):
        class Head(nnx.Linear):
            pass

        for chosen in (Head, Model().layer):
            with pytest.raises(TypeError, match=r"write with jax\.named_scope\("):
                autocast(loss_fn, float32=chosen)
