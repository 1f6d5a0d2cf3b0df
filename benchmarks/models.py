"""Models of public libraries and formulas, in float32 and in float16 by hand."""

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import jmp
import optax
from flax import nnx

KEY = jax.random.key(0)
HALF = jnp.float16


class Model(NamedTuple):
    """A function of parameters and inputs.

    Attributes:
      make: Maps None, or a dtype that the library computes in, to the function.
      params: The parameters, in float32.
      x: The inputs.
      takes_dtype: Whether `make` takes another dtype than None.
    """

    make: Callable[[Any], Callable[..., jax.Array]]
    params: Any
    x: jax.Array
    takes_dtype: bool = True

    def loss(self, dtype: Any = None) -> Callable[..., jax.Array]:
        """Returns the loss: the function, or its squared distance from a target."""
        function = self.make(dtype)

        def loss_fn(params, x):
            out = function(params, x)
            target = jnp.cos(jnp.arange(out.size)).reshape(out.shape)
            return out if not out.shape else jnp.mean((out - target) ** 2)

        return loss_fn


def _normal(*shape):
    return jax.random.normal(KEY, shape)


def _linen(module, *shape):
    variables = module(None).init(KEY, _normal(*shape))

    def make(dtype):
        def function(params, x):
            state = variables | {"params": params}
            return module(dtype).apply(state, x, mutable=["batch_stats"])[0]

        return function

    return Model(make, variables["params"], _normal(*shape))


def _nnx(build, *shape):
    def make(dtype):
        graph, _, rest = nnx.split(build(dtype, nnx.Rngs(0)), nnx.Param, ...)
        return lambda params, x: nnx.merge(graph, params, rest)(x)

    return Model(make, nnx.state(build(None, nnx.Rngs(0)), nnx.Param), _normal(*shape))


def _equinox(module, *shape, call=lambda module, x: jax.vmap(module)(x)):
    params, static = eqx.partition(module, eqx.is_inexact_array)
    function = lambda params, x: call(eqx.combine(params, static), x)  # noqa: E731
    return Model(lambda dtype: function, params, _normal(*shape), takes_dtype=False)


@contextlib.contextmanager
def _haiku_policy():
    """Lets Haiku's layers compute in float16, and its norms in float32."""
    layers = jmp.Policy(jnp.float32, HALF, HALF)
    norms = jmp.Policy(jnp.float32, jnp.float32, HALF)
    with contextlib.ExitStack() as stack:
        for module in (hk.Linear, hk.Conv2D, hk.LSTM):
            stack.enter_context(hk.mixed_precision.push_policy(module, layers))
        for module in (hk.LayerNorm, hk.BatchNorm):
            stack.enter_context(hk.mixed_precision.push_policy(module, norms))
        yield


def _haiku(function, *shape):
    transformed = hk.transform_with_state(function)
    params, state = transformed.init(KEY, _normal(*shape))
    plain = lambda params, x: transformed.apply(params, state, KEY, x)[0]  # noqa: E731

    def by_hand(params, x):
        with _haiku_policy():
            return plain(params, x).astype(jnp.float32)

    return Model(lambda d: by_hand if d else plain, params, _normal(*shape))


def _blocks(x):
    for _ in range(2):
        normed = hk.LayerNorm(-1, True, True)(x)
        x = x + hk.MultiHeadAttention(4, 16, w_init_scale=1.0)(normed, normed, normed)
        x = x + hk.nets.MLP([256, 64], activation=jax.nn.gelu)(
            hk.LayerNorm(-1, True, True)(x)
        )
    return x


def _network(loss, shapes=((16, 64), (64, 8))):
    """Returns a loss of perceptrons, which may cast by hand."""
    pairs = zip(jax.random.split(KEY, len(shapes)), shapes, strict=True)
    weights = [jax.random.normal(key, shape) / shape[0] ** 0.5 for key, shape in pairs]
    params = [{"w": w, "b": jnp.zeros(w.shape[1])} for w in weights]

    def make(dtype):
        def network(params, x):
            if dtype:
                params, x = optax.tree.cast((params, x), dtype)
            for p in params[:-1]:
                x = jnp.tanh(x @ p["w"] + p["b"])
            x = x @ params[-1]["w"] + params[-1]["b"]
            return x.astype(jnp.float32) if dtype else x

        return lambda params, x: loss(network, params, x)

    return Model(make, params, _normal(64, shapes[0][0]))


def _ctc(network, params, x):
    logits = network(params, x).reshape(4, 16, 8)
    labels = jnp.arange(16).reshape(4, 4) % 7 + 1
    return optax.ctc_loss(logits, jnp.zeros((4, 16)), labels, jnp.zeros((4, 4))).mean()


def _focal(network, params, x):
    labels = jnp.float32(jnp.arange(512).reshape(64, 8) % 8 == 0)
    return optax.sigmoid_focal_loss(network(params, x), labels).mean()


