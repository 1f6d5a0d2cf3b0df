"""What `autocast` promises of arguments, results, modules of libraries, and steps."""

from functools import partial, wraps

import equinox as eqx
import flax.errors
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from casting import error, errors, normal, products, saved
from flax import nnx
from networks import nnx_step

from optax_lossscale import LossScaleOptimizer, autocast, with_loss_scale

X, W, Y = normal(16, 8), normal(8, 8, scale=0.4), np.arange(16) % 8


def same_types(found, wanted):
    return jax.tree.map(jax.typeof, found) == jax.tree.map(jax.typeof, wanted)


def cross_entropy(logits):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, Y)
    return jnp.mean(losses)


@jax.numpy_dtype_promotion("standard")
def test_arguments_and_results():
    def f(params, *, x, flag, scale=2.0):
        assert x.dtype == jnp.float32
        assert jnp.finfo(x.dtype).max > 1e38
        h = x @ params["w"] * scale if flag else x
        aux = {"h": h, "half": h.astype(jnp.float16), "count": jnp.int32(3)}
        aux |= {"name": "f", "none": None, "float": 1.5, "numpy": np.arange(2)}
        return jnp.mean(h**2), aux | {"complex": h[0] * 1j, "mask": h > 0}

    def run(f):
        grad = jax.value_and_grad(f, has_aux=True, allow_int=True)
        params = {"w": W, "step": jnp.int32(0)}
        (loss, aux), grads = grad(params, x=X, flag=True)
        static = {k: aux.pop(k) for k in ("name", "none", "float", "numpy")}
        return loss, aux, grads, static

    (*found, static), (*wanted, same) = run(autocast(f)), run(f)
    assert same_types(found, wanted)
    assert np.array_equal(static.pop("numpy"), same.pop("numpy"))
    assert static == same
    # A compiled function takes NumPy's arrays, and so does this one.
    assert autocast(lambda x: x @ x)(np.eye(2, dtype=np.float32)).dtype == jnp.float32
    # Flags and counts may decide, as without autocast.
    power = autocast(lambda x, flag, n: jnp.tile(x @ W, n) if flag else x)
    assert power(W[0], np.bool_(True), np.int64(2)).shape == (2 * len(W),)
    # A known number is an array as any other.
    assert isinstance(autocast(lambda x: (2 * jnp.ones(()), x @ W))(W)[0], jax.Array)


def test_weak_types_stay():
    def f(scale, x):
        loss = jnp.mean((x @ W * scale) ** 2)
        # Python's numbers are int32, and this one is not.
        bits = jnp.uint32(2**32 - 1) ^ x.astype(jnp.uint32)
        return loss, (2.0 * scale, jnp.sin(scale), scale + 1, jnp.asarray(1.0), bits)

    def run(f):
        return jax.jit(jax.value_and_grad(f, has_aux=True))(jnp.asarray(2.0), X)

    # Else a step with such a parameter compiles twice.
    assert same_types(run(autocast(f)), run(f))


def test_keys_and_integers():
    def f(w, key, index):
        keep = jax.random.bernoulli(key, 0.5, X.shape)
        h = jnp.where(keep, X @ w, 0)[index]
        return jnp.sum(h * jax.random.normal(key, h.shape)), jax.random.split(key)

    key, index = jax.random.key(0), jnp.int32(3)
    (loss, keys), (wanted, split) = (
        jax.jit(g)(W, key, index) for g in (autocast(f), f)
    )
    assert jnp.array_equal(jax.random.key_data(keys), jax.random.key_data(split))
    assert abs(float(loss / wanted) - 1) < 0.01


def test_closures_stay_differentiable():
    def f(w, cast):
        # The inner function closes over a number of the outer gradient.
        inner = cast(lambda x: jnp.mean((x @ w) ** 2))
        return inner(X) + jax.grad(inner)(X)[0, 0]

    found, wanted = (
        jax.jit(jax.value_and_grad(partial(f, cast=cast)))(W)
        for cast in (autocast, lambda f: f)
    )
    assert errors(found, wanted) < 0.01


def test_a_ref_that_the_function_closes_over():
    def run(wrap):
        ref = jax.new_ref(jnp.zeros_like(X @ W))

        def f(w):
            ref[...] = jax.lax.stop_gradient(X @ w)
            return jnp.mean((X @ w) ** 2)

        return jax.jit(jax.grad(wrap(f)))(W), ref[...]

    for x, y in zip(run(autocast), run(lambda f: f), strict=True):
        assert jnp.allclose(x, y, rtol=0.01, atol=0.01)


