"""`trace_numerics` names the user's line, and the lines that called it, everywhere."""

import runpy
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arithmetic import TWO, half, total
from flax import linen, nnx
from jax import lax
from tracing import line_of, sites_of

from optax_lossscale import autocast
from optax_lossscale._jaxprs.lines import Source
from optax_lossscale.diagnostics import trace_numerics
from optax_lossscale.diagnostics._trace.run import named

HERE = "/".join(Path(__file__).parts[-2:])
# The second is Python 3.13's without a terminal; the fifth is PyCharm's.
CONSOLES = (
    "<stdin>", "<stdin>-0", "<python-input-4>", "<console>", "<input>", "<string>",
    "<ipython-input-3-0a1b>", "/tmp/ipykernel_12/3456.py", "<doctest model.loss[1]>",
)  # fmt: skip
NOT_THE_USERS = (
    "", "<frozen runpy>", "<__array_function__ internals>",
    "<attrs generated init Layer>", "<@beartype(model.layer) at 0x7f00>",
    runpy.__file__, nnx.__file__,
)  # fmt: skip


def lines(*marks):
    return tuple(line_of(mark, __file__) for mark in marks)


def leaf(x):
    return jnp.sin(x)  # leaf


def block(x):
    return leaf(x)  # block


cached = jax.jit(block)


def through_jit(x):
    return cached(x)  # jit


def through_scan(x):
    def body(x, _):
        return jax.vmap(lambda x: block(x))(x), None  # body

    return lax.scan(body, x, length=2)[0]  # scan


CHAINS = {
    through_jit: ("block", "jit"),
    through_scan: ("block", "body", "scan"),
}


def test_files_of_the_user():
    def compiled(file):
        scope = {"jnp": jnp}
        exec(compile("\n\ndef f(x):\n    return jnp.exp(x)", file, "exec"), scope)
        return scope["f"]

    functions = list(map(compiled, CONSOLES + NOT_THE_USERS))

    def loss_fn(w):
        return total(sum(f(half(w)) for f in functions))  # exec

    sources = [x.source for x in sites_of(loss_fn, TWO) if x.primitive == "exp"]
    found = {(x.file, x.line) for x in sources}
    assert found == {(__file__, *lines("exec")), *((file, 4) for file in CONSOLES)}


def test_cells_of_a_notebook():
    interactive = pytest.importorskip("IPython.core.interactiveshell")
    shell = interactive.InteractiveShell.instance()
    shell.run_cell("import jax.numpy as jnp", store_history=True)
    shell.run_cell("def f(x):\n    return jnp.exp(x)", store_history=True)
    found = sites_of(lambda w: total(shell.user_ns["f"](half(w))), TWO)
    places = {named(*x.source.own) for x in found if x.primitive == "exp"}
    interactive.InteractiveShell.clear_instance()
    assert places == {"In[2]:2, in f"}


@pytest.mark.parametrize("function", CHAINS)
def test_callers(function):
    def loss_fn(w):
        return total(function(half(w)))  # loss

    # JAX keeps what it traced first, with its lines.
    jax.make_jaxpr(jax.grad(lambda w: total(function(half(w)))))(TWO)
    found = [x.source for x in sites_of(loss_fn, TWO) if x.primitive == "sin"]
    assert {(x.file, x.line) for x in found} == {(__file__, *lines("leaf"))}
    callers = {tuple(line for _, line, _ in x.callers) for x in found}
    assert callers == {lines(*CHAINS[function], "loss")}


def test_a_rule_that_jax_traced_for_another_line():
    def loss_fn(w):
        first = jax.nn.relu(w @ w)  # first rule
        second = jax.nn.relu(first @ w)  # second rule
        return jnp.mean(second)

    sites = sites_of(autocast(loss_fn), np.eye(3, dtype=np.float32))
    found = [x.source.line for x in sites if x.primitive in ("max", "select_n")]
    first, second = lines("first rule", "second rule")
    assert found == [first, second, second, first]


def test_a_rule_in_a_rule():
    @jax.custom_jvp
    def wave(x):
        return jnp.sin(x)

    wave.defjvp(lambda x, t: (wave(*x), jnp.cos(x[0]) * t[0]))

    @autocast
    def inner(w):
        return jnp.sum(jnp.square(wave(w @ w)))  # wave

    def loss_fn(w):
        return jnp.sum(jnp.square(jax.grad(inner)(w)))

    sites = sites_of(loss_fn, np.eye(2, dtype=np.float32))
    found = [x.source.line for x in sites if x.primitive in ("sin", "cos")]
    assert len(found) > 2
    assert set(found) == set(lines("wave"))


def test_callers_while_another_thread_trains():
    stop = threading.Event()

    def train():
        while not stop.is_set():
            jax.jit(jax.grad(lambda w: total(through_jit(half(w)))))(TWO)

    with ThreadPoolExecutor() as pool:
        training = pool.submit(train)
        try:
            test_callers(through_jit)
        finally:
            stop.set()
        training.result()


def test_a_fault_in_a_library(tmp_path):
    file = tmp_path / "site-packages" / "layers" / "norm.py"
    file.parent.mkdir(parents=True)
    code = "import jax.numpy as jnp\ndef f(x): return jnp.exp(x)\n"
    file.write_text(f"{code}def g(x): return f(x)\ndef layer(x): return g(x)")
    layer = runpy.run_path(str(file))["layer"]

    def model(x):
        return jax.jit(layer)(x)  # library

    def run(w, depth):
        return model(w) if depth == 0 else run(w, depth - 1)  # run

    def loss_fn(w):
        return total(run(half(w), 5))

    trace = trace_numerics(loss_fn, TWO * 10)
    found = trace.first_nonfinite
    library, run_at = lines("library", "run")
    assert [line for _, line, _ in found.callers[:4]] == [3, 4, library, run_at]
    inside = "test_a_fault_in_a_library.<locals>"
    assert str(found) == (
        f"exponential at layers/norm.py:2, in f, called from {HERE}:{library}, "
        f"in {inside}.model, called from {HERE}:{run_at}, in {inside}.run, called from "
        f"{HERE}:{run_at + 3}, in {inside}.loss_fn, float16[2], forward pass"
    )
    message = trace.findings[0].message
    assert message.count("layers/norm.py:2, in f") == 1
    assert f"compute the call at {HERE}:{library}" in message


def test_lines_are_equal_whoever_calls_them():
    line = "model.py", 3, "layer"
    found = {Source(*line, callers=(("train.py", i, "loss"),)) for i in range(2)}
    assert len(found) == 1


class Block(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.remat(linen.Dense)(2, dtype=jnp.float16, name="a")(x)
        return linen.jit(linen.remat(linen.Dense))(2, dtype=jnp.float16, name="b")(x)


def block_of_haiku():
    import haiku as hk

    def block(x):
        return hk.to_module(lambda x: hk.remat(hk.Linear(2, name="a"))(x))("Block")(x)

    return hk.without_apply_rng(hk.transform(block))


SCOPES = {Block: {"Block/a", "Block/b"}, block_of_haiku: {"Block/a"}}


@pytest.mark.parametrize("make", SCOPES)
def test_scopes_of_what_is_computed_again(make):
    model, x = make(), np.ones((2, 2), np.float16)
    params = model.init(jax.random.key(0), x)
    sites = sites_of(lambda p: total(model.apply(p, x)), params)
    assert {x.scope for x in sites} == {*SCOPES[make], ""}
    backward = {x.scope for x in sites if x.phase == "backward"}
    assert backward >= SCOPES[make]