def _ppo(network, params, x):
    mean, log_std = jnp.split(network(params, x), 2, -1)
    log_std = jnp.clip(log_std, -1, 1) - 1
    actions = jnp.cos(jnp.arange(mean.size)).reshape(mean.shape)
    z = (actions - mean) / jnp.exp(log_std)
    log_prob = jnp.sum(-0.5 * z**2 - log_std - 0.919, -1)
    ratio = jnp.exp(log_prob - jax.lax.stop_gradient(log_prob))
    advantage = jnp.sin(jnp.arange(len(mean)))
    clipped = jnp.clip(ratio, 0.8, 1.2) * advantage
    return -jnp.mean(jnp.minimum(ratio * advantage, clipped)) + 1e-3 * jnp.mean(z**2)


def _vae(network, params, x):
    mean, log_var = jnp.split(network(params[:2], x), 2, -1)
    noise = jax.random.normal(KEY, mean.shape)
    logits = network(params[2:], mean + jnp.exp(log_var / 2) * noise)
    losses = optax.sigmoid_binary_cross_entropy(logits, x > 0).sum(-1)
    divergence = 0.5 * jnp.sum(jnp.exp(log_var) + mean**2 - 1 - log_var, -1)
    return jnp.mean(losses + divergence)


class _NnxBlock(nnx.Module):
    def __init__(self, dtype, rngs):
        options = {"dtype": dtype, "rngs": rngs}
        self.norm1, self.norm2 = (nnx.LayerNorm(64, **options) for _ in range(2))
        self.attend = nnx.MultiHeadAttention(4, 64, decode=False, **options)
        self.up, self.down = (nnx.Linear(*s, **options) for s in ((64, 256), (256, 64)))

    def __call__(self, x):
        x = x + self.attend(self.norm1(x))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


def _scanned(cell, x):
    return jax.lax.scan(lambda h, x: (cell(x, h), None), jnp.zeros(32), x)[0]


def models() -> dict[str, Model]:
    """Returns the models by name."""
    chain, dense = nn.Sequential, nn.Dense
    conv = lambda n, d: nn.Conv(n, (3, 3), dtype=d)  # noqa: E731
    sizes = (8, 16, 16, 16)
    norm = {"create_scale": True, "create_offset": True, "decay_rate": 0.9}
    return {
        "Flax linen: MLP, LayerNorm": _linen(
            lambda d: chain(
                [dense(64, dtype=d), nn.LayerNorm(dtype=d), nn.gelu, dense(8, dtype=d)]
            ),
            *(64, 16),
        ),
        "Flax linen: Conv, BatchNorm": _linen(
            lambda d: chain(
                [conv(16, d), nn.BatchNorm(False, dtype=d), nn.relu, conv(8, d)]
            ),
            *sizes,
        ),
        "Flax linen: Conv, GroupNorm": _linen(
            lambda d: chain(
                [conv(16, d), nn.GroupNorm(4, dtype=d), nn.silu, conv(8, d)]
            ),
            *sizes,
        ),
        "Flax linen: attention": _linen(
            lambda d: nn.MultiHeadAttention(4, dtype=d), *(4, 32, 64)
        ),
        "Flax linen: LSTM": _linen(
            lambda d: nn.RNN(nn.LSTMCell(32, dtype=d)), *(8, 50, 16)
        ),
        "Flax linen: GRU": _linen(
            lambda d: nn.RNN(nn.GRUCell(32, dtype=d)), *(8, 50, 16)
        ),
        "Flax nnx: transformer": _nnx(_NnxBlock, *(4, 32, 64)),
        "Flax nnx: Conv": _nnx(
            lambda d, rngs: nnx.Sequential(
                nnx.Conv(8, 16, (3, 3), dtype=d, rngs=rngs),
                nnx.relu,
                nnx.Conv(16, 8, (3, 3), dtype=d, rngs=rngs),
            ),
            *(8, 16, 16, 8),
        ),
        "Equinox: MLP": _equinox(eqx.nn.MLP(16, 8, 64, 2, key=KEY), *(64, 16)),
        "Equinox: Conv2d": _equinox(eqx.nn.Conv2d(16, 8, 3, key=KEY), *sizes),
        "Equinox: GRUCell in a scan": _equinox(
            eqx.nn.GRUCell(16, 32, key=KEY),
            *(8, 50, 16),
            call=lambda cell, x: jax.vmap(lambda x: _scanned(cell, x))(x),
        ),
        "Equinox: attention": _equinox(
            eqx.nn.MultiheadAttention(4, 64, key=KEY),
            *(4, 32, 64),
            call=lambda module, x: jax.vmap(module)(x, x, x),
        ),
        "Haiku: LSTM": _haiku(
            lambda x: hk.dynamic_unroll(
                hk.LSTM(32), x, hk.LSTM(32, name="same").initial_state(x.shape[1])
            )[0],
            *(50, 8, 16),
        ),
        "Haiku: ResNet block": _haiku(
            lambda x: hk.nets.ResNet.BlockV1(16, 1, False, norm, False)(x, True, False),
            *sizes,
        ),
        "Haiku: transformer": _haiku(_blocks, *(4, 32, 64)),
        "Optax: CTC loss": _network(_ctc),
        "Optax: focal loss": _network(_focal),
        "PPO": _network(_ppo),
        "VAE": _network(_vae, ((16, 64), (64, 16), (8, 64), (64, 16))),
    }
