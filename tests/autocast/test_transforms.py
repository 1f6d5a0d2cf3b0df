"""Where `autocast` computes: transforms, loops, branches, devices and rules."""

import cProfile
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from casting import (
    check,
    compiled_step,
    dtypes,
    equations,
    error,
    errors,
    normal,
    products,
    saved,
)
from helpers import exhaustive_but
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from meshes import (
    PARTS,
    WHOLE,
    mesh_of,
    on_one_device,
    over_devices,
    types_on_one_device,
)

from optax_lossscale import autocast
from optax_lossscale._jaxprs.parts import all_equations

X, TARGET = normal(32, 8), normal(32, 4)
P = {"w": normal(8, 8, scale=0.4), "b": normal(8), "out": normal(8, 4)}


def mean_square(p, h):
    return jnp.mean((h @ p["out"] - TARGET[: len(h)]) ** 2)


def dense(p, h):
    return jax.nn.gelu(h @ p["w"] + p["b"])


def jitted(p, x):
    return mean_square(p, jax.jit(dense)(p, x))


def mapped(p, x):
    return jnp.mean(jax.vmap(lambda x: mean_square(p, dense(p, x[None])))(x))


def scanned(p, x):
    ws = jnp.stack([p["w"], -p["w"]])
    step = lambda h, w: (jnp.tanh(h @ w + h @ p["w"]), None)  # noqa: E731
    return mean_square(p, lax.scan(step, x, ws)[0])


def repeated(p, x):
    return mean_square(p, lax.fori_loop(0, 3, lambda _, h: dense(p, h), x))


def branched(p, x):
    h = lax.cond(x[0, 0] > 9, lambda h: 2 * h, lambda h: dense(p, h), x)
    return mean_square(p, lax.switch(1, [jnp.sin, lambda h: h @ p["w"]], h))


def checkpointed(policy):
    def f(p, x):
        def block(h):
            h = checkpoint_name(dense(p, h), "hidden")
            return jnp.sin(h @ p["w"])

        return mean_square(p, jax.checkpoint(block, policy=policy)(x))

    return f


@jax.custom_jvp
def log_sum_exp(x):
    return jnp.log(jnp.sum(jnp.exp(x - 5), -1)) + 5


