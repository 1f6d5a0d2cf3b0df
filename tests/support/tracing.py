"""What the tests of `trace_numerics` share."""

from pathlib import Path

import jax.numpy as jnp

from optax_lossscale.diagnostics._trace import equations

TWO = jnp.array([1.0, 2.0], jnp.float32)


def line_of(mark, file):
    """Returns the number of the line of a file that ends with a comment."""
    lines = Path(file).read_text().splitlines()
    (found,) = (i for i, text in enumerate(lines, 1) if text.endswith(f"# {mark}"))
    return found


def total(x):
    return jnp.sum(x.astype(jnp.float32))


def half(x):
    return x.astype(jnp.float16)


def assert_found(trace, mark, phase="forward", **expected):
    """Asserts that the first inf or nan begins in the line with a comment."""
    found = trace.first_nonfinite
    assert Path(found.file).name.startswith("test_trace")
    line = line_of(mark, found.file)
    assert (found.line, found.phase) == (line, phase), str(found)
    assert {k: getattr(found, k) for k in expected} == expected
    assert not found.output.is_finite
    assert trace.findings[0].kind != "fine"


def run_eagerly(jaxpr, consts, args):
    """Runs a jaxpr equation by equation; yields each equation and its results."""
    values = dict(zip(jaxpr.constvars, consts, strict=True))
    values |= zip(jaxpr.invars, args, strict=True)

    def read(x):
        return x.val if hasattr(x, "val") else values[x]

    for equation in jaxpr.eqns:
        inputs = list(map(read, equation.invars))
        if equation.primitive.name in equations.CALLS:
            inner = equations.opened(equations.called_jaxpr(equation))
            found = yield from run_eagerly(*inner, inputs)
        else:
            found = equations.bind(equation, inputs)
            yield equation, found
        values.update(zip(equation.outvars, found, strict=True))
    return list(map(read, jaxpr.outvars))