def test_a_ref_that_the_function_makes_and_hands_on():
    """A jitted function writes it, and a loop."""

    @jax.jit
    def write(ref, x):
        ref[0] = x

    def f(w):
        ref = jax.new_ref(jnp.zeros((3,)))
        write(ref, jnp.mean((X @ w) ** 2))

        def body(x, i):
            ref[i] = x
            return 2 * x, None

        last, _ = jax.lax.scan(body, ref[0], jnp.arange(1, 3))
        return last + jnp.sum(ref[...])

    assert error(f, W) < 0.01


def test_a_large_mask_that_the_function_closes_over():
    mask = np.where(np.tri(16, dtype=bool), 0, -1e9).astype(np.float32)
    mask[0] = -1e9  # A row of which nothing is kept.

    def f(w):
        return cross_entropy(jax.nn.softmax((X @ w) @ X.T + mask) @ X)

    assert error(f, W) < 0.01


class Network(nnx.Module):
    def __init__(self, rngs):
        # A bias before the norm would have no gradient but roundings.
        self.hidden = nnx.Linear(8, 8, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.out = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        return self.out(self.dropout(jax.nn.gelu(self.norm(self.hidden(x)))))


@jax.numpy_dtype_promotion("standard")
def test_changes_in_place_come_back():
    def run(f):
        model = Network(nnx.Rngs(0))
        loss, grads = nnx.jit(nnx.value_and_grad(f))(model, X)
        optimizer = LossScaleOptimizer(optax.adam(1e-2))
        optimizer = nnx.Optimizer(model, optimizer, wrt=nnx.Param)
        step = nnx_step(f)
        losses = [loss, *(step(model, optimizer, X) for _ in range(2))]
        return jnp.stack(losses), nnx.to_pure_dict(nnx.state((model, grads)))

    (losses, state), (wanted, true_state) = map(run, (autocast(loss_of), loss_of))
    assert jnp.allclose(losses, wanted, rtol=0.01)
    for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(true_state), strict=True):
        if jnp.issubdtype(x.dtype, jnp.floating):
            assert jnp.allclose(x, y, atol=0.02)
        elif x.dtype == jnp.uint32:
            assert jnp.array_equal(x, y)  # The counts of the keys of dropout.


def loss_of(model, x):
    return cross_entropy(model(x))


def test_the_same_module_twice_and_merged_inside():
    model = Network(nnx.Rngs(0))
    same = lambda a, b: (a is b["model"], loss_of(a, X))  # noqa: E731
    assert autocast(same)(model, {"model": model})[0] is True
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def f(params):
        return loss_of(nnx.merge(graph, params, rest, copy=True), X)

    assert all(x == {"float16"} for x in products(autocast(f), params))


def equinox_model():
    model = eqx.nn.MLP(8, 8, 16, 2, key=jax.random.key(0))
    return model, lambda model: cross_entropy(jax.vmap(model)(X))


def linen_model():
    layers = [nn.Dense(16), nn.LayerNorm(), nn.gelu, nn.Dense(8)]
    model = nn.Sequential(layers)
    params = model.init(jax.random.key(0), X)
    return params, lambda params: cross_entropy(model.apply(params, X))


def haiku_model():
    hk = pytest.importorskip("haiku")

    def forward(x):
        h, _ = hk.dynamic_unroll(hk.LSTM(8), x[:, None], hk.LSTM(8).initial_state(1))
        return hk.Linear(8)(h[:, 0])

    model = hk.without_apply_rng(hk.transform(forward))
    params = model.init(jax.random.key(0), X)
    return params, lambda params: cross_entropy(model.apply(params, X))


@pytest.mark.parametrize("make", [equinox_model, linen_model, haiku_model])
def test_models_of_libraries(make):
    params, f = make()
    found, wanted = (
        eqx.filter_jit(eqx.filter_value_and_grad(g))(params) for g in (autocast(f), f)
    )
    assert errors(*(eqx.filter(x, eqx.is_array) for x in (found, wanted))) < 0.01
    arrays, static = eqx.partition(params, eqx.is_array)
    f16 = autocast(lambda arrays: f(eqx.combine(arrays, static)))
    assert all(x == {"float16"} for x in products(f16, arrays))


