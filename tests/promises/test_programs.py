"""A step is the same program in every process, so that each finds what one compiled."""

import functools
import hashlib
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from optax_lossscale import (
    DynamicLossScale,
    FixedLossScale,
    HeadroomLossScale,
    LossScaleOptimizer,
    TolerantLossScale,
    autocast,
    scale_as_parameter,
    with_loss_scale,
)

# Several names, so that sets and dictionaries have an order to lose.
NAMES = ("kernel", "bias", "scale", "shift")
PARAMS = {
    name: np.ones((8, 8) if name == "kernel" else 8, np.float32) for name in NAMES
}
X = np.ones((4, 8), np.float32)


def layer(params, x):
    x = jnp.tanh(x @ params["kernel"] + params["bias"])
    x = (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
    return x * params["scale"] + params["shift"]


def plain(params, x):
    return jnp.mean(layer(params, x) ** 2)


def attention(params, x):
    weights = jax.nn.softmax(layer(params, x) @ layer(params, x + 1).T)
    return jnp.mean((weights @ x) ** 2)


def scanned(params, x):
    return jnp.mean(lax.scan(lambda x, _: (layer(params, x), None), x, None, 3)[0] ** 2)


def branched(params, x):
    inner = functools.partial(layer, params)
    return jnp.mean(
        lax.cond(x[0, 0] > 0, inner, lambda x: x @ params["kernel"], x) ** 2
    )


def looped(params, x):
    y = lax.stop_gradient(lax.fori_loop(0, x.astype(int)[0, 0], lambda _, x: 2 * x, x))
    return jnp.mean(layer(params, y) ** 2)


def repeated(params, x):
    return jnp.mean(jax.checkpoint(layer)(params, x) ** 2)


LOSSES = [plain, attention, scanned, branched, looped, repeated]
RULES = {
    "dynamic": DynamicLossScale(),
    "fixed": FixedLossScale(1024.0),
    "fixed, skips": FixedLossScale(1024.0, skip_nonfinite=True),
    "headroom": HeadroomLossScale(),
    "tolerant": TolerantLossScale(0.5),
}


def programs():
    """Yields names, functions and their arguments."""
    for loss_fn in LOSSES:
        yield f"autocast {loss_fn.__name__}", jax.grad(autocast(loss_fn)), (PARAMS, X)
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    for name, rule in RULES.items():
        for retries in (0, 8):
            optimizer = LossScaleOptimizer(inner, rule, retries=retries)
            step = functools.partial(optimizer.minimize, autocast(plain))
            args = PARAMS, optimizer.init(PARAMS), X
            yield f"minimize, {name}, retries={retries}", step, args
    for loss_fn in LOSSES[1:]:
        optimizer = LossScaleOptimizer(inner, retries=8, check_loss=True)
        step = functools.partial(optimizer.minimize, autocast(loss_fn))
        args = PARAMS, optimizer.init(PARAMS), X
        yield f"minimize, retries, {loss_fn.__name__}", step, args
    optimizer = LossScaleOptimizer(inner)
    yield "update", optimizer.update, (PARAMS, optimizer.init(PARAMS), PARAMS)
    params = PARAMS | {"loss_scale": np.float32(2.0**15)}
    optimizer = scale_as_parameter(LossScaleOptimizer(inner))
    yield "its loss", jax.grad(with_loss_scale(autocast(plain))), (params, X)
    yield "its update", optimizer.update, (params, optimizer.init(params), params)


@pytest.mark.exhaustive
def test_is_the_same_text_whatever_the_seed_of_hashes():
    from runs import finish_all, start

    processes = [start(script=__file__, PYTHONHASHSEED=seed) for seed in ("1", "2")]
    first, second = map(json.loads, finish_all(processes))
    assert len(first) == 25
    # The order of a set of strings is that of their hashes.
    assert first.pop("hash") != second.pop("hash")
    assert [name for name, text in first.items() if second[name] != text] == []


if __name__ == "__main__":
    texts = {"hash": hash("a")}
    for name, function, args in programs():
        text = jax.jit(function).lower(*args).as_text()
        texts[name] = hashlib.sha256(text.encode()).hexdigest()
    json.dump(texts, sys.stdout)