@log_sum_exp.defjvp
def _(primals, tangents):
    weights = jax.nn.softmax(*primals)
    return log_sum_exp(*primals), jnp.sum(weights * tangents[0], -1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def product(x, w, factor, index):
    return factor * (x @ w), index


def product_forward(x, w, factor, index):
    return product(x, w, factor, index), (x, w)


def product_backward(factor, residuals, grads):
    x, w = residuals
    return factor * (grads[0] @ w.T), factor * (x.T @ grads[0]), None


product.defvjp(product_forward, product_backward)


def with_rules(p, x):
    h, index = product(x, p["w"], 0.5, jnp.int32(3))
    return mean_square(p, jax.nn.relu(h)) + jnp.mean(log_sum_exp(h)) + h[index, 0]


def convolved(p, x):
    x, w = x.reshape(4, 8, 8, 1), p["w"].reshape(4, 2, 1, 8)
    about = {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}
    h = lax.conv_general_dilated(x, w, (1, 1), "SAME", **about)
    h = lax.reduce_window(h, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return mean_square(p, h.mean((1, 2)))


def on_devices(p, x, **options):
    @over_devices((WHOLE, PARTS, PARTS), WHOLE, **options)
    def local(p, x, target):
        h = lax.scan(lambda h, _: (dense(p, h), None), x, length=2)[0]
        h = jnp.where(h > -0.9, h, 0.0)
        return lax.pmean(jnp.mean((h @ p["out"] - target) ** 2), "batch")

    return local(p, x, TARGET)


def sharded(p, x):
    mesh = mesh_of(batch=8)
    split, whole = (NamedSharding(mesh, spec) for spec in (PARTS, WHOLE))
    f = jax.jit(dense, in_shardings=(None, split), out_shardings=split)
    h = lax.with_sharding_constraint(f(p, x), whole)
    return mean_square(p, h)


SAVED = jax.checkpoint_policies.save_only_these_names("hidden")
PROGRAMS = {
    "jit": jitted, "vmap": mapped, "scan": scanned, "fori": repeated,
    "cond": branched, "remat": checkpointed(None), "remat names": checkpointed(SAVED),
    "remat dots": checkpointed(jax.checkpoint_policies.dots_saveable),
    "rules": with_rules, "convolution": convolved, "shard_map": on_devices,
    "shard_map unchecked": functools.partial(on_devices, check_vma=False),
    "sharded": sharded,
}  # fmt: skip


def test_a_checkpoint_saves_what_its_policy_says():
    names = jax.checkpoint_policies
    two = names.save_any_names_but_these("hidden"), names.save_only_these_names("other")
    first, second = (autocast(checkpointed(policy)) for policy in two)
    assert saved(lambda p: first(p, X), P) == saved(lambda p: second(p, X), P)


@pytest.mark.parametrize("f", PROGRAMS.values(), ids=PROGRAMS)
def test_both_passes_compute_in_float16(f):
    assert all(x == {"float16"} for x in products(autocast(f), P, X))


DEFAULT = [branched, scanned, with_rules, convolved, on_devices]
IN_VALUE = exhaustive_but(PROGRAMS.values(), DEFAULT)


@pytest.mark.parametrize("f", IN_VALUE, ids=PROGRAMS)
def test_agrees_with_float32(f):
    assert error(f, P, X, scale=(1.0, 2.0**12)) < 0.01


@jax.custom_vjp
def with_other_results(h):
    return jnp.sum(h * h, -1), h, jnp.sum(h, -1)


with_other_results.defvjp(
    lambda h: (with_other_results(h), h),
    lambda h, g: (2 * h * g[0][..., None] + g[1] + g[2][..., None],),
)


def one_of_several_results(p, x):
    """Reads one result of a rule: nobody differentiates the others."""
    return jnp.mean(with_other_results(x @ p["w"])[0])


MESHES = [AxisType.Manual, AxisType.Explicit]
ANYWHERE = [jitted, scanned, repeated, branched, checkpointed(SAVED)]
ANYWHERE.append(one_of_several_results)
PAIRS = [*itertools.product(ANYWHERE, MESHES), (with_rules, AxisType.Manual)]


@pytest.mark.parametrize(("f", "kind"), PAIRS)
def test_types_on_a_mesh_are_those_without_autocast(f, kind):
    types = [
        types_on_one_device(kind, jax.value_and_grad(g), P, X) for g in (f, autocast(f))
    ]
    assert types[0] == types[1]


@pytest.mark.parametrize("kind", MESHES)
@pytest.mark.parametrize("f", exhaustive_but(ANYWHERE, ANYWHERE[-1:]))
def test_a_mesh_changes_no_number(f, kind):
    step = jax.value_and_grad(autocast(f))
    found, wanted = on_one_device(kind, step, P, X), jax.jit(step)(P, X)
    assert errors(*jax.device_get((found, wanted))) < 1e-3


def test_bfloat16():
    check(jitted, P, X, dtype=jnp.bfloat16, tolerance=0.05, scales=(1.0,))


@pytest.mark.filterwarnings("ignore:autocast computes nothing")
def test_a_loop_that_counts_is_half_one_that_compares_is_not():
    def counts(x):
        goes_on = lambda state: state[1] < 3  # noqa: E731
        step = lambda state: (state[0] @ P["w"] + x, state[1] + 1)  # noqa: E731
        return lax.while_loop(goes_on, step, (x, 0))[0]

    def compares(x):
        return lax.while_loop(lambda x: jnp.max(x) < 9, lambda x: x @ P["w"] + x, x)

    assert dtypes(autocast(counts), X) == [jnp.float16]
    difference = autocast(counts)(X) - counts(X)
    assert 0 < float(jnp.max(jnp.abs(difference))) < 0.01
    assert dtypes(autocast(compares), jnp.abs(X)) == [jnp.float32]


def test_each_example_stops_by_itself():
    def halve(x):
        return lax.while_loop(lambda x: jnp.sum(x**2) > 1, lambda x: x / 2, x)

    def f(p, x):
        return mean_square(p, jax.vmap(halve)(4 * x) @ p["w"])

    check(f, P, X)
    lengths = jnp.arange(len(X)) % 4

    def repeated(p, x):
        step = lambda _, x: jnp.tanh(x @ p["w"])  # noqa: E731
        return jax.vmap(lambda n, x: lax.fori_loop(0, n, step, x))(lengths, x)

    difference = autocast(repeated)(P, X) - repeated(P, X)
    assert 0 < float(jnp.max(jnp.abs(difference))) < 0.01


@pytest.mark.filterwarnings("ignore:autocast computes nothing")
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_a_loop_converges_as_in_float32(dtype):
    def iterations(w):
        def goes_on(state):
            x, before, n, _ = state
            return (jnp.max(jnp.abs(x - before)) > 1e-5) & (n < 300)

        @jax.jit
        def step(state):
            x, _, n, _ = state
            return jnp.tanh(0.5 * x @ w + X), x, n + 1, jnp.argmax(x)

        return lax.while_loop(goes_on, step, (X, 0 * X, 0, 0))[2]

    assert autocast(iterations, dtype)(P["w"]) == iterations(P["w"]) < 100


@pytest.mark.filterwarnings("ignore:autocast computes nothing")
@pytest.mark.parametrize("tolerance", [1e-3, 1e-5])
def test_a_solver_takes_as_many_steps_as_in_float32(tolerance):
    def steps(x):
        def step(state):
            x, time, size, n = state
            slope = jnp.tanh(x @ P["w"])
            new = x + size * slope
            other = x + size / 2 * (slope + jnp.tanh(new @ P["w"]))
            allowed = 1e-7 + tolerance * jnp.abs(x)
            error = jnp.sqrt(jnp.mean(((other - new) / allowed) ** 2))
            is_good = error <= 1
            x = jnp.where(is_good, other, x)
            time = jnp.where(is_good, time + size, time)
            factor = jnp.clip(0.9 / jnp.sqrt(error), 0.2, 5)
            return x, time, jnp.minimum(size * factor, 1 - time), n + 1

        start = jnp.abs(X) + 1, 0.0, 0.1, 0
        return lax.while_loop(lambda s: (s[1] < 1) & (s[3] < 1000), step, start)[3]

    assert int(autocast(steps)(X)) == int(steps(X))


def test_writing_a_text_until_it_ends():
    def f(x):
        def step(state):
            x, _, n = state
            x = jnp.tanh(jax.nn.standardize(x, epsilon=1e-6) @ P["w"])
            return x, jnp.argmax(x), n + 1

        goes_on = lambda state: (state[1] != 5) & (state[2] < 9)  # noqa: E731
        return lax.while_loop(goes_on, step, (x, jnp.argmax(x), 0))[0]

    assert dtypes(autocast(f), X) == [jnp.float16]


@pytest.mark.exhaustive
def test_the_adjoint_of_an_ode():
    from jax.experimental.ode import odeint

    def f(p, x):
        def velocity(x, _, w):
            return jnp.tanh(x @ w)

        ends = jax.vmap(lambda x: odeint(velocity, x, jnp.arange(2.0), p["w"])[-1])
        return mean_square(p, ends(x))

    assert error(f, P, X[:4]) < 0.01


@pytest.mark.parametrize(
    "transform", [jax.hessian, jax.jacfwd, jax.jacrev, lambda f: jax.vmap(jax.grad(f))]
)
def test_transforms_of_the_result(transform):
    def f(w):
        return jnp.mean(jnp.tanh(X @ (w * jnp.eye(8))) ** 2)

    found, wanted = (jax.jit(transform(g))(P["b"]) for g in (autocast(f), f))
    np.testing.assert_allclose(found, wanted, atol=0.01 * np.abs(wanted).max())


def test_inside_of_jit_shard_map_and_scan():
    def local(p, x):
        return lax.pmean(mean_square(p, dense(p, x)), "batch")

    found, wanted = (
        over_devices((WHOLE, PARTS), WHOLE)(jax.value_and_grad(f))(P, X)
        for f in (autocast(local), local)
    )
    assert errors(found, wanted) < 0.01

    def loop(p, x):
        f = autocast(lambda x: dense(p, x))
        return mean_square(p, lax.scan(lambda h, _: (f(h), None), x, length=2)[0])

    wanted = jax.value_and_grad(lambda p, x: mean_square(p, dense(p, dense(p, x))))
    assert errors(compiled_step(loop, P, X)(1.0), wanted(P, X)) < 0.01


def test_precision_and_other_dtypes_stay():
    def f(p, x):
        h = jnp.dot(x, p["w"], precision="highest")
        h = (h.astype(jnp.bfloat16) @ p["w"].astype(jnp.bfloat16)).astype(jnp.float32)
        return jnp.mean((h @ p["out"]) ** 2)

    found = products(autocast(f), P, X)
    assert all(len(x) == 1 for x in found)
    # One forward, and gradients of the operands that have one.
    names = [x for kinds in found for x in kinds]
    assert [names.count(x) for x in ("float32", "bfloat16", "float16")] == [2, 3, 3]
    assert error(f, P, X) < 0.01


@jax.numpy_dtype_promotion("standard")
def test_promoted_operands_compute_in_half_precision():
    # A frozen base of float16 under float32 adapters, as jnp.matmul promotes them.
    def f(params, base, x):
        return jnp.mean((x @ base + x @ params["down"] @ params["up"]) ** 2)

    params = {"down": normal(8, 2), "up": normal(2, 8)}
    check(f, params, normal(8, 8).astype(jnp.float16), X)


@pytest.mark.parametrize("again", [jax.jit, jax.checkpoint])
def test_a_function_that_is_called_often_is_traced_once(again):
    @again
    def block(w, h):
        return h + jax.nn.gelu(h @ w)

    def f(w, x):
        for _ in range(8):
            x = block(w, x)
        return jnp.mean(x**2)

    check(f, normal(8, 8, scale=0.1), X)
    found = [id(x) for x in equations(autocast(f), normal(8, 8), X)]
    assert len(found) == 8
    # The first reads an argument, and a square reads the last.
    assert len(set(found)) == 2


def test_nested_loops_cost_nothing():
    def nested(depth):
        def body(depth, h):
            if depth == 0:
                return jnp.tanh(h @ P["w"])
            step = lambda h, _: (body(depth - 1, h), None)  # noqa: E731
            return lax.scan(step, h, length=2)[0]

        return lambda h: body(depth, h)

    def count(f):
        return len(list(all_equations(jax.make_jaxpr(f)(X).jaxpr)))

    counts = [count(autocast(nested(depth))) for depth in (1, 5)]
    assert counts[1] - counts[0] <= 3 * (count(nested(5)) - count(nested(1)))


def test_the_cost_grows_with_the_program():
    def f(params, x):
        for p in params:
            h = x - x.mean(-1, keepdims=True)
            h = jax.jit(jnp.multiply)(h, lax.rsqrt(x.var(-1, keepdims=True) + 1))
            x = x + jnp.tanh(h @ p["w"] + p["b"])
        return jnp.mean(x)

    def calls(layers):
        profile, params = cProfile.Profile(), [P] * layers
        profile.runcall(jax.make_jaxpr(autocast(f)), params, X)
        return sum(x.callcount for x in profile.getstats())

    calls(1)  # What JAX does once.
    small, large = calls(20), calls(80)
    assert large < 4.5 * small  # All steps for each step would be 16.


@jax.jit
def scaled(h, mean):
    size = jnp.square(h - mean).mean(-1, keepdims=True)
    return (h - mean) * lax.rsqrt(size + 1e-6)


def normed(h):
    return scaled(h, h.mean(-1, keepdims=True))


def unrolled_stream(p, x):
    h = x @ p["w"]
    for _ in range(4):
        h = h + jax.nn.relu(normed(h) @ p["w"])
    return jnp.mean(normed(h) ** 2)


def scanned_stream(p, x):
    block = lambda h, _: (h + jax.nn.relu(normed(h) @ p["w"]), None)  # noqa: E731
    return jnp.mean(lax.scan(block, x @ p["w"], length=4)[0] ** 2)


@pytest.mark.parametrize(("f", "count"), [(unrolled_stream, 3), (scanned_stream, 1)])
def test_streams_stay_in_half_precision(f, count):
    sums = dtypes(autocast(f), P, X, names=["add"])
    assert sums.count(jnp.float16) == count


def test_products_of_one_term():
    def f(p, x):
        h = jnp.sin(jnp.einsum("bi,i,j->bij", x, p["b"], p["b"]))  # learned frequencies
        h = h.mean(1) @ p["w"] + jnp.tanh(x[:, :1] @ p["w"][:1])  # one input
        return mean_square(p, h)

    assert error(f, P, X) < 0.01


def test_products_of_one_term_with_a_sharding():
    def f(w, x, b):
        spec = PartitionSpec("d", None, "m")
        return jnp.mean(jnp.einsum("bi,j->bij", x @ w, b, out_sharding=spec) ** 2)

    mesh = mesh_of(AxisType.Explicit, d=4, m=2)
    with jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, PartitionSpec("d")))
        b = jax.device_put(P["b"], NamedSharding(mesh, PartitionSpec("m")))
        w = jax.device_put(P["w"], NamedSharding(mesh, PartitionSpec(None, "m")))
        found, wanted = jax.jit(autocast(f))(w, x, b), f(w, x, b)
        assert jnp.allclose(found, wanted, rtol=0.01)