@pytest.mark.parametrize("retries", [0, 24])
@jax.numpy_dtype_promotion("standard")
def test_steps(retries):
    traced = []

    @autocast
    def f(params, x):
        traced.append(1)
        return cross_entropy(jax.nn.relu(x @ params["w"]) @ params["w"])

    params = {"w": W}
    optimizer = LossScaleOptimizer(
        optax.adam(1e-2), initial_scale=2.0**24, retries=retries
    )
    state = optimizer.init(params)
    step = jax.jit(lambda *about: optimizer.minimize(f, *about))
    params, state, first = step(params, state, X)
    count = len(traced)
    for _ in range(9):
        params, state, loss = step(params, state, X)
    assert len(traced) == count
    assert jax.tree.map(jax.typeof, state) == jax.tree.map(
        jax.typeof, optimizer.init(params)
    )
    assert loss < first
    assert (int(state.skipped_steps) > 0) == (retries == 0)


def test_a_wrapper_of_a_cast_is_a_function_of_its_own():
    cast = autocast(lambda w: jnp.mean((X @ w) ** 2))

    @wraps(cast)
    def twice(w):
        return cast(w) + jnp.mean((X @ w) ** 2)

    assert jnp.allclose(autocast(twice)(W), 2 * cast(W), rtol=0.01)


def test_with_a_scale_among_the_parameters():
    params = {"w": W, "loss_scale": jnp.float32(1024)}
    f = lambda params: cross_entropy(X @ params["w"])  # noqa: E731
    (loss, grads), (true_loss, true_grads) = (
        jax.jit(jax.value_and_grad(g))(params)
        for g in (autocast(with_loss_scale(f)), with_loss_scale(f))
    )
    for found in (grads, true_grads):
        del found["loss_scale"]
    assert errors((loss, grads), (true_loss, true_grads)) < 0.01


@jax.numpy_dtype_promotion("standard")
def test_less_is_saved():
    def f(w):
        h = jnp.tile(X, (64, 1)).astype(w.dtype)
        for _ in range(3):
            h = jax.nn.gelu(h @ w)
        return jnp.mean(jax.nn.softmax(h) ** 2)

    def by_hand(w):
        return f(w.astype(jnp.float16))

    assert saved(autocast(f), W) < min(0.5 * saved(f, W), saved(by_hand, W))


class Instance:
    def __call__(self, x):
        return x


class Inheriting(Instance):
    pass


@pytest.mark.parametrize(
    ("args", "options", "error", "message"),
    [
        ((jnp.sum,), {"float32": 3}, TypeError, "float32 must .* got 3"),
        ((jnp.sum,), {"float32": ["a.py:1", 3]}, TypeError, "float32 must .* got 3"),
        ((jnp.sum,), {"float32": ""}, TypeError, "float32 must .* got ''"),
        ((jnp.sum,), {"float32": W}, TypeError, r"float32 must .* got array"),
    ],
)
def test_errors(args, options, error, message):
    with pytest.raises(error, match=message):
        autocast(*args, **options)


NO_FUNCTION = [3, W, {"w": W}, optax.adam(1e-3), "float16", jnp.float16, W.dtype]


@pytest.mark.parametrize("fun", NO_FUNCTION)
def test_anything_but_a_function_is_answered_by_the_usage(fun):
    with pytest.raises(
        TypeError, match=r"^fun .* got .* Write loss_fn = autocast\(loss"
    ):
        autocast(fun)


NO_DTYPE = ["fp16", "bf16", "auto", True, None, 16, "float64", jnp.int8, "float8_e5m2"]
NO_DTYPE += [np.ones(2, np.float16), np.float16(1)]  # Arguments of the function.


@pytest.mark.parametrize("dtype", NO_DTYPE)
def test_anything_but_a_dtype_is_answered_by_the_dtypes(dtype):
    with pytest.raises(
        ValueError, match=r"^dtype .* float16, bfloat16 or float32, got"
    ):
        autocast(jnp.sum, dtype)


def loss_that_branches(params, x):
    return jnp.mean(x @ params) if x[0, 0] > 0 else 0.0


class Branching:
    def __call__(self, params, x):
        return loss_that_branches(params, x)


WRITTEN = {
    "function": (loss_that_branches, (W,), "loss_that_branches"),
    "partial": (partial(loss_that_branches, W), (), "loss_that_branches"),
    "wrapper": (jax.checkpoint(loss_that_branches), (W,), "loss_that_branches"),
    "model": (Branching(), (W,), "__call__"),
    "method": (Branching().__call__, (W,), "__call__"),
}


