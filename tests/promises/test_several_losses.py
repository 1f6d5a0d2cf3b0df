"""Trainings that the page about several losses and gradients in the loss speaks of."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import INF, assert_same_bits

from optax_lossscale import (
    DynamicLossScale,
    FixedLossScale,
    LossScaleOptimizer,
    autocast,
    scale_gradient,
)

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.usefixtures("standard_dtype_promotion"),
]


def load_digits():
    return pytest.importorskip("sklearn.datasets").load_digits()


def in_float32(function):  # in place of autocast
    return function


def scaled(function, scale):
    return lambda x: scale_gradient(function(scale_gradient(x, 1 / scale)), scale)


def init(key, *sizes):
    keys = jax.random.split(key, len(sizes) - 1)
    shapes = zip(keys, sizes[:-1], sizes[1:], strict=True)
    return [jax.random.normal(key, (m, n)) / m**0.5 for key, m, n in shapes]


def network(params, x):
    for matrix in params[:-1]:
        x = jnp.tanh(x @ matrix)
    return x @ params[-1]


class TestTwoLossesOfVeryDifferentSize:
    """A network draws the lower half of a digit, and names the digit."""

    RULE = DynamicLossScale(growth_interval=10)
    INNER = optax.adam(3e-3, eps=1e-12)  # some gradients are below the usual 1e-8

    @staticmethod
    def predict(params, upper, head):
        return jax.nn.relu(upper / 16 @ params["trunk"]) @ params[head]

    def drawing(self, params, upper, lower, labels):
        return jnp.sum((self.predict(params, upper, "lower") - lower) ** 2)

    def naming(self, params, upper, lower, labels):
        logits = self.predict(params, upper, "label")
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return 1e-7 * losses.mean()

    def train(self, step, state):
        """Returns the share of labels that the trained network names."""
        digits = load_digits()
        upper, lower = jnp.split(jnp.float32(digits.data), 2, axis=1)
        labels = jnp.int32(digits.target)
        keys = jax.random.split(jax.random.key(0), 3)
        shapes = {"trunk": (32, 64), "lower": (64, 32), "label": (64, 10)}
        params = {
            name: jax.random.normal(key, shape) / shape[0] ** 0.5
            for key, (name, shape) in zip(keys, shapes.items(), strict=True)
        }
        state, step = state(params), jax.jit(step)
        for i in range(100):
            rows = jax.random.permutation(jax.random.key(i), len(labels))[:128]
            params, state = step(params, state, upper[rows], lower[rows], labels[rows])
        named = self.predict(params, upper, "label").argmax(-1) == labels
        return float(named.mean())

    def test_one_scale_for_the_sum_does_not_learn_the_small_loss(self):
        shared = LossScaleOptimizer(self.INNER, self.RULE)

        def total(params, *batch):
            losses = autocast(self.drawing), autocast(self.naming)
            return sum(loss_fn(params, *batch) for loss_fn in losses)

        def step(params, state, *batch):
            return shared.minimize(total, params, state, *batch)[:2]

        assert self.train(step, shared.init) < 0.3

    def test_a_scale_for_each_loss_learns_both(self):
        rule = self.RULE
        fixed = FixedLossScale(1.0, skip_nonfinite=True)
        optimizer = LossScaleOptimizer(self.INNER, fixed)

        def gradients(loss_fn, params, scale_state, *batch):
            scale = rule(scale_state)
            loss_fn = autocast(loss_fn)
            grads = jax.grad(lambda params: scale * loss_fn(params, *batch))(params)
            grads = jax.tree.map(lambda g: g.astype(jnp.float32) / scale, grads)
            return grads, rule.update(grads, scale_state)[0]

        def step(params, state, *batch):
            opt_state, first, second = state
            drawn, first = gradients(self.drawing, params, first, *batch)
            named, second = gradients(self.naming, params, second, *batch)
            grads = optax.tree.add(drawn, named)
            params, opt_state = optimizer.apply_gradients(grads, params, opt_state)
            return params, (opt_state, first, second)

        def start(params):
            return optimizer.init(params), rule.init(), rule.init()

        assert self.train(step, start) > 0.6


class TestGradientPenalty:
    """A WGAN-GP critic and its generator, of digits whose unit is a nanometer."""

    OPTIMIZER = LossScaleOptimizer(optax.adam(1e-3, b1=0.5, b2=0.9))

    @staticmethod
    def critic_loss(critic, real, fake, key, unit, scale):
        def score(x):  # in the unit of x
            return unit * network(critic, x / unit)[:, 0]

        mix = jax.random.uniform(key, (len(real), 1))
        between = mix * real + (1 - mix) * fake
        slopes = jax.grad(lambda x: scaled(score, scale)(x).sum())(between)
        norms = jnp.sqrt(jnp.sum(slopes**2, axis=1) + 1e-12)  # no nan at zero
        distance = jnp.mean(score(real) - score(fake)) / unit
        return 10 * jnp.mean((norms - 1) ** 2) - distance, distance

    def step_of(self, cast, unit, scale):
        def generator_loss(generator, critic, noise):
            return -network(critic, network(generator, noise)).mean()

        @jax.jit
        def step(critic, critic_state, generator, state, images, key):
            rows, noise, mix = jax.random.split(key, 3)
            real = unit * jax.random.choice(rows, images, (64,))
            noise = jax.random.normal(noise, (64, 16))
            fake = unit * cast(network)(generator, noise)
            # Arrays, so that autocast sees no constants.
            units = jnp.float32(unit), scale
            critic, critic_state, (_, distance) = self.OPTIMIZER.minimize(
                cast(lambda c, *x: self.critic_loss(c, *x, *units)),
                critic,
                critic_state,
                real,
                fake,
                mix,
                has_aux=True,
            )
            generator, state, _ = self.OPTIMIZER.minimize(
                cast(generator_loss), generator, state, critic, noise
            )
            return critic, critic_state, generator, state, distance

        return step

    def train(self, step):
        images = jnp.float32(load_digits().data) / 8 - 1
        critic = init(jax.random.key(0), 64, 64, 64, 1)
        generator = init(jax.random.key(1), 16, 64, 64)
        state = [x for p in (critic, generator) for x in (p, self.OPTIMIZER.init(p))]
        for key in jax.random.split(jax.random.key(2), 100):
            *state, distance = step(*state, images, key)
        return state, distance

    def test_trains_as_in_float32_only_with_a_scale_inside(self):
        _, wanted = self.train(self.step_of(in_float32, 1.0, 1.0))
        _, alike = self.train(self.step_of(autocast, 1.0, 1.0))
        _, lost = self.train(self.step_of(autocast, 1e-9, 1.0))
        step = self.step_of(autocast, 1e-9, 2.0**30)
        state, found = self.train(step)
        np.testing.assert_allclose([alike, found], wanted, rtol=0.01)
        assert lost > 1.3 * wanted  # Nothing holds the critic.
        # Only the critic sees poisoned images.
        images = jnp.full((64, 64), INF)
        critic, after, generator, *_ = step(*state, images, jax.random.key(0))
        assert_same_bits((critic, after.inner_state), (state[0], state[1][0]))
        assert after.skipped_steps == state[1].skipped_steps + 1
        assert np.any(generator[0] != state[2][0])


def forward(function):
    return lambda x: jax.jvp(function, (x,), (jnp.ones_like(x),))[1]


@pytest.mark.parametrize(
    ("first", "second", "scales", "is_right"),
    [
        (forward, forward, (1.0, 1.0), True),
        (jax.grad, forward, (2.0**23, 1.0), True),
        (jax.grad, forward, (1.0, 1.0), False),
        (jax.grad, jax.grad, (2.0**23, 2.0**23), True),
        (jax.grad, jax.grad, (2.0**23, 1.0), False),
    ],
)
def test_each_backward_pass_of_a_physics_network_needs_a_scale(
    first, second, scales, is_right
):
    """A rod of one meter is displaced by up to 0.1 micrometers: u'' = -load."""
    points = jnp.linspace(0, 1, 64)
    truth = 1e-7 * jnp.sin(jnp.pi * points)
    load = jnp.pi**2 * truth
    rate = optax.cosine_decay_schedule(1e-2, 200)
    optimizer = LossScaleOptimizer(optax.adam(rate))

    def displacement(params):
        def u(x):  # zero at both ends
            return 1e-7 * x * (1 - x) * network(params, jnp.stack([x, 1.0]))[0]

        return u

    def loss_fn(params):
        slope = first(scaled(displacement(params), scales[0]))
        found = jax.vmap(second(scaled(slope, scales[1])))(points)
        return jnp.mean(((found + load) / 1e-7) ** 2)

    def step(carry, _):
        params, state, _ = optimizer.minimize(autocast(loss_fn), *carry)
        return (params, state), None

    @jax.jit
    def solve():
        params = init(jax.random.key(3), 2, 32, 32, 1)
        carry = params, optimizer.init(params)
        (params, _), _ = jax.lax.scan(step, carry, length=200)
        found = jax.vmap(displacement(params))(points)
        return jnp.max(jnp.abs(found - truth)) / truth.max()

    error = solve()
    assert error < 1e-3 if is_right else error > 0.1