def with_a_closing_vjp(p, x):
    @jax.custom_vjp
    def closing(w):
        return jnp.mean(x @ w)

    closing.defvjp(lambda w: (closing(w), None), lambda _, g: (g * (x.T @ x) / 99,))
    return closing(p["w"])


def with_a_closing_backward(p, x):
    @jax.custom_vjp
    def closing(w):
        return jnp.mean(w)

    closing.defvjp(lambda w: (closing(w), None), lambda _, g: (g * (x.T @ x) / 99,))
    return closing(p["w"])


def with_a_closing_jvp(p, x):
    @jax.custom_jvp
    def closing(w):
        return jnp.mean(x @ w)

    closing.defjvp(lambda p, t: (closing(*p), jnp.mean(x @ t[0])))
    return closing(p["w"])


def with_a_closing_gradient(p, x):
    @jax.custom_gradient
    def closing(w):
        return jnp.mean(x @ w), lambda g: g * (x.T @ x) / 99

    return closing(p["w"])


CLOSING = [with_a_closing_vjp, with_a_closing_backward, with_a_closing_jvp]
CLOSING.append(with_a_closing_gradient)


@pytest.mark.filterwarnings("ignore:autocast computes nothing")
@pytest.mark.parametrize("compiled", [lambda f: f, jax.jit])
@pytest.mark.parametrize("f", CLOSING)
def test_a_rule_that_closes_over_an_argument_is_named(f, compiled):
    line = f.__code__.co_firstlineno
    name = "a function" if f is with_a_closing_gradient else r"closing \(test_t.*py"
    with pytest.raises(TypeError) as error:
        compiled(jax.grad(autocast(f)))(P, X)
    (words,) = str(error.value).splitlines()
    found = re.match(
        rf"test_transforms.py:(\d+) calls {name}.* with a rule of derivatives \(jax.cus"
        r".*\) that closes over arrays of the function around it: float32\[32,8\]\. .*"
        "Pass these arrays as arguments of the function that has the rule.",
        words,
    )
    assert found, words
    assert line < int(found[1]) < line + 12


