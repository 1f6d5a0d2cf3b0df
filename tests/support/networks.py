"""A small network of Flax nnx, and the steps that people write for it."""

from flax import nnx


class Net(nnx.Module):
    """Has parameters, batch statistics and random counts."""

    def __init__(self, features=4, width=8, rate=0.1):
        rngs = nnx.Rngs(0)
        self.hidden = nnx.Linear(features, width, rngs=rngs)
        self.norm = nnx.BatchNorm(width, rngs=rngs)
        self.drop = nnx.Dropout(rate, rngs=rngs)
        self.output = nnx.Linear(width, 1, rngs=rngs)

    def __call__(self, x):
        return self.output(self.drop(nnx.relu(self.norm(self.hidden(x)))))


def in_one_call(optimizer, loss_fn, **options):
    def step(model, state, *args, **keywords):
        return optimizer.minimize(loss_fn, model, state, *args, **options, **keywords)

    return step


def in_two_calls(optimizer, loss_fn, **options):
    def step(model, state, *args):
        grad_fn = optimizer.value_and_grad(loss_fn, state, **options)
        loss, grads = grad_fn(model, *args)
        return *optimizer.apply_gradients(grads, model, state), loss

    return step


def nnx_step(loss_fn):
    """Makes the step that people take with `nnx.Optimizer`."""

    @nnx.jit
    def step(model, optimizer, *args):
        loss, grads = nnx.value_and_grad(loss_fn)(model, *args)
        optimizer.update(model, grads)
        return loss

    return step
