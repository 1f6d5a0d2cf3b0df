"""`autocast` says when no product computes in half precision, and why."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from casting import normal, x64
from jax import lax
from tracing import line_of

from optax_lossscale import autocast

X, W = normal(16, 8), normal(8, 8, scale=0.4)


def loss_fn(params, x):
    return jnp.mean((x @ params["w"]) ** 2)  # product


def by_itself(params, x):
    h = x.astype(jnp.bfloat16) @ params["w"].astype(jnp.bfloat16)  # casts
    return jnp.mean(h.astype(jnp.float32) ** 2)


def normed_by_itself(params, x):
    scale = lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)
    x = jnp.einsum("...k,k->...k", x * scale, params["w"][0])  # A gain is no product,
    dots = jnp.dot(params["w"][1], params["w"][2])  # and this is a sum.
    return dots * by_itself(params, x)


def dot_alone(params, x):
    return jnp.dot(x[0], params["w"][0])


def no_product(params, x):
    return jnp.mean((x * params["w"][0]) ** 2)


def precise(params, x):
    return jnp.mean(jnp.dot(x, params["w"], precision="highest") ** 2)  # precise


def converges(params, x):
    step = lambda x: jnp.tanh(x @ params["w"]) / 2  # noqa: E731
    return jnp.mean(lax.while_loop(lambda x: jnp.max(x) > 0.1, step, x))  # loop


HALF = {"w": W.astype(np.float16)}, X.astype(np.float16)


def converges_precisely(params, x):
    step = lambda x: jnp.dot(jnp.tanh(x), params["w"], precision="highest") / 2  # noqa: E731
    return jnp.mean(lax.while_loop(lambda x: jnp.max(x) > 0.1, step, x))  # loop two


CASES = {
    "by itself": (
        by_itself,
        ({"w": W}, X),
        {},
        "{casts} multiplies bfloat16 by itself: remove the casts and the dtype",
    ),
    "by itself, after a norm and a dot": (
        normed_by_itself,
        ({"w": W}, X),
        {},
        "{casts} multiplies bfloat16 by itself: remove the casts and the dtype",
    ),
    "a dot alone": (dot_alone, ({"w": W}, X), {}, "it has no matrix product"),
    "no product": (no_product, ({"w": W}, X), {}, "it has no matrix product"),
    "covered": (
        loss_fn,
        ({"w": W}, X),
        {"float32": loss_fn},
        "float32= covers all of its products: name less",
    ),
    "argument": (
        loss_fn,
        HALF,
        {},
        r"args\[0\]\['w'\] is float16: pass args\[0\]\['w'\].astype\(jnp.float32\)",
    ),
    "precision": (
        precise,
        ({"w": W}, X),
        {},
        "{precise} asks for precision .*HIGHEST.*: leave precision and .* out",
    ),
    "solver": (converges, ({"w": W}, X), {}, "{loop} runs a loop that ends when .*"),
    "solver that asks for a precision": (
        converges_precisely,
        ({"w": W}, X),
        {},
        "{loop two} runs a loop that ends when floating-point values are close",
    ),
}


@pytest.mark.parametrize(("f", "args", "options", "reason"), CASES.values(), ids=CASES)
def test_the_first_reason_once(f, args, options, reason):
    for mark in ("casts", "precise", "loop", "loop two"):
        place = f"test_reasons.py:{line_of(mark, __file__)}"
        reason = reason.replace(f"{{{mark}}}", place)
    cast = autocast(f, **options)
    match = f"nothing of {f.__name__} in float16: {reason}.*, or leave autocast out.$"
    if f in (no_product, dot_alone, converges, converges_precisely):
        match = match.replace(", or", ":")
    with pytest.warns(UserWarning, match=match):
        jax.eval_shape(cast, *args)
    jax.eval_shape(cast, *args)  # Warnings are errors.


@jax.numpy_dtype_promotion("standard")
def test_float64():
    with x64():
        x, w = jnp.ones((4, 8), jnp.float64), jnp.ones((8, 8), jnp.float64)
        with pytest.warns(UserWarning, match=r"args\[0\]\['w'\] is float64"):
            autocast(loss_fn)({"w": w}, x=jnp.float32(x))
        with pytest.warns(UserWarning, match=r"kwargs\['x'\] is float64"):
            autocast(loss_fn)({"w": W}, x=x)


def both(p, x):
    step = lambda h, _: (jnp.tanh(h @ p["w"]), None)  # noqa: E731
    return precise(p, x) + lax.scan(step, x, length=2)[0].sum()


def test_a_function_that_casts_something_does_not_warn():
    with warnings.catch_warnings(action="error"):
        jax.eval_shape(autocast(loss_fn), {"w": W}, X)
        # One of two products is enough, also inside of a loop.
        jax.eval_shape(autocast(both), {"w": W}, X)
        jax.eval_shape(autocast(by_a_rule), {"w": W}, X)


@jax.custom_vjp
def precise_forward(w, x):
    return jnp.dot(x, w, precision="highest")


precise_forward.defvjp(
    lambda w, x: (precise_forward(w, x), (w, x)),
    lambda saved, ct: (saved[1].T @ ct, ct @ saved[0].T),
)


def by_a_rule(p, x):
    return jnp.mean(precise_forward(p["w"], x) ** 2)


@jax.custom_vjp
def total(x):
    return jnp.sum(x)


total.defvjp(lambda x: (total(x), x), lambda x, ct: (ct * jnp.ones_like(x),))


def by_itself_with_a_rule(p, x):
    return total((x.astype(jnp.bfloat16) @ p["w"].astype(jnp.bfloat16)).astype(x.dtype))


def by_itself_in_a_rule(p, x):
    return jnp.mean(in_bfloat16(p["w"], x).astype(jnp.float32))


@jax.custom_vjp
def in_bfloat16(w, x):
    return x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)


in_bfloat16.defvjp(
    lambda w, x: (in_bfloat16(w, x), (w, x)),
    lambda saved, ct: jax.vjp(lambda w, x: in_bfloat16.fun(w, x), *saved)[1](ct),
)


@pytest.mark.parametrize("f", [by_itself_with_a_rule, by_itself_in_a_rule])
def test_a_rule_without_products_of_float32_silences_nothing(f):
    with pytest.warns(UserWarning, match="multiplies bfloat16 by itself"):
        jax.eval_shape(autocast(f), {"w": W}, X)


def test_a_rule_whose_backward_pass_alone_has_products_is_silent():
    @jax.custom_vjp
    def kernel(w, x):  # As a kernel of Pallas, with a derivative in JAX.
        return precise({"w": w}, x)

    kernel.defvjp(
        lambda w, x: (kernel(w, x), (w, x)),
        lambda saved, ct: jax.vjp(lambda w, x: loss_fn({"w": w}, x), *saved)[1](ct),
    )
    cast = autocast(lambda p, x: by_itself(p, x) + kernel(p["w"], x))
    jax.eval_shape(cast, {"w": W}, X)  # Warnings are errors.