def test_rules_with_closures_and_arrays_of_integers():
    factor = jnp.arange(8.0) / 32

    @jax.custom_vjp
    def scaled(y):
        return y * factor

    scaled.defvjp(lambda y: (y * factor, None), lambda _, g: (g * factor,))

    @jax.custom_vjp
    def counted(y, i):
        return 2 * y, i + 1

    counted.defvjp(lambda *x: (counted(*x), None), lambda _, g: (2 * g[0], None))

    @jax.custom_jvp
    def passed(y, i):
        return 2 * y, i

    @passed.defjvp
    def _(primals, tangents):
        zeros = np.zeros(primals[1].shape, jax.dtypes.float0)
        return passed(*primals), (2 * tangents[0], zeros)

    def f(p, x):
        h = scaled(x @ p["w"])
        for rule in (counted, passed):
            h = rule(h, jnp.arange(3))[0]
        return mean_square(p, h)

    check(f, P, X)


def test_rules_that_ask_which_arguments_have_gradients():
    @jax.custom_vjp
    def scaled(y, factor):
        return y * factor, 2 * y

    def forward(y, factor):
        assert y.perturbed
        assert not factor.perturbed
        return scaled(y.value, factor.value), factor.value

    def backward(factor, cotangents):
        return cotangents[0] * factor, None

    scaled.defvjp(forward, backward, symbolic_zeros=True)

    @jax.custom_jvp
    def shifted(y, shift):
        return y + shift

    def rule(primals, tangents):
        moved, fixed = tangents
        assert isinstance(fixed, SymbolicZero)
        return shifted(*primals), moved

    shifted.defjvp(rule, symbolic_zeros=True)

    def f(p, x):
        h = shifted(x @ p["w"], x[0])
        return mean_square(p, scaled(h, 1 + x[0])[0])

    check(f, P, X, scales=(1.0,))