@pytest.mark.parametrize(("fun", "args", "name"), WRITTEN.values(), ids=WRITTEN)
def test_a_branch_on_a_value_is_in_the_function_of_the_user(fun, args, name):
    match = f"function {name} at .*test_autocast.py"
    with pytest.raises(jax.errors.TracerBoolConversionError, match=match):
        autocast(fun)(*args, x=X)


class Pair:
    def __init__(self, first, second):
        self.first, self.second = first, second


def test_a_result_that_is_no_pytree():
    def pair(w):
        return Pair(jnp.mean(X @ w), "a name")

    for call in (autocast(pair), jax.grad(lambda w: autocast(pair)(w).first)):
        match = "pair returns Pair, .* no pytree. Register .* or return the arrays"
        with pytest.raises(TypeError, match=match):
            call(W)

    # Without arrays, or with those of a gradient around it, an object is a constant.
    def loss(w):
        mean, same = autocast(lambda v: (jnp.mean(X @ v), Pair(w, 1)))(w)
        return mean + jnp.sum(same.first)

    wanted = jax.grad(lambda w: jnp.mean(X @ w))(W) + 1
    assert jnp.allclose(jax.grad(loss)(W), wanted, rtol=0.01)


def test_a_module_that_is_closed_over_and_changes():
    norm = nnx.BatchNorm(8, rngs=nnx.Rngs(0))
    with pytest.raises(flax.errors.TraceContextError) as error:
        autocast(lambda w: jnp.mean(norm(X @ w) ** 2))(W)
    assert any("Pass it as an argument" in x for x in error.value.__notes__)


@pytest.mark.parametrize("dtype", ["float32", jnp.float32, np.float32, W.dtype])
def test_float32_returns_the_function_as_it_is(dtype):
    def f(x):
        return x @ W

    assert autocast(f, dtype) is f
    assert autocast(autocast(f), dtype, float32="a scope") is f
    assert autocast(dtype=dtype)(f) is f


NO_FUNCTIONS = [Instance(), Inheriting, jnp.float32, jnp.add, max, partial(jnp.add, 1)]


@pytest.mark.parametrize("chosen", NO_FUNCTIONS)
def test_what_has_no_functions_of_its_own(chosen):
    with pytest.raises(TypeError, match=r"float32 must hold lines .* names of scopes"):
        autocast(jnp.sum, float32=chosen)


@pytest.mark.parametrize("enforce", [True, False])
def test_an_order_that_somebody_wrote_stays(enforce):
    overlap = pytest.importorskip("jax.experimental.overlap")
    if not hasattr(overlap, "program_order"):
        pytest.skip("JAX has none yet.")
    order = partial(overlap.program_order, enforce=enforce)

    def layers(x):
        return jnp.tanh(x @ W) @ W + jnp.cos(x)

    def loss_fn(layers, x):
        return jnp.sum(jnp.square(layers(x)))

    plain, ordered = (autocast(partial(loss_fn, f)) for f in (layers, order(layers)))
    programs = [jax.jit(jax.value_and_grad(f)).lower(X) for f in (plain, ordered)]
    barriers = [x.as_text().count("optimization_barrier") for x in programs]
    assert (barriers[1] > barriers[0] + 4) == enforce, barriers
    assert "xf16>" in programs[1].as_text()
    (expected, grads), (loss, found) = (x.compile()(X) for x in programs)
    assert np.allclose(loss, expected)
    assert np.allclose(found, grads, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, 1e10, -1.5, 2.5])
@pytest.mark.parametrize("dtype", ["int32", "int8", "uint8"])
def test_known_values_become_the_integers_of_xla(value, dtype):
    def cast(w, x):
        known = jnp.zeros(()) + np.float32(value)
        return jnp.sum(x @ w), jax.lax.convert_element_type(known, dtype)

    array = jax.device_put(np.full(1, value, np.float32))
    wanted = jax.lax.convert_element_type(array, dtype)[0]
    assert autocast(cast)(W, W)[1] == wanted


def test_a_known_quotient_of_integers_is_that_of_xla():
    def quotients(w, x):
        pairs = [(-7, 2), (7, -2), (7, 0), (2**30 + 1, 1)]
        known = [(jnp.zeros((), int) + a, jnp.zeros((), int) + b) for a, b in pairs]
        return jnp.sum(x @ w), jnp.stack([jax.lax.div(*pair) for pair in known])

    numbers, divisors = np.int32([[-7, 7, 7, 2**30 + 1], [2, -2, 0, 1]])
    wanted = jax.lax.div(jax.device_put(numbers), jax.device_put(divisors))
    found = autocast(quotients)(W, W)[1]
    np.testing.assert_array_equal(found, wanted)