def test_complex_numbers():
    def f(p, x):
        return jnp.mean(jnp.tanh(jnp.abs(jnp.fft.rfft(x @ p["w"]) * 1j)))

    check(f, P, X)


def test_effects_run_once(capsys):
    def f(w):
        h = X @ w
        jax.debug.print("mean {}", jnp.mean(h))
        h, _ = jax.lax.scan(lambda h, _: (jnp.tanh(h @ w), None), h, length=2)
        return jnp.mean(h**2)

    found = products(autocast(f), P["w"])
    assert all(x == {"float16"} for x in found)
    found = jax.jit(jax.value_and_grad(autocast(f)))(P["w"])
    jax.effects_barrier()
    assert capsys.readouterr().out.count("mean") == 1
    assert errors(found, jax.value_and_grad(f)(P["w"])) < 0.01


def test_a_rule_that_masks_what_a_product_returned():
    keep = np.arange(8) % 2 == 0

    @jax.custom_jvp
    def masked(h):
        return h * jnp.where(keep, 1.0, 0.0)

    masked.defjvp(functools.partial(jax.jvp, masked.fun))
    check(lambda p, x: jnp.mean((masked(x @ p["w"]) @ p["w"]) ** 2), P, X)


def test_a_rule_that_repeats_a_float32_loop_is_float32():
    """As in solvers of differential equations, whose loops end by floats."""

    def step(w, y):
        return y + 0.1 * jnp.tanh(y @ w)

    def end(w, y):
        ends = lambda s: s[0] < 0.95  # noqa: E731
        return lax.while_loop(ends, lambda s: (s[0] + 0.1, step(w, s[1])), (0.0, y))[1]

    def backward(saved, cotangent):
        again = lambda w, y: lax.fori_loop(0, 10, lambda _, y: step(w, y), y)  # noqa: E731
        return jax.vjp(again, *saved)[1](cotangent)

    solved = jax.custom_vjp(end)
    solved.defvjp(lambda w, y: (end(w, y), (w, y)), backward)
    f = lambda p, x: jnp.mean((solved(p["w"], x) @ p["w"]) ** 2)  # noqa: E731
    found = products(autocast(f), P, X)
    assert found.count({"float16"}) == 3  # of the product after the loop
    assert found.count({"float32"}) == len(found) - 3 > 3
